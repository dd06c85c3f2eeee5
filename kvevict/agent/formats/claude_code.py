"""Claude Code transcripts: JSON lines, one entry a message (or a streamed part of one).

Entries of one response share `message.id` and are one atom. Entries of sub-agents (`isSidechain`)
and everything that is no message (summaries, snapshots, system notices) become events; a
`compact_boundary` is a compaction. Source: transcripts as read by claude-code-log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kvevict.agent.formats.anthropic import Anthropic
from kvevict.agent.formats.base import (
    Rules,
    interleave,
    need_list,
    need_mapping,
    taken_over,
    with_ids,
)
from kvevict.agent.history import Event, History, Message


class ClaudeCode(Anthropic, name="claude-code"):
    """Claude Code transcripts."""

    rules: ClassVar[Rules] = Rules(adjacent=True, first_user=True, signed=True, log=True)

    def detect(self, obj: Any) -> float:
        """Entries with a session id whose message is Anthropic's."""
        if not isinstance(obj, list) or not all(isinstance(e, Mapping) for e in obj):
            return 0.0
        marks = [e for e in obj if "sessionId" in e or "parentUuid" in e]
        if any(e.get("type") in ("user", "assistant") for e in marks):
            return 0.95
        both = obj and all(e.get("type") in ("user", "assistant") and "message" in e for e in obj)
        return 0.7 if both else 0.0

    def read(self, obj: Any, reuse: Sequence[Message] = ()) -> History:
        """Read a transcript: the list of its entries."""
        messages: list[Message] = []
        events: list[Event] = []
        names: dict[str, str] = {}
        for e, entry in enumerate(need_list(obj, None, "")):
            path = f"entries[{e}]"
            entry = need_mapping(entry, len(messages), path)
            kind = str(entry.get("type"))
            if entry.get("isSidechain"):
                events.append(Event(len(messages), "sidechain", entry))
            elif kind in ("user", "assistant"):
                i = len(messages)
                old = taken_over(reuse, i, entry, names)
                messages.append(old or self.read_entry(entry, i, path, names))
            elif entry.get("subtype") == "compact_boundary":
                facts = entry.get("compactMetadata")
                before = facts.get("preTokens") if isinstance(facts, Mapping) else None
                events.append(
                    Event(
                        len(messages),
                        "compaction",
                        entry,
                        tokens_before=before,
                        first_kept=len(messages),
                    )
                )
            else:
                events.append(Event(len(messages), kind, entry, text=str(entry.get("summary", ""))))
        return History(tuple(messages), self.name, (), (), None, tuple(events))

    def read_entry(
        self, entry: Mapping[str, Any], i: int, path: str, names: dict[str, str]
    ) -> Message:
        """Read one message entry."""
        raw = need_mapping(entry.get("message"), i, f"{path}.message")
        message = self.read_message(raw, i, f"{path}.message", names)
        note = "summary" if entry.get("isCompactSummary") else "meta" if entry.get("isMeta") else ""
        usage = raw.get("usage")
        batch = raw.get("id") if message.role == "assistant" else None
        return replace(
            message,
            raw=entry,
            usage=usage if isinstance(usage, Mapping) else None,
            status=str(raw.get("stop_reason") or ""),
            batch=batch if isinstance(batch, str) else None,
            note=note,
        )

    def write(self, history: History) -> Any:
        """Write the transcript's entries."""
        own = history.format == self.name
        history = history if own else with_ids(history)
        written = []
        for message in history.messages:
            if own and message.pristine:
                written.append((message, message.raw))
            elif own and message.raw is not None:
                inner = message.raw["message"]
                content = self.write_content(inner.get("content"), message)
                entry = {**message.raw, "message": {**inner, "content": content}}
                entry.pop("toolUseResult", None)
                written.append((message, entry))
            else:
                raw = self.write_message(message, own)
                if raw["content"]:
                    written.append((message, {"type": raw["role"], "message": raw}))
        return interleave(history, written) if own else [raw for _, raw in written]
