"""Validation of histories: the invariants I1 to I14.

`validate` checks what one history can tell (I1, I2, I4, I5, I7, I8, I9); `compare` checks an edit
(I3, I4, I6, I7, I13 and nothing new of the others); `check_prefix`, `check_same` and
`check_budget` are I10, I11 and I12; I14 (a failed summariser changes nothing) is `check_same` of
the histories before and after. `repair` lives in `kvevict.agent.repairs`.

I1  a result follows its call: directly behind the assistant message, or anywhere after it where
    the format allows that.
I2  every call has exactly one result and ids are unique; all results of one response stand in one
    message, before any text, where the format demands it.
I3  the calls of one response leave or stay together.
I4  thinking stays as it was signed, first in its message; in the latest turn untouched. Reasoning
    items are followed by what they produced.
I5  the first message is a user message, system messages stand first, roles alternate, where the
    format demands it.
I6  system prompt and tools are untouched.
I7  a real user message remains, and the last message is one that the model answers.
I8  no empty content, and nothing that cannot be encoded.
I9  at most four cache breakpoints, none on empty, edited or thinking blocks.
I10 between two evictions requests only grow. I11 a policy applied twice does no more than once.
I12 the budget is met, or an error names the floor. I13 an edit never inflates. I14 see above.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvevict.agent.formats import get_format, to_normal
from kvevict.agent.formats.base import Rules, text_changed
from kvevict.agent.graphemes import encodable
from kvevict.agent.history import THINKING_KINDS, Address, Block, History, Message
from kvevict.agent.repairs import Repair, answered_well, repair
from kvevict.agent.tokens import TokenCounter

__all__ = [
    "Repair",
    "Violation",
    "check_budget",
    "check_history",
    "check_prefix",
    "check_same",
    "common_prefix",
    "compare",
    "repair",
    "validate",
]


@dataclass(frozen=True)
class Violation:
    """One broken invariant.

    Attributes:
        code: "I1" to "I14".
        index: index of the message at fault, None where it is the whole request.
        path: path of the part at fault.
        message: what is wrong, in words.
    """

    code: str
    index: int | None
    path: str
    message: str


def validate(messages: Any, format: str = "auto", strict: bool = False) -> list[Violation]:
    """Check a message list, a request or a log against the invariants.

    Args:
        messages: what `json.loads` gives, or a `History`.
        format: a format's name, or "auto".
        strict: also demand that user and assistant alternate (Mistral's and Gemma's templates).

    Returns:
        The violations in the order of the messages; empty when there are none.

    Raises:
        HistoryError: a part that cannot be read, with its index and path.
    """
    history = messages if isinstance(messages, History) else to_normal(messages, format)
    return check_history(history, strict)


def check_history(history: History, strict: bool = False) -> list[Violation]:
    """Check a history against the invariants that one history can tell."""
    rules = get_format(history.format).rules
    found = [
        *_pairs(history, rules),
        *_thinking(history, rules),
        *_roles(history, rules, strict),
        *_content(history, rules),
        *_breakpoints(history, rules),
    ]
    return sorted(
        found, key=lambda v: (-1 if v.index is None else v.index, int(v.code[1:]), v.path)
    )


def _at(code: str, at: Address, message: str) -> Violation:
    return Violation(code, at[0], f"messages[{at[0]}].content[{at[1]}]", message)


def _pairs(history: History, rules: Rules) -> Iterator[Violation]:
    """I1 and I2."""
    pairs = history.pairs
    for at in pairs.orphans:
        yield _at("I1", at, f"result of {history.block(at).call_id!r} has no call before it")
    for at in pairs.unanswered:
        yield _at("I2", at, f"call {history.block(at).call_id!r} has no result")
    seen: set[str] = set()
    for at in history.find("tool_use"):
        name = history.block(at).call_id
        if name is not None and name in seen:
            yield _at("I2", at, f"call id {name!r} is used twice")
        seen.add(name or "")
    if not rules.adjacent:
        return
    for call, result in pairs.results.items():
        if any(not answered_well(history.messages[i]) for i in range(call[0] + 1, result[0])):
            yield _at(
                "I1", result, f"result of {history.block(call).call_id!r} is not behind its call"
            )
    if rules.one_message:
        yield from _one_message(history)


def _one_message(history: History) -> Iterator[Violation]:
    places: dict[int, set[int]] = {}
    for call, result in history.pairs.results.items():
        places.setdefault(call[0], set()).add(result[0])
    for m, where in sorted(places.items()):
        if len(where) > 1:
            yield Violation(
                "I2",
                max(where),
                f"messages[{max(where)}]",
                f"results of message {m} are split over messages {sorted(where)}",
            )
    for m, message in enumerate(history.messages):
        kinds = [b.kind for b in message.blocks]
        if "tool_result" in kinds:
            late = [
                b
                for b, k in enumerate(kinds)
                if k == "tool_result" and any(x != "tool_result" for x in kinds[:b])
            ]
            for b in late:
                yield _at("I2", (m, b), "a result stands behind other content of its message")


def _thinking(history: History, rules: Rules) -> Iterator[Violation]:
    """I4."""
    for m, b in history.find(*THINKING_KINDS):
        message, block = history.messages[m], history.block((m, b))
        if text_changed(block):
            yield _at("I4", (m, b), "a thinking block was changed")
        if rules.signed:
            raw = block.raw if isinstance(block.raw, dict) else {}
            if block.kind == "thinking" and not raw.get("signature"):
                yield _at("I4", (m, b), "a thinking block has no signature")
            before = {x.kind for x in message.blocks[:b]}
            if before & {"text", "tool_use"} and not before & {"server_tool_use"}:
                yield _at("I4", (m, b), "a thinking block stands behind other content")
        if history.format == "openai-responses":
            after = history.messages[m + 1] if m + 1 < len(history) else None
            if after is None or after.role != "assistant":
                yield _at("I4", (m, b), "a reasoning item is not followed by what it produced")


def _roles(history: History, rules: Rules, strict: bool) -> Iterator[Violation]:
    """I5 and I7."""
    messages = history.messages
    if not messages:
        yield Violation("I7", None, "messages", "there is no message")
        return
    first = messages[history.prefix] if history.prefix < len(messages) else None
    if rules.first_user and first is not None and first.role != "user":
        yield Violation(
            "I5",
            history.prefix,
            f"messages[{history.prefix}].role",
            f"the first message is from {first.role}, not from the user",
        )
    if rules.system_first:
        for m in range(history.prefix, len(messages)):
            if messages[m].role == "system":
                yield Violation("I5", m, f"messages[{m}].role", "a system message is not first")
    if strict or rules.alternate:
        for m in range(history.prefix + 1, len(messages)):
            if messages[m].role == messages[m - 1].role != "tool":
                yield Violation(
                    "I5", m, f"messages[{m}].role", f"two {messages[m].role} messages in a row"
                )
    if not history.users:
        yield Violation("I7", None, "messages", "there is no user message")
    if not rules.log and messages[-1].role not in rules.last:
        yield Violation(
            "I7",
            len(messages) - 1,
            f"messages[{len(messages) - 1}].role",
            f"the last message is from {messages[-1].role}: the model would continue it",
        )


def _content(history: History, rules: Rules) -> Iterator[Violation]:
    """I8."""
    for m, message in enumerate(history.messages):
        if rules.nonempty and not message.blocks and m + 1 < len(history):
            yield Violation("I8", m, f"messages[{m}].content", "a message is empty")
        for b, block in enumerate(message.blocks):
            if rules.nonempty and is_empty(block):
                yield _at("I8", (m, b), f"a {block.kind} block is empty")
            if not encodable(block.text):
                yield _at("I8", (m, b), "a lone surrogate: the text cannot be sent as UTF-8")


def _breakpoints(history: History, rules: Rules) -> Iterator[Violation]:
    """I9."""
    marked = [
        (m, b)
        for m, message in enumerate(history.messages)
        for b, block in enumerate(message.blocks)
        if block.cache_control is not None
    ]
    for at in marked:
        block = history.block(at)
        if block.kind in THINKING_KINDS or is_empty(block):
            yield _at("I9", at, f"a cache breakpoint on a {block.kind} block that cannot hold it")
        elif {"mask", "empty"} & set(block.edits):
            yield _at("I9", at, "a cache breakpoint on a block that was evicted")
    more = len(marked) + sum(1 for b in history.system if b.cache_control is not None)
    more += sum(1 for t in history.tools if isinstance(t, dict) and t.get("cache_control"))
    if rules.breakpoints is not None and more > rules.breakpoints:
        yield Violation(
            "I9", None, "messages", f"{more} cache breakpoints, at most {rules.breakpoints}"
        )


def is_empty(block: Block) -> bool:
    """Whether a text block says nothing."""
    return block.kind == "text" and not block.text.strip() and not block.media


# -- invariants that compare ----------------------------------------------------------------------


def compare(
    before: History, after: History, counter: TokenCounter | None = None
) -> list[Violation]:
    """Check an edit: I3, I4, I6, I7, I13, and no violation that was not there before.

    Args:
        before: the history as it was.
        after: the edited history; its messages keep their `index`.
        counter: where given, `after` must not be larger in its tokens (I13).
    """
    found: list[Violation] = []
    if after.system != before.system or after.tools != before.tools:
        found.append(Violation("I6", None, "system", "the system prompt or the tools were changed"))
    found += [
        Violation("I6", m, f"messages[{m}]", "a system message was changed")
        for m in range(before.prefix)
        if m >= len(after) or after.messages[m].blocks != before.messages[m].blocks
    ]
    kept = {m.index: m for m in after.messages if m.index >= 0}
    for group in before.groups:
        members = before.messages[group.start : group.stop]
        inside = [m.index in kept for m in members if m.index >= 0]
        if any(inside) and not all(inside):
            found.append(
                Violation(
                    "I3",
                    group.start,
                    f"messages[{group.start}]",
                    f"messages {group.start} to {group.stop - 1} are one atom and were split",
                )
            )
    found += _latest_thinking(before, kept)
    if before.users and not after.users:
        found.append(Violation("I7", None, "messages", "the last user message went"))
    if counter is not None:
        old, new = (sum(map(counter.message, h.messages)) for h in (before, after))
        if new > old:
            found.append(Violation("I13", None, "messages", f"{new} tokens after, {old} before"))
    known = {(v.code, v.message) for v in check_history(before)}
    return found + [v for v in check_history(after) if (v.code, v.message) not in known]


def _latest_thinking(before: History, kept: dict[int, Message]) -> Iterator[Violation]:
    """I4 for the latest turn: its thinking is untouched while its messages are there."""
    start = before.group_of(before.last_user).start if before.last_user is not None else 0
    for m in range(start, len(before)):
        old = before.messages[m]
        new = kept.get(old.index)
        if new is None:
            continue
        thoughts = [b for b in old.blocks if b.kind in THINKING_KINDS]
        if thoughts != [b for b in new.blocks if b.kind in THINKING_KINDS]:
            yield Violation(
                "I4", m, f"messages[{m}]", "thinking of the latest turn was changed or dropped"
            )


def common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many messages two rendered requests share from the start."""
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if a is not b and (a != b or json.dumps(a) != json.dumps(b)):
            return i
    return min(len(first), len(second))


def check_prefix(previous: Sequence[Any], current: Sequence[Any]) -> list[Violation]:
    """I10: the current request begins with the whole previous one."""
    shared = common_prefix(previous, current)
    if shared == len(previous):
        return []
    return [
        Violation(
            "I10",
            shared,
            f"messages[{shared}]",
            f"only {shared} of the {len(previous)} messages of the last request are unchanged",
        )
    ]


def check_same(first: Any, second: Any, code: str = "I11") -> list[Violation]:
    """I11 and I14: two rendered requests are the same bytes."""
    if first is second or json.dumps(first) == json.dumps(second):
        return []
    return [Violation(code, None, "messages", "the second result differs from the first")]


def check_budget(tokens: int, budget: int) -> list[Violation]:
    """I12: the request fits its budget."""
    if tokens <= budget:
        return []
    return [Violation("I12", None, "messages", f"{tokens} tokens do not fit into {budget}")]
