"""Superseded calls: made again later with the same input, so the older ones tell nothing new."""

from __future__ import annotations

from kvevict.agent.history import History


def superseded(view: History, roots: set[int]) -> set[int]:
    """Return the messages of groups that are nothing but calls repeated later.

    Args:
        view: any history.
        roots: messages that never go.
    """
    newest: dict[tuple[str | None, str], int] = {}
    calls = view.find("tool_use")
    for m, b in calls:
        block = view.block((m, b))
        newest[(block.tool, block.text)] = int(view.group_index[m])
    gone: set[int] = set()
    for g, group in enumerate(view.groups):
        span = range(group.start, group.stop)
        if group.role != "assistant" or not group.complete or any(i in roots for i in span):
            continue
        blocks = [block for i in span for block in view.messages[i].blocks]
        mine = [block for block in blocks if block.kind == "tool_use"]
        plain = all(block.kind in ("tool_use", "tool_result") for block in blocks)
        if mine and plain and all(newest[(c.tool, c.text)] > g for c in mine):
            gone.update(span)
    return gone
