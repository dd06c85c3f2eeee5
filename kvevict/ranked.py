"""RankedLayer: the recent and the highest-ranked, where scores decide what stays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvevict.layers import EvictionLayer
from kvevict.plan import Plan
from kvevict.shared import take_in
from kvevict.slots import Slots


class RankedLayer(EvictionLayer):
    """The recent and the highest-ranked: a position and a score for every slot of every head.

    Slots lie in any order. At a full cache one slot is free (the last victim's); the next token
    overwrites it. With `evict_every` above 1 that many are freed at once.
    """

    def _start_over(self) -> None:
        super()._start_over()
        self.position: Any = None  # int64 [B, H, C]
        self.score: Any = None  # float32 [B, H, C]
        self.free: Any = None  # int64 [B, H], the slot to write next; None: `length`
        self.row: Any = None  # int64 [B*H], the free slots' rows in the flat buffers

    def _allocate_state(self, B: int, H: int, slots: int, device: torch.device) -> None:
        self.position = torch.full((B, H, slots), -1, dtype=torch.int64, device=device)
        self.score = torch.zeros(B, H, slots, dtype=torch.float32, device=device)

    def positions(self, seen: Tensor) -> Tensor:
        """Return the stored indices by slot, `[B, H, length]`, -1 for the free slot."""
        position: Tensor = self.position[:, :, : self.length]
        if self.free is not None:
            position = position.scatter(2, self.free[..., None], -1)
        return position

    def _step(self, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        if plan.ledgers:
            plan.shared("taken in", lambda: take_in(plan.ledgers, plan.start))
            self._write(k, v)
        elif self.free is None and not plan.padded:
            slot = self.length
            self.keys[:, :, slot] = k[:, :, 0]
            self.values[:, :, slot] = v[:, :, 0]
            self.position[:, :, slot] = plan.start
            self.score[:, :, slot] = 0.0
            self.length += 1
        else:
            if self.free is None:
                self._free_slots(plan, before=True)
            B, H, C, _ = self.keys.shape
            self.row = torch.arange(B * H, device=self.device) * C + self.free.view(-1)
            self._write(k, v)
            now = plan.on(self.device)[0][:, :, None].expand(B, H, 1)
            self.position.scatter_(2, self.free[..., None], now)
            self.score.scatter_(2, self.free[..., None], 0.0)
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def _static_step(self, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        self._write(k, v)
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def _write(self, k: Tensor, v: Tensor) -> None:
        """Overwrite every head's free slot with its new key and value."""
        for buffer, new in ((self.keys, k), (self.values, v)):
            D = buffer.shape[3]
            buffer.view(-1, D).index_copy_(0, self.row, new.reshape(-1, D))

    def _extend(self, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        if plan.draft:  # taken apart by kvevict.drafts
            return k, v
        self._close_hole(plan)
        return super()._extend(k, v, plan)

    def _close_hole(self, plan: Plan) -> None:
        """Move the last slot into the free one, so that all slots in use are live."""
        if self.free is None:
            return
        if plan.padded:  # holes differ by row: they are masked instead
            self.position.scatter_(2, self.free[..., None], -1)
        else:
            last = self.length - 1
            hole = self.free[..., None]
            for state in (self.position, self.score):
                state.scatter_(2, hole, state[:, :, last:][:, :, :1].clone())
            self.position[:, :, last] = -1
            for state in (self.keys, self.values):
                moved = state[:, :, last : last + 1].clone()
                state.scatter_(2, hole[..., None].expand_as(moved), moved)
            self.length = last
        self.free = None

    def chunk_positions(self) -> Tensor:
        """Return the indices of what a chunk's `update` returned, int64 `[B, H, T]`."""
        plan = self.plan
        assert plan is not None
        position, _ = plan.on(self.device)
        B, H = self.position.shape[:2]
        new = position[:, None, :].expand(B, H, -1)
        return torch.cat([self.position[:, :, : self._held], new], 2) if self._held else new

    def commit(self, column_sums: Tensor | None = None) -> None:
        """Add this forward's scores, then evict down to the budget."""
        plan = self.plan
        assert plan is not None
        if column_sums is not None:
            column_sums = column_sums.detach()  # else the scores drag every forward's graph along
        if self._chunk is not None:
            self._commit_chunk(plan, column_sums)
            return
        if column_sums is not None:
            self._add(self.score[:, :, : self.length], column_sums, plan)
        if not plan.ledgers:  # else one selection for all layers follows the last of them
            self._free_slots(plan)

    def _add(self, score: Tensor, column_sums: Tensor, plan: Plan) -> None:
        kind, one = self.policy.scores, plan.length == 1
        if kind == "window" and one and not self.policy.votes_repeat:
            return
        if self.policy.scope == "layer":
            column_sums = self._over_heads(column_sums)
        if kind == "last" or (kind == "window" and (not one or self.evict_every == 1)):
            score.copy_(column_sums)
            return
        decay = self.policy.decay_factor
        if decay != 1.0:
            score.mul_(decay**plan.length)
        score.add_(column_sums)

    def _over_heads(self, column_sums: Tensor) -> Tensor:
        """Give every head the sum over all heads of the layer: their choices are then the same.

        Heads hold the same tokens in the same slots all along, so slots can be added up.
        """
        total = column_sums.sum(1, keepdim=True)
        if self.over_ranks is not None:
            self.over_ranks(total)
        return total.expand_as(column_sums)

    def _free_slots(self, plan: Plan, before: bool = False) -> None:
        """Find the slot that the next token takes; with `evict_every` above 1, free that many."""
        C = self.keys.shape[2]
        if not plan.padded and self.length < C:
            return  # an empty slot is next anyway
        if plan.padded:
            self.length = C
        seen = (plan.row_seen if before else plan.after(self.device)).to(self.device)
        if self.evict_every == 1 or before:
            self.free = self._victim(seen, plan)
            return
        live = self.position >= 0
        keep = self.policy.keep(Slots(position=self.position, score=self.score))
        over = live.sum(-1, keepdim=True) >= C
        self._compact(
            torch.where(over, keep, live), self.keys, self.values, self.position, self.score
        )
        if self.policy.scores == "window" and self.policy.votes_repeat:
            self.score.masked_fill_(over, 0.0)  # the next window's queries vote anew
        if plan.padded:
            self.free = self._victim(seen, plan)
        else:
            self.length = int(self.policy.capacity or 0)
            self.free = None

    def _victim(self, seen: Tensor, plan: Plan) -> Tensor:
        count = seen[:, :, None] if plan.padded else plan.start + plan.length
        return self.policy.victim(self.score, self.position, count)  # type: ignore[no-any-return]

    def _commit_chunk(self, plan: Plan, column_sums: Tensor | None) -> None:
        assert self._chunk is not None
        k, v = self._chunk
        self._chunk = None
        position = self.chunk_positions()
        score = torch.zeros(position.shape, dtype=torch.float32, device=self.device)
        score[:, :, : self._held] = self.score[:, :, : self._held]
        if column_sums is not None:
            self._add(score, column_sums, plan)
        total, room = k.shape[2], self.keys.shape[2] - 1
        if not plan.padded and total <= room:  # all fit: the old ones are in place already
            new = slice(self._held, total)
            self.keys[:, :, new], self.values[:, :, new] = k[:, :, new], v[:, :, new]
            self.position[:, :, new] = position[:, :, new]
            self.score[:, :, :total] = score
            self.length = total
            return
        live = position >= 0
        keep = self.policy.keep(Slots(position=position, score=score))
        if plan.padded:  # a row evicts only when it is over its limit
            keep = torch.where(live.sum(-1, keepdim=True) > room, keep, live)
        self._compact(keep, k, v, position, score)
        if plan.padded:
            self.length = self.keys.shape[2]
            self.free = self._victim(plan.after(self.device), plan)
        else:
            self.length, self.free = int(self.policy.capacity or 0), None

    def _compact(self, keep: Tensor, k: Tensor, v: Tensor, position: Tensor, score: Tensor) -> None:
        """Write what is kept into the buffers in order of position, empties last."""
        end = torch.iinfo(position.dtype).max
        order = torch.where(keep, position, end).argsort(dim=-1, stable=True)
        order = order[:, :, : self.keys.shape[2]]
        n = order.shape[2]
        kept = keep.gather(2, order)
        moved = position.gather(2, order)
        self.score[:, :, :n] = torch.where(kept, score.gather(2, order), 0.0)
        self.position.fill_(-1)
        self.position[:, :, :n] = torch.where(kept, moved, -1)
        first = torch.arange(order[..., 0].numel(), device=order.device) * k.shape[2]
        rows = (order.flatten(0, 1) + first[:, None]).flatten()
        for buffer, source in ((self.keys, k), (self.values, v)):
            states = source.flatten(0, 2).index_select(0, rows)  # whole rows: faster than a gather
            buffer[:, :, :n] = states.view(*order.shape, -1)

    def _state_names(self) -> tuple[str, ...]:
        return ("keys", "values", "position", "score", "free")
