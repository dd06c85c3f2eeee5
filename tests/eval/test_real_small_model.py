"""The evaluations on the embedded model: random toys have no sinks and remember nothing."""

from typing import Any

import pytest

from kvevict.eval import gap, needle, perplexity, stream
from kvevict.eval.caches import CacheSettings, feed, patched
from kvevict.eval.memory import resident_bytes
from kvevict.eval.texts import Tokens, encode, read
from kvevict.models.small import load
from kvevict.policy import parse

pytestmark = pytest.mark.slow
STREAMING = "streaming_llm:sinks=4,window=124"


@pytest.fixture(scope="module")
def small() -> tuple[Any, Any]:
    return load()


@pytest.fixture(scope="module")
def text(small: tuple[Any, Any]) -> Tokens:
    return encode(small[1], read(None), 900)


def test_sinks_fix_the_window_and_heavy_hitters_do_better(
    small: tuple[Any, Any], text: Tokens
) -> None:
    policies = ["full", "window:window=128", STREAMING, "h2o:heavy=64,recent=64"]
    full, window, sinks, heavy = (o.row for o in perplexity.run(small[0], text, policies))
    assert full["nll"] < heavy["nll"] < sinks["nll"] < window["nll"] - 0.3
    assert sinks["nll"] < full["nll"] + 0.2
    assert {r["kept_tokens"] for r in (window, sinks, heavy)} == {128}


def test_a_stream_is_as_good_as_a_fresh_start(small: tuple[Any, Any], text: Tokens) -> None:
    fresh = stream.FreshStarts(count=1, lead=256, span=256)
    done = stream.run(small[0], text, [STREAMING], fresh=fresh, bucket=128)
    assert abs(done[1].row["nll_delta"]) < 0.1


def test_memory_of_the_process_stays_flat(small: tuple[Any, Any], text: Tokens) -> None:
    held = []
    with patched(small[0]):
        settings = CacheSettings(chunk=64)
        cache = settings.cache(small[0], parse(STREAMING))
        ids = text.ids.repeat(4)
        feed(small[0], ids, cache, settings, on_step=lambda step: held.append(resident_bytes()))
    first, last = held[len(held) // 4], max(held[-8:])
    assert last - first < 60 * 2**20, f"grew by {(last - first) / 2**20:.0f} MiB in 2,700 tokens"


def test_only_original_positions_break_behind_a_gap(small: tuple[Any, Any], text: Tokens) -> None:
    settings = CacheSettings(chunk=128)
    found = gap.run(small[0], text, [STREAMING], [65_536], span=380, settings=settings)
    inside, outside = (
        [o.row["nll"] for o in found if o.row["positions"] == how]
        for how in ("in_cache", "original")
    )
    assert inside[0] == inside[1]
    assert outside[1] > outside[0] + 2


def test_a_needle_outside_the_window_is_lost_and_inside_found(small: tuple[Any, Any]) -> None:
    grid = needle.Grid(("single",), (400,), (0.1, 0.9), 2)
    policies = ["full", "streaming_llm:sinks=4,window=196"]
    rows = {
        (o.row["policy"], o.row["depth"]): o.row for o in needle.run(*small, policies, grid=grid)
    }
    for depth in (0.1, 0.9):
        assert rows["full", depth]["exact_match"] == 1
    assert rows[policies[1], 0.9]["exact_match"] == 1
    assert rows[policies[1], 0.1]["answer_nll"] > rows["full", 0.1]["answer_nll"] + 1
