"""Codex, local path: the user's messages stay, a handoff summary replaces the rest."""

from dataclasses import dataclass, replace

from kvevict.agent import edit
from kvevict.agent.choosing import anchors, choose, others, real_users
from kvevict.agent.history import History, Message
from kvevict.agent.message_policy import Context, Limits, MessagePolicy, Stage, check_count
from kvevict.agent.policies._codex import (
    HEADINGS,
    PROMPT,
    SUMMARY_PREFIX,
    is_wrapper,
    stale_developer,
    wrap,
)
from kvevict.agent.verbs import ask_summary, compact, middle_out
from kvevict.errors import PolicyError
from kvevict.policies import Window


@dataclass(frozen=True)
class CodexLocal(MessagePolicy, name="codex_local"):
    """Keep recent user messages, drop everything else, put a summary last as a user message.

    Source: openai/codex, `compact.rs` and `openai_models.rs` (READ): trigger
    min(configured, 0.9 W), a larger configured limit is silently clamped; user messages newest
    first up to 20,000 tokens (COMPACT_USER_MESSAGE_MAX_TOKENS), the boundary one loses its middle
    ("…N tokens truncated…"); earlier summaries are recognised by their prefix and not kept; the
    wrappers of AGENTS.md and environment are initial context and stay once; the summariser's own
    overflow removes the oldest items. Differs: an empty summary counts as a failure instead of
    "(no summary available)"; a last response with thinking stays (I4).

    Args:
        limit: configured trigger in tokens; None means 0.9 W.
        user_tokens: tokens of user messages that stay.
        share: clamp as a share of the window.
    """

    limit: int | None = None
    user_tokens: int = 20_000
    share: float = 0.9

    markers = (SUMMARY_PREFIX,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "user_tokens", 1)
        if self.limit is not None:
            check_count(self, "limit", 1)
        if not 0 < self.share <= 1:
            raise PolicyError(f"{self.name}.share={self.share}: give a share of the window")

    def threshold(self, limits: Limits) -> int:
        """Return min(limit, 0.9 W)."""
        most = int(limits.window * self.share)
        return most if self.limit is None else min(self.limit, most)

    def trigger_tokens(self, limits: Limits) -> int:
        """Return the trigger, clamped to 0.9 W whatever is configured."""
        return min(super().trigger_tokens(limits), int(limits.window * self.share))

    def stages(self) -> tuple[Stage, ...]:
        """One stage."""
        return (Stage("compact", "summarise", self._compact, self.due, self.min_gain),)

    def roots(self, view: History) -> set[int]:
        """Return the roots: of developer messages only those that no later one replaces."""
        return anchors(view) - stale_developer(view)

    def floor(self, view: History, context: Context) -> int:
        """Return the floor: the last user message counts no more than its share."""
        sizes = {i: context.size(view.messages[i]) for i in self.roots(view)}
        users = real_users(view)
        if users and users[-1] in sizes:
            sizes[users[-1]] = min(sizes[users[-1]], self.user_tokens)
        return max(0, sum(sizes.values()) + context.limits.overhead)

    def _compact(self, view: History, context: Context) -> History | None:
        kept, cut = self.kept_users(view, context)
        keep = self.roots(view) | kept | set(cut)
        gone = others(view, keep)
        shorter = sum(context.size(view.messages[i]) - context.size(m) for i, m in cut.items())
        text = ask_summary(
            view, context, gone, PROMPT, HEADINGS, self.summary_tokens, wrap, extra=shorter
        )
        if text is None:
            return None
        messages = list(view.messages)
        for i, message in cut.items():
            messages[i] = message
        view = replace(view, messages=tuple(messages))
        return compact(view, gone, after=[edit.inserted(wrap(text))])

    def kept_users(self, view: History, context: Context) -> tuple[set[int], dict[int, Message]]:
        """Return the user messages that stay whole, and the boundary one, shortened."""
        users = real_users(view)
        initial = {i for i in users if is_wrapper(view.messages[i])}
        latest: dict[str, int] = {}
        for i in sorted(initial):
            latest.setdefault(view.messages[i].text.split("\n", 1)[0], i)
        users = [i for i in users if i not in initial]
        sizes = [context.size(view.messages[i]) for i in users]
        whole = [
            i
            for i, stays in zip(users, choose(Window(self.user_tokens), sizes), strict=True)
            if stays
        ]
        left = self.user_tokens - sum(context.size(view.messages[i]) for i in whole)
        older = [i for i in users if i not in whole]
        cut: dict[int, Message] = {}
        if older and left > 0:
            short = _shortened(view.messages[older[-1]], left, context)
            if short is not None:
                cut[older[-1]] = short
        return {*whole, *latest.values()}, cut


def _shortened(message: Message, tokens: int, context: Context) -> Message | None:
    """Return a user message cut in the middle of its longest text, or None where it cannot be."""
    texts = [b for b, block in enumerate(message.blocks) if block.kind == "text"]
    if not texts or message.protected:
        return None
    longest = max(texts, key=lambda b: len(message.blocks[b].text))
    block = message.blocks[longest]

    def size(text: str) -> int:
        return context.size(_with(message, longest, text)) if text else 0

    short = middle_out(block.text, tokens, size)
    if size(short) > tokens:
        return None
    return _with(message, longest, short)


def _with(message: Message, b: int, text: str) -> Message:
    block = edit.set_text(message.blocks[b], text, "truncate")
    return replace(message, blocks=(*message.blocks[:b], block, *message.blocks[b + 1 :]))
