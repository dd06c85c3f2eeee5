"""ManagerState: all that a manager remembers between two calls, as JSON."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvevict.agent.edit_log import Entry, decode, encode
from kvevict.agent.history import Message
from kvevict.agent.tokens import Anchor
from kvevict.errors import HistoryError

VERSION = 1


@dataclass
class ManagerState:
    """What a manager remembers; `to_json` and `from_json` are exact inverses.

    Attributes:
        at: messages of the full history that the edits speak of.
        seen: messages of the full history at the last call.
        sent: messages of the last request.
        failures: failures of the summariser in a row.
        memory: the policy's own notes.
        hidden: messages masked in place, with the number of messages seen when it happened.
        pending: what the user asked for, done at the next call.
        events: what was freed when.
        anchor: the provider's last count.
    """

    at: int = 0
    seen: int = 0
    sent: int = 0
    failures: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    hidden: dict[str, int] = field(default_factory=dict)
    pending: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    anchor: Anchor | None = None
    _edits: list[Entry] | None = field(default_factory=list)
    _edited: tuple[tuple[Message, ...], tuple[Message, ...]] = ((), ())

    @property
    def edits(self) -> list[Entry]:
        """The edit log (see `edit_log`), worked out only when it is asked for."""
        if self._edits is None:
            self._edits = encode(*self._edited)
            self._edited = ((), ())
        return self._edits

    def commit(self, messages: tuple[Message, ...], full: tuple[Message, ...]) -> None:
        """Remember an edited history."""
        self._edits, self._edited = None, (messages, full)
        self.at = len(full)

    def view(self, full: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return the edited messages for a full history.

        Raises:
            HistoryError: the edits do not fit this history.
        """
        return decode(self.edits, full, self.at)

    def forget(self) -> None:
        """Drop all edits."""
        self._edits, self._edited, self.at = [], ((), ()), 0
        self.hidden, self.anchor = {}, None

    def note_hidden(self, messages: tuple[Message, ...], full: tuple[Message, ...]) -> None:
        """Give newly masked messages their time, in messages seen."""
        now = {
            str(m.index) for m in messages if m.index >= 0 and m.blocks is not full[m.index].blocks
        }
        self.hidden = {i: at for i, at in self.hidden.items() if i in now}
        for i in sorted(now, key=int):
            self.hidden.setdefault(i, len(full))

    def restore(self, indices: tuple[int, ...]) -> list[int]:
        """Take back the in-place edits of these messages, of all where none are named."""
        shown = []
        for n, entry in enumerate(self.edits):
            i = entry.get("edit")
            if i is not None and (not indices or i in indices):
                self.edits[n] = {"keep": [i, i + 1]}
                self.hidden.pop(str(i), None)
                shown.append(i)
        return shown

    def to_json(self, policy: str) -> dict[str, Any]:
        """Return everything as JSON, independent of this object."""
        return copy.deepcopy(
            {
                "version": VERSION,
                "policy": policy,
                "at": self.at,
                "seen": self.seen,
                "sent": self.sent,
                "edits": self.edits,
                "events": self.events,
                "hidden": self.hidden,
                "failures": self.failures,
                "memory": self.memory,
                "anchor": None if self.anchor is None else asdict(self.anchor),
                "pending": self.pending,
            }
        )

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> ManagerState:
        """Read what `to_json` returned.

        Raises:
            HistoryError: something else.
        """
        try:
            if state.get("version", VERSION) != VERSION:
                raise ValueError(f"version {state['version']!r}, this one reads {VERSION}")
            state = copy.deepcopy(dict(state))
            anchor = state.get("anchor")
            counts = {name: int(state.get(name, 0)) for name in ("at", "seen", "sent", "failures")}
            if any(value < 0 for value in counts.values()):
                raise ValueError(f"negative counts {counts}")
            return cls(
                at=counts["at"],
                seen=counts["seen"],
                sent=counts["sent"],
                failures=counts["failures"],
                memory=dict(state.get("memory", {})),
                hidden=dict(state.get("hidden", {})),
                pending=[dict(wish) for wish in state.get("pending", ())],
                events=[dict(event) for event in state.get("events", ())],
                anchor=None if anchor is None else Anchor(**anchor),
                _edits=[dict(entry) for entry in state.get("edits", ())],
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise HistoryError(f"this is no manager's state: {error}") from None
