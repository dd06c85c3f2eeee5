"""A cache on disk: safetensors for tensors, JSON for the rest; no pickle.

The folder is written beside its final name and moved into place, and the JSON carries the hash of
the tensors, so that a truncated or foreign folder is told from a good one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvevict.errors import CacheError, PolicyError
from kvevict.layers import EvictionLayer
from kvevict.policy import REGISTRY
from kvevict.ring import RingLayer

_FORMAT = 1
_TENSORS, _FACTS = "cache.safetensors", "cache.json"


def save(cache: Any, folder: Any) -> None:
    """Write a cache to a new folder, in one step.

    Raises:
        CacheError: a poisoned cache or one whose scores are no numbers, one with layers of
            transformers' own, or a folder that exists and is not a saved cache.
    """
    cache._check_usable()
    cache._check_scores()
    if not all(isinstance(layer, EvictionLayer) for layer in cache.layers):
        raise CacheError("a cache with sliding layers of transformers cannot be saved yet")
    target = Path(folder)
    if target.exists() and not (target / _FACTS).is_file():
        raise CacheError(f"{target} exists and is no saved cache: give a new folder")
    tensors: dict[str, Tensor] = {}
    layers = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, RingLayer):
            layer._restore_head()
        for name in layer._state_names():
            value = getattr(layer, name)
            if value is not None:
                tensors[f"{index}.{name}"] = value.contiguous()
        layers.append({"length": layer.length, "seen": layer.seen})
    if isinstance(cache._row_seen, Tensor):
        tensors["row_seen"] = cache._row_seen.contiguous()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".saving-", dir=target.parent))
    except OSError as error:
        raise CacheError(f"cannot write to {target.parent}: {error.strerror}") from error
    try:
        save_file(tensors, work / _TENSORS)
        facts = {
            "format": _FORMAT,
            "sha256": hashlib.sha256((work / _TENSORS).read_bytes()).hexdigest(),
            "model": fingerprint(cache._config),
            "weights": weights_digest(cache._model()),
            "given": _policy_facts(cache._given),
            "policy": _policy_facts(cache.policy),
            "asked": list(cache._asked),
            "positions": cache.positions,
            "evict_every": cache.evict_every,
            "seen": cache._seen,
            "row_seen": None if isinstance(cache._row_seen, Tensor) else cache._row_seen,
            "base": cache._base,
            "offset": cache._offset,
            "offsets": cache._offsets,
            "layers": layers,
        }
        (work / _FACTS).write_text(json.dumps(facts, indent=1))
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=".old-", dir=target.parent)) / "cache"
            target.rename(old)
            work.rename(target)
            shutil.rmtree(old.parent, ignore_errors=True)
        else:
            work.rename(target)
    except (OSError, SafetensorError) as error:
        raise CacheError(f"cannot write the cache to {target}: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def load(cls: type, folder: Any, model: Any) -> Any:
    """Read a cache written by `save`, for the same model.

    Raises:
        CacheError: a folder that is missing, truncated, foreign, newer, or of another model.
    """
    target = Path(folder)
    try:
        facts = json.loads((target / _FACTS).read_text())
        data = (target / _TENSORS).read_bytes()
    except (OSError, ValueError) as error:
        raise CacheError(f"{target} is no saved cache: {error}") from error
    found = facts.get("format") if isinstance(facts, dict) else None
    if found != _FORMAT:
        raise CacheError(
            f"{target}: format {found} is not {_FORMAT}; it is foreign or of another version"
        )
    if hashlib.sha256(data).hexdigest() != facts.get("sha256"):
        raise CacheError(f"{target}: the tensors are truncated or changed; they were not used")
    config = model.config.get_text_config(decoder=True)
    if facts.get("model") != fingerprint(config):
        raise CacheError(f"{target} was saved for another model than this {config.model_type}")
    try:
        tensors = load_file(target / _TENSORS)
        _check_dtype(target, tensors, model)
        if facts["weights"] not in (None, weights_digest(model)):
            raise CacheError(
                f"{target} was saved for another model than this {config.model_type}: same shapes, "
                "other weights"
            )
        positions, backend = facts["asked"]
        cache = cls(
            model,
            _policy(facts["given"]),
            positions=positions,
            backend=backend,
            evict_every=facts["evict_every"],
        )
        if cache.policy.has_shares:
            cache.policy = _policy(facts["policy"])
            cache._make_layers()
        device = model.get_input_embeddings().weight.device
        for index, (layer, known) in enumerate(zip(cache.layers, facts["layers"], strict=True)):
            _restore(layer, index, known, tensors, device)
        cache._seen, cache._base = facts["seen"], facts["base"]
        cache._offset = facts["offset"]
        cache._offsets = [tuple(pair) for pair in facts["offsets"]]
        row_seen = facts["row_seen"]
        cache._row_seen = tensors["row_seen"].to(device) if row_seen is None else row_seen
    except (KeyError, TypeError, ValueError, PolicyError, SafetensorError, RuntimeError) as error:
        raise CacheError(f"{target} is no complete saved cache: {error}") from error
    return cache


def _restore(
    layer: EvictionLayer, index: int, known: Any, tensors: dict[str, Tensor], device: Any
) -> None:
    layer.length, layer.seen = known["length"], known["seen"]
    for name in layer._state_names():
        value = tensors.get(f"{index}.{name}")
        # A copy: what safetensors hands out is not aligned, and kernels then round differently.
        setattr(layer, name, None if value is None else value.to(device, copy=True))
    if layer.keys is not None:
        layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
        layer.is_initialized = True


def fingerprint(config: Any) -> dict[str, Any]:
    """Return what two models must share for one's cache to fit the other."""
    names: tuple[str, ...] = (
        "model_type",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    names += ("hidden_size", "head_dim", "vocab_size")
    known = {name: getattr(config, name, None) for name in names}
    known["rope_parameters"] = getattr(config, "rope_parameters", None)
    return json.loads(json.dumps(known, default=str))  # type: ignore[no-any-return]


def weights_digest(model: Any) -> str | None:
    """Return a hash of every parameter's first values, None for a model that is gone."""
    if model is None:
        return None
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        local = getattr(parameter, "_local_tensor", parameter)  # of a tensor-parallel shard
        if not local.is_meta:
            first = local.detach().flatten()[:64].double().cpu()
            digest.update(name.encode() + first.numpy().tobytes())
    return digest.hexdigest()


def _check_dtype(target: Path, tensors: dict[str, Tensor], model: Any) -> None:
    wanted = model.get_input_embeddings().weight.dtype
    found = {t.dtype for name, t in tensors.items() if name.endswith((".keys", ".values"))}
    if found - {wanted}:
        kinds = ", ".join(sorted(str(dtype) for dtype in found))
        raise CacheError(f"{target} holds {kinds} and the model runs in {wanted}: load it in that")


def _policy_facts(policy: Any) -> dict[str, Any]:
    return {"name": policy.name, "settings": dataclasses.asdict(policy)}


def _policy(facts: dict[str, Any]) -> Any:
    return REGISTRY[facts["name"]](**facts["settings"])
