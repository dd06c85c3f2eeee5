"""The traces of the authors' own code, number by number; prefixes in the default run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvevict
from kvevict import EvictionCache, patch
from kvevict.policies import H2O, StreamingLLM

CLOSE = 1e-4  # of the traces' README, float32 on CPU
SCORE_CLOSE = 1e-3


@pytest.fixture(scope="module")
def twins() -> dict[int, Any]:
    return {}


def as_mha(model: Any, twins: dict[int, Any]) -> Any:
    """Return the mathematically identical model with one KV head a query head.

    H2O's code has no grouped queries; the traces were made on this twin (make_mha.py).
    """
    if id(model) not in twins:
        config = LlamaConfig(**{**model.config.to_dict(), "num_key_value_heads": 9})
        twin = LlamaForCausalLM(config).eval()
        weights = model.state_dict()
        for name, weight in weights.items():
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                heads = weight.view(3, 64, -1).repeat_interleave(3, 0)
                weights[name] = heads.reshape(-1, weight.shape[1])
        twin.load_state_dict(weights)
        twins[id(model)] = twin
    return twins[id(model)]


def losses(model: Any, cache: Any, feed: Any, ids: list[int], forwards: list[int]) -> torch.Tensor:
    """Return nll[i] of ids[i + 1] given ids[..i], for as many tokens as were fed."""
    n = sum(forwards)
    logits = feed(model, cache, ids[:n], forwards)[0]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1 : n + 1]), reduction="none")


def check_streaming(
    model: Any, golden: Any, ids: list[int], feed: Any, forwards: list[int]
) -> None:
    n = sum(forwards)
    wanted = torch.tensor(golden("streamingllm_4+252_n1200_nll")["nll"][:n])
    full = torch.tensor(golden("full_nll")["nll"][:n])
    with patch(model):
        cache = EvictionCache(model, StreamingLLM(sinks=4, window=252))
        got = losses(model, cache, feed, ids, forwards)
    assert (got - wanted).abs().max() < CLOSE
    assert (full - wanted).abs().max() > 0.05  # a full cache would not pass


TRACES: dict[str, tuple[str, H2O, str, list[int]]] = {
    "original positions": (
        "h2o_abs_64+64_prompt0_n600",
        H2O(heavy=64, recent=64),
        "original",
        [1] * 600,
    ),
    "original positions after a prompt": (
        "h2o_abs_64+64_prompt400_n600",
        H2O(heavy=64, recent=64),
        "original",
        [400] + [1] * 200,
    ),
    "positions inside the cache": (
        "h2o_roll_16+48_prompt0_n600",
        H2O(heavy=16, recent=48),
        "in_cache",
        [1] * 600,
    ),
}


def check_h2o(
    model: Any, golden: Any, ids: list[int], feed: Any, kept: Any, name: str, count: int
) -> None:
    trace, policy, positions, forwards = TRACES[name]
    forwards = forwards[: len(forwards) - (sum(forwards) - count)]
    wanted = torch.tensor(golden(f"{trace}_nll")["nll"][:count])
    with patch(model):
        cache = EvictionCache(model, policy, positions=positions)
        got = losses(model, cache, feed, ids, forwards)
        assert (got - wanted).abs().max() < CLOSE
        if count < 600:
            return
        facts = golden(f"{trace}_kept")
        ours = kept(cache)
        for layer, heads in facts["layers"].items():
            assert ours[int(layer)] == heads
            scores = torch.tensor(facts["scores"][layer])
            assert (cache.scores(int(layer))[0] - scores).abs().max() < SCORE_CLOSE
        assert [[sum(head) for head in layer] for layer in ours] == facts["pos_sum"]


def test_streaming_llm_follows_the_authors_trace_at_first(
    converted_model: Any, golden: Any, golden_ids: list[int], feed: Any
) -> None:
    check_streaming(converted_model, golden, golden_ids, feed, [60] * 5)


@pytest.mark.parametrize(
    ("name", "count"),
    [("positions inside the cache", 100), ("original positions after a prompt", 420)],
)
def test_h2o_follows_the_authors_trace_at_first(
    converted_model: Any,
    golden: Any,
    golden_ids: list[int],
    feed: Any,
    kept: Any,
    twins: dict[int, Any],
    name: str,
    count: int,
) -> None:
    model = as_mha(converted_model, twins)
    check_h2o(model, golden, golden_ids, feed, kept, name, count)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 64, 1200])
def test_streaming_llm_equals_the_authors_trace(
    small_model: Any, golden: Any, golden_ids: list[int], feed: Any, chunk: int
) -> None:
    forwards = [len(p) for p in torch.arange(1200).split(chunk)]
    check_streaming(small_model, golden, golden_ids, feed, forwards)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES)
def test_h2o_equals_the_authors_trace_and_keeps_the_same_tokens(
    small_model: Any,
    golden: Any,
    golden_ids: list[int],
    feed: Any,
    kept: Any,
    twins: dict[int, Any],
    name: str,
) -> None:
    check_h2o(as_mha(small_model, twins), golden, golden_ids, feed, kept, name, 600)


@pytest.mark.slow
def test_a_full_cache_equals_its_trace(
    small_model: Any, golden: Any, golden_ids: list[int], feed: Any
) -> None:
    with patch(small_model):
        cache = EvictionCache(small_model, "full")
        got = losses(small_model, cache, feed, golden_ids, [500] * 3)
    assert (got - torch.tensor(golden("full_nll")["nll"][:1500])).abs().max() < CLOSE


def test_positions_that_stall_at_the_caches_length_are_recognised_as_a_mistake(
    golden: Callable[[str], Any],
) -> None:
    right = golden("h2o_roll_16+48_prompt0_n600_nll")["nll"]
    wrong = golden("h2o_nopos_16+48_prompt0_n600_nll")["nll"]
    worst = max(abs(a - b) for a, b in zip(right[:100], wrong[:100], strict=True))
    assert worst > 100 * CLOSE  # already in the prefix that the default run compares


def test_the_text_of_the_traces_is_what_it_says(
    golden: Callable[[str], Any], golden_ids: list[int]
) -> None:
    assert len(golden_ids) == 3001
    assert golden("full_nll")["n"] == 3000
    assert kvevict.parse("h2o:heavy=64,recent=64") == TRACES["original positions"][1]
