"""Anthropic Messages: a message list, or a whole request with `system`, `tools` and `messages`.

Source: the Messages API reference and the types of the `anthropic` Python package 2.14.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kvevict.agent.formats.base import (
    Format,
    Rules,
    fill_container,
    json_object,
    json_text,
    make,
    media_of,
    need,
    need_list,
    need_mapping,
    need_text,
    optional_text,
    picture,
    read_all,
    text_changed,
    text_of,
    tool_parts,
    unknown,
    with_cache,
    with_ids,
)
from kvevict.agent.history import THINKING_KINDS, Block, History, Message

KINDS = (
    "text",
    "image",
    "document",
    "search_result",
    "thinking",
    "redacted_thinking",
    "tool_use",
    "tool_result",
    "server_tool_use",
    "mcp_tool_use",
    "*_tool_result",
    "container_upload",
    "compaction",
)
_ANTHROPIC_ONLY = {
    "thinking",
    "redacted_thinking",
    "tool_use",
    "tool_result",
    "server_tool_use",
    "document",
    "compaction",
}


class Anthropic(Format, name="anthropic"):
    """Anthropic Messages."""

    rules: ClassVar[Rules] = Rules(
        adjacent=True,
        one_message=True,
        first_user=True,
        breakpoints=4,
        signed=True,
        nonempty=True,
    )

    def detect(self, obj: Any) -> float:
        """Anthropic's block kinds, or its request keys."""
        messages = obj.get("messages") if isinstance(obj, Mapping) else obj
        if not isinstance(messages, list) or (isinstance(obj, Mapping) and "history" in obj):
            return 0.0
        if not all(
            isinstance(m, Mapping) and m.get("role") in ("user", "assistant") for m in messages
        ):
            return 0.0
        kinds = {
            str(b.get("type"))
            for m in messages
            if isinstance(m.get("content"), list)
            for b in m["content"]
            if isinstance(b, Mapping)
        }
        if kinds & _ANTHROPIC_ONLY:
            return 0.9
        if any("tool_calls" in m for m in messages):
            return 0.0
        if isinstance(obj, Mapping):
            tools = obj.get("tools") or ()
            if "system" in obj or any("input_schema" in t for t in tools if isinstance(t, Mapping)):
                return 0.9
        return 0.4

    def read(self, obj: Any, reuse: Sequence[Message] = ()) -> History:
        """Read a message list or a request."""
        shell = None if isinstance(obj, list | tuple) else need_mapping(obj, None, "")
        messages = need_list(obj if shell is None else shell.get("messages"), None, "messages")
        names: dict[str, str] = {}
        read = read_all(messages, reuse, self.read_message, "messages", names)
        system: tuple[Block, ...] = ()
        tools: tuple[Any, ...] = ()
        if shell is not None:
            value = shell.get("system")
            system = () if value is None else self.read_content(value, None, "system", names)
            tools = tuple(need_list(shell.get("tools") or [], None, "tools"))
        return History(read, self.name, system, tools, shell)

    def read_message(self, raw: Any, i: int, path: str, names: dict[str, str]) -> Message:
        """Read one message; `names` maps call ids to tool names and grows."""
        raw = need_mapping(raw, i, path)
        role = raw.get("role")
        if role not in ("user", "assistant"):
            if role == "system":
                need(False, "system belongs into the request's `system`", i, f"{path}.role")
            raise unknown("role", role, ("user", "assistant"), i, f"{path}.role")
        need("content" in raw, "has no content", i, path)
        blocks = self.read_content(raw["content"], i, f"{path}.content", names)
        return Message(role, blocks, i, raw, blocks)

    def read_content(
        self, value: Any, i: int | None, path: str, names: dict[str, str]
    ) -> tuple[Block, ...]:
        """Read the content of a message: a string, or a list of blocks."""
        if isinstance(value, str):
            return (make("text", value),)
        return tuple(
            self.read_block(part, i, f"{path}[{b}]", names)
            for b, part in enumerate(need_list(value, i, path))
        )

    def read_block(self, raw: Any, i: int | None, path: str, names: dict[str, str]) -> Block:
        """Read one block."""
        raw = need_mapping(raw, i, path)
        kind, cache = raw.get("type"), raw.get("cache_control")
        if kind == "text":
            text = need_text(raw.get("text"), i, f"{path}.text")
            return make("text", text, raw=raw, cache_control=cache)
        if kind == "tool_use":
            call = need_text(raw.get("id"), i, f"{path}.id")
            tool = need_text(raw.get("name"), i, f"{path}.name")
            names[call] = tool
            text = json_text(raw.get("input", {}), i, f"{path}.input")
            return make("tool_use", text, call_id=call, tool=tool, raw=raw, cache_control=cache)
        if kind == "tool_result":
            call = need_text(raw.get("tool_use_id"), i, f"{path}.tool_use_id")
            content = raw.get("content")
            need(
                content is None or isinstance(content, str | list),
                "expected a string or a list",
                i,
                f"{path}.content",
            )
            return make(
                "tool_result",
                text_of(content),
                call_id=call,
                tool=names.get(call),
                raw=raw,
                media=media_of(content),
                cache_control=cache,
                is_error=bool(raw.get("is_error")),
            )
        if kind in ("thinking", "redacted_thinking", "compaction"):
            body = raw.get("thinking") or ("" if kind == "thinking" else raw.get("content") or "")
            text = body if isinstance(body, str) else text_of(body)
            hidden = raw.get("data") or ""
            return make(kind, text, raw=raw, opaque=len(hidden), cache_control=cache)
        if kind in ("image", "document", "search_result", "container_upload"):
            name = "image" if kind == "image" else "document"
            media = ("document",) if kind == "container_upload" else media_of(raw)
            return make(name, text_of(raw), raw=raw, media=media, cache_control=cache)
        if kind in ("server_tool_use", "mcp_tool_use"):
            call = need_text(raw.get("id"), i, f"{path}.id")
            names[call] = str(raw.get("name"))
            text = json_text(raw.get("input", {}), i, f"{path}.input")
            return make(
                "server_tool_use",
                text,
                call_id=call,
                tool=names[call],
                raw=raw,
                cache_control=cache,
            )
        if isinstance(kind, str) and kind.endswith("_tool_result"):
            answered = optional_text(raw.get("tool_use_id"), i, f"{path}.tool_use_id")
            content = raw.get("content")
            hidden = _encrypted(content)
            return make(
                "server_tool_result",
                text_of(content) or ("" if hidden else json_text(content, i, f"{path}.content")),
                call_id=answered,
                tool=names.get(str(answered)),
                raw=raw,
                media=media_of(content),
                opaque=hidden,
                cache_control=cache,
            )
        raise unknown("block type", kind, KINDS, i, f"{path}.type")

    # -- writing --------------------------------------------------------------------------------

    def write(self, history: History) -> Any:
        """Write a message list or, where it was read from one, a request."""
        messages: list[Any] = []
        own = history.format == self.name
        history = history if own else with_ids(history)
        for message in history.messages:
            if not own and message.role in ("system", "developer"):
                continue
            raw = self.write_message(message, own)
            if not own and not raw["content"]:
                continue
            merge = not own and messages and message.role == "tool"
            if merge and messages[-1]["role"] == "user" and _only_results(messages[-1]):
                messages[-1]["content"].extend(raw["content"])
            else:
                messages.append(raw)
        if own:
            return fill_container(history, "messages", messages)
        system = [b for b in history.system if b.text]
        system += [
            b for m in history if m.role in ("system", "developer") for b in m.blocks if b.text
        ]
        if not system and not history.tools:
            return messages
        request: dict[str, Any] = {}
        if system:
            request["system"] = "\n\n".join(b.text for b in system)
        if history.tools:
            parts = [tool_parts(tool) for tool in history.tools]
            request["tools"] = [
                {"name": n, "description": d, "input_schema": schema} for n, d, schema in parts
            ]
        return {**request, "messages": messages}

    def write_message(self, message: Message, own: bool = True) -> Any:
        """Write one message; unedited ones are the object that was read."""
        if own and message.pristine:
            return message.raw
        role = "user" if message.role in ("tool", "system", "developer") else message.role
        if not own or message.raw is None:
            blocks = message.blocks if own else [b for b in message.blocks if _portable(b)]
            return {"role": role, "content": [self.write_block(b, own) for b in blocks]}
        return {**message.raw, "content": self.write_content(message.raw.get("content"), message)}

    def write_content(self, old: Any, message: Message) -> Any:
        """Write the content of an edited message, as a string where it was one and still can be."""
        blocks = message.blocks
        plain = isinstance(old, str) and len(blocks) == 1 and blocks[0].kind == "text"
        if plain and blocks[0].cache_control is None:
            return blocks[0].text
        return [self.write_block(b) for b in blocks]

    def write_block(self, block: Block, own: bool = True) -> Any:
        """Write one block; unedited ones are the object that was read."""
        raw = block.raw if own else None
        if raw is not None and not block.edits:
            return raw
        if raw is None:
            return with_cache(self.build_block(block), block)
        part = dict(raw)
        if "rename" in block.edits:
            part["tool_use_id" if block.kind == "tool_result" else "id"] = block.call_id
        if text_changed(block):
            if block.kind in ("tool_use", "server_tool_use"):
                part["input"] = json_object(block.text)
            elif block.kind == "tool_result":
                part["content"] = (
                    [{"type": "text", "text": block.text}]
                    if isinstance(raw.get("content"), list)
                    else block.text
                )
            else:
                part = {"type": "text", "text": block.text}
        return with_cache(part, block)

    def build_block(self, block: Block) -> dict[str, Any]:
        """Build a block from the normal form."""
        if block.kind in ("tool_use", "server_tool_use"):
            return {
                "type": "tool_use",
                "id": block.call_id,
                "name": block.tool or "tool",
                "input": json_object(block.text),
            }
        if block.kind == "tool_result":
            part: dict[str, Any] = {
                "type": "tool_result",
                "tool_use_id": block.call_id,
                "content": block.text,
            }
            return {**part, "is_error": True} if block.is_error else part
        if block.kind == "thinking":
            signature = block.raw.get("thinkingSignature", block.raw.get("signature"))
            return {"type": "thinking", "thinking": block.text, "signature": signature}
        if block.kind == "image" and (found := picture(block.raw)):
            mime, data, url = found
            source = (
                {"type": "base64", "media_type": mime, "data": data}
                if data
                else {"type": "url", "url": url}
            )
            return {"type": "image", "source": source}
        return {"type": "text", "text": block.text or f"[{block.kind}]"}


def _portable(block: Block) -> bool:
    """Whether a block means something in another format: thinking only with its signature."""
    if block.kind in THINKING_KINDS:
        raw = block.raw if isinstance(block.raw, Mapping) else {}
        return block.kind == "thinking" and bool(raw.get("thinkingSignature", raw.get("signature")))
    return bool(block.text or block.media or block.kind == "tool_result")


def _encrypted(content: Any) -> int:
    """Return the characters of encrypted content in a server tool's result."""
    parts = content if isinstance(content, list) else [content]
    hidden = (p.get("encrypted_content") for p in parts if isinstance(p, Mapping))
    return sum(len(text) for text in hidden if isinstance(text, str))


def _only_results(message: Mapping[str, Any]) -> bool:
    return all(part.get("type") == "tool_result" for part in message["content"])
