"""caches: make a cache, bring its policy to a budget, feed it, say what it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from kvevict.cache import Backend, EvictionCache, Positions
from kvevict.errors import CacheError, KvevictError, PolicyError
from kvevict.models.generation import kept_tokens
from kvevict.models.patch import patch
from kvevict.models.stream import Step, stream
from kvevict.policy import Policy, is_share, parse, share_of, split_policy

_SCALED = ("heavy", "window", "recent")  # what grows and shrinks with a budget; the head does not


@dataclass(frozen=True)
class CacheSettings:
    """How caches are run in an evaluation.

    Attributes:
        chunk: tokens a forward; H2O evicts once a chunk, so every result states it.
        positions: "auto", "in_cache" or "original".
        backend: "auto", "torch" or "triton".
        evict_every: see `EvictionCache`.
    """

    chunk: int = 64
    positions: Positions = "auto"
    backend: Backend = "auto"
    evict_every: int = 1

    def cache(self, model: Any, policy: Policy) -> EvictionCache:
        """Return a fresh cache of a patched model."""
        return EvictionCache(
            model,
            policy,
            positions=self.positions,
            backend=self.backend,
            evict_every=self.evict_every,
        )

    def facts(self, cache: EvictionCache) -> dict[str, Any]:
        """Return what a row says about a cache after its last forward."""
        return {
            "policy": str(cache.policy),
            "budget": cache.capacity,
            "kept_tokens": kept_tokens(cache),
            "cache_bytes": cache.nbytes(),
            "chunk": self.chunk,
            "evict_every": self.evict_every,
            "positions": cache.positions,
            "backend": cache.backend,
            "departures": cache.policy.departures() | self._departures(cache),
        }

    def _departures(self, cache: EvictionCache) -> dict[str, Any]:
        if not cache.policy.needs_scores:
            return {}
        used = {"evict_every": self.evict_every, "chunk": self.chunk}
        return {k: v for k, v in used.items() if v != 1}


@contextmanager
def patched(model: Any) -> Iterator[Any]:
    """Patch a model for a while; one that is patched already stays so."""
    if getattr(model, "_kvevict", None) is not None:
        yield model
        return
    with patch(model):
        yield model


def policies_at(
    policies: Sequence[str | Policy], budgets: Sequence[str | int], tokens: int
) -> list[Policy]:
    """Return every policy at every budget, each once, in order.

    Args:
        policies: policies or their strings; shares in them are shares of `tokens`.
        budgets: tokens, or shares of `tokens` such as "20%"; none leaves the policies as given.
        tokens: length of what will be fed.

    Raises:
        PolicyError: a bad policy or budget.
    """
    if not policies:
        raise PolicyError("no policy: give --policy full --policy streaming_llm:... or others")
    chosen: list[Policy] = []
    for policy in (parse(p).resolve(tokens) for p in policies):
        if policy.capacity == 0:
            raise PolicyError(f"{policy}: keeps nothing of {tokens} tokens; give a larger share")
        for sized in [at_budget(policy, _tokens(b, tokens)) for b in budgets] or [policy]:
            if sized not in chosen:
                chosen.append(sized)
    return chosen


def short(policy: str) -> str:
    """Return a policy's string without settings that have their default value, for tables.

    A name without settings stays as it is, be it a token policy's or not.
    """
    if ":" not in policy:
        return policy
    name, settings = split_policy(policy)
    plain = parse(name)
    sizes = (*_SCALED, "budget", "sinks")
    kept = [
        f"{k}={v}"
        for k, v in settings.items()
        if (k in sizes and v != "0") or v != str(getattr(plain, k))
    ]
    return name + (":" + ",".join(kept) if kept else "")


def at_budget(policy: Policy, budget: int) -> Policy:
    """Return the policy with its capacity brought to a budget.

    The head stays; heavy, window and recent share the rest in the proportion they had.

    Raises:
        PolicyError: a budget too small for the head, or a policy without a size to set.
    """
    capacity = policy.capacity
    if capacity is None:
        return policy
    names = {f.name for f in fields(policy)}
    if "budget" in names:
        return replace(policy, budget=budget)  # type: ignore[call-arg]
    parts = {n: getattr(policy, n) for n in _SCALED if n in names and getattr(policy, n)}
    scaled = sum(parts.values())
    room = budget - (capacity - scaled)
    if not parts or room < len(parts):
        raise PolicyError(f"{policy} cannot be brought to a budget of {budget} tokens")
    sizes = {n: v * room // scaled for n, v in parts.items()}
    sizes[next(reversed(sizes))] += room - sum(sizes.values())
    return replace(policy, **sizes)


def _tokens(budget: str | int, tokens: int) -> int:
    try:
        count = share_of(budget, tokens) if is_share(budget) else int(budget)  # type: ignore[arg-type]
    except ValueError as error:
        raise PolicyError(
            f'budget {budget!r}: give tokens such as 256, or a share such as "20%"'
        ) from error
    if count < 1:
        raise PolicyError(f"budget {budget!r} is {count} tokens: give at least 1")
    return count


def check_longer(policies: list[Policy], tokens: int, what: str) -> None:
    """Check that something is longer than the budgets that it is to test.

    Raises:
        KvevictError: it is not, so nothing would ever be evicted.
    """
    largest = max((p.capacity or 0 for p in policies), default=0)
    if tokens <= largest:
        raise KvevictError(
            f"{what} has {tokens} tokens and the largest budget is {largest}: nothing would be "
            "evicted; give a longer text or a smaller budget"
        )


def feed(
    model: Any,
    tokens: Tensor,
    cache: EvictionCache,
    settings: CacheSettings,
    *,
    last: Tensor | None = None,
    start: int = 0,
    on_step: Callable[[Step], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Feed tokens and return the loss of each and the logits after the last.

    Args:
        model: a patched model.
        tokens: int64 `[N]`.
        cache: fresh, or one that continues.
        settings: their chunk; 0 feeds all in one forward.
        last: float32 `[V]`, logits that an earlier call returned: they predict the first token.
        start: see `stream`.
        on_step: called after every chunk.

    Returns:
        float32 `[N]` nats, nan for a first token without `last`; and float32 `[V]`.
    """
    if not len(tokens):
        raise CacheError("no tokens to feed")
    # One buffer for all: small tensors kept between a chunk's logits, which come and go, would
    # fragment the heap (90 MB a 1,000 tokens were measured).
    losses, done, logits = torch.full((len(tokens),), math.nan), 0, last
    for step in stream(model, tokens, cache, settings.chunk or len(tokens), True, start):
        assert step.logits is not None
        losses[done : done + len(step.nll)] = step.nll
        if not done and last is not None:
            losses[0] = cross_entropy(last[None], tokens[:1])[0]
        done += len(step.nll)
        logits = step.logits[-1]
        if on_step is not None:
            on_step(step)
    assert logits is not None
    return losses, logits.clone()


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return -log p of every target, float32 `[n]` nats on the CPU."""
    loss = torch.nn.functional.cross_entropy(
        logits.float(), target.to(logits.device), reduction="none"
    )
    return loss.cpu()
