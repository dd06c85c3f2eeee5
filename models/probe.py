"""The probe: what a model's attention and positions really do, measured by two tiny forwards.

A table of model families goes stale with every release; six tokens run at two positions show which
layers pass through the attention function, with which options, and how their keys rotate.
"""

import copy
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvevict.errors import UnsupportedModelError
from kvevict.models import attention
from kvevict.models.placement import Reduce, input_device, is_pipeline_part, over_ranks
from kvevict.models.rope import Rope, fit, no_rotation

_TOKENS = 6
_SHIFT = 37
# What attention modules pass beside queries, keys, values and mask without changing the logits, or
# what the attention function honours. Anything else is refused rather than dropped.
_HONOURED = frozenset(
    ("module", "key", "value", "mask", "softcap", "s_aux", "is_causal", "sliding_window")
)
_HARMLESS = frozenset(
    [
        "position_ids",
        "use_cache",
        "cache",
        "past_key_values",
        "output_attentions",
        "output_hidden_states",
        "layer_idx",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
        "kwargs",
    ]
)
_NAMES = {"position_bias": "a position bias", "block_indices": "block-sparse attention"}
_BOUNDED = ("dynamic", "longrope")  # rope types whose frequencies change with the length
_ROPE_PARAMETERS = frozenset(
    [
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "partial_rotary_factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "short_factor",
        "long_factor",
        "low_freq_factor",
        "high_freq_factor",
        "truncate",
        "original_max_position_embeddings",
        "max_position_embeddings",
        "llama_4_scaling_beta",
    ]
)


@dataclass
class Findings:
    """What the probe measured.

    Attributes:
        model_type: of the model, for messages.
        ropes: each layer's rotation, None where none fits.
        position_limit: positions that may be fed before something about them changes.
        in_cache_problem: why positions inside the cache are not to be had, whatever the layers.
        head_dims: of the layers that evict.
        over_ranks: by layer, what adds up over the ranks that its heads are split over, or None.
        ranks_problem: why scores cannot be added up over ranks, where they would have to be.
    """

    model_type: str
    ropes: list[Rope | None] = field(default_factory=list)
    position_limit: int | None = None
    in_cache_problem: str | None = None
    head_dims: frozenset[int] = frozenset()
    over_ranks: list[Reduce | None] = field(default_factory=list)
    ranks_problem: str | None = None


def probe(model: Any) -> Findings:
    """Run two forwards of six tokens, `_SHIFT` positions apart, and compare.

    Args:
        model: with kvevict's attention function selected.

    Raises:
        UnsupportedModelError: with the first missing part.
    """
    config = model.config.get_text_config(decoder=True)
    findings = Findings(config.model_type)
    first, calls = run_once(model, 0)
    elsewhere = _elsewhere(first) if is_pipeline_part(model) else frozenset()
    refuse(config.model_type, check_calls(first, calls, elsewhere))
    findings.ropes = _ropes(model, first)
    for index in elsewhere:
        findings.ropes[index] = no_rotation()
    evicting = [
        i for i, x in enumerate(first.layers) if type(x) is DynamicLayer and i not in elsewhere
    ]
    if all(getattr(findings.ropes[i], "style", "") == "none" for i in evicting):
        _check_positions(model, config)
    findings.head_dims = frozenset(int(first.layers[i].keys.shape[-1]) for i in evicting)
    findings.over_ranks = [None] * len(first.layers)
    modules = {getattr(call["module"], "layer_idx", -1): call["module"] for call in calls}
    try:
        for i in evicting:
            heads = int(first.layers[i].keys.shape[1])
            findings.over_ranks[i] = over_ranks(modules[i], heads, config)
    except UnsupportedModelError as error:
        findings.ranks_problem = str(error)
    findings.position_limit, findings.in_cache_problem = _limits(config)
    ends = [len(table) for table in _tables(model)]
    if ends:
        findings.position_limit = min([*ends, findings.position_limit or ends[0]])
    return findings


def refuse(model_type: str, problems: dict[int, str]) -> None:
    """Refuse a model for its first problem.

    Raises:
        UnsupportedModelError: if there is one.
    """
    for index, problem in sorted(problems.items()):
        where = f"{model_type}, layer {index}" if index >= 0 else model_type
        raise UnsupportedModelError(f"{where}: {problem}")


def _elsewhere(cache: Any) -> frozenset[int]:
    """Return the layers that another pipeline rank runs."""
    return frozenset(i for i, x in enumerate(cache.layers) if not x.is_initialized)


def check_calls(
    cache: Any, calls: list[dict[str, Any]], elsewhere: frozenset[int] = frozenset()
) -> dict[int, str]:
    """Return the missing part of each layer that cannot serve an eviction cache.

    Args:
        cache: transformers' own, after one forward.
        calls: what the attention function was called with during it.
        elsewhere: layers of other processes, which those check.
    """
    by_layer: dict[int, list[dict[str, Any]]] = {}
    for call in calls:
        by_layer.setdefault(getattr(call["module"], "layer_idx", -1), []).append(call)
    found = {
        index: _problem(layer, by_layer.get(index, []))
        for index, layer in enumerate(cache.layers)
        if index not in elsewhere
    }
    for index in by_layer.keys() - found.keys():
        found[index] = "its attention does not name its layer (missing part: the bridge)"
    if not any(type(x) is DynamicLayer for x in cache.layers):
        kinds = ", ".join(sorted({type(x).__name__ for x in cache.layers})) or "none"
        found[-1] = f"no layer has full attention to evict from (layers: {kinds})"
    return {index: problem for index, problem in found.items() if problem}


def _problem(layer: Any, calls: list[dict[str, Any]]) -> str | None:
    if type(layer).__name__ == "DummyLayer":  # from transformers 5.24 on
        return "it reads the keys of another layer (missing part: scores)" if calls else None
    if type(layer) is not DynamicLayer:
        return None  # transformers' own layer, mask and attention serve it
    if not calls:
        return "its attention does not go through AttentionInterface (missing part: the bridge)"
    if len(calls) > 1:
        return "it attends several times in one forward (missing part: the bridge)"
    call = calls[0]
    for name in ("keys", "values"):
        cached, seen = getattr(layer, name, None), call[name[:-1]]
        same = isinstance(cached, Tensor) and cached.shape == seen.shape
        if same and isinstance(cached, Tensor) and seen.device.type != "meta":
            same = torch.equal(cached, seen)
        if not same:
            return f"it attends to other {name} than it caches, as MLA does (missing part: scores)"
    given = {**call, **(call.get("kwargs") or {})}  # pipeline stages nest what they pass on
    for name, value in given.items():
        if name not in _HONOURED | _HARMLESS and value is not None and value is not False:
            what = _NAMES.get(name, f"the option {name}")
            return f"{what} is not supported (missing part: scores)"
    if call.get("sliding_window") is not None:
        return "a sliding window on a layer of full attention (missing part: positions)"
    causal = call.get("is_causal")
    causal = getattr(call["module"], "is_causal", True) if causal is None else causal
    if causal is False and call["mask"] is None:
        return "its attention is not causal (missing part: positions)"
    if call["mask"] is not None and not _is_causal_mask(call["mask"]):
        return "its mask is not the causal one (missing part: positions)"
    return None


def _is_causal_mask(mask: Any) -> bool:
    """Whether a mask says no more than that a token sees itself and what came before."""
    if not isinstance(mask, Tensor) or mask.device.type == "meta":
        return isinstance(mask, Tensor)
    n = mask.shape[-1]
    if mask.ndim != 4 or mask.shape[-2] != n:
        return False
    causal = torch.ones(n, n, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        return bool((mask == causal).all())
    seen, hidden = mask.masked_select(causal), mask.masked_select(~causal)
    return bool((seen == 0).all()) and bool((hidden <= -1e4).all())


def _check_positions(model: Any, config: Any) -> None:
    """Tell layers without positions (NoPE) from a model that does not let them be set.

    Six equal tokens have equal keys in the first layer exactly if nothing marks their places.

    Raises:
        UnsupportedModelError: a model that numbers its tokens itself.
    """
    cache, _ = run_once(model, 0, equal=True)
    layers = (x for x in cache.layers if type(x) is DynamicLayer and x.is_initialized)
    keys: Tensor = next(layers).keys  # type: ignore[assignment]
    spread = (keys - keys[:, :, :1]).abs().max() / keys.abs().max().clamp_min(1e-12)
    tol = 1e-4 if keys.dtype in (torch.float32, torch.float64) else 3e-2
    if spread > tol and not _is_hybrid(cache):
        raise UnsupportedModelError(
            f"{config.model_type}: it numbers its tokens itself and ignores position_ids (missing "
            "part: positions)"
        )


def _is_hybrid(cache: Any) -> bool:
    """Whether recurrent or sliding layers before the first full one may tell places apart."""
    return type(cache.layers[0]) is not DynamicLayer


def run_once(model: Any, position: int, equal: bool = False) -> tuple[Any, list[dict[str, Any]]]:
    """Run six tokens, equal or all different, from a position on.

    Returns:
        transformers' cache and the calls of the attention function.

    Raises:
        UnsupportedModelError: the model does not run on plain token ids and positions.
    """
    config = model.config.get_text_config(decoder=True)
    names = inspect.signature(type(model).forward).parameters
    if "position_ids" not in names and "kwargs" not in names:
        raise UnsupportedModelError(
            f"{config.model_type}: its forward takes no position_ids (missing part: positions)"
        )
    cache = DynamicCache(config=config)
    device = input_device(model)
    ids = (torch.arange(_TOKENS, device=device) * (0 if equal else 7) + 3) % config.vocab_size
    given = {
        "input_ids": ids[None],
        "position_ids": torch.arange(position, position + _TOKENS, device=device)[None],
        "use_cache": True,
        ("cache" if "cache" in names else "past_key_values"): cache,
    }
    training = model.training
    calls: list[dict[str, Any]] = []
    token = attention.probe_calls.set(calls)
    attention.forward_cache.set(None)  # a forward that failed leaves its cache behind
    try:
        model.eval()
        with torch.no_grad():
            model(**given)
    except (
        AttributeError,
        IndexError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise UnsupportedModelError(
            f"{config.model_type}: a forward on plain token ids failed (missing part: positions): "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
        ) from error
    finally:
        attention.probe_calls.reset(token)
        model.train(training)
    return cache, calls


def _ropes(model: Any, first: Any) -> list[Rope | None]:
    none: list[Rope | None] = [None] * len(first.layers)
    try:
        second, _ = run_once(model, _SHIFT)
    except UnsupportedModelError:  # learned positions that end before the shift
        return none
    buffers = [b for n, b in model.named_buffers() if n.endswith("inv_freq") and b.ndim == 1]
    buffers += [_table_frequencies(table.shape[1]) for table in _tables(model)]
    candidates: list[Tensor] = []
    for buffer in buffers:
        if not any(b.shape == buffer.shape and torch.equal(b, buffer) for b in candidates):
            candidates.append(buffer)
    ropes: list[Rope | None] = []
    found: list[Rope] = []
    for before, after in zip(first.layers, second.layers, strict=True):
        keys = getattr(before, "keys", None)
        if not isinstance(keys, Tensor) or keys.ndim != 4:
            ropes.append(None)
            continue
        tol = {torch.float32: 1e-4, torch.float64: 1e-4}.get(keys.dtype, 3e-2)
        rope = fit(keys, after.keys, _SHIFT, candidates, tol)
        if rope is not None:
            same = next((r for r in found if r.same_as(rope)), None)
            if same is None:
                rope.key = len(found)
                found.append(rope)
            rope = copy.copy(same or rope)
        ropes.append(rope)
    return ropes


def _tables(model: Any) -> list[Tensor]:
    """Return tables `[positions, R]` that stand for frequencies (GPT-J, CodeGen)."""
    return [b for n, b in model.named_buffers() if n.endswith("embed_positions") and b.ndim == 2]


def _table_frequencies(dims: int) -> Tensor:
    """Return the frequencies of a table: Su et al. 2021 with base 10,000."""
    return 10_000.0 ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)


def _limits(config: Any) -> tuple[int | None, str | None]:
    """Return up to which position nothing changes, and why in-cache positions cannot be had."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    unknown = sorted({str(key) for entry in nested for key in entry.keys() - _ROPE_PARAMETERS})
    if unknown:
        return None, f"its rope parameters {unknown} are not known"
    if getattr(config, "attn_temperature_tuning", False):
        return None, "its attention temperature follows the number of tokens seen"
    bounds = [
        entry.get("original_max_position_embeddings") or config.max_position_embeddings
        for entry in nested
        # The last scales queries by their position, constant below the original length.
        if entry.get("rope_type") in _BOUNDED or entry.get("llama_4_scaling_beta")
    ]
    return (min(bounds) if bounds else None), None
