"""EvictionCache: a transformers cache that holds generation to a fixed budget."""

from __future__ import annotations

import weakref
from typing import Any, Literal, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvevict.drafts import Drafts
from kvevict.errors import CacheError, NotPatchedError, PolicyError, UnsupportedModelError
from kvevict.layers import EvictionLayer
from kvevict.policy import Policy, parse
from kvevict.ranked import RankedLayer
from kvevict.ring import RingLayer
from kvevict.shared import Heads, Ledger

__all__ = ["EvictionCache", "EvictionLayer", "RankedLayer", "RingLayer"]

Positions = Literal["auto", "in_cache", "original"]
Backend = Literal["auto", "torch", "triton"]


class EvictionCache(Drafts, Cache):
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
        self._drafting, self._known, self._draft = False, 0, None
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

    def poison(self) -> None:
        """Refuse all further use until `reset()`: a forward failed half-way."""
        self._broken = True

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
            CacheError: as `kept_positions`, the policy keeps no scores, or they are no numbers.
        """
        if not self.policy.needs_scores or not self._ranked:
            raise CacheError(f"policy {self.policy} keeps no scores; h2o with a heavy part does")
        position, order, layer = self._kept(layer_idx)
        self._check_scores()
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
        self._check_settled()
        super().reorder_cache(beam_idx)
        self._map_rows(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._check_settled()
        super().batch_repeat_interleave(repeats)
        self._map_rows(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        self._check_settled()
        super().batch_select_indices(indices)
        self._map_rows(lambda t: t.index_select(0, indices.to(t.device)))

    def _map_rows(self, change: Any) -> None:
        self._ledgers = []
        if self._heads is not None:
            self._heads.drop()
        if isinstance(self._row_seen, Tensor):
            self._row_seen = change(self._row_seen)

    # -- policy, layers and numbering -------------------------------------------------------------

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

    def shift_stream(self, start: int) -> None:
        """From here on, count (and, with original positions, feed) tokens as if `start` later."""
        if start != self._offset:
            self._offset = start
            seen = int(self._rows_seen(torch.device("cpu")).max())
            self._offsets = [o for o in self._offsets if o[0] < seen] + [(seen, start)]

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
        problem = handle.findings.ranks_problem
        if problem is not None and self.policy.scope == "layer":
            raise UnsupportedModelError(f"{self.policy}: {problem}; use scope=head")
        self.positions, ropes = handle.settle_positions(self.policy, self._asked[0], self.layers)
        self.backend = handle.settle_backend(self._asked[1])
        rings = [x for x in self.layers if isinstance(x, RingLayer)]
        heads = Heads(rings)
        for layer, rope, over in zip(self.layers, ropes, handle.findings.over_ranks, strict=True):
            if isinstance(layer, EvictionLayer):
                layer.rope, layer.backend = rope, self.backend
                layer.over_ranks = over
            if isinstance(layer, RingLayer):
                layer.heads = heads
        self._heads = heads
        self._limit = handle.position_limit
        self._ready = True

    def _with_offsets(self, position: Tensor) -> Tensor:
        shifted = position
        for first, offset in self._offsets:
            shifted = torch.where(position >= first, position + offset, shifted)
        return torch.where(position < 0, -1, shifted)
