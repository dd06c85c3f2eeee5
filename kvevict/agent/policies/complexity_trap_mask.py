"""The Complexity Trap's observation masking: tool outputs older than the last M turns go."""

from dataclasses import dataclass

from kvevict.agent.message_policy import MessagePolicy, Stage, check_count
from kvevict.agent.policies._trap import mask_old


@dataclass(frozen=True)
class ComplexityTrapMask(MessagePolicy, name="complexity_trap_mask"):
    """Mask observations older than the last M turns; reasoning and actions all stay.

    Source: The Complexity Trap (arXiv:2508.21433): M = 10, every turn. A turn is one step of the
    model with its results. `polling=10` masks in batches: measured 31 % cheaper with prompt
    caching on a real session (36.18 against 25.31 dollars, facts 3.4).

    Args:
        m: turns whose observations stay.
    """

    m: int = 10

    keeps_first = True
    keeps_last = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "m", 1)

    def stages(self) -> tuple[Stage, ...]:
        """One stage, every turn."""
        return (
            Stage(
                "mask",
                "mask",
                lambda view, context: mask_old(view, context, self.m, self.polling),
                self.due,
                self.min_gain,
            ),
        )
