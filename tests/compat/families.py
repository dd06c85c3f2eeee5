"""Tiny random models of every causal language model family of the installed transformers.

A family is a `model_type` of transformers' own mapping for causal language models. Its default
config is shrunk by rule; where a rule is not enough, `OVERRIDES` says what else it needs. Each kind
of layer that the full-size model has is there once. `VARIANTS` add options within a family.
"""

import inspect
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 96
_WINDOW = 9
_LARGEST = 6_000_000  # parameters; more means that a rule is missing

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "n_inner": 96,
    "max_position_embeddings": 256,
    "num_layers": 2,
    "num_heads": 4,
    "d_model": 64,
    "ffn_dim": 96,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "word_embed_proj_dim": 64,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_multiplier": 0.25,  # at 1.0 softmax saturates and scores tie
    "initializer_range": 0.3,  # at 0.02 attention is near uniform, and a wrong variant passes
}

# Latent attention: as many KV heads as heads.
_LATENT = (
    *("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
    *("dots3_note_text", "glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "longcat_flash"),
    *("minicpm3", "mistral4", "sarvam_mla", "youtu"),
)

# What the rules do not know.
OVERRIDES: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": _WINDOW},
    "falcon": {"alibi": False},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 64},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "dots1": {"n_shared_experts": 1},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 32, "mamba_n_heads": 4},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 4,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "zamba2": {
        "layer_types": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
    **{name: {"num_key_value_heads": 4, "head_dim": 8} for name in _LATENT},
}

# name: (family, settings)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama + linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama + yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama + llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "rope_theta": 1e4,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama + dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "phi3 + longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [2.0 + 0.5 * i for i in range(8)],
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral + full attention": ("mistral", {"sliding_window": None}),
    "llama + one KV head": ("llama", {"num_key_value_heads": 1}),
    "qwen2 + sliding layers": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": _WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def names() -> list[str]:
    """Return every text family and variant, in order.

    Models of several modalities are left out: their text model is a family of its own.
    """
    text = [x for x in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not CONFIG_MAPPING[x].sub_configs]
    return sorted([*text, *VARIANTS])


def config_of(name: str) -> Any:
    """Return the shrunk config of a family or variant."""
    family, settings = VARIANTS.get(name, (name, {}))
    kind = CONFIG_MAPPING[family]
    settings = {**OVERRIDES.get(family, {}), **settings}
    base = kind()
    accepted = set(inspect.signature(kind.__init__).parameters)
    mapped = dict(getattr(kind, "attribute_map", {}))
    wanted = {
        key: value
        for key, value in _SMALL.items()
        if (key in accepted or getattr(base, key, None) is not None) and key not in mapped
    }
    wanted = {key: value for key, value in wanted.items() if not _is_read_only(kind, key)}
    kinds = list(dict.fromkeys(getattr(base, "layer_types", None) or []))
    if kinds and not _is_read_only(kind, mapped.get("layer_types", "layer_types")):
        if len(kinds) == 1:
            kinds = kinds * 2
        wanted["layer_types"] = kinds
        wanted["num_hidden_layers"] = len(kinds)
    if getattr(base, "sliding_window", None) is not None:
        wanted["sliding_window"] = _WINDOW
    return kind(**{**wanted, **settings})


def _is_read_only(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), property) and getattr(kind, name).fset is None


class NotBuiltError(Exception):
    """A family whose tiny model the rules do not make."""


def build(name: str, seed: int = 0) -> Any:
    """Return the tiny model, in eval mode, without a parameter left at zero.

    Raises:
        NotBuiltError: a model that the rules do not shrink, or that does not run.
    """
    try:
        model = _build(name, seed)
        with torch.no_grad():
            model(torch.arange(3, 13)[None], use_cache=True)
    except Exception as error:  # whatever transformers raises for a config it does not like
        raise NotBuiltError(f"{name}: {type(error).__name__}") from error
    return model


def _build(name: str, seed: int) -> Any:
    config = config_of(name)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > _LARGEST:
        raise NotBuiltError(f"{name}: {size:,} parameters, not shrunk")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and not parameter.any():
                parameter.normal_(std=0.3)
    return model
