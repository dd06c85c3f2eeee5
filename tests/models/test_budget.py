"""The budget is hard at every step, on every layer, row and head; bytes are those that exist."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvevict import EvictionCache, PolicyError, patch
from kvevict.models.planner import plan
from kvevict.policies import H2O, Full, Random, StreamingLLM, Window

BOUNDED = [
    StreamingLLM(3, 9),
    Window(12),
    H2O(6, 6),
    H2O(6, 4, sinks=2),
    Random(budget=12, recent=2),
]


@pytest.mark.parametrize("positions", ["original", "in_cache"])
@pytest.mark.parametrize("policy", BOUNDED, ids=str)
@pytest.mark.parametrize(
    "forwards",
    [[1] * 60, [50] + [1] * 10, [16] * 3 + [12], [1, 40, 1, 18]],
    ids=["1", "50", "16", "odd"],
)
def test_stored_tokens_never_exceed_the_budget_after_a_forward(
    toy: Any, draw: Any, policy: Any, positions: Any, forwards: list[int]
) -> None:
    ids = torch.tensor([draw(60, seed=1), draw(60, seed=2)])
    with patch(toy), torch.no_grad():
        cache = EvictionCache(toy, policy, positions=positions)
        start = 0
        for length in forwards:
            toy(ids[:, start : start + length], cache=cache)
            start += length
            for layer in range(3):
                held = cache.kept_positions(layer)
                assert held.shape[:2] == (2, 2)
                assert held.shape[2] == min(start, 12) == cache.capacity or start < 12
                assert (held >= 0).all()
                assert (held.diff(dim=-1) > 0).all()
            assert cache.seen == cache.get_seq_length() == start
            for layer in cache.layers:
                assert layer.keys.shape == layer.values.shape == (2, 2, 13, 16)


@pytest.mark.parametrize("evict_every", [1, 5])
def test_evict_every_is_the_only_excess(toy: Any, draw: Any, evict_every: int) -> None:
    ids, most = torch.tensor([draw(60)]), 0
    with patch(toy), torch.no_grad():
        cache = EvictionCache(toy, H2O(6, 6), evict_every=evict_every)
        for i in range(60):
            toy(ids[:, i : i + 1], cache=cache)
            held = cache.kept_positions(0).shape[2]
            most = max(most, held)
            assert held <= 12 + evict_every - 1
    assert most == 12 + evict_every - 1
    assert cache.layers[0].keys.shape[2] == 12 + evict_every


def test_padded_rows_keep_to_the_budget_each(toy: Any, draw: Any) -> None:
    ids = torch.tensor([draw(50, seed=1), [0] * 30 + draw(20, seed=2)])
    mask = torch.tensor([[1] * 50, [0] * 30 + [1] * 20])
    for policy in BOUNDED:
        with patch(toy), torch.no_grad():
            cache = EvictionCache(toy, policy)
            for i in range(0, 50, 5):
                toy(ids[:, i : i + 5], attention_mask=mask[:, : i + 5], cache=cache)
                held = (cache.kept_positions(2) >= 0).sum(-1) if i else torch.zeros(2, 2)
                real = mask[:, : i + 5].sum(-1, keepdim=True).expand(2, 2) if i else held
                assert torch.equal(held, real.clamp(max=12))


@pytest.mark.parametrize("policy", BOUNDED, ids=str)
def test_the_peak_of_a_chunk_is_budget_and_chunk(
    toy: Any, draw: Any, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attended = []
    kind = type(EvictionCache(toy, policy).layers[0])
    update = kind.update

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = update(self, *args, **kwargs)
        attended.append(keys.shape[2])
        return keys, values

    monkeypatch.setattr(kind, "update", watched)
    with patch(toy), torch.no_grad():
        cache = EvictionCache(toy, policy)
        for part in torch.tensor([draw(200)]).split(16, 1):
            toy(part, cache=cache)
    assert max(attended) <= 13 + 16  # the slots, one of them spare, and the chunk
    assert sum(layer._chunk is not None for layer in cache.layers) == 0


def test_nbytes_are_those_of_the_buffers_and_do_not_grow(toy: Any, draw: Any, feed: Any) -> None:
    slot = 2 * 2 * 16 * 4  # keys and values, heads, dims, float32
    for policy in BOUNDED:
        with patch(toy):
            cache = EvictionCache(toy, policy)
            assert cache.nbytes() == 0
            feed(toy, cache, draw(30), [30])
            assert cache.nbytes() == 3 * 13 * slot
            feed(toy, cache, draw(100))
            assert cache.nbytes() == 3 * 13 * slot


def test_buffers_are_per_kv_head_not_per_query_head(make_tiny: Any, draw: Any, feed: Any) -> None:
    model = make_tiny(0, num_attention_heads=8, num_key_value_heads=1, head_dim=16)
    with patch(model):
        cache = EvictionCache(model, H2O(6, 6))
        feed(model, cache, draw(30))
    assert cache.layers[0].keys.shape == (1, 1, 13, 16)
    assert cache.kept_positions(0).shape == (1, 1, 12)


def test_an_evicting_cache_is_really_smaller_than_a_plain_one(
    toy: Any, draw: Any, feed: Any
) -> None:
    ids, plain = draw(100), DynamicCache()
    feed(toy, plain, ids, [100])
    full = sum(x.keys.nbytes + x.values.nbytes for x in plain.layers)
    with patch(toy):
        cache = EvictionCache(toy, H2O(6, 6))
        feed(toy, cache, ids, [100])
    real = sum(
        x.keys.untyped_storage().nbytes() + x.values.untyped_storage().nbytes()
        for x in cache.layers
    )
    assert cache.nbytes() == real < 0.15 * full


@pytest.mark.parametrize("chunk", [5, 16, 64])
@pytest.mark.parametrize("policy", BOUNDED, ids=str)
def test_chunked_prefill_of_generate_keeps_the_budget(
    toy: Any, draw: Any, policy: Any, chunk: int, kept: Any, feed: Any
) -> None:
    prompt = draw(60)
    with patch(toy):
        cache = EvictionCache(toy, policy)
        out = toy.generate(
            torch.tensor([prompt]),
            cache=cache,
            prefill_chunk_size=chunk,
            max_new_tokens=10,
            do_sample=False,
        )
        assert cache.seen == 69
        assert all(len(head) == 12 for layer in kept(cache) for head in layer)
        own = EvictionCache(toy, policy)
        pieces = [len(p) for p in torch.arange(60).split(chunk)]
        logits = feed(toy, own, out[0, :-1].tolist(), pieces + [1] * 9)
        assert kept(own) == kept(cache)
        assert logits[0, 59:].argmax(-1).tolist() == out[0, 60:].tolist()


def test_full_policy_has_no_capacity_and_grows(toy: Any, draw: Any, feed: Any, kept: Any) -> None:
    with patch(toy):
        cache = EvictionCache(toy, Full())
        feed(toy, cache, draw(600), [300, 300])
        assert cache.capacity is None
        assert kept(cache)[0][0] == list(range(600))
        assert cache.layers[0].keys.shape[2] >= 600


class TestShares:
    """A share is of the prompt, fixed once its length is known."""

    def test_generate_turns_a_share_into_tokens_of_the_prompt(
        self, toy: Any, draw: Any, feed: Any, kept: Any
    ) -> None:
        prompt = draw(50)
        with patch(toy, "h2o:heavy=20%,recent=10%"):
            shared = toy.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
        with patch(toy, H2O(heavy=10, recent=5)):
            fixed = toy.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
        assert torch.equal(shared, fixed)
        with patch(toy, H2O(heavy="40%", recent="10%")):
            other = toy.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
        assert not torch.equal(other, fixed)

    def test_a_cache_of_ones_own_gets_its_share_resolved(self, toy: Any, draw: Any) -> None:
        with patch(toy, "full"):
            cache = EvictionCache(toy, H2O(heavy="20%", recent="20%"))
            toy.generate(torch.tensor([draw(40)]), cache=cache, max_new_tokens=5, do_sample=False)
        assert cache.capacity == 16
        assert cache.kept_positions(0).shape[2] == 16

    def test_it_counts_the_longest_rows_tokens_without_pads(self, toy: Any, draw: Any) -> None:
        ids = torch.tensor([[0] * 20 + draw(30), [0] * 30 + draw(20)])
        mask = (ids != 0).long()
        with patch(toy, "full"):
            cache = EvictionCache(toy, H2O(heavy="20%", recent="20%"))
            toy.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=5, do_sample=False)
        assert cache.capacity == 12

    def test_it_stays_fixed_in_turn_two_and_is_open_again_after_reset(
        self, toy: Any, draw: Any
    ) -> None:
        with patch(toy, "full"):
            cache = EvictionCache(toy, H2O(heavy="20%", recent="20%"))
            out = toy.generate(torch.tensor([draw(40)]), cache=cache, max_new_tokens=5)
            longer = torch.cat([out, torch.tensor([draw(50)])], 1)
            toy.generate(longer, cache=cache, max_new_tokens=5)
            assert cache.capacity == 16
            cache.reset()
            toy.generate(torch.tensor([draw(20)]), cache=cache, max_new_tokens=5)
            assert cache.capacity == 8

    def test_without_a_length_it_is_an_error_with_the_remedy(self, toy: Any, draw: Any) -> None:
        with patch(toy), pytest.raises(PolicyError, match="prompt"):
            toy(torch.tensor([draw(10)]), cache=EvictionCache(toy, H2O("20%", "20%")))

    def test_a_share_that_keeps_nothing_is_an_error(self, toy: Any, draw: Any) -> None:
        with patch(toy, H2O("10%", "10%")), pytest.raises(PolicyError, match="keeps nothing"):
            toy.generate(torch.tensor([draw(4)]), max_new_tokens=5)


@pytest.mark.parametrize("policy", [*BOUNDED, Full()], ids=str)
@pytest.mark.parametrize("evict_every", [1, 4])
def test_the_planner_counts_exactly_the_bytes_that_exist(
    toy: Any, draw: Any, feed: Any, policy: Any, evict_every: int
) -> None:
    with patch(toy):
        cache = EvictionCache(toy, policy, evict_every=evict_every)
        feed(toy, cache, [draw(60, seed=i) for i in range(2)], [60])
    row = plan(toy.config, policy, 60, batch=2, dtype="float32", evict_every=evict_every)
    assert row["cache_bytes"] == sum(row["layers"]) == cache.nbytes()
