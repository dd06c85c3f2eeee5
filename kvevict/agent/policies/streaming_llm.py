"""streaming_llm at message granularity: the first groups and a window of the most recent."""

from dataclasses import dataclass

from kvevict.agent.message_policy import Limits, check_count
from kvevict.agent.policies._groups import GroupPolicy
from kvevict.policies import StreamingLLM


@dataclass(frozen=True)
class StreamingLLMGroups(GroupPolicy, name="streaming_llm"):
    """Keep the first groups and the most recent ones, as StreamingLLM does with tokens.

    Source: Xiao et al. 2023 (arXiv:2309.17453); `kvevict.policies.StreamingLLM` itself chooses.

    Args:
        sinks: tokens from the start of the history; filled with whole groups.
        window: most recent tokens; None means what W - O leaves.
    """

    sinks: int = 4
    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "sinks")
        if self.window is not None:
            check_count(self, "window", 1)

    def vocabulary(self, limits: Limits) -> StreamingLLM:
        """Return the token policy of the same name."""
        window = max(1, self.room(limits) - self.sinks) if self.window is None else self.window
        return StreamingLLM(self.sinks, window)
