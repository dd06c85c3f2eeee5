"""Resources: what lies outside the window and is read again after a compaction."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvevict.errors import PolicyError

Reader = Callable[[str, str], str | None]  # (kind, name) -> text
_PATHS = re.compile(r"\A---\s*\n(?:.*\n)*?paths\s*:", re.MULTILINE)
_LARGEST = 2_000_000  # bytes of a file that are read at most


class Resources(Protocol):
    """What a compaction can read again; every answer may be empty."""

    def rules(self) -> Sequence[tuple[str, str]]:
        """Return the root rules and the unscoped rules: name and text, in order."""

    def memory(self) -> str:
        """Return the automatic memory."""

    def skill(self, name: str) -> str:
        """Return the body of a skill."""

    def file(self, path: str) -> str:
        """Return a file as it is now."""

    def session_memory(self) -> str:
        """Return the session's own notes, which can stand in for a summary."""


@dataclass(frozen=True)
class FolderResources:
    """Resources of a project folder, by Claude Code's names.

    `CLAUDE.md` (or `AGENTS.md`) at the root and `.claude/rules/*.md` without a `paths:` field are
    rules; rules with one and `CLAUDE.md` files in folders below are not read again: they come back
    when a matching file is read. `.claude/memory.md` (or `MEMORY.md`) is the memory,
    `.claude/skills/NAME/SKILL.md` a skill, `.claude/session-memory.md` the session's notes.

    Args:
        folder: the project's root; nothing outside it is read.
    """

    folder: str | Path

    def rules(self) -> list[tuple[str, str]]:
        """Return the root rules file and the unscoped rules."""
        found = []
        for name in ("CLAUDE.md", "AGENTS.md"):
            text = self.file(name)
            if text:
                found.append((name, text))
                break
        rules = Path(self.folder) / ".claude" / "rules"
        for path in sorted(rules.glob("*.md")) if rules.is_dir() else ():
            text = self.file(f".claude/rules/{path.name}")
            if text and not _PATHS.match(text.partition("\n---")[0]):
                found.append((f".claude/rules/{path.name}", text))
        return found

    def memory(self) -> str:
        """Return the automatic memory."""
        return self.file(".claude/memory.md") or self.file("MEMORY.md")

    def skill(self, name: str) -> str:
        """Return the body of a skill."""
        return self.file(f".claude/skills/{name}/SKILL.md")

    def file(self, path: str) -> str:
        """Return a file inside the folder, "" where there is none."""
        root = Path(self.folder).resolve()
        try:
            real = (root / path).resolve()
            if not real.is_relative_to(root) or not real.is_file():
                return ""
            with real.open("rb") as file:
                return file.read(_LARGEST).decode("utf-8", "replace")
        except (OSError, ValueError):  # a name that no file can have, a file that went
            return ""

    def session_memory(self) -> str:
        """Return the session's notes."""
        return self.file(".claude/session-memory.md")


@dataclass(frozen=True)
class CalledResources:
    """Resources behind one callable.

    Args:
        read: `(kind, name) -> text or None`; kinds are rules, memory, skill, file and
            session_memory, the name is "" where there is only one.
    """

    read: Reader

    def rules(self) -> list[tuple[str, str]]:
        """Return the rules as one text."""
        text = self.read("rules", "")
        return [("rules", text)] if text else []

    def memory(self) -> str:
        """Return the automatic memory."""
        return self.read("memory", "") or ""

    def skill(self, name: str) -> str:
        """Return the body of a skill."""
        return self.read("skill", name) or ""

    def file(self, path: str) -> str:
        """Return a file as it is now."""
        return self.read("file", path) or ""

    def session_memory(self) -> str:
        """Return the session's notes."""
        return self.read("session_memory", "") or ""


def build_resources(which: object) -> Resources | None:
    """Return resources from a folder, a callable, or an object that has them.

    Raises:
        PolicyError: anything else.
    """
    if which is None:
        return None
    if isinstance(which, str | Path):
        return FolderResources(which)
    if all(hasattr(which, name) for name in ("rules", "memory", "skill", "file")):
        return which  # type: ignore[return-value]
    if callable(which):
        return CalledResources(which)
    raise PolicyError(f"resources={which!r}: give a folder, a callable (kind, name), or an object")
