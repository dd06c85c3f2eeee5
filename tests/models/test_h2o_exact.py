"""H2O equals a slow loop in numpy: attend, accumulate every query, evict; per row and KV head."""

from typing import Any, ClassVar

import pytest
import torch

from kvevict import CacheError, EvictionCache, PolicyError, patch
from kvevict.models import attention
from kvevict.policies import H2O, Random
from kvevict.policy import REGISTRY

CLOSE = 3e-3
FAR = 0.3
CHUNKINGS = {
    "token by token": None,
    "prompt then tokens": [40] + [1] * 20,
    "chunks": [8] * 7 + [4],
    "uneven": [1, 9, 1, 30, 1, 1, 1, 16],
    "one forward": [60],
}


@pytest.mark.parametrize("held", [True, False], ids=["held at once", "summed by blocks"])
@pytest.mark.parametrize("positions", ["original", "in_cache"])
@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_h2o_equals_a_slow_loop(
    monkeypatch: pytest.MonkeyPatch,
    tiny: Any,
    oracle: Any,
    draw: Any,
    feed: Any,
    kept: Any,
    difference: Any,
    chunking: str,
    positions: Any,
    held: bool,
) -> None:
    if not held:
        monkeypatch.setattr(attention, "_DIRECT", 0)
    ids, forwards = draw(60), CHUNKINGS[chunking]
    exact = oracle(tiny).h2o(ids, 6, 6, forwards=forwards, in_cache=positions == "in_cache")
    with patch(tiny):
        cache = EvictionCache(tiny, H2O(heavy=6, recent=6), positions=positions)
        logits = feed(tiny, cache, ids, forwards)
        assert kept(cache) == exact.kept
        for layer in range(len(cache.layers)):
            assert difference(cache.scores(layer)[0], exact.scores[layer]) < CLOSE
    assert difference(logits[0], exact.logits) < CLOSE


def test_wrong_variants_of_h2o_differ_from_the_loop(
    tiny: Any, oracle: Any, draw: Any, difference: Any
) -> None:
    ids, reference = draw(60), oracle(tiny)
    exact = reference.h2o(ids, 6, 6)
    for wrong in (
        {"counted": "now"},  # the last query only, as a peer's "H2O" does
        {"counted": "others"},  # a token's own weight left out
        {"early": True},  # evicted before attention
        {"pooled": True},  # one score for all heads
        {"in_cache": True},
        {"age": True},
        {"decay": 0.8},
        {"sinks": 1},
    ):
        assert difference(exact.logits, reference.h2o(ids, 6, 6, **wrong).logits) > FAR, wrong


def test_a_prompt_in_one_forward_counts_all_its_queries(
    tiny: Any, oracle: Any, draw: Any, difference: Any
) -> None:
    ids, forwards = draw(60), [40] + [1] * 20
    exact = oracle(tiny).h2o(ids, 6, 6, forwards=forwards)
    wrong = oracle(tiny).h2o(ids, 6, 6, forwards=forwards, counted="last")
    assert difference(exact.logits, wrong.logits) > FAR


def test_a_cache_that_scores_the_last_query_only_differs_from_the_loop(
    tiny: Any, oracle: Any, draw: Any, feed: Any, kept: Any, difference: Any
) -> None:
    class LastQuery(H2O):
        scores = "last"

    ids, forwards = draw(60), [40] + [1] * 20
    exact = oracle(tiny).h2o(ids, 6, 6, forwards=forwards)
    with patch(tiny):
        cache = EvictionCache(tiny, LastQuery(heavy=6, recent=6))
        logits = feed(tiny, cache, ids, forwards)
    assert difference(logits[0], exact.logits) > FAR
    assert kept(cache) != exact.kept
    assert REGISTRY["h2o"] is H2O


@pytest.mark.parametrize("forwards", [None, [25] + [1] * 20, [9] * 5], ids=["1", "prompt", "9"])
@pytest.mark.parametrize("sizes", [(1, 4), (5, 0), (3, 1), (1, 1), (12, 3)], ids=str)
def test_any_split_of_the_budget_is_exact(
    toy: Any,
    oracle: Any,
    draw: Any,
    feed: Any,
    kept: Any,
    difference: Any,
    sizes: Any,
    forwards: Any,
) -> None:
    ids = draw(45, seed=1)
    exact = oracle(toy).h2o(ids, *sizes, forwards=forwards)
    with patch(toy):
        cache = EvictionCache(toy, H2O(*sizes))
        logits = feed(toy, cache, ids, forwards)
        assert kept(cache) == exact.kept
    assert difference(logits[0], exact.logits) < CLOSE


class TestDepartures:
    """Sinks, age, decay and evict_every: named, off by default, and exact where used."""

    SETTINGS: ClassVar[dict[str, dict[str, Any]]] = {
        "sinks": {"sinks": 3},
        "age": {"age": True},
        "decay": {"decay": 0.9},
        "all": {"sinks": 2, "age": True, "decay": 0.95},
    }

    @pytest.mark.parametrize(
        "forwards", [None, [30] + [1] * 20, [10] * 5], ids=["1", "prompt", "10"]
    )
    @pytest.mark.parametrize("name", SETTINGS)
    def test_sinks_age_and_decay_equal_the_loop(
        self,
        toy: Any,
        oracle: Any,
        draw: Any,
        feed: Any,
        kept: Any,
        difference: Any,
        name: str,
        forwards: Any,
    ) -> None:
        ids, used = draw(50, seed=2), self.SETTINGS[name]
        exact = oracle(toy).h2o(ids, 5, 5, forwards=forwards, **used)
        policy = H2O(
            heavy=5,
            recent=5,
            sinks=used.get("sinks", 0),
            normalize="age" if used.get("age") else "none",
            decay=used.get("decay", 1.0),
        )
        with patch(toy):
            cache = EvictionCache(toy, policy)
            logits = feed(toy, cache, ids, forwards)
            assert kept(cache) == exact.kept
        assert difference(logits[0], exact.logits) < CLOSE
        assert policy.departures()

    @pytest.mark.parametrize("evict_every", [2, 4, 7])
    @pytest.mark.parametrize(
        "forwards", [None, [30] + [1] * 20, [10] * 5], ids=["1", "prompt", "10"]
    )
    def test_evict_every_exceeds_the_budget_by_that_much_only(
        self,
        toy: Any,
        oracle: Any,
        draw: Any,
        feed: Any,
        kept: Any,
        difference: Any,
        evict_every: int,
        forwards: Any,
    ) -> None:
        ids = draw(50, seed=3)
        exact = oracle(toy).h2o(ids, 5, 5, forwards=forwards, evict_every=evict_every)
        with patch(toy):
            cache = EvictionCache(toy, H2O(5, 5), evict_every=evict_every)
            logits = feed(toy, cache, ids, forwards)
            assert kept(cache) == exact.kept
        assert exact.most <= 10 + evict_every - 1
        assert difference(logits[0], exact.logits) < CLOSE

    def test_the_default_departs_in_nothing(self) -> None:
        assert H2O().departures() == {}

    @pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
    def test_evict_every_must_be_a_count(self, toy: Any, value: Any) -> None:
        with pytest.raises(PolicyError, match="evict_every"):
            EvictionCache(toy, H2O(4, 4), evict_every=value)


def test_uniform_attention_keeps_the_oldest_for_ever_under_plain_sums(
    make_tiny: Any, draw: Any, feed: Any, kept: Any
) -> None:
    # Keys of zero attend evenly. It is the authors' behaviour; age and decay are the remedies.
    model = make_tiny(0, num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.zero_()
    with patch(model):
        cache = EvictionCache(model, H2O(8, 4))
        feed(model, cache, draw(40))
    assert kept(cache)[0][0] == [*range(8), *range(36, 40)]


def test_age_lets_a_newer_heavy_hitter_in(toy: Any, draw: Any, feed: Any, kept: Any) -> None:
    def mean_age(policy: H2O) -> float:
        with patch(toy):
            cache = EvictionCache(toy, policy)
            feed(toy, cache, draw(120, seed=8), [120])
        positions = [p for layer in kept(cache) for head in layer for p in head]
        return 120 - sum(positions) / len(positions)

    assert mean_age(H2O(16, 4, normalize="age")) < mean_age(H2O(16, 4)) - 5


def test_scores_stay_float32_in_a_half_precision_model(
    make_tiny: Any, draw: Any, feed: Any, oracle: Any, difference: Any
) -> None:
    # In bfloat16 a sum stalls at 256 and most scores tie.
    model = make_tiny(0, num_hidden_layers=1).to(torch.bfloat16)
    ids = draw(700, seed=5)
    with patch(model):
        cache = EvictionCache(model, H2O(16, 700))
        feed(model, cache, ids, [700])
        scores = cache.scores(0)
    assert scores.dtype == torch.float32
    total = 700 * 4  # every query of every head gives 1
    assert scores.sum().item() == pytest.approx(total, rel=2e-3)
    assert scores[0, 0].unique().numel() > 0.9 * 700


@pytest.mark.parametrize(
    "forwards", [None, [30] + [1] * 30, [7] * 8 + [4]], ids=["1", "prompt", "7"]
)
def test_random_keeps_the_same_sample_for_any_chunking(
    toy: Any, draw: Any, feed: Any, kept: Any, forwards: Any
) -> None:
    ids = draw(60)
    with patch(toy):
        cache = EvictionCache(toy, Random(budget=12, sinks=2, recent=3, seed=7))
        feed(toy, cache, ids, forwards)
        whole = EvictionCache(toy, Random(budget=12, sinks=2, recent=3, seed=7))
        feed(toy, whole, ids, [60])
        other = EvictionCache(toy, Random(budget=12, sinks=2, recent=3, seed=8))
        feed(toy, other, ids, [60])
    assert kept(cache) == kept(whole) != kept(other)
    assert len(kept(cache)[0][0]) == 12
    assert {0, 1, 57, 58, 59} <= set(kept(cache)[0][0])


def test_policies_without_scores_say_so(toy: Any, draw: Any, feed: Any) -> None:
    with patch(toy):
        for text in ("streaming_llm:sinks=2,window=4", "full", "random:budget=6"):
            cache = EvictionCache(toy, text)
            feed(toy, cache, draw(10))
            with pytest.raises(CacheError, match="scores"):
                cache.scores(0)


def test_h2o_without_heavy_part_is_a_window_and_has_no_scores_to_show(
    toy: Any, draw: Any, feed: Any, kept: Any
) -> None:
    with patch(toy):
        cache = EvictionCache(toy, H2O(heavy=0, recent=6))
        feed(toy, cache, draw(20))
        assert kept(cache)[0][0] == list(range(14, 20))
        with pytest.raises(CacheError, match="scores"):
            cache.scores(0)
