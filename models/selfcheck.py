"""The self-check: what a patched model does with an eviction cache, against transformers' own.

The probe knows the traps that were met so far; this finds the ones that were not. Six tokens are
fed to a cache that keeps everything, in two chunks and a single token, beside a left-padded row;
every logit must be the one that a DynamicCache gives.
"""

from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvevict.cache import EvictionCache
from kvevict.errors import CacheError, KvevictError, NotPatchedError, UnsupportedModelError
from kvevict.models.placement import input_device, is_pipeline_part

_TOKENS = 6
_PADS = 2
_CHUNKS = (3, 2, 1)


def self_check(model: Any, cache_name: str) -> str | None:
    """Compare a patched model's logits under a cache that keeps everything with a DynamicCache's.

    Args:
        model: patched, with its hooks in place.
        cache_name: what its forward calls the cache.

    Returns:
        None, or why left-padded rows cannot be served (single rows can).

    Raises:
        UnsupportedModelError: a row without pads comes out different.
    """
    kind = model.config.get_text_config(decoder=True).model_type
    if is_pipeline_part(model):  # logits are another rank's
        return None
    device = input_device(model)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(_TOKENS, device=device) * 7 + 3) % vocabulary
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            stock = DynamicCache(config=model.config.get_text_config(decoder=True))
            wanted = _run(model, cache_name, stock, ids[None])
            try:
                alone = _run(model, cache_name, EvictionCache(model, "full"), ids[None])
            except (CacheError, NotPatchedError, TypeError) as problem:
                raise UnsupportedModelError(
                    f"{kind}: its forward does not pass the cache on as others do (missing part: "
                    f"the bridge): {str(problem).strip().splitlines()[0]}"
                ) from problem
            error = _error(alone[0], wanted[0])
            if error > _tolerance(model):
                raise UnsupportedModelError(
                    f"{kind}: its logits under a cache that keeps everything are not a "
                    f"DynamicCache's (off by {error:.1%} of the largest; missing part: the bridge)"
                )
            try:
                padded = _run(model, cache_name, EvictionCache(model, "full"), *_padded(ids))
                error = _error(padded[1, _PADS:], wanted[0, : _TOKENS - _PADS])
            except (KvevictError, IndexError, RuntimeError, TypeError, ValueError) as problem:
                return f"{kind}: left-padded rows fail ({str(problem).strip().splitlines()[0]})"
    finally:
        model.train(training)
    if error > _tolerance(model):
        return (
            f"{kind}: a left-padded row does not come out as the same row alone (off by "
            f"{error:.1%} of the largest logit; missing part: positions)"
        )
    return None


def _padded(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two rows, the second with pads first, and their mask."""
    pad = ids[:1].expand(_PADS)
    rows = torch.stack([ids, torch.cat([pad, ids[: _TOKENS - _PADS]])])
    mask = torch.ones_like(rows)
    mask[1, :_PADS] = 0
    return rows, mask


def _run(
    model: Any, cache_name: str, cache: Any, rows: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    outs, end = [], 0
    for length in _CHUNKS:
        start, end = end, end + length
        given = {} if mask is None else {"attention_mask": mask[:, :end]}
        if not isinstance(cache, EvictionCache):  # which hybrids miscount on their own
            given["position_ids"] = torch.arange(start, end, device=rows.device)[None]
        out = model(input_ids=rows[:, start:end], use_cache=True, **{cache_name: cache}, **given)
        outs.append(out.logits)
    return torch.cat(outs, 1)


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    got, wanted = got.float(), wanted.float()
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))


def _tolerance(model: Any) -> float:
    """Return what rounding may do; half precision can also flip a router's choice of experts."""
    return 2e-3 if model.dtype in (torch.float32, torch.float64) else 0.2
