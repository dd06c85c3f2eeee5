"""Slots: what a policy looks at, for KV positions and for message groups alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from array_api_compat import array_namespace, device

Array = Any  # numpy.ndarray or torch.Tensor: policies are written in the array API standard

_AXIS_FIELDS = ("size", "group", "recoverable", "lifetime")  # [N], shared by all rows


@dataclass(frozen=True)
class Slots:
    """N slots of a sequence as a struct of arrays, numpy or torch, any device.

    At the token level a slot is one stored KV position of size 1; at the message level it is one
    message (or block) whose size is its tokens. Slots need not be sorted: order is `position`.

    Args:
        position: `[..., N]` integers, original position (tokens) or index (messages); -1 is empty
            or padding and is never kept.
        size: `[N]` tokens per slot; None means 1 each.
        group: `[N]` integers; equal neighbours leave or stay together; None means each alone.
        protected: `[..., N]` bool, roots that always stay; None means none.
        score: `[..., N]` float, importance (accumulated attention, ...); None means 0.
        recoverable: `[N]` float in 0..1, how cheaply the content can be had again; None means 0.
        lifetime: `[N]` integers, 0 this turn, 1 the session, 2 for ever; None means 1.

    Raises:
        ValueError: an array whose last axis is not N long, or a group that is not contiguous.
    """

    position: Array
    size: Array | None = None
    group: Array | None = None
    protected: Array | None = None
    score: Array | None = None
    recoverable: Array | None = None
    lifetime: Array | None = None

    def __post_init__(self) -> None:
        n = self.position.shape[-1]
        for name in (*_AXIS_FIELDS, "protected", "score"):
            value = getattr(self, name)
            if value is not None and value.shape[-1] != n:
                raise ValueError(
                    f"Slots.{name} has {value.shape[-1]} entries for {n} positions; give one each"
                )

    @property
    def n(self) -> int:
        """Number of slots."""
        return int(self.position.shape[-1])

    def filled(self) -> Slots:
        """Return the same slots with every optional array present."""
        xp = array_namespace(self.position)
        where = device(self.position)
        shape = tuple(self.position.shape)

        def default(value: Array | None, shape: tuple[int, ...], fill: Any, dtype: Any) -> Array:
            return xp.full(shape, fill, dtype=dtype, device=where) if value is None else value

        return replace(
            self,
            size=default(self.size, shape[-1:], 1, xp.int64),
            protected=default(self.protected, shape, False, xp.bool),
            score=default(self.score, shape, 0.0, xp.float32),
            recoverable=default(self.recoverable, shape[-1:], 0.0, xp.float32),
            lifetime=default(self.lifetime, shape[-1:], 1, xp.int64),
        )

    def coarsened(self) -> tuple[Slots, Array]:
        """Return one slot per group, and the group index `[N]` of each slot.

        Sizes and scores add up (P2: a group's importance is the sum of its members'), a group is
        as new as its newest member, and protected when any member is.
        """
        xp = array_namespace(self.position)
        full = self.filled()
        assert full.size is not None
        assert full.protected is not None
        assert full.score is not None
        group = full.group
        assert group is not None, "coarsened() is for slots with groups"
        change = group[1:] != group[:-1]
        index = xp.concat(
            [xp.zeros((1,), dtype=xp.int64, device=device(group)), xp.astype(change, xp.int64)]
        )
        index = xp.cumulative_sum(index)
        count = int(index[-1]) + 1 if self.n else 0
        if count != int(xp.unique_values(group).shape[0]):
            raise ValueError("Slots.group is not contiguous: a group's members must be neighbours")
        arange = xp.arange(self.n, device=device(group))
        edge = xp.ones((1,), dtype=xp.bool, device=device(group))
        last = arange[xp.concat([change, edge])] if self.n else arange
        first = arange[xp.concat([edge, change])] if self.n else arange

        def total(values: Array) -> Array:
            sums = xp.cumulative_sum(values, axis=-1)
            ends = xp.take(sums, last, axis=-1)
            starts = xp.take(sums - values, first, axis=-1)
            return ends - starts

        live = self.position >= 0
        members = total(xp.astype(xp.broadcast_to(full.protected, live.shape) & live, xp.int64))
        position = xp.stack(
            [
                xp.max(self.position[..., int(a) : int(b) + 1], axis=-1)
                for a, b in zip(first, last, strict=True)
            ],
            axis=-1,
        )
        score = xp.where(live, full.score, xp.zeros_like(full.score))
        coarse = Slots(
            position=position,
            size=total(full.size),
            protected=members > 0,
            score=total(xp.astype(score, xp.float64)),
            recoverable=xp.take(full.recoverable, last, axis=-1),
            lifetime=xp.take(full.lifetime, last, axis=-1),
        )
        return coarse, index
