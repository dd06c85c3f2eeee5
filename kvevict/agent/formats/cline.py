"""Cline session files: Anthropic-like messages, `file` blocks, metrics on assistant messages.

Source: the message files of cline/cline's SDK.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kvevict.agent.formats.anthropic import Anthropic
from kvevict.agent.formats.base import Rules, make, need_text
from kvevict.agent.history import Block, History, Message


class Cline(Anthropic, name="cline"):
    """Cline session files."""

    rules: ClassVar[Rules] = Rules(adjacent=True, one_message=True, first_user=True, log=True)

    def detect(self, obj: Any) -> float:
        """A session with `messages` and Cline's keys, or messages with `file` blocks or metrics."""
        if isinstance(obj, Mapping) and isinstance(obj.get("messages"), list):
            return 0.95 if "sessionId" in obj or "system_prompt" in obj else 0.0
        return 0.0

    def read(self, obj: Any, reuse: Sequence[Message] = ()) -> History:
        """Read a session."""
        history = super().read(obj, reuse)
        prompt = obj.get("system_prompt") if isinstance(obj, Mapping) else None
        if isinstance(prompt, str) and prompt:
            history = replace(history, system=(make("text", prompt),))
        return history

    def read_message(self, raw: Any, i: int, path: str, names: dict[str, str]) -> Message:
        """Read one message with the metrics of its call."""
        message = super().read_message(raw, i, path, names)
        usage = raw.get("metrics")
        return replace(message, usage=usage) if isinstance(usage, Mapping) else message

    def read_block(self, raw: Any, i: int | None, path: str, names: dict[str, str]) -> Block:
        """Read one block; a `file` block holds a file's text."""
        if isinstance(raw, Mapping) and raw.get("type") == "file":
            text = need_text(raw.get("content"), i, f"{path}.content")
            return make("file", text, raw=raw)
        if isinstance(raw, Mapping) and raw.get("type") == "image" and "data" in raw:
            return make("image", raw=raw, media=("image",))
        return super().read_block(raw, i, path, names)
