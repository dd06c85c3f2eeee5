"""The memory tool: a folder /memories that a model edits through six safe commands."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = "/memories"

CLEARING_WARNING = (
    "The context window is nearly full and old tool results will be cleared from it soon. "
    "Save what must be remembered (facts, decisions, progress, paths) to files in /memories now."
)


class MemoryToolError(ValueError):
    """A command that is wrong or unsafe; the text is what the model is told."""


@dataclass(frozen=True)
class MemoryTool:
    """The client side of Anthropic's `memory_20250818` tool over one folder.

    Source: Anthropic's memory tool documentation: commands, answers and the duty to check paths.
    Differs: symbolic links are refused everywhere, and sizes are bounded, so that a model that
    was talked into it can neither leave the folder nor fill the disk.

    Args:
        folder: the real folder behind /memories; made on the first write.
        max_file_bytes: largest file in bytes.
        max_total_bytes: most bytes in the folder.
        max_files: most files and folders in it.
        max_depth: most folders below each other.
        view_characters: most characters that one `view` returns.
    """

    folder: str | Path
    max_file_bytes: int = 262_144
    max_total_bytes: int = 8_388_608
    max_files: int = 1_000
    max_depth: int = 8
    view_characters: int = 100_000

    def call(self, command: Mapping[str, Any]) -> tuple[str, bool]:
        """Run one tool call.

        Args:
            command: the `input` of the model's tool_use block.

        Returns:
            The text of the tool result, and whether it is an error.
        """
        known = {
            "view": self.view,
            "create": self.create,
            "str_replace": self.str_replace,
            "insert": self.insert,
            "delete": self.delete,
            "rename": self.rename,
        }
        arguments = {str(key): value for key, value in command.items() if key != "command"}
        name = command.get("command")
        if not isinstance(name, str) or name not in known:
            return f"Error: unknown command {name!r}; known: {', '.join(known)}", True
        try:
            return known[name](**arguments), False  # type: ignore[operator]
        except MemoryToolError as refused:
            return str(refused), True
        except TypeError:
            return f"Error: wrong parameters for {name}: {', '.join(arguments) or 'none'}", True
        except OSError as error:
            return f"Error: {name} failed: {error.strerror or type(error).__name__}", True

    def view(self, path: str, view_range: list[int] | None = None) -> str:
        """List a folder (two levels, no hidden names) or show a file with line numbers.

        Args:
            path: a path in /memories.
            view_range: first and last line, from 1; a last line of -1 is the end.
        """
        real = self._real(path)
        if not real.exists():
            if path.rstrip("/") == ROOT:
                return f"{self._listing_head(path)}\n0B\t{ROOT}"
            raise MemoryToolError(f"The path {path} does not exist. Please provide a valid path.")
        if real.is_dir():
            lines = [self._listing_head(path)]
            lines += [f"{_human(size)}\t{name}" for name, size in self._listing(real, path)]
            return "\n".join(lines)
        text = self._read(real, path).split("\n")
        first = 1
        if view_range is not None:
            good = isinstance(view_range, list) and len(view_range) == 2
            if not good or not all(isinstance(i, int) for i in view_range):
                raise MemoryToolError("Error: `view_range` is a list of two whole numbers")
            first, last = view_range
            last = len(text) if last == -1 else last
            if not 1 <= first <= last <= len(text):
                raise MemoryToolError(
                    f"Error: Invalid `view_range` parameter: {view_range}. It should be within "
                    f"the range of lines of the file: [1, {len(text)}]"
                )
            text = text[first - 1 : last]
        body = "\n".join(f"{i:6d}\t{line}" for i, line in enumerate(text, first))
        if len(body) > self.view_characters:
            body = body[: self.view_characters] + "\n... (cut; use view_range for the rest)"
        return f"Here's the content of {path} with line numbers:\n{body}"

    def create(self, path: str, file_text: str) -> str:
        """Make a new file."""
        real = self._real(path)
        if real.exists():
            raise MemoryToolError(f"Error: File {path} already exists")
        self._write(real, path, file_text)
        return f"File created successfully at: {path}"

    def str_replace(self, path: str, old_str: str, new_str: str = "") -> str:
        """Replace a text that stands in the file exactly once."""
        real = self._file(path)
        text = self._read(real, path)
        _check_text("old_str", old_str)
        _check_text("new_str", new_str)
        count = text.count(old_str) if old_str else 0
        if count == 0:
            raise MemoryToolError(
                f"No replacement was performed, old_str `{old_str}` did not appear verbatim in "
                f"{path}."
            )
        if count > 1:
            at = [i for i, line in enumerate(text.split("\n"), 1) if old_str in line]
            raise MemoryToolError(
                f"No replacement was performed. Multiple occurrences of old_str `{old_str}` in "
                f"lines: {at}. Please ensure it is unique"
            )
        before = text[: text.index(old_str)].count("\n")
        text = text.replace(old_str, new_str)
        self._write(real, path, text)
        lines = text.split("\n")
        low, high = max(0, before - 2), min(len(lines), before + new_str.count("\n") + 3)
        shown = "\n".join(f"{i + 1:6d}\t{lines[i]}" for i in range(low, high))
        return f"The memory file has been edited.\n{shown}"

    def insert(self, path: str, insert_line: int, insert_text: str) -> str:
        """Insert a text after a line; 0 is the start of the file."""
        real = self._file(path)
        lines = self._read(real, path).split("\n")
        _check_text("insert_text", insert_text)
        whole = isinstance(insert_line, int) and not isinstance(insert_line, bool)
        if not whole or not 0 <= insert_line <= len(lines):
            raise MemoryToolError(
                f"Error: Invalid `insert_line` parameter: {insert_line}. It should be within the "
                f"range of lines of the file: [0, {len(lines)}]"
            )
        lines[insert_line:insert_line] = insert_text.removesuffix("\n").split("\n")
        self._write(real, path, "\n".join(lines))
        return f"The file {path} has been edited."

    def delete(self, path: str) -> str:
        """Delete a file, or a folder and all in it; never /memories itself."""
        real = self._real(path)
        if real == Path(self.folder):
            raise MemoryToolError(f"Error: {ROOT} itself cannot be deleted")
        if not real.exists():
            raise MemoryToolError(f"Error: The path {path} does not exist")
        if real.is_dir():
            for inner, names, files in os.walk(real, topdown=False, followlinks=False):
                for name in files:
                    (Path(inner) / name).unlink()
                for name in names:
                    entry = Path(inner) / name
                    entry.unlink() if entry.is_symlink() else entry.rmdir()
            real.rmdir()
        else:
            real.unlink()
        return f"Successfully deleted {path}"

    def rename(self, old_path: str, new_path: str) -> str:
        """Rename or move a file or folder."""
        old, new = self._real(old_path), self._real(new_path)
        root = Path(self.folder)
        if root in (old, new):
            raise MemoryToolError(f"Error: {ROOT} itself cannot be renamed")
        if not old.exists():
            raise MemoryToolError(f"Error: The path {old_path} does not exist")
        if new.exists():
            raise MemoryToolError(f"Error: The destination {new_path} already exists")
        if new.is_relative_to(old):
            raise MemoryToolError(f"Error: {new_path} lies inside {old_path}")
        new.parent.mkdir(parents=True, exist_ok=True)
        old.rename(new)
        return f"Successfully renamed {old_path} to {new_path}"

    # -- safety -----------------------------------------------------------------------------------

    def _real(self, path: str) -> Path:
        """Return the real path behind /memories/..., refusing every way out of the folder."""
        if not isinstance(path, str) or "\0" in path or "\\" in path or len(path) > 1_024:
            raise MemoryToolError(f"Error: {path!r} is not a path in {ROOT}")
        parts = path.rstrip("/").split("/")
        if parts[:2] != ["", "memories"]:
            raise MemoryToolError(f"Error: The path {path} must start with {ROOT}")
        inner = parts[2:]
        if any(p in ("", ".", "..") or "%2e" in p.lower() or "%2f" in p.lower() for p in inner):
            raise MemoryToolError(f"Error: The path {path} is not plain (`..`, encodings)")
        if any(len(p.encode("utf-8", "replace")) > 200 or not p.isprintable() for p in inner):
            raise MemoryToolError("Error: a name in the path is too long or not printable")
        if len(inner) > self.max_depth:
            raise MemoryToolError(f"Error: more than {self.max_depth} folders below each other")
        real = Path(self.folder)
        for step in ["", *inner]:
            real = real / step
            try:
                mode = real.lstat().st_mode
            except (FileNotFoundError, NotADirectoryError):
                continue
            if step and stat.S_ISLNK(mode):
                raise MemoryToolError(f"Error: The path {path} goes through a symbolic link")
            if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode) and step:
                raise MemoryToolError(f"Error: The path {path} is no plain file or folder")
        return Path(self.folder).joinpath(*inner)

    def _file(self, path: str) -> Path:
        real = self._real(path)
        if not real.is_file():
            raise MemoryToolError(
                f"Error: The path {path} does not exist. Please provide a valid path."
            )
        return real

    def _read(self, real: Path, path: str) -> str:
        if real.stat().st_size > self.max_file_bytes:
            raise MemoryToolError(f"Error: {path} is larger than {self.max_file_bytes} bytes")
        handle = os.open(real, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(handle, "rb") as file:
            return file.read(self.max_file_bytes + 1).decode("utf-8", "replace")

    def _write(self, real: Path, path: str, text: str) -> None:
        _check_text("text", text)
        if real == Path(self.folder) or real.is_dir():
            raise MemoryToolError(f"Error: {path} is a folder")
        raw = text.encode("utf-8", "replace")
        if len(raw) > self.max_file_bytes:
            raise MemoryToolError(
                f"Error: {path} would have {len(raw)} bytes; at most {self.max_file_bytes} fit"
            )
        sizes = dict(self._listing(Path(self.folder), ROOT, levels=None, hidden=True))
        total = sum(sizes.values()) - sizes.get(path, 0) + len(raw)
        if total > self.max_total_bytes:
            raise MemoryToolError(f"Error: {ROOT} is full: {self.max_total_bytes} bytes at most")
        if len(sizes) > self.max_files and not real.exists():
            raise MemoryToolError(f"Error: {ROOT} is full: {self.max_files} files at most")
        try:
            real.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise MemoryToolError(f"Error: a folder of {path} is a file") from None
        handle, name = tempfile.mkstemp(prefix=".writing-", dir=real.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(raw)
            Path(name).replace(real)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _listing_head(self, path: str) -> str:
        return (
            f"Here're the files and directories up to 2 levels deep in {path}, excluding hidden "
            "items and node_modules:"
        )

    def _listing(
        self, real: Path, shown: str, levels: int | None = 2, hidden: bool = False
    ) -> Iterator[tuple[str, int]]:
        """Yield the names and bytes of a folder's entries; a folder counts 0 of its own."""
        yield shown.rstrip("/"), 0
        if levels == 0 or not real.is_dir():
            return
        with os.scandir(real) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            if not hidden and (entry.name.startswith(".") or entry.name == "node_modules"):
                continue
            name = f"{shown.rstrip('/')}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                below = None if levels is None else levels - 1
                yield from self._listing(Path(entry.path), name, below, hidden)
            elif entry.is_file(follow_symlinks=False):
                yield name, entry.stat(follow_symlinks=False).st_size


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise MemoryToolError(f"Error: `{name}` must be a text, not {type(text).__name__}")


def _human(size: int) -> str:
    """Return bytes as `du -h` writes them."""
    amount = float(size)
    for unit in ("B", "K", "M"):
        if amount < 1024 or unit == "M":
            break
        amount /= 1024
    return f"{size}B" if unit == "B" else f"{amount:.1f}{unit}"
