"""The Complexity Trap's LLM summary: the oldest N turns into one message when N + M are there."""

from dataclasses import dataclass

from kvevict.agent.choosing import anchors
from kvevict.agent.history import History
from kvevict.agent.message_policy import Context, MessagePolicy, Stage, check_count
from kvevict.agent.policies._trap import PREFIX, summarise_oldest, unsummarised


@dataclass(frozen=True)
class ComplexityTrapSummary(MessagePolicy, name="complexity_trap_summary"):
    """Summarise the oldest N turns together with the summary before them; the last M stay.

    Source: The Complexity Trap (arXiv:2508.21433), the OpenHands-style baseline: N = 21, M = 10.

    Args:
        n: turns summarised at a time.
        m: turns that always stay.
    """

    n: int = 21
    m: int = 10

    markers = (PREFIX,)
    keeps_first = True
    keeps_last = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "n", 1)
        check_count(self, "m", 1)

    def stages(self) -> tuple[Stage, ...]:
        """One stage, when N + M turns are not summarised."""
        return (Stage("summary", "summarise", self._summarise, self._many, self.min_gain),)

    def _many(self, view: History, context: Context) -> bool:
        # The newest group is a root: it counts among the last M.
        waiting = len(unsummarised(view, anchors(view, True, False)))
        return self.due(view, context) and waiting >= self.n + self.m

    def _summarise(self, view: History, context: Context) -> History | None:
        return summarise_oldest(view, context, self.n, self.roots(view), self.summary_tokens)
