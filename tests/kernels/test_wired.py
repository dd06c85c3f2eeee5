"""The kernels inside a patched model: the same logits, scores and kept sets as torch."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvevict
from kvevict.models.releases import cache_argument


def tiny(device, seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().to(device)


def run(model, ids, policy, backend, mask=None, prompt=14, evict_every=1):
    cache = kvevict.EvictionCache(model, policy, backend=backend, evict_every=evict_every)
    assert cache.backend == backend
    outs, at = [], 0
    with torch.no_grad():
        for size in (prompt, 1, 1, 5, 1, 1, 1):
            part = None if mask is None else mask[:, : at + size]
            given = {"attention_mask": part, cache_argument(model): cache}
            outs.append(model(ids[:, at : at + size], **given).logits)
            at += size
    return torch.cat(outs, 1), cache


@pytest.mark.parametrize(
    ("policy", "evict_every"),
    [
        ("h2o:heavy=4,recent=4", 1),
        ("h2o:heavy=4,recent=3,sinks=1,decay=0.9", 1),
        ("h2o:heavy=4,recent=4", 3),
        ("h2o:heavy=4,recent=4,decay=0.9,scope=layer", 1),
        ("h2o:heavy=40,recent=40", 1),
        ("snapkv:heavy=5,recent=3,window=2", 1),
        ("tova:budget=8", 1),
        ("streaming_llm:sinks=2,window=6", 1),
    ],
)
def test_triton_in_a_model_equals_torch(device, policy, evict_every):
    model = tiny(device)
    ids = torch.randint(0, 64, (1, 30), device=device)
    with kvevict.patch(model):
        want, by_torch = run(model, ids, policy, "torch", evict_every=evict_every)
        got, by_triton = run(model, ids, policy, "triton", evict_every=evict_every)
        assert torch.equal(by_torch.kept_positions(1), by_triton.kept_positions(1))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        if by_torch.policy.needs_scores:
            torch.testing.assert_close(by_triton.scores(1), by_torch.scores(1))


def test_triton_with_left_padded_rows_equals_torch(device):
    model = tiny(device, seed=1)
    ids = torch.randint(0, 64, (2, 30), device=device)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with kvevict.patch(model):
        want, by_torch = run(model, ids, "h2o:heavy=4,recent=4", "torch", mask)
        got, by_triton = run(model, ids, "h2o:heavy=4,recent=4", "triton", mask)
        assert torch.equal(by_torch.kept_positions(1), by_triton.kept_positions(1))
        real = mask[:, : got.shape[1]].bool()
        torch.testing.assert_close(got[real], want[real], rtol=1e-4, atol=1e-4)


def test_triton_without_a_gpu_is_refused_with_the_remedy(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny("cpu")
    with kvevict.patch(model), pytest.raises(kvevict.UnsupportedModelError, match="backend="):
        kvevict.EvictionCache(model, "h2o:heavy=4,recent=4", backend="triton")
