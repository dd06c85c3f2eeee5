"""The verbs: drop, mask, truncate, summarise, externalise, isolate, in terms of one `Policy.keep`.

Every verb takes a history and returns an edited one (the same object where nothing is to do). What
stays is chosen by `choose`, which hands slots to `kvevict.policy.Policy.keep`: message groups,
single tool results or turns, of size 1 (counted) or of their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvevict.agent import edit
from kvevict.agent.choosing import CLEARED, is_inserted, is_masked, whole
from kvevict.agent.extractive import Plain
from kvevict.agent.formats import get_format
from kvevict.agent.graphemes import shorten
from kvevict.agent.history import THINKING_KINDS, Address, Block, History, Message
from kvevict.agent.message_policy import Context
from kvevict.agent.store import Store
from kvevict.agent.summarizers import SummaryInput

LANGUAGE = "Write in the language that the user writes in."
_LEAST = 24  # tokens below which a span is not worth a summary
_SHORTEST = 8  # tokens of the shortest summary that is asked for
_TEXT_EDITS = frozenset({"mask", "truncate", "replace"})


Wrap = Callable[[str], str]


# -- mask, truncate, externalise ------------------------------------------------------------------


def mask(
    view: History,
    context: Context,
    at: Iterable[Address],
    text: Callable[[Block], str] = lambda block: CLEARED,
    need: int | None = None,
    edit_from: str = "head",
) -> History:
    """Replace the content of results by placeholders where that is smaller; the calls stay.

    Args:
        view: any history.
        context: the call's circumstances.
        at: results that may go.
        text: makes the placeholder.
        need: tokens to free; the rest stays untouched. None means all of them.
        edit_from: with `need`, whether the oldest ("head") or the newest ("tail") go first.
    """
    changed: dict[Address, str] = {}
    freed = 0
    for place in sorted(at, reverse=edit_from == "tail"):
        if need is not None and freed >= need:
            break
        block = view.block(place)
        if is_masked(block) or block.protected:
            continue
        placeholder = text(block)
        new = edit.set_text(block, placeholder, "mask") if placeholder else block
        gain = _gain(context, block, new)
        if gain > 0:
            changed[place] = placeholder
            freed += gain
    return masked(view, changed)


def masked(view: History, texts: Mapping[Address, str]) -> History:
    """Mask blocks; pairs and atoms stay what they were, so they are not worked out again."""
    if not texts:
        return view
    return with_structure(edit.mask(view, texts), vars(view))


def emptied(view: History, at: Sequence[Address]) -> History:
    """Empty the arguments of calls; pairs and atoms stay what they were."""
    return with_structure(edit.empty_input(view, at), vars(view)) if at else view


STRUCTURE = (
    "pairs",
    "groups",
    "group_index",
    "cuts",
    "by_kind",
    "users",
    "pinned",
    "instructions",
    "inserted",
)


def with_structure(view: History, structure: Mapping[str, Any]) -> History:
    """Give a history what is cached of one with the same roles, kinds, calls and results."""
    for name in STRUCTURE:
        if name in structure:
            vars(view).setdefault(name, structure[name])
    return view


def externalise(
    view: History, context: Context, at: Iterable[Address], preview: int = 80
) -> History:
    """Move the text of results to the store and leave a pointer, where that is smaller."""
    store = context.services.store
    dry = Store()  # sizes are compared before anything is written
    changed = {}
    for place in sorted(at):
        block = view.block(place)
        if is_masked(block) or block.protected or not block.text:
            continue
        new = edit.set_text(block, dry.pointer(block.text, preview), "mask")
        if _gain(context, block, new) > 0:
            changed[place] = store.pointer(block.text, preview)
    return masked(view, changed)


def truncate(
    view: History,
    context: Context,
    at: Iterable[Address],
    limit: int,
    need: int | None = None,
    marker: str = "\n[truncated]\n",
) -> History:
    """Shorten results to their head and tail, oldest first, until enough is freed.

    Args:
        view: any history.
        context: the call's circumstances.
        at: results that may be shortened.
        limit: characters that stay of each, the marker included.
        need: tokens to free; None means all of them.
        marker: stands for what went.
    """
    freed = 0
    for place in sorted(at):
        if need is not None and freed >= need:
            break
        block = view.block(place)
        if len(block.text) <= limit or block.protected:
            continue
        before = context.size(view.messages[place[0]])
        new = edit.truncate(view, place, limit, marker, "both")
        gain = before - context.size(new.messages[place[0]])
        if gain > 0:
            view = new
            freed += gain
    return view


def middle_out(text: str, tokens: int, context_size: Callable[[str], int]) -> str:
    """Shorten a text to about this many tokens, its middle replaced by a marker (Codex's words).

    Source: openai/codex `truncate_text`: "…N tokens truncated…" between the two halves.
    """
    total = context_size(text)
    if total <= tokens:
        return text
    marker = f"…{total - tokens} tokens truncated…"
    limit = len(text) * max(tokens, 0) // max(total, 1)
    while limit > len(marker) + 2:
        short = shorten(text, limit, marker, "both")
        if context_size(short) <= tokens:
            return short
        limit = limit * 9 // 10
    return marker


# -- drop -----------------------------------------------------------------------------------------


def opening(view: History, lost: Collection[int]) -> set[int]:
    """Return what must stay of `lost` so that a user message is first where it must be (I5)."""
    if not lost or not get_format(view.format).rules.first_user:
        return set()
    first = next((i for i in range(view.prefix, len(view)) if i not in lost), len(view))
    if first == len(view) or view.messages[first].role == "user":
        return set()
    openings = [g for g in view.groups if g.role == "user" and g.stop <= first]
    return {i for g in openings[-1:] for i in range(g.start, g.stop)}


def drop(view: History, gone: Collection[int]) -> History:
    """Drop messages; a group of which any message stays, stays whole.

    Where the format wants a user message first (I5) the nearest one before the rest stays too.
    """
    lost = set(gone)
    stays = whole(view, [i for i in range(len(view)) if i not in lost])
    lost -= stays
    lost -= opening(view, lost)
    return edit.drop_messages(view, lost) if lost else view


# -- summarise ------------------------------------------------------------------------------------


def plain(messages: Iterable[Message], clip: int | None = None) -> list[Plain]:
    """Return messages as role/content texts for a summariser.

    Calls become `[called NAME with ARGUMENTS]`, media `[Attached image]`; thinking is left out.

    Args:
        messages: any messages.
        clip: characters that stay of a tool result; None means all.
    """
    out: list[Plain] = []
    for message in messages:
        said: list[str] = []
        for block in message.blocks:
            if block.kind in THINKING_KINDS:
                continue
            media = "".join(f"[Attached {kind}]" for kind in block.media)
            if block.kind in ("tool_result", "server_tool_result", "shell"):
                text = block.text
                if clip is not None and len(text) > clip:
                    text = shorten(text, clip, "", "head") + "\n[truncated]"
                out.append({"role": "tool", "content": "\n".join(filter(None, (text, media)))})
            elif block.kind in ("tool_use", "server_tool_use"):
                said.append(f"[called {block.tool or 'tool'} with {block.text}]")
            else:
                said.append("\n".join(filter(None, (block.text, media))))
        text = "\n".join(filter(None, said))
        if text:
            role = message.role if message.role in ("user", "assistant") else "user"
            out.append({"role": role, "content": text})
    return out


def ask_summary(
    view: History,
    context: Context,
    gone: Collection[int],
    prompt: str,
    headings: Sequence[str] = (),
    budget: int = 1_500,
    wrap: Wrap = lambda text: text,
    clip: int | None = None,
    extra: int = 0,
) -> str | None:
    """Ask the summariser for the messages that are to go.

    An earlier summary among them is handed over as `previous`; a span with nothing but such is
    not summarised again, so summaries never feed on themselves. Where even the shortest summary
    would free less than the stage's `min_gain` nobody is asked, and the budget is never larger
    than what leaves room for that gain.

    Args:
        view: any history.
        context: the call's circumstances.
        gone: messages to summarise.
        prompt: the instruction.
        headings: sections wanted.
        budget: tokens that the summary may have; at most half of what it replaces.
        wrap: what is put around the summary.
        clip: characters that stay of each tool result in the summariser's input.
        extra: tokens that the edit frees beside the messages that go.

    Returns:
        The summary without its wrapping, or None: nothing new to summarise, not worth it, or it
        failed.
    """
    order = sorted(gone)
    fresh = [i for i in order if not is_inserted(view.messages[i])]
    limit = sum(context.size(view.messages[i]) for i in order)
    frame = context.size(edit.inserted(wrap("x")))
    if not fresh or limit < frame + _LEAST:
        return None
    room = most_summary(context, limit + extra, frame)
    if room < _SHORTEST:
        return None
    earlier = [view.messages[i] for i in order if is_inserted(view.messages[i])]
    previous = earlier[-1].text if earlier else ""
    if context.moment.focus:
        prompt = f"{prompt}\nFocus on: {context.moment.focus}"
    if previous:
        prompt = f"{prompt}\nTake up this earlier summary:\n{previous}"
    budget = max(_SHORTEST, min(budget, (limit - frame) // 2, room))
    chars = max(1_000, context.limits.usable - budget) * 3
    messages = plain((view.messages[i] for i in fresh), clip)
    length = sum(len(m["content"]) for m in messages)
    while len(messages) > 1 and length > chars:  # the summariser has a window too: oldest go first
        length -= len(messages.pop(0)["content"])
    if messages and length > chars:
        messages[0]["content"] = shorten(messages[0]["content"], chars, "\n[truncated]\n", "both")
    request = SummaryInput(messages, prompt, headings, previous)
    return context.services.summarise(request, budget, limit, wrap)


def most_summary(context: Context, limit: int, frame: int) -> int:
    """Return the tokens that a summary may have for its stage's `min_gain` to be reached.

    Args:
        context: the call's circumstances; told the reason where nothing would be enough.
        limit: tokens of all that leaves.
        frame: tokens of what is put around the summary.
    """
    room = limit - frame - max(1, context.min_gain)
    if room < _SHORTEST:
        most = max(0, limit - frame)
        context.refused.append(
            f"a summary could free {most} tokens at most, needs {max(1, context.min_gain)}"
        )
    return room


def compact(
    view: History,
    gone: Collection[int],
    before: Sequence[Message] = (),
    after: Sequence[Message] = (),
    at: int | None = None,
) -> History:
    """Drop messages and put new ones in their place.

    Args:
        view: any history.
        gone: messages that go; whole groups.
        before: messages inserted where the first of them stood.
        after: messages appended at the end.
        at: where `before` goes instead, an index of `view`.
    """
    lost = set(gone)
    if not before:
        lost -= opening(view, lost)
    place = min(lost) if at is None and lost else at if at is not None else len(view)
    place = max(place, view.prefix)
    kept_before = sum(1 for i in range(place) if i not in lost)
    new = edit.drop_messages(view, lost) if lost else view
    if before:
        new = edit.insert(new, kept_before, *before)
    return append(new, *after) if after else new


def append(view: History, *messages: Message) -> History:
    """Put messages at the end, or before a last group whose results are still to come (I1)."""
    waits = bool(view.groups) and not view.groups[-1].complete
    return edit.insert(view, view.groups[-1].start if waits else len(view), *messages)


def isolate(
    view: History, start: int, stop: int, conclusion: str | Callable[[History], str], note: str = ""
) -> History:
    """Let a span run in a window of its own: only its conclusion stays in this one.

    The fourth form next to drop, compress and externalise: a sub-task's messages leave whole.

    Args:
        view: any history.
        start: first message of the sub-task, the start of a group.
        stop: one past its last message.
        conclusion: what returns, or a callable that works it out from the span as a history of
            its own (system prompt and tools kept).
        note: name of the sub-task, quoted in the conclusion's message.
    """
    span = replace(view, messages=(*view.messages[: view.prefix], *view.messages[start:stop]))
    text = conclusion if isinstance(conclusion, str) else conclusion(span)
    title = f" ({note})" if note else ""
    return edit.replace_span(view, start, stop, f"[Result of a sub-task{title}] {text}", "user")


def _gain(context: Context, old: Block, new: Block) -> int:
    """Return the tokens that a block loses, whatever stands beside it."""
    return context.part(old) - context.part(new)
