"""Roo Code: condense everything, or hide the oldest half."""

import re
from dataclasses import dataclass

from kvevict.agent import edit
from kvevict.agent.choosing import anchors, others, real_users, whole
from kvevict.agent.history import History
from kvevict.agent.message_policy import Context, Limits, MessagePolicy, Stage, check_count
from kvevict.agent.policies._roots import edited_files
from kvevict.agent.verbs import LANGUAGE, ask_summary, compact
from kvevict.errors import PolicyError

PREFIX = "[Conversation summary]\n"
HIDDEN = "[Sliding window truncation: "
HEADINGS = (
    "Previous conversation",
    "Current work",
    "Key technical concepts",
    "Relevant files and code",
    "Problem solving",
    "Pending tasks and next steps",
)
PROMPT = (
    "Create a detailed summary of the conversation so far, for continuing the task without it. "
    + LANGUAGE
)
_COMMAND = re.compile(r"<command[^>]*>.*?</command>", re.DOTALL)


@dataclass(frozen=True)
class Roo(MessagePolicy, name="roo"):
    """Condense into a fresh start; where that fails hide the oldest half of the messages.

    Source: Roo-Code@cb836567, `context-management` and `condense` (READ): above 0.9 W - reserved
    output, or at a percentage of the window (5 to 100); all messages are tagged hidden, the
    summary is a user message; `<command>` blocks of the first message and the files in use are
    kept with it; the fallback hides half (an even count) after the first message behind
    `[Sliding window truncation: N messages hidden...]`; nothing is destroyed, so a rewind
    restores. Differs: folded file outlines are a list of names.

    Args:
        percent: share of the window in percent that starts it too; 100 is Roo's default.
        buffer: share of the window kept free.
        condense: whether a summary is tried at all.
    """

    percent: int = 100
    buffer: float = 0.1
    condense: bool = True

    markers = (PREFIX, HIDDEN)
    passes = 8  # halves until the request fits

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "percent", 5)
        if self.percent > 100 or not 0 <= self.buffer < 1:
            raise PolicyError(f"roo.percent={self.percent}, buffer={self.buffer}: out of range")

    def threshold(self, limits: Limits) -> int:
        """Return the smaller of (1 - buffer) W - O and the percentage of W."""
        reserved = limits.max_output if limits.max_output < limits.window else 0
        allowed = int(limits.window * (1 - self.buffer)) - reserved
        return max(1, min(allowed, limits.window * self.percent // 100))

    def stages(self) -> tuple[Stage, ...]:
        """Condense; where the request is still too large, hide."""
        hide = Stage("sliding_window", "drop", self._hide, self._still, self.min_gain)
        if not self.condense:
            return (hide,)
        return (Stage("condense", "summarise", self._condense, self.due, self.min_gain), hide)

    def _still(self, view: History, context: Context) -> bool:
        return context.total(view) >= self.trigger_tokens(context.limits)

    def _condense(self, view: History, context: Context) -> History | None:
        roots = self.roots(view)
        gone = others(view, roots)
        first = real_users(view)[:1]
        commands = _COMMAND.findall(view.messages[first[0]].text) if first else []
        files = edited_files(view)

        def wrap(text: str) -> str:
            parts = [PREFIX + text]
            parts += ["Active commands:\n" + "\n".join(commands)] if commands else []
            parts += ["Files in use: " + ", ".join(files)] if files else []
            return "\n\n".join(parts)

        text = ask_summary(view, context, gone, PROMPT, HEADINGS, self.summary_tokens, wrap)
        if text is None:
            return None
        return compact(view, gone, [edit.inserted(wrap(text))], at=view.prefix)

    def _hide(self, view: History, context: Context) -> History | None:
        roots = whole(view, anchors(view, first_user=True, last_group=True))
        loose = [i for i in range(view.prefix, len(view)) if i not in roots]
        count = len(loose) // 2 // 2 * 2
        chosen = set(loose[: max(count, 2)])
        gone = {i for i in whole(view, chosen) if i not in roots}
        if not gone:
            return None
        real = sum(1 for i in gone if not view.messages[i].text.startswith(HIDDEN))
        if not real:
            return None
        marker = f"{HIDDEN}{real} messages hidden to reduce context]"
        return compact(view, gone, [edit.inserted(marker, note="placeholder")])
