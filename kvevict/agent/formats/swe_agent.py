"""SWE-agent trajectories (.traj): `history` holds the messages, `trajectory` the steps.

Actions are text (or tool calls), observations are user or tool messages without or with ids; an
observation is a tool result of the action before it. The first observation is the task itself
(the instance template) and reads as a user message. Source: SWE-agent 1.x, `types.HistoryItem`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvevict.agent.formats.base import (
    Rules,
    make,
    media_of,
    need,
    need_mapping,
    need_text,
    text_of,
    unknown,
)
from kvevict.agent.formats.openai_chat import OpenAIChat
from kvevict.agent.history import Block, Message

ROLES = ("system", "user", "assistant", "tool")


class SWEAgent(OpenAIChat, name="swe-agent"):
    """SWE-agent trajectories."""

    rules: ClassVar[Rules] = Rules(adjacent=True, ids=False, breakpoints=4, log=True)
    roles: ClassVar[tuple[str, ...]] = ROLES
    containers: ClassVar[tuple[str, ...]] = ("history",)

    def detect(self, obj: Any) -> float:
        """A trajectory, or history items with a message type."""
        if isinstance(obj, Mapping):
            return 0.95 if "history" in obj and "trajectory" in obj else 0.0
        items = isinstance(obj, list) and obj and all(isinstance(m, Mapping) for m in obj)
        return 0.9 if items and all("message_type" in m and "role" in m for m in obj) else 0.0

    def read_message(self, raw: Any, i: int, path: str, names: dict[str, str]) -> Message:
        """Read one history item."""
        raw = need_mapping(raw, i, path)
        role, kind = raw.get("role"), raw.get("message_type")
        if role not in ROLES:
            raise unknown("role", role, ROLES, i, f"{path}.role")
        seen = "\0actions" in names  # an action stood before: observations answer it
        if role == "assistant":
            names["\0actions"] = ""
        if role == "tool" or (role == "user" and kind == "observation" and seen):
            blocks: tuple[Block, ...] = (self.read_result(raw, i, path, names),)
            return Message("tool", blocks, i, raw, blocks)
        message = super().read_message({**raw, "reasoning": None}, i, path, names)
        note = "demo" if raw.get("is_demo") or kind == "demonstration" else ""
        return Message(message.role, message.blocks, i, raw, message.blocks, note=note)

    def read_result(
        self, raw: Mapping[str, Any], i: int, path: str, names: dict[str, str]
    ) -> Block:
        """Read an observation as one result."""
        content = raw.get("content")
        need(isinstance(content, str | list), "expected a string or a list", i, f"{path}.content")
        ids = raw.get("tool_call_ids") or (raw.get("tool_call_id"),)
        call = ids[0] if isinstance(ids, list | tuple) and ids else None
        call = None if call is None else need_text(call, i, f"{path}.tool_call_ids[0]")
        last = content[-1] if isinstance(content, list) and content else {}
        inner = last.get("cache_control") if isinstance(last, Mapping) else None
        return make(
            "tool_result",
            text_of(content),
            call_id=call,
            tool=names.get(str(call), "bash"),
            media=media_of(content),
            cache_control=raw.get("cache_control", inner),
        )

    def patch_result(self, raw: dict[str, Any], block: Block) -> dict[str, Any]:
        """Write an edited observation into a copy of its item."""
        patched = super().patch_result(raw, block)
        if "rename" in block.edits and "tool_call_ids" in patched:
            patched.pop("tool_call_id", None)
            patched["tool_call_ids"] = [block.call_id, *patched["tool_call_ids"][1:]]
        return patched
