"""OpenHands' LLMSummarizingCondenser."""

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
from kvevict.agent.summarizers import SummaryInput
from kvevict.agent.verbs import LANGUAGE, ask_summary, compact, most_summary, plain
from kvevict.errors import PolicyError

PREFIX = "<CONVERSATION SUMMARY>\n"
HEADINGS = (
    "USER_CONTEXT",
    "TASK_TRACKING",
    "COMPLETED",
    "PENDING",
    "CODE_STATE",
    "TESTS",
    "CHANGES",
)
PROMPT = (
    "You are maintaining a context-aware state summary for an interactive agent. Track "
    + ", ".join(HEADINGS)
    + "; keep ids, paths and error messages exact. "
    + LANGUAGE
)


@dataclass(frozen=True)
class OpenHands(MessagePolicy, name="openhands"):
    """Summarise the middle: the first events and the newer half of the target stay.

    Source: OpenHands SDK@611629e6, `LLMSummarizingCondenser` (READ): more than max_size 240
    events is a soft need, more tokens than max_tokens or the limit a hard one; the target is
    max_size / 2 (with tokens: half of the limit); from keep_first 2 up to N - (target -
    keep_first - 1) events are forgotten, both ends moved to places that break nothing
    (`manipulation_indices`, here `History.cuts`); less than a tenth of progress is a failure; a
    soft failure goes on uncondensed, a hard one summarises everything, each event's text shrunk
    by 0.8 for up to 5 tries. An event is a message here.

    Args:
        max_size: events above which the middle is condensed.
        keep_first: first events that stay.
        max_tokens: tokens above which it must be condensed; 0 means W - O.
        progress: share of the events that must go at least.
        tries: tries of the hard reset.
    """

    max_size: int = 240
    keep_first: int = 2
    max_tokens: int = 0
    progress: float = 0.1
    tries: int = 5

    markers = (PREFIX,)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("keep_first", "max_tokens", "tries"):
            check_count(self, name)
        check_count(self, "max_size", 2)
        check_share(self, "progress")
        if self.keep_first >= self.max_size // 2:
            raise PolicyError(f"openhands.keep_first={self.keep_first}: below max_size / 2")

    def threshold(self, limits: Limits) -> int:
        """Return the hard limit in tokens."""
        return self.max_tokens or limits.usable

    def stages(self) -> tuple[Stage, ...]:
        """Condense the middle; where that failed and must be, reset."""
        return (
            Stage("condense", "summarise", self._condense, self._needed, self.min_gain),
            Stage("hard_context_reset", "summarise", self._reset, self._hard, self.min_gain),
        )

    def _hard(self, view: History, context: Context) -> bool:
        return self.due(view, context)

    def _needed(self, view: History, context: Context) -> bool:
        return len(view) > self.max_size or self._hard(view, context)

    def middle(self, view: History, context: Context) -> set[int]:
        """Return the events that are forgotten."""
        count = len(view)
        target = self.max_size // 2
        if self._hard(view, context):
            target = min(target, count // 2)
            sizes = context.sizes(view)
            half = self.trigger_tokens(context.limits) // 2
            tail = 0
            total = 0
            for size in reversed(sizes):
                total += size
                if total > half:
                    break
                tail += 1
            target = min(target, tail + self.keep_first + 1)
        end = count - max(0, target - self.keep_first - 1)
        start = next((c for c in view.cuts if c >= self.keep_first), count)
        stop = max((c for c in view.cuts if c <= end), default=start)
        roots = whole(view, self.roots(view))
        return {i for i in range(max(start, view.prefix), stop) if i not in roots}

    def _condense(self, view: History, context: Context) -> History | None:
        gone = self.middle(view, context)
        if len(gone) < max(1, int(self.progress * len(view))):
            return None
        text = ask_summary(view, context, gone, PROMPT, HEADINGS, self.summary_tokens, _wrap)
        return None if text is None else compact(view, gone, [edit.inserted(_wrap(text))])

    def _reset(self, view: History, context: Context) -> History | None:
        roots = self.roots(view)
        gone = others(view, roots)
        limit = sum(context.size(view.messages[i]) for i in gone)
        if most_summary(context, limit, context.size(edit.inserted(_wrap("x")))) < 1:
            return None
        clip = max((len(b.text) for i in gone for b in view.messages[i].blocks), default=0)
        for _ in range(self.tries):
            messages = plain((view.messages[i] for i in sorted(gone)), clip)
            for message in messages:
                message["content"] = message["content"][:clip]
            request = SummaryInput(messages, PROMPT, HEADINGS)
            text = context.services.summarise(request, self.summary_tokens, limit, _wrap)
            if text is not None:
                return compact(view, gone, [edit.inserted(_wrap(text))], at=view.prefix)
            clip = int(clip * 0.8)
        return None


def _wrap(text: str) -> str:
    return f"{PREFIX}{text}\n</CONVERSATION SUMMARY>"
