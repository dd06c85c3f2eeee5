"""patch() is reversible to the byte, touches one instance, and refuses what it cannot serve."""

import copy
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    FalconConfig,
    GPT2Config,
    MptConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama import modeling_llama

import kvevict
from kvevict import EvictionCache, PolicyError, UnsupportedModelError, patch
from kvevict.policies import H2O, StreamingLLM


def digest(model: Any, folder: Path) -> dict[str, str]:
    model.save_pretrained(folder)
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def anatomy(model: Any) -> dict[str, Any]:
    """Everything of a model that a patch could leave behind."""
    hooks = {}
    for name, module in model.named_modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs"):
            hooks[name, kind] = len(getattr(module, kind))
    return {
        "hooks": hooks,
        "dict": sorted(model.__dict__),
        "base": sorted(model.model.__dict__),
        "config": model.config.to_dict(),
        "attention": model.config._attn_implementation,
        "forward": type(model).forward,
        "prepare": model._prepare_cache_for_generation.__func__,
        "function": modeling_llama.eager_attention_forward,
        "training": model.training,
    }


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("policy", [None, "h2o:heavy=6,recent=6"], ids=["none", "h2o"])
def test_unpatching_leaves_the_model_as_it_was(
    toy: Any, draw: Any, tmp_path: Path, attention: str, policy: str | None
) -> None:
    toy.set_attn_implementation(attention)
    ids = torch.tensor([draw(30)])
    saved, before, logits = digest(toy, tmp_path / "a"), anatomy(toy), toy(ids).logits
    with patch(toy, policy):
        toy.generate(ids, max_new_tokens=5, do_sample=False)
        assert toy.config._attn_implementation != attention
    assert anatomy(toy) == before
    assert digest(toy, tmp_path / "b") == saved
    assert torch.equal(toy(ids).logits, logits)
    out = toy.generate(ids, max_new_tokens=5, return_dict_in_generate=True)
    assert type(out.cache if hasattr(out, "cache") else out.past_key_values) is DynamicCache


def test_a_patched_model_saves_the_same_bytes(toy: Any, tmp_path: Path) -> None:
    saved = digest(toy, tmp_path / "a")
    with patch(toy, "streaming_llm:sinks=2,window=4"):
        assert digest(toy, tmp_path / "b") == saved


def test_a_bare_call_of_a_patched_model_is_unchanged(toy: Any, draw: Any, feed: Any) -> None:
    ids = torch.tensor([draw(30)])
    logits, plain = toy(ids).logits, feed(toy, DynamicCache(), ids, [20] + [1] * 10)
    with patch(toy, "h2o:heavy=6,recent=6"):
        out = toy(ids, use_cache=True)
        assert torch.equal(out.logits, logits)
        assert torch.equal(feed(toy, DynamicCache(), ids, [20] + [1] * 10), plain)


def test_an_error_inside_the_block_unpatches(toy: Any) -> None:
    before = anatomy(toy)
    with pytest.raises(ZeroDivisionError), patch(toy, "full"):
        _ = 1 / 0
    assert anatomy(toy) == before


def test_unpatch_twice_does_nothing(toy: Any) -> None:
    before = anatomy(toy)
    handle = patch(toy, "full")
    handle.unpatch()
    handle.unpatch()
    assert anatomy(toy) == before


def test_patching_again_with_the_same_settings_is_the_same_handle(toy: Any) -> None:
    with patch(toy, "h2o:heavy=6,recent=6") as handle:
        assert patch(toy) is handle
        assert patch(toy, H2O(6, 6)) is handle
        with pytest.raises(PolicyError, match="unpatch"):
            patch(toy, "h2o:heavy=7,recent=6")
        assert anatomy(toy)["hooks"]["model", "_forward_pre_hooks"] == 1


def test_an_inner_patch_leaves_the_outer_one_in_force(toy: Any, draw: Any) -> None:
    # A library that patches for its own call must not unpatch its caller's model.
    ids = torch.tensor([draw(30)])
    with patch(toy, "h2o:heavy=6,recent=6"):
        with patch(toy):
            toy.generate(ids, max_new_tokens=3)
        out = toy.generate(ids, max_new_tokens=3, return_dict_in_generate=True)
        cache = out.cache if hasattr(out, "cache") else out.past_key_values
        assert isinstance(cache, EvictionCache)


def test_only_the_instance_is_patched(make_tiny: Any, draw: Any) -> None:
    one, two = make_tiny(0), make_tiny(0)
    ids = torch.tensor([draw(30)])
    with patch(one, "streaming_llm:sinks=2,window=4"):
        out = two.generate(ids, max_new_tokens=5, return_dict_in_generate=True)
        assert type(out.cache if hasattr(out, "cache") else out.past_key_values) is DynamicCache
        assert two.config._attn_implementation == "sdpa"


def test_a_bad_policy_leaves_the_model_unpatched(toy: Any) -> None:
    before = anatomy(toy)
    for bad in ("h2o:heavy=-1", "no_such_policy", "h2o:budget=3"):
        with pytest.raises(PolicyError):
            patch(toy, bad)
        assert anatomy(toy) == before


def test_importing_and_patching_edit_no_modeling_code() -> None:
    code = (
        "import hashlib, inspect, torch\n"
        "from transformers.models.llama import modeling_llama as m\n"
        "def state():\n"
        "    return {n: id(v) for n, v in vars(m).items()}, m.LlamaAttention.forward\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "before = state()\n"
        "import kvevict, kvevict.cache, kvevict.models.patch\n"
        "assert state() == before\n"
        "model = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=16, intermediate_size=16,\n"
        "    num_hidden_layers=1, num_attention_heads=2))\n"
        "with kvevict.patch(model, 'full'):\n"
        "    assert state() == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# -- what is refused ------------------------------------------------------------------------------


def small(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_learned_positions_serve_original_ones_and_refuse_the_others() -> None:
    model = small(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    with patch(model):
        with pytest.raises(UnsupportedModelError, match="positions"):
            EvictionCache(model, StreamingLLM(2, 4))
        with pytest.raises(UnsupportedModelError, match="positions"):
            EvictionCache(model, H2O(4, 4), positions="in_cache")
        assert EvictionCache(model, StreamingLLM(2, 4), positions="original").capacity == 6


@pytest.mark.parametrize(
    "config",
    [
        MptConfig(vocab_size=50, d_model=32, n_heads=2, n_layers=2, max_seq_len=64),
        FalconConfig(
            vocab_size=50,
            hidden_size=32,
            num_attention_heads=2,
            num_hidden_layers=2,
            alibi=True,
        ),
    ],
    ids=lambda c: c.model_type,
)
def test_attention_outside_the_interface_is_refused_and_left_alone(config: Any) -> None:
    model = small(config)
    implementation = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=config.model_type):
        patch(model, "streaming_llm:sinks=2,window=4")
    assert model.config._attn_implementation == implementation
    assert not hasattr(model, "_kvevict")
    model(torch.tensor([[1, 2, 3]]))


def test_what_is_no_decoder_with_a_head_is_refused(toy: Any) -> None:
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    for wrong, named in (
        (t5, "encoder-decoder"),
        (toy.model, "head"),
        (torch.nn.Linear(2, 2), "transformers model"),
    ):
        with pytest.raises(UnsupportedModelError, match=named):
            patch(wrong)


def test_a_deep_copy_of_a_patched_model_can_be_patched_on_its_own(toy: Any, draw: Any) -> None:
    ids = torch.tensor([draw(20)])
    with patch(toy, "h2o:heavy=6,recent=6"):
        wanted = toy.generate(ids, max_new_tokens=5, do_sample=False)
    twin = copy.deepcopy(toy)
    with patch(twin, "h2o:heavy=6,recent=6"):
        assert torch.equal(twin.generate(ids, max_new_tokens=5, do_sample=False), wanted)


def test_the_handle_says_what_was_found(toy: Any) -> None:
    with patch(toy, "h2o:heavy=6,recent=6") as handle:
        assert handle.policy == H2O(6, 6)
        assert len(handle.findings.ropes) == 3
        cache = handle.new_cache()
        assert (cache.positions, cache.backend) == ("original", "torch")
    assert kvevict.patch is patch


def test_what_the_instance_had_of_its_own_comes_back(toy: Any) -> None:
    own = toy.generate

    def mine(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    toy.generate = mine
    try:
        handle = patch(toy, "full")
        assert toy.__dict__["generate"] is not mine
        handle.unpatch()
        assert toy.__dict__["generate"] is mine
        handle.unpatch()
        assert toy.__dict__["generate"] is mine
    finally:
        del toy.generate
