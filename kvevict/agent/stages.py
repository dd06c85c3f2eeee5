"""The run of a policy's stages: what is accepted, and what is told about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvevict.agent.history import History
from kvevict.agent.message_policy import Context, MessagePolicy, Stage


@dataclass(frozen=True)
class Action:
    """What one stage did, or why it did nothing.

    Attributes:
        stage: its name.
        verb: what it does.
        done: whether its edit was accepted.
        why: the reason in words.
        freed: tokens freed, estimated.
        messages: messages concerned, by their place in the full history.
        inserted: messages inserted.
    """

    stage: str
    verb: str
    done: bool
    why: str
    freed: int = 0
    messages: tuple[int, ...] = ()
    inserted: int = 0


def run_stages(
    policy: MessagePolicy,
    view: History,
    context: Context,
    accept: Callable[[History, History], None],
) -> tuple[History, list[Action]]:
    """Run a policy's stages in order, `passes` times at most.

    A stage that summarises is tried once. An edit counts only if it frees at least one token and
    its stage's `min_gain` (I13), so the run always ends.

    Args:
        policy: any message policy.
        view: the history as the model would see it.
        context: the call's circumstances.
        accept: raises when an edit (old, new) breaks an invariant.

    Returns:
        The edited history (the same object when nothing was done), and what happened.
    """
    actions: list[Action] = []
    for turn in range(policy.passes):
        before = view
        for stage in policy.stages():
            if turn and (stage.verb == "summarise" or stage.grows):
                continue
            if not stage.due(view, context) or _latched(stage, view, context):
                continue
            refused: list[str] = []
            new = stage.edit(view, replace(context, min_gain=stage.min_gain, refused=refused))
            if new is None or new is view or new.messages == view.messages:
                actions += [Action(stage.name, stage.verb, False, why) for why in refused]
                continue
            freed = context.estimate(view) - context.estimate(new)
            touched = changes(view, new)
            if not stage.grows and freed < max(1, stage.min_gain):
                why = f"would free {freed} tokens, needs {max(1, stage.min_gain)}"
                actions.append(Action(stage.name, stage.verb, False, why, 0, touched[0]))
                if stage.verb == "summarise":  # paid for in vain: not again before there is more
                    context.memory[f"latch:{stage.name}"] = context.total(view)
                continue
            accept(view, new)
            total = context.total(view)
            actions.append(
                Action(stage.name, stage.verb, True, f"request of {total} tokens", freed, *touched)
            )
            view = new
            if stage.verb == "summarise" and not stage.grows and stage.due(view, context):
                context.memory[f"latch:{stage.name}"] = total - freed
        if view is before:
            break
    return view, actions


def _latched(stage: Stage, view: History, context: Context) -> bool:
    """Whether a summary was not enough and the history has not grown by 5 % of the window since.

    Not enough: the request stayed above the trigger, or the stage's `min_gain` was not reached.

    Without it a large root makes every call compact again (opencode 27924, codex 31351).
    """
    key = f"latch:{stage.name}"
    if stage.verb != "summarise" or key not in context.memory:
        return False
    if context.moment.force or context.total(view) >= (
        context.memory[key] + context.limits.window // 20
    ):
        del context.memory[key]
        return False
    return True


def changes(old: History, new: History) -> tuple[tuple[int, ...], int]:
    """Return the places of the messages that were edited or dropped, and how many are new."""
    now = {m.index: m for m in new.messages if m.index >= 0}
    touched = tuple(
        m.index
        for m in old.messages
        if m.index >= 0 and (m.index not in now or now[m.index].blocks is not m.blocks)
    )
    known = {id(m) for m in old.messages}
    return touched, sum(1 for m in new.messages if m.index < 0 and id(m) not in known)
