from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvevict.eval import divergence
from kvevict.eval.caches import CacheSettings, feed, patched
from kvevict.eval.texts import Tokens
from kvevict.policy import parse

Draw = Callable[[int], Tokens]
S = CacheSettings(chunk=16)


def test_kl_is_torchs() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 30), torch.randn(5, 30)
    expected = torch.nn.functional.kl_div(
        b.log_softmax(-1), a.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(divergence.divergence(a, b), expected)
    assert divergence.divergence(a, a).max() == 0


def test_nothing_diverges_before_something_is_evicted(model: Any, tokens: Draw) -> None:
    row = divergence.run(
        model, tokens(100), ["window:window=64"], settings=S, bucket=16, mass_at=0
    )[0].row
    sums = [b["nll_sum"] for b in row["buckets"]]
    assert max(sums[:4]) < 1e-3
    assert min(sums[4:-1]) > 1e-2
    assert 0 < row["top1_agreement"] < 1
    assert row["tokens_scored"] == 100


def test_a_better_budget_diverges_less_and_holds_more_attention(model: Any, tokens: Draw) -> None:
    rows = [
        o.row
        for o in divergence.run(
            model, tokens(200), ["streaming_llm"], budgets=[16, 150], settings=S
        )
    ]
    assert rows[1]["kl"] < rows[0]["kl"]
    assert rows[1]["attention_mass"] > rows[0]["attention_mass"]
    assert len(rows[0]["attention_mass_layers"]) == 2


def test_attention_mass_is_counted_by_hand(model: Any, tokens: Draw) -> None:
    ids = tokens(61).ids
    cache_settings = CacheSettings(chunk=20)
    with patched(model):
        full = cache_settings.cache(model, parse("full"))
        feed(model, ids[:60], full, cache_settings)
        everything = divergence.attention_mass(model, ids, full, 20)
        window = cache_settings.cache(model, parse("window:window=10"))
        feed(model, ids[:60], window, cache_settings)
        held = divergence.attention_mass(model, ids, window, 20)
        assert model._kvevict is not None
    torch.testing.assert_close(everything, torch.ones(2))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids[None], output_attentions=True).attentions
    expected = torch.stack([w[0, :, -1, 50:].sum(-1).mean() for w in weights])
    torch.testing.assert_close(held, expected, atol=1e-5, rtol=0)


def test_the_model_is_left_as_it_was(model: Any, tokens: Draw) -> None:
    before = model.config._attn_implementation
    divergence.run(model, tokens(60), ["window:window=16"], settings=S, mass_at=2)
    assert model.config._attn_implementation == before
    assert not hasattr(model, "_kvevict")


@pytest.mark.parametrize("mass_at", [0, 3])
def test_mass_is_optional(model: Any, tokens: Draw, mass_at: int) -> None:
    row = divergence.run(model, tokens(60), ["window:window=16"], settings=S, mass_at=mass_at)
    assert ("attention_mass" in row[0].row) is (mass_at > 0)
