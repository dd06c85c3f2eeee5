"""Each private or version-dependent thing of transformers (and torch) that kvevict uses, by name.

When a release breaks something, the test that fails here says what; the code that uses it is named
in each docstring.
"""

import inspect
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.generation import GenerationMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask, sdpa_mask

from kvevict.layers import EvictionLayer
from kvevict.models.releases import cache_argument

NEW = Version(transformers.__version__) >= Version("5.24")


def names_of(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.fixture(scope="module")
def model() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=2, **sizes)).eval()


def test_prepare_cache_for_generation_is_a_method_of_the_class() -> None:
    """patch.py wraps `_prepare_cache_for_generation` on the instance; private."""
    names = names_of(GenerationMixin._prepare_cache_for_generation)
    assert names[:3] == ["self", "generation_config", "model_kwargs"]


def test_generate_calls_prepare_cache_for_generation() -> None:
    source = inspect.getsource(GenerationMixin.generate)
    assert "self._prepare_cache_for_generation(" in source


def test_prepare_inputs_for_generation_hands_the_cache_on_as_a_keyword(model: Any) -> None:
    """patch.py wraps it to notice a model that drops its cache."""
    name = cache_argument(model)
    cache = DynamicCache()
    ids = torch.tensor([[1, 2]])
    given = model.prepare_inputs_for_generation(ids, use_cache=True, **{name: cache})
    assert given[name] is cache


def test_forward_calls_its_cache_by_the_name_of_its_release(model: Any) -> None:
    """patch.py, stream.py, generation.py: `cache` from 5.24 on, `past_key_values` before."""
    assert cache_argument(model) == ("cache" if NEW else "past_key_values")


def test_update_gets_the_attention_keywords_from_5_24_on() -> None:
    """cache.py reads `kwargs["kwargs"]`; without it attention.py finds the layer by context."""
    source = inspect.getsource(transformers.models.llama.modeling_llama.LlamaAttention.forward)
    assert ("kwargs=kwargs" in source) is NEW


def test_attention_modules_have_a_layer_idx(model: Any) -> None:
    """attention.py and probe.py find the layer by it."""
    assert [x.self_attn.layer_idx for x in model.model.layers] == [0, 1]


def test_attention_and_masks_register_by_name() -> None:
    """patch.py registers one function of each under "kvevict"."""
    assert callable(AttentionInterface.register)
    assert callable(AttentionMaskInterface.register)


def test_sdpa_is_called_with_these_arguments() -> None:
    """attention.py delegates to it."""
    names = names_of(sdpa_attention_forward)
    assert names[:5] == ["module", "query", "key", "value", "attention_mask"]
    assert {"dropout", "scaling"} <= set(names)


def test_sdpa_mask_exists() -> None:
    """patch.py registers it as the mask function of our attention."""
    assert "attention_mask" in names_of(sdpa_mask)


def test_the_implementation_in_force_is_on_the_config(model: Any) -> None:
    """patch.py checks `_attn_implementation` after setting it, since some families ignore it."""
    assert isinstance(model.config._attn_implementation, str)
    assert callable(PreTrainedModel.set_attn_implementation)


def test_a_4d_mask_is_handed_through_untouched(model: Any) -> None:
    """patch.py passes a dummy 4D mask where every layer is ours."""
    dummy = torch.zeros(1, 1, 1, 1)
    given: dict[str, Any] = {"config": model.config, "attention_mask": dummy}
    states = torch.zeros(1, 3, 32)
    given |= {"inputs_embeds": states, cache_argument(model): None, "position_ids": None}
    known = names_of(create_causal_mask)
    assert create_causal_mask(**{k: v for k, v in given.items() if k in known}) is dummy


def test_cache_layers_are_made_from_the_config(model: Any) -> None:
    """cache.py takes the layers of a DynamicCache and replaces those of exactly this type."""
    layers = DynamicCache(config=model.config).layers
    assert [type(x) for x in layers] == [DynamicLayer, DynamicLayer]


def test_a_cache_takes_a_list_of_layers() -> None:
    """cache.py calls `super().__init__(layers=[])`."""
    assert Cache(layers=[]).layers == []


def test_every_abstract_method_of_a_layer_is_there() -> None:
    """layers.py derives from CacheLayerMixin."""
    missing = [x for x in CacheLayerMixin.__abstractmethods__ if not hasattr(EvictionLayer, x)]
    assert not missing
    assert not getattr(EvictionLayer, "__abstractmethods__", None)


def test_layers_answer_what_caches_ask() -> None:
    """cache.py inherits these and lets its layers answer."""
    for name in ("is_compileable", "is_sliding", "reorder_cache", "batch_repeat_interleave"):
        assert hasattr(EvictionLayer, name)


def test_drafts_are_announced_before_the_first_forward() -> None:
    """drafts.py and wraps.py: assisted decoding calls these, and then the model; one is private."""
    source = inspect.getsource(GenerationMixin._assisted_decoding)
    source = source.replace("past_key_values.", "cache.")
    announced = ["cache.activate_past_recording(", "self._get_candidate_generator("]  # in any order
    assert max(source.index(step) for step in announced) < source.index("self(**")
    names = names_of(GenerationMixin._get_candidate_generator)
    assert {"generation_config", "input_ids", "model_kwargs", "assistant_model"} <= set(names)
    assert "outputs.cache.crop(-" in source.replace("past_key_values", "cache")
    assert "next_sequence_length" in names_of(GenerationMixin.prepare_inputs_for_generation)


def test_caches_and_layers_say_whether_they_can_be_cropped() -> None:
    """drafts.py overrides the first, asks the second of layers that are not ours."""
    assert isinstance(Cache.is_croppable, property)
    assert hasattr(CacheLayerMixin, "is_croppable")
    assert callable(Cache.activate_past_recording)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.25"), reason="from 5.25 on")
def test_served_models_are_loaded_by_a_loader() -> None:
    """served.py derives from both and overrides the private one; the server makes the loader."""
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager

    assert callable(model_manager.ModelLoader._load_model)
    assert "self.loader" in inspect.getsource(Serve)
    assert {"run", "run_api_servers"} <= set(dir(Serve))


def test_a_layer_type_would_register_itself_globally() -> None:
    """layers.py leaves `_layer_type` unset; set, every DynamicCache of that type became ours."""
    assert getattr(EvictionLayer, "_layer_type", None) is None


def test_rope_parameters_and_inv_freq_are_where_the_probe_looks(model: Any) -> None:
    """probe.py reads `config.rope_parameters` and buffers named `*inv_freq`."""
    assert model.config.rope_parameters["rope_type"] == "default"
    assert [n for n, _ in model.named_buffers() if n.endswith("inv_freq")]


def test_text_config_of_a_decoder(model: Any) -> None:
    """cache.py, patch.py, probe.py."""
    assert model.config.get_text_config(decoder=True) is model.config


def test_the_decoder_is_found(model: Any) -> None:
    """patch.py puts its hooks on `get_decoder()`, else on `base_model`."""
    assert model.get_decoder() is model.base_model is model.model


def test_gguf_config_exists_where_weights_stay_packed() -> None:
    """small.py asks for dense weights where the release would leave them packed."""
    if hasattr(transformers, "GgufConfig"):
        assert "dequantize" in names_of(transformers.GgufConfig.__init__)


def test_torch_returns_the_log_sum_exp_on_cpu() -> None:
    """library.py calls a private operation of torch."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q = torch.randn(1, 4, 3, 8)
    out, lse = flash(q, q[:, :2], q[:, :2], 0.0, True, attn_mask=None, scale=0.5)
    assert out.shape == q.shape
    assert lse.shape == (1, 4, 3)
    assert lse.dtype == torch.float32
