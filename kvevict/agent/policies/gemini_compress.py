"""gemini-cli's chat compression: a state snapshot, an acknowledgement, the last 30 %."""

from dataclasses import dataclass

from kvevict.agent import edit
from kvevict.agent.choosing import block_size, choose, is_masked, others, outputs, real_users
from kvevict.agent.graphemes import cut_after
from kvevict.agent.history import Block, History
from kvevict.agent.message_policy import (
    Context,
    Limits,
    MessagePolicy,
    Stage,
    check_count,
    check_share,
)
from kvevict.agent.store import Store
from kvevict.agent.summarizers import SummaryInput
from kvevict.agent.verbs import LANGUAGE, ask_summary, compact, masked, plain
from kvevict.policies import Window

HEADINGS = ("overall_goal", "key_knowledge", "file_system_state", "recent_actions", "current_plan")
PREFIX = "<state_snapshot>\n"
ACKNOWLEDGED = "Got it. Thanks for the additional context!"
PROMPT = (
    "Distil the history above into a <state_snapshot> with overall_goal, key_knowledge, "
    "file_system_state, recent_actions, current_plan. It will be the agent's only memory of it. "
    + LANGUAGE
)
PROBE = (
    "Check the snapshot against the history: is a path, a constraint, a decision or an open task "
    "missing? Answer with the improved snapshot, or with the same one. " + LANGUAGE
)


@dataclass(frozen=True)
class GeminiCompress(MessagePolicy, name="gemini_compress"):
    """Summarise the older 70 % of the characters at half the window; keep the last 30 %.

    Source: gemini-cli@5411f113, `chatCompressionService` (READ): starts at 0.5 of the limit;
    function responses beyond the newest 50,000 tokens are saved and cut to their end first; the
    split is at the first user message at or after 70 % of the characters, or everything when the
    last message is the model's; [user: snapshot][model: acknowledgement] + tail; a second "probe"
    call verifies; an inflated result is discarded; after one failure only truncation is used.

    Args:
        share: share of the window that starts it.
        preserve: share of the characters that stays.
        responses: tokens of the newest tool outputs that stay whole.
        excerpt: characters of an older output's end that stay.
        probe: ask a second time to verify.
    """

    share: float = 0.5
    preserve: float = 0.3
    responses: int = 50_000
    excerpt: int = 2_000
    probe: bool = True
    strikes: int = 1

    markers = (PREFIX, ACKNOWLEDGED)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "share")
        check_share(self, "preserve")
        check_count(self, "responses")
        check_count(self, "excerpt", 1)

    def threshold(self, limits: Limits) -> int:
        """Return half the window."""
        return int(limits.window * self.share)

    def stages(self) -> tuple[Stage, ...]:
        """Cut old outputs first; then the snapshot."""
        return (
            Stage("truncate_responses", "externalise", self._truncate, self.due),
            Stage("compress", "summarise", self._compress, self.due, self.min_gain),
        )

    def _truncate(self, view: History, context: Context) -> History | None:
        found = outputs(view)
        sizes = [block_size(view, at, context) for at in found]
        kept = choose(Window(self.responses), sizes) if self.responses else [False] * len(found)
        old = [
            at
            for at, stays in zip(found, kept, strict=True)
            if not stays
            and not is_masked(view.block(at))
            and len(view.block(at).text) > 2 * self.excerpt
        ]
        store = context.services.store
        texts = {at: _excerpt(view.block(at), store, self.excerpt) for at in old}
        return masked(view, texts)

    def split(self, view: History) -> int:
        """Return the first message that stays."""
        lengths = [sum(len(b.text) for b in m.blocks) for m in view.messages]
        goal = (1 - self.preserve) * sum(lengths)
        users = set(real_users(view))
        seen = 0
        last = view.prefix
        for i, length in enumerate(lengths):
            if i in users and i in view.cuts:
                if seen >= goal:
                    return i
                last = i
            seen += length
        end = view.messages[-1] if len(view) else None
        if end is not None and end.role == "assistant" and not end.calls:
            return len(view)
        return last

    def _compress(self, view: History, context: Context) -> History | None:
        cut = self.split(view)
        roots = self.roots(view)
        gone = others(view, roots, cut)
        text = ask_summary(view, context, gone, PROMPT, HEADINGS, self.summary_tokens, _wrap)
        if text is None:
            return None
        if self.probe:
            text = self._verified(view, context, sorted(gone), text)
        new = [edit.inserted(_wrap(text)), edit.inserted(ACKNOWLEDGED, "assistant")]
        return compact(view, gone, new, at=view.prefix)

    def _verified(self, view: History, context: Context, gone: list[int], text: str) -> str:
        messages = plain(view.messages[i] for i in gone)
        messages.append({"role": "assistant", "content": text})
        limit = sum(context.size(view.messages[i]) for i in gone)
        request = SummaryInput(messages, PROBE, HEADINGS, text)
        better = context.services.summarise(request, self.summary_tokens, limit, _wrap)
        return better or text


def _wrap(text: str) -> str:
    return f"{PREFIX}{text}\n</state_snapshot>"


def _excerpt(block: Block, store: Store, excerpt: int) -> str:
    end = block.text[cut_after(block.text, len(block.text) - excerpt) :]
    return (
        f"<tool_output_masked>\nkvevict-store:{store.put(block.text)} "
        f"({len(block.text)} characters, the end follows)\n{end}\n</tool_output_masked>"
    )
