"""CompiledStep: a decode step under a full cache with static addresses, compiled by torch.

At a full cache every shape is fixed: one token goes in, one slot of each head is overwritten. What
differs between steps (slot, position, victim) is written into tensors in place, outside the
compiled part, so that torch compiles the model's forward once and never again.
"""

from typing import Any

import torch
from torch import Tensor

from kvevict.cache import EvictionCache
from kvevict.errors import NotPatchedError
from kvevict.models import attention
from kvevict.models.releases import cache_argument


class CompiledStep:
    """One token at a time through a patched model and a full cache, compiled.

    The first call compiles (seconds to a minute); later calls of any position reuse it. Between
    calls the cache can be read as usual; feed it by another way and a new `CompiledStep` is due.

    Args:
        model: a patched model.
        cache: full, without pads, `evict_every=1`.
        mode: of torch.compile; "reduce-overhead" captures CUDA graphs where there is a GPU.
        compile: False runs the same static step without compiling, for comparison.

    Raises:
        NotPatchedError: the model is not patched.
        CacheError: a cache that is not full yet, has pads or frees several slots at once.
        UnsupportedModelError: layers of transformers' own, or a ranked policy with positions in
            the cache.
    """

    def __init__(
        self, model: Any, cache: EvictionCache, mode: str = "default", compile: bool = True
    ) -> None:
        handle = getattr(model, "_kvevict", None)
        if handle is None:
            raise NotPatchedError("call kvevict.patch(model) first")
        self.model, self.cache = model, cache
        device = model.get_input_embeddings().weight.device
        self._plan = cache.static_plan(handle, cache.rows, device)
        self._fed = torch.zeros(cache.rows, 1, dtype=torch.int64, device=device)
        self._ids = torch.zeros(cache.rows, 1, dtype=torch.int64, device=device)
        self._mask = torch.zeros((1, 1, 1, 1), device=device)
        self._name = cache_argument(model)
        self._run: Any = torch.compile(self._forward, mode=mode) if compile else self._forward

    def _forward(self, ids: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        given = {self._name: self.cache}
        out = self.model(
            input_ids=ids, position_ids=position_ids, attention_mask=mask, use_cache=True, **given
        )
        return out.logits  # type: ignore[no-any-return]

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """Feed one token a row.

        Args:
            ids: int64 `[B, 1]`.

        Returns:
            Logits `[B, 1, V]`.
        """
        cache, plan = self.cache, self._plan
        cache.advance(plan)
        self._fed.copy_(cache.fed(plan).expand_as(self._fed))
        self._ids.copy_(ids)
        cache.static = True
        token = attention.forward_cache.set(cache)  # for releases that hand `update` no keywords
        try:
            logits = self._run(self._ids, self._fed, self._mask)
        except BaseException:
            cache.poison()  # layers do not keep count in a static step, so nobody would notice
            raise
        finally:
            cache.static = False
            attention.forward_cache.reset(token)
        cache.finish()
        return logits  # type: ignore[no-any-return]
