"""shape: roots stay, recent stays, recomputable goes, long-lived is stored, the rest compressed."""

from dataclasses import dataclass

from kvevict.agent import edit
from kvevict.agent.choosing import CLEARED, choose, is_masked, loop_thinking, others, outputs, whole
from kvevict.agent.history import Address, History
from kvevict.agent.message_policy import (
    Context,
    Limits,
    MessagePolicy,
    Stage,
    check_count,
    check_share,
)
from kvevict.agent.verbs import LANGUAGE, ask_summary, compact, externalise, mask
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


@dataclass(frozen=True)
class Shape(MessagePolicy, name="shape"):
    """The general form that all systems share, on the four design questions.

    Recoverable? A result that a tool returns again is masked, for free. Needed for long? What
    cannot be had again is moved to the store, with a pointer. Cache-friendly? Both happen in
    batches of `min_gain` tokens (measured: batched masking and a late summary are the cheapest on
    a real session, 18.11 against 45.67 dollars, facts 3.4). Visible? The summary is plain text.

    Args:
        mask_at: share of the window from which results are masked and stored.
        results: most recent results that stay whole.
        recent: newest tokens that a summary leaves verbatim.
        recoverable: blocks at least this recoverable are masked, the others stored.
        reserve: most tokens reserved for the answer in the summary's trigger.
        buffer: tokens of head start below it.
        min_gain: tokens that masking must free, else nothing happens.
    """

    mask_at: float = 0.5
    results: int = 10
    recent: int = 20_000
    recoverable: float = 1.0
    reserve: int = 20_000
    buffer: int = 13_000
    min_gain: int = 20_000

    markers = (PREFIX,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "mask_at")
        for name in ("results", "recent", "reserve", "buffer"):
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

    def _old(self, view: History) -> list[Address]:
        found = outputs(view, shell=True)
        kept = choose(Window(self.results), [1] * len(found)) if self.results else []
        stays = {at for at, keep in zip(found, kept, strict=False) if keep}
        return [at for at in found if at not in stays and not is_masked(view.block(at))]

    def _mask(self, view: History, context: Context) -> History:
        old = [at for at in self._old(view) if view.block(at).recoverable >= self.recoverable]
        return mask(view, context, old, lambda block: CLEARED)

    def _store(self, view: History, context: Context) -> History:
        old = [at for at in self._old(view) if view.block(at).recoverable < self.recoverable]
        return externalise(view, context, old)

    def _summarise(self, view: History, context: Context) -> History | None:
        sizes = context.sizes(view)
        recent = min(self.recent, sum(sizes) // 4, self.trigger_tokens(context.limits) // 4)
        groups = [int(g) for g in view.group_index]
        kept = choose(Window(max(1, recent)), sizes, group=groups)
        tail = {i for i, stays in enumerate(kept) if stays}
        roots = whole(view, self.roots(view) | tail | loop_thinking(view))
        gone = others(view, roots)
        left = context.total(view) - sum(sizes[i] for i in gone) + self.summary_tokens
        if left >= self.trigger_tokens(context.limits):  # one long loop: only its last part stays
            roots = whole(view, self.roots(view) | tail)
            gone = others(view, roots)
        text = ask_summary(view, context, gone, PROMPT, HEADINGS, self.summary_tokens, _wrap)
        if text is None:
            return None
        return compact(view, gone, [edit.inserted(_wrap(text))], at=view.prefix)


def _wrap(text: str) -> str:
    return PREFIX + text
