"""The edit log: an edited history as JSON, to be applied again to the same full history.

The log is a list of entries that together name every message of the edited history in order:
`{"keep": [a, b]}` for messages a to b - 1 of the full history as they are, `{"edit": i, "blocks":
[...]}` for one whose blocks changed (a number is a block as it was, an object a changed or new
one), `{"insert": {...}}` for one that a policy wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvevict.agent.history import Block, Message
from kvevict.errors import HistoryError

Entry = dict[str, Any]


def encode(messages: Sequence[Message], full: Sequence[Message]) -> list[Entry]:
    """Return the log of an edited history.

    Args:
        messages: the edited history; `index` names the place in `full`, -1 what was inserted.
        full: the history as it was.
    """
    log: list[Entry] = []
    for message in messages:
        i = message.index
        if i < 0:
            log.append({"insert": _inserted(message)})
        elif message is full[i] or message.blocks == full[i].blocks:
            last = log[-1].get("keep") if log else None
            if last is not None and last[1] == i:
                last[1] = i + 1
            else:
                log.append({"keep": [i, i + 1]})
        else:
            log.append({"edit": i, "blocks": _changed(message.blocks, full[i].blocks)})
    return log


def _inserted(message: Message) -> Entry:
    entry: Entry = {
        "role": message.role,
        "note": message.note,
        "texts": [block.text for block in message.blocks],
    }
    return {**entry, "raw": message.raw} if message.raw is not None else entry


def _changed(blocks: Sequence[Block], source: Sequence[Block]) -> list[Any]:
    """Return blocks as the numbers of their sources, with what differs from those."""
    out: list[Any] = []
    start = 0
    for block in blocks:
        at = next((j for j in range(start, len(source)) if _descends(block, source[j])), None)
        if at is None:
            out.append({"text": block.text, "kind": block.kind})
            continue
        start = at + 1
        if block == source[at]:
            out.append(at)
            continue
        patch: Entry = {"of": at, "edits": list(block.edits)}
        if block.text != source[at].text or block.media != source[at].media:
            patch |= {"text": block.text, "bare": not block.media and not block.opaque}
        if block.cache_control != source[at].cache_control:
            patch["cache_control"] = block.cache_control
        if block.call_id != source[at].call_id:
            patch["call_id"] = block.call_id
        out.append(patch)
    return out


def _descends(block: Block, source: Block) -> bool:
    """Whether a block was made from another by edits."""
    if block is source:
        return True
    same = block.kind == source.kind and block.raw is source.raw and block.tool == source.tool
    return same and (block.edits != source.edits or block == source)


def decode(log: Sequence[Any], full: Sequence[Message], upto: int) -> tuple[Message, ...]:
    """Apply a log to a full history.

    Args:
        log: what `encode` returned.
        full: the full history.
        upto: messages of it that the log speaks of.

    Raises:
        HistoryError: a log that does not fit this history.
    """
    messages: list[Message] = []
    try:
        for entry in log:
            if "keep" in entry:
                first, last = entry["keep"]
                if not 0 <= first <= last <= upto <= len(full):
                    raise IndexError(last)
                messages += full[first:last]
            elif "edit" in entry:
                if not 0 <= entry["edit"] < upto <= len(full):
                    raise IndexError(entry["edit"])
                messages.append(_patched(full[entry["edit"]], entry["blocks"]))
            else:
                messages.append(_made(entry["insert"]))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise HistoryError(
            f"the state does not fit this history ({error!r}): it was made for another one; "
            "start with state=None"
        ) from None
    return tuple(messages)


def _made(entry: Mapping[str, Any]) -> Message:
    raw = entry.get("raw")
    if raw is not None:
        hidden = len(raw.get("encrypted_content") or "")
        item: tuple[Block, ...] = (Block("compaction", raw=raw, opaque=hidden),)
        return Message(entry["role"], item, raw=raw, source=item, note=entry["note"])
    blocks = tuple(Block("text", text=text) for text in entry["texts"])
    return Message(entry["role"], blocks, note=entry["note"])


def _patched(message: Message, entries: Sequence[Any]) -> Message:
    blocks: list[Block] = []
    for entry in entries:
        if isinstance(entry, int):
            blocks.append(message.blocks[entry])
        elif "of" not in entry:
            blocks.append(Block(entry["kind"], entry["text"]))
        else:
            old = message.blocks[entry["of"]]
            new = replace(old, edits=tuple(entry["edits"]))
            if "text" in entry:
                bare = {"media": (), "opaque": 0} if entry["bare"] else {}
                new = replace(new, text=entry["text"], tokens=None, **bare)
            if "cache_control" in entry:
                new = replace(new, cache_control=entry["cache_control"])
            if "call_id" in entry:
                new = replace(new, call_id=entry["call_id"])
            blocks.append(new)
    return replace(message, blocks=tuple(blocks))
