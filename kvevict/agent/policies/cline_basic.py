"""Cline's "basic" compaction without a model: the user's words stay, work becomes a notice."""

from collections import Counter
from dataclasses import dataclass

from kvevict.agent import edit
from kvevict.agent.choosing import choose, is_inserted, others, real_users
from kvevict.agent.graphemes import shorten
from kvevict.agent.history import MEDIA_KINDS, History
from kvevict.agent.message_policy import (
    Context,
    Limits,
    MessagePolicy,
    Stage,
    check_count,
    check_share,
)
from kvevict.agent.verbs import compact
from kvevict.policies import Window

PREFIX = "<SYSTEM_NOTICE>\n"


@dataclass(frozen=True)
class ClineBasic(MessagePolicy, name="cline_basic"):
    """Drop the assistant's work, keep what the user typed, and say what was done in a notice.

    Source: Cline SDK@21cb8d25, compaction "basic" (READ): from 0.9 of the input limit to a target
    of 0.7 of it; assistant work goes, user turns stay, a `<SYSTEM_NOTICE>` tells the tools used
    and the last 3 assistant texts; attachments stay only in the latest user message; it is also
    forced after a provider's overflow, since "recovery must not depend on another LLM call".
    Differs: user turns are not joined into one message; where they alone exceed the target the
    oldest of them go, the first and the last stay.

    Args:
        start: share of the input limit that starts it.
        target: share of the input limit afterwards.
        texts: last assistant texts that are quoted.
        quote: characters of each.
    """

    start: float = 0.9
    target: float = 0.7
    texts: int = 3
    quote: int = 600

    markers = (PREFIX,)
    keeps_first = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "start")
        check_share(self, "target")
        check_count(self, "texts")
        check_count(self, "quote", 1)

    def threshold(self, limits: Limits) -> int:
        """Return the share of the window."""
        return int(limits.window * self.start)

    def stages(self) -> tuple[Stage, ...]:
        """One stage."""
        return (Stage("basic", "drop", self._basic, self.due, self.min_gain),)

    def _basic(self, view: History, context: Context) -> History | None:
        roots = self.roots(view)
        users = real_users(view)
        sizes = [context.size(view.messages[i]) for i in users]
        room = max(1, int(context.limits.window * self.target) - context.limits.overhead)
        kept = choose(Window(room), sizes, [i in roots for i in users])
        stay = roots | {i for i, stays in zip(users, kept, strict=True) if stays}
        gone = others(view, stay)
        if not any(not is_inserted(view.messages[i]) for i in gone):
            return None
        notice = edit.inserted(self.notice(view, gone))
        # Behind the oldest part that goes, so that the user's turns keep their order around it.
        new = compact(view, gone, [notice])
        return self._attachments(new)

    def notice(self, view: History, gone: set[int]) -> str:
        """Return what was done, without a model: tools with counts, the last texts."""
        tools: Counter[str] = Counter()
        said: list[str] = []
        for i in sorted(gone):
            message = view.messages[i]
            if is_inserted(message):
                continue
            tools.update(block.tool or "tool" for block in message.calls)
            text = "\n".join(b.text for b in message.blocks if b.kind == "text")
            if message.role == "assistant" and text.strip():
                said.append(shorten(" ".join(text.split()), self.quote))
        lines = ["Earlier work was removed from the context to make room."]
        if tools:
            lines.append("Tools used: " + ", ".join(f"{n} x{c}" for n, c in sorted(tools.items())))
        if self.texts and said:
            lines.append("Last statements:")
            lines += [f"- {text}" for text in said[-self.texts :]]
        return PREFIX + "\n".join(lines) + "\n</SYSTEM_NOTICE>"

    def _attachments(self, view: History) -> History:
        users = real_users(view)
        gone = [
            (i, b)
            for i in users[:-1]
            for b, block in enumerate(view.messages[i].blocks)
            if (block.kind in MEDIA_KINDS or block.kind == "file")
            and not block.protected
            and any(x.kind == "text" and x.text.strip() for x in view.messages[i].blocks)
        ]
        return edit.drop_blocks(view, gone) if gone else view
