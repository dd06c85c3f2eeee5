"""pi's compaction: an iterative summary and the newest 20,000 tokens."""

from dataclasses import dataclass

from kvevict.agent import edit
from kvevict.agent.choosing import others
from kvevict.agent.history import History
from kvevict.agent.message_policy import Context, Limits, MessagePolicy, Stage, check_count
from kvevict.agent.verbs import LANGUAGE, ask_summary, compact

PREFIX = "The conversation history before this point was compacted into the following summary:\n"
HEADINGS = (
    "Goal",
    "Constraints & Preferences",
    "Progress",
    "Key Decisions",
    "Next Steps",
    "Critical Context",
)
PROMPT = (
    "Summarise the conversation for another LLM that continues it. Keep file paths, function names "
    "and error messages exact. " + LANGUAGE
)
SPLIT = "This is the beginning of a turn that goes on below; say what it is about. " + LANGUAGE


@dataclass(frozen=True)
class Pi(MessagePolicy, name="pi"):
    """Summarise everything before the newest 20,000 tokens; a split turn gets its own part.

    Source: pi@83378aad, `compaction` (READ): starts above W - 16,384 (usage plus an estimate of
    what came after it); walks back until 20,000 estimated tokens; cuts at a user or assistant
    message, never at a tool result; the start of a turn that the cut splits is summarised apart;
    the summary is iterative. pi's own estimator (characters / 4) counts a quarter too little.

    Args:
        reserve: tokens below the window that start it.
        tail: newest tokens that stay.
    """

    reserve: int = 16_384
    tail: int = 20_000

    markers = (PREFIX,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "reserve")
        check_count(self, "tail", 1)

    def threshold(self, limits: Limits) -> int:
        """Return W - reserve, at least W / 2 (small windows)."""
        return max(limits.window - self.reserve, limits.window // 2)

    def stages(self) -> tuple[Stage, ...]:
        """One stage."""
        return (Stage("compact", "summarise", self._compact, self.due, self.min_gain),)

    def cutoff(self, view: History, context: Context) -> int:
        """Return the first message that stays: the group in which the tail's tokens are reached."""
        # Never all of a small window: the next call would compact again.
        trigger = self.trigger_tokens(context.limits)
        tail = min(self.tail, context.estimate(view) // 2, trigger // 2)
        total = 0
        for group in reversed(view.groups):
            total += sum(context.size(view.messages[i]) for i in range(group.start, group.stop))
            if total >= tail:
                # The whole group stays unless it is larger than the tail alone.
                return group.start if total <= 2 * tail else group.stop
        return view.prefix

    def _compact(self, view: History, context: Context) -> History | None:
        cut = max(self.cutoff(view, context), view.prefix)
        roots = self.roots(view)
        gone = others(view, roots, cut)
        prompt = PROMPT
        turn = next((t for t in view.turns if t.start < cut < t.stop), None)
        if turn is not None:
            prompt = f"{PROMPT}\nThe messages from {turn.start} on are the start of a turn. {SPLIT}"
        headings = HEADINGS if turn is None else (*HEADINGS, "Start of the current turn")
        text = ask_summary(view, context, gone, prompt, headings, self.summary_tokens, _wrap)
        if text is None:
            return None
        return compact(view, gone, [edit.inserted(_wrap(text))], at=view.prefix)


def _wrap(text: str) -> str:
    return PREFIX + text
