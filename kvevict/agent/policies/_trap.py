"""The Complexity Trap's two verbs, shared by its three policies."""

from __future__ import annotations

from kvevict.agent import edit
from kvevict.agent.choosing import choose, others, outputs, steps
from kvevict.agent.history import Address, Block, History
from kvevict.agent.message_policy import Context
from kvevict.agent.verbs import LANGUAGE, ask_summary, compact, mask
from kvevict.policies import Window

PREFIX = "[Summary of the earlier steps]\n"
HEADINGS = ("Task", "Progress", "Code changes and files", "Errors and fixes", "Next steps")
PROMPT = (
    "Summarise the agent's steps above for itself: the task's state, what was done and found, "
    "files and code changed, errors and their fixes, what remains. " + LANGUAGE
)


def hidden(block: Block) -> str:
    """Return the placeholder of a masked observation."""
    return f"Old environment output: ({len(block.text.splitlines())} lines omitted)"


def old_observations(view: History, turns: int, polling: int) -> list[Address]:
    """Return the observations older than the last turns (model steps), in whole batches."""
    acted = steps(view)
    counted = (len(acted) // polling) * polling
    kept = choose(Window(turns), [1] * counted)
    old = {g for g, stays in zip(acted, kept, strict=False) if not stays}
    return [at for at in outputs(view, shell=True) if int(view.group_index[at[0]]) in old]


def mask_old(view: History, context: Context, turns: int, polling: int) -> History:
    """Mask the observations older than the last turns."""
    return mask(view, context, old_observations(view, turns, polling), hidden)


def unsummarised(view: History, roots: set[int]) -> list[int]:
    """Return the numbers of the model's steps that no summary covers and that may go."""
    return [
        g
        for g in steps(view)
        if not any(i in roots for i in range(view.groups[g].start, view.groups[g].stop))
        and not view.messages[view.groups[g].start].note
    ]


def summarise_oldest(
    view: History, context: Context, batch: int, roots: set[int], budget: int
) -> History | None:
    """Summarise the oldest steps, and the summary before them, into one message."""
    chosen = unsummarised(view, roots)[:batch]
    if not chosen:
        return None
    end = view.groups[chosen[-1]].stop
    gone = others(view, roots, end)
    text = ask_summary(
        view, context, gone, PROMPT, HEADINGS, budget, lambda summary: PREFIX + summary
    )
    return None if text is None else compact(view, gone, [edit.inserted(PREFIX + text)])
