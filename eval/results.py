"""results: one folder a run, written so that a killed run leaves finished cells and nothing half.

- config.json: what the run is; a folder serves one run only
- cells/: one JSON and its arrays for every finished cell
- result.json: the rows; the same inputs, seed and versions give the same bytes
- timings.json: wall time, memory of the process, ranks: what differs from run to run
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from kvevict import console
from kvevict.errors import KvevictError

SCHEMA = 1
CONFIG, RESULT, TIMINGS, CELLS = "config.json", "result.json", "timings.json", "cells"


class RunFolder:
    """The folder of one run.

    Attributes:
        path: the folder.
        identity: schema, command, config and versions; what `resume` must find unchanged.
    """

    def __init__(self, path: Path, command: str, config: dict[str, Any]) -> None:
        self.path = path
        self.identity = plain({"schema": SCHEMA, "command": command, "config": config})
        self.identity["versions"] = console.versions()

    def check(self, resume: bool = False) -> None:
        """Check, before any work, that the folder may serve this run; nothing is written.

        Raises:
            KvevictError: it holds another run, this run and `resume` was not asked for, or files
                that are no run.
        """
        if self.path.is_file():
            raise KvevictError(f"{self.path} is a file: give --out a folder")
        known = self.path / CONFIG
        if known.is_file():
            self._check_same(read_json(known))
            if not resume:
                raise KvevictError(
                    f"{self.path} holds this run already: add --resume to finish it, or give "
                    "another --out"
                )
        elif self.path.is_dir() and any(self.path.iterdir()):
            raise KvevictError(f"{self.path} is not empty and holds no run: give another --out")

    def claim(self) -> None:
        """Write down what the folder is for, when the first cell is about to run."""
        if not (self.path / CONFIG).is_file():
            write_json(self.path / CONFIG, self.identity)

    def _check_same(self, found: Any) -> None:
        check_schema(self.path / CONFIG, found)
        if found.get("command") != self.identity["command"]:
            raise KvevictError(
                f"{self.path} holds results of {found.get('command')!r}: give another --out"
            )
        for part in ("config", "versions"):
            old, new = found.get(part, {}), self.identity[part]
            keys = {*old, *new} - {"commit"}
            differ = sorted(k for k in keys if old.get(k) != new.get(k))
            if differ:
                raise KvevictError(
                    f"{self.path} holds another run's results (other {part}: "
                    f"{', '.join(differ)}): give another --out"
                )

    def read_cell(self, name: str) -> dict[str, Any] | None:
        """Return a finished cell, or None."""
        path = self.path / CELLS / f"{name}.json"
        return read_json(path) if path.is_file() else None

    def write_cell(self, name: str, row: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Write a finished cell: its arrays first, so that its JSON is never without them."""
        for kind, array in arrays.items():
            write_array(self.path / CELLS / f"{name}.{kind}.npy", array)
        write_json(self.path / CELLS / f"{name}.json", row)

    def read_array(self, name: str, kind: str) -> np.ndarray:
        """Return an array of a finished cell."""
        array: np.ndarray = np.load(self.path / CELLS / f"{name}.{kind}.npy", allow_pickle=False)
        return array

    def finish(self, rows: list[dict[str, Any]], timings: list[dict[str, Any]], ranks: int) -> None:
        """Write the result."""
        whole = {**self.identity, "hardware": console.machine(), "rows": rows}
        write_json(self.path / RESULT, whole)
        write_json(self.path / TIMINGS, {"schema": SCHEMA, "ranks": ranks, "rows": timings})


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        KvevictError: a file that cannot be read or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KvevictError(f"{path} cannot be read: {error}; move it away") from error


def check_schema(path: Path, found: Any) -> None:
    """Check that a results file can be understood.

    Raises:
        KvevictError: a foreign file, or one of a newer schema.
    """
    schema = found.get("schema") if isinstance(found, dict) else None
    if not isinstance(schema, int):
        raise KvevictError(f"{path} is no results file of kvevict: give a folder that eval wrote")
    if schema > SCHEMA:
        raise KvevictError(
            f"{path} has schema {schema} and this kvevict reads up to {SCHEMA}: upgrade kvevict"
        )


def load_result(path: Path) -> dict[str, Any]:
    """Return a result with the rows' timings merged in.

    Raises:
        KvevictError: a file that is foreign, damaged or of a newer schema.
    """
    whole = read_json(path)
    check_schema(path, whole)
    rows = whole.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise KvevictError(f"{path} has no list of rows: it is damaged; run its command again")
    side = path.with_name(TIMINGS)
    timings = read_json(side).get("rows", []) if side.is_file() else []
    if len(timings) == len(rows):
        whole["rows"] = [{**row, **more} for row, more in zip(rows, timings, strict=True)]
    return whole  # type: ignore[no-any-return]


def plain(value: Any) -> Any:
    """Return a value as JSON has it: tuples as lists, paths as names, nan and infinity as None."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return str(value)


def write_json(path: Path, value: Any) -> None:
    """Write JSON in one step: a reader sees the old file or the whole new one.

    Raises:
        KvevictError: the folder cannot be written to.
    """
    text = json.dumps(plain(value), indent=1, allow_nan=False) + "\n"
    _write(path, lambda file: file.write(text.encode()))


def write_text(path: Path, text: str) -> None:
    """Write text in one step.

    Raises:
        KvevictError: the folder cannot be written to.
    """
    _write(path, lambda file: file.write(text.encode()))


def write_array(path: Path, array: np.ndarray) -> None:
    """Write an array as .npy in one step.

    Raises:
        KvevictError: the folder cannot be written to.
    """
    _write(path, lambda file: np.save(file, array, allow_pickle=False))


def _write(path: Path, fill: Callable[[IO[bytes]], Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        work = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            work.chmod(0o644)
            work.replace(path)
        finally:
            work.unlink(missing_ok=True)
    except OSError as error:
        raise KvevictError(f"cannot write {path}: {error.strerror or error}") from error
