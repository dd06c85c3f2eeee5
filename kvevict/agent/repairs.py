"""Repair: a history that breaks I1, I2, I5, I8 or I9 made sendable, every change reported.

Deterministic, and a second repair finds nothing to do. Real sessions need it before any eviction:
aborted turns leave calls without results. The synthetic result "aborted" is Codex's
(`normalize.rs`); ids are derived from the call's own, so that prompt caches stay valid.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvevict.agent.edit import rename_calls, set_text, settle_breakpoints
from kvevict.agent.formats import from_normal, get_format, to_normal
from kvevict.agent.formats.base import Rules
from kvevict.agent.graphemes import encodable
from kvevict.agent.history import THINKING_KINDS, Address, Block, History, Message

ABORTED = "aborted"
OMITTED = "(earlier conversation omitted)"
_NAMESPACE = uuid.UUID("6f3c8f0e-5d0a-5b7c-9a51-9c1d2f6b7a10")


@dataclass(frozen=True)
class Repair:
    """One change made by `repair`.

    Attributes:
        code: the invariant that was broken.
        index: index of the message in the history as it was given, None for the whole.
        path: path of the part.
        message: what was done, in words.
    """

    code: str
    index: int | None
    path: str
    message: str


def repair(messages: Any, format: str = "auto", open_end: bool = False) -> tuple[Any, list[Repair]]:
    """Repair a message list, a request or a log.

    Args:
        messages: what `json.loads` gives, or a `History` (then a `History` is returned).
        format: a format's name, or "auto".
        open_end: leave the calls of the last response alone while nothing follows it.

    Returns:
        The repaired object and the list of changes; the very object given when there are none.

    Raises:
        HistoryError: a part that cannot be read, with its index and path.
    """
    history = messages if isinstance(messages, History) else to_normal(messages, format)
    fixed, done = repair_history(history, open_end)
    if not done:
        return messages, []
    return (fixed if isinstance(messages, History) else from_normal(fixed)), done


def repair_history(history: History, open_end: bool = False) -> tuple[History, list[Repair]]:
    """Repair a history; see `repair`."""
    rules = get_format(history.format).rules
    done: list[Repair] = []
    history = _rename(history, done)
    history = _pair(history, rules, done, open_end)
    history = _encode(history, done)
    if rules.nonempty:
        history = _fill(history, done)
    if rules.first_user and len(history) and history.messages[0].role == "assistant":
        opening = Message("user", (Block("text", OMITTED),), note="repair")
        history = replace(history, messages=(opening, *history.messages))
        done.append(Repair("I5", 0, "messages[0]", "a user message was put before the first"))
    if rules.breakpoints is not None:
        settled = settle_breakpoints(history)
        if settled != history:
            done.append(Repair("I9", None, "messages", "cache breakpoints were moved or removed"))
            history = settled
    return history, done


def answered_well(message: Message) -> bool:
    """Whether a message may stand between a call and its result: more calls, or more results."""
    if message.role == "assistant":
        return True
    return bool(message.blocks) and all(b.kind == "tool_result" for b in message.blocks)


def _rename(history: History, done: list[Repair]) -> History:
    """Give every repeated call id a name of its own, together with its result."""
    seen: dict[str, int] = {}
    calls = history.find("tool_use")
    taken = {history.block(at).call_id for at in calls}
    names: dict[Address, str] = {}
    for at in calls:
        call = history.block(at).call_id
        if call is None:
            continue
        seen[call] = count = seen.get(call, 0) + 1
        if count == 1:
            continue
        name = f"{call}_{uuid.uuid5(_NAMESPACE, f'{call}/{count}').hex[:8]}"
        while name in taken:
            name += "_"
        taken.add(name)
        names[at] = name
        if at in history.pairs.results:
            names[history.pairs.results[at]] = name
        done.append(_done("I2", history, at, f"repeated call id {call!r} renamed to {name!r}"))
    return rename_calls(history, names)


def _pair(history: History, rules: Rules, done: list[Repair], open_end: bool) -> History:
    """Put every result where it belongs, answer open calls, remove results without a call."""
    pairs = history.pairs
    results = dict(pairs.results)
    stray: dict[str | None, list[Address]] = {}
    for at in pairs.orphans:
        stray.setdefault(history.block(at).call_id, []).append(at)
    last = history.groups[-1] if history.groups else None
    synthetic: set[Address] = set()
    for at in pairs.unanswered:
        call = history.block(at).call_id
        if open_end and last is not None and at[0] >= last.start:
            continue
        if stray.get(call):
            results[at] = stray[call].pop(0)
            done.append(_done("I1", history, at, f"result of {call!r} moved behind its call"))
        else:
            synthetic.add(at)
            done.append(_done("I2", history, at, f"call {call!r} answered with {ABORTED!r}"))
    gone = {at for addresses in stray.values() for at in addresses}
    done += [
        _done("I1", history, at, f"result of {history.block(at).call_id!r} without a call removed")
        for at in sorted(gone)
    ]
    moved = _misplaced(history, rules, results, synthetic)
    done += [
        Repair("I2", m, f"messages[{m}]", f"results of message {m} put together behind it")
        for m in sorted(moved)
        if not any(at[0] == m for at in synthetic)
    ]
    if not (gone or moved or synthetic):
        return history
    return _rebuild(history, rules, results, synthetic, gone, moved)


def _misplaced(
    history: History, rules: Rules, results: dict[Address, Address], synthetic: set[Address]
) -> set[int]:
    """Return the messages whose calls' results are not where the format wants them."""
    messages = history.messages
    moved: set[int] = set()
    places: dict[int, set[int]] = {}
    for call, result in results.items():
        places.setdefault(call[0], set()).add(result[0])
        between = range(call[0] + 1, result[0])
        if result < call or (
            rules.adjacent and any(not answered_well(messages[i]) for i in between)
        ):
            moved.add(call[0])
    if rules.one_message:
        moved |= {m for m, where in places.items() if len(where) > 1}
        moved |= {at[0] for at in synthetic}
        for m, where in places.items():
            for i in where:
                kinds = [b.kind == "tool_result" for b in messages[i].blocks]
                if kinds != sorted(kinds, reverse=True):
                    moved.add(m)
    return moved


def _rebuild(
    history: History,
    rules: Rules,
    results: dict[Address, Address],
    synthetic: set[Address],
    gone: set[Address],
    moved: set[int],
) -> History:
    """Write the messages anew, moved and synthetic results behind their calls."""
    messages = history.messages
    answers: dict[int, list[Block | Address]] = {}
    taken = set(gone)
    for at in history.find("tool_use"):
        if at in synthetic:
            answers.setdefault(at[0], []).append(_synthetic(history.block(at)))
        elif at[0] in moved and at in results:
            answers.setdefault(at[0], []).append(results[at])
            taken.add(results[at])
    new: list[Message] = []
    waiting: list[Block | Address] = []
    for m, message in enumerate(messages):
        if waiting and not (message.role == "assistant" and _same_response(history, m)):
            if rules.one_message and message.role == "user":
                blocks = [_block(history, a) for a in waiting]
                rest = [b for b, _ in _left(message, m, taken)]
                rest.sort(key=lambda b: b.kind != "tool_result")
                new.append(replace(message, blocks=(*blocks, *rest)))
                waiting = []
                continue
            new += _messages(history, waiting, rules)
            waiting = []
        if any((m, b) in taken for b in range(len(message.blocks))):
            kept = tuple(b for b, _ in _left(message, m, taken))
            if kept:
                new.append(replace(message, blocks=kept))
        else:
            new.append(message)
        waiting += answers.get(m, [])
    new += _messages(history, waiting, rules)
    return replace(history, messages=tuple(new))


def _left(message: Message, m: int, taken: set[Address]) -> Iterator[tuple[Block, int]]:
    return ((b, i) for i, b in enumerate(message.blocks) if (m, i) not in taken)


def _same_response(history: History, m: int) -> bool:
    """Whether assistant message m continues the response of the message before it."""
    return (
        m > 0
        and history.messages[m - 1].role == "assistant"
        and (history.group_index[m] == history.group_index[m - 1])
    )


def _block(history: History, answer: Block | Address) -> Block:
    return answer if isinstance(answer, Block) else history.block(answer)


def _messages(history: History, answers: list[Block | Address], rules: Rules) -> list[Message]:
    """Return results as messages of their own: one message together, or one each."""
    if not answers:
        return []
    if rules.one_message:
        blocks = tuple(_block(history, a) for a in answers)
        return [Message("user", blocks, note="repair")]
    made = []
    for answer in answers:
        if not isinstance(answer, Block):
            old = history.messages[answer[0]]
            if len(old.blocks) == 1:
                made.append(old)
                continue
        made.append(Message("tool", (_block(history, answer),), note="repair"))
    return made


def _synthetic(call: Block) -> Block:
    return Block("tool_result", ABORTED, call_id=call.call_id, tool=call.tool, is_error=True)


def _encode(history: History, done: list[Repair]) -> History:
    """Replace lone surrogates, which cannot be sent, by U+FFFD."""
    messages = list(history.messages)
    for m, message in enumerate(messages):
        blocks = list(message.blocks)
        for b, block in enumerate(blocks):
            if encodable(block.text) or block.kind in THINKING_KINDS:
                continue
            clean = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in block.text)
            blocks[b] = replace(
                set_text(block, clean, "replace"), media=block.media, opaque=block.opaque
            )
            messages[m] = replace(message, blocks=tuple(blocks))
            done.append(_done("I8", history, (m, b), "lone surrogates replaced by U+FFFD"))
    return replace(history, messages=tuple(messages))


def _fill(history: History, done: list[Repair]) -> History:
    """Remove empty text blocks and empty messages; the only user message gets a word."""
    kept = []
    for m, message in enumerate(history.messages):
        blocks = tuple(b for b in message.blocks if b.kind != "text" or b.text.strip())
        if len(blocks) == len(message.blocks) and blocks:
            kept.append(message)
            continue
        where = f"messages[{message.index if message.index >= 0 else m}]"
        if blocks:
            kept.append(replace(message, blocks=blocks))
            done.append(Repair("I8", m, where, "an empty text block was removed"))
        elif message.role == "user":
            kept.append(replace(message, blocks=(Block("text", "(empty)"),)))
            done.append(Repair("I8", m, where, "an empty user message was marked as (empty)"))
        else:
            done.append(Repair("I8", m, where, "an empty message was removed"))
    return replace(history, messages=tuple(kept)) if done else history


def _done(code: str, history: History, at: Address, message: str) -> Repair:
    index = history.messages[at[0]].index
    index = at[0] if index < 0 else index
    return Repair(code, index, f"messages[{index}].content[{at[1]}]", message)
