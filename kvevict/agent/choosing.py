"""Choosing: which messages, groups and results stay, by one `Policy.keep` and by their roles.

`choose` hands slots (groups, results or turns, counted or in tokens) to `kvevict.policy.Policy`;
the rest tells what may be chosen at all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from kvevict.agent.history import THINKING_KINDS, Address, Block, History, Message
from kvevict.agent.message_policy import REGISTRY, Context
from kvevict.agent.store import POINTER
from kvevict.policy import Policy
from kvevict.slots import Slots

CLEARED = "[Old tool result content cleared]"
_NOT_OURS = ("demo", "synthetic")  # notes of readers and of repair
_PLACEHOLDERS = (
    CLEARED,
    "[Stored outside the context:",
    "[cleared]",
    "[Tool result cleared",
    "Old environment output: (",
    "<tool_output_masked>",
)


def choose(
    policy: Policy,
    sizes: Sequence[int],
    protected: Sequence[bool] | None = None,
    score: Sequence[float] | None = None,
    group: Sequence[int] | None = None,
) -> list[bool]:
    """Return which slots a policy of the shared vocabulary keeps, oldest first.

    Args:
        policy: head, recent, importance; its extents are in the unit of `sizes`.
        sizes: size of each slot: 1 each to count slots, else tokens.
        protected: roots; None means none.
        score: importance; None means 0.
        group: equal neighbours stay or leave together; None means each alone.
    """
    count = len(sizes)
    if not count:
        return []
    slots = Slots(
        position=np.arange(count, dtype=np.int64),
        size=np.asarray(sizes, dtype=np.int64),
        group=None if group is None else np.asarray(group, dtype=np.int64),
        protected=None if protected is None else np.asarray(protected, dtype=bool),
        score=None if score is None else np.asarray(score, dtype=np.float64),
    )
    return [bool(kept) for kept in policy.keep(slots)]


def is_inserted(message: Message) -> bool:
    """Whether a policy wrote this message: by its note, or by how its text begins."""
    if message.note:
        return message.note not in _NOT_OURS
    if message.role not in ("user", "assistant"):
        return False
    if not message.blocks:
        return False
    block = message.blocks[0]
    if block.kind != "text":
        return block.kind == "compaction"
    return block.text.startswith(_markers())


def all_inserted(view: History) -> frozenset[int]:
    """Return the messages that a policy wrote; remembered with the history."""
    known: frozenset[int] | None = vars(view).get("inserted")
    if known is None:
        known = frozenset(i for i, m in enumerate(view.messages) if is_inserted(m))
        vars(view)["inserted"] = known
    return known


def _markers() -> tuple[str, ...]:
    return _marker_list(len(REGISTRY))


@cache
def _marker_list(count: int) -> tuple[str, ...]:
    return tuple(marker for cls in REGISTRY.values() for marker in cls.markers)


def real_users(view: History) -> list[int]:
    """Return the messages that a user wrote, oldest first; what policies inserted is left out."""
    wrote = all_inserted(view)
    return [i for i in view.users if i not in wrote]


def anchors(view: History, first_user: bool = False, last_group: bool = False) -> set[int]:
    """Return the messages that no edit drops.

    System and developer messages, pinned ones, the last real user message (I7), an unfinished
    last group, and a last group with thinking (I4: it must stay as it is).

    Args:
        view: any history.
        first_user: whether the first real user message stays too.
        last_group: whether the last group stays in any case.
    """
    keep = set(view.instructions | view.pinned)
    users = real_users(view) or list(view.users)
    if users:
        keep.add(users[-1])
        if first_user:
            keep.add(users[0])
    if view.groups:
        last = view.groups[-1]
        span = range(last.start, last.stop)
        thinks = any(b.kind in THINKING_KINDS for i in span for b in view.messages[i].blocks)
        if last_group or not last.complete or thinks:
            keep.update(span)
    return keep


def loop_thinking(view: History) -> set[int]:
    """Return the messages of the latest tool loop's groups that hold thinking (I4)."""
    start = view.last_user if view.last_user is not None else 0
    return {
        i
        for group in view.groups
        if group.start >= start
        and any(
            block.kind in THINKING_KINDS
            for j in range(group.start, group.stop)
            for block in view.messages[j].blocks
        )
        for i in range(group.start, group.stop)
    }


def whole(view: History, keep: Collection[int]) -> set[int]:
    """Return the messages of every group that has one of these: atoms stay together."""
    groups = {int(view.group_index[i]) for i in keep}
    return {i for g in groups for i in range(view.groups[g].start, view.groups[g].stop)}


def others(view: History, keep: Collection[int], stop: int | None = None) -> set[int]:
    """Return the messages of all groups that have none of these, before `stop` where given."""
    end = len(view) if stop is None else stop
    stays = set(keep)
    return {
        i
        for group in view.groups
        if group.stop <= end and stays.isdisjoint(range(group.start, group.stop))
        for i in range(group.start, group.stop)
    }


def steps(view: History) -> list[int]:
    """Return the numbers of the groups in which the model acted: a response and its results."""
    return [g for g, group in enumerate(view.groups) if group.role == "assistant"]


@cache
def tool_name(name: str | None) -> str:
    """Return a tool's name in lower case without separators."""
    return "".join(ch for ch in (name or "").lower() if ch.isalnum())


def outputs(
    view: History, tools: Collection[str] = (), exempt: Collection[str] = (), shell: bool = False
) -> list[Address]:
    """Return the addresses of tool results that can still be edited, in order.

    Args:
        view: any history.
        tools: only results of tools whose name begins with one of these; empty means all.
        exempt: no results of these tools.
        shell: also the output of commands that the user ran.
    """
    wanted = tuple(map(tool_name, tools))
    never = {tool_name(name) for name in exempt}
    found = []
    for at in view.find("tool_result", "shell") if shell else view.find("tool_result"):
        block = view.block(at)
        name = tool_name(block.tool)
        if block.protected or name in never or (wanted and not name.startswith(wanted)):
            continue
        found.append(at)
    return found


def is_masked(block: Block) -> bool:
    """Whether a result's content is gone already."""
    if not block.edits and not block.text.startswith(("[", "<", "O")):
        return False
    if "mask" in block.edits:
        return True
    text = block.text
    return text.startswith(_PLACEHOLDERS) and (
        len(text) < 200 or text.startswith("<") or POINTER.search(text) is not None
    )


def block_size(view: History, at: Address, context: Context) -> int:
    """Return the tokens of one block: those that its message would lose with it."""
    message = view.messages[at[0]]
    if len(message.blocks) == 1:
        return context.size(message)
    rest = tuple(b for i, b in enumerate(message.blocks) if i != at[1])
    return context.size(message) - context.size(replace(message, blocks=rest, source=None))


def oldest_until(view: History, context: Context, roots: Collection[int], need: int) -> set[int]:
    """Return the oldest whole groups without roots whose tokens together are at least `need`."""
    gone: set[int] = set()
    freed = 0
    for group in view.groups:
        span = range(group.start, group.stop)
        if freed >= need:
            break
        if any(i in roots for i in span):
            continue
        gone.update(span)
        freed += sum(context.size(view.messages[i]) for i in span)
    return gone
