"""shape: roots stay, recent stays, recomputable goes, long-lived is stored, the rest compressed."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvevict.agent import edit
from kvevict.agent.answers import Answers
from kvevict.agent.choosing import CLEARED, choose, is_masked, loop_thinking, others, whole
from kvevict.agent.history import Address, History
from kvevict.agent.message_policy import (
    Context,
    Limits,
    MessagePolicy,
    Stage,
    check_count,
    check_share,
)
from kvevict.agent.verbs import LANGUAGE, ask_summary, compact, emptied, externalise, mask
from kvevict.policies import Window

PREFIX = "[Summary of the earlier conversation]\n"
HEADINGS = (
    "Goal",
    "User messages",
    "Decisions and findings",
    "Files",
    "Errors and fixes",
    "Next steps",
)
PROMPT = (
    "Summarise the conversation above for continuing it: keep what cannot be computed again, quote "
    "the user's wishes verbatim, leave out what a tool can return once more. " + LANGUAGE
)


_RESULTS = ("tool_result", "shell", "file")


@dataclass(frozen=True)
class Shape(MessagePolicy, name="shape"):
    """The general form that all systems share, on the four design questions.

    What is recoverable and how long it is needed is answered by `kvevict.agent.answers`, the very
    rules that `advise` prints. Recoverable and used up: the result is masked, large arguments are
    emptied, for free. Needed for longer, or not to be had again: it moves to the store, with a
    pointer; rules that the user stated for ever are filed there too and stay verbatim.
    Cache-friendly? All of it happens in batches of `min_gain` tokens (measured: batched masking
    and a late summary are the cheapest on a real session, facts 3.4). Visible? The summary is
    plain text.

    Args:
        mask_at: share of the window from which results are masked and stored.
        results: most recent results that stay whole, and their calls.
        recent: newest tokens that a summary leaves verbatim.
        recoverable: blocks at least this recoverable are masked, the others stored.
        rules: tokens of the user's lasting rules that stay verbatim through a summary, the newest
            first; of older ones a pointer stays.
        reserve: most tokens reserved for the answer in the summary's trigger.
        buffer: tokens of head start below it.
        min_gain: tokens that masking must free, else nothing happens.
    """

    mask_at: float = 0.5
    results: int = 10
    recent: int = 20_000
    recoverable: float = 1.0
    rules: int = 4_000
    reserve: int = 20_000
    buffer: int = 13_000
    min_gain: int = 20_000

    markers = (PREFIX,)
    keeps_first = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "mask_at")
        for name in ("results", "recent", "rules", "reserve", "buffer"):
            check_count(self, name)

    def threshold(self, limits: Limits) -> int:
        """Return the summary's trigger, W - min(O, 20,000) - 13,000, at least W / 2."""
        formula = limits.window - min(limits.max_output, self.reserve) - self.buffer
        return max(formula, limits.window // 2)

    def stages(self) -> tuple[Stage, ...]:
        """Mask, store, and only then summarise."""
        return (
            Stage("mask_recoverable", "mask", self._mask, self._early, self.min_gain),
            Stage("store_long_lived", "externalise", self._store, self._early, self.min_gain),
            Stage("summarise_rest", "summarise", self._summarise, self.due),
        )

    def _early(self, view: History, context: Context) -> bool:
        if context.moment.force:
            return False
        return context.total(view) >= min(
            self.mask_at * context.limits.window, self.trigger_tokens(context.limits)
        )

    def _answers(self, view: History, context: Context) -> Answers:
        return Answers(view, context.part, self.results, self.roots(view), self.recoverable)

    def _left(self, view: History, *kinds: str) -> list[Address]:
        """Return the blocks of these kinds that no edit has touched yet."""
        return [at for at in view.find(*kinds) if not is_masked(view.block(at))]

    def _mask(self, view: History, context: Context) -> History | None:
        results = self._left(view, *_RESULTS)
        calls = [at for at in view.find("tool_use") if len(view.block(at).text) > 2]
        if self._hopeless(view, context, (*results, *calls)):
            return None
        answers = self._answers(view, context)
        old = [at for at in results if answers.of(at).verb == "mask"]
        new = mask(view, context, old, lambda block: CLEARED)
        done = [at for at in calls if answers.of(at).verb == "mask"]
        return emptied(new, done)

    def _store(self, view: History, context: Context) -> History | None:
        results = self._left(view, *_RESULTS)
        if self._hopeless(view, context, results):
            return None
        answers = self._answers(view, context)
        return externalise(
            view, context, [at for at in results if answers.of(at).verb == "externalise"]
        )

    def _hopeless(self, view: History, context: Context, at: Iterable[Address]) -> bool:
        """Whether all of these together are less than an edit must free."""
        return sum(context.part(view.block(place)) for place in at) < self.min_gain

    def _lasting(self, view: History, context: Context) -> tuple[History, set[int]]:
        """File what holds for ever; return what stays of it: verbatim, or as a pointer."""
        answers = self._answers(view, context)
        said = [at for at in view.find("text") if view.messages[at[0]].typed]
        filed = {at[0] for at in said if is_masked(view.block(at))}
        rules = [at for at in said if answers.of(at).verb == "externalise" and at[0] not in filed]
        sizes = [context.part(view.block(at)) for at in rules]
        kept = choose(Window(self.rules), sizes) if self.rules else [False] * len(rules)
        for at in rules:
            context.services.store.put(view.block(at).text)
        older = [at for at, stays in zip(rules, kept, strict=True) if not stays]
        return externalise(view, context, older), filed | {at[0] for at in rules}

    def _summarise(self, view: History, context: Context) -> History | None:
        view, lasting = self._lasting(view, context)
        sizes = context.sizes(view)
        recent = min(self.recent, sum(sizes) // 4, self.trigger_tokens(context.limits) // 4)
        groups = [int(g) for g in view.group_index]
        kept = choose(Window(max(1, recent)), sizes, group=groups)
        tail = {i for i, stays in enumerate(kept) if stays} | lasting
        roots = whole(view, self.roots(view) | tail | loop_thinking(view))
        gone = others(view, roots)
        left = context.total(view) - sum(sizes[i] for i in gone) + self.summary_tokens
        if left >= self.trigger_tokens(context.limits):  # one long loop: only its last part stays
            roots = whole(view, self.roots(view) | tail)
            gone = others(view, roots)
        text = ask_summary(view, context, gone, PROMPT, HEADINGS, self.summary_tokens, _wrap)
        return None if text is None else compact(view, gone, [edit.inserted(_wrap(text))])


def _wrap(text: str) -> str:
    return PREFIX + text
