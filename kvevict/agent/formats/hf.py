"""Chat-template messages of Hugging Face transformers: arguments are objects, ids are optional.

The list is what `tokenizer.apply_chat_template` takes. Source: transformers' chat template
documentation; strict templates (Mistral, Gemma) demand that user and assistant alternate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvevict.agent.formats.base import (
    Rules,
    json_object,
    json_text,
    make,
    media_of,
    need_mapping,
    need_text,
    optional_text,
    text_of,
)
from kvevict.agent.formats.openai_chat import OpenAIChat
from kvevict.agent.history import Block

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")


class HF(OpenAIChat, name="hf"):
    """Chat-template messages."""

    rules: ClassVar[Rules] = Rules(adjacent=True, ids=False, system_first=True)
    roles: ClassVar[tuple[str, ...]] = ROLES
    parts: ClassVar[Mapping[str, str]] = {
        "text": "text",
        "image": "image",
        "image_url": "image",
        "video": "document",
        "audio": "audio",
    }
    containers: ClassVar[tuple[str, ...]] = ("messages",)

    def detect(self, obj: Any) -> float:
        """Calls whose arguments are objects, or calls without ids."""
        messages, _ = self.container(obj)
        if messages is None or not all(
            isinstance(m, Mapping) and m.get("role") in ROLES for m in messages
        ):
            return 0.0
        calls = [c for m in messages for c in m.get("tool_calls") or () if isinstance(c, Mapping)]
        if any(isinstance(c.get("function", c), Mapping) for c in calls):
            inner = [c.get("function", c) for c in calls]
            objects = any(
                isinstance(f.get("arguments"), Mapping) for f in inner if isinstance(f, Mapping)
            )
            return 0.85 if objects or any("id" not in c for c in calls) else 0.3
        loose = any(m["role"] == "tool" and "tool_call_id" not in m for m in messages)
        return 0.7 if loose or any(m["role"] == "ipython" for m in messages) else 0.3

    def read_call(self, raw: Any, i: int, path: str, names: dict[str, str]) -> Block:
        """Read one tool call, with or without the `function` level and an id."""
        raw = need_mapping(raw, i, path)
        inner = need_mapping(raw.get("function", raw), i, f"{path}.function")
        tool = need_text(inner.get("name"), i, f"{path}.function.name")
        call = raw.get("id")
        if call is not None:
            names[need_text(call, i, f"{path}.id")] = tool
        text = json_text(inner.get("arguments", {}), i, f"{path}.function.arguments")
        return make("tool_use", text, call_id=call, tool=tool, raw=raw)

    def read_result(
        self, raw: Mapping[str, Any], i: int, path: str, names: dict[str, str]
    ) -> Block:
        """Read a tool message as one result; its content may be any JSON value."""
        content = raw.get("content")
        call = raw.get("tool_call_id")
        parts = isinstance(content, list) and all(
            isinstance(p, Mapping) and str(p.get("type")) in self.parts for p in content
        )
        plain = content is None or isinstance(content, str) or parts
        return make(
            "tool_result",
            text_of(content) if plain else json_text(content, i, f"{path}.content"),
            call_id=optional_text(call, i, f"{path}.tool_call_id"),
            tool=optional_text(raw.get("name"), i, f"{path}.name") or names.get(str(call)),
            media=media_of(content) if plain else (),
        )

    def arguments(self, block: Block) -> Any:
        """Return a call's arguments as this format writes them: an object, or the text it was."""
        if isinstance(block.raw, Mapping):
            inner = block.raw.get("function", block.raw)
            if isinstance(inner, Mapping) and isinstance(inner.get("arguments"), str):
                return block.text
        return json_object(block.text)

    def write_call(self, block: Block) -> Any:
        """Write one tool call; unedited ones are the object that was read."""
        if block.raw is not None and block.edits and "function" not in block.raw:
            raw = {**block.raw, "arguments": self.arguments(block)}
            return {**raw, "id": block.call_id} if "rename" in block.edits else raw
        return super().write_call(block)

    def build_call(self, block: Block) -> dict[str, Any]:
        """Build a tool call from the normal form."""
        function = {"name": block.tool or "tool", "arguments": self.arguments(block)}
        call: dict[str, Any] = {"type": "function", "function": function}
        return call if block.call_id is None else {**call, "id": block.call_id}

    def build_result(self, block: Block) -> dict[str, Any]:
        """Build a tool message from the normal form."""
        raw = {"role": "tool", "name": block.tool or "tool", "content": block.text}
        return raw if block.call_id is None else {**raw, "tool_call_id": block.call_id}
