"""Window: the most recent tokens and nothing else; the control that fails."""

from dataclasses import dataclass

from kvevict.policy import Policy, check_tokens


@dataclass(frozen=True)
class Window(Policy, name="window"):
    """Keep the most recent tokens only: window attention without sinks, the failing control.

    Source: the "window attention" baseline of Xiao et al. 2023 (arXiv:2309.17453), figure 1b.

    Args:
        window: tokens kept.
    """

    window: int = 1024

    def __post_init__(self) -> None:
        check_tokens(self, "window", minimum=1)

    @property
    def extents(self) -> tuple[int, int, int]:
        """No head, the window, no importance part."""
        return 0, self.window, 0
