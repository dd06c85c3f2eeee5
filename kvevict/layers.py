"""EvictionLayer: one layer of a cache over fixed slot buffers; `ring` and `ranked` are its kinds.

A new token evicts by overwriting a slot, so nothing is concatenated, sorted or gathered per
token. Eviction comes after attention: `update` returns what this forward attends to, `commit`
(called by the attention function once the scores are known) decides what stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvevict.errors import CacheError, NotPatchedError
from kvevict.plan import Plan
from kvevict.policy import Policy

_GROWTH = 256  # slots added at a time to a cache without budget


class EvictionLayer(CacheLayerMixin):
    """One layer's keys and values under a budget, stored per KV head.

    Attributes:
        keys: `[B, H, C, D]` buffer, C = capacity + evict_every slots.
        values: likewise.
        length: slots in use; every slot from `length` on is empty in every row.
        seen: columns seen, pads included.
        rope: rotation of this layer's keys, where positions inside the cache need one.
        backend: "torch" or "triton", which the attention function runs.
        over_ranks: adds up, in place, what every rank of a model has whose heads are split; None
            where one process has all heads of the layer.
    """

    keys: Any  # Tensors from the first forward on, None before
    values: Any
    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, policy: Policy, evict_every: int) -> None:
        super().__init__()
        self.policy = policy
        self.evict_every = evict_every
        self.rope: Any = None
        self.backend = "torch"
        self.over_ranks: Callable[[Tensor], None] | None = None
        self.plan: Plan | None = None
        self._start_over()

    def _start_over(self) -> None:
        self.keys = None
        self.values = None
        self.is_initialized = False
        self.length = 0
        self.seen = 0
        self._chunk: tuple[Tensor, Tensor] | None = None
        # Keys, values and, of a ranked layer, scores that wait for `crop`; see kvevict.drafts.
        self.draft: tuple[Tensor, Tensor, list[Tensor] | None] | None = None

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
            *args: ignored, for transformers' contract.
            **kwargs: likewise.

        Returns:
            Keys and values `[B, H, T, D]`: the buffers' live part for one token, stored and new
            ones together for more.

        Raises:
            NotPatchedError: the forward was not announced, so attention would be wrong.
            CacheError: another batch size than that of the stored rows.
        """
        plan = self.plan
        if plan is not None and plan.static:
            return self._static_step(key_states, value_states, plan)
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
        if plan.one:
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
        """Refuse: evicted tokens cannot come back; the cache's `crop` settles a draft.

        Raises:
            CacheError: always, but for a crop of nothing.
        """
        if tokens_to_remove:
            raise CacheError("a layer cannot be cropped: what was evicted is gone")

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

    def _static_step(self, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """Write one token into a full cache through tensors alone, for compiled steps."""
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
        if self.draft is not None:
            raise CacheError("a draft is open: crop() says how much of it stays, before rows move")
        with torch.inference_mode(False):
            for name in self._state_names():
                value = getattr(self, name)
                if value is not None:
                    setattr(self, name, change(value))
