"""OpenHands completion logs: one JSON file per model call, chat messages plus the response.

The request is `messages`, `tools` and `kwargs`; `response` (with its usage) becomes an `Event`.
Source: the telemetry of OpenHands/software-agent-sdk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kvevict.agent.formats.base import Rules
from kvevict.agent.formats.openai_chat import OpenAIChat
from kvevict.agent.history import Event, History, Message


class OpenHands(OpenAIChat, name="openhands"):
    """OpenHands completion logs."""

    rules: ClassVar[Rules] = Rules(adjacent=True, breakpoints=4)
    containers: ClassVar[tuple[str, ...]] = ("messages",)

    def detect(self, obj: Any) -> float:
        """A chat request beside its response, its cost and its latency."""
        if not isinstance(obj, Mapping) or "response" not in obj:
            return 0.0
        return 0.95 if "kwargs" in obj or "latency_sec" in obj else 0.0

    def read(self, obj: Any, reuse: Sequence[Message] = ()) -> History:
        """Read a log; its response stands behind the last message, as an event."""
        history = super().read(obj, reuse)
        response = obj.get("response") if isinstance(obj, Mapping) else None
        if not isinstance(response, Mapping):
            return history
        usage = response.get("usage")
        event = Event(
            len(history), "response", None, usage=usage if isinstance(usage, Mapping) else None
        )
        return replace(history, events=(event,))
