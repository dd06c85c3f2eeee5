"""MemGPT: warn near the limit, flush the oldest into a recursive summary, page back by search."""

from dataclasses import dataclass

from kvevict.agent import edit
from kvevict.agent.choosing import others, whole
from kvevict.agent.history import History
from kvevict.agent.message_policy import (
    Context,
    Limits,
    MessagePolicy,
    Stage,
    check_count,
    check_share,
)
from kvevict.agent.verbs import LANGUAGE, append, ask_summary, compact

WARNING = (
    "Warning: the conversation history will soon reach its maximum length and be trimmed. Make "
    "sure to save any important information from the conversation to your memory before it is "
    "removed."
)
PREFIX = "Note: prior messages have been hidden from view due to conversation memory constraints"
PROMPT = (
    "Your job is to summarise a history of previous messages in a conversation between an AI "
    "persona and a human, from the AI's perspective (first person), the main messages only. "
    + LANGUAGE
)


@dataclass(frozen=True)
class MemGPT(MessagePolicy, name="memgpt"):
    """Warn once above 0.75 W; on overflow summarise the oldest three quarters of the queue.

    Source: cpacker/MemGPT `constants.py` and `agent.py` (READ): MESSAGE_SUMMARY_WARNING_FRAC 0.75,
    MESSAGE_SUMMARY_TRUNC_TOKEN_FRAC 0.75, MESSAGE_SUMMARY_TRUNC_KEEP_N_LAST 3; the flush comes
    with the context-overflow error (the paper says at 70 % and 100 %); a cutoff on a user message
    moves on by one; the summary is a user message with the counts of hidden messages; the warning
    is given anew after a flush. Every message ever seen is in `manager.recall`, searchable and
    paged back in. Differs: the cutoff moves on to the end of its group.

    Args:
        warn: share of the window from which the model is warned.
        flush: share of the window from which the oldest leave.
        evict: share of the queue's tokens that leaves.
        keep_last: newest messages that never leave.
    """

    warn: float = 0.75
    flush: float = 1.0
    evict: float = 0.75
    keep_last: int = 3

    markers = (WARNING, PREFIX)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("warn", "flush", "evict"):
            check_share(self, name)
        check_count(self, "keep_last")

    def threshold(self, limits: Limits) -> int:
        """Return the window."""
        return int(limits.window * self.flush)

    def stages(self) -> tuple[Stage, ...]:
        """Flush where there is need, else warn."""
        return (
            Stage("flush", "summarise", self._flush, self.due, self.min_gain),
            Stage("warning", "warn", self._warn, self._unwarned, grows=True),
        )

    def _unwarned(self, view: History, context: Context) -> bool:
        level = self.warn * context.limits.window
        if context.total(view) <= level:
            context.memory["warned"] = False
            return False
        if context.memory.get("warned") or context.moment.force:
            return False
        return not any(m.text == WARNING for m in view.messages[-8:])

    def _warn(self, view: History, context: Context) -> History:
        context.memory["warned"] = True
        return append(view, edit.inserted(WARNING, note="warning"))

    def cutoff(self, view: History, context: Context) -> int:
        """Return the first message that stays: where `evict` of the queue's tokens is reached."""
        sizes = context.sizes(view)
        start, end = view.prefix, max(view.prefix, len(view) - self.keep_last)
        wanted = int(sum(sizes[start:]) * self.evict)
        total = 0
        cut = end
        for i in range(start, end):
            total += sizes[i]
            if total > wanted:
                cut = i + 1
                break
        if cut < end and view.messages[cut].role == "user":
            cut += 1
        return next((c for c in view.cuts if c >= cut), len(view))

    def _flush(self, view: History, context: Context) -> History | None:
        cut = self.cutoff(view, context)
        last = set(range(max(0, len(view) - self.keep_last), len(view)))
        roots = whole(view, self.roots(view) | last)
        gone = others(view, roots, cut)
        if len(gone) <= 1:
            return None  # one message cannot be summarised into fewer: no endless loop
        counts = f"({len(gone)} of {context.moment.seen} messages)"

        def wrap(text: str) -> str:
            return f"{PREFIX} {counts}.\nThe following is a summary of them:\n{text}"

        text = ask_summary(view, context, gone, PROMPT, (), self.summary_tokens, wrap)
        if text is None:
            return None
        context.memory["warned"] = False
        return compact(view, gone, [edit.inserted(wrap(text))], at=view.prefix)
