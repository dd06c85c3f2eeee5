"""Pairing: which result answers which call, and which messages are one atom.

Calls and results pair by id: a result answers the nearest unanswered call of its id before it
(of several in one message, the first).
Where a format has no ids (chat templates), results pair with the calls of the assistant message
before them, in order.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvevict.agent.history import Message

Address = tuple[int, int]  # (message, block)


class Pairs(NamedTuple):
    """Calls and results of a history.

    Attributes:
        results: address of each answered call -> address of its result.
        unanswered: addresses of calls without a result, in order.
        orphans: addresses of results without a call before them, in order.
    """

    results: dict[Address, Address]
    unanswered: tuple[Address, ...]
    orphans: tuple[Address, ...]


def match(messages: tuple[Message, ...]) -> Pairs:
    """Pair every tool call with its result."""
    waiting: dict[str, list[Address]] = {}
    unnamed: list[Address] = []
    left: list[Address] = []
    pairs: dict[Address, Address] = {}
    orphans: list[Address] = []
    for m, message in enumerate(messages):
        if message.role == "assistant" and unnamed:
            left += unnamed
            unnamed = []
        for b, block in enumerate(message.blocks):
            at = (m, b)
            if block.kind == "tool_use":
                if block.call_id is None:
                    unnamed.append(at)
                else:
                    waiting.setdefault(block.call_id, []).append(at)
            elif block.kind == "tool_result":
                if block.call_id is None:
                    if unnamed:
                        pairs[unnamed.pop(0)] = at
                elif waiting.get(block.call_id):
                    calls = waiting[block.call_id]
                    nearest = next(k for k, call in enumerate(calls) if call[0] == calls[-1][0])
                    pairs[calls.pop(nearest)] = at
                else:
                    orphans.append(at)
    left += [at for addresses in waiting.values() for at in addresses] + unnamed
    return Pairs(pairs, tuple(sorted(left)), tuple(orphans))


def atoms(messages: tuple[Message, ...], pairs: Pairs) -> list[int]:
    """Return the first message of each atom, in order.

    An atom is one response of the model (all its messages, where a format splits a response into
    items) with all its results, or one message alone. Atoms are contiguous: a late result pulls
    everything between it and its call into one atom.
    """
    call_of = {result: call for call, result in pairs.results.items()}
    starts: list[int] = []
    for i, message in enumerate(messages):
        first = i
        if starts and message.role == "assistant" and _continues(messages, starts[-1], i):
            first = starts[-1]
        for b, block in enumerate(message.blocks):
            if block.kind != "tool_result":
                continue
            call = call_of.get((i, b))
            if call is not None and call[0] < i:
                first = min(first, starts[bisect_right(starts, call[0]) - 1])
            elif block.call_id is None and starts and messages[starts[-1]].role == "assistant":
                first = min(first, starts[-1])
        while starts and starts[-1] > first:
            starts.pop()
        if not starts or starts[-1] != first:
            starts.append(i)
    return starts


def _continues(messages: tuple[Message, ...], start: int, i: int) -> bool:
    """Whether assistant message i is part of the response that begins the atom at `start`."""
    if messages[start].role != "assistant":
        return False
    batch = messages[i].batch
    if batch is not None and batch in (messages[start].batch, messages[i - 1].batch):
        return True
    before = messages[i - 1]
    return before.role == "assistant" and (
        any(b.kind == "tool_use" for b in before.blocks)
        or all(b.kind in ("thinking", "redacted_thinking") for b in before.blocks)
    )
