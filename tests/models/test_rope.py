"""The shift probe finds each layer's rotation by measuring, and rotations round once."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma3TextConfig,
    GlmConfig,
    GPTNeoXConfig,
    MistralConfig,
    PhiConfig,
    Qwen3Config,
)

from kvevict import EvictionCache, UnsupportedModelError, patch
from kvevict.models.rope import Rope, fit
from kvevict.policies import H2O, StreamingLLM

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "mistral": (MistralConfig(**COMMON, sliding_window=None), "half", 16),
    "qwen3": (Qwen3Config(**COMMON, head_dim=16), "half", 16),
    "phi": (PhiConfig(**COMMON, partial_rotary_factor=0.5), "half", 8),
    "glm": (GlmConfig(**COMMON, head_dim=16, partial_rotary_factor=0.5), "pair", 8),
    "cohere": (CohereConfig(**COMMON), "pair", 16),
    "gpt_neox": (
        GPTNeoXConfig(
            **{k: v for k, v in COMMON.items() if k != "num_key_value_heads"}, rotary_pct=0.5
        ),
        "half",
        8,
    ),
}


def small(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_probe_finds_layout_and_width(name: str) -> None:
    config, style, dims = FAMILIES[name]
    with patch(small(config)) as handle:
        for rope in handle.findings.ropes:
            assert rope is not None
            assert (rope.style, rope.dims) == (style, dims)
        assert len({rope.key for rope in handle.findings.ropes}) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_positions_inside_the_cache_are_exact_for_every_layout(
    name: str, draw: Any, feed: Any, difference: Any
) -> None:
    # One token turns the head's keys, a chunk turns its queries: two ways to the same positions.
    model = small(FAMILIES[name][0])
    ids = draw(60)
    with patch(model):
        runs = [
            feed(model, EvictionCache(model, StreamingLLM(3, 9)), ids, forwards)
            for forwards in (None, [60], [7] * 8 + [4])
        ]
        full = feed(model, EvictionCache(model, StreamingLLM(3, 90)), ids, [60])
    assert difference(runs[0], runs[1]) < 5e-3
    assert difference(runs[0], runs[2]) < 5e-3
    assert difference(runs[0], full) > 0.1


def test_layers_without_positions_are_not_turned() -> None:
    config = Cohere2Config(**{**COMMON, "num_hidden_layers": 4}, sliding_window=8, head_dim=16)
    with patch(small(config)) as handle:
        styles = [rope.style for rope in handle.findings.ropes]
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert [i for i, style in enumerate(styles) if style == "none"] == full


def test_layers_with_frequencies_of_their_own_get_them() -> None:
    config = Gemma3TextConfig(
        **{**COMMON, "num_hidden_layers": 6},
        head_dim=16,
        sliding_window=8,
        query_pre_attn_scalar=16,
    )
    with patch(small(config)) as handle:
        ropes = handle.findings.ropes
    kinds = dict(zip(config.layer_types, (r.key for r in ropes), strict=True))
    assert len(set(kinds.values())) == 2


def test_what_is_no_rotation_is_not_guessed() -> None:
    keys = torch.randn(1, 2, 6, 16)
    freq = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    assert fit(keys, torch.randn(1, 2, 6, 16), 37, [freq], 1e-4) is None
    rope = Rope("half", freq.double(), 0, 16)
    turned = rope.rotate(keys, rope.turn(37, keys.device))
    found = fit(keys, turned, 37, [freq], 1e-4)
    assert found is not None
    assert found.style == "half"
    backwards = rope.rotate(keys, rope.turn(-37, keys.device))
    found = fit(keys, backwards, 37, [freq], 1e-4)
    assert found is not None
    assert bool((found.inv_freq <= 0).all())
    assert fit(keys, turned, 36, [freq], 1e-4) is None


@pytest.mark.parametrize("style", ["half", "pair"])
def test_a_turn_and_its_inverse_cancel_at_any_distance(style: Any) -> None:
    freq = (10000.0 ** (-torch.arange(0, 16, 2) / 16)).double()
    rope, x = Rope(style, freq, 0, 16), torch.randn(2, 3, 5, 16)
    for delta in (1, 4096, 4_000_000):
        there = rope.rotate(x, rope.turn(delta, x.device))
        back = rope.rotate(there, rope.turn(-delta, x.device))
        torch.testing.assert_close(back, x, atol=1e-5, rtol=0)
        assert (there.norm(dim=-1) - x.norm(dim=-1)).abs().max() < 1e-5


def test_angles_are_exact_at_four_million_positions() -> None:
    # A float32 angle is off by 0.08 rad there.
    freq = (100000.0 ** (-torch.arange(0, 64, 2) / 64)).double()
    cos, sin = Rope("half", freq, 0, 64).turn(4_000_003, torch.device("cpu"))
    exact = 4_000_003 * freq
    assert (cos - exact.cos().float()).abs().max() < 1e-6
    assert (sin - exact.sin().float()).abs().max() < 1e-6


def test_a_partial_rotation_leaves_the_other_dims_alone() -> None:
    freq = (10000.0 ** (-torch.arange(0, 8, 2) / 8)).double()
    x = torch.randn(1, 2, 4, 16)
    for start in (0, 8):
        rope = Rope("half", freq, start, 8)
        turned = rope.rotate(x, rope.turn(5, x.device))
        rest = [i for i in range(16) if not start <= i < start + 8]
        assert torch.equal(turned[..., rest], x[..., rest])
        assert not torch.equal(turned, x)


def test_a_family_without_keywords_in_update_is_served(
    draw: Any, feed: Any, kept: Any, difference: Any
) -> None:
    # GPT-NeoX hands the cache no keywords: the layer is found by the forward that runs.
    model = small(FAMILIES["gpt_neox"][0])
    ids = draw(50)
    with patch(model):
        a, b = EvictionCache(model, H2O(6, 6)), EvictionCache(model, H2O(6, 6))
        first = feed(model, a, ids, [20] + [1] * 30)
        batch = feed(model, b, [ids, ids], [20] + [1] * 30)
    assert kept(a)[0][0] != kept(a)[0][1]
    assert kept(a) == kept(b, 1)
    assert difference(batch[1], first[0]) < 5e-3


def test_sliding_layers_of_transformers_stay_theirs_and_the_full_ones_evict(
    draw: Any, feed: Any
) -> None:
    config = Gemma3TextConfig(
        **{**COMMON, "num_hidden_layers": 6},
        head_dim=16,
        sliding_window=8,
        query_pre_attn_scalar=16,
    )
    model = small(config)
    with patch(model):
        cache = EvictionCache(model, H2O(6, 6))
        feed(model, cache, draw(50), [20] + [1] * 30)
        full = config.layer_types.index("full_attention")
        assert cache.kept_positions(full).shape[2] == 12
        with pytest.raises(UnsupportedModelError, match="full attention"):
            EvictionCache(model, H2O(6, 6), positions="in_cache")
