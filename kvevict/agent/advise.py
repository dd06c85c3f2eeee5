"""Advice: the four design questions of context eviction, answered for every block, with reasons.

1. Recoverable? Whatever a tool returns once more may go for free; what a person typed never comes
   back.
2. Needed for how long? A turn, the session, or for ever.
3. Cache-friendly? An edit makes everything behind it be written to the prompt cache again; it pays
   when what it frees is read often enough afterwards.
4. Should the user see it? What the user would miss must not go silently.

The answers are rules, not a model: each names the reason, so that it can be disagreed with. The
first two and the verb are `kvevict.agent.answers`, which the policy `shape` acts on as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvevict.agent.answers import Answer, Answers, Lifetime, Verb
from kvevict.agent.history import THINKING_KINDS, Address, Block, History, Message
from kvevict.agent.prices import Prices, get_prices
from kvevict.agent.tokens import TokenCounter, make_counter

_SOON = 10  # calls within which an edit should pay for its cache writes


@dataclass(frozen=True)
class Advice:
    """The four answers for one block, and what follows from them.

    Attributes:
        message: index of the message.
        block: index of the block in it.
        kind: kind of the block.
        tool: tool of a call or result.
        tokens: its estimated tokens.
        recoverable: 0 (never) to 1 (call the tool once more).
        lifetime: how long it is needed.
        break_even: calls after which evicting it has paid for the cache writes behind it; inf when
            it never does.
        cache_friendly: whether that happens within ten calls.
        visible: whether the user should see that it goes.
        verb: what to do with it.
        reasons: one sentence for each question, then one for the verb.
    """

    message: int
    block: int
    kind: str
    tool: str | None
    tokens: int
    recoverable: float
    lifetime: Lifetime
    break_even: float
    cache_friendly: bool
    visible: bool
    verb: Verb
    reasons: tuple[str, str, str, str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as JSON (an infinite break-even as null)."""
        row = asdict(self)
        row["break_even"] = None if math.isinf(self.break_even) else round(self.break_even, 1)
        return row


def advise(
    history: History,
    prices: str | Mapping[str, Any] | Prices = "sonnet",
    counter: TokenCounter | str | float | None = None,
) -> list[Advice]:
    """Answer the four questions for every block of a history.

    Args:
        history: any history.
        prices: price table for the cache's question.
        counter: counts tokens.

    Returns:
        One advice per block, in order.
    """
    table, counts = get_prices(prices), make_counter(counter)
    answers = Answers(history, lambda block: _tokens(block, counts))
    tokens = {
        (m, b): _tokens(block, counts)
        for m, message in enumerate(history.messages)
        for b, block in enumerate(message.blocks)
    }
    behind = sum(tokens.values())
    found = []
    for at, size in tokens.items():
        behind -= size
        found.append(_advise(history, at, answers.of(at), size, behind, table))
    return found


def _tokens(block: Block, counter: TokenCounter) -> int:
    return counter.message(Message("user", (block,)))


def _advise(
    history: History, at: Address, answer: Answer, size: int, behind: int, prices: Prices
) -> Advice:
    message, block = history.messages[at[0]], history.block(at)
    evens = _break_even(size, behind, prices)
    why_cache = (
        f"{behind} tokens stand behind it and would be written again; that is paid back after "
        f"{evens:.0f} calls"
        if not math.isinf(evens)
        else f"{behind} tokens behind it would be written again for nothing"
    )
    if behind == 0:
        why_cache = "nothing stands behind it: evicting it costs the cache nothing"
    visible, why_seen = _visible(message.role, block, answer.recoverable)
    why_back, why_long, why = answer.reasons
    return Advice(
        at[0],
        at[1],
        block.kind,
        block.tool,
        size,
        answer.recoverable,
        answer.lifetime,
        evens,
        evens <= _SOON,
        visible,
        answer.verb,
        (why_back, why_long, why_cache, why_seen, why),
    )


def _break_even(size: int, behind: int, prices: Prices) -> float:
    """Question 3: calls after which evicting `size` tokens has paid for writing what is behind."""
    saved = size * prices.cache_read
    extra = behind * max(0.0, prices.cache_write - prices.cache_read)
    if extra == 0:
        return 0.0
    return extra / saved if saved > 0 else math.inf


def _visible(role: str, block: Block, recoverable: float) -> tuple[bool, str]:
    """Question 4."""
    if role in ("system", "developer"):
        return True, "instructions must never go silently"
    if role == "user" and block.kind != "tool_result":
        return True, "users notice when their own words are forgotten"
    if block.kind in ("tool_result", "shell", "server_tool_result", "file"):
        if recoverable >= 1:
            return False, "a placeholder tells the model enough; the user loses nothing"
        return True, "it may be gone for good: leave a pointer that the user can follow"
    if block.kind in ("tool_use", *THINKING_KINDS):
        return False, "it is the agent's own working"
    return True, "users scroll back to answers: hide them, do not delete them"


def totals(found: list[Advice]) -> list[dict[str, Any]]:
    """Return tokens and blocks by verb, the largest first."""
    sums: dict[str, list[int]] = {}
    for advice in found:
        entry = sums.setdefault(advice.verb, [0, 0])
        entry[0] += advice.tokens
        entry[1] += 1
    return [
        {"verb": verb, "tokens": tokens, "blocks": blocks}
        for verb, (tokens, blocks) in sorted(sums.items(), key=lambda kv: -kv[1][0])
    ]
