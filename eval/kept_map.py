"""kept_map: which positions a cache holds, layer by position over time, small enough for a page."""

from __future__ import annotations

from typing import Any

import torch

from kvevict.cache import EvictionCache
from kvevict.layers import EvictionLayer
from kvevict.models.stream import Step

_TIMES, _BINS = 6, 64


class Snapshots:
    """Takes a picture of a cache a few times along a stream.

    Args:
        cache: to look at.
        total: tokens that will be fed.

    Attributes:
        found: the pictures so far.
    """

    def __init__(self, cache: EvictionCache, total: int) -> None:
        self._cache = cache
        self._total = total
        self._due = [max(1, total * (i + 1) // _TIMES) for i in range(_TIMES)]
        self.found: list[dict[str, Any]] = []

    def resume(self, found: list[dict[str, Any]]) -> None:
        """Go on with the pictures of an earlier run of the same stream."""
        self.found = list(found)
        taken = max((f["seen"] for f in found), default=0)
        self._due = [d for d in self._due if d > taken]

    def after(self, step: Step) -> None:
        """Look at the cache after a chunk, where a picture is due."""
        seen = step.start + len(step.nll)
        if not self._due or seen < self._due[0]:
            return
        self._due = [d for d in self._due if d > seen]
        self.found.append({"seen": seen, "layers": self._look()})

    def map(self) -> dict[str, Any]:
        """Return the pictures: share of KV heads and positions kept, by layer and position bin."""
        return {"positions": self._total, "layers": self._layers(), "times": self.found}

    def _layers(self) -> list[int]:
        return [i for i, x in enumerate(self._cache.layers) if isinstance(x, EvictionLayer)]

    def _look(self) -> list[list[float]]:
        width = self._total / _BINS
        edges = torch.tensor([round(i * width) for i in range(_BINS + 1)])
        sizes = edges.diff().clamp(min=1)
        rows = []
        for layer in self._layers():
            kept = self._cache.kept_positions(layer)[0].cpu()  # [H, S]
            flat = kept[kept >= 0]
            at = torch.bucketize(flat, edges[1:], right=True).clamp(max=_BINS - 1)
            share = torch.bincount(at, minlength=_BINS) / (sizes * kept.shape[0])
            rows.append([round(float(x), 2) for x in share])
        return rows
