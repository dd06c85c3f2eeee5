"""EvictionCache: a transformers cache that holds generation to a fixed budget."""

from __future__ import annotations

import weakref
from typing import Any, Literal, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvevict.errors import CacheError, NotPatchedError, PolicyError, UnsupportedModelError
from kvevict.layers import EvictionLayer
from kvevict.plan import Plan
from kvevict.policy import Policy, parse
from kvevict.ranked import RankedLayer
from kvevict.ring import RingLayer
from kvevict.scores import check_scores
from kvevict.shared import Heads, Ledger, ledgers

__all__ = ["EvictionCache", "EvictionLayer", "RankedLayer", "RingLayer"]

Positions = Literal["auto", "in_cache", "original"]
Backend = Literal["auto", "torch", "triton"]
_REBASE_AT = 4096  # positions fed before the window is turned back: exact in float32 up to here


class EvictionCache(Cache):
    """Keys and values of a patched model, held to a policy's budget.

    Pass it as `cache=` (`past_key_values=` where the installed transformers still calls it so) to
    `generate()` or to the model, over as many calls as one likes: turn 2 of a chat continues it.

    Args:
        model: the model that it is for, patched by `kvevict.patch(model)`.
        policy: a policy or its string.
        positions: "in_cache" (what StreamingLLM needs beyond the trained length), "original", or
            "auto": in_cache for policies of head and window, original for ranked ones.
        backend: "auto", "torch" or "triton".
        evict_every: tokens by which a ranked policy may exceed its budget before it evicts.

    Attributes:
        seen: tokens seen, pads included.
        policy: the policy in force; shares are tokens once the prompt's length is known.

    Raises:
        PolicyError: a bad policy string or setting.
        UnsupportedModelError: the model lacks what the positions need (checked when the model is
            patched already, else at the first forward).
    """

    def __init__(
        self,
        model: Any,
        policy: Policy | str,
        *,
        positions: Positions = "auto",
        backend: Backend = "auto",
        evict_every: int = 1,
    ) -> None:
        if positions not in ("auto", "in_cache", "original"):
            raise PolicyError(f"positions={positions!r}: give auto, in_cache or original")
        if backend not in ("auto", "torch", "triton"):
            raise PolicyError(f"backend={backend!r}: give auto, torch or triton")
        if isinstance(evict_every, bool) or not isinstance(evict_every, int) or evict_every < 1:
            raise PolicyError(f"evict_every={evict_every!r}: give a whole number of at least 1")
        self._model = weakref.ref(model)
        self._config = model.config.get_text_config(decoder=True)
        self._given = parse(policy)
        self._asked = (positions, backend)
        self.evict_every = evict_every
        super().__init__(layers=[])
        self._start_over()

    def _start_over(self) -> None:
        self.policy = self._given
        self.positions: str = self._asked[0]
        self.backend: str = self._asked[1]
        self._seen = 0
        self._row_seen: Tensor | int = 0  # an int until a row has a pad
        self._base = 0
        self._offset = 0
        self._offsets: list[tuple[int, int]] = [(0, 0)]  # (first index, what is added from there)
        self._broken = False
        self._open = False
        self.static = False  # whether a compiled step is running
        self._ready = False
        self._heads: Heads | None = None
        self._ledgers: list[Ledger] = []
        self.layers = []
        if not self._given.has_shares:
            self._make_layers()
            handle = getattr(self._model(), "_kvevict", None)
            if handle is not None:
                self._settle(handle)

    # -- public -----------------------------------------------------------------------------------

    @property
    def seen(self) -> int:
        """Tokens seen, pads included."""
        return self._seen

    @property
    def capacity(self) -> int | None:
        """Most tokens kept per layer, row and KV head, None for a policy that keeps everything."""
        return self.policy.capacity

    def poison(self) -> None:
        """Refuse all further use until `reset()`: a forward failed half-way."""
        self._broken = True

    @property
    def rows(self) -> int:
        """Rows held, -1 before the first forward."""
        return next((x.batch_size for x in self.layers if isinstance(x, EvictionLayer)), -1)

    def nbytes(self) -> int:
        """Return the bytes of all key and value buffers that exist now, layers of others too."""
        total = 0
        for layer in self.layers:
            for name in ("keys", "values"):
                state = getattr(layer, name, None)
                total += state.nbytes if isinstance(state, Tensor) else 0
        return total

    def kept_positions(self, layer_idx: int) -> Tensor:
        """Return which tokens a layer holds.

        Args:
            layer_idx: of an evicting layer.

        Returns:
            int64 `[B, H, S]`: per-row positions without pads, ascending, -1 (empty) last.

        Raises:
            CacheError: a layer that does not exist, is not an evicting one, or has seen nothing.
        """
        return self._kept(layer_idx)[0]

    def scores(self, layer_idx: int) -> Tensor:
        """Return the scores of what a layer holds.

        Returns:
            float32 `[B, H, S]`, aligned with `kept_positions`; 0 where empty.

        Raises:
            CacheError: as `kept_positions`, or the policy keeps no scores.
        """
        if not self.policy.needs_scores or not self._ranked:
            raise CacheError(f"policy {self.policy} keeps no scores; h2o with a heavy part does")
        position, order, layer = self._kept(layer_idx)
        assert isinstance(layer, RankedLayer)
        score = layer.score[:, :, : layer.length].gather(2, order)
        return torch.where(position >= 0, score, 0.0)

    def _kept(self, layer_idx: int) -> tuple[Tensor, Tensor, EvictionLayer]:
        layer = self._evicting(layer_idx)
        self._check_usable()
        if not layer.is_initialized:
            raise CacheError("the cache has seen nothing yet")
        B, H = layer.keys.shape[:2]
        position = layer.positions(self._rows_seen(layer.device)).expand(B, H, -1)
        end = torch.iinfo(torch.int64).max
        ascending, order = torch.where(position < 0, end, position).sort(dim=-1, stable=True)
        stored = int((position >= 0).sum(-1).max()) if position.numel() else 0
        kept = torch.where(ascending == end, -1, ascending)[:, :, :stored]
        return self._with_offsets(kept), order[:, :, :stored], layer

    def _evicting(self, layer_idx: int) -> EvictionLayer:
        if not 0 <= layer_idx < len(self.layers):
            raise CacheError(f"layer {layer_idx}: the cache has {len(self.layers)} layers")
        layer = self.layers[layer_idx]
        if not isinstance(layer, EvictionLayer):
            raise CacheError(
                f"layer {layer_idx} is a {type(layer).__name__} of transformers, which has its own "
                "rule; only full-attention layers are evicting"
            )
        return layer

    def reset(self) -> None:
        """Forget everything, as a new cache; a poisoned cache is usable again."""
        self._start_over()

    def save(self, folder: Any) -> None:
        """Write the cache to a folder: safetensors and JSON; see `kvevict.saved`."""
        from kvevict.saved import save

        save(self, folder)

    @classmethod
    def load(cls, folder: Any, model: Any) -> Self:
        """Read a cache written by `save`, for the same model.

        Raises:
            CacheError: a folder that is truncated, foreign, or of another model.
        """
        from kvevict.saved import load

        return load(cls, folder, model)  # type: ignore[no-any-return]

    # -- transformers' contract -------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand the states to their layer, and the layer to the attention function.

        Raises:
            NotPatchedError: the model was not patched, or the cache was handed to a submodule.
        """
        if not self._open:
            raise NotPatchedError(
                "this forward was not announced to the eviction cache: call kvevict.patch(model) "
                "first, and pass the cache to the model itself, not to a submodule"
            )
        layer = self.layers[layer_idx]
        shared = kwargs.get("kwargs")
        if isinstance(layer, EvictionLayer) and isinstance(shared, dict):
            shared["kvevict_layer"] = layer  # the same dict is splatted into the attention function
        return layer.update(  # type: ignore[no-any-return, union-attr]
            key_states, value_states, *args, **kwargs
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens seen, not the stored; for layers of transformers, what they say."""
        if layer_idx < len(self.layers) and not isinstance(self.layers[layer_idx], EvictionLayer):
            return super().get_seq_length(layer_idx)
        return self._seen

    def reorder_cache(self, beam_idx: Any) -> None:
        """Reorder rows for beam search."""
        super().reorder_cache(beam_idx)
        self._map_rows(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        self._map_rows(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        super().batch_select_indices(indices)
        self._map_rows(lambda t: t.index_select(0, indices.to(t.device)))

    def _map_rows(self, change: Any) -> None:
        self._ledgers = []
        if self._heads is not None:
            self._heads.drop()
        if isinstance(self._row_seen, Tensor):
            self._row_seen = change(self._row_seen)

    # -- one forward ------------------------------------------------------------------------------

    def settle_length(self, prompt_length: int) -> None:
        """Turn shares of the prompt into tokens, once its unpadded length is known."""
        if self.policy.has_shares:
            self.policy = self._given.resolve(prompt_length)
            if self.policy.capacity == 0:
                raise PolicyError(
                    f"{self._given} of a prompt of {prompt_length} tokens keeps nothing: give a "
                    "larger share or a number of tokens"
                )
            self._make_layers()

    def begin(self, handle: Any, rows: int, length: int, mask: Tensor | None, device: Any) -> Plan:
        """Announce a forward: called by the patched model before its first layer.

        Args:
            handle: the patch of the model, which knows its rotations.
            rows: B of the new tokens.
            length: Q, new columns.
            mask: 2D attention mask `[B, seen + Q]` or of the new columns alone, or None.
            device: of the new tokens.

        Returns:
            The plan; its `fed()` are the positions that the model must be run at.

        Raises:
            CacheError: another model, another batch, or a forward that failed half-way before.
            PolicyError: shares of a prompt whose length nobody gave.
        """
        if self._model() is not handle.model:
            raise CacheError("this cache was made for another model; make one for this model")
        if self.policy.has_shares:
            _ = self.policy.capacity  # raises with the remedy
        self._check_usable()
        self._check_rows(rows)
        if not self._ready:
            self._settle(handle)
        new = self._new_columns(mask, rows, length)
        padded = isinstance(self._row_seen, Tensor) or (new is not None and not bool(new.all()))
        start = 0 if isinstance(self._row_seen, Tensor) else self._row_seen
        row_seen = self._rows_seen(device)
        if padded:
            row_seen = row_seen.expand(rows, 1)
            if new is None:
                new = torch.ones(rows, length, dtype=torch.bool, device=device)
            new = new.to(device)
            position = torch.where(new, row_seen + new.long().cumsum(-1) - 1, -1)
        else:
            position = torch.arange(start, start + length, device=device)[None]
        self._rebase(self._seen if padded else start, length)  # columns bound a padded row's tokens
        plan = Plan(length, self._seen, padded, position, row_seen, start, self._base)
        if length == 1 and not padded:
            plan.ledgers = self._open_ledgers()
        for layer in self.layers:
            if isinstance(layer, EvictionLayer):
                layer.plan = plan
        self._open = True
        return plan

    def fed(self, plan: Plan) -> Tensor:
        """Return the positions that the model must be run at, int64 `[B, Q]`."""
        if self._raw_keys:  # rotated when read, by rank: position 0 leaves them as they are
            return torch.zeros_like(plan.position)
        real = plan.position.clamp(min=0)
        if self.positions == "in_cache":
            return real - self._base
        return real + self._offset

    def finish(self) -> None:
        """Take note that a forward ran to its end.

        Raises:
            CacheError: scores that are no numbers; the cache is poisoned.
        """
        plan = next(x.plan for x in self.layers if isinstance(x, EvictionLayer))
        assert plan is not None
        self._seen += plan.length
        for ledger in plan.ledgers:
            ledger.evict(plan.start + 1)
        if plan.static:
            for layer in self.layers:
                layer.seen = self._seen  # type: ignore[union-attr]
        if plan.padded:
            self._row_seen = plan.after(plan.position.device)
        else:
            self._row_seen = plan.start + plan.length
        self._open = False
        try:
            check_scores(self.layers, plan)
        except CacheError:
            self._broken = True
            raise

    def static_plan(self, handle: Any, rows: int, device: Any) -> Plan:
        """Return a plan for steps with static addresses; the cache must be full.

        Raises:
            CacheError: a cache that is not full yet, has pads, or frees several slots at once.
            UnsupportedModelError: layers of transformers' own, or H2O with positions in the cache.
        """
        plan = self.begin(handle, rows, 1, None, device)
        self._open = False
        rings = [x for x in self.layers if isinstance(x, RingLayer)]
        if len(rings) not in (0, len(self.layers)) or (not rings and self._raw_keys):
            raise UnsupportedModelError(
                "a compiled step needs full attention in every layer, and original positions "
                "under a ranked policy"
            )
        capacity = self.policy.capacity
        full = capacity is not None and not plan.padded and self._seen > capacity
        if not full or (not rings and not plan.ledgers):
            raise CacheError(
                "a compiled step needs a full cache without pads and evict_every=1: feed more "
                f"than {capacity} tokens first, then one more on its own"
            )
        plan.static = True
        plan.slot = torch.zeros(1, dtype=torch.int64, device=device)
        return plan

    def advance(self, plan: Plan) -> None:
        """Move a static plan to the next token, in place, before its forward runs."""
        assert isinstance(self._row_seen, int)
        self._check_usable()
        start = self._row_seen
        self._rebase(start, 1)
        plan.seen, plan.start, plan.base = self._seen, start, self._base
        plan.memo.clear()
        plan.position.fill_(start)
        plan.row_seen.fill_(start)
        ring = next((x for x in self.layers if isinstance(x, RingLayer)), None)
        if ring is not None:
            assert plan.slot is not None
            plan.slot.fill_(ring.slot(start))
            ring._turn_head(plan)
        for ledger in plan.ledgers:
            ledger.take_in(start)
        self._open = True

    def _open_ledgers(self) -> list[Ledger]:
        """Return the ledgers once every ranked layer is full and frees one slot a token."""
        ranked = [x for x in self.layers if isinstance(x, RankedLayer)]
        if self.evict_every != 1 or not ranked or any(x.free is None for x in ranked):
            self._ledgers = []
        elif not self._ledgers:
            self._ledgers = ledgers(ranked)
        return self._ledgers

    def shift_stream(self, start: int) -> None:
        """From here on, count (and, with original positions, feed) tokens as if `start` later."""
        if start != self._offset:
            self._offset = start
            seen = int(self._rows_seen(torch.device("cpu")).max())
            self._offsets = [o for o in self._offsets if o[0] < seen] + [(seen, start)]

    @property
    def _raw_keys(self) -> bool:
        return self.positions == "in_cache" and self._ranked

    @property
    def _ranked(self) -> bool:
        extents = self.policy.extents
        return extents is not None and self.policy.band is None

    def _check_usable(self) -> None:
        if self._open and any(getattr(x, "seen", self._seen) != self._seen for x in self.layers):
            self._broken = True
        if self._broken:
            raise CacheError(
                "a forward failed half-way, so layers hold different tokens; call reset() and feed "
                "the sequence again"
            )

    def _check_rows(self, rows: int) -> None:
        held = self.rows
        if held not in (-1, rows):
            raise CacheError(
                f"the cache holds {held} rows and got {rows}; use a fresh cache or reset() it"
            )

    def _new_columns(self, mask: Tensor | None, rows: int, length: int) -> Tensor | None:
        if mask is None:
            return None
        if mask.ndim != 2 or mask.shape[0] != rows:
            raise CacheError(
                f"attention_mask of shape {tuple(mask.shape)}: give a 2D mask [{rows}, tokens]; "
                "eviction makes its own causal masks"
            )
        if mask.shape[1] not in (length, self._seen + length):
            raise CacheError(
                f"attention_mask covers {mask.shape[1]} tokens; the cache has seen {self._seen}, "
                f"{length} are new: give {self._seen + length} columns or the {length} new ones"
            )
        return mask[:, -length:].to(torch.bool)

    def _rows_seen(self, device: Any) -> Tensor:
        if isinstance(self._row_seen, Tensor):
            return self._row_seen.to(device)
        return torch.full((1, 1), self._row_seen, dtype=torch.int64, device=device)

    def _make_layers(self) -> None:
        kind = RankedLayer if self._ranked else RingLayer
        self.layers = list(DynamicCache(config=self._config).layers)
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer:
                self.layers[index] = kind(self.policy, self.evict_every)
        if not any(isinstance(x, EvictionLayer) for x in self.layers):
            kinds = sorted({type(x).__name__ for x in self.layers}) or ["none"]
            raise UnsupportedModelError(
                f"{self._config.model_type}: no layer with full attention to evict from (layers: "
                f"{', '.join(kinds)})"
            )

    def _settle(self, handle: Any) -> None:
        """Resolve "auto" and give every layer its rotation."""
        self.positions, ropes = handle.settle_positions(self.policy, self._asked[0], self.layers)
        self.backend = handle.settle_backend(self._asked[1])
        rings = [x for x in self.layers if isinstance(x, RingLayer)]
        heads = Heads(rings)
        for layer, rope in zip(self.layers, ropes, strict=True):
            if isinstance(layer, EvictionLayer):
                layer.rope, layer.backend = rope, self.backend
            if isinstance(layer, RingLayer):
                layer.heads = heads
        self._heads = heads
        self._limit = handle.position_limit
        self._ready = True

    def _rebase(self, start: int, length: int) -> None:
        """Keep the positions fed bounded: turn the stored window back once in a long while.

        A key lives through at most a few of these, each one rounding, so half precision does not
        drift as it does when keys are turned at every step.

        Raises:
            UnsupportedModelError: a forward that reaches beyond where the rope type changes.
        """
        band = self.policy.band
        if self.positions != "in_cache":
            return
        if self._raw_keys:
            self._check_limit(min(start, self.capacity or 0) + length, self.capacity or 0)
            return
        if band is None or not all(isinstance(x, RingLayer) for x in self.layers):
            self._check_limit(start + length, 0)  # sliding layers keep their own positions
            return
        extents = self.policy.extents
        assert extents is not None
        reach = extents[0] + band
        if start - self._base + length <= (self._limit or max(_REBASE_AT, reach + length)):
            return
        by = start - self._base - reach
        fewest = self._row_seen if isinstance(self._row_seen, int) else int(self._row_seen.min())
        if by > 0 and fewest >= extents[0]:  # a head lies at 0..S-1: none may arrive after a rebase
            for layer in self.layers:
                assert isinstance(layer, RingLayer)
                layer.rebase(by)
            self._base += by
        self._check_limit(start - self._base + length, reach)

    def _check_limit(self, end: int, reach: int) -> None:
        """Refuse positions from `end` on where the rope type changes; `reach` are held."""
        if self._limit is not None and end > self._limit:
            raise UnsupportedModelError(
                f"{self._config.model_type}: its positions change beyond {self._limit}; feed "
                f"chunks of at most {max(self._limit - reach, 1)} tokens (prefill_chunk_size= of "
                "generate, chunk= of stream)"
                + ("" if reach else f", and no more than {self._limit} in all")
            )

    def _with_offsets(self, position: Tensor) -> Tensor:
        shifted = position
        for first, offset in self._offsets:
            shifted = torch.where(position >= first, position + offset, shifted)
        return torch.where(position < 0, -1, shifted)
