"""OpenCode's prune, shared by its two policies."""

from __future__ import annotations

from collections.abc import Collection

from kvevict.agent.choosing import block_size, choose, is_inserted, is_masked, outputs, real_users
from kvevict.agent.history import Address, History
from kvevict.agent.message_policy import Context
from kvevict.policies import Window


def prunable(
    view: History, context: Context, protect: int, turns: int, exempt: Collection[str]
) -> list[Address]:
    """Return the tool outputs that may be hidden, walking back as OpenCode does.

    The last user turns are skipped, the walk stops at a summary or at a part hidden before, and
    the newest `protect` tokens of output stay.
    """
    users = real_users(view)
    if len(users) < turns:
        return []
    end = view.group_of(users[-turns]).start if turns else len(view)
    start = 0
    for i in range(end - 1, -1, -1):
        if is_inserted(view.messages[i]):
            start = i + 1
            break
    found = [at for at in outputs(view, exempt=exempt) if start <= at[0] < end]
    hidden = [n for n, at in enumerate(found) if is_masked(view.block(at))]
    found = found[hidden[-1] + 1 :] if hidden else found
    sizes = [block_size(view, at, context) for at in found]
    kept = choose(Window(protect), sizes) if protect else [False] * len(found)
    return [at for at, stays in zip(found, kept, strict=True) if not stays]
