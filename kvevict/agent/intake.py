"""Intake: a growing history read, repaired and numbered, at the cost of what is new."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Any

from kvevict.agent.choosing import all_inserted
from kvevict.agent.formats import Reader
from kvevict.agent.history import Address, Block, History, Message
from kvevict.agent.pairing import Pairs
from kvevict.agent.repairs import Repair, repair_history
from kvevict.agent.validate import Violation, check_history
from kvevict.agent.verbs import with_structure

_LEAD = Message("user", (Block("text", text="-"),), note="lead")


class Intake:
    """Turns what a caller sends, each time in full, into a repaired history.

    Every message of the result is numbered by its place in it (`Message.index`), so an edit log
    can name messages; `origin` maps these places to those in what was sent.

    Args:
        format: a format's name, or "auto".
    """

    def __init__(self, format: str) -> None:
        self._reader = Reader(format)
        self._read = History()
        self.full = History()
        self.repairs: list[Repair] = []
        self.origin: list[int] = []
        self._ids: dict[str, int] = {}
        self._marks: list[int] = []

    @property
    def format(self) -> str:
        """The format's name, "auto" before the first read."""
        return self._reader.format

    def take(self, obj: Any) -> tuple[History, int]:
        """Read and repair a history.

        Args:
            obj: a message list, a request, a log, or a `History`.

        Returns:
            The repaired history, and how many of its first messages are the very objects that the
            last call returned.

        Raises:
            HistoryError: a part that cannot be read, with its index and path.
        """
        history = obj if isinstance(obj, History) else self._reader.read(obj)
        if isinstance(obj, History):
            self._reader.format = history.format
        before = self.full.messages
        if not self._extend(history):
            self._whole(history)
        self._read = history
        now = self.full.messages
        same = 0
        for old, new in zip(before, now, strict=False):
            if old is not new:
                break
            same += 1
        return self.full, same

    def _extend(self, history: History) -> bool:
        """Take over everything before the last atom, where that is unchanged and sound."""
        old, new = self._read.messages, history.messages
        if not old:
            return False
        same = 0
        for a, b in zip(old, new, strict=False):
            if a is not b:
                break
            same += 1
        place, cut = self._boundary(same)
        if cut <= 0:
            return False
        tail = History((_LEAD, *new[cut:]), history.format)
        if tail.pairs.orphans or self._clashes(tail, cut):
            return False
        if repair_history(tail, open_end=True)[1]:
            return False
        kept = self.full.messages[:place]
        added = [self._numbered(m, place + i) for i, m in enumerate(new[cut:])]
        self.repairs = [r for r in self.repairs if r.index is None or r.index < cut]
        self.origin[place:] = range(cut, len(new))
        self.full = grown(self.full, replace(history, messages=(*kept, *added)))
        self._note(new, cut)
        return True

    def _boundary(self, same: int) -> tuple[int, int]:
        """Return the last atom that starts among unchanged messages.

        Its place in the result, and in what was read.
        """
        for group in reversed(self.full.groups):
            cut = self.origin[group.start]
            if 0 <= cut <= same:
                return group.start, cut
        return 0, 0

    def _clashes(self, tail: History, cut: int) -> bool:
        """Whether the new part repeats a call id, or has too many cache breakpoints."""
        marks = sum(1 for at in self._marks if at < cut)
        for message in tail.messages:
            for block in message.blocks:
                call = block.call_id if block.kind == "tool_use" else None
                if call is not None and self._ids.get(call, cut) < cut:
                    return True
                if block.cache_control is not None:
                    marks += 1
        return marks > 4

    def _note(self, messages: tuple[Message, ...], start: int) -> None:
        self._marks = [at for at in self._marks if at < start]
        for i in range(start, len(messages)):
            for block in messages[i].blocks:
                if block.kind == "tool_use" and block.call_id is not None:
                    self._ids.setdefault(block.call_id, i)
                if block.cache_control is not None:
                    self._marks.append(i)

    def _numbered(self, message: Message, place: int) -> Message:
        """Return a message with its place, the object of the last call where it is the same."""
        messages = self.full.messages
        if place < len(messages):
            old = messages[place]
            same = old.raw is message.raw and old.role == message.role and old.note == message.note
            if same and old.blocks == message.blocks:
                return old
        return message if message.index == place else replace(message, index=place)

    def _whole(self, history: History) -> None:
        repaired, self.repairs = repair_history(history, open_end=True)
        self.origin = [m.index for m in repaired.messages]
        numbered = [self._numbered(m, i) for i, m in enumerate(repaired.messages)]
        self.full = replace(repaired, messages=tuple(numbered))
        self._ids = {}
        self._marks = []
        self._note(history.messages, 0)


def grown(old: History, new: History) -> History:
    """Give a history the structure of an older one that it begins with, so only the rest is read.

    Pairs and atoms before the last atom of the common part cannot change by what follows, unless a
    late result answers one of them; then the structure is worked out anew, as always.
    """
    same = 0
    for a, b in zip(old.messages, new.messages, strict=False):
        if a is not b:
            break
        same += 1
    known = [g for g in old.groups if g.start <= same]
    if len(known) < 2:
        return new
    start = known[-1].start
    tail = replace(new, messages=new.messages[start:])
    if tail.pairs.orphans:
        return new
    groups = [replace(g, start=g.start + start, stop=g.stop + start) for g in tail.groups]
    structure: dict[str, Any] = {
        "pairs": Pairs(
            {c: r for c, r in old.pairs.results.items() if c[0] < start}
            | {_moved(c, start): _moved(r, start) for c, r in tail.pairs.results.items()},
            tuple(at for at in old.pairs.unanswered if at[0] < start)
            + tuple(_moved(at, start) for at in tail.pairs.unanswered),
            tuple(at for at in old.pairs.orphans if at[0] < start),
        ),
        "groups": (*known[:-1], *groups),
        "by_kind": _joined(old.by_kind, tail.by_kind, start),
    }
    for name in ("users", "pinned", "instructions"):
        kind = tuple if name == "users" else frozenset
        before = (i for i in getattr(old, name) if i < start)
        structure[name] = kind([*before, *(i + start for i in getattr(tail, name))])
    wrote = vars(old).get("inserted")
    if wrote is not None:
        late = (i + start for i in all_inserted(tail))
        structure["inserted"] = frozenset([*(i for i in wrote if i < start), *late])
    return with_structure(new, structure)


def _joined(
    old: dict[str, list[Address]], tail: dict[str, list[Address]], start: int
) -> dict[str, list[Address]]:
    """Return the addresses by kind: those before `start`, and those of the tail behind it."""
    out = {}
    for kind in {**old, **tail}:
        known = old.get(kind, [])
        out[kind] = known[: bisect_left(known, (start, 0))]
        out[kind] += [_moved(at, start) for at in tail.get(kind, ())]
    return out


def _moved(at: Address, by: int) -> Address:
    return at[0] + by, at[1]


def tail_of(history: History, start: int) -> tuple[History, int]:
    """Return the history from an atom on, behind its system prefix and a user message.

    What is checked on it is what would be found in the whole history there. Returns it with the
    number of messages put in front.
    """
    lead = list(history.messages[: min(history.prefix, start)])
    user = next((i for i in history.users if i < start), None)
    if user is not None and start > 0:
        lead.append(history.messages[user])
    elif start > len(lead):
        return history, 0
    return replace(history, messages=(*lead, *history.messages[start:])), len(lead)


def changed_part(old: History, new: History) -> tuple[History, History]:
    """Return the parts of two histories on which `compare` finds what it would find on the whole.

    Where the edit changed texts in place (the same calls, results and atoms) these are the changed
    atoms and the last turn, else everything from the first changed atom on; each behind the system
    prefix and a user message.
    """
    pairs = zip(old.messages, new.messages, strict=False)
    changed = [i for i, (a, b) in enumerate(pairs) if a is not b]
    groups = vars(new).get("groups")
    if groups is not None and groups is vars(old).get("groups") and changed:
        return _atoms_of(old, new, changed)
    first = changed[0] if changed else min(len(old), len(new))
    start = atom_before(old, first) if len(old) else 0
    before, lead = tail_of(old, start)
    if before is old:
        return old, new
    return before, replace(new, messages=(*before.messages[:lead], *new.messages[start:]))


def _atoms_of(old: History, new: History, changed: list[int]) -> tuple[History, History]:
    numbers = {int(old.group_index[i]) for i in changed}
    numbers.add(len(old.groups) - 1)
    users = old.users
    numbers.update(int(old.group_index[i]) for i in (users[:1] + users[-1:]))
    places = list(range(old.prefix))
    places += [
        i
        for g in sorted(numbers)
        for i in range(max(old.prefix, old.groups[g].start), old.groups[g].stop)
    ]
    return (
        replace(old, messages=tuple(old.messages[i] for i in places)),
        replace(new, messages=tuple(new.messages[i] for i in places)),
    )


def atom_before(history: History, message: int) -> int:
    """Return the first message of the atom that holds a message, or of the last one."""
    if not history.groups:
        return 0
    return history.group_of(min(message, len(history) - 1)).start


def check_from(history: History, start: int, known: list[Violation]) -> list[Violation]:
    """Return the violations of a history whose part before an atom was checked already.

    Args:
        history: any history.
        start: first message of the first atom to check.
        known: the violations found before; those before `start` are taken over.
    """
    part, lead = tail_of(history, start)
    offset = start - lead if part is not history else 0
    if part is history:
        return check_history(history)
    found = [v for v in known if v.index is not None and v.index < start]
    for v in check_history(part):
        if v.index is None:
            found.append(v)
        elif v.index >= lead:
            path = v.path.replace(f"[{v.index}]", f"[{v.index + offset}]", 1)
            found.append(replace(v, index=v.index + offset, path=path))
    return found
