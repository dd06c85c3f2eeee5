"""A left-padded row behaves as the same row alone: pads are no sinks, get no score, go first."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvevict import CacheError, EvictionCache, patch
from kvevict.policies import H2O, Full, Random, StreamingLLM, Window

LENGTHS = [34, 21, 3, 30]
TAIL = 25
CLOSE = 2e-3

POLICIES = {
    "streaming_llm": (StreamingLLM(sinks=3, window=8), "auto"),
    "streaming_llm, original": (StreamingLLM(sinks=3, window=8), "original"),
    "window": (Window(window=9), "auto"),
    "h2o": (H2O(heavy=5, recent=5), "auto"),
    "h2o, in_cache": (H2O(heavy=5, recent=5), "in_cache"),
    "h2o, sinks, age, decay": (H2O(heavy=4, recent=4, sinks=2, normalize="age", decay=0.9), "auto"),
    "random": (Random(budget=10, sinks=1, recent=2), "auto"),
    "full": (Full(), "auto"),
}


@pytest.fixture
def rows(draw: Any) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """Rows of different lengths with a common tail; padded ids and mask."""
    rows = [draw(n + TAIL, seed=i) for i, n in enumerate(LENGTHS)]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
    return rows, ids, mask


@pytest.mark.parametrize("name", POLICIES)
def test_a_padded_row_equals_the_row_alone(
    tiny: Any, rows: Any, feed: Any, kept: Any, difference: Any, name: str
) -> None:
    policy, positions = POLICIES[name]
    alone, ids, mask = rows
    prompt = max(LENGTHS)
    with patch(tiny):
        cache = EvictionCache(tiny, policy, positions=positions)
        together = feed(tiny, cache, ids, [prompt] + [1] * TAIL, mask)
        for i, row in enumerate(alone):
            own = EvictionCache(tiny, policy, positions=positions)
            logits = feed(tiny, own, row, [LENGTHS[i]] + [1] * TAIL)
            assert difference(together[i, -len(row) :], logits[0]) < CLOSE
            assert kept(cache, i) == kept(own)
            if policy.needs_scores:
                ours, theirs = cache.scores(0)[i], own.scores(0)[0]
                assert difference(ours[:, : theirs.shape[1]], theirs) < CLOSE


@pytest.mark.parametrize("name", ["streaming_llm", "streaming_llm, original", "window", "full"])
@pytest.mark.parametrize(
    "forwards", [[1] * 59, [7] * 8 + [3], [59], [5, 1, 20, 1, 1, 31]], ids=["1", "7", "all", "odd"]
)
def test_chunks_of_a_padded_batch_equal_the_rows_alone(
    toy: Any, rows: Any, feed: Any, kept: Any, difference: Any, name: str, forwards: list[int]
) -> None:
    policy, positions = POLICIES[name]
    alone, ids, mask = rows
    with patch(toy):
        cache = EvictionCache(toy, policy, positions=positions)
        together = feed(toy, cache, ids, forwards, mask)
        for i, row in enumerate(alone):
            own = EvictionCache(toy, policy, positions=positions)
            logits = feed(toy, own, row, [len(row)])
            assert difference(together[i, -len(row) :], logits[0]) < CLOSE
            assert kept(cache, i) == kept(own)


@pytest.mark.parametrize("evict_every", [1, 3])
@pytest.mark.parametrize("forwards", [[1] * 59, [7] * 8 + [3]], ids=["1", "7"])
def test_chunks_of_a_padded_batch_under_h2o_equal_a_loop_over_each_rows_share_of_them(
    toy: Any,
    rows: Any,
    oracle: Any,
    feed: Any,
    kept: Any,
    difference: Any,
    forwards: list[int],
    evict_every: int,
) -> None:
    alone, ids, mask = rows
    with patch(toy):
        cache = EvictionCache(toy, H2O(5, 5), evict_every=evict_every)
        together = feed(toy, cache, ids, forwards, mask)
    for i, row in enumerate(alone):
        real = [int(part.sum()) for part in mask[i].split(forwards)]
        exact = oracle(toy).h2o(row, 5, 5, forwards=[n for n in real if n], evict_every=evict_every)
        assert difference(together[i, -len(row) :], exact.logits) < CLOSE
        assert kept(cache, i) == exact.kept


def test_the_comparison_sees_pads_that_count(
    toy: Any, rows: Any, feed: Any, difference: Any
) -> None:
    # Without its mask a padded row takes pads for its sinks and its heavy hitters.
    alone, ids, _ = rows
    for policy in (StreamingLLM(3, 8), H2O(5, 5), Window(9)):
        with patch(toy):
            together = feed(toy, EvictionCache(toy, policy), ids, [34] + [1] * TAIL)
            own = feed(toy, EvictionCache(toy, policy), alone[2], [3] + [1] * TAIL)
        if policy.name != "window":
            assert difference(together[2, -TAIL:], own[0, -TAIL:]) > 0.3


def test_pad_queries_add_nothing_to_the_scores(toy: Any, rows: Any, feed: Any) -> None:
    # A fully masked softmax is uniform: it would shift all scores and leave the ranks as they are.
    _, ids, mask = rows
    with patch(toy):
        cache = EvictionCache(toy, H2O(64, 64))
        feed(toy, cache, ids, [34] + [1] * TAIL, mask)
        sums = cache.scores(0).sum(-1)
    group = toy.config.num_attention_heads // toy.config.num_key_value_heads
    wanted = mask.sum(-1, keepdim=True).float() * group
    torch.testing.assert_close(sums, wanted.expand_as(sums), atol=1e-2, rtol=1e-5)


@pytest.mark.parametrize("policy", [StreamingLLM(3, 8), H2O(5, 5)], ids=lambda p: p.name)
def test_scored_pads_would_show(
    toy: Any, rows: Any, feed: Any, kept: Any, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A broken cache: pads get positions as if they were tokens.
    alone, ids, mask = rows
    honest = EvictionCache._new_columns

    def all_real(self: Any, mask: Any, rows: int, length: int) -> Any:
        new = honest(self, mask, rows, length)
        return None if new is None else torch.ones_like(new)

    monkeypatch.setattr(EvictionCache, "_new_columns", all_real)
    with patch(toy):
        broken = EvictionCache(toy, policy)
        feed(toy, broken, ids, [34] + [1] * TAIL, mask)
        monkeypatch.undo()
        own = EvictionCache(toy, policy)
        feed(toy, own, alone[1], [21] + [1] * TAIL)
        pads = 34 - LENGTHS[1]
        shifted = [[[p - pads for p in head] for head in layer] for layer in kept(broken, 1)]
    assert shifted != kept(own)


def test_a_row_of_pads_only_wakes_up_exact(
    toy: Any, draw: Any, feed: Any, kept: Any, difference: Any
) -> None:
    long, short = draw(50, seed=1), draw(20, seed=2)
    ids = torch.tensor([long, [0] * 30 + short])
    mask = torch.tensor([[1] * 50, [0] * 30 + [1] * 20])
    for policy in (StreamingLLM(3, 8), H2O(5, 5), Window(6), Full()):
        with patch(toy):
            cache = EvictionCache(toy, policy)
            together = feed(toy, cache, ids, [10] * 3 + [1] * 20, mask)
            own = EvictionCache(toy, policy)
            logits = feed(toy, own, short, [1] * 20)
            assert difference(together[1, -20:], logits[0]) < CLOSE
            assert kept(cache, 1) == kept(own)


def test_pads_between_tokens_do_not_count_either(
    toy: Any, draw: Any, feed: Any, difference: Any
) -> None:
    # Turn 2 of a batched chat: row 1 has a shorter answer and is filled up on the left of turn 2.
    row = draw(30, seed=3)
    gap = row[:20] + [0] * 6 + row[20:]
    ids = torch.tensor([draw(36, seed=4), gap])
    mask = torch.tensor([[1] * 36, [1] * 20 + [0] * 6 + [1] * 10])
    for policy in (StreamingLLM(3, 8), Window(6), Full()):
        with patch(toy):
            for forwards in ([36], [20, 16], [20] + [1] * 16):
                cache = EvictionCache(toy, policy)
                together = feed(toy, cache, ids, forwards, mask)[1][mask[1].bool()]
                own = feed(toy, EvictionCache(toy, policy), row, [30])
                assert difference(together, own[0]) < CLOSE
    with patch(toy):
        cache = EvictionCache(toy, H2O(5, 5))
        together = feed(toy, cache, ids, [20] + [1] * 16, mask)[1][mask[1].bool()]
        own = feed(toy, EvictionCache(toy, H2O(5, 5)), row, [20] + [1] * 10)
    assert difference(together, own[0]) < CLOSE


def test_a_batch_without_pads_equals_its_rows_alone(
    toy: Any, draw: Any, feed: Any, kept: Any, difference: Any
) -> None:
    batch = [draw(50, seed=i) for i in range(3)]
    for policy in (StreamingLLM(3, 8), H2O(5, 5)):
        with patch(toy):
            cache = EvictionCache(toy, policy)
            together = feed(toy, cache, batch, [20] + [1] * 30)
            for i, row in enumerate(batch):
                own = EvictionCache(toy, policy)
                assert difference(together[i], feed(toy, own, row, [20] + [1] * 30)[0]) < CLOSE
                assert kept(cache, i) == kept(own)


def test_rows_of_a_batch_hold_different_sets(toy: Any, draw: Any, feed: Any, kept: Any) -> None:
    # Scores summed over the batch would give every row the same.
    with patch(toy):
        cache = EvictionCache(toy, H2O(6, 4))
        feed(toy, cache, [draw(50, seed=1), draw(50, seed=2)])
    assert kept(cache, 0) != kept(cache, 1)
    assert kept(cache, 0)[0][0] != kept(cache, 0)[0][1]


def test_generate_pads_rows_as_alone(tiny: Any, draw: Any) -> None:
    rows = [draw(30, seed=1), draw(11, seed=2), draw(2, seed=3)]
    ids = torch.tensor([[0] * (30 - len(r)) + r for r in rows])
    mask = (torch.arange(30) >= torch.tensor([[30 - len(r)] for r in rows])).long()
    for policy in ("streaming_llm:sinks=3,window=8", "h2o:heavy=5,recent=5", "window:window=9"):
        with patch(tiny, policy):
            out = tiny.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
            for i, row in enumerate(rows):
                own = tiny.generate(torch.tensor([row]), max_new_tokens=20, do_sample=False)
                assert out[i, 30:].tolist() == own[0, len(row) :].tolist()


def test_a_row_that_finished_early_leaves_the_others_alone(make_tiny: Any, draw: Any) -> None:
    model = make_tiny(1)
    rows = [draw(12, seed=1), draw(12, seed=2)]
    with patch(model, "h2o:heavy=4,recent=4"):
        free = [model.generate(torch.tensor([r]), max_new_tokens=30, do_sample=False) for r in rows]
        stop = int(free[0][0, 14])  # row 0 ends after three tokens
        assert stop not in free[1][0, 12:].tolist()
        both = model.generate(
            torch.tensor(rows), max_new_tokens=30, do_sample=False, eos_token_id=stop
        )
    assert both[0, 15:].eq(0).all()
    assert both[1].tolist() == free[1][0].tolist()


def test_a_padded_plain_cache_works_on_a_patched_model(toy: Any, rows: Any, feed: Any) -> None:
    _, ids, mask = rows
    before = feed(toy, DynamicCache(), ids, [34] + [1] * TAIL, mask)
    with patch(toy, "h2o:heavy=5,recent=5"):
        inside = feed(toy, DynamicCache(), ids, [34] + [1] * TAIL, mask)
        bare = toy(ids, attention_mask=mask).logits
    real = mask.bool()
    assert torch.equal(before[real], inside[real])
    assert torch.equal(bare[real], toy(ids, attention_mask=mask).logits[real])


def test_a_mask_of_another_shape_is_refused(toy: Any, draw: Any) -> None:
    ids = torch.tensor([draw(10)])
    with patch(toy):
        for bad in (torch.ones(1, 7), torch.ones(2, 10)):
            with pytest.raises(CacheError, match="attention_mask"):
                toy(ids, attention_mask=bad, cache=EvictionCache(toy, StreamingLLM(2, 4)))
