"""Random policies, chunkings, pads and reorders against the oracles: what no list thought of."""

from typing import Any

import numpy as np
import pytest
import torch

from kvevict import EvictionCache, patch
from kvevict.policies import H2O, StreamingLLM

CLOSE = 3e-3


def scenario(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    columns, rows = int(rng.integers(20, 70)), int(rng.integers(1, 4))
    forwards: list[int] = []
    while sum(forwards) < columns:
        forwards.append(int(rng.choice([1, 1, 1, 1, 2, 3, 7, 12, 30])))
    forwards[-1] -= sum(forwards) - columns
    mask = np.ones((rows, columns), dtype=np.int64)
    if rows > 1:
        for row in range(1, rows):
            mask[row, : rng.integers(0, columns - 2)] = 0  # left padding
            if rng.random() < 0.4:
                at = int(rng.integers(0, columns - 1))
                mask[row, at : at + int(rng.integers(1, 6))] = 0  # and a gap, as between turns
                mask[row, -1] = 1
    ids = rng.integers(1, 97, (rows, columns)) * mask
    return {
        "ids": torch.as_tensor(ids),
        "mask": torch.as_tensor(mask),
        "forwards": forwards,
        "in_cache": bool(rng.random() < 0.5),
        "sinks": int(rng.integers(0, 4)),
        "recent": int(rng.integers(1, 8)),
        "heavy": int(rng.integers(1, 8)),
        "evict_every": int(rng.choice([1, 1, 2, 5])),
        "rebase": int(rng.choice([25, 4096])),
    }


def reals(case: dict[str, Any], row: int) -> tuple[list[int], list[int]]:
    """Return a row's tokens, and how many of them each forward brought."""
    mask = case["mask"][row].bool()
    counts = [int(part.sum()) for part in mask.split(case["forwards"])]
    return case["ids"][row][mask].tolist(), [n for n in counts if n]


@pytest.mark.parametrize("seed", range(24))
def test_any_feeding_of_streaming_llm_equals_the_oracle(
    make_tiny: Any, oracle: Any, feed: Any, difference: Any, kept: Any, seed: int, monkeypatch: Any
) -> None:
    case, model = scenario(seed), make_tiny(seed % 4, num_hidden_layers=2)
    monkeypatch.setattr("kvevict.forward._REBASE_AT", case["rebase"])
    policy = StreamingLLM(case["sinks"], case["recent"])
    positions = "in_cache" if case["in_cache"] else "original"
    with patch(model):
        cache = EvictionCache(model, policy, positions=positions)
        logits = feed(model, cache, case["ids"], case["forwards"], case["mask"])
    for row in range(len(case["ids"])):
        ids, _ = reals(case, row)
        exact = oracle(model).streaming(ids, policy.sinks, policy.window, case["in_cache"])
        assert difference(logits[row][case["mask"][row].bool()], exact) < CLOSE, case
        held = [p for p in range(len(ids)) if p < policy.sinks or p >= len(ids) - policy.window]
        assert kept(cache, row) == [[held] * 2] * 2


@pytest.mark.parametrize("seed", range(100, 124))
def test_any_feeding_of_h2o_equals_the_oracle(
    make_tiny: Any, oracle: Any, feed: Any, difference: Any, kept: Any, seed: int
) -> None:
    case, model = scenario(seed), make_tiny(seed % 4, num_hidden_layers=2)
    settings = {"sinks": case["sinks"]}
    positions = "in_cache" if case["in_cache"] else "original"
    with patch(model):
        cache = EvictionCache(
            model,
            H2O(case["heavy"], case["recent"], **settings),
            positions=positions,
            evict_every=case["evict_every"],
        )
        logits = feed(model, cache, case["ids"], case["forwards"], case["mask"])
    for row in range(len(case["ids"])):
        ids, forwards = reals(case, row)
        exact = oracle(model).h2o(
            ids,
            case["heavy"],
            case["recent"],
            forwards=forwards,
            in_cache=case["in_cache"],
            evict_every=case["evict_every"],
            **settings,
        )
        assert difference(logits[row][case["mask"][row].bool()], exact.logits) < CLOSE, case
        assert kept(cache, row) == exact.kept, case
