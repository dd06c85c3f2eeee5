"""The rules on SmolLM2 and real English: a random toy has no sinks and no heavy hitters."""

import gc
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvevict
from kvevict import EvictionCache, patch
from kvevict.policies import H2O, Full, Random, StreamingLLM, Window

pytestmark = pytest.mark.slow

CLOSE = 2e-3  # logits have a scale of 38


@pytest.fixture
def ids(golden_ids: list[int]) -> list[int]:
    return golden_ids


def mean_nll(
    model: Any, cache: Any, ids: list[int], chunk: int, skip: int, start: int = 0
) -> float:
    nll = torch.cat([s.nll for s in kvevict.stream(model, ids, cache, chunk=chunk, start=start)])
    return float(nll[skip:].double().mean())


def greedy(model: Any, prompt: list[int], count: int, **settings: Any) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        **settings,
    )
    return out[0].tolist()


# -- exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [StreamingLLM(4, 300), H2O(150, 150), Random(300), Full()], ids=lambda p: p.name
)
def test_a_budget_above_the_length_changes_neither_logits_nor_tokens(
    small_model: Any, ids: list[int], feed: Any, policy: Any
) -> None:
    plain = feed(small_model, DynamicCache(), ids[:200], [200])
    tokens = greedy(small_model, ids[:96], 24)
    with patch(small_model, policy):
        for forwards in ([200], [64, 64, 72]):
            logits = feed(small_model, EvictionCache(small_model, policy), ids[:200], forwards)
            assert (logits - plain).abs().max() < CLOSE
        assert greedy(small_model, ids[:96], 24) == tokens


def test_the_chunk_never_changes_streaming_llm(small_model: Any, ids: list[int], feed: Any) -> None:
    with patch(small_model):
        runs = [
            feed(small_model, EvictionCache(small_model, StreamingLLM(4, 60)), ids[:300], forwards)
            for forwards in ([300], [64] * 4 + [44], [7] * 42 + [6], [200] + [1] * 100)
        ]
    for run in runs[1:]:
        assert (run - runs[0]).abs().max() < CLOSE


@pytest.mark.parametrize("positions", ["original", "in_cache"])
@pytest.mark.parametrize(
    "policy", [StreamingLLM(4, 28), H2O(16, 16), Window(32)], ids=lambda p: p.name
)
def test_a_padded_row_equals_the_row_alone(
    small_model: Any, ids: list[int], feed: Any, kept: Any, policy: Any, positions: Any
) -> None:
    lengths, tail = [90, 40, 6], 20
    rows = [ids[500 * i : 500 * i + n + tail] for i, n in enumerate(lengths)]
    batch = torch.tensor([[2] * (90 + tail - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (90 + tail - len(r)) + [1] * len(r) for r in rows])
    with patch(small_model):
        cache = EvictionCache(small_model, policy, positions=positions)
        together = feed(small_model, cache, batch, [90] + [1] * tail, mask)
        for i, row in enumerate(rows):
            own = EvictionCache(small_model, policy, positions=positions)
            alone = feed(small_model, own, row, [lengths[i]] + [1] * tail)
            assert (together[i, -len(row) :] - alone[0]).abs().max() < CLOSE
            assert kept(cache, i) == kept(own)


@pytest.mark.parametrize("policy", [StreamingLLM(4, 60), H2O(32, 32)], ids=lambda p: p.name)
def test_turn_two_is_one_stream(
    small_model: Any, ids: list[int], feed: Any, kept: Any, policy: Any
) -> None:
    with patch(small_model):
        cache = EvictionCache(small_model, policy)
        first = greedy(small_model, ids[:120], 12, cache=cache)
        second = greedy(small_model, first + ids[400:450], 12, cache=cache)
        one = EvictionCache(small_model, policy)
        logits = feed(small_model, one, second[:-1], [120] + [1] * 11 + [51] + [1] * 11)
        assert kept(one) == kept(cache)
    assert logits[0, 181:].argmax(-1).tolist() == second[182:]


class ForgetsScores(EvictionCache):
    """Broken on purpose: beams get the keys of others and keep their own scores."""

    def reorder_cache(self, beam_idx: Any) -> None:
        before = [(x.position, x.score, x.free) for x in self.layers]
        super().reorder_cache(beam_idx)
        for layer, state in zip(self.layers, before, strict=True):
            layer.position, layer.score, layer.free = state


def test_beams_under_eviction_score_as_their_sequences_do(
    small_model: Any, ids: list[int], feed: Any
) -> None:
    def error(kind: Any) -> float:
        cache, worst = kind(small_model, H2O(8, 8)), 0.0
        out = small_model.generate(
            torch.tensor([ids[:50]]),
            cache=cache,
            num_beams=3,
            num_return_sequences=2,
            max_new_tokens=25,
            eos_token_id=None,
            do_sample=False,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
            own = EvictionCache(small_model, H2O(8, 8))
            logits = feed(small_model, own, row[:-1], [50] + [1] * 24)[0]
            logp = torch.log_softmax(logits, -1)
            exact = sum(float(logp[i - 1, row[i]]) for i in range(50, 75))
            worst = max(worst, abs(exact - score))
        return worst

    with patch(small_model):
        assert error(EvictionCache) < 1e-2
        assert error(ForgetsScores) > 0.05


@pytest.mark.parametrize(
    "policy", [StreamingLLM(4, 28), H2O(16, 16), H2O(12, 16, sinks=4), Window(32)], ids=str
)
def test_every_layer_and_head_holds_exactly_the_budget(
    small_model: Any, ids: list[int], feed: Any, policy: Any
) -> None:
    with patch(small_model):
        cache = EvictionCache(small_model, policy)
        for forwards in ([100], [16, 16, 1, 1, 1], [40]):
            feed(small_model, cache, ids[: sum(forwards)], forwards)
            for layer in range(30):
                held = cache.kept_positions(layer)
                assert held.shape == (1, 3, 32)
                assert (held >= 0).all()
        assert cache.nbytes() == 30 * 2 * 3 * 33 * 64 * 4


def test_a_saved_cache_continues_bit_by_bit(
    small_model: Any, ids: list[int], feed: Any, tmp_path: Path
) -> None:
    for i, policy in enumerate((StreamingLLM(4, 60), H2O(32, 32))):
        with patch(small_model):
            cache = EvictionCache(small_model, policy)
            feed(small_model, cache, ids[:100], [90] + [1] * 10)
            cache.save(tmp_path / str(i))
            twin = EvictionCache.load(tmp_path / str(i), small_model)
            forwards = [1] * 10 + [20]
            a = feed(small_model, cache, ids[100:130], forwards)
            assert torch.equal(a, feed(small_model, twin, ids[100:130], forwards))


# -- quality --------------------------------------------------------------------------------------


def test_sinks_are_what_keeps_a_window_alive(small_model: Any, ids: list[int]) -> None:
    with patch(small_model):
        full, sinks, none = (
            mean_nll(small_model, EvictionCache(small_model, policy), ids[:1200], 64, 256)
            for policy in (Full(), StreamingLLM(4, 252), Window(256))
        )
    assert full < sinks < full + 0.15
    assert none > sinks + 0.3


def test_heavy_hitters_beat_a_plain_window_at_the_same_budget(
    small_model: Any, ids: list[int]
) -> None:
    with patch(small_model):
        full, h2o, sinks, chance = (
            mean_nll(small_model, EvictionCache(small_model, policy), ids[:1100], 32, 256)
            for policy in (Full(), H2O(128, 128), StreamingLLM(4, 252), Random(256, recent=128))
        )
    assert full < h2o < sinks
    assert h2o < chance - 0.1


@pytest.mark.parametrize("start", [16_384, 131_072])
def test_a_stream_beyond_the_trained_length_is_as_good_as_at_its_beginning(
    small_model: Any, ids: list[int], start: int
) -> None:
    text = ids[:640]
    with patch(small_model):

        def at(where: int, positions: Any) -> float:
            cache = EvictionCache(small_model, StreamingLLM(4, 252), positions=positions)
            return math.exp(mean_nll(small_model, cache, text, 64, 256, start=where))

        near = at(0, "in_cache")
        assert at(start, "in_cache") == pytest.approx(near, rel=1e-4)


def test_a_gap_in_the_stream_hurts_original_positions_only(
    small_model: Any, ids: list[int]
) -> None:
    found = {}
    with patch(small_model):
        for positions in ("in_cache", "original"):
            for gap in (0, 65_536):
                cache = EvictionCache(small_model, StreamingLLM(4, 252), positions=positions)
                list(kvevict.stream(small_model, ids[:320], cache))
                nll = mean_nll(small_model, cache, ids[320:640], 64, 1, start=gap)
                found[positions, gap] = math.exp(nll)
    assert found["in_cache", 65_536] == pytest.approx(found["in_cache", 0], rel=0.02)
    assert found["original", 65_536] > 3 * found["original", 0]


def test_h2o_inside_the_cache_serves_a_stream_beyond_the_trained_length(
    small_model: Any, ids: list[int]
) -> None:
    with patch(small_model):
        cache = EvictionCache(small_model, H2O(16, 48), positions="in_cache")
        rolled = mean_nll(small_model, cache, ids[:300], 16, 64, start=100_000)
        cache = EvictionCache(small_model, H2O(16, 48), positions="in_cache")
        near = mean_nll(small_model, cache, ids[:300], 16, 64)
    assert rolled == pytest.approx(near, rel=1e-4)
    assert near < 4.0


def test_half_precision_keeps_the_mean_of_the_authors_trace(ids: list[int], golden: Any) -> None:
    model, _ = kvevict.load(dtype="bfloat16")
    wanted = torch.tensor(golden("streamingllm_4+252_n1200_nll")["nll"][:500]).double().mean()
    with patch(model):
        cache = EvictionCache(model, StreamingLLM(4, 252))
        got = mean_nll(model, cache, ids[:501], 64, 1)
    assert got == pytest.approx(float(wanted), abs=0.03)


def resident() -> int:
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to see memory")
def test_resident_memory_is_flat_over_twenty_thousand_tokens(
    small_model: Any, data_folder: Path, small_tokenizer: Any
) -> None:
    text = (data_folder / "text" / "pride_and_prejudice.txt").read_text(encoding="utf-8")
    tokens = small_tokenizer(text[:100_000]).input_ids[:20_480]
    assert len(tokens) == 20_480
    seen: list[int] = []
    with patch(small_model):
        cache = EvictionCache(small_model, StreamingLLM(4, 252))
        for step in kvevict.stream(small_model, tokens, cache, chunk=64):
            if step.start % 1024 == 0:
                gc.collect()
                seen.append(resident())
    quarter = len(seen) // 4
    second = sum(seen[quarter : 2 * quarter]) / quarter
    last = sum(seen[-quarter:]) / quarter
    assert last < 1.02 * second
