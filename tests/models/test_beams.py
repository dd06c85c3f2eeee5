"""Beam search and repeated rows move scores, positions and free slots together with the keys."""

from typing import Any

import pytest
import torch

from kvevict import EvictionCache, patch
from kvevict.layers import EvictionLayer
from kvevict.policies import H2O, Random, StreamingLLM

POLICIES = {
    "streaming_llm": (StreamingLLM(3, 8), "auto"),
    "streaming_llm, original": (StreamingLLM(3, 8), "original"),
    "h2o": (H2O(5, 5), "auto"),
    "h2o, in_cache": (H2O(5, 5), "in_cache"),
    "random": (Random(budget=10, recent=2), "auto"),
}


class ForgetsScores(EvictionCache):
    """Broken on purpose: reorders keys and values, and leaves positions and scores behind."""

    def reorder_cache(self, beam_idx: Any) -> None:
        before = [(x.position, x.score, x.free) for x in self.layers]
        super().reorder_cache(beam_idx)
        for layer, state in zip(self.layers, before, strict=True):
            layer.position, layer.score, layer.free = state


class NoReorder(EvictionCache):
    """Broken on purpose: beams keep each other's tokens."""

    def reorder_cache(self, beam_idx: Any) -> None:
        return


def log_probability(model: Any, cache: Any, feed: Any, ids: list[int], prompt: int) -> float:
    """Feed a sequence alone, as beam search fed it, and sum what its new tokens cost."""
    logits = feed(model, cache, ids[:-1], [prompt] + [1] * (len(ids) - 1 - prompt))[0]
    logp = torch.log_softmax(logits.double(), -1)
    return float(sum(logp[i - 1, ids[i]] for i in range(prompt, len(ids))))


def beam_error(model: Any, kind: Any, policy: Any, positions: Any, feed: Any, draw: Any) -> float:
    """Return how far the scores of returned beams are from those of the same sequences alone."""
    worst = 0.0
    for seed in range(2):
        prompt = draw(14, seed=seed)
        cache = kind(model, policy, positions=positions)
        out = model.generate(
            torch.tensor([prompt]),
            cache=cache,
            num_beams=4,
            num_return_sequences=3,
            max_new_tokens=25,
            do_sample=False,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
            alone = EvictionCache(model, policy, positions=positions)
            worst = max(worst, abs(log_probability(model, alone, feed, row, 14) - score))
    return worst


@pytest.mark.parametrize("name", POLICIES)
def test_a_beams_score_is_that_of_its_sequence_alone(
    toy: Any, feed: Any, draw: Any, name: str
) -> None:
    policy, positions = POLICIES[name]
    with patch(toy):
        assert beam_error(toy, EvictionCache, policy, positions, feed, draw) < 1e-2


@pytest.mark.parametrize("kind", [ForgetsScores, NoReorder])
def test_a_reorder_that_forgets_something_fails_that_comparison(
    make_tiny: Any, feed: Any, draw: Any, kind: Any
) -> None:
    model = make_tiny(0)
    with patch(model):
        assert beam_error(model, kind, H2O(5, 5), "auto", feed, draw) > 0.1
        if kind is NoReorder:
            assert beam_error(model, kind, StreamingLLM(3, 8), "auto", feed, draw) > 0.1


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("when", [6, 25], ids=["filling", "full"])
def test_rows_continue_as_the_rows_that_they_were(
    toy: Any, draw: Any, feed: Any, kept: Any, difference: Any, name: str, when: int
) -> None:
    policy, positions = POLICIES[name]
    rows, tails = [draw(when, seed=i) for i in range(3)], [draw(20, seed=9 + i) for i in range(4)]
    order = [2, 0, 2]
    with patch(toy):
        cache = EvictionCache(toy, policy, positions=positions)
        feed(toy, cache, rows)
        cache.reorder_cache(torch.tensor(order))
        out = feed(toy, cache, tails[:3])
        for i, source in enumerate(order):
            own = EvictionCache(toy, policy, positions=positions)
            feed(toy, own, rows[source])
            assert difference(out[i], feed(toy, own, tails[i])[0]) < 2e-3
            assert kept(cache, i) == kept(own)


@pytest.mark.parametrize("name", POLICIES)
def test_repeated_and_selected_rows_continue_exact(
    toy: Any, draw: Any, feed: Any, kept: Any, difference: Any, name: str
) -> None:
    policy, positions = POLICIES[name]
    rows, tails = [draw(25, seed=i) for i in range(2)], [draw(15, seed=9 + i) for i in range(4)]
    with patch(toy):
        cache = EvictionCache(toy, policy, positions=positions)
        feed(toy, cache, rows, [25])
        cache.batch_repeat_interleave(2)
        feed(toy, cache, tails)
        cache.batch_select_indices(torch.tensor([3, 1]))
        out = feed(toy, cache, [tails[0], tails[1]])
        for i, (source, first) in enumerate([(1, 3), (0, 1)]):
            own = EvictionCache(toy, policy, positions=positions)
            feed(toy, own, rows[source], [25])
            feed(toy, own, tails[first])
            assert difference(out[i], feed(toy, own, tails[i])[0]) < 2e-3
            assert kept(cache, i) == kept(own)


def test_padded_rows_reorder_with_their_own_positions(
    toy: Any, draw: Any, feed: Any, kept: Any, difference: Any
) -> None:
    long, short = draw(24, seed=1), draw(9, seed=2)
    ids = torch.tensor([long, [0] * 15 + short])
    mask = torch.tensor([[1] * 24, [0] * 15 + [1] * 9])
    tail = draw(20, seed=3)
    for policy in (StreamingLLM(3, 8), H2O(5, 5)):
        with patch(toy):
            cache = EvictionCache(toy, policy)
            feed(toy, cache, ids, [24], mask)
            cache.reorder_cache(torch.tensor([1, 1]))
            wide = torch.cat([mask[[1, 1]], torch.ones(2, 20, dtype=torch.long)], 1)
            out = feed(toy, cache, [tail, tail], None, wide)
            own = EvictionCache(toy, policy)
            feed(toy, own, short, [9])
            exact = feed(toy, own, tail)[0]
            for i in range(2):
                assert difference(out[i], exact) < 2e-3
                assert kept(cache, i) == kept(own)


def test_several_samples_of_one_prompt_share_nothing(toy: Any, draw: Any, feed: Any) -> None:
    prompt = draw(20)
    for policy, positions in POLICIES.values():
        with patch(toy):
            torch.manual_seed(1)
            out = toy.generate(
                torch.tensor([prompt]),
                cache=EvictionCache(toy, policy, positions=positions),
                num_return_sequences=3,
                do_sample=True,
                max_new_tokens=20,
                return_dict_in_generate=True,
                output_logits=True,
            )
            logits = torch.stack(out.logits, 1)  # [3, 20, V]
            assert len({tuple(row) for row in out.sequences.tolist()}) == 3
            for i, row in enumerate(out.sequences.tolist()):
                own = EvictionCache(toy, policy, positions=positions)
                alone = feed(toy, own, row[:-1], [20] + [1] * 19)[0, 19:]
                assert (alone - logits[i]).abs().max() < 2e-3


def test_beams_without_eviction_are_those_of_a_plain_cache(tiny: Any, draw: Any) -> None:
    ids = torch.tensor([draw(15)])
    settings = {"num_beams": 4, "max_new_tokens": 20, "do_sample": False, "num_return_sequences": 2}
    plain = tiny.generate(ids, **settings)
    for policy in ("streaming_llm:sinks=4,window=60", "h2o:heavy=40,recent=40", "full"):
        with patch(tiny, policy):
            assert torch.equal(tiny.generate(ids, **settings), plain)


def test_layers_of_the_cache_are_evicting(toy: Any) -> None:
    with patch(toy):
        cache = EvictionCache(toy, "h2o:heavy=4,recent=4")
        assert all(isinstance(layer, EvictionLayer) for layer in cache.layers)
