"""OpenCode's compaction: a summary with headings, a verbatim tail, the last message replayed."""

from dataclasses import dataclass

from kvevict.agent import edit
from kvevict.agent.choosing import block_size, oldest_until, others, real_users
from kvevict.agent.history import History, Message
from kvevict.agent.message_policy import (
    Context,
    Limits,
    MessagePolicy,
    Stage,
    check_count,
    check_share,
)
from kvevict.agent.policies._opencode import prunable
from kvevict.agent.verbs import LANGUAGE, ask_summary, compact, mask

HEADINGS = ("Goal", "Instructions", "Discoveries", "Accomplished", "Relevant files")
QUESTION = "What did we do so far?"
CONTINUE = "Continue if you have next steps, or stop and ask for clarification if you are unsure."
REPLAY = "(The last message again, after compaction)\n"
PROMPT = (
    "Provide a detailed prompt for continuing our conversation above, for another agent that has "
    "none of it. Use the headings " + ", ".join(HEADINGS) + ". " + LANGUAGE
)


@dataclass(frozen=True)
class OpenCodeCompact(MessagePolicy, name="opencode_compact"):
    """Summarise the head, keep a verbatim tail, and end on the user's last message.

    Source: sst/opencode@31e22f65, `session/compaction.ts` (READ): usable is limit.input -
    reserved or W - O - reserved with reserved min(20,000, O); the tail is a quarter of usable,
    2,000 to 15,000 tokens, in whole turns; earlier summaries are handed over and hidden; tool
    outputs go to the summariser cut to 2,000 characters; the summary is the assistant's answer to
    "What did we do so far?"; afterwards the last user message is replayed (or "Continue ..."). At
    usable <= 0 it never compacts (issue 31152). Differs: the tail ends at whole atoms; a replayed
    message whose original still stands in the tail is marked as a repetition.

    Args:
        limit_input: the model's input limit, where it has one of its own; 0 means none.
        reserve: most tokens reserved.
        tail_share: share of usable that stays verbatim.
        tail_least: tokens of the tail at least.
        tail_most: tokens of the tail at most.
        clip: characters of each tool output in the summariser's input.
        prune: hide old tool outputs first (PRUNE_PROTECT 40,000, PRUNE_MINIMUM 20,000).
    """

    limit_input: int = 0
    reserve: int = 20_000
    tail_share: float = 0.25
    tail_least: int = 2_000
    tail_most: int = 15_000
    clip: int = 2_000
    prune: bool = True

    markers = (QUESTION, REPLAY, CONTINUE)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("limit_input", "reserve", "tail_least", "tail_most", "clip"):
            check_count(self, name)
        check_share(self, "tail_share")

    def usable(self, limits: Limits) -> int:
        """Return the tokens that a request may have; 0 or less means never compact."""
        reserved = min(self.reserve, limits.max_output)
        if self.limit_input:
            return self.limit_input - reserved
        return limits.window - limits.max_output - reserved

    def threshold(self, limits: Limits) -> int:
        """Return usable."""
        return self.usable(limits)

    def due(self, view: History, context: Context) -> bool:
        """Whether usable is reached; never where nothing is usable, unless asked for."""
        if context.moment.force:
            return True
        return self.trigger_tokens(context.limits) > 0 and super().due(view, context)

    def stages(self) -> tuple[Stage, ...]:
        """Prune first, it asks no model; then compact."""
        compaction = Stage("compact", "summarise", self._compact, self.due, self.min_gain)
        if not self.prune:
            return (compaction,)
        return (Stage("prune", "mask", self._prune, self._prunes), compaction)

    def _prunes(self, view: History, context: Context) -> bool:
        return not context.moment.force and self.due(view, context)

    def _prune(self, view: History, context: Context) -> History | None:
        at = prunable(view, context, 40_000, 2, ("skill",))
        if sum(block_size(view, place, context) for place in at) <= 20_000:
            return None
        return mask(view, context, at)

    def tail(self, view: History, context: Context) -> set[int]:
        """Return the messages of the verbatim tail: the newest whole groups that fit."""
        share = int(self.tail_share * max(0, self.usable(context.limits)))
        room = min(self.tail_most, max(self.tail_least, share))
        # A tail as large as the history would leave nothing to compact.
        room = min(room, context.estimate(view) // 4)
        older = oldest_until(view, context, set(), context.estimate(view) - room)
        return set(range(len(view))) - older

    def _compact(self, view: History, context: Context) -> History | None:
        keep = self.roots(view) | self.tail(view, context)
        gone = others(view, keep)
        prompt = PROMPT
        text = ask_summary(
            view, context, gone, prompt, HEADINGS, self.summary_tokens, _wrap, self.clip
        )
        if text is None:
            return None
        before = [edit.inserted(QUESTION), edit.inserted(text, "assistant")]
        # The summary stands in front of all that stays, so the newest instruction ends the request.
        return compact(view, gone, before, self._replayed(view, gone), at=view.prefix)

    def _replayed(self, view: History, gone: set[int]) -> list[Message]:
        """Return what ends the request: nothing where the last user message already does."""
        users = real_users(view)
        if not users:
            return [edit.inserted(CONTINUE, note="replay")]
        last = users[-1]
        if all(i in gone for i in range(last + 1, len(view))):
            return []
        text = view.messages[last].text or CONTINUE
        return [edit.inserted(REPLAY + text, note="replay")]


def _wrap(text: str) -> str:
    return f"{QUESTION}\n{text}"
