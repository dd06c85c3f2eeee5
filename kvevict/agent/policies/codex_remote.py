"""Codex, remote path: the server's opaque compaction, and what the client keeps around it."""

from dataclasses import dataclass

from kvevict.agent import edit
from kvevict.agent.choosing import anchors, choose, others, real_users
from kvevict.agent.history import Block, History, Message
from kvevict.agent.message_policy import Context, Limits, MessagePolicy, Stage, check_count
from kvevict.agent.policies._codex import (
    HEADINGS,
    PROMPT,
    SUMMARY_PREFIX,
    is_wrapper,
    stale_developer,
    wrap,
)
from kvevict.agent.policies._compaction import last_compaction
from kvevict.agent.verbs import ask_summary, compact, drop
from kvevict.policies import Window


@dataclass(frozen=True)
class CodexRemote(MessagePolicy, name="codex_remote"):
    """Keep user and developer messages up to 64,000 tokens and exactly one compaction.

    Source: openai/codex, `compact_remote_v2.rs` (READ): RETAINED_MESSAGE_TOKEN_BUDGET = 64,000
    newest first, stale developer messages and contextual wrappers filtered, exactly one
    `compaction` item, opaque to the client. Where the history already holds the server's item,
    everything before it but the retained messages goes. Differs: images are charged like
    everywhere (Codex counts an image-only message as 1 token, a known hazard), and without a
    server the summary comes from the summariser as a readable user message; a summariser with
    `opaque = True` (the server) gives the encrypted content of an item for Responses histories.

    Args:
        retained_tokens: tokens of user messages that stay.
        clip: characters that stay of each tool output in what is sent to be compacted.
        share: trigger and clamp, a share of the window.
    """

    retained_tokens: int = 64_000
    clip: int = 2_000
    share: float = 0.9

    markers = (SUMMARY_PREFIX,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "retained_tokens", 1)
        check_count(self, "clip", 1)

    def threshold(self, limits: Limits) -> int:
        """Return 0.9 W."""
        return int(limits.window * self.share)

    def trigger_tokens(self, limits: Limits) -> int:
        """Return the trigger, clamped to 0.9 W."""
        return min(super().trigger_tokens(limits), int(limits.window * self.share))

    def stages(self) -> tuple[Stage, ...]:
        """Take up the server's item; else compact."""
        return (
            Stage(
                "adopt_compaction",
                "drop",
                self._adopt,
                lambda view, context: last_compaction(view) is not None,
            ),
            Stage("compact", "summarise", self._compact, self.due, self.min_gain),
        )

    def roots(self, view: History) -> set[int]:
        """Return the roots: of developer messages only those that no later one replaces."""
        return anchors(view) - stale_developer(view)

    def _retained(self, view: History, context: Context) -> set[int]:
        users = [i for i in real_users(view) if not is_wrapper(view.messages[i])]
        sizes = [context.size(view.messages[i]) for i in users]
        kept = choose(Window(self.retained_tokens), sizes)
        return {i for i, stays in zip(users, kept, strict=True) if stays}

    def _adopt(self, view: History, context: Context) -> History | None:
        at = last_compaction(view)
        if at is None:
            return None
        keep = self.roots(view) | self._retained(view, context)
        gone = others(view, keep, view.group_of(at).start)
        return drop(view, gone) if gone else None

    def _compact(self, view: History, context: Context) -> History | None:
        keep = self.roots(view) | self._retained(view, context)
        gone = others(view, keep)
        text = ask_summary(
            view, context, gone, PROMPT, HEADINGS, self.summary_tokens, wrap, self.clip
        )
        if text is None:
            return None
        if context.services.opaque and view.format == "openai-responses":
            users = real_users(view)  # the item stands before the last one, who is to be answered
            return compact(view, gone, [_item(text)], at=users[-1] if users else None)
        return compact(view, gone, after=[edit.inserted(wrap(text))])


def _item(encrypted: str) -> Message:
    """Return the server's compaction item."""
    raw = {"type": "compaction", "encrypted_content": encrypted}
    blocks = (Block("compaction", raw=raw, opaque=len(encrypted)),)
    return Message("assistant", blocks, raw=raw, source=blocks, note="summary")
