"""What Codex's local and remote compaction share."""

from __future__ import annotations

from kvevict.agent.history import History, Message
from kvevict.agent.verbs import LANGUAGE

SUMMARY_PREFIX = (
    "Another language model started to solve this problem and produced a summary of its thinking "
    "process."
)
HEADINGS = (
    "Current progress and key decisions",
    "Important constraints and user preferences",
    "Remaining next steps",
    "Critical data, examples and references needed to continue",
)
PROMPT = (
    "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary for another LLM "
    "that will resume the task. Include: current progress and key decisions made; important "
    "context, constraints or user preferences; what remains to be done (clear next steps); any "
    "critical data, examples or references needed to continue. " + LANGUAGE
)
_WRAPPERS = (
    "<environment_context>",
    "<user_instructions>",
    "<permissions",
    "<INSTRUCTIONS>",
    "# AGENTS.md instructions",
)


def wrap(text: str) -> str:
    """Return the summary as the message that Codex makes of it."""
    return (
        f"{SUMMARY_PREFIX} You also have access to the state of the tools that were used by that "
        "language model. Use this to build on the work that has already been done and avoid "
        f"duplicating work. Here is the summary:\n{text}"
    )


def is_wrapper(message: Message) -> bool:
    """Whether a user message is initial context that the client wrote, not the user."""
    return message.text.lstrip().startswith(_WRAPPERS)


def stale_developer(view: History) -> set[int]:
    """Return developer messages behind the prefix that a later one of the same tag replaces."""
    newest: dict[str, int] = {}
    stale: set[int] = set()
    for i in range(view.prefix, len(view)):
        message = view.messages[i]
        head = message.text.lstrip().split("\n", 1)[0]
        if message.role != "developer" or not head.startswith("<") or message.protected:
            continue
        tag = head.split(">", 1)[0]
        if tag in newest:
            stale.add(newest[tag])
        newest[tag] = i
    return stale
