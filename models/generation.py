"""Generate text under a policy, with what it cost."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from kvevict.cache import EvictionCache, Positions
from kvevict.errors import PolicyError
from kvevict.models.patch import patch
from kvevict.models.releases import cache_argument
from kvevict.policy import Policy


@dataclass(frozen=True)
class Generated:
    """A continuation and what it took.

    Attributes:
        text: the continuation.
        prompt_tokens: tokens fed first.
        new_tokens: tokens generated.
        kept_tokens: tokens held at the end, per layer and KV head.
        cache_bytes: of the key and value buffers.
        tokens_per_second: new tokens over wall time, prefill included.
        positions: "in_cache" or "original".
        backend: which ran.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    kept_tokens: int
    cache_bytes: int
    tokens_per_second: float
    positions: str
    backend: str


def generate_text(
    model: Any,
    tokenizer: Any,
    prompt: str,
    policy: Policy | str,
    *,
    max_new_tokens: int = 128,
    chunk: int | None = None,
    chat: bool = True,
    positions: Positions = "auto",
    evict_every: int = 1,
    sample: bool = False,
    streamer: Any = None,
) -> Generated:
    """Continue a prompt with the cache held to a policy's budget.

    Args:
        model: a decoder-only model; patched for the call if it is not.
        tokenizer: its tokenizer.
        prompt: text; wrapped by the chat template where `chat` and the tokenizer has one.
        policy: a policy or its string.
        max_new_tokens: at most so many.
        chunk: prefill chunk in tokens; None feeds the prompt in one forward.
        chat: whether to use the chat template.
        positions: see `EvictionCache`.
        evict_every: see `EvictionCache`.
        sample: whether to sample rather than to be greedy.
        streamer: a transformers streamer, which gets tokens as they come.

    Raises:
        PolicyError: max_new_tokens or chunk below 1.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("chunk", chunk)):
        if value is not None and value < 1:
            raise PolicyError(f"{name}={value}: give at least 1")
    if chat and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs = {k: v.to(model.device) for k, v in inputs.items() if k != "token_type_ids"}
    length = inputs["input_ids"].shape[1]
    patched_before = hasattr(model, "_kvevict")
    handle = patch(model)
    try:
        cache = EvictionCache(model, policy, positions=positions, evict_every=evict_every)
        options: dict[str, Any] = {cache_argument(model): cache, "streamer": streamer}
        if chunk is not None:
            options["prefill_chunk_size"] = chunk
        began = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                **inputs, max_new_tokens=max_new_tokens, do_sample=sample, **options
            )
        seconds = time.perf_counter() - began
    finally:
        if not patched_before:
            handle.unpatch()
    new = out[0, length:]
    return Generated(
        text=tokenizer.decode(new, skip_special_tokens=True),
        prompt_tokens=length,
        new_tokens=len(new),
        kept_tokens=kept_tokens(cache),
        cache_bytes=cache.nbytes(),
        tokens_per_second=len(new) / seconds,
        positions=cache.positions,
        backend=cache.backend,
    )


def kept_tokens(cache: EvictionCache) -> int:
    """Return the most tokens that any evicting layer holds per row and KV head."""
    held = [
        (cache.kept_positions(index) >= 0).sum(-1).max()
        for index, layer in enumerate(cache.layers)
        if hasattr(layer, "commit")
    ]
    return int(max(held))
