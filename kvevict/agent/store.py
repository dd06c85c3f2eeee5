"""Storage outside the window: content-addressed texts with a pointer, and a searchable recall."""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvevict.errors import HistoryError

POINTER = re.compile(r"kvevict-store:([0-9a-f]{64})")
_PLACEHOLDER = re.compile(
    r"\[Stored outside the context: kvevict-store:(?P<digest>[0-9a-f]{64})[^\]]*\]"
)


class Store:
    """Content-addressed texts, on disk or in memory.

    A text is filed under the SHA-256 of its UTF-8 bytes, so putting it twice stores it once, two
    processes may write at the same time, and the pointer is the same on every machine.

    Args:
        folder: where the texts lie, made on the first write; None keeps them in memory.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._texts: dict[str, bytes] = {}

    def put(self, text: str) -> str:
        """File a text and return its address, 64 hex digits.

        On disk the write is atomic: a temporary file in the same folder, synced, then renamed, so
        a reader or a crash never meets half a text.
        """
        raw = text.encode("utf-8", "surrogatepass")
        digest = hashlib.sha256(raw).hexdigest()
        if self.folder is None:
            self._texts[digest] = raw
            return digest
        target = self._file(digest)
        if target.is_file():
            return digest
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".writing-", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return digest

    def get(self, address: str) -> str:
        """Return the text of an address, with or without the pointer's prefix.

        Raises:
            HistoryError: an address that is malformed or unknown here, or a damaged file.
        """
        digest = address.removeprefix("kvevict-store:")
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise HistoryError(f"{address!r} is no store address: give 64 hex digits")
        if self.folder is None:
            raw = self._texts.get(digest)
        else:
            file = self._file(digest)
            raw = file.read_bytes() if file.is_file() else None
        if raw is None:
            raise HistoryError(
                f"the store has no text {digest[:12]}...: open the store that the edit wrote to"
            )
        if hashlib.sha256(raw).hexdigest() != digest:
            raise HistoryError(f"the stored text {digest[:12]}... is damaged: its hash differs")
        return raw.decode("utf-8", "surrogatepass")

    def __contains__(self, address: str) -> bool:
        digest = address.removeprefix("kvevict-store:")
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            return False
        return digest in self._texts if self.folder is None else self._file(digest).is_file()

    def pointer(self, text: str, preview: int = 0) -> str:
        """File a text and return the placeholder that takes its place.

        Args:
            text: what leaves the window.
            preview: characters of its first line that the placeholder quotes.
        """
        digest = self.put(text)
        first = text.strip().split("\n", 1)[0][:preview] if preview else ""
        quoted = f"; begins: {first}" if first and "]" not in first else ""
        return (
            f"[Stored outside the context: kvevict-store:{digest}; "
            f"{len(text)} characters{quoted}. Read it back from there when it is needed.]"
        )

    def restore(self, value: Any) -> Any:
        """Return a copy of a text, message or whole history with placeholders put back as text.

        Raises:
            HistoryError: a pointer to a text that this store does not hold.
        """
        if isinstance(value, str):
            return _PLACEHOLDER.sub(lambda found: self.get(found["digest"]), value)
        if isinstance(value, list):
            return [self.restore(item) for item in value]
        if isinstance(value, dict):
            return {key: self.restore(item) for key, item in value.items()}
        return value

    def _file(self, digest: str) -> Path:
        assert self.folder is not None
        return self.folder / digest[:2] / digest[2:]


@dataclass(frozen=True)
class Recalled:
    """A message found in recall storage.

    Attributes:
        key: where it stood, as given to `add`.
        role: who said it.
        text: all of it.
    """

    key: str
    role: str
    text: str


class Recall:
    """Every message ever seen, searchable, as in MemGPT's recall storage.

    Source: Packer et al. 2023 (arXiv:2310.08560) section 2.3, and `conversation_search` of the
    released code: results come in pages of 5 with a count. Differs: SQLite full text search in
    place of a substring scan, with the scan as the fallback (Chinese has no word borders).

    Args:
        path: the SQLite file, ":memory:" for none.
        page_size: results a page (RETRIEVAL_QUERY_DEFAULT_PAGE_SIZE = 5 in MemGPT's constants.py).
    """

    def __init__(self, path: str | Path = ":memory:", page_size: int = 5) -> None:
        if page_size < 1:
            raise ValueError(f"page_size={page_size}: give at least 1")
        self.page_size = page_size
        self._db = sqlite3.connect(str(path))
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS messages"
            " (id INTEGER PRIMARY KEY, key TEXT UNIQUE, role TEXT, text TEXT)"
        )
        try:
            self._db.execute(
                "CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5(text, content='')"
            )
            self.full_text = True
        except sqlite3.OperationalError:  # an SQLite built without FTS5
            self.full_text = False
        self._db.commit()

    def add(self, messages: Iterable[Recalled]) -> int:
        """File messages; one already filed under its key is skipped. Returns how many were new."""
        new = 0
        for item in messages:
            text = item.text.encode("utf-8", "replace").decode("utf-8")
            row = self._db.execute(
                "INSERT OR IGNORE INTO messages (key, role, text) VALUES (?, ?, ?)",
                (item.key, item.role, text),
            )
            if row.rowcount <= 0:
                continue
            new += 1
            if self.full_text:
                self._db.execute(
                    "INSERT INTO words (rowid, text) VALUES (?, ?)", (row.lastrowid, text)
                )
        self._db.commit()
        return new

    def __len__(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM messages").fetchone()[0])

    def search(self, query: str, page: int = 0) -> tuple[list[Recalled], int]:
        """Find messages that hold every word of the query, best first.

        Args:
            query: any text; nothing in it is read as query syntax.
            page: which page, from 0.

        Returns:
            The page's messages, and how many there are in all.
        """
        words = re.findall(r"\w+", query.encode("utf-8", "replace").decode("utf-8"))
        if not words or page < 0:
            return [], 0
        window = (self.page_size, page * self.page_size)
        if self.full_text:
            match = " ".join(f'"{word}"' for word in words)
            total = self._one("SELECT count(*) FROM words WHERE words MATCH ?", match)
            if total:
                rows = self._db.execute(
                    "SELECT m.key, m.role, m.text FROM words JOIN messages m ON m.id = words.rowid"
                    " WHERE words MATCH ? ORDER BY rank, m.id LIMIT ? OFFSET ?",
                    (match, *window),
                )
                return [Recalled(*row) for row in rows], total
        where = " AND ".join("instr(lower(text), lower(?)) > 0" for _ in words)
        total = self._one(f"SELECT count(*) FROM messages WHERE {where}", *words)
        rows = self._db.execute(
            f"SELECT key, role, text FROM messages WHERE {where} ORDER BY id LIMIT ? OFFSET ?",
            (*words, *window),
        )
        return [Recalled(*row) for row in rows], total

    def page_in(self, query: str, page: int = 0) -> str:
        """Return one page of results as text, ready to be a tool's result in the window."""
        found, total = self.search(query, page)
        if not found:
            return "No results found."
        pages = -(-total // self.page_size)
        lines = [f"Showing {len(found)} of {total} results (page {page}/{pages - 1}):"]
        lines += [f"{item.role}: {item.text}" for item in found]
        return "\n".join(lines)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _one(self, query: str, *values: str) -> int:
        return int(self._db.execute(query, values).fetchone()[0])
