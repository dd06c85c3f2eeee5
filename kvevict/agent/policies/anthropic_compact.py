"""Anthropic's server-side compaction `compact_20260112`."""

from dataclasses import dataclass

from kvevict.agent import edit
from kvevict.agent.choosing import others
from kvevict.agent.history import History
from kvevict.agent.message_policy import Context, Limits, MessagePolicy, Stage
from kvevict.agent.policies._compaction import before_compaction, has_compaction
from kvevict.agent.verbs import LANGUAGE, ask_summary, compact
from kvevict.errors import PolicyError

PREFIX = "<summary>\n"
PROMPT = (
    "You have written a partial transcript for the initial task above. Write a summary of it that "
    "lets you continue the work in a new context without the old one: what was asked, the state, "
    "decisions, what was learned, next steps. " + LANGUAGE
)


def wrap(text: str) -> str:
    """Return the summary in its tags."""
    return f"{PREFIX}{text}\n</summary>"


@dataclass(frozen=True)
class AnthropicCompact(MessagePolicy, name="anthropic_compact"):
    """Replace everything by a summary; after a server's compaction block drop what is before it.

    Source: Anthropic's compaction documentation (beta compact-2026-01-12): trigger 150,000 input
    tokens, at least 50,000; `instructions` replace the prompt; all blocks before the last
    compaction block are ignored by the server, so they need not be sent; `content: null` is a
    failed compaction and changes nothing. Differs: the summary made here is a user message, since
    only the server makes compaction blocks; the last user message stays verbatim (I7).

    Args:
        trigger: tokens of the request.
        instructions: replace the summary prompt; "" keeps it.
        pause_after_compaction: keep the most recent group too, as a client that pauses would add.
    """

    trigger: int | str | None = 150_000
    instructions: str = ""
    pause_after_compaction: bool = False

    markers = (PREFIX,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.trigger, int) and self.trigger < 50_000:
            raise PolicyError(f"{self.name}.trigger={self.trigger}: the API's minimum is 50000")

    def stages(self) -> tuple[Stage, ...]:
        """Take up a server's compaction first, it costs nothing; then compact."""
        return (
            Stage(
                "adopt_compaction",
                "drop",
                lambda view, context: before_compaction(view, self.roots(view)),
                lambda view, context: has_compaction(view),
            ),
            Stage("compact", "summarise", self._compact, self.due, self.min_gain),
        )

    def threshold(self, limits: Limits) -> int:
        """Return 150,000, the documented default."""
        return 150_000

    def _compact(self, view: History, context: Context) -> History | None:
        roots = self.roots(view)
        if self.pause_after_compaction and view.groups:
            roots |= set(range(view.groups[-1].start, len(view)))
        gone = others(view, roots)
        prompt = self.instructions or PROMPT
        text = ask_summary(view, context, gone, prompt, (), self.summary_tokens, wrap)
        if text is None:
            return None
        return compact(view, gone, [edit.inserted(wrap(text))], at=view.prefix)
