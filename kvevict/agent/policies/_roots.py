"""What Claude Code injects again after a compaction: rules, memory, skills, edited files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvevict.agent.choosing import tool_name
from kvevict.agent.graphemes import shorten
from kvevict.agent.history import History
from kvevict.agent.message_policy import Context

if TYPE_CHECKING:
    from kvevict.agent.policies.claude_code import ClaudeCode

_EDITORS = ("edit", "write", "multiedit", "strreplace", "applypatch", "create", "notebookedit")
_CHARS = 3  # a token, for cutting what is read again


def continuation(text: str, view: History | None = None) -> str:
    """Return the message that opens the new context: the summary, and the tools re-declared."""
    from kvevict.agent.policies.claude_code import PREFIX

    tools = [str(t.get("name", "")) for t in (view.tools if view else ()) if isinstance(t, dict)]
    names = [name for name in tools if name]
    again = f"\nThe same tools are available: {', '.join(names)}." if names else ""
    return f"{PREFIX} The conversation is summarized below:\n{text}{again}"


def read_again(view: History, context: Context, policy: ClaudeCode) -> str:
    """Return the text of the root set as it is on disk now, "" where there is none.

    Path-scoped rules and rules of nested folders are not among it: they are lost until a matching
    file is read again.
    """
    resources = context.services.resources
    if resources is None:
        return ""
    parts = [f"## {name}\n{text.strip()}" for name, text in resources.rules()]
    memory = resources.memory()
    if memory:
        parts.append(f"## Memory\n{memory.strip()}")
    skills = [(name, resources.skill(name)) for name in called_skills(view)]
    parts += _within("Skill", skills, policy.skill_tokens, policy.skills_tokens)
    paths = edited_files(view)[-policy.files :] if policy.files else []
    files = [(path, resources.file(path)) for path in paths]
    parts += _within("File", files, policy.file_tokens, policy.files_tokens)
    return "[Read again from disk after compaction]\n" + "\n\n".join(parts) if parts else ""


def _within(kind: str, found: list[tuple[str, str]], each: int, total: int) -> list[str]:
    """Return texts cut to `each` tokens; the newest first until `total`, in their old order."""
    chosen: list[str] = []
    left = total * _CHARS
    for name, text in reversed(found):
        if not text.strip():
            continue
        body = shorten(text.strip(), max(1, each * _CHARS), "\n… (cut)", "head")
        if len(body) > left:
            break
        left -= len(body)
        chosen.append(f"## {kind} {name}\n{body}")
    return chosen[::-1]


def called_skills(view: History) -> list[str]:
    """Return the skills that were invoked, the most recent last, each once."""
    return _arguments(view, ("skill",), ("name", "skill", "command"))


def edited_files(view: History) -> list[str]:
    """Return the files that were edited, the most recent last, each once."""
    return _arguments(view, _EDITORS, ("file_path", "path", "filename", "notebook_path"))


def _arguments(view: History, tools: tuple[str, ...], keys: tuple[str, ...]) -> list[str]:
    found: dict[str, None] = {}
    for at in view.find("tool_use"):
        block = view.block(at)
        if not tool_name(block.tool).startswith(tools):
            continue
        try:
            value = json.loads(block.text or "{}")
        except (ValueError, RecursionError):
            continue
        given = [
            value[k] for k in keys if isinstance(value, dict) and isinstance(value.get(k), str)
        ]
        if given:
            found.pop(given[0], None)
            found[given[0]] = None
    return list(found)
