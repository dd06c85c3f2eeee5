"""SnapKV: keep what the end of the prompt attends to, pooled over neighbours."""

from dataclasses import dataclass
from typing import Any

from array_api_compat import array_namespace

from kvevict.errors import PolicyError
from kvevict.policy import Policy, Scope, check_scope, check_tokens
from kvevict.slots import Array, Slots


@dataclass(frozen=True)
class SnapKV(Policy, name="snapkv"):
    """Keep the recent tokens and those that the last queries of the prompt attend to.

    Source: Li et al. 2024 (arXiv:2404.14469), section 4: the queries of an observation window vote,
    and votes are max-pooled over neighbouring positions. Differs: per KV head (summed over its
    query group); the cache stays within its budget while decoding too, where the authors' grows.

    Args:
        heavy: tokens kept for their votes.
        recent: most recent tokens kept; the authors keep the observation window.
        window: queries at the end of a forward that vote.
        kernel: positions pooled, an odd number; 1 pools nothing.
        repeat: whether decoding votes too: with `evict_every=n` its last n queries at each
            eviction. Otherwise the prompt's votes stand, and new tokens have none.
        scope: "head", or "layer" for one set for all heads of a layer (departure).
    """

    heavy: int = 992
    recent: int = 32
    window: int = 32
    kernel: int = 5
    repeat: bool = False
    scope: Scope = "head"

    scores = "window"

    def __post_init__(self) -> None:
        check_tokens(self, "heavy", minimum=1)
        check_tokens(self, "recent", minimum=1)
        check_tokens(self, "window", minimum=1)
        check_tokens(self, "kernel", minimum=1)
        check_scope(self)
        if self.kernel % 2 == 0:
            raise PolicyError(f"SnapKV.kernel={self.kernel}: give an odd number")
        if not isinstance(self.repeat, bool):
            raise PolicyError(f"SnapKV.repeat={self.repeat!r}: give True or False")

    @property
    def extents(self) -> tuple[int, int, int]:
        """No head, the recent, those voted for."""
        return 0, self.recent, self.heavy

    @property
    def score_window(self) -> int:  # type: ignore[override]
        """Queries at the end of a forward that vote."""
        return self.window

    @property
    def votes_repeat(self) -> bool:
        """Whether decoding votes too."""
        return self.repeat

    def importance(self, slots: Slots) -> Array:
        """Return votes, max-pooled over neighbours in time."""
        if self.kernel == 1:
            return slots.score
        xp = array_namespace(slots.position)
        order = xp.argsort(slots.position, axis=-1, stable=True)
        live = xp.take_along_axis(slots.position, order, axis=-1) >= 0
        ordered = xp.take_along_axis(xp.broadcast_to(slots.score, order.shape), order, axis=-1)
        ordered = xp.where(live, ordered, xp.zeros_like(ordered))
        pooled, n = ordered, ordered.shape[-1]
        for step in range(1, min(self.kernel // 2, n - 1) + 1):
            edge = xp.zeros_like(ordered[..., :step])
            later = xp.concat([ordered[..., step:], edge], axis=-1)
            earlier = xp.concat([edge, ordered[..., : n - step]], axis=-1)
            pooled = xp.maximum(pooled, xp.maximum(later, earlier))
        return xp.take_along_axis(pooled, xp.argsort(order, axis=-1), axis=-1)

    def departures(self) -> dict[str, Any]:
        """Return votes while decoding and the layer's one set where they are in use."""
        used = {"repeat": self.repeat, "scope": self.scope}
        plain = {"repeat": False, "scope": "head"}
        return {k: v for k, v in used.items() if v != plain[k]}
