"""TOVA, SnapKV and one set a layer equal a slow loop in numpy."""

import copy
from typing import Any

import pytest
import torch

from kvevict import EvictionCache, Policy, patch
from kvevict.models import attention
from kvevict.policies import H2O, TOVA, SnapKV

CLOSE = 3e-3
FAR = 0.1
CHUNKINGS = {
    "token by token": None,
    "prompt then tokens": [40] + [1] * 20,
    "uneven": [1, 9, 1, 30, 1, 1, 1, 16],
}
# What the loop is told: which queries count, and from what scores start.
LAST: dict[str, Any] = {"voters": 1, "anew": "all"}
PROMPT: dict[str, Any] = {"voters": 6, "anew": "chunks", "silent": True}
CASES: dict[str, tuple[Policy, int, dict[str, Any]]] = {
    "tova": (TOVA(budget=12), 1, {"heavy": 12, "recent": 0, **LAST}),
    "tova, sinks": (TOVA(12, sinks=2), 1, {"heavy": 10, "recent": 0, "sinks": 2, **LAST}),
    "tova, layer": (
        TOVA(12, scope="layer"),
        1,
        {"heavy": 12, "recent": 0, "pooled": True, **LAST},
    ),
    "tova, every 4": (TOVA(12), 4, {"heavy": 12, "recent": 0, "evict_every": 4, **LAST}),
    "snapkv": (
        SnapKV(heavy=8, recent=5, window=6, kernel=3),
        1,
        {"heavy": 8, "recent": 5, "kernel": 3, **PROMPT},
    ),
    "snapkv, nothing pooled": (
        SnapKV(heavy=8, recent=5, window=6, kernel=1),
        1,
        {"heavy": 8, "recent": 5, **PROMPT},
    ),
    "snapkv, layer": (
        SnapKV(heavy=8, recent=5, window=6, scope="layer"),
        3,
        {"heavy": 8, "recent": 5, "kernel": 5, "pooled": True, "evict_every": 3, **PROMPT},
    ),
    "snapkv, repeat": (
        SnapKV(heavy=8, recent=5, window=6, kernel=3, repeat=True),
        1,
        {"heavy": 8, "recent": 5, "kernel": 3, "voters": 6, "anew": "all"},
    ),
    "snapkv, repeat, every 4": (
        SnapKV(heavy=8, recent=5, window=6, kernel=3, repeat=True),
        4,
        {"heavy": 8, "recent": 5, "kernel": 3, "voters": 6, "anew": "chunks"}
        | {"cleared": True, "evict_every": 4},
    ),
    "h2o, layer": (
        H2O(6, 6, sinks=1, decay=0.9, scope="layer"),
        1,
        {"heavy": 6, "recent": 6, "sinks": 1, "decay": 0.9, "pooled": True},
    ),
}


@pytest.mark.parametrize("held", [True, False], ids=["held at once", "summed by blocks"])
@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("name", CASES)
def test_a_policy_equals_the_slow_loop(
    monkeypatch: pytest.MonkeyPatch,
    tiny: Any,
    oracle: Any,
    draw: Any,
    feed: Any,
    kept: Any,
    difference: Any,
    name: str,
    chunking: str,
    held: bool,
) -> None:
    if not held:
        monkeypatch.setattr(attention, "_DIRECT", 0)
    policy, every, told = CASES[name]
    ids, forwards = draw(60, seed=4), CHUNKINGS[chunking]
    exact = oracle(tiny).h2o(ids, forwards=forwards, **told)
    with patch(tiny):
        cache = EvictionCache(tiny, policy, evict_every=every)
        logits = feed(tiny, cache, ids, forwards)
        assert kept(cache) == exact.kept
        for layer in range(len(cache.layers)):
            assert difference(cache.scores(layer)[0], exact.scores[layer]) < CLOSE
    assert difference(logits[0], exact.logits) < CLOSE


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("tova", {"voters": None}),
        ("tova", {"anew": ""}),
        ("tova", {"pooled": True}),
        ("snapkv", {"voters": 1}),
        ("snapkv", {"silent": False}),
        ("snapkv", {"kernel": 1}),
        ("snapkv, layer", {"pooled": False}),
        ("snapkv, repeat", {"silent": True}),
        ("snapkv, repeat, every 4", {"cleared": False}),
        ("h2o, layer", {"pooled": False}),
    ],
    ids=str,
)
def test_wrong_variants_differ_from_the_loop(
    tiny: Any, oracle: Any, draw: Any, difference: Any, name: str, wrong: dict[str, Any]
) -> None:
    told = CASES[name][2]
    ids, forwards = draw(60, seed=4), CHUNKINGS["prompt then tokens"]
    exact = oracle(tiny).h2o(ids, forwards=forwards, **told)
    other = oracle(tiny).h2o(ids, forwards=forwards, **{**told, **wrong})
    assert difference(exact.logits, other.logits) > FAR


@pytest.mark.parametrize("policy", ["tova:budget=9", "h2o:heavy=4,recent=5"])
@pytest.mark.parametrize("padded", [False, True])
def test_heads_of_a_layer_agree_exactly_if_they_are_told_to(
    tiny: Any, draw: Any, feed: Any, policy: str, padded: bool
) -> None:
    ids = torch.tensor([draw(40, seed=5), draw(40, seed=6)])
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :11] = 0
    agree: dict[str, bool] = {}
    with patch(tiny):
        for scope in ("head", "layer"):
            cache = EvictionCache(tiny, f"{policy},scope={scope}")
            feed(tiny, cache, ids, [25] + [1] * 15, mask)
            held = [cache.kept_positions(layer) for layer in range(len(cache.layers))]
            agree[scope] = all(torch.equal(x, x[:, :1].expand_as(x)) for x in held)
            assert all(int((x >= 0).sum(-1).max()) <= 9 for x in held)
    assert agree == {"head": False, "layer": True}


def test_a_padded_row_with_one_set_a_layer_is_as_the_row_alone(
    tiny: Any, draw: Any, feed: Any, kept: Any, difference: Any
) -> None:
    rows = torch.tensor([draw(40, seed=7), [0] * 11 + draw(29, seed=8)])
    mask = (rows > 0).long()
    with patch(tiny):
        both = EvictionCache(tiny, "tova:budget=9,scope=layer")
        logits = feed(tiny, both, rows, [25] + [1] * 15, mask)
        alone = EvictionCache(tiny, "tova:budget=9,scope=layer")
        expected = feed(tiny, alone, rows[1, 11:], [14] + [1] * 15)
    assert kept(both, 1) == kept(alone)
    assert difference(logits[1, 11:], expected[0]) < CLOSE


def test_a_copy_of_a_cache_goes_on_as_the_cache_itself(tiny: Any, draw: Any, feed: Any) -> None:
    with patch(tiny):
        cache = EvictionCache(tiny, "tova:budget=9,scope=layer")
        feed(tiny, cache, draw(30, seed=9), [20] + [1] * 10)
        other = copy.deepcopy(cache)
        more = draw(10, seed=10)
        assert torch.equal(feed(tiny, cache, more), feed(tiny, other, more))
