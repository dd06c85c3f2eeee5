"""A provider's own compaction in a history: what stands before it need not be sent again."""

from __future__ import annotations

from collections.abc import Mapping

from kvevict.agent.choosing import others
from kvevict.agent.history import History
from kvevict.agent.verbs import drop


def has_compaction(view: History) -> bool:
    """Whether a provider's compaction with content is in the history."""
    return last_compaction(view) is not None


def last_compaction(view: History) -> int | None:
    """Return the message that holds the latest compaction; failed ones (no content) are none."""
    for i in range(len(view) - 1, -1, -1):
        for block in view.messages[i].blocks:
            if block.kind == "compaction" and (block.text or block.opaque):
                return i
    return None


def before_compaction(view: History, roots: set[int]) -> History | None:
    """Drop what stands before the latest compaction, but for the roots.

    Nothing is dropped from a request with `previous_response_id`: there the server keeps it.
    """
    at = last_compaction(view)
    shell = view.shell if isinstance(view.shell, Mapping) else {}
    if at is None or shell.get("previous_response_id"):
        return None
    gone = others(view, roots, view.group_of(at).start)
    return drop(view, gone) if gone else None
