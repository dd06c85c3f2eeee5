"""Letta's sliding window summary."""

from dataclasses import dataclass

from kvevict.agent import edit
from kvevict.agent.choosing import others
from kvevict.agent.history import History
from kvevict.agent.message_policy import (
    Context,
    Limits,
    MessagePolicy,
    Stage,
    check_count,
    check_share,
)
from kvevict.agent.verbs import LANGUAGE, ask_summary, compact

PREFIX = "[Summary of the messages before]\n"
PROMPT = (
    "Summarise the messages above so that the agent can go on without them: what the user wants, "
    "facts, decisions, what is under way. " + LANGUAGE
)


@dataclass(frozen=True)
class LettaSliding(MessagePolicy, name="letta_sliding"):
    """Summarise a growing share of the oldest messages until the rest is small enough.

    Source: Letta, `summarizer_sliding_window` (READ): the evicted share starts at 0.3 and grows by
    0.1 until the kept tokens are below (1 - 0.3) W; the cutoff is an assistant message; the
    summary stands behind the system message; text is clipped; a pending approval and the last
    message stay; sliding falls back to summarising all. The trigger's share of the window (0.9)
    is an assumption.

    Args:
        share: first share of the messages that leaves; 1 - share of the window may stay.
        step: growth of the share.
        trigger_share: share of the window that starts it.
        clip: characters of each tool result in the summariser's input.
    """

    share: float = 0.3
    step: float = 0.1
    trigger_share: float = 0.9
    clip: int = 2_000

    markers = (PREFIX,)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("share", "step", "trigger_share"):
            check_share(self, name)
        check_count(self, "clip", 1)

    def threshold(self, limits: Limits) -> int:
        """Return the share of the window."""
        return int(limits.window * self.trigger_share)

    def stages(self) -> tuple[Stage, ...]:
        """One stage."""
        return (Stage("sliding_window", "summarise", self._slide, self.due, self.min_gain),)

    def cutoff(self, view: History, context: Context) -> int:
        """Return the first message that stays, `len(view)` when only "all" is small enough."""
        sizes = context.sizes(view)
        starts = [g.start for g in view.groups if g.role == "assistant" and g.start > view.prefix]
        share = self.share
        while share < 1.0:
            wanted = view.prefix + int((len(view) - view.prefix) * share)
            cut = next((start for start in starts if start >= wanted), None)
            if cut is None:
                break
            if sum(sizes[cut:]) < (1 - self.share) * context.limits.window:
                return cut
            share += self.step
        return len(view)

    def _slide(self, view: History, context: Context) -> History | None:
        cut = self.cutoff(view, context)
        roots = self.roots(view)
        gone = others(view, roots, cut)
        text = ask_summary(view, context, gone, PROMPT, (), self.summary_tokens, _wrap, self.clip)
        if text is None:
            return None
        return compact(view, gone, [edit.inserted(_wrap(text))], at=view.prefix)


def _wrap(text: str) -> str:
    return PREFIX + text
