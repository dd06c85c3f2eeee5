"""Cache layers over fixed slot buffers: a ring where order decides, ranks where scores decide.

A new token evicts by overwriting a slot, so nothing is concatenated, sorted or gathered per
token. Eviction comes after attention: `update` returns what this forward attends to, `commit`
(called by the attention function once the scores are known) decides what stays.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvevict.errors import CacheError, NotPatchedError
from kvevict.plan import Plan
from kvevict.policy import Policy
from kvevict.slots import Slots

_GROWTH = 256  # slots added at a time to a cache without budget


class EvictionLayer(CacheLayerMixin):
    """One layer's keys and values under a budget, stored per KV head.

    Attributes:
        keys: `[B, H, C, D]` buffer, C = capacity + evict_every slots.
        values: likewise.
        length: slots in use; every slot from `length` on is empty in every row.
        seen: columns seen, pads included.
        rope: rotation of this layer's keys, where positions inside the cache need one.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, policy: Policy, evict_every: int) -> None:
        super().__init__()
        self.policy = policy
        self.evict_every = evict_every
        self.rope: Any = None
        self.plan: Plan | None = None
        self._start_over()

    def _start_over(self) -> None:
        self.keys = None
        self.values = None
        self.is_initialized = False
        self.length = 0
        self.seen = 0
        self._chunk: tuple[Tensor, Tensor] | None = None

    # -- transformers' contract -------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the slot buffers for these states' batch, heads, dtype and device."""
        B, H, _, D = key_states.shape
        slots = self._slots(key_states.shape[2])
        with torch.inference_mode(False):  # inference tensors refuse later in-place writes
            self.keys = key_states.new_zeros(B, H, slots, D)
            self.values = value_states.new_zeros(B, H, slots, value_states.shape[-1])
            self._allocate_state(B, H, slots, key_states.device)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Take in the new states and return all that this forward attends to.

        Args:
            key_states: `[B, H, Q, D]`.
            value_states: `[B, H, Q, D]`.

        Returns:
            Keys and values `[B, H, T, D]`: the buffers' live part for one token, stored and new
            ones together for more.

        Raises:
            NotPatchedError: the forward was not announced, so attention would be wrong.
            CacheError: another batch size than that of the stored rows.
        """
        plan = self.plan
        if plan is None or plan.length != key_states.shape[2]:
            raise NotPatchedError(
                "the model does not announce its forward to the eviction cache: call "
                "kvevict.patch(model) first, and pass the cache to the model itself"
            )
        key_states, value_states = key_states.detach(), value_states.detach()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif key_states.shape[0] != self.keys.shape[0]:
            raise CacheError(
                f"the cache holds {self.keys.shape[0]} rows and got {key_states.shape[0]}; use a "
                "fresh cache or reset() it"
            )
        self.seen = plan.seen + plan.length
        if plan.length == 1:
            return self._step(key_states, value_states, plan)
        return self._extend(key_states, value_states, plan)

    def get_seq_length(self) -> int:
        """Return the tokens seen, pads included; what is stored is another number."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a forward would see, and the offset that aligns them causally."""
        return self.length + query_length, self.seen - self.length

    def get_max_length(self) -> int:
        """Return -1: any number of tokens can be fed."""
        return -1

    def reset(self) -> None:
        """Forget everything, buffers included."""
        self._start_over()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder rows for beam search: keys, values, positions and scores alike."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        self._map_rows(lambda t: t.index_select(0, indices.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._map_rows(lambda t: t.repeat_interleave(repeats, 0))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: evicted tokens cannot come back.

        Raises:
            CacheError: always, but for a crop of nothing.
        """
        if tokens_to_remove:
            raise CacheError("an eviction cache cannot be cropped: what was evicted is gone")

    def offload(self) -> None:
        """Refuse: transformers would move keys before attention ran."""
        raise CacheError(
            "an eviction cache cannot be offloaded; it is small, keep it on the device"
        )

    prefetch = offload

    @property
    def batch_size(self) -> int:
        """Rows held, -1 before the first forward."""
        return int(self.keys.shape[0]) if self.is_initialized else -1

    # -- what the attention function uses ---------------------------------------------------------

    @property
    def held(self) -> int:
        """Stored slots at the front of what `update` returned for a chunk."""
        return self._held

    def commit(self, column_sums: Tensor | None = None) -> None:
        """Evict, now that this forward's scores are known.

        Args:
            column_sums: float32 `[B, H, T]`, attention received by each key that `update`
                returned, for a policy that needs scores.
        """
        raise NotImplementedError

    def positions(self, seen: Tensor) -> Tensor:
        """Return the stored indices by slot, int64 `[B or 1, H or 1, length]`, -1 empty.

        Args:
            seen: real tokens that each row has seen, int64 `[B or 1, 1]`.
        """
        raise NotImplementedError

    def nbytes(self) -> int:
        """Return the bytes of the key and value buffers."""
        return int(self.keys.nbytes + self.values.nbytes) if self.is_initialized else 0

    # -- for the two kinds ------------------------------------------------------------------------

    _held = 0

    def _slots(self, wanted: int) -> int:
        capacity = self.policy.capacity
        if capacity is None:
            return math.ceil(max(wanted, 1) / _GROWTH) * _GROWTH
        return capacity + self.evict_every

    def _allocate_state(self, B: int, H: int, slots: int, device: torch.device) -> None:
        """Allocate what the kind keeps beside keys and values."""

    def _step(self, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _extend(self, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        self._held = self.length
        if self.length:
            k = torch.cat([self.keys[:, :, : self.length], k], 2)
            v = torch.cat([self.values[:, :, : self.length], v], 2)
        self._chunk = (k, v)
        return self._chunk

    def _state_names(self) -> tuple[str, ...]:
        return ("keys", "values")

    def _map_rows(self, change: Any) -> None:
        if not self.is_initialized:
            return
        for name in self._state_names():
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, change(value))


class RingLayer(EvictionLayer):
    """Head and window in closed form: token p lies in slot p, or S + (p - S) mod (W + 1).

    The extra slot lets a token attend to W others before the oldest is overwritten. Keys keep the
    rotation that they arrived with. With positions inside the cache, only the head's distance
    to the query is off, so for one token the head's few keys are turned (from an untouched copy,
    in one rounding); for more, the attention function turns the queries instead.
    """

    def _start_over(self) -> None:
        super()._start_over()
        self.sink_keys: Tensor | None = None  # the head as it arrived, once it had to be turned

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

    def _step_padded(self, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        self._restore_head()
        _, row_seen = plan.on(self.device)
        slot = plan.shared(("slot", self.device), lambda: self.slot(row_seen[:, 0]))
        if self.window is None:
            self._grow(min(self.seen, self.keys.shape[2] + _GROWTH))
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
        if self.rope is None or not self.head or self.rope.style == "none":
            return
        shift = head_shift(plan.start, plan.base, self.head, self.window)
        if shift == 0 and self.sink_keys is None:
            return
        if self.sink_keys is None:
            self.sink_keys = self.keys[:, :, : self.head].clone()
        turn = plan.shared(
            ("head", self.rope.key, self.device), lambda: self.rope.turn(shift, self.device)
        )
        self.keys[:, :, : self.head] = self.rope.rotate(self.sink_keys, turn)

    def _restore_head(self) -> None:
        if self.sink_keys is not None:
            self.keys[:, :, : self.head] = self.sink_keys
            self.sink_keys = None

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

    def _state_names(self) -> tuple[str, ...]:
        return ("keys", "values", "sink_keys")


class RankedLayer(EvictionLayer):
    """The recent and the highest-ranked: a position and a score for every slot of every head.

    Slots lie in any order. At a full cache one slot is free (the last victim's); the next token
    overwrites it. With `evict_every` above 1 that many are freed at once.
    """

    def _start_over(self) -> None:
        super()._start_over()
        self.position: Tensor | None = None  # int64 [B, H, C]
        self.score: Tensor | None = None  # float32 [B, H, C]
        self.free: Tensor | None = None  # int64 [B, H], the slot to write next; None: `length`
        self._rows: Tensor | None = None

    def _allocate_state(self, B: int, H: int, slots: int, device: torch.device) -> None:
        self.position = torch.full((B, H, slots), -1, dtype=torch.int64, device=device)
        self.score = torch.zeros(B, H, slots, dtype=torch.float32, device=device)

    def positions(self, seen: Tensor) -> Tensor:
        """Return the stored indices by slot, `[B, H, length]`, -1 for the free slot."""
        assert self.position is not None
        position = self.position[:, :, : self.length]
        if self.free is not None:
            position = position.scatter(2, self.free[..., None], -1)
        return position

    def _step(self, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        assert self.position is not None
        assert self.score is not None
        position, _ = plan.on(self.device)
        if self.free is None and not plan.padded:
            slot = self.length
            self.keys[:, :, slot] = k[:, :, 0]
            self.values[:, :, slot] = v[:, :, 0]
            self.position[:, :, slot] = plan.start
            self.score[:, :, slot] = 0.0
            self.length += 1
        else:
            if self.free is None:
                self._free_slots(plan, before=True)
            assert self.free is not None
            B, H, C, D = self.keys.shape
            if self._rows is None or len(self._rows) != B * H:
                self._rows = torch.arange(B * H, device=self.device) * C
            row = self._rows + self.free.view(-1)
            self.keys.view(-1, D).index_copy_(0, row, k.reshape(-1, D))
            self.values.view(B * H * C, -1).index_copy_(0, row, v.reshape(B * H, -1))
            if plan.padded:
                now = position[:, :, None].expand(-1, H, -1).reshape(-1)
                self.position.view(-1).index_copy_(0, row, now)
            else:
                self.position.view(-1).index_fill_(0, row, plan.start)
            self.score.view(-1).index_fill_(0, row, 0.0)
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def _extend(self, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        self._close_hole(plan)
        return super()._extend(k, v, plan)

    def _close_hole(self, plan: Plan) -> None:
        """Move the last slot into the free one, so that all slots in use are live."""
        if self.free is None:
            return
        assert self.position is not None
        assert self.score is not None
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
        assert self.position is not None
        position, _ = plan.on(self.device)
        B, H = self.position.shape[:2]
        new = position[:, None, :].expand(B, H, -1)
        return torch.cat([self.position[:, :, : self._held], new], 2) if self._held else new

    def commit(self, column_sums: Tensor | None = None) -> None:
        """Add this forward's scores, then evict down to the budget."""
        plan = self.plan
        assert plan is not None
        assert self.score is not None
        if self._chunk is not None:
            self._commit_chunk(plan, column_sums)
            return
        if column_sums is not None:
            self._add(self.score[:, :, : self.length], column_sums, plan)
        self._free_slots(plan)

    def _add(self, score: Tensor, column_sums: Tensor, plan: Plan) -> None:
        if self.policy.scores == "last":
            score.copy_(column_sums)
            return
        decay = self.policy.decay_factor
        if decay != 1.0:
            score.mul_(decay**plan.length)
        score.add_(column_sums)

    def _free_slots(self, plan: Plan, before: bool = False) -> None:
        """Find the slot that the next token takes; with `evict_every` above 1, free that many."""
        assert self.position is not None
        assert self.score is not None
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
        assert self.position is not None
        assert self.score is not None
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
        assert self.position is not None
        assert self.score is not None
        end = torch.iinfo(position.dtype).max
        order = torch.where(keep, position, end).argsort(dim=-1, stable=True)
        order = order[:, :, : self.keys.shape[2]]
        n = order.shape[2]
        kept = keep.gather(2, order)
        moved = position.gather(2, order)
        self.score[:, :, :n] = torch.where(kept, score.gather(2, order), 0.0)
        self.position.fill_(-1)
        self.position[:, :, :n] = torch.where(kept, moved, -1)
        for buffer, source in ((self.keys, k), (self.values, v)):
            index = order[..., None].expand(*order.shape, source.shape[3])
            buffer[:, :, :n] = source.gather(2, index)

    def _state_names(self) -> tuple[str, ...]:
        return ("keys", "values", "position", "score", "free")


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
