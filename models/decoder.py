"""decoder: which part of a model is patched, and which models are none that could be."""

import inspect
from typing import Any

from kvevict.errors import UnsupportedModelError


def base_model(model: Any) -> Any:
    """Return the module whose forward announces a cache: the decoder without its head."""
    finders = (
        lambda: model.get_decoder(),
        lambda: model.base_model,
        lambda: model.model,  # Llama 4 text, where the first two are the model itself
    )
    for find in finders:
        try:
            found = find()
        except AttributeError:
            continue
        names = inspect.signature(type(found).forward).parameters
        if found is not model and names.keys() & {"cache", "past_key_values"}:
            return found
    return model


def check_model(model: Any) -> Any:
    """Return the attention implementation in force, or refuse what is no decoder."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model; give a decoder-only model such "
            "as one of AutoModelForCausalLM"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{config.model_type}: an encoder-decoder has cross attention; give a decoder-only one"
        )
    if base_model(model) is model:
        raise UnsupportedModelError(
            f"{type(model).__name__}: give the model with its head, such as AutoModelForCausalLM"
        )
    return config.get_text_config(decoder=True)._attn_implementation
