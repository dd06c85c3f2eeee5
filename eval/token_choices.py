"""token_choices: what token-level policies keep of a context that was read in full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict.policies import H2O, Random, SnapKV, StreamingLLM
from kvevict.policy import Policy
from kvevict.slots import Slots

_WINDOW = 32


@dataclass(frozen=True)
class Prefill:
    """The attention that a context's tokens received, by layer.

    Attributes:
        sums: float32 `[H, N]` each, over all queries.
        window: the same over the last queries alone.
        tokens: N.
    """

    sums: list[Tensor]
    window: list[Tensor]
    tokens: int


Choose = Callable[[Prefill, int, int], tuple[list[Tensor], str]]


def _keeps(policy: Policy, scores: list[Tensor]) -> tuple[list[Tensor], str]:
    found = []
    for score in scores:
        position = torch.arange(score.shape[1], device=score.device).expand(score.shape)
        found.append(policy.keep(Slots(position=position, score=score)))
    return found, str(policy)


def _streaming(full: Prefill, budget: int, seed: int) -> tuple[list[Tensor], str]:
    sinks = min(4, budget - 1)
    return _keeps(StreamingLLM(sinks, budget - sinks), full.sums)


def _h2o(full: Prefill, budget: int, seed: int) -> tuple[list[Tensor], str]:
    return _keeps(H2O(heavy=budget // 2, recent=budget - budget // 2), full.sums)


def _h2o_layer(full: Prefill, budget: int, seed: int) -> tuple[list[Tensor], str]:
    shared = [s.sum(0, keepdim=True).expand_as(s) for s in full.sums]
    return _keeps(H2O(heavy=budget // 2, recent=budget - budget // 2), shared)


def _window(full: Prefill, budget: int, seed: int) -> tuple[list[Tensor], str]:
    recent = max(1, min(_WINDOW, budget - 1))
    return _keeps(SnapKV(heavy=budget - recent, recent=recent, window=_WINDOW), full.window)


def _random(full: Prefill, budget: int, seed: int) -> tuple[list[Tensor], str]:
    return _keeps(Random(budget, seed=seed), full.sums)


TOKEN_POLICIES: dict[str, Choose] = {
    "streaming_llm": _streaming,
    "h2o": _h2o,
    "h2o_layer": _h2o_layer,
    "snapkv": _window,
    "random": _random,
}
