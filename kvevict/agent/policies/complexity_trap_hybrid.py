"""The Complexity Trap's hybrid: mask always, summarise seldom."""

from dataclasses import dataclass

from kvevict.agent.choosing import anchors
from kvevict.agent.history import History
from kvevict.agent.message_policy import Context, MessagePolicy, Stage, check_count
from kvevict.agent.policies._trap import PREFIX, mask_old, summarise_oldest, unsummarised


@dataclass(frozen=True)
class ComplexityTrapHybrid(MessagePolicy, name="complexity_trap_hybrid"):
    """Mask observations older than M turns, and summarise N turns once N + M are there.

    Source: The Complexity Trap (arXiv:2508.21433): M = 10 as in masking; N = 43 is known from
    secondary sources only (SEED).

    Args:
        n: turns summarised at a time.
        m: turns whose observations stay.
    """

    n: int = 43
    m: int = 10

    markers = (PREFIX,)
    keeps_first = True
    keeps_last = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "n", 1)
        check_count(self, "m", 1)

    def stages(self) -> tuple[Stage, ...]:
        """Mask first, it is free; then the summary."""
        return (
            Stage(
                "mask",
                "mask",
                lambda view, context: mask_old(view, context, self.m, self.polling),
                self.due,
                self.min_gain,
            ),
            Stage("summary", "summarise", self._summarise, self._many, self.min_gain),
        )

    def _many(self, view: History, context: Context) -> bool:
        waiting = len(unsummarised(view, anchors(view, True, False)))
        return self.due(view, context) and waiting >= self.n + self.m

    def _summarise(self, view: History, context: Context) -> History | None:
        return summarise_oldest(view, context, self.n, self.roots(view), self.summary_tokens)
