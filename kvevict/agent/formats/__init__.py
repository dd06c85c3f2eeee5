"""Wire formats and logs, one file each, found by itself: `to_normal` and `from_normal`.

A format reads its objects into a `History` and writes a `History` back. What was not edited is
written as the very object that was read, so `from_normal(to_normal(x, f), f) == x`, key order
included. A history of another format is rebuilt from the normal form (`docs/agents.md` says what a
conversion keeps).
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from kvevict.agent.formats.base import FORMATS, Format, interleave
from kvevict.agent.history import History
from kvevict.errors import HistoryError

__all__ = ["Format", "Reader", "detect", "format_names", "from_normal", "get_format", "to_normal"]


_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")


@cache
def _load() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def format_names() -> list[str]:
    """Return the names of the known formats."""
    _load()
    return sorted(FORMATS)


def get_format(name: str) -> Format:
    """Return a format by name.

    Raises:
        HistoryError: an unknown name; lists the known ones.
    """
    _load()
    if name not in FORMATS:
        raise HistoryError(f"unknown format {name!r}; known: auto, {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


def detect(obj: Any) -> str:
    """Return the name of the format that an object is most likely in.

    Raises:
        HistoryError: an object that no format knows.
    """
    _load()
    scores = {name: form.detect(obj) for name, form in sorted(FORMATS.items())}
    best = max(scores, key=lambda name: scores[name])
    if scores[best] <= 0:
        _point_at_fault(obj)
        raise HistoryError(
            "the format is not recognised: give a list of messages, a request with `messages` or "
            f"`input`, or a log, and name its format ({', '.join(sorted(FORMATS))})"
        )
    return best


def _point_at_fault(obj: Any) -> None:
    """Raise for the first message whose role no format knows, where that is the reason."""
    key = next((k for k in ("messages", "input") if isinstance(obj, dict) and k in obj), "")
    items = obj[key] if key else obj
    where = key or "messages"
    for i, item in enumerate(items if isinstance(items, list) else ()):
        path = f"{where}[{i}]"
        if not isinstance(item, dict):
            raise HistoryError(f"{path}: expected an object, got {type(item).__name__}", i, path)
        role = item.get("role")
        if "role" in item and role not in _ROLES:
            known = ", ".join(_ROLES)
            raise HistoryError(
                f"{path}.role: unknown role {role!r}; known: {known}", i, f"{path}.role"
            )
        if not {"role", "type"} & set(item):
            raise HistoryError(f"{path}: has no role", i, path)


def to_normal(obj: Any, format: str = "auto") -> History:
    """Read a message list, a whole request or a log into the normal form.

    Args:
        obj: what `json.loads` gives (for JSON lines: the list of their objects); not mutated, and
            parts of it are kept by reference.
        format: a name of `format_names()`, or "auto".

    Raises:
        HistoryError: an unknown format, role or block kind, or a part of the wrong shape; with the
            message's index and the part's path.
    """
    form = get_format(detect(obj) if format == "auto" else format)
    try:
        return form.read(obj)
    except RecursionError as error:
        raise HistoryError("the history is nested too deeply to be read") from error


class Reader:
    """Reads the same growing history again and again, at the cost of what is new.

    It keeps a copy of what it read (containers copied, strings shared), so neither a caller that
    edits its messages in place nor one that parses them anew can make it return stale messages;
    what it returns shares no message with the caller's object.

    Args:
        format: a name of `format_names()`, or "auto" (detected at the first read).
    """

    def __init__(self, format: str = "auto") -> None:
        self.format = format
        self._history = History()

    def read(self, obj: Any) -> History:
        """Read an object, taking over the messages that have not changed since the last read.

        Raises:
            HistoryError: as `to_normal`.
        """
        if self.format == "auto":
            self.format = detect(obj)
        form = get_format(self.format)
        old = [m.raw for m in self._history.messages]
        if self._history.events and isinstance(obj, list):
            old = interleave(self._history, [(m, m.raw) for m in self._history.messages])
        try:
            key = form.key(obj)
            items = obj[key] if key else obj
            if isinstance(items, list):
                kept = [
                    old[i] if i < len(old) and old[i] == item else _copy(item)
                    for i, item in enumerate(items)
                ]
                obj = {k: kept if k == key else v for k, v in obj.items()} if key else kept
            self._history = form.read(obj, self._history.messages)
        except RecursionError as error:
            raise HistoryError("the history is nested too deeply to be read") from error
        return self._history


def _copy(value: Any) -> Any:
    """Copy dicts and lists at every depth; leaves are shared."""
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_copy(v) for v in value]
    return value


def from_normal(history: History, format: str | None = None) -> Any:
    """Write a history in a format.

    Args:
        history: any history.
        format: a name of `format_names()`; None means the format that it was read from.

    Raises:
        HistoryError: an unknown format, or content that the format cannot carry.
    """
    return get_format(format or history.format).write(history)
