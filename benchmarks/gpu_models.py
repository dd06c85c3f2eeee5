"""GPU times of whole decode steps and prefills of Llama-3-8B with random weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache, StaticCache

import kvevict


class Scenario(NamedTuple):
    """One whole-model case.

    Attributes:
        name: "decode: H2O, triton".
        shape: what varies.
        prepare: builds the state (untimed) and returns the call to time.
    """

    name: str
    shape: dict[str, int]
    prepare: Callable[[], Callable[[], Any]]


class Sizes(NamedTuple):
    """Which sizes are run: the real ones, or tiny ones that exercise this script."""

    decode: tuple[tuple[int, int, int], ...] = (  # batch, budget, context
        (1, 1024, 131072),
        (1, 8192, 131072),
        (8, 2048, 16384),
        (64, 1024, 8192),
    )
    prompts: tuple[int, ...] = (8192, 32768)
    eager: int = 2048
    backends: tuple[str, ...] = ("torch", "triton")


TINY = Sizes(((2, 16, 40),), (24,), 24, ("torch",))


def build(tiny: bool) -> Any:
    """Build Llama-3-8B (or two small layers) with random weights on the GPU (or the CPU)."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=262144,
        rope_theta=500000.0,
    )  # fmt: skip
    if tiny:
        config = LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
    try:
        with torch.device("cpu" if tiny else "cuda"):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval()


def scenarios(model: Any, sizes: Sizes) -> Iterator[Scenario]:
    """Yield decode steps at a budget and at full length, then prefills."""
    for batch, budget, context in sizes.decode:
        shape = {"batch": batch, "budget": budget, "context": context}
        for policy in _policies(budget):
            for backend in sizes.backends:
                yield Scenario(
                    f"decode: {policy.split(':')[0]}, {backend}", shape,
                    _evicting(model, policy, backend, batch, budget),
                )  # fmt: skip
        yield Scenario("decode: DynamicCache", shape, _full(model, batch, context, static=False))
        yield Scenario("decode: StaticCache", shape, _full(model, batch, context, static=True))
    for length in sizes.prompts:
        shape = {"batch": 1, "tokens": length}
        for backend in sizes.backends:
            policy = f"h2o:heavy={length // 8},recent={length // 8}"
            yield Scenario(
                f"prefill: h2o, {backend}", shape, _prefill(model, length, policy, backend)
            )
        yield Scenario("prefill: DynamicCache", shape, _prefill(model, length))
    shape = {"batch": 1, "tokens": sizes.eager}
    yield Scenario("prefill: eager H2O (output_attentions)", shape, _eager(model, sizes.eager))
    for backend in sizes.backends:
        policy = f"h2o:heavy={sizes.eager // 8},recent={sizes.eager // 8}"
        yield Scenario(
            f"prefill: h2o, {backend}", shape, _prefill(model, sizes.eager, policy, backend)
        )


def _policies(budget: int) -> tuple[str, str]:
    half = budget // 2
    return f"streaming_llm:sinks=4,window={budget - 4}", f"h2o:heavy={half},recent={half}"


def _ids(model: Any, batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (batch, length), device=model.device)


def _keyword(model: Any) -> str:
    known = inspect.signature(type(model).forward).parameters
    return "past_key_values" if "past_key_values" in known else "cache"


def _evicting(
    model: Any, policy: str, backend: str, batch: int, budget: int
) -> Callable[[], Callable[[], Any]]:
    """Return the preparation of a full cache: its state no longer depends on the context."""

    def prepare() -> Callable[[], Any]:
        cache = kvevict.EvictionCache(model, policy, backend=backend)
        given = {_keyword(model): cache}
        long = _ids(model, batch, budget + 8)
        for start in range(0, budget + 8, 512):
            model(long[:, start : start + 512], logits_to_keep=1, **given)
        token = long[:, :1]
        return lambda: model(token, **given)

    return prepare


def _full(model: Any, batch: int, context: int, *, static: bool) -> Callable[[], Callable[[], Any]]:
    """Return the preparation of a cache at full length, filled with random keys and values."""

    def prepare() -> Callable[[], Any]:
        config = model.config
        if static:
            cache: Any = StaticCache(config=config, max_cache_len=context + 512)
        else:
            cache = DynamicCache(config=config)
        shape = (batch, config.num_key_value_heads, context, config.head_dim)
        kind = {"device": model.device, "dtype": model.dtype}
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(shape, **kind), torch.randn(shape, **kind), layer)
        token = _ids(model, batch, 1)
        given = {_keyword(model): cache}
        return lambda: model(token, **given)

    return prepare


def _prefill(
    model: Any, length: int, policy: str | None = None, backend: str = "auto"
) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        ids = _ids(model, 1, length)

        def call() -> None:
            if policy is None:
                cache: Any = DynamicCache(config=model.config)
            else:
                cache = kvevict.EvictionCache(model, policy, backend=backend)
            model(ids, logits_to_keep=1, **{_keyword(model): cache})

        return call

    return prepare


def _eager(model: Any, length: int) -> Callable[[], Callable[[], Any]]:
    """Return H2O as it is done without a kernel: every probability of every layer is kept."""

    def prepare() -> Callable[[], Any]:
        ids = _ids(model, 1, length)
        kind = model.config._attn_implementation

        def call() -> None:
            model.set_attn_implementation("eager")
            try:
                result = model(ids, logits_to_keep=1, output_attentions=True, use_cache=True)
                for weights in result.attentions:
                    weights.float().sum(2)
            finally:
                model.set_attn_implementation(kind)

        return call

    return prepare
