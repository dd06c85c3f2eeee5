"""pi sessions: JSON lines with a tree of entries; messages carry the provider's usage.

Roles user, assistant and toolResult are messages; `bashExecution` is a command that the user ran.
Entries that are no messages (compaction, model change, ...) become events. Source: pi's session
format (badlogic/pi-mono).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kvevict.agent.formats.base import (
    Format,
    Rules,
    interleave,
    json_object,
    json_text,
    learn_names,
    make,
    media_of,
    need,
    need_list,
    need_mapping,
    need_text,
    text_changed,
    text_of,
    unknown,
    with_ids,
)
from kvevict.agent.history import Block, Event, History, Message

ROLES = (
    "user",
    "assistant",
    "toolResult",
    "bashExecution",
    "custom",
    "branchSummary",
    "compactionSummary",
)
KINDS = ("text", "image", "thinking", "toolCall")


class Pi(Format, name="pi"):
    """pi sessions."""

    rules: ClassVar[Rules] = Rules(adjacent=True, log=True)

    def detect(self, obj: Any) -> float:
        """Entries with a type, the first of them a session or a message with pi's roles."""
        if not isinstance(obj, list) or not all(
            isinstance(e, Mapping) and "type" in e for e in obj
        ):
            return 0.0
        if obj and obj[0].get("type") == "session":
            return 0.95
        roles = {e["message"].get("role") for e in obj if isinstance(e.get("message"), Mapping)}
        return 0.8 if roles & {"toolResult", "bashExecution"} and roles <= set(ROLES) else 0.0

    def read(self, obj: Any, reuse: Sequence[Message] = ()) -> History:
        """Read a session: the list of its entries."""
        messages: list[Message] = []
        events: list[Event] = []
        places: list[int] = []  # message index of each entry
        names: dict[str, str] = {}
        learned = 0  # messages whose calls are in `names`
        for e, entry in enumerate(need_list(obj, None, "")):
            i = len(messages)
            places.append(i)
            if i < len(reuse) and reuse[i].raw is entry:
                messages.append(reuse[i])
                continue
            path = f"entries[{e}]"
            entry = need_mapping(entry, i, path)
            kind = entry.get("type")
            if kind == "message":
                learn_names(messages[learned:], names)
                learned = i
                messages.append(self.read_entry(entry, i, path, names))
            elif kind == "compaction":
                kept = entry.get("firstKeptEntryIndex")
                events.append(
                    Event(
                        len(messages),
                        "compaction",
                        entry,
                        str(entry.get("summary", "")),
                        entry.get("tokensBefore"),
                        places[kept] if isinstance(kept, int) and 0 <= kept < e else None,
                    )
                )
            else:
                need(isinstance(kind, str), "an entry has no type", len(messages), path)
                events.append(Event(len(messages), str(kind), entry))
        return History(tuple(messages), self.name, (), (), None, tuple(events))

    def read_entry(self, entry: Any, i: int, path: str, names: dict[str, str]) -> Message:
        """Read one message entry."""
        raw = need_mapping(entry.get("message"), i, f"{path}.message")
        path = f"{path}.message"
        role = raw.get("role")
        if role not in ROLES:
            raise unknown("role", role, ROLES, i, f"{path}.role")
        if role == "toolResult":
            call = need_text(raw.get("toolCallId"), i, f"{path}.toolCallId")
            content = raw.get("content")
            block = make(
                "tool_result",
                text_of(content),
                call_id=call,
                tool=raw.get("toolName") or names.get(call),
                media=media_of(content),
                is_error=bool(raw.get("isError")),
            )
            blocks: tuple[Block, ...] = (block,)
            return Message("tool", blocks, i, entry, blocks)
        if role == "bashExecution":
            text = f"$ {raw.get('command', '')}\n{raw.get('output', '')}"
            blocks = (make("shell", text, tool="bash"),)
            return Message("user", blocks, i, entry, blocks)
        if role in ("branchSummary", "compactionSummary"):
            blocks = (make("text", str(raw.get("summary", ""))),)
            return Message("user", blocks, i, entry, blocks, note="summary")
        content = raw.get("content")
        if isinstance(content, str):
            blocks = (make("text", content),)
        else:
            blocks = tuple(
                self.read_block(part, i, f"{path}.content[{b}]", names)
                for b, part in enumerate(need_list(content, i, f"{path}.content"))
            )
        usage = raw.get("usage") if role == "assistant" else None
        return Message(
            "assistant" if role == "assistant" else "user",
            blocks,
            i,
            entry,
            blocks,
            usage if isinstance(usage, Mapping) else None,
            str(raw.get("stopReason") or ""),
            note="note" if role == "custom" else "",
        )

    def read_block(self, raw: Any, i: int, path: str, names: dict[str, str]) -> Block:
        """Read one part of a message."""
        raw = need_mapping(raw, i, path)
        kind = raw.get("type")
        if kind == "text":
            return make("text", need_text(raw.get("text"), i, f"{path}.text"), raw=raw)
        if kind == "thinking":
            text = need_text(raw.get("thinking"), i, f"{path}.thinking")
            return make("thinking", text, raw=raw)
        if kind == "toolCall":
            call = need_text(raw.get("id"), i, f"{path}.id")
            names[call] = need_text(raw.get("name"), i, f"{path}.name")
            text = json_text(raw.get("arguments", {}), i, f"{path}.arguments")
            return make("tool_use", text, call_id=call, tool=names[call], raw=raw)
        if kind == "image":
            return make("image", raw=raw, media=("image",))
        raise unknown("part type", kind, KINDS, i, f"{path}.type")

    # -- writing --------------------------------------------------------------------------------

    def write(self, history: History) -> Any:
        """Write the session's entries."""
        own = history.format == self.name
        history = history if own else with_ids(history)
        written = []
        for m in history.messages:
            if own and m.blocks is m.source:  # unedited, the most common case by far
                written.append((m, m.raw))
            else:
                written += [(m, raw) for raw in self.write_message(m, own)]
        return interleave(history, written) if own else [raw for _, raw in written]

    def write_message(self, message: Message, own: bool) -> list[Any]:
        """Write one message as entries; unedited ones are the object that was read."""
        if own and message.pristine:
            return [message.raw]
        if not own or message.raw is None:
            return self.build_entries(message)
        inner = dict(message.raw["message"])
        if inner["role"] in ("bashExecution", "branchSummary", "compactionSummary"):
            key = "output" if inner["role"] == "bashExecution" else "summary"
            inner[key] = message.blocks[0].text
        elif inner["role"] == "toolResult":
            block = message.blocks[0]
            inner["toolCallId"] = block.call_id
            if text_changed(block):
                inner["content"] = [{"type": "text", "text": block.text}]
                inner.pop("details", None)
        elif isinstance(inner.get("content"), str) and len(message.blocks) == 1:
            inner["content"] = message.blocks[0].text
        else:
            inner["content"] = [self.write_block(b) for b in message.blocks]
        return [{**message.raw, "message": inner}]

    def write_block(self, block: Block) -> Any:
        """Write one part."""
        if block.raw is not None and not block.edits:
            return block.raw
        if block.kind == "tool_use":
            raw = dict(block.raw or {"type": "toolCall", "id": "", "name": block.tool or "tool"})
            raw["id"] = block.call_id
            if text_changed(block) or "arguments" not in raw:
                raw["arguments"] = json_object(block.text)
            return raw
        return {
            **(block.raw if block.kind == "text" and block.raw else {"type": "text"}),
            "text": block.text or f"[{block.kind}]",
        }

    def build_entries(self, message: Message) -> list[Any]:
        """Build entries from the normal form: results become messages of their own."""
        entries: list[Any] = []
        for block in message.blocks:
            if block.kind == "tool_result":
                inner = {
                    "role": "toolResult",
                    "toolCallId": block.call_id,
                    "toolName": block.tool or "tool",
                    "content": [{"type": "text", "text": block.text}],
                    "isError": block.is_error,
                }
                entries.append({"type": "message", "message": inner})
        rest = [self.write_block(_bare(b)) for b in message.blocks if b.kind != "tool_result"]
        if rest:
            role = "assistant" if message.role == "assistant" else "user"
            entries.append({"type": "message", "message": {"role": role, "content": rest}})
        return entries


def _bare(block: Block) -> Block:
    own = isinstance(block.raw, Mapping) and block.raw.get("type") in KINDS
    return block if own and block.kind != "text" else replace(block, raw=None)
