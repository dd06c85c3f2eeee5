"""OpenAI Responses: a list of items, or a whole request with `input`, `instructions`, `tools`.

One item is one message of the normal form; a response's items (reasoning, calls) and their outputs
are one atom. Source: the Responses API reference and the types of the `openai` Python package.
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
    picture,
    read_all,
    text_changed,
    text_of,
    tool_parts,
    unknown,
    with_ids,
)
from kvevict.agent.history import Block, History, Message

ROLES = ("system", "developer", "user", "assistant")
# Calls that the client answers: item type -> (key of the arguments, default tool name).
CALLS = {
    "function_call": ("arguments", ""),
    "custom_tool_call": ("input", ""),
    "local_shell_call": ("action", "local_shell"),
    "shell_call": ("action", "shell"),
    "apply_patch_call": ("operation", "apply_patch"),
    "computer_call": ("action", "computer"),
}
OUTPUTS = tuple(f"{call}_output" for call in CALLS)
# Tools that the provider runs: call and result are one item.
SERVER = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
)
OTHER = ("message", "reasoning", "item_reference", "compaction", "compaction_trigger")
PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "refusal": "refusal",
    "input_image": "image",
    "input_file": "document",
    "input_audio": "audio",
}


class OpenAIResponses(Format, name="openai-responses"):
    """OpenAI Responses items."""

    rules: ClassVar[Rules] = Rules(adjacent=False)
    containers: ClassVar[tuple[str, ...]] = ("input",)

    def detect(self, obj: Any) -> float:
        """Item types of this API, or a request with `input`."""
        items = obj.get("input") if isinstance(obj, Mapping) else obj
        if isinstance(obj, Mapping) and isinstance(items, str):
            return 0.6
        if not isinstance(items, list) or not all(isinstance(m, Mapping) for m in items):
            return 0.0
        types = {m.get("type") for m in items if isinstance(m.get("type"), str)}
        known = {*CALLS, *OUTPUTS, *SERVER, *OTHER}
        bare = any(m.get("type") == "message" and "role" not in m for m in items)
        if bare or not types <= known:
            return 0.0
        if types or isinstance(obj, Mapping):
            return 0.9
        parts = {
            str(p.get("type"))
            for m in items
            if isinstance(m.get("content"), list)
            for p in m["content"]
            if isinstance(p, Mapping)
        }
        return 0.9 if parts & {"input_text", "output_text", "input_image", "input_file"} else 0.0

    def read(self, obj: Any, reuse: Sequence[Message] = ()) -> History:
        """Read a list of items or a request."""
        shell = None if isinstance(obj, list | tuple) else need_mapping(obj, None, "")
        items = obj if shell is None else shell.get("input")
        names: dict[str, str] = {}
        if isinstance(items, str):
            blocks: tuple[Block, ...] = (make("text", items),)
            read: tuple[Message, ...] = (Message("user", blocks, 0, items, blocks),)
        else:
            items = need_list(items, None, "input")
            read = read_all(items, reuse, self.read_item, "input", names)
        system: tuple[Block, ...] = ()
        tools: tuple[Any, ...] = ()
        if shell is not None:
            if isinstance(shell.get("instructions"), str):
                system = (make("text", shell["instructions"]),)
            tools = tuple(need_list(shell.get("tools") or [], None, "tools"))
        return History(read, self.name, system, tools, shell)

    def read_item(self, raw: Any, i: int, path: str, names: dict[str, str]) -> Message:
        """Read one item; `names` maps call ids to tool names and grows."""
        raw = need_mapping(raw, i, path)
        kind = raw.get("type", "message" if "role" in raw else None)
        if not isinstance(kind, str):
            raise unknown("item type", kind, ("message", *CALLS, *OUTPUTS), i, f"{path}.type")
        if kind == "message":
            role = raw.get("role")
            if role not in ROLES:
                raise unknown("role", role, ROLES, i, f"{path}.role")
            blocks = self.read_content(raw.get("content"), i, f"{path}.content")
            return Message(role, blocks, i, raw, blocks)
        block = self.read_part_item(kind, raw, i, path, names)
        role = "tool" if kind in OUTPUTS or kind == "mcp_approval_response" else "assistant"
        blocks = (block,)
        return Message(role, blocks, i, raw, blocks)

    def read_part_item(
        self, kind: Any, raw: Mapping[str, Any], i: int, path: str, names: dict[str, str]
    ) -> Block:
        """Read an item that is no message as one block."""
        if kind in CALLS:
            key, tool = CALLS[kind]
            call = need_text(raw.get("call_id", raw.get("id")), i, f"{path}.call_id")
            names[call] = tool or need_text(raw.get("name"), i, f"{path}.name")
            text = json_text(raw.get(key, ""), i, f"{path}.{key}")
            return make("tool_use", text, call_id=call, tool=names[call], raw=raw)
        if kind in OUTPUTS:
            call = need_text(raw.get("call_id", raw.get("id")), i, f"{path}.call_id")
            output = raw.get("output")
            text = text_of(output) or ("" if media_of(output) else _rest(output, i, path))
            return make(
                "tool_result",
                text,
                call_id=call,
                tool=names.get(call),
                raw=raw,
                media=media_of(output),
            )
        if kind == "reasoning":
            parts = [*(raw.get("summary") or ()), *(raw.get("content") or ())]
            hidden = raw.get("encrypted_content") or ""
            return make("thinking", text_of(parts), raw=raw, opaque=len(hidden))
        if kind in ("compaction", "compaction_trigger"):
            return make("compaction", raw=raw, opaque=len(raw.get("encrypted_content") or ""))
        if kind == "item_reference":
            return make("reference", str(raw.get("id", "")), raw=raw)
        if kind == "image_generation_call":
            return make("server_tool_use", raw=raw, tool=kind, media=("image",))
        if kind in SERVER:
            return make("server_tool_use", json_text(raw, i, path), raw=raw, tool=kind)
        raise unknown("item type", kind, (*OTHER, *CALLS, *OUTPUTS, *SERVER), i, f"{path}.type")

    def read_content(self, value: Any, i: int, path: str) -> tuple[Block, ...]:
        """Read the content of a message item."""
        if isinstance(value, str):
            return (make("text", value),)
        blocks = []
        for p, part in enumerate(need_list(value, i, path)):
            part = need_mapping(part, i, f"{path}[{p}]")
            kind = part.get("type")
            if not isinstance(kind, str) or kind not in PARTS:
                raise unknown("part type", kind, tuple(PARTS), i, f"{path}[{p}].type")
            text = part.get("refusal", "") if kind == "refusal" else text_of(part)
            blocks.append(make(PARTS[kind], text, raw=part, media=media_of(part)))
        return tuple(blocks)

    # -- writing --------------------------------------------------------------------------------

    def write(self, history: History) -> Any:
        """Write a list of items or, where it was read from one, a request."""
        if history.format == self.name:
            only = history.messages[0] if len(history) == 1 else None
            if only is not None and isinstance(only.raw, str) and len(only.blocks) == 1:
                return {**history.shell, "input": only.blocks[0].text}
            items = [raw for m in history.messages for raw in self.write_message(m)]
            return fill_container(history, "input", items)
        items = [raw for m in with_ids(history).messages for raw in self.build_items(m)]
        if not history.system and not history.tools:
            return items
        request: dict[str, Any] = {}
        if history.system:
            request["instructions"] = "\n\n".join(b.text for b in history.system if b.text)
        if history.tools:
            request["tools"] = [
                {"type": "function", "name": n, "description": d, "parameters": schema}
                for n, d, schema in map(tool_parts, history.tools)
            ]
        return {**request, "input": items}

    def write_message(self, message: Message) -> list[Any]:
        """Write one message as items; unedited ones are the object that was read."""
        if message.pristine and not isinstance(message.raw, str):
            return [message.raw]
        if message.raw is None or isinstance(message.raw, str):
            return self.build_items(message)
        if message.raw.get("type", "message") != "message":
            return [self.patch(message.raw, message.blocks[0])]
        old = message.raw.get("content")
        if isinstance(old, str) and len(message.blocks) == 1:
            return [{**message.raw, "content": message.blocks[0].text}]
        return [{**message.raw, "content": [self.write_part(b, message) for b in message.blocks]}]

    def write_part(self, block: Block, message: Message) -> Any:
        """Write one content part of a message item."""
        if block.raw is not None and not text_changed(block):
            return block.raw
        if block.raw is not None and PARTS[block.raw["type"]] == "text":
            return {**block.raw, "text": block.text}
        kind = "output_text" if message.role == "assistant" else "input_text"
        return {"type": kind, "text": block.text}

    def patch(self, raw: Mapping[str, Any], block: Block) -> dict[str, Any]:
        """Write an edited call or output into a copy of its item."""
        item = dict(raw)
        kind = raw["type"]
        if "rename" in block.edits:
            item["call_id" if "call_id" in raw else "id"] = block.call_id
        if not text_changed(block):
            return item
        if kind in OUTPUTS:
            old = raw.get("output")
            if kind == "computer_call_output":
                need(False, "a computer call's screenshot cannot become text", None, "output")
            if kind == "shell_call_output" and isinstance(old, list):
                item["output"] = [
                    {
                        "stdout": block.text,
                        "stderr": "",
                        "outcome": {"type": "exit", "exit_code": 0},
                    }
                ]
            elif isinstance(old, list):
                item["output"] = [{"type": "input_text", "text": block.text}]
            else:
                item["output"] = block.text
        elif kind in ("local_shell_call", "shell_call"):
            key = "command" if kind == "local_shell_call" else "commands"
            item["action"] = {**raw.get("action", {}), key: []}
        elif kind in CALLS:
            old = raw.get(CALLS[kind][0])
            item[CALLS[kind][0]] = block.text if isinstance(old, str) else json_object(block.text)
        return item

    def build_items(self, message: Message) -> list[Any]:
        """Build items from the normal form."""
        items: list[Any] = []
        parts: list[Any] = []
        role = message.role if message.role in ROLES else "user"
        kind = "output_text" if role == "assistant" else "input_text"
        for block in message.blocks:
            if block.kind == "tool_result":
                output = {"type": "function_call_output", "call_id": block.call_id}
                items.append({**output, "output": block.text})
            elif block.kind == "tool_use":
                call = {"type": "function_call", "call_id": block.call_id}
                items.append({**call, "name": block.tool or "tool", "arguments": block.text})
            elif block.kind == "image" and (found := picture(block.raw)):
                mime, data, url = found
                link = f"data:{mime};base64,{data}" if data else url
                parts.append({"type": "input_image", "image_url": link})
            elif block.kind not in ("thinking", "redacted_thinking"):
                parts.append({"type": kind, "text": block.text or f"[{block.kind}]"})
        if parts:
            head = {"type": "message", "role": role, "content": parts}
            items.insert(0, head) if role == "assistant" else items.append(head)
        return items


def _rest(output: Any, i: int, path: str) -> str:
    return "" if not output else json_text(output, i, f"{path}.output")
