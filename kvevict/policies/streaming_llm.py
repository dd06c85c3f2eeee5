"""StreamingLLM: attention sinks and a sliding window."""

from dataclasses import dataclass

from kvevict.policy import Policy, check_tokens


@dataclass(frozen=True)
class StreamingLLM(Policy, name="streaming_llm"):
    """Keep the first tokens (attention sinks) and a sliding window of the most recent.

    Source: Xiao et al. 2023 (arXiv:2309.17453), section 3.2. As in the authors' code eviction
    comes after attention, so a full cache shows sinks + window stored tokens and the token itself.

    Args:
        sinks: tokens kept from the start of the stream.
        window: most recent tokens kept.
    """

    sinks: int = 4
    window: int = 1020

    def __post_init__(self) -> None:
        check_tokens(self, "sinks")
        check_tokens(self, "window", minimum=1)

    @property
    def extents(self) -> tuple[int, int, int]:
        """The sinks, the window, no importance part."""
        return self.sinks, self.window, 0
