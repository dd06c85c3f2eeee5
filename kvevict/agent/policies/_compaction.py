"""A provider's own compaction in a history: what stands before it need not be sent again."""

from __future__ import annotations

from collections.abc import Mapping

from kvevict.agent.formats import get_format
from kvevict.agent.history import History
from kvevict.agent.verbs import drop, real_users


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
    gone = {i for i in range(int(view.groups[int(view.group_index[at])].start)) if i not in roots}
    if get_format(view.format).rules.first_user:
        # The first message must be a user's (I5): the one nearest before stays.
        left = [i for i in range(view.prefix, len(view)) if i not in gone]
        if left and view.messages[left[0]].role != "user":
            gone -= set([i for i in real_users(view) if i < left[0]][-1:])
    return drop(view, gone) if gone else None
