"""What the commands of `kvevict agent` share: reading input, printing tables and JSON, errors."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import kvevict
from kvevict.agent.formats import detect, get_format
from kvevict.agent.replay import parse_text
from kvevict.errors import BudgetError, HistoryError, KvevictError

BAD_INPUT = 2
FAILED = 1


def tokens(text: str) -> int:
    """Return a number of tokens written as 200000, 200_000, 200k or 1.5M.

    Raises:
        HistoryError: text of another form.
    """
    factor = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    try:
        value = float(digits.replace("_", "")) * factor
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e15:
        raise HistoryError(f"{text!r} is no number of tokens: write 200000 or 200k")
    return int(value)


def format_of(obj: Any, format: str) -> str:
    """Return the name of the format asked for, or the one detected."""
    return detect(obj) if format == "auto" else get_format(format).name


def read_usage(path: str | None) -> Any:
    """Read a usage object from a JSON file, where one is named."""
    return None if path is None else read_input(path)[0]


def make_console() -> Console:
    """Return a console; 120 columns where the output is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def read_input(file: str) -> tuple[Any, bool]:
    """Read a file, or standard input for "-".

    Returns:
        What the JSON says, and whether it was JSON lines.

    Raises:
        KvevictError: a file that cannot be read or parsed.
    """
    name = "standard input" if file == "-" else file
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KvevictError(f"{name} cannot be read: {error}") from error
    obj = parse_text(text, name)
    lines = isinstance(obj, list) and not text.lstrip().startswith("[")
    return obj, lines


def write_output(obj: Any, lines: bool, out: str | None) -> None:
    """Write an object as JSON, or as JSON lines, to a file or to standard output."""
    if lines and isinstance(obj, list):
        text = "".join(json.dumps(entry) + "\n" for entry in obj)
    else:
        text = json.dumps(obj, indent=2) + "\n"
    if out is None or out == "-":
        sys.stdout.write(text)
    else:
        write_file(out, text)


def write_file(path: str, text: str) -> None:
    """Write a text file.

    Raises:
        KvevictError: a path that cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise KvevictError(f"{path} cannot be written: {error}") from error


def print_json(command: str, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the one object of `--json`."""
    versions = {
        "kvevict": kvevict.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    report = {"command": command, "config": config, "versions": versions, "rows": rows}
    sys.stdout.write(json.dumps(report, indent=2, default=str) + "\n")


def print_table(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    formats: Mapping[str, Callable[[Any], str]] | None = None,
) -> None:
    """Print rows as a table.

    Args:
        title: title of the table.
        rows: one mapping a row.
        columns: heading by key, in order.
        formats: how values of a key are written.
    """
    table = Table(title=Text(clean(title)), title_justify="left")
    for key, heading in columns.items():
        number = all(isinstance(row.get(key), int | float) for row in rows)
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in rows:
        cells = []
        for key in columns:
            value = row.get(key)
            write = (formats or {}).get(key, _plain)
            cells.append(Text(clean(write(value))))
        table.add_row(*cells)
    make_console().print(table)


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def clean(text: str) -> str:
    """Return a text that any terminal can print: no control characters, no lone surrogates."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


@contextmanager
def guarded() -> Iterator[None]:
    """Turn errors that users can mend into one line and an exit code: 2 bad input, 1 failed."""
    try:
        yield
    except BudgetError as error:
        typer.echo(f"error: {clean(str(error))}", err=True)
        raise typer.Exit(FAILED) from error
    except (KvevictError, ValueError) as error:
        typer.echo(f"error: {clean(str(error))}", err=True)
        raise typer.Exit(BAD_INPUT) from error
    except RecursionError as error:
        typer.echo("error: the input is nested too deeply", err=True)
        raise typer.Exit(BAD_INPUT) from error
    except MemoryError as error:
        typer.echo("error: the input does not fit into memory", err=True)
        raise typer.Exit(BAD_INPUT) from error
