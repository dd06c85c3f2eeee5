"""StreamingLLM and Window equal a brute-force mask with all keys turned at every step."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvevict import EvictionCache, patch
from kvevict.policies import StreamingLLM, Window

CLOSE = 2e-3  # float32 against float64; logits have a scale of about 15, wrong variants exceed 1
FAR = 0.5
CHUNKINGS = {
    "token by token": None,
    "one forward": [70],
    "chunks of 7": [7] * 10,
    "uneven": [1, 30, 1, 1, 5, 20, 12],
    "first shorter than the head": [2, 1, 3, 64],
}


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_streaming_llm_equals_rotating_every_key_at_every_step(
    tiny: Any, oracle: Any, draw: Any, feed: Any, difference: Any, chunking: str
) -> None:
    ids = draw(70)
    with patch(tiny):
        cache = EvictionCache(tiny, StreamingLLM(sinks=4, window=12))
        logits = feed(tiny, cache, ids, CHUNKINGS[chunking])
    assert cache.positions == "in_cache"
    assert difference(logits[0], oracle(tiny).streaming(ids, 4, 12)) < CLOSE


def test_the_comparison_tells_wrong_variants_apart(
    tiny: Any, oracle: Any, draw: Any, difference: Any
) -> None:
    ids = draw(70)
    exact = oracle(tiny).streaming(ids, 4, 12)
    assert difference(exact, oracle(tiny).streaming(ids, 4, 12, early=True)) > FAR
    assert difference(exact, oracle(tiny).streaming(ids, 4, 12, in_cache=False)) > FAR
    assert difference(exact, oracle(tiny).streaming(ids, 4, 11)) > FAR
    assert difference(exact, oracle(tiny).streaming(ids, 0, 16)) > FAR
    assert difference(exact, oracle(tiny).full(ids)) > FAR


@pytest.mark.parametrize("forwards", [[70], None, [7] * 10], ids=["one forward", "steps", "chunks"])
def test_a_cache_that_turns_the_head_one_position_short_differs_from_the_oracle(
    toy: Any,
    oracle: Any,
    draw: Any,
    feed: Any,
    difference: Any,
    monkeypatch: pytest.MonkeyPatch,
    forwards: list[int] | None,
) -> None:
    # S + W - 1 is what evicting before attention would give: the easy mistake.
    from kvevict import ring
    from kvevict.models import attention

    right = ring.head_shift

    def short(start: Any, base: int, head: int, window: int | None) -> Any:
        return right(start, base, head, None if window is None else window - 1)

    monkeypatch.setattr(ring, "head_shift", short)
    monkeypatch.setattr(attention, "head_shift", short)
    ids = draw(70)
    with patch(toy):
        logits = feed(toy, EvictionCache(toy, StreamingLLM(4, 12)), ids, forwards)
    assert difference(logits[0], oracle(toy).streaming(ids, 4, 12)) > 0.05


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_streaming_llm_with_original_positions_equals_a_mask(
    tiny: Any, oracle: Any, draw: Any, feed: Any, difference: Any, chunking: str
) -> None:
    ids = draw(70, seed=1)
    with patch(tiny):
        cache = EvictionCache(tiny, StreamingLLM(sinks=3, window=9), positions="original")
        logits = feed(tiny, cache, ids, CHUNKINGS[chunking])
    assert difference(logits[0], oracle(tiny).streaming(ids, 3, 9, in_cache=False)) < CLOSE


@pytest.mark.parametrize("positions", ["in_cache", "original"])
@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_window_equals_a_band_without_head(
    toy: Any, oracle: Any, draw: Any, feed: Any, difference: Any, chunking: str, positions: Any
) -> None:
    ids = draw(70, seed=2)
    with patch(toy):
        cache = EvictionCache(toy, Window(window=10), positions=positions)
        logits = feed(toy, cache, ids, CHUNKINGS[chunking])
    assert difference(logits[0], oracle(toy).streaming(ids, 0, 10)) < CLOSE


@pytest.mark.parametrize("sinks", [1, 2, 5])
@pytest.mark.parametrize("window", [1, 2, 9])
def test_any_sinks_and_window_are_exact(
    toy: Any, oracle: Any, draw: Any, feed: Any, difference: Any, sinks: int, window: int
) -> None:
    ids = draw(40, seed=3)
    exact = oracle(toy).streaming(ids, sinks, window)
    for forwards in (None, [40], [3, 1, 20, 1, 1, 14]):
        with patch(toy):
            logits = feed(toy, EvictionCache(toy, StreamingLLM(sinks, window)), ids, forwards)
        assert difference(logits[0], exact) < CLOSE


def test_a_chunk_longer_than_a_block_of_queries_is_exact(
    make_tiny: Any, oracle: Any, draw: Any, feed: Any, difference: Any
) -> None:
    model = make_tiny(1, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    ids = draw(560, seed=4)
    exact = oracle(model).streaming(ids, 4, 30)
    for forwards in ([560], [10, 550], [300, 260]):
        with patch(model):
            logits = feed(model, EvictionCache(model, StreamingLLM(4, 30)), ids, forwards)
        assert difference(logits[0], exact) < CLOSE


ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_scaled_rope_is_turned_without_its_scale(
    make_tiny: Any, oracle: Any, draw: Any, feed: Any, difference: Any, rope: str
) -> None:
    model = make_tiny(2, rope_parameters=ROPES[rope], max_position_embeddings=512)
    ids = draw(60, seed=5)
    exact = oracle(model).streaming(ids, 4, 12)
    for forwards in (None, [60], [7] * 8 + [4]):
        with patch(model):
            logits = feed(model, EvictionCache(model, StreamingLLM(4, 12)), ids, forwards)
        assert difference(logits[0], exact) < CLOSE


def test_reference_equals_transformers_itself(
    tiny: Any, oracle: Any, draw: Any, feed: Any, difference: Any
) -> None:
    ids = draw(50)
    assert difference(feed(tiny, DynamicCache(), ids, [50])[0], oracle(tiny).full(ids)) < CLOSE


def test_half_precision_stays_near_the_exact_result(make_tiny: Any, draw: Any, feed: Any) -> None:
    # The head is turned from an untouched copy: bfloat16 must not drift over many steps.
    model = make_tiny(0, initializer_range=0.1)
    ids = draw(300, seed=6)
    with patch(model):
        exact = feed(model, EvictionCache(model, StreamingLLM(4, 20)), ids)
    model = model.to(torch.bfloat16)
    with patch(model):
        rough = feed(model, EvictionCache(model, StreamingLLM(4, 20)), ids).float()
    error = (rough - exact).abs().amax(-1)[0]
    assert error[-50:].mean() < 2 * error[30:80].mean()
