"""Anthropic's context editing `clear_thinking_20251015`."""

from dataclasses import dataclass

from kvevict.agent import edit
from kvevict.agent.choosing import choose
from kvevict.agent.history import THINKING_KINDS, History
from kvevict.agent.message_policy import Context, MessagePolicy, Stage
from kvevict.errors import PolicyError
from kvevict.policies import Window


@dataclass(frozen=True)
class AnthropicClearThinking(MessagePolicy, name="anthropic_clear_thinking"):
    """Remove the thinking of all but the last assistant turns, whole blocks only.

    Source: Anthropic's context editing documentation: `keep` 1 thinking turn, "all" keeps the
    prompt cache. A turn runs from a typed user message to the next; the latest one is never
    touched (I4).

    Args:
        keep: assistant turns with thinking that keep it, or "all".
    """

    keep: int | str = 1

    keeps_first = True
    keeps_last = True

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.keep == "all" or (
            isinstance(self.keep, int) and not isinstance(self.keep, bool) and self.keep >= 1
        )
        if not good:
            raise PolicyError(f'{self.name}.keep={self.keep!r}: give at least 1, or "all"')

    def stages(self) -> tuple[Stage, ...]:
        """One stage, on every request."""
        return (Stage("clear_thinking", "drop", self._clear, self.due, self.min_gain),)

    def _clear(self, view: History, context: Context) -> History | None:
        if isinstance(self.keep, str):
            return None
        found = [at for at in view.find(*THINKING_KINDS) if not view.block(at).protected]
        turns = sorted({self._turn(view, at[0]) for at in found})
        kept = choose(Window(self.keep), [1] * len(turns))
        old = {turn for turn, stays in zip(turns, kept, strict=True) if not stays}
        old.discard(len(view.turns) - 1)
        gone = [
            at
            for at in found
            if self._turn(view, at[0]) in old
            # A message that is nothing but thinking stays: its group may need it.
            and any(b.kind not in THINKING_KINDS for b in view.messages[at[0]].blocks)
        ]
        return edit.drop_blocks(view, gone) if gone else None

    def _turn(self, view: History, message: int) -> int:
        return next(i for i, turn in enumerate(view.turns) if turn.start <= message < turn.stop)
