"""OpenAI Chat Completions: a message list, or a whole request with `messages` and `tools`.

Also reads what other servers of the same API add (`reasoning_content`, `reasoning`,
`cache_control`), the retired `function_call` and `role: function`, and logs that keep their
messages under `traj` (tau-bench). Source: the Chat Completions API reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kvevict.agent.formats.base import (
    Format,
    Rules,
    fill_container,
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

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PARTS = {
    "text": "text",
    "image_url": "image",
    "input_audio": "audio",
    "file": "document",
    "refusal": "refusal",
}
_THOUGHTS = ("reasoning_content", "reasoning")  # plain-text reasoning beside the content


class OpenAIChat(Format, name="openai-chat"):
    """OpenAI Chat Completions."""

    rules: ClassVar[Rules] = Rules(adjacent=True)
    roles: ClassVar[tuple[str, ...]] = ROLES
    parts: ClassVar[Mapping[str, str]] = PARTS
    containers: ClassVar[tuple[str, ...]] = ("messages", "traj")

    def detect(self, obj: Any) -> float:
        """Chat roles, calls as JSON strings with ids."""
        messages, _ = self.container(obj)
        if messages is None or not all(
            isinstance(m, Mapping) and m.get("role") in ROLES for m in messages
        ):
            return 0.0
        calls = [c for m in messages for c in m.get("tool_calls") or () if isinstance(c, Mapping)]
        if calls:
            texts = all(
                isinstance((c.get("function") or {}).get("arguments", ""), str)
                for c in calls
                if isinstance(c.get("function"), Mapping)
            )
            return 0.8 if texts and all("id" in c for c in calls) else 0.0
        roles = {m.get("role") for m in messages}
        return 0.6 if roles & {"system", "developer", "tool", "function"} else 0.5

    def container(self, obj: Any) -> tuple[Any, str]:
        """Return the message list inside an object, and the key that holds it ("" for a list)."""
        key = self.key(obj)
        return (obj[key] if key else obj if isinstance(obj, list | tuple) else None), key

    def read(self, obj: Any, reuse: Sequence[Message] = ()) -> History:
        """Read a message list, a request or a log."""
        messages, key = self.container(obj)
        need(
            messages is not None, f"expected a list under {' or '.join(self.containers)}", None, ""
        )
        names: dict[str, str] = {}
        where = key or "messages"
        read = read_all(messages, reuse, self.read_message, where, names)
        tools = tuple(need_list(obj.get("tools") or [], None, "tools")) if key else ()
        return History(read, self.name, (), tools, obj if key else None)

    def read_message(self, raw: Any, i: int, path: str, names: dict[str, str]) -> Message:
        """Read one message; `names` maps call ids to tool names and grows."""
        raw = need_mapping(raw, i, path)
        role = raw.get("role")
        if role not in self.roles:
            raise unknown("role", role, self.roles, i, f"{path}.role")
        if role in ("tool", "function"):
            blocks: tuple[Block, ...] = (self.read_result(raw, i, path, names),)
            return Message("tool", blocks, i, raw, blocks)
        parts = self.read_content(raw.get("content"), i, f"{path}.content", raw)
        if role == "assistant":
            thoughts = [
                make("thinking", raw[key]) for key in _THOUGHTS if isinstance(raw.get(key), str)
            ]
            refusal = raw.get("refusal")
            said = [make("refusal", refusal)] if isinstance(refusal, str) else []
            parts = [*thoughts[:1], *parts, *said, *self.read_calls(raw, i, path, names)]
        else:
            need(raw.get("content") is not None, "has no content", i, path)
        blocks = tuple(parts)
        return Message(role, blocks, i, raw, blocks)

    def read_content(
        self, value: Any, i: int, path: str, message: Mapping[str, Any]
    ) -> list[Block]:
        """Read the content of a message: nothing, a string, or a list of parts."""
        cache = message.get("cache_control")
        if value is None or (value == "" and message.get("role") == "assistant"):
            return []
        if isinstance(value, str):
            return [make("text", value, cache_control=cache)]
        blocks = []
        for p, part in enumerate(need_list(value, i, path)):
            here = f"{path}[{p}]"
            part = need_mapping(part, i, here)
            kind = part.get("type")
            if not isinstance(kind, str) or kind not in self.parts:
                raise unknown("part type", kind, tuple(self.parts), i, f"{here}.type")
            if kind == "text":
                need_text(part.get("text"), i, f"{here}.text")
            text = part.get("refusal", "") if kind == "refusal" else text_of(part)
            blocks.append(
                make(
                    self.parts[kind],
                    text,
                    raw=part,
                    media=media_of(part) if self.parts[kind] != "image" else ("image",),
                    cache_control=part.get("cache_control"),
                )
            )
        return blocks

    def read_calls(
        self, raw: Mapping[str, Any], i: int, path: str, names: dict[str, str]
    ) -> list[Block]:
        """Read the tool calls of an assistant message."""
        blocks = []
        for c, call in enumerate(need_list(raw.get("tool_calls") or [], i, f"{path}.tool_calls")):
            blocks.append(self.read_call(call, i, f"{path}.tool_calls[{c}]", names))
        old = raw.get("function_call")
        if isinstance(old, Mapping):
            text = json_text(old.get("arguments", ""), i, f"{path}.function_call.arguments")
            blocks.append(make("tool_use", text, tool=str(old.get("name"))))
        return blocks

    def read_call(self, raw: Any, i: int, path: str, names: dict[str, str]) -> Block:
        """Read one tool call."""
        raw = need_mapping(raw, i, path)
        call = need_text(raw.get("id"), i, f"{path}.id")
        kind = "custom" if raw.get("type") == "custom" else "function"
        inner = need_mapping(raw.get(kind), i, f"{path}.{kind}")
        tool = need_text(inner.get("name"), i, f"{path}.{kind}.name")
        body = inner.get("input" if kind == "custom" else "arguments", "")
        names[call] = tool
        text = json_text(body, i, f"{path}.{kind}.arguments")
        return make("tool_use", text, call_id=call, tool=tool, raw=raw)

    def read_result(
        self, raw: Mapping[str, Any], i: int, path: str, names: dict[str, str]
    ) -> Block:
        """Read a tool message as one result."""
        given = raw.get("tool_call_id")
        named = self.rules.ids and raw["role"] == "tool"
        call = (need_text if named else optional_text)(given, i, f"{path}.tool_call_id")
        tool = optional_text(raw.get("name"), i, f"{path}.name")
        content = raw.get("content")
        need(
            content is None or isinstance(content, str | list),
            "expected a string or a list",
            i,
            f"{path}.content",
        )
        last = content[-1] if isinstance(content, list) and content else {}
        cache = raw.get(
            "cache_control", last.get("cache_control") if isinstance(last, Mapping) else None
        )
        return make(
            "tool_result",
            text_of(content),
            call_id=call,
            tool=tool or names.get(str(call)),
            media=media_of(content),
            cache_control=cache,
        )

    # -- writing --------------------------------------------------------------------------------

    def write(self, history: History) -> Any:
        """Write a message list or, where it was read from one, a request or log."""
        own = history.format == self.name
        if own:
            messages = [raw for m in history.messages for raw in self.write_messages(m)]
            return fill_container(history, self.container(history.shell)[1], messages)
        messages = []
        history = with_ids(history) if self.rules.ids else history
        if history.system:
            text = "\n\n".join(b.text for b in history.system if b.text)
            messages.append({"role": "system", "content": text})
        for message in history.messages:
            messages.extend(self.build_messages(message))
        if not history.tools:
            return messages
        functions = []
        for n, d, schema in map(tool_parts, history.tools):
            function = {"name": n, "description": d, "parameters": schema}
            functions.append({"type": "function", "function": function})
        return {"messages": messages, "tools": functions}

    def write_messages(self, message: Message) -> list[Any]:
        """Write one message (several, where one made here holds several results)."""
        if message.pristine:
            return [message.raw]
        return self.build_messages(message) if message.raw is None else [self.patch(message)]

    def patch(self, message: Message) -> dict[str, Any]:
        """Write an edited message into a copy of the one that was read."""
        raw = dict(message.raw)
        if message.role == "tool":
            return self.patch_result(raw, message.blocks[0])
        calls = [b for b in message.blocks if b.kind == "tool_use"]
        rest = [
            b
            for b in message.blocks
            if b.kind != "tool_use"
            and (b.raw is not None or b.kind not in (*THINKING_KINDS, "refusal"))
        ]
        if not any(b.kind == "thinking" and b.raw is None for b in message.blocks):
            for key in _THOUGHTS:
                raw.pop(key, None)
        old = raw.get("content")
        if isinstance(old, list):
            raw["content"] = [self.write_part(b) for b in rest]
        elif rest:
            plain = all(b.kind == "text" and b.cache_control is None for b in rest)
            raw["content"] = (
                "\n\n".join(b.text for b in rest) if plain else [self.write_part(b) for b in rest]
            )
        raw.pop("cache_control", None)
        if "tool_calls" in raw:
            raw["tool_calls"] = [self.write_call(b) for b in calls]
            if not calls:
                del raw["tool_calls"]
        elif calls and "function_call" in raw:
            raw["function_call"] = {**raw["function_call"], "arguments": calls[0].text}
        elif calls:
            raw["tool_calls"] = [self.write_call(b) for b in calls]
        return raw

    def patch_result(self, raw: dict[str, Any], block: Block) -> dict[str, Any]:
        """Write an edited result into a copy of its message."""
        if "rename" in block.edits:
            raw["tool_call_id"] = block.call_id
        old = raw.get("content")
        if text_changed(block):
            part = {"type": "text", "text": block.text}
            raw["content"] = [part] if isinstance(old, list) else block.text
        if "cache_control" in raw or (block.cache_control and not isinstance(old, list)):
            return with_cache(raw, block)
        if isinstance(raw.get("content"), list) and raw["content"]:
            *head, last = raw["content"]
            raw["content"] = [*head, with_cache(dict(last), block)]
        return raw

    def write_part(self, block: Block) -> Any:
        """Write one content part; unedited ones are the object that was read."""
        if block.raw is not None and not block.edits:
            return block.raw
        if block.raw is not None and not text_changed(block):
            return with_cache(dict(block.raw), block)
        if block.raw is not None and block.raw.get("type") == "text":
            return with_cache({**block.raw, "text": block.text}, block)
        return with_cache({"type": "text", "text": block.text}, block)

    def write_call(self, block: Block) -> Any:
        """Write one tool call; unedited ones are the object that was read."""
        if block.raw is None:
            return self.build_call(block)
        if not block.edits:
            return block.raw
        raw = dict(block.raw)
        if "rename" in block.edits:
            raw["id"] = block.call_id
        if text_changed(block):
            kind = "custom" if raw.get("type") == "custom" else "function"
            key = "input" if kind == "custom" else "arguments"
            raw[kind] = {**raw[kind], key: self.arguments(block)}
        return raw

    def build_call(self, block: Block) -> dict[str, Any]:
        """Build a tool call from the normal form."""
        function = {"name": block.tool or "tool", "arguments": self.arguments(block)}
        return {"id": block.call_id, "type": "function", "function": function}

    def arguments(self, block: Block) -> Any:
        """Return a call's arguments as this format writes them: JSON text."""
        return block.text

    def build_messages(self, message: Message) -> list[dict[str, Any]]:
        """Build messages from the normal form: results become tool messages of their own."""
        built: list[dict[str, Any]] = [
            self.build_result(b) for b in message.blocks if b.kind == "tool_result"
        ]
        calls = [b for b in message.blocks if b.kind == "tool_use"]
        rest = [b for b in message.blocks if b.kind not in ("tool_use", "tool_result")]
        role = message.role if message.role in self.roles[:4] else "user"
        if role == "assistant":
            rest = [b for b in rest if b.kind not in THINKING_KINDS]
        if not rest and not calls:
            return built
        if all(b.kind == "text" and b.cache_control is None for b in rest):
            content: Any = "\n\n".join(b.text for b in rest) if rest else None
        else:
            content = [self.build_part(b) for b in rest]
        raw: dict[str, Any] = {"role": role, "content": content}
        if calls:
            raw["tool_calls"] = [self.build_call(b) for b in calls]
        return [*built, raw]

    def build_result(self, block: Block) -> dict[str, Any]:
        """Build a tool message from the normal form."""
        return {"role": "tool", "tool_call_id": block.call_id, "content": block.text}

    def build_part(self, block: Block) -> dict[str, Any]:
        """Build a content part from the normal form."""
        if block.kind == "image" and (found := picture(block.raw)):
            mime, data, url = found
            link = f"data:{mime};base64,{data}" if data else url
            return {"type": "image_url", "image_url": {"url": link}}
        return with_cache({"type": "text", "text": block.text or f"[{block.kind}]"}, block)
