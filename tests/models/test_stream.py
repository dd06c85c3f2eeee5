"""stream(): endless tokens in constant memory; positions bounded, and shifted on request."""

import gc
import itertools
import math
import time
from typing import Any

import pytest
import torch

import kvevict
from kvevict import CacheError, EvictionCache, PolicyError, UnsupportedModelError, patch
from kvevict.policies import H2O, Random, StreamingLLM, Window

CLOSE = 2e-3
POLICIES = [StreamingLLM(3, 9), Window(12), H2O(6, 6)]


def nlls(steps: Any) -> torch.Tensor:
    return torch.cat([step.nll for step in steps])


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_a_stream_gives_the_losses_of_its_own_forwards(
    toy: Any, draw: Any, feed: Any, kept: Any, policy: Any, chunk: int
) -> None:
    ids = draw(80)
    pieces = [len(p) for p in torch.arange(80).split(chunk)]
    with patch(toy):
        cache = EvictionCache(toy, policy)
        steps = list(kvevict.stream(toy, ids, cache, chunk=chunk, logits=True))
        own = EvictionCache(toy, policy)
        logits = feed(toy, own, ids, pieces)[0]
        assert kept(own) == kept(cache)
    assert [s.start for s in steps] == [sum(pieces[:i]) for i in range(len(pieces))]
    assert [len(s.nll) for s in steps] == pieces
    exact = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    got = nlls(steps)
    assert got.dtype == torch.float32
    assert math.isnan(got[0])
    torch.testing.assert_close(got[1:], exact, atol=CLOSE, rtol=0)
    torch.testing.assert_close(torch.cat([s.logits for s in steps]), logits, atol=CLOSE, rtol=0)


def test_only_the_first_loss_of_a_call_is_unknown(toy: Any, draw: Any) -> None:
    ids = draw(60)
    with patch(toy):
        cache = EvictionCache(toy, StreamingLLM(3, 9))
        whole = nlls(kvevict.stream(toy, ids, EvictionCache(toy, StreamingLLM(3, 9)), chunk=9))
        first = nlls(kvevict.stream(toy, ids[:31], cache, chunk=9))
        second = list(kvevict.stream(toy, ids[31:], cache, chunk=9))
    assert torch.isnan(whole).nonzero().flatten().tolist() == [0]
    assert torch.isnan(nlls(second)).nonzero().flatten().tolist() == [0]
    assert second[0].start == 31
    torch.testing.assert_close(first[1:], whole[1:31], atol=CLOSE, rtol=0)
    torch.testing.assert_close(nlls(second)[1:], whole[32:], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 5, 16, 33, 200])
def test_the_chunk_never_changes_streaming_llm(toy: Any, draw: Any, chunk: int) -> None:
    ids = draw(200)
    for policy in (StreamingLLM(3, 9), Window(12), StreamingLLM(0, 12)):
        with patch(toy):
            runs = [
                nlls(kvevict.stream(toy, ids, EvictionCache(toy, policy), chunk=c))[1:]
                for c in (chunk, 11)
            ]
        torch.testing.assert_close(*runs, atol=CLOSE, rtol=0)


def test_the_chunk_is_a_setting_of_h2o(toy: Any, draw: Any) -> None:
    ids = draw(200)
    with patch(toy):
        runs = [
            nlls(kvevict.stream(toy, ids, EvictionCache(toy, H2O(6, 6)), chunk=c))[1:]
            for c in (1, 50)
        ]
    assert (runs[0] - runs[1]).abs().max() > 0.1


def test_tokens_come_as_lists_tensors_and_iterators_without_end(toy: Any, draw: Any) -> None:
    ids = draw(50)
    with patch(toy):
        runs = []
        for tokens in (ids, tuple(ids), torch.tensor(ids), torch.tensor([ids]), iter(ids)):
            cache = EvictionCache(toy, StreamingLLM(3, 9))
            runs.append(nlls(kvevict.stream(toy, tokens, cache, chunk=8))[1:])
            assert cache.seen == 50
        assert all(torch.equal(r, runs[0]) for r in runs)
        pulled = itertools.count(1)
        endless = kvevict.stream(
            toy, (i % 97 for i in pulled), EvictionCache(toy, StreamingLLM(3, 9)), chunk=8
        )
        for _ in range(3):
            next(endless)
        assert next(pulled) == 25  # nothing was read ahead
        assert list(kvevict.stream(toy, [], EvictionCache(toy, H2O(6, 6)))) == []


@pytest.mark.parametrize("positions", ["in_cache", "original"])
def test_start_moves_what_is_reported(toy: Any, draw: Any, kept: Any, positions: Any) -> None:
    ids = draw(40)
    for policy in (*POLICIES, Random(budget=12, recent=2)):
        with patch(toy):
            near = EvictionCache(toy, policy, positions=positions)
            list(kvevict.stream(toy, ids, near, chunk=8))
            far = EvictionCache(toy, policy, positions=positions)
            steps = list(kvevict.stream(toy, ids, far, chunk=8, start=1000))
        assert [s.start for s in steps] == [1000 + 8 * i for i in range(5)]
        assert far.seen == far.get_seq_length() == 40
        if policy.name != "random":
            moved = [[[p + 1000 for p in h] for h in layer] for layer in kept(near)]
            assert kept(far) == moved
        assert min(kept(far)[0][0]) >= 1000


def test_in_cache_positions_do_not_feel_where_the_stream_starts(toy: Any, draw: Any) -> None:
    ids = draw(80)
    for policy in (StreamingLLM(3, 9), H2O(6, 6)):
        with patch(toy):
            runs = [
                nlls(
                    kvevict.stream(
                        toy, ids, EvictionCache(toy, policy, positions="in_cache"), start=start
                    )
                )[1:]
                for start in (0, 1_000_000)
            ]
        assert torch.equal(*runs)


def test_original_positions_are_fed_where_the_stream_stands(toy: Any, draw: Any) -> None:
    fed = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        fed.append(kwargs["position_ids"].flatten().tolist())

    with patch(toy):
        hook = toy.model.rotary_emb.register_forward_pre_hook(note, with_kwargs=True)
        cache = EvictionCache(toy, StreamingLLM(3, 9), positions="original")
        list(kvevict.stream(toy, draw(20), cache, chunk=20, start=500))
        list(kvevict.stream(toy, draw(5), cache, chunk=5, start=9000))
        hook.remove()
    assert fed == [list(range(500, 520)), list(range(9020, 9025))]


def test_a_gap_moves_only_what_comes_after_it(toy: Any, draw: Any, kept: Any) -> None:
    with patch(toy):
        cache = EvictionCache(toy, StreamingLLM(3, 9))
        list(kvevict.stream(toy, draw(20), cache))
        steps = list(kvevict.stream(toy, draw(4), cache, start=16_000))
    assert steps[0].start == 16_020
    assert kept(cache)[0][0] == [0, 1, 2, *range(15, 20), *range(16_020, 16_024)]


def positions_fed(model: Any, fed: list[int]) -> Any:
    def note(module: Any, args: Any, kwargs: Any) -> None:
        position = kwargs["position_ids"]
        fed.append(int(position.max()))
        assert int(position.min()) >= 0

    return model.model.rotary_emb.register_forward_pre_hook(note, with_kwargs=True)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_a_rebase_keeps_positions_bounded_and_the_result(
    toy: Any, draw: Any, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, policy = draw(400), StreamingLLM(3, 9)
    with patch(toy):
        exact = nlls(kvevict.stream(toy, ids, EvictionCache(toy, policy), chunk=chunk))[1:]
        monkeypatch.setattr("kvevict.forward._REBASE_AT", 30)
        fed: list[int] = []
        hook = positions_fed(toy, fed)
        again = nlls(kvevict.stream(toy, ids, EvictionCache(toy, policy), chunk=chunk))[1:]
        hook.remove()
    assert max(fed) < max(30, 12 + chunk) + 1
    torch.testing.assert_close(again, exact, atol=CLOSE, rtol=0)


def test_a_rebase_that_forgets_the_stored_keys_would_show(
    toy: Any, draw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvevict.ring import RingLayer

    ids, policy = draw(200), StreamingLLM(3, 9)
    with patch(toy):
        exact = nlls(kvevict.stream(toy, ids, EvictionCache(toy, policy), chunk=5))[1:]
        monkeypatch.setattr("kvevict.forward._REBASE_AT", 30)
        monkeypatch.setattr(RingLayer, "rebase", lambda self, by: None)
        broken = nlls(kvevict.stream(toy, ids, EvictionCache(toy, policy), chunk=5))[1:]
    assert (broken - exact).abs().max() > 0.1


def test_padded_rows_rebase_as_alone(
    toy: Any, draw: Any, feed: Any, difference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvevict.forward._REBASE_AT", 30)
    ids = torch.tensor([draw(150, seed=1), [0] * 40 + draw(110, seed=2)])
    mask = (ids != 0).long()
    with patch(toy):
        for forwards in ([50] + [1] * 100, [10] * 15, [150]):
            together = feed(toy, EvictionCache(toy, StreamingLLM(3, 9)), ids, forwards, mask)
            for i, pads in enumerate((0, 40)):
                alone = feed(
                    toy, EvictionCache(toy, StreamingLLM(3, 9)), ids[i, pads:], [150 - pads]
                )
                assert difference(together[i, pads:], alone[0]) < CLOSE


def test_a_row_that_wakes_up_after_a_rebase_is_exact(
    toy: Any, draw: Any, feed: Any, difference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its head arrives when the positions fed were already moved back.
    monkeypatch.setattr("kvevict.forward._REBASE_AT", 30)
    ids = torch.tensor([draw(150, seed=1), [0] * 60 + draw(90, seed=2)])
    mask = (ids != 0).long()
    with patch(toy):
        for forwards in ([5] * 30, [58] + [1] * 92, [61] + [1] * 89):
            together = feed(toy, EvictionCache(toy, StreamingLLM(3, 9)), ids, forwards, mask)
            alone = feed(toy, EvictionCache(toy, StreamingLLM(3, 9)), ids[1, 60:], [90])
            assert difference(together[1, 60:], alone[0]) < CLOSE


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("rope", "limit"), [(DYNAMIC, 64), (LONG, 64)], ids=["dynamic", "longrope"]
)
def test_positions_stay_below_where_a_bounded_rope_changes(
    make_tiny: Any, oracle: Any, draw: Any, feed: Any, difference: Any, rope: Any, limit: int
) -> None:
    length = limit if rope is DYNAMIC else 4 * limit
    model = make_tiny(0, max_position_embeddings=length, rope_parameters=rope)
    ids = draw(200)
    exact = oracle(model).streaming(ids, 3, 9)
    with patch(model):
        fed: list[int] = []
        hook = positions_fed(model, fed)
        for forwards in (None, [10] * 20, [40] + [1] * 160):
            logits = feed(model, EvictionCache(model, StreamingLLM(3, 9)), ids, forwards)
            assert difference(logits[0], exact) < CLOSE
        hook.remove()
    assert max(fed) < limit


@pytest.mark.parametrize("rope", [DYNAMIC, LONG], ids=["dynamic", "longrope"])
def test_a_prompt_beyond_where_a_bounded_rope_changes_is_exact_or_refused(
    make_tiny: Any, oracle: Any, draw: Any, feed: Any, difference: Any, rope: Any
) -> None:
    model = make_tiny(
        0, max_position_embeddings=64 if rope is DYNAMIC else 256, rope_parameters=rope
    )
    ids = draw(150)
    exact = oracle(model).streaming(ids, 3, 9)
    with patch(model):
        for forwards in ([150], [30, 100, 20]):
            cache = EvictionCache(model, StreamingLLM(3, 9))
            refused, logits = "", None
            try:
                logits = feed(model, cache, ids, forwards)
            except UnsupportedModelError as error:
                refused = str(error)
            if logits is None:
                assert "chunk" in refused
            else:
                assert difference(logits[0], exact) < CLOSE


def test_a_budget_beyond_a_bounded_rope_is_refused(make_tiny: Any) -> None:
    model = make_tiny(0, max_position_embeddings=64, rope_parameters=DYNAMIC)
    with patch(model):
        with pytest.raises(UnsupportedModelError, match="smaller"):
            EvictionCache(model, StreamingLLM(4, 80))
        with pytest.raises(UnsupportedModelError, match="smaller"):
            EvictionCache(model, H2O(40, 40), positions="in_cache")


def test_a_million_positions_cost_what_the_first_ones_did(make_tiny: Any, draw: Any) -> None:
    # By arithmetic on the cache's own count: a million tokens fed would take an hour.
    model = make_tiny(0, num_hidden_layers=1)
    ids = draw(64)
    with patch(model):
        cache = EvictionCache(model, StreamingLLM(3, 9))
        list(kvevict.stream(model, ids, cache, chunk=16))
        fed: list[int] = []
        hook = positions_fed(model, fed)
        before = cache.layers[0].keys.clone(), cache.layers[0].values.clone()
        ring = 10
        jump = 1_000_000 - 1_000_000 % ring  # the same ring slot, so that the state still fits
        near = nlls(kvevict.stream(model, ids, cache, chunk=16))[1:]
        for layer in cache.layers:
            layer.keys.copy_(before[0])
            layer.values.copy_(before[1])
        cache._seen = 64 + jump
        cache._row_seen = 64 + jump
        cache._base = jump
        far = nlls(kvevict.stream(model, ids, cache, chunk=16))[1:]
        hook.remove()
    assert cache.seen == 1_000_128 - 1_000_000 % ring
    assert max(fed) < 4096 + 16
    torch.testing.assert_close(far, near, atol=CLOSE, rtol=0)


def live_tensors() -> tuple[int, int]:
    sizes = [x.nbytes for x in gc.get_objects() if type(x) is torch.Tensor]
    return len(sizes), sum(sizes)


def test_memory_and_time_are_constant_over_twenty_thousand_tokens(make_tiny: Any) -> None:
    model = make_tiny(0, num_hidden_layers=1, hidden_size=32)
    tokens = (1 + (7 * i * i + i) % 96 for i in itertools.count())
    with patch(model):
        for policy in (StreamingLLM(4, 28), H2O(16, 16)):
            cache = EvictionCache(model, policy)
            seconds, objects, size = [], [], 0
            began = time.process_time()
            for step in kvevict.stream(model, itertools.islice(tokens, 20_480), cache, chunk=64):
                if (step.start + 64) % 5120 == 0:
                    gc.collect()
                    seconds.append(time.process_time() - began)
                    objects.append(live_tensors())
                    size = size or cache.nbytes()
                    assert cache.nbytes() == size
                    began = time.process_time()
            assert cache.seen == 20_480
            assert objects[-1] == objects[1], policy
            assert len(cache._offsets) == 1
            assert seconds[-1] < 3 * min(seconds)


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"chunk": 0}, PolicyError, "chunk"),
        ({"chunk": 2.0}, PolicyError, "chunk"),
        ({"chunk": True}, PolicyError, "chunk"),
        ({"start": -1}, PolicyError, "start"),
    ],
    ids=str,
)
def test_bad_settings_raise_at_once(
    toy: Any, settings: dict[str, Any], error: type[Exception], named: str
) -> None:
    with patch(toy), pytest.raises(error, match=named):
        kvevict.stream(toy, [1, 2], EvictionCache(toy, H2O(4, 4)), **settings)


def test_a_stream_needs_a_cache_of_ours_and_one_row(toy: Any, draw: Any, feed: Any) -> None:
    from transformers import DynamicCache

    with patch(toy):
        with pytest.raises(CacheError, match="EvictionCache"):
            kvevict.stream(toy, [1], DynamicCache())
        with pytest.raises(CacheError, match="one row"):
            next(kvevict.stream(toy, torch.ones(2, 5), EvictionCache(toy, H2O(4, 4))))
        cache = EvictionCache(toy, H2O(4, 4))
        feed(toy, cache, [draw(5), draw(5)], [5])
        with pytest.raises(CacheError, match="rows"):
            next(kvevict.stream(toy, [1, 2], cache))


def test_the_logits_of_a_chunk_are_not_kept_alive(toy: Any, draw: Any) -> None:
    with patch(toy):
        steps = kvevict.stream(toy, draw(64), EvictionCache(toy, H2O(6, 6)), chunk=16, logits=True)
        step = next(steps)
        base = step.logits._base
        assert step.nll.grad_fn is None
        assert base is None or base.numel() <= 2 * step.logits.numel()


def test_a_stream_goes_on_after_generate(toy: Any, draw: Any, feed: Any, kept: Any) -> None:
    with patch(toy):
        cache = EvictionCache(toy, H2O(6, 6))
        out = toy.generate(torch.tensor([draw(30)]), cache=cache, max_new_tokens=5, do_sample=False)
        list(kvevict.stream(toy, draw(20, seed=2), cache, chunk=5))
        own = EvictionCache(toy, H2O(6, 6))
        feed(toy, own, out[0, :34], [30] + [1] * 4)
        feed(toy, own, draw(20, seed=2), [5] * 4)
        assert kept(own) == kept(cache)
