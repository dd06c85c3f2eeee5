"""What every command shares: a JSON object or a table, versions, errors without tracebacks."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvevict.errors import KvevictError

DONE, FAILED, BAD_INPUT = 0, 1, 2
_PACKAGES = ("torch", "transformers", "accelerate", "numpy", "triton", "safetensors")


def versions() -> dict[str, str | None]:
    """Return the versions that a result depends on; None for what is not installed."""
    found: dict[str, str | None] = {"kvevict": _version("kvevict"), "commit": commit()}
    found["python"] = platform.python_version()
    return found | {name: _version(name) for name in _PACKAGES}


def commit() -> str | None:
    """Return the commit of the checkout that runs, with "+" where it was changed, or None."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        status = ["status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run([*git, *status], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


_WIDE = {  # of a processor, the widest first
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 with bfloat16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
}


def machine() -> str:
    """Return the machine in words: processor, cores and the widest arithmetic that it has."""
    import os

    name, wide = platform.processor() or platform.machine(), ""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        pairs = (x.partition(":") for x in info.read_text().splitlines())
        facts = {key.strip(): value.strip() for key, _, value in pairs}
        name = facts.get("model name", name)
        flags = facts.get("flags", "").split()
        wide = next((f", {words}" for flag, words in _WIDE.items() if flag in flags), "")
    return f"{name}, {os.cpu_count()} cores{wide}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def emit(command: str, config: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Print one JSON object on stdout: command, config, versions, rows; not-a-number as null."""
    whole = {"command": command, "config": config, "versions": versions(), "rows": rows}
    sys.stdout.write(json.dumps(_plain(whole), indent=1, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def show(rows: list[dict[str, Any]], columns: Sequence[str] = (), title: str | None = None) -> None:
    """Print rows as a table in the terminal."""
    columns = columns or (list(rows[0]) if rows else [])
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in columns:
        number = any(isinstance(row.get(name), int | float) for row in rows)
        table.add_column(
            name.replace("_", " "), justify="right" if number else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(escape(_cell(row.get(name))) for name in columns))
    Console().print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def run(app: Callable[[], Any]) -> None:
    """Run a command line; an error on purpose becomes one line on stderr and an exit code."""
    try:
        app()
    except KvevictError as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="red", markup=False)
        sys.exit(BAD_INPUT)
    except BrokenPipeError:  # the reader of a pipe has left
        sys.stderr.close()
        sys.exit(DONE)
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; finished work is kept", style="yellow")
        sys.exit(130)


def read_text(file: Path | None, what: str) -> str:
    """Read a UTF-8 text file, or stdin for "-" or None.

    Raises:
        KvevictError: a file that is missing, unreadable, empty or not UTF-8.
    """
    try:
        if file is None or str(file) == "-":
            text = sys.stdin.read()
        else:
            text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise KvevictError(
            f"{what} {file or 'stdin'} is not UTF-8 (byte {error.start}): convert it, for example "
            "with iconv"
        ) from error
    except OSError as error:
        raise KvevictError(f"{what} {file}: {error.strerror}; give a readable text file") from error
    if not text.strip():
        raise KvevictError(f"{what} {file or 'stdin'} is empty: give a text")
    return text
