"""The oracles, and the one way in which the tests of this room feed a model."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvevict import EvictionCache
from kvevict.models.releases import cache_argument


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The module of the oracles."""
    return beside("reference")


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    """Return a tokenizer with one token a byte and the ChatML template."""
    spans = beside("test_spans")
    return spans.tokenizer_of(spans.CHATML)


def beside(name: str) -> ModuleType:
    """Load a module of this folder by path: tests are not a package."""
    spec = importlib.util.spec_from_file_location(
        f"kvevict_tests_{name}", Path(__file__).with_name(f"{name}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def oracle(reference: ModuleType) -> Callable[[Any], Any]:
    """Return a maker of the oracle of a model."""
    return reference.Reference


@pytest.fixture(scope="session")
def draw() -> Callable[..., list[int]]:
    """Return a maker of token ids, never 0 (the pad)."""

    def make(length: int, seed: int = 0, vocab: int = 97) -> list[int]:
        return np.random.default_rng(seed).integers(1, vocab, length).tolist()

    return make


@pytest.fixture(scope="session")
def feed() -> Callable[..., Tensor]:
    """Return a function that feeds ids `[n]` or `[B, n]` and returns all logits `[B, n, V]`.

    `forwards` are the lengths of the forwards; one token each when None. `mask` is the 2D mask of
    all columns.
    """

    def run(
        model: Any,
        cache: Any,
        ids: Any,
        forwards: list[int] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        ids = torch.as_tensor(ids)
        ids = ids[None] if ids.ndim == 1 else ids
        outs, start, before = [], 0, 0
        if isinstance(cache, EvictionCache):
            before = cache.seen
        with torch.no_grad():
            for length in forwards or [1] * ids.shape[1]:
                stop = start + length
                given = {} if mask is None else {"attention_mask": mask[:, : before + stop]}
                given[cache_argument(model)] = cache
                outs.append(model(ids[:, start:stop], **given).logits)
                start = stop
        assert start == ids.shape[1]
        return torch.cat(outs, 1)

    return run


@pytest.fixture(scope="session")
def kept() -> Callable[[EvictionCache], list[list[list[int]]]]:
    """Return a reader of what a cache of one row holds: `[layer][KV head]` lists."""

    def read(cache: EvictionCache, row: int = 0) -> list[list[list[int]]]:
        return [
            [[p for p in head if p >= 0] for head in cache.kept_positions(layer)[row].tolist()]
            for layer in range(len(cache.layers))
        ]

    return read


@pytest.fixture(scope="session")
def difference() -> Callable[[Any, Any], float]:
    """Return the largest difference of two arrays as a float."""

    def largest(a: Any, b: Any) -> float:
        a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
        assert a.shape == b.shape
        return float(np.abs(a - b).max())

    return largest
