"""planted: facts hidden in a history by carrier and depth, and the questions for them."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvevict.models.spans import Turn

DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
_NAMES = (
    "amber birch cedar delta ember falcon garnet harbor indigo juniper kestrel lotus "
    "maple nectar onyx pepper quartz raven saffron thistle umber violet walnut zinc"
)


@dataclass(frozen=True)
class Fact:
    """A sentence that stands in one message.

    Attributes:
        carrier: "system", "user", "tool result" or "tool arguments".
        depth: place of its message, as a share of all.
        message: the message.
        name: what is asked for.
        code: the answer, four digits.
    """

    carrier: str
    depth: float
    message: int
    name: str
    code: str

    @property
    def sentence(self) -> str:
        """What is planted."""
        return f"Note: the locker code of {self.name} is {self.code}."

    @property
    def question(self) -> str:
        """What the user asks."""
        return f"What is the locker code of {self.name}?"

    @property
    def opening(self) -> str:
        """How the answer begins; the code follows."""
        return f"The locker code of {self.name} is "


def plant(
    messages: Sequence[Turn], stop: int, depths: Sequence[float] = DEPTHS, seed: int = 0
) -> tuple[list[Turn], list[Fact]]:
    """Plant facts among the first `stop` messages.

    One stands in the system prompt, one in the first user message, and for every depth one in a
    tool result and one in a call's arguments (the message's text where calls are text). A message
    carries one fact at most; a depth without a free carrier is left out.

    Args:
        messages: chat-template messages; not changed.
        stop: messages before the last question.
        depths: shares of the way.
        seed: of names and codes.
    """
    draw = random.Random(seed)
    names = _NAMES.split()
    draw.shuffle(names)
    planted = [copy.deepcopy(dict(m)) for m in messages]
    facts: list[Fact] = []

    def put(carrier: str, depth: float, among: list[int]) -> None:
        free = [i for i in among if i not in {f.message for f in facts}]
        if not free or len(facts) == len(names):
            return
        place = min(free, key=lambda i: (abs(i - depth * (stop - 1)), i))
        fact = Fact(carrier, depth, place, names[len(facts)], f"{draw.randrange(1000, 10000)}")
        facts.append(fact)
        _write(planted[place], carrier, fact.sentence)

    roles = [m["role"] for m in planted[:stop]]
    put("system", 0.0, [i for i, r in enumerate(roles) if r == "system"])
    put("user", 0.0, [i for i, r in enumerate(roles) if r == "user"][:1])
    tools = [i for i, r in enumerate(roles) if r == "tool"]
    says = [i for i, r in enumerate(roles) if r == "assistant"]
    calls = [i for i in says if planted[i].get("tool_calls")] or says
    for depth in depths:
        put("tool result", depth, tools)
        put("tool arguments", depth, calls)
    return planted, facts


def _write(message: dict[str, Any], carrier: str, sentence: str) -> None:
    calls = message.get("tool_calls") or ()
    if carrier == "tool arguments" and calls:
        inner = calls[0].get("function", calls[0])
        if isinstance(inner.get("arguments"), dict):
            inner["arguments"]["note"] = sentence
            return
    text = message.get("content") or ""
    message["content"] = f"{text}\n{sentence}" if text else sentence
