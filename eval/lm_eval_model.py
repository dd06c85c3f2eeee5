"""lm_eval_model: lm-evaluation-harness's Hugging Face model under an eviction cache.

A plain HFLM scores likelihoods in one forward without a cache, which no policy can change; here
they stream through a fresh cache in chunks. Generation gets a fresh cache per call.

Importing this registers the model `kvevict` with lm-eval, which must be installed.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from kvevict.cache import EvictionCache
from kvevict.eval.caches import CacheSettings, feed
from kvevict.models.patch import patch
from kvevict.models.releases import cache_argument
from kvevict.policy import parse


@register_model("kvevict")
class KVEvictLM(HFLM):  # type: ignore[misc]  # lm-eval has no types
    """A causal model whose every request runs under a policy.

    Args:
        pretrained: model object, folder or hub id.
        policy: a policy's string.
        chunk: tokens a forward where likelihoods are scored.
        positions: see `EvictionCache`.
        evict_every: see `EvictionCache`.
        **kwargs: of HFLM.

    Raises:
        PolicyError: a bad policy or setting.
        UnsupportedModelError: a model that cannot be patched.
    """

    def __init__(
        self,
        pretrained: Any,
        policy: str = "full",
        chunk: int | str = 64,
        positions: Any = "auto",
        evict_every: int | str = 1,
        **kwargs: Any,
    ) -> None:
        self._policy = parse(policy)
        self._settings = CacheSettings(int(chunk), positions, "auto", int(evict_every))
        super().__init__(pretrained=pretrained, **kwargs)
        patch(self.model)

    def _fresh(self, length: int) -> EvictionCache:
        """Return a fresh cache; shares are of this request's own length."""
        cache = self._settings.cache(self.model, self._policy)
        cache.settle_length(length)
        return cache

    def _model_call(
        self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """Return logits `[B, T, V]` of right-padded requests, streamed through a fresh cache.

        Pads come last, so that no real token of their row sees them or what they evict.
        """
        cache, name = self._fresh(inps.shape[1]), cache_argument(self.model)
        with torch.no_grad():
            parts = [
                self.model(input_ids=part, use_cache=True, **{name: cache}).logits
                for part in inps.split(self._settings.chunk, dim=1)
            ]
        return torch.cat(parts, 1)

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Tensor:
        """Generate with a fresh cache."""
        generation_kwargs[cache_argument(self.model)] = self._fresh(context.shape[1])
        return super()._model_generate(context, max_length, stop, **generation_kwargs)  # type: ignore[no-any-return]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of whole documents, each in one stream without windows.

        HFLM cuts a document into windows that forget what came before; a bounded cache reads on,
        so every token is scored once, after the prefix token and all that the policy kept.
        """
        found = []
        for request in tqdm(requests, disable=disable_tqdm or self.rank > 0):
            (text,) = request.args
            ids = torch.tensor([self.prefix_token_id, *self.tok_encode(text)])
            nll, _ = feed(self.model, ids, self._fresh(len(ids)), self._settings)
            total = -float(nll[1:].double().sum())
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            found.append(total)
        return found
