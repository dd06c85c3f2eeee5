"""Edits of a history, the same for every format: each takes a history and returns a new one.

Addresses `(message, block)` and group numbers count in the history that is passed in. Edits keep
atoms whole (a call never loses its result), never touch protected blocks, and carry a cache
breakpoint of what they change to the last kept block before it. An edit that would break an atom
raises `HistoryError` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from kvevict.agent.graphemes import shorten
from kvevict.agent.history import THINKING_KINDS, Address, Block, History, Message
from kvevict.errors import HistoryError

MAX_BREAKPOINTS = 4
_TEXT_EDITS = frozenset({"mask", "empty", "truncate", "replace"})


def with_blocks(history: History, blocks: Mapping[Address, Block]) -> History:
    """Return the history with some blocks replaced; the base of every block edit.

    Raises:
        HistoryError: a protected block among them.
    """
    if not blocks:
        return history
    by_message: dict[int, dict[int, Block]] = {}
    for (m, b), block in blocks.items():
        if history.messages[m].blocks[b].protected and block != history.messages[m].blocks[b]:
            raise HistoryError("a protected block cannot be edited", m, _path(m, b))
        by_message.setdefault(m, {})[b] = block
    messages = list(history.messages)
    for m, changes in by_message.items():
        old = messages[m].blocks
        messages[m] = replace(
            messages[m], blocks=tuple(changes.get(b, block) for b, block in enumerate(old))
        )
    return replace(history, messages=tuple(messages))


def set_text(block: Block, text: str, edit: str) -> Block:
    """Return a block whose content is this text alone (media and opaque data go).

    Raises:
        HistoryError: an empty text: providers refuse empty parts (I8).
    """
    if not text:
        raise HistoryError(f"a {block.kind} block cannot be edited to empty text")
    edits = block.edits if edit in block.edits else (*block.edits, edit)
    return replace(block, text=text, media=(), opaque=0, tokens=None, edits=edits)


def mask(history: History, texts: Mapping[Address, str]) -> History:
    """Replace the content of tool results (or files, shell outputs, media) by placeholders.

    The call stays, and so does the result's place, id and error flag.

    Args:
        history: any history.
        texts: placeholder by address.
    """
    for m, b in texts:
        kind = history.block((m, b)).kind
        if kind in ("tool_use", "server_tool_use", "compaction", *THINKING_KINDS):
            raise HistoryError(f"a {kind} block cannot be masked", m, _path(m, b))
    changed = {at: set_text(history.block(at), text, "mask") for at, text in texts.items()}
    return settle_breakpoints(with_blocks(history, changed))


def empty_input(history: History, at: Iterable[Address]) -> History:
    """Empty the arguments of tool calls whole: they stay a JSON object, `{}`.

    Raises:
        HistoryError: an address that is no tool call.
    """
    changed = {}
    for m, b in at:
        block = history.block((m, b))
        if block.kind not in ("tool_use", "server_tool_use"):
            raise HistoryError(f"a {block.kind} block has no tool input", m, _path(m, b))
        changed[(m, b)] = set_text(block, "{}", "empty")
    return settle_breakpoints(with_blocks(history, changed))


def truncate(
    history: History, at: Address, limit: int, marker: str = "…", keep: str = "head"
) -> History:
    """Shorten the text of one block to at most `limit` characters, between graphemes.

    Raises:
        HistoryError: a tool call (its arguments are emptied whole, never shortened), thinking, or
            a limit that leaves nothing.
    """
    block = history.block(at)
    if block.kind in ("tool_use", "server_tool_use", "compaction", *THINKING_KINDS):
        raise HistoryError(f"a {block.kind} block cannot be shortened", at[0], _path(*at))
    text = shorten(block.text, limit, marker, keep)
    if text == block.text:
        return history
    return settle_breakpoints(with_blocks(history, {at: set_text(block, text, "truncate")}))


def drop_groups(history: History, groups: Iterable[int]) -> History:
    """Drop whole atoms.

    Args:
        history: any history.
        groups: numbers of the groups, as in `history.groups`.

    Raises:
        HistoryError: a protected message among them.
    """
    gone = {i for g in groups for i in range(history.groups[g].start, history.groups[g].stop)}
    return _without(history, gone)


def drop_messages(history: History, messages: Iterable[int]) -> History:
    """Drop messages that together are whole atoms.

    Raises:
        HistoryError: an atom that would be split, or a protected message.
    """
    gone = set(messages)
    for group in history.groups:
        inside = [i for i in range(group.start, group.stop) if i in gone]
        if inside and len(inside) != group.stop - group.start:
            raise HistoryError(
                f"messages {group.start} to {group.stop - 1} are one atom (calls and results)",
                inside[0],
                f"messages[{inside[0]}]",
            )
    return _without(history, gone)


def drop_blocks(history: History, at: Iterable[Address]) -> History:
    """Drop single blocks whole (old thinking, images); a message left empty goes too.

    Raises:
        HistoryError: a call or result (drop its group, or mask it), or a protected block.
    """
    gone = set(at)
    for m, b in gone:
        block = history.block((m, b))
        if block.kind in ("tool_use", "tool_result"):
            raise HistoryError(f"a {block.kind} block leaves only with its group", m, _path(m, b))
        if block.protected:
            raise HistoryError("a protected block cannot be dropped", m, _path(m, b))
    if not gone:
        return history
    messages = list(history.messages)
    for m in {m for m, _ in gone}:
        kept = tuple(x for b, x in enumerate(messages[m].blocks) if (m, b) not in gone)
        messages[m] = replace(messages[m], blocks=kept)
    lost = [at for at in sorted(gone) if history.block(at).cache_control is not None]
    for m, b in lost:
        _carry(messages, m, b, history.block((m, b)))
    kept_messages = tuple(x for x in messages if x.blocks or x.pristine)
    return replace(history, messages=kept_messages)


def inserted(text: str, role: str = "user", note: str = "summary") -> Message:
    """Return a new message of one text block; `note` says what it is.

    Raises:
        HistoryError: a role other than user or assistant, or empty text.
    """
    if role not in ("user", "assistant"):
        raise HistoryError(f"inserted messages have role user or assistant, not {role!r}")
    if not text:
        raise HistoryError("an inserted message cannot be empty")
    return Message(role=role, blocks=(Block(kind="text", text=text),), note=note)


def insert(history: History, before: int, *messages: Message) -> History:
    """Insert messages before an atom; `before=len(history)` appends.

    Raises:
        HistoryError: a place inside an atom or inside the system prefix.
    """
    if before not in history.cuts or before < history.prefix:
        raise HistoryError(
            "messages are inserted between atoms only", before, f"messages[{before}]"
        )
    old = history.messages
    return replace(history, messages=(*old[:before], *messages, *old[before:]))


def replace_span(
    history: History, start: int, stop: int, text: str, role: str = "user", note: str = "summary"
) -> History:
    """Replace messages `start` to `stop - 1` by one message, at the place of the span.

    Raises:
        HistoryError: a span that cuts an atom or holds a protected message.
    """
    message = inserted(text, role, note)
    if start not in history.cuts or stop not in history.cuts or start >= stop:
        raise HistoryError(f"messages {start} to {stop - 1} are no whole atoms", start)
    return insert(_without(history, set(range(start, stop))), start, message)


def rename_calls(history: History, names: Mapping[Address, str]) -> History:
    """Give calls and results other ids; pass a call and its result together."""
    changed = {}
    for address, name in names.items():
        block = history.block(address)
        edits = block.edits if "rename" in block.edits else (*block.edits, "rename")
        changed[address] = replace(block, call_id=name, edits=edits)
    return with_blocks(history, changed)


def settle_breakpoints(history: History) -> History:
    """Move cache breakpoints off edited, empty and thinking blocks to the last kept block before.

    At most four stay, the last ones (I9).
    """
    marked = [
        (m, b)
        for m, message in enumerate(history.messages)
        for b, block in enumerate(message.blocks)
        if block.cache_control is not None
    ]
    if not marked:
        return history
    messages = list(history.messages)
    for m, b in marked:
        block = messages[m].blocks[b]
        if not _can_hold(block, edited_too=False):
            _set_cache(messages, (m, b), None)
            _carry(messages, m, b, block)
    marked = [
        (m, b)
        for m, message in enumerate(messages)
        for b, block in enumerate(message.blocks)
        if block.cache_control is not None
    ]
    for at in marked[:-MAX_BREAKPOINTS]:
        _set_cache(messages, at, None)
    return replace(history, messages=tuple(messages))


def _can_hold(block: Block, edited_too: bool) -> bool:
    """Whether a cache breakpoint may stand on a block."""
    if block.kind in THINKING_KINDS or not (block.text or block.media or block.opaque):
        return False
    return edited_too or not _TEXT_EDITS & set(block.edits)


def _carry(messages: list[Message], m: int, b: int, lost: Block) -> None:
    """Put the breakpoint of a block that went on the last block before it that can hold it."""
    for i in range(m, -1, -1):
        blocks = messages[i].blocks
        for j in range(min(b, len(blocks)) - 1 if i == m else len(blocks) - 1, -1, -1):
            if blocks[j].cache_control is not None:
                return
            if _can_hold(blocks[j], edited_too=False) and not blocks[j].protected:
                _set_cache(messages, (i, j), lost.cache_control)
                return


def _set_cache(messages: list[Message], at: Address, value: object) -> None:
    blocks = list(messages[at[0]].blocks)
    block = blocks[at[1]]
    edits = block.edits if "cache" in block.edits else (*block.edits, "cache")
    blocks[at[1]] = replace(block, cache_control=value, edits=edits)
    messages[at[0]] = replace(messages[at[0]], blocks=tuple(blocks))


def _without(history: History, gone: set[int]) -> History:
    """Drop messages, carrying their cache breakpoints back."""
    if not gone:
        return history
    for i in sorted(gone):
        if history.messages[i].protected:
            raise HistoryError("a protected message cannot be dropped", i, f"messages[{i}]")
        if i < history.prefix:
            raise HistoryError("system messages are never dropped (I6)", i, f"messages[{i}]")
    messages = list(history.messages)
    lost = [
        (i, b)
        for i in sorted(gone)
        for b, block in enumerate(messages[i].blocks)
        if block.cache_control is not None
    ]
    for i in gone:
        messages[i] = replace(messages[i], blocks=())
    for i, b in lost:
        _carry(messages, i, b, history.messages[i].blocks[b])
    kept = tuple(message for i, message in enumerate(messages) if i not in gone)
    return replace(history, messages=kept)


def _path(m: int, b: int) -> str:
    return f"messages[{m}].content[{b}]"
