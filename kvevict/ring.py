"""RingLayer: head and window, where order alone decides what stays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvevict.layers import EvictionLayer
from kvevict.plan import Plan
from kvevict.shared import Heads


class RingLayer(EvictionLayer):
    """Head and window in closed form: token p lies in slot p, or S + (p - S) mod (W + 1).

    The extra slot lets a token attend to W others before the oldest is overwritten. Keys keep the
    rotation that they arrived with. With positions inside the cache, only the head's distance
    to the query is off, so for one token the head's few keys are turned (from an untouched copy,
    in one rounding); for more, the attention function turns the queries instead.
    """

    def _start_over(self) -> None:
        super()._start_over()
        self.heads: Heads | None = None  # set by the cache
        self.turned = False  # whether the head in the buffer is turned for the last query

    @property
    def head(self) -> int:
        """S, tokens that always stay."""
        extents = self.policy.extents
        return extents[0] if extents else 0

    @property
    def window(self) -> int | None:
        """W, most recent tokens that stay; None keeps everything."""
        return self.policy.band

    def slot(self, position: Any) -> Any:
        """Return the slot of a token by its index, for an int or an int64 tensor."""
        if self.window is None:
            return position
        ring = self.window + 1
        if isinstance(position, int):
            return position if position < self.head else self.head + (position - self.head) % ring
        turned = self.head + (position - self.head) % ring
        return torch.where(position < self.head, position, turned)

    def positions(self, seen: Tensor) -> Tensor:
        """Return the stored indices by slot, `[B or 1, 1, length]`."""
        return self.positions_of(seen.to(self.device), self.length)

    def positions_of(self, seen: Tensor, length: int, room: int = 0) -> Tensor:
        """Return which index each slot holds when `seen` `[B, 1]` tokens were.

        Args:
            seen: int64 `[B, 1]`.
            length: slots looked at.
            room: 1 counts the spare slot in, as one token's attention does before eviction.

        Returns:
            int64 `[B, 1, length]`, -1 where a slot is empty or holds an evicted token.
        """
        slot = torch.arange(length, device=seen.device).expand(seen.shape[0], -1)
        if self.window is None:
            position = slot
        else:
            ring = self.window + 1
            newest = (seen - 1 - self.head) % ring  # ring slot of the newest token
            back = (newest - (slot - self.head)) % ring
            position = torch.where(slot < self.head, slot, seen - 1 - back)
            gone = (position < seen - self.window - room) & (slot >= self.head)
            early = (slot >= self.head) & (position < self.head)
            position = torch.where(gone | early, -1, position)
        return torch.where(position < seen, position, -1).unsqueeze(1)

    def _step(self, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        if plan.padded:
            return self._step_padded(k, v, plan)
        slot = self.slot(plan.start)
        if slot >= self.keys.shape[2]:
            self._grow(slot + 1)
        self.keys[:, :, slot] = k[:, :, 0]
        self.values[:, :, slot] = v[:, :, 0]
        self.length = max(self.length, slot + 1)
        self._turn_head(plan)
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def _static_step(self, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, plan.slot, k)
        self.values.index_copy_(2, plan.slot, v)
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def _step_padded(self, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        self._restore_head()
        _, row_seen = plan.on(self.device)
        slot = plan.shared(("slot", self.device), lambda: self.slot(row_seen[:, 0]))
        if self.window is None:
            self._grow(self.seen)
        row = plan.shared(("row", self.device), lambda: torch.arange(len(slot), device=self.device))
        # A pad is written too, into the slot that its row's next token will take: never read.
        self.keys[row, :, slot] = k[:, :, 0]
        self.values[row, :, slot] = v[:, :, 0]
        full = self.keys.shape[2] if self.window is None else self.head + self.window + 1
        self.length = min(self.seen, full)
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def _extend(self, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        self._restore_head()
        return super()._extend(k, v, plan)

    def _turn_head(self, plan: Plan) -> None:
        """Turn the head's keys so that the one query sees them at their distance in the cache."""
        heads = self.heads
        if heads is None or self.rope is None or not self.head:
            return
        shift = head_shift(plan.start, plan.base, self.head, self.window)
        if shift or self.turned:
            plan.shared("heads", lambda: heads.turn(plan, shift))

    def _restore_head(self) -> None:
        if self.turned and self.heads is not None:
            self.heads.restore(self)
            self.turned = False

    def rebase(self, by: int) -> None:
        """Turn the stored window back by so many positions, once, from float64 angles."""
        if self.is_initialized and self.rope is not None and self.rope.style != "none":
            turn = self.rope.turn(-by, self.device)
            tail = self.keys[:, :, self.head : self.length]
            tail.copy_(self.rope.rotate(tail, turn))

    def commit(self, column_sums: Tensor | None = None) -> None:
        """Write a chunk's survivors; a single token is in place already."""
        plan, chunk = self.plan, self._chunk
        assert plan is not None
        if chunk is None:
            return
        self._chunk = None
        k, v = chunk
        if plan.draft:
            held_back = k.shape[2] - plan.draft
            self.draft = (k[:, :, held_back:].clone(), v[:, :, held_back:].clone(), None)
            plan = plan.part(0, plan.length - plan.draft)
            if not plan.length:
                return
        if plan.padded:
            self._write_padded(k, v, plan)
            return
        end = plan.start + plan.length
        if self.window is None:
            self._grow(end)
        spans = [(plan.start, end)]
        if self.window is not None:
            spans = [(plan.start, min(self.head, end))]
            spans += self._ring_spans(max(plan.start, self.head, end - self.window), end)
        for first, last in spans:
            if first < last:
                slot = self.slot(first)
                source = slice(self._held + first - plan.start, self._held + last - plan.start)
                self.keys[:, :, slot : slot + last - first] = k[:, :, source]
                self.values[:, :, slot : slot + last - first] = v[:, :, source]
                self.length = max(self.length, slot + last - first)

    def _ring_spans(self, first: int, end: int) -> list[tuple[int, int]]:
        """Split the tokens first..end-1 where the ring wraps."""
        assert self.window is not None
        ring = self.window + 1
        if first >= end:
            return []
        cut = min(end, first + ring - (first - self.head) % ring)
        return [(first, cut), (cut, end)]

    def _write_padded(self, k: Tensor, v: Tensor, plan: Plan) -> None:
        """Write each row's survivors at its own slots, through one gather for all rows."""
        if self.window is None:
            self._grow(self.seen)
        held = self._held

        def sources() -> tuple[Tensor, int]:
            position, row_seen = plan.on(self.device)
            after = plan.after(self.device)
            full = self.keys.shape[2] if self.window is None else self.head + self.window + 1
            length = min(self.seen, full)
            wanted = self.positions_of(after, length)[:, 0]  # [B, length]
            column = torch.full((len(position), self.seen + 1), 0, device=self.device)
            index = torch.where(position >= 0, position - row_seen, plan.length)
            column.scatter_(
                1, index, torch.arange(plan.length, device=self.device).expand_as(index)
            )
            new = wanted >= row_seen
            picked = column.gather(1, (wanted - row_seen).clamp(min=0))
            kept = (
                torch.arange(length, device=self.device)
                .expand_as(wanted)
                .clamp(max=max(held - 1, 0))
            )
            return torch.where(new, held + picked, kept)[:, None, :, None], length

        source, length = plan.shared(("sources", self.device), sources)
        shape = (*k.shape[:2], length, k.shape[3])
        self.keys[:, :, :length] = k.gather(2, source.expand(shape))
        shape = (*v.shape[:2], length, v.shape[3])
        self.values[:, :, :length] = v.gather(2, source.expand(shape))
        self.length = length

    def _grow(self, slots: int) -> None:
        if slots <= self.keys.shape[2]:
            return
        extra = self._slots(slots) - self.keys.shape[2]
        with torch.inference_mode(False):
            for name in ("keys", "values"):
                old = getattr(self, name)
                more = old.new_zeros(*old.shape[:2], extra, old.shape[3])
                setattr(self, name, torch.cat([old, more], 2))

    def _map_rows(self, change: Any) -> None:
        self._restore_head()
        super()._map_rows(change)


def head_shift(start: Any, base: int, head: int, window: int | None) -> Any:
    """Return by how much the head must be turned to lie at its distance inside the cache.

    Xiao et al. 2023, section 3.2: a query never stands farther than head + window from the first
    token. Evicting after attention, as their code does, makes that S + W, not S + W - 1.

    Args:
        start: the query's index, an int or an int64 tensor.
        base: what was subtracted from it to give the position fed.
        head: S.
        window: W; None keeps all.
    """
    fed = start - base
    if window is None:
        return fed - start
    if isinstance(start, int):
        return fed - min(start, head + window)
    return fed - start.clamp(max=head + window)
