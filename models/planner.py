"""plan: the exact cache bytes of a model under a policy, on the meta device, without weights.

The model is built from its config without memory for its weights, run once on six tokens to see
what each layer caches, and every layer's real buffers are then allocated on the meta device, by the
code that allocates them in earnest.
"""

import copy
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import sdpa_mask

from kvevict.errors import PolicyError, UnsupportedModelError
from kvevict.models import attention
from kvevict.models.probe import check_calls, refuse, run_once
from kvevict.policy import Policy, parse
from kvevict.ranked import RankedLayer
from kvevict.ring import RingLayer

_DTYPES = ("float32", "bfloat16", "float16")


def plan(
    config_or_name: Any,
    policy: Policy | str,
    context: int,
    batch: int = 1,
    dtype: str = "bfloat16",
    evict_every: int = 1,
) -> dict[str, Any]:
    """Count the bytes of the key and value buffers after `context` tokens.

    Args:
        config_or_name: a transformers config, or what `kvevict.load` takes for a model.
        policy: a policy or its string; shares are of a prompt of `context` tokens.
        context: tokens seen.
        batch: rows.
        dtype: of keys and values: "float32", "bfloat16" or "float16".
        evict_every: see `EvictionCache`.

    Returns:
        One row: `policy`, `context`, `batch`, `dtype`, `evict_every`, `budget` (None keeps all),
        `cache_bytes` (what `EvictionCache.nbytes()` says once so many tokens were seen),
        `full_bytes` (a DynamicCache's), `share` of the two, and `layers`, the bytes per layer.

    Raises:
        UnsupportedModelError: a model that `patch` refuses as well; names the missing part.
        PolicyError: a number below 1 or an unknown dtype.
        KvevictError: a model without a readable config.
    """
    for name, value in (("context", context), ("batch", batch), ("evict_every", evict_every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PolicyError(f"{name}={value!r}: give a whole number of at least 1")
    if dtype not in _DTYPES:
        raise PolicyError(f"dtype={dtype!r}: give one of {', '.join(_DTYPES)}")
    chosen = parse(policy).resolve(context)
    seen = _layers(config_or_name)
    kind = RankedLayer if chosen.extents is not None and chosen.band is None else RingLayer
    bytes_of, full_of = [], []
    for layer in seen:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:  # a layer that caches no keys: linear or shared
            bytes_of.append(0)
            full_of.append(0)
            continue
        kept = getattr(torch, dtype)
        k = keys.new_empty(batch, keys.shape[1], context, keys.shape[3], dtype=kept)
        v = values.new_empty(batch, values.shape[1], context, values.shape[3], dtype=kept)
        stock = _fresh(layer)
        stock.update(k, v)
        full_of.append(int(stock.keys.nbytes + stock.values.nbytes))
        if type(layer) is not DynamicLayer:
            bytes_of.append(full_of[-1])
            continue
        ours = kind(chosen, evict_every)
        ours.lazy_initialization(k, v)
        bytes_of.append(ours.nbytes())
    total, full = sum(bytes_of), sum(full_of)
    return {
        "policy": str(chosen),
        "context": context,
        "batch": batch,
        "dtype": dtype,
        "evict_every": evict_every,
        "budget": chosen.capacity,
        "cache_bytes": total,
        "full_bytes": full,
        "share": total / full if full else 0.0,
        "layers": bytes_of,
    }


def _fresh(layer: Any) -> Any:
    """Return an empty layer of the same kind and settings."""
    fresh = copy.copy(layer)
    fresh.reset()
    return fresh


def _layers(config_or_name: Any) -> list[Any]:
    """Return the layers of a stock cache after a few tokens on the meta device."""
    config = config_or_name
    if isinstance(config, str):
        from kvevict.models.small import load_config

        config = load_config(config)
    config = copy.deepcopy(config)
    config.get_text_config(decoder=True).pad_token_id = None  # some models look for pads
    AttentionInterface.register(attention.NAME, attention.eviction_attention)
    AttentionMaskInterface.register(attention.NAME, sdpa_mask)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{getattr(config, 'model_type', type(config).__name__)}: not a causal language model "
            f"whose attention kvevict can serve: {str(error).strip().splitlines()[0]}"
        ) from error
    model = model.to(torch.bfloat16)  # grouped matmuls of experts take no other on meta
    cache, calls = run_once(model, 0)
    refuse(config.model_type, check_calls(cache, calls))
    assert isinstance(cache, DynamicCache)
    return list(cache.layers)
