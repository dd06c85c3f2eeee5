"""counters: the tokens of messages as the model reads them, frames of the template included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvevict.agent.history import Message
from kvevict.agent.tokens import TokenizerCounter


class SpanCounter:
    """A token counter that knows the exact size of every message that was rendered.

    What was not rendered yet (a summary that is about to be written) is counted by the tokenizer.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._other = TokenizerCounter(tokenizer)
        self._known: dict[tuple[object, ...], int] = {}

    def learn(self, messages: Iterable[Message], sizes: Iterable[int]) -> None:
        """Take note of messages' rendered sizes in tokens."""
        self._known |= {
            message_key(m): int(s) for m, s in zip(messages, sizes, strict=True) if int(s)
        }

    def text(self, text: str) -> int:
        """Return the tokens of a text."""
        return self._other.text(text)

    def message(self, message: Message) -> int:
        """Return the tokens of a message."""
        known = self._known.get(message_key(message))
        return self._other.message(message) if known is None else known


def message_key(message: Message) -> tuple[object, ...]:
    """Return what two messages that render alike have in common."""
    return (message.role, *((b.kind, b.text, b.tool, b.call_id) for b in message.blocks))
