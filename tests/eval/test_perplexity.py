import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvevict.errors import KvevictError, PolicyError
from kvevict.eval import perplexity, statistics
from kvevict.eval.caches import CacheSettings, at_budget, policies_at, short
from kvevict.eval.texts import Text, Tokens, encode, split_ids
from kvevict.policy import parse

Draw = Callable[[int], Tokens]


def reference(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the losses of one full forward, the independent oracle."""
    with torch.no_grad():
        logits = model(ids[None], cache=DynamicCache(config=model.config)).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")


@pytest.mark.parametrize("chunk", [1, 7, 64, 200])
def test_full_scores_every_token_once_as_one_forward_does(
    model: Any, tokens: Draw, chunk: int
) -> None:
    text = tokens(150)
    expected = reference(model, text.ids)
    outcome = perplexity.run(model, text, ["full"], settings=CacheSettings(chunk=chunk), bucket=32)[
        0
    ]
    row = outcome.row
    assert row["tokens_scored"] == 149
    assert row["nll"] == pytest.approx(float(expected.double().mean()), abs=1e-5)
    assert row["perplexity"] == pytest.approx(math.exp(row["nll"]))
    assert [b["count"] for b in row["buckets"]] == [31, 32, 32, 32, 22]
    for bucket in row["buckets"]:
        first = max(bucket["start"], 1)
        part = expected[first - 1 : first - 1 + bucket["count"]]
        assert bucket["nll_sum"] == pytest.approx(float(part.double().sum()), abs=1e-3)


def test_no_token_is_skipped_or_doubled_at_any_border() -> None:
    nll = torch.arange(1000, dtype=torch.float32)
    for size in (1, 7, 64, 1000, 5000):
        for first in (1, 63, 64, 65, 999):
            for offset in (0, 5, 64):
                parts = statistics.buckets(nll, size, first, offset)
                assert sum(b["count"] for b in parts) == 1000 - first
                assert sum(b["nll_sum"] for b in parts) == float(nll[first:].double().sum())
                for b in parts:
                    assert b["start"] % size == 0


@pytest.mark.parametrize("policy", ["window:window=16", "streaming_llm:sinks=2,window=14"])
def test_chunk_does_not_change_a_policy_of_positions(model: Any, tokens: Draw, policy: str) -> None:
    ids = tokens(120).ids
    exact = perplexity.nll_of(model, ids, policy, chunk=1)
    for chunk in (5, 64, 120):
        got = perplexity.nll_of(model, ids, policy, chunk=chunk)
        torch.testing.assert_close(got[1:], exact[1:], atol=2e-5, rtol=0)


def test_bos_is_fed_and_never_scored(model: Any, tokenizer: Any) -> None:
    text = Text("t", "a cat on a mat " * 4)
    plain, with_bos = encode(tokenizer, text), encode(tokenizer, text, bos=True)
    assert with_bos.ids[0] == tokenizer.bos_token_id
    assert torch.equal(with_bos.ids[1:], plain.ids)
    row = perplexity.run(model, with_bos, ["full"])[0].row
    assert row["bos"] is True
    assert row["tokens_scored"] == len(plain.ids)
    assert row["scored_from"] == 1


def test_streams_are_joined_by_sums_and_counts(model: Any, tokens: Draw) -> None:
    long, short_one = tokens(150), Tokens(tokens(150).ids[:40], False, {})
    rows = perplexity.run(model, [long, short_one], ["window:window=16"])[0].row
    alone = [perplexity.run(model, t, ["window:window=16"])[0].row for t in (long, short_one)]
    weighted = (alone[0]["nll"] * 149 + alone[1]["nll"] * 39) / 188
    assert rows["nll"] == pytest.approx(weighted, abs=1e-9)
    assert abs(rows["nll"] - (alone[0]["nll"] + alone[1]["nll"]) / 2) > 1e-4


def test_every_policy_is_compared_with_the_full_control(model: Any, tokens: Draw) -> None:
    policies = ["full", "window:window=16", "h2o:heavy=8,recent=8"]
    found = [o.row for o in perplexity.run(model, tokens(200), policies, bucket=32)]
    assert found[0]["nll_delta"] == 0
    for row in found[1:]:
        assert row["nll_delta"] == pytest.approx(row["nll"] - found[0]["nll"], abs=1e-9)
        assert row["nll_delta_low"] <= row["nll_delta"] <= row["nll_delta_high"]
        assert row["kept_tokens"] == 16
    assert found[2]["departures"] == {"chunk": 64}
    assert found[1]["evicting_from"] == 32  # buckets that begin after the budget


def test_a_model_patched_by_the_user_stays_patched(model: Any, tokens: Draw) -> None:
    from kvevict.models.patch import patch

    with patch(model):
        perplexity.run(model, tokens(40), ["window:window=16"])
        assert model._kvevict is not None
    assert not hasattr(model, "_kvevict")
    perplexity.run(model, tokens(40), ["window:window=16"])
    assert not hasattr(model, "_kvevict")


@pytest.mark.parametrize(
    ("policy", "budget", "expected"),
    [
        ("streaming_llm:sinks=4,window=100", 64, "streaming_llm:sinks=4,window=60"),
        ("h2o:heavy=300,recent=100", 64, "h2o:heavy=48,recent=16"),
        ("h2o:heavy=1,recent=1,sinks=4", 65, "h2o:heavy=30,recent=31,sinks=4"),
        ("window", 64, "window:window=64"),
        ("random:budget=100,sinks=4", 64, "random:budget=64,sinks=4"),
        ("full", 64, "full"),
    ],
)
def test_a_policy_is_brought_to_a_budget_exactly(policy: str, budget: int, expected: str) -> None:
    found = at_budget(parse(policy), budget)
    assert found == parse(expected)
    assert found.capacity in (budget, None)


def test_shares_are_shares_of_the_stream() -> None:
    found = policies_at(["full", "streaming_llm", "h2o:heavy=10%,recent=10%"], ["20%"], 1000)
    assert [p.capacity for p in found] == [None, 200, 200]
    assert str(found[0]) == "full"


def test_bad_budgets_are_refused() -> None:
    for budget in ("x", 0, "0%", 3):
        with pytest.raises(PolicyError):
            policies_at(["streaming_llm:sinks=4,window=8"], [budget], 100)


def test_a_text_not_longer_than_the_budget_is_refused(model: Any, tokens: Draw) -> None:
    with pytest.raises(KvevictError, match="nothing would be evicted"):
        perplexity.run(model, tokens(16), ["window:window=16"])


def test_intervals_hold_the_mean_and_are_seeded() -> None:
    parts = [{"start": 0, "count": 4, "nll_sum": float(s)} for s in (4, 8, 12, 16)]
    low, high = statistics.interval(parts, seed=1)
    assert low < statistics.mean(parts) < high
    assert (low, high) == statistics.interval(parts, seed=1)
    assert all(math.isnan(x) for x in statistics.interval(parts[:1]))


def test_split_gives_a_token_across_the_border_to_the_answer(tokenizer: Any) -> None:
    before, after = split_ids(tokenizer, "the code is ", "12345")
    assert tokenizer.decode(before) == "the code is "
    assert tokenizer.decode(after) == "12345"


def test_short_names_keep_the_sizes() -> None:
    assert short(str(parse("h2o:heavy=8,recent=8"))) == "h2o:heavy=8,recent=8"
    assert short(str(parse("streaming_llm"))) == "streaming_llm:sinks=4,window=1020"
    assert short(str(parse("h2o:sinks=4,decay=0.5"))).endswith("sinks=4,decay=0.5")
