"""Claude Code's pipeline in the order of cost: snip, microcompact, collapse, autocompact."""

from collections.abc import Callable
from dataclasses import dataclass

from kvevict.agent import edit
from kvevict.agent.choosing import CLEARED, choose, loop_thinking, others, outputs, steps, whole
from kvevict.agent.history import Block, History
from kvevict.agent.message_policy import (
    Context,
    Limits,
    MessagePolicy,
    Stage,
    check_count,
    check_share,
)
from kvevict.agent.policies._roots import continuation, read_again
from kvevict.agent.policies._superseded import superseded
from kvevict.agent.verbs import LANGUAGE, ask_summary, compact, drop, externalise, mask
from kvevict.policies import Window

TOOLS = ("Read", "Bash", "Grep", "Glob", "WebSearch", "WebFetch", "Edit", "Write")
HEADINGS = (
    "Primary request and intent",
    "Key technical concepts",
    "Files and code sections",
    "Errors and fixes",
    "Problem solving",
    "All user messages",
    "Pending tasks",
    "Current work",
    "Next step",
)
PREFIX = "This session is being continued from a previous conversation that ran out of context."
COLLAPSED = "[Collapsed part of the conversation]\n"
PROMPT = (
    "Summarise the conversation in nine sections: "
    + "; ".join(f"{i}. {name}" for i, name in enumerate(HEADINGS, 1))
    + ". Quote key phrases, names, numbers and the user's wishes verbatim, do not rephrase them. "
    + LANGUAGE
)


@dataclass(frozen=True)
class ClaudeCode(MessagePolicy, name="claude_code"):
    """Snip, mask recomputable results, collapse spans, and only then summarise everything.

    Source: reverse engineering (SEED; not verifiable from an open source): the stages and their
    order, the eight tools, `[Old tool result content cleared]`, threshold W - min(O, 20,000) -
    13,000, nine sections with verbatim quotes, session memory before a model is asked, what is
    injected again from disk and its limits, three failures in a row stop it, reactive compaction
    on prompt_too_long. Not documented and assumed here: a hot tail of 3 results, and that snip
    (calls repeated later with the same input) and collapse start at shares of the threshold.

    Args:
        hot_tail: most recent results of these tools that stay.
        tools: tools whose results can be had again.
        reserve: most tokens reserved for the summary's own output.
        buffer: tokens of head start below the effective window.
        capacity: trigger at this share of the window instead of the formula (about 0.95 is
            reported for another version); None means the formula.
        snip_at: share of the threshold from which repeated calls are dropped.
        collapse_at: share of the threshold from which the older half is summarised in place.
        pointer: move old results to the store and leave a pointer instead of the placeholder.
        files: last edited files read again, `file_tokens` each, `files_tokens` in all.
        file_tokens: tokens of one file.
        files_tokens: tokens of all files.
        skill_tokens: tokens of one invoked skill.
        skills_tokens: tokens of all skills; the oldest are dropped first.
    """

    hot_tail: int = 3
    tools: tuple[str, ...] = TOOLS
    reserve: int = 20_000
    buffer: int = 13_000
    capacity: float | None = None
    snip_at: float = 0.8
    collapse_at: float = 0.9
    pointer: bool = False
    files: int = 5
    file_tokens: int = 5_000
    files_tokens: int = 50_000
    skill_tokens: int = 5_000
    skills_tokens: int = 25_000

    markers = (PREFIX, COLLAPSED, "[Read again from disk")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("hot_tail", "reserve", "buffer", "files", "file_tokens", "files_tokens"):
            check_count(self, name)
        for name in ("skill_tokens", "skills_tokens"):
            check_count(self, name)
        for name in ("snip_at", "collapse_at"):
            check_share(self, name)
        if self.capacity is not None:
            check_share(self, "capacity")

    def threshold(self, limits: Limits) -> int:
        """Return W - min(O, 20,000) - 13,000, or the share of the window.

        In windows below 44k, where the formula runs dry, it is a quarter of the window.
        """
        if self.capacity is not None:
            return int(limits.window * self.capacity)
        formula = limits.window - min(limits.max_output, self.reserve) - self.buffer
        return max(formula, limits.window // 4)

    def stages(self) -> tuple[Stage, ...]:
        """The four stages, the ones without a model first."""
        tail = self.edit_from == "tail"
        return (
            Stage("snip", "drop", self._snip, self._share(self.snip_at), self.min_gain),
            Stage(
                "microcompact",
                "externalise" if self.pointer else "mask",
                self._microcompact,
                self._share(self.snip_at) if tail else lambda view, context: True,
                self.min_gain,
            ),
            Stage("collapse", "summarise", self._collapse, self._share(self.collapse_at)),
            Stage("autocompact", "summarise", self._autocompact, self.due),
        )

    def _share(self, share: float) -> Callable[[History, Context], bool]:
        def due(view: History, context: Context) -> bool:
            if context.moment.force:
                return False  # asked for compaction: straight to the last stage
            return context.total(view) >= share * self.trigger_tokens(context.limits)

        return due

    def _snip(self, view: History, context: Context) -> History:
        return drop(view, superseded(view, self.roots(view) | loop_thinking(view)))

    def _microcompact(self, view: History, context: Context) -> History:
        found = outputs(view, (*self.tools, *_SAME))
        tail = self.hot_tail
        kept = choose(Window(tail), [1] * len(found)) if tail else [False] * len(found)
        old = [at for at, stays in zip(found, kept, strict=True) if not stays]
        if self.pointer:
            return externalise(view, context, old)
        need = None
        if self.edit_from == "tail":
            goal = int(self.snip_at * self.trigger_tokens(context.limits))
            need = max(1, context.total(view) - goal)
        return mask(view, context, old, _cleared, need, self.edit_from)

    def _collapse(self, view: History, context: Context) -> History | None:
        """Summarise the older half of the model's steps in place; users and the tail stay.

        More than half where the request would otherwise stay above the level.
        """
        acted = steps(view)
        roots = whole(view, self.roots(view) | loop_thinking(view) | set(view.users))
        older = [g for g in acted if view.groups[g].start not in roots]
        if not older:
            return None
        level = int(self.collapse_at * self.trigger_tokens(context.limits))
        need = context.total(view) - level + min(self.summary_tokens, level // 4)
        # A run of neighbours, so that what stays keeps its order around one summary.
        gone: set[int] = set()
        freed = 0
        for n, g in enumerate(older):
            if n and (g != older[n - 1] + 1 or (freed >= need and n >= len(acted) // 2)):
                break
            span = range(view.groups[g].start, view.groups[g].stop)
            gone.update(span)
            freed += sum(context.size(view.messages[i]) for i in span)
        if freed < need:
            return None  # not enough: the next stage summarises everything when its time comes
        text = ask_summary(
            view, context, gone, PROMPT, HEADINGS[2:5], self.summary_tokens, _collapsed
        )
        return None if text is None else compact(view, gone, [edit.inserted(_collapsed(text))])

    def _autocompact(self, view: History, context: Context) -> History | None:
        roots = self.roots(view)
        gone = others(view, roots)
        resources = context.services.resources
        notes = resources.session_memory() if resources is not None else ""
        text: str | None = notes.strip() or None
        if text is None:
            text = ask_summary(
                view, context, gone, PROMPT, HEADINGS, self.summary_tokens, continuation
            )
        if text is None:
            return None
        again = read_again(view, context, self)
        new = [edit.inserted(continuation(text, view))]
        new += [edit.inserted(again, note="roots")] if again else []
        return compact(view, gone, new, at=view.prefix)


_SAME = ("run", "shell", "exec", "terminal", "view", "cat", "search", "find", "list", "ls", "fetch")


def _cleared(block: Block) -> str:
    return CLEARED


def _collapsed(text: str) -> str:
    return COLLAPSED + text
