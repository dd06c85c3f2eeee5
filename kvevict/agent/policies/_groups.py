"""Token policies at message granularity: the very same `Policy.keep`, on message groups."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from kvevict.agent.history import History
from kvevict.agent.message_policy import Context, Limits, MessagePolicy, Stage, check_count
from kvevict.agent.verbs import drop
from kvevict.policy import Policy


@dataclass(frozen=True, kw_only=True)
class GroupPolicy(MessagePolicy):
    """Drop whole message groups by a policy of the shared vocabulary, sizes in tokens.

    Roots (system, first and last user message, the newest group, pins) stay and use up the budget
    first, as at the token level. Extents left at None are filled from the window: W - O without
    the separate system prompt and tools.

    Args:
        evict_every: tokens that may gather beyond the capacity before the next eviction, as in
            `EvictionCache` (prompt caches: larger is fewer prefix breaks).
    """

    evict_every: int = 0

    keeps_first = True
    keeps_last = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "evict_every")

    @abstractmethod
    def vocabulary(self, limits: Limits) -> Policy:
        """Return the policy that chooses, its extents in tokens."""

    def room(self, limits: Limits) -> int:
        """Return the tokens that messages may take: W - O less system prompt and tools."""
        return max(1, limits.usable - limits.overhead)

    def allowance(self, limits: Limits) -> int:
        """Return the capacity, what may gather beyond it, and the overhead."""
        capacity = self.vocabulary(limits).capacity
        if capacity is None:
            return limits.usable
        return capacity + self.evict_every + limits.overhead

    def stages(self) -> tuple[Stage, ...]:
        """One stage: drop what the policy does not keep."""
        return (Stage("evict", "drop", self._evict, self._over, self.min_gain),)

    def _sizes(self, view: History, context: Context) -> np.ndarray:
        return np.asarray(context.sizes(view), dtype=np.int64)

    def _over(self, view: History, context: Context) -> bool:
        if context.moment.force:
            return True
        capacity = self.vocabulary(context.limits).capacity
        if capacity is None or not len(view):
            return False
        total = int(self._sizes(view, context).sum())
        return total > capacity + self.evict_every and context.total(view) >= self.trigger_tokens(
            context.limits
        )

    def _evict(self, view: History, context: Context) -> History | None:
        if not len(view):
            return None
        protected = np.zeros(len(view), dtype=bool)
        protected[sorted(self.roots(view))] = True
        score = None
        if self.vocabulary(context.limits).needs_scores:
            score = np.asarray(self.importance(view, context), dtype=np.float64)
        slots = view.slots(self._sizes(view, context), protected, score)
        places = np.maximum.accumulate([max(m.index, 0) for m in view.messages])
        slots = replace(slots, position=places.astype(np.int64))  # places in the full history
        kept = self.vocabulary(context.limits).keep(slots)
        return drop(view, [i for i, stays in enumerate(kept) if not stays])

    def importance(self, view: History, context: Context) -> list[float]:
        """Return the importance of each message, larger stays longer.

        The caller's scores (attention mass) where there are some; else a prior by kind: what a
        user wrote above what the model said above what a tool returned, newer above older.
        """
        if context.services.scores is not None:
            return [float(s) for s in context.services.scores(view)]
        prior = {"user": 2.0, "assistant": 1.0}
        count = max(1, len(view))
        return [
            prior.get(m.role, 0.0) * (1.0 if m.typed or m.role == "assistant" else 0.0) + i / count
            for i, m in enumerate(view.messages)
        ]
