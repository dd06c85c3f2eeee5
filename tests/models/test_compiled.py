"""The step with static addresses: the same logits, kept sets and scores as the ordinary step."""

import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvevict
from kvevict.models.compiled import CompiledStep
from kvevict.models.releases import cache_argument

POLICIES = [
    "window:window=16",
    "streaming_llm:sinks=4,window=12",
    "h2o:heavy=8,recent=8",
    "h2o:heavy=6,recent=6,sinks=2,normalize=age,decay=0.9",
    "random:budget=16",
    "tova:budget=16",
    "tova:budget=16,scope=layer",
]


def tiny(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def full_caches(model, ids, policy, count=2):
    caches = [kvevict.EvictionCache(model, policy) for _ in range(count)]
    with torch.no_grad():
        for cache in caches:
            for part in (ids[:, :30], ids[:, 30:31], ids[:, 31:32]):
                model(part, **{cache_argument(model): cache})
    return caches


def check(policy, rows=1, compile=False, steps=40):
    model = tiny()
    ids = torch.randint(0, 96, (rows, 32 + steps))
    with kvevict.patch(model):
        plain, static = full_caches(model, ids, policy)
        step = CompiledStep(model, static, compile=compile)
        for at in range(32, 32 + steps):
            with torch.no_grad():
                want = model(ids[:, at : at + 1], **{cache_argument(model): plain}).logits
            torch.testing.assert_close(step(ids[:, at : at + 1]), want, rtol=1e-4, atol=1e-4)
        assert static.seen == plain.seen
        for layer in range(2):
            assert torch.equal(static.kept_positions(layer), plain.kept_positions(layer))
        # The cache goes on by the ordinary way afterwards.
        more = ids[:, :7]
        with torch.no_grad():
            want = model(more, **{cache_argument(model): plain}).logits
            got = model(more, **{cache_argument(model): static}).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_static_step_equals_the_ordinary_one(policy, rows):
    check(policy, rows)


def test_a_static_step_survives_rebases(monkeypatch):
    monkeypatch.setattr("kvevict.forward._REBASE_AT", 30)
    check("streaming_llm:sinks=4,window=12", steps=60)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["streaming_llm:sinks=4,window=12", "h2o:heavy=8,recent=8"])
def test_a_compiled_step_equals_the_ordinary_one_and_compiles_once(policy):
    if shutil.which("gcc") is None and shutil.which("g++") is None:
        pytest.skip("torch.compile on CPU needs a C++ compiler")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        check(policy, compile=True)


def test_a_cache_that_is_not_full_is_refused():
    model = tiny()
    ids = torch.randint(0, 96, (1, 8))
    with kvevict.patch(model):
        cache = kvevict.EvictionCache(model, "h2o:heavy=8,recent=8")
        with torch.no_grad():
            model(ids, **{cache_argument(model): cache})
        with pytest.raises(kvevict.CacheError, match="full"):
            CompiledStep(model, cache)


def test_h2o_with_positions_in_the_cache_is_refused():
    model = tiny()
    ids = torch.randint(0, 96, (1, 40))
    with kvevict.patch(model):
        cache = kvevict.EvictionCache(model, "h2o:heavy=8,recent=8", positions="in_cache")
        with torch.no_grad():
            for part in (ids[:, :30], ids[:, 30:31]):
                model(part, **{cache_argument(model): cache})
        with pytest.raises(kvevict.UnsupportedModelError, match="compiled"):
            CompiledStep(model, cache)


def test_an_unpatched_model_is_refused():
    model = tiny()
    cache = kvevict.EvictionCache(model, "h2o:heavy=8,recent=8")
    with pytest.raises(kvevict.NotPatchedError, match="patch"):
        CompiledStep(model, cache)


def test_a_static_step_that_fails_poisons_the_cache(monkeypatch):
    model = tiny()
    ids = torch.randint(0, 96, (1, 40))
    with kvevict.patch(model):
        (cache,) = full_caches(model, ids, "h2o:heavy=8,recent=8", 1)
        step = CompiledStep(model, cache, compile=False)

        def fail(*args, **kwargs):
            raise RuntimeError("planted")

        monkeypatch.setattr(model.model.layers[1].mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="planted"):
            step(ids[:, :1])
        with pytest.raises(kvevict.CacheError, match="reset"):
            cache.kept_positions(0)
