"""Advice: the four design questions of context eviction, answered for every block, with reasons.

1. Recoverable? Whatever a tool returns once more may go for free; what a person typed never comes
   back.
2. Needed for how long? A turn, the session, or for ever.
3. Cache-friendly? An edit makes everything behind it be written to the prompt cache again; it pays
   when what it frees is read often enough afterwards.
4. Should the user see it? What the user would miss must not go silently.

The answers are rules, not a model: each names the reason, so that it can be disagreed with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvevict.agent.history import THINKING_KINDS, Address, Block, History, Message
from kvevict.agent.prices import Prices, get_prices
from kvevict.agent.tokens import TokenCounter, make_counter

Lifetime = Literal["turn", "session", "forever"]
Verb = Literal["keep", "mask", "drop", "summarise", "externalise"]

# Tools whose results are the agent's own notes and instructions.
_NOTES = re.compile(r"skill|memory|todo|plan|note", re.IGNORECASE)
_FOREVER = re.compile(
    r"\b(always|never|from now on|remember|in general|I prefer|we prefer|by default)\b|"
    r"\b(immer|niemals?|künftig|toujours|jamais|siempre|nunca)\b|总是|永远|记住",
    re.IGNORECASE,
)
_DECISION = re.compile(
    r"\b(decid|decision|because|root cause|cause\b|agreed|conclusion|must not|instead of|found)",
    re.IGNORECASE,
)
_LARGE = 500  # tokens from which a block is worth an edit of its own
_HOT = 3  # newest results that are still being worked with
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
    tokens = {
        (m, b): _tokens(block, counts)
        for m, message in enumerate(history.messages)
        for b, block in enumerate(message.blocks)
    }
    results = history.find("tool_result", "shell", "file")
    hot = frozenset(results[-_HOT:])
    again = _asked_again(history)
    behind = sum(tokens.values())
    found = []
    for at, size in tokens.items():
        behind -= size
        found.append(_advise(history, at, size, behind, table, at in hot, again.get(at)))
    return found


def _tokens(block: Block, counter: TokenCounter) -> int:
    return counter.message(Message("user", (block,)))


def _asked_again(history: History) -> dict[Address, int]:
    """Return the results whose very call was made again later, and the message of that call."""
    last: dict[tuple[str | None, str], tuple[int, Address]] = {}
    stale: dict[Address, int] = {}
    for call, result in sorted(history.pairs.results.items()):
        block = history.block(call)
        key = (block.tool, block.text)
        if key in last:
            stale[last[key][1]] = call[0]
        last[key] = (call[0], result)
    return stale


def _advise(
    history: History,
    at: Address,
    size: int,
    behind: int,
    prices: Prices,
    hot: bool,
    again: int | None,
) -> Advice:
    message, block = history.messages[at[0]], history.block(at)
    recoverable, why_back = _recoverable(message.role, block, again)
    lifetime, why_long = _lifetime(history, at, block, again)
    evens = _break_even(size, behind, prices)
    friendly = evens <= _SOON
    why_cache = (
        f"{behind} tokens stand behind it and would be written again; that is paid back after "
        f"{evens:.0f} calls"
        if not math.isinf(evens)
        else f"{behind} tokens behind it would be written again for nothing"
    )
    if behind == 0:
        why_cache = "nothing stands behind it: evicting it costs the cache nothing"
    visible, why_seen = _visible(message.role, block, recoverable)
    verb, why = _verb(history, at, block, size, recoverable, lifetime, hot)
    return Advice(
        at[0],
        at[1],
        block.kind,
        block.tool,
        size,
        recoverable,
        lifetime,
        evens,
        friendly,
        visible,
        verb,
        (why_back, why_long, why_cache, why_seen, why),
    )


def _recoverable(role: str, block: Block, again: int | None) -> tuple[float, str]:
    """Question 1."""
    if again is not None:
        return 1.0, f"the same call was made again in message {again}: the newer result replaces it"
    if block.kind == "tool_use":
        return block.recoverable, "the model can make the call again, but not know that it had"
    if block.kind in THINKING_KINDS:
        return block.recoverable, "the model can think it again from what it rests on"
    if block.recoverable >= 1:
        return block.recoverable, f"{block.tool or 'the client'} returns it once more when asked"
    if block.recoverable > 0:
        return block.recoverable, f"{block.tool or 'the tool'} may return something else next time"
    if role == "user":
        return 0.0, "a person wrote it: it never comes back"
    return 0.0, "nothing can return it once more"


def _lifetime(
    history: History, at: Address, block: Block, again: int | None
) -> tuple[Lifetime, str]:
    """Question 2."""
    message = history.messages[at[0]]
    if at[0] < history.prefix:
        return "forever", "instructions hold for every turn"
    if message.note or block.kind == "compaction":
        return "session", "it stands for what was evicted before"
    if message.typed and block.kind in ("text", "image", "document"):
        if _FOREVER.search(block.text):
            return "forever", "it states a rule or a preference beyond this task"
        return "session", "it states what the user wants"
    if block.kind in THINKING_KINDS:
        return "turn", "thinking serves the turn that it was thought in"
    if block.kind == "tool_result" and again is not None:
        return "turn", "a newer result of the same call is there"
    if block.kind in ("tool_use", "tool_result") and _NOTES.search(block.tool or ""):
        return "session", f"{block.tool} holds the agent's own notes or instructions"
    if block.kind == "tool_result" and block.is_error:
        return "session", "an error tells what not to try again"
    if block.kind in ("tool_result", "shell", "file", "server_tool_result"):
        return "turn", "its use is over once it has been acted on"
    if block.kind == "tool_use":
        return "session", "it tells what has been done"
    if _DECISION.search(block.text):
        return "session", "it holds a finding or a decision"
    return "turn", "it comments on the work at hand"


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


def _verb(
    history: History,
    at: Address,
    block: Block,
    size: int,
    recoverable: float,
    lifetime: Lifetime,
    hot: bool,
) -> tuple[Verb, str]:
    """Return what follows from the answers."""
    if at[0] in history.roots or block.protected:
        return "keep", "a root: system, first or last user message, pinned, or an open call"
    if hot:
        return "keep", "one of the newest results: the work is with it"
    if block.kind in THINKING_KINDS:
        turn = history.last_user
        if turn is not None and at[0] > turn:
            return "keep", "signed thinking of the latest turn must stay as it is (I4)"
        return "drop", "old thinking leaves whole; nothing refers to it"
    if lifetime == "forever":
        return "externalise", "write it to memory, so that it outlives the session, and keep it"
    if block.kind in ("tool_result", "shell", "file", "server_tool_result"):
        if size < _LARGE and recoverable < 1:
            return "keep", "too small to be worth an edit"
        if lifetime == "turn" and recoverable >= 1:
            return "mask", "recoverable and used up: a placeholder for free"
        return "externalise", "it cannot be had again for certain: store it, leave a pointer"
    if block.kind == "tool_use":
        if size >= _LARGE:
            return "mask", "large arguments can be emptied once the result is there"
        return "keep", "the call is the trace of what was done"
    return "summarise", "its words can be said in fewer"


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
