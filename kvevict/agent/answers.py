"""Answers: is a block recoverable, how long is it needed, and so which verb is its own?

The one place that knows: `advise` tells these answers to people, the policy `shape` acts on them.
The answers are rules, not a model: each names its reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from kvevict.agent.history import THINKING_KINDS, Address, Block, History

Lifetime = Literal["turn", "session", "forever"]
Verb = Literal["keep", "mask", "drop", "summarise", "externalise"]

RESULT_KINDS = ("tool_result", "shell", "file", "server_tool_result")
LARGE = 500  # tokens from which a block is worth an edit of its own

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


@dataclass(frozen=True)
class Answer:
    """What is known of one block, whoever asks.

    Attributes:
        recoverable: 0 (never) to 1 (call the tool once more).
        lifetime: how long it is needed.
        verb: what follows from both.
        reasons: one sentence for each of the three.
    """

    recoverable: float
    lifetime: Lifetime
    verb: Verb
    reasons: tuple[str, str, str]


class Answers:
    """The answers for the blocks of one history.

    Args:
        history: any history.
        size: tokens of a block.
        hot: newest results that are still being worked with; they stay, and so do their calls.
        roots: messages that stay in any case; None means the history's own.
        recoverable: from how much on a result counts as one that can be had again.
    """

    def __init__(
        self,
        history: History,
        size: Callable[[Block], int],
        hot: int = 3,
        roots: Collection[int] | None = None,
        recoverable: float = 1.0,
    ) -> None:
        self.history = history
        self._size = size
        self._roots = history.roots if roots is None else roots
        self._enough = recoverable
        results = history.find("tool_result", "shell", "file")
        newest = set(results[-hot:]) if hot else set()
        self._calls = history.pairs.results
        self._hot = newest | {call for call, result in self._calls.items() if result in newest}
        self._again = asked_again(history)

    def of(self, at: Address) -> Answer:
        """Return the answers for one block."""
        message, block = self.history.messages[at[0]], self.history.block(at)
        again = self._again.get(at)
        recoverable, why_back = _recoverable(message.role, block, again)
        lifetime, why_long = _lifetime(self.history, at, block, again)
        verb, why = self._verb(at, block, recoverable, lifetime)
        return Answer(recoverable, lifetime, verb, (why_back, why_long, why))

    def wanting(self, verb: Verb, *kinds: str) -> Iterator[Address]:
        """Return the blocks of these kinds whose verb this is, in order."""
        return (at for at in self.history.find(*kinds) if self.of(at).verb == verb)

    def _verb(
        self, at: Address, block: Block, recoverable: float, lifetime: Lifetime
    ) -> tuple[Verb, str]:
        """Return what follows from the answers."""
        if at[0] in self._roots or block.protected:
            return "keep", "a root: system, first or last user message, pinned, or an open call"
        if at in self._hot:
            return "keep", "one of the newest results: the work is with it"
        if block.kind in THINKING_KINDS:
            turn = self.history.last_user
            if turn is not None and at[0] > turn:
                return "keep", "signed thinking of the latest turn must stay as it is (I4)"
            return "drop", "old thinking leaves whole; nothing refers to it"
        if lifetime == "forever":
            return "externalise", "write it to memory, so that it outlives the session, and keep it"
        if block.kind in RESULT_KINDS:
            back = recoverable >= self._enough
            if not back and self._size(block) < LARGE:
                return "keep", "too small to be worth an edit"
            if back and lifetime == "turn":
                return "mask", "recoverable and used up: a placeholder for free"
            if back:
                return "externalise", "it is needed for longer: store it, leave a pointer"
            return "externalise", "it cannot be had again for certain: store it, leave a pointer"
        if block.kind == "tool_use":
            if at in self._calls and self._size(block) >= LARGE:
                return "mask", "large arguments can be emptied once the result is there"
            return "keep", "the call is the trace of what was done"
        return "summarise", "its words can be said in fewer"


def asked_again(history: History) -> dict[Address, int]:
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
