"""choices: what each message-level policy makes of a history at a budget of rendered tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvevict.agent.choosing import anchors
from kvevict.agent.edit import drop_groups
from kvevict.agent.history import History
from kvevict.agent.manager import HistoryManager
from kvevict.errors import KvevictError
from kvevict.models.counters import SpanCounter
from kvevict.models.spans import Rendered
from kvevict.policies import H2O, Random, Window
from kvevict.policy import Policy

Render = Callable[[History], Rendered]

# Settings of each system from the least to the most that they free; the first that fits is taken.
_MASK = [f"complexity_trap_mask:m={m}" for m in (20, 14, 10, 8, 6, 5, 4, 3, 2, 1)]
_CLEAR = [
    f"anthropic_clear_tool_uses:trigger=0,keep={k}" for k in (20, 14, 10, 8, 6, 5, 4, 3, 2, 1)
]
FAMILIES: dict[str, list[str]] = {
    "mask_last_m": _MASK,
    "clear_tool_uses": _CLEAR,
    "opencode": [
        f"opencode_compact:tail_least=1,tail_most={t},summary_tokens={s}"
        for t, s in ((4000, 600), (2500, 500), (1500, 400), (800, 300), (400, 200), (100, 100))
    ],
    "codex": [
        f"codex_local:user_tokens={u},summary_tokens={s}"
        for u, s in ((20000, 1500), (4000, 800), (2000, 400), (1000, 200))
    ],
    "claude_code": [
        f"claude_code:hot_tail={h},summary_tokens={s}"
        for h, s in ((3, 1500), (3, 800), (2, 400), (1, 200))
    ],
    "summary": [
        f"complexity_trap_summary:n={n},m={m},summary_tokens={s}"
        for n, m, s in (
            (2, 8, 400),
            (4, 6, 400),
            (4, 4, 400),
            (6, 3, 300),
            (2, 2, 300),
            (1, 1, 200),
        )
    ],
}
FORCED = ("opencode", "codex", "claude_code")  # they compact when asked to, as `/compact` does
SLOTS = ("message_recent", "message_random", "message_sum", "message_density", "oracle")


@dataclass(frozen=True)
class Choice:
    """An edited history.

    Attributes:
        history: the edited one.
        setting: the policy as it ran.
        fits: whether it keeps to the budget.
    """

    history: History
    setting: str
    fits: bool = True


@dataclass(frozen=True)
class Measured:
    """A history with its exact sizes.

    Attributes:
        history: with all its messages.
        sizes: int64 `[messages]`, rendered tokens of each.
        roots: messages that always stay.
    """

    history: History
    sizes: np.ndarray
    roots: frozenset[int]

    @property
    def total(self) -> int:
        """Rendered tokens."""
        return int(self.sizes.sum())

    @property
    def floor(self) -> int:
        """Rendered tokens of the roots."""
        return int(sum(self.sizes[i] for i in self.roots))

    def budget(self, share: float) -> int:
        """Return the roots and this share of the rest, in tokens."""
        return self.floor + int(share * (self.total - self.floor))


def measured(history: History, rendered: Rendered) -> Measured:
    """Return a history with the sizes that its rendering gave."""
    sizes = np.array([s.size for s in rendered.spans], dtype=np.int64)
    return Measured(history, sizes, roots(history))


def roots(history: History) -> frozenset[int]:
    """Return what always stays: system, first and last user message, the last group."""
    return frozenset(anchors(history, first_user=True, last_group=True))


def all_choices(
    what: Measured,
    budget: int,
    scores: Mapping[str, np.ndarray],
    seed: int,
    tokenizer: object,
    render: Render,
) -> Iterator[tuple[str, Choice]]:
    """Choose by every message-level policy at one budget.

    Args:
        what: the history.
        budget: rendered tokens.
        scores: `[messages]` by policy name, for those that are ranked by importance.
        seed: of random draws.
        tokenizer: counts what systems write themselves.
        render: renders an edited history.
    """
    for name in SLOTS:
        yield name, by_slots(name, what, budget, scores.get(name), seed)
    for name in FAMILIES:
        yield name, by_system(name, what, budget, tokenizer, render)
    yield "roots_only", roots_only(what)


def states(before: History, after: History) -> list[str]:
    """Return what became of every message: kept, masked, summarised or hidden."""
    found = ["hidden"] * len(before)
    inserted = any(m.index < 0 for m in after.messages)
    for message in after.messages:
        if 0 <= message.index < len(before):
            same = message.blocks == before.messages[message.index].blocks
            found[message.index] = "kept" if same else "masked"
    return ["summarised" if s == "hidden" and inserted else s for s in found]


def by_slots(
    name: str, what: Measured, budget: int, scores: np.ndarray | None = None, seed: int = 0
) -> Choice:
    """Choose whole groups by a policy of the shared vocabulary.

    Args:
        name: of `SLOTS`.
        what: the history.
        budget: tokens.
        scores: `[messages]`, importance, for those that need it; a group's is the sum, or for
            "message_density" the sum over its tokens.
        seed: of the random draw.
    """
    policy: Policy
    if name == "message_recent":
        policy = Window(budget)
    elif name == "message_random":
        policy = Random(budget, seed=seed)
    else:
        policy = H2O(heavy=budget, recent=0)
    protected = np.isin(np.arange(len(what.history)), sorted(what.roots))
    if scores is not None and name == "message_density":
        scores = per_group_density(what, scores)
    slots = what.history.slots(what.sizes, protected, scores)
    kept = policy.keep(slots)
    return Choice(drop_messages(what.history, np.flatnonzero(~kept)), str(policy))


def per_group_density(what: Measured, scores: np.ndarray) -> np.ndarray:
    """Return scores whose sum over a group is the group's sum over its tokens."""
    group = what.history.group_index
    total = np.bincount(group, scores)
    size = np.bincount(group, what.sizes)
    first = np.r_[True, group[1:] != group[:-1]]
    return np.where(first, (total / np.maximum(size, 1))[group], 0.0)


def drop_messages(history: History, gone: Sequence[int] | np.ndarray) -> History:
    """Drop whole groups: those whose messages are all among `gone`."""
    lost = {int(i) for i in gone}
    groups = [g for g, x in enumerate(history.groups) if lost >= set(range(x.start, x.stop))]
    return drop_groups(history, groups) if groups else history


def roots_only(what: Measured) -> Choice:
    """Drop everything but the roots."""
    gone = [i for i in range(len(what.history)) if i not in what.roots]
    return Choice(drop_messages(what.history, gone), "roots_only")


def by_system(name: str, what: Measured, budget: int, tokenizer: object, render: Render) -> Choice:
    """Run a system's policy, its settings tightened until the rendered request fits.

    Where no setting fits, the one that comes nearest is returned: masking cannot reach every
    budget, and the row says what it kept.
    """
    best: tuple[int, Choice] | None = None
    for setting, history in _attempts(name, what, tokenizer):
        size = len(render(history).ids)
        if size <= budget:
            return Choice(history, setting)
        if best is None or size < best[0]:
            best = (size, Choice(history, setting, fits=False))
    if best is None:
        return Choice(what.history, f"{name}: refused", fits=False)
    return best[1]


def _attempts(name: str, what: Measured, tokenizer: object) -> Iterator[tuple[str, History]]:
    counter = SpanCounter(tokenizer)
    counter.learn(what.history.messages, what.sizes)
    for setting in FAMILIES[name]:
        window = 50_000 if name in FORCED else 4 * what.total
        manager = HistoryManager(setting, what.history.format, window, 1_000, counter, "extractive")
        if name in FORCED:
            manager.compact()
        try:
            yield setting, manager.prepare(what.history).messages
        except KvevictError:
            continue
