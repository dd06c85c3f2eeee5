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
from transformers.cache_utils import DynamicCache

from kvevict.errors import UnsupportedModelError
from kvevict.models import attention
from kvevict.models.rope import Rope, fit

_TOKENS = 6
_SHIFT = 37
# Options that change the logits; dropping one silently would be wrong.
_OPTIONS = {
    "softcap": "logit soft-capping",
    "s_aux": "learned sinks (s_aux)",
    "position_bias": "a position bias",
    "sliding_window": "a sliding window on a layer of full attention",
}
_BOUNDED = ("dynamic", "longrope")  # rope types whose frequencies change with the length


@dataclass
class Findings:
    """What the probe measured.

    Attributes:
        model_type: of the model, for messages.
        ropes: each layer's rotation, None where none fits.
        problems: for each layer that cannot serve an eviction cache, the missing part.
        position_limit: positions that may be fed, where the rope type bounds them.
    """

    model_type: str
    ropes: list[Rope | None] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)
    position_limit: int | None = None

    def check_layers(self, layers: list[int]) -> None:
        """Refuse layers that cannot serve.

        Raises:
            UnsupportedModelError: with the first missing part.
        """
        for index in layers:
            if index in self.problems:
                raise UnsupportedModelError(
                    f"{self.model_type}, layer {index}: {self.problems[index]}"
                )


def probe(model: Any) -> Findings:
    """Run two forwards of six tokens, `_SHIFT` positions apart, and compare.

    Args:
        model: with kvevict's attention function selected.

    Raises:
        UnsupportedModelError: the model does not run on plain token ids and positions.
    """
    findings = Findings(model.config.model_type)
    first, calls = run_once(model, 0)
    findings.problems = check_calls(first, calls)
    findings.ropes = _ropes(model, first)
    findings.position_limit = _limit(model.config.get_text_config(decoder=True))
    return findings


def check_calls(cache: Any, calls: list[dict[str, Any]]) -> dict[int, str]:
    """Return the missing part of each layer that cannot serve an eviction cache.

    Args:
        cache: transformers' own, after one forward.
        calls: what the attention function was called with during it.
    """
    by_layer = {getattr(c["module"], "layer_idx", None): c for c in calls}
    found = {i: _problem(x, by_layer.get(i)) for i, x in enumerate(cache.layers)}
    return {index: problem for index, problem in found.items() if problem}


def _problem(layer: Any, call: dict[str, Any] | None) -> str | None:
    if call is None:
        return "its attention does not go through AttentionInterface (missing part: the bridge)"
    keys = getattr(layer, "keys", None)
    if not isinstance(keys, Tensor) or keys.shape != call["key"].shape:
        return "it attends to other keys than it caches, as MLA does (missing part: scores)"
    for name, what in _OPTIONS.items():
        if call.get(name) is not None:
            return f"{what} is not supported (missing part: scores)"
    if getattr(call["module"], "is_causal", True) is False:
        return "its attention is not causal (missing part: positions)"
    return None


def run_once(model: Any, position: int) -> tuple[Any, list[dict[str, Any]]]:
    """Run six tokens from a position on; return transformers' cache and the attention calls."""
    config = model.config.get_text_config(decoder=True)
    names = inspect.signature(type(model).forward).parameters
    if "position_ids" not in names and "kwargs" not in names:
        raise UnsupportedModelError(
            f"{config.model_type}: its forward takes no position_ids (missing part: positions)"
        )
    cache = DynamicCache(config=config)
    device = model.get_input_embeddings().weight.device
    ids = (torch.arange(_TOKENS, device=device) * 7 + 3) % config.vocab_size
    given = {
        "input_ids": ids[None],
        "position_ids": torch.arange(position, position + _TOKENS, device=device)[None],
        "use_cache": True,
        ("cache" if "cache" in names else "past_key_values"): cache,
    }
    training = model.training
    calls: list[dict[str, Any]] = []
    token = attention.probe_calls.set(calls)
    try:
        model.eval()
        with torch.no_grad():
            model(**given)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
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


def _limit(config: Any) -> int | None:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    bounds = [
        entry.get("original_max_position_embeddings") or config.max_position_embeddings
        for entry in nested
        if entry.get("rope_type") in _BOUNDED
    ]
    return min(bounds) if bounds else None
