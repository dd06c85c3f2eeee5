"""Attention with soft-capped logits (Gemma 2) or learned sinks (GPT-OSS), by blocks of queries.

No fused attention of torch takes either, so logits are made a block at a time, in float32. A
learned sink (`s_aux`) is one more logit per head with nothing behind it: a part of attention with
output 0 and log-sum-exp `s_aux`. Scores count what real keys received, without the sink's share.
"""

from typing import Any

import torch
from torch import Tensor

from kvevict.errors import UnsupportedModelError
from kvevict.kernels import library
from kvevict.layers import EvictionLayer
from kvevict.models import votes
from kvevict.plan import Plan
from kvevict.ranked import RankedLayer
from kvevict.ring import RingLayer, head_shift

_BLOCK = 256


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attend for a cache of transformers' own.

    Args:
        q: `[B, H*G, Q, D]`.
        k: `[B, H, T, D]`.
        v: `[B, H, T, D]`.
        mask: bool or additive `[B, 1, Q, T]`; None is causal, aligned to the lower right.
        scale: factor on the logits, before the cap.
        softcap: c of `c * tanh(logit / c)`, or None.
        s_aux: `[H*G]`, or None.

    Returns:
        The output `[B, H*G, Q, D]`.
    """
    Q, T = q.shape[2], k.shape[2]
    if mask is None:
        mask = torch.ones(Q, T, dtype=torch.bool, device=q.device).tril(T - Q)[None, None]
    elif mask.dtype != torch.bool:
        mask = mask > -1e4
    outs = []
    for first in range(0, Q, _BLOCK):
        block = slice(first, first + _BLOCK)
        part = _part(q[:, :, block], k, v, scale, softcap, mask[:, :, block, :T])
        outs.append(_merged([part[:2]], s_aux)[0])
    return torch.cat(outs, 2)


def attend(
    layer: EvictionLayer,
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attend for an eviction cache, and commit the layer.

    Args:
        layer: whose `update` returned k and v.
        plan: of this forward.
        q: `[B, H*G, Q, D]`.
        k: `[B, H, T, D]`; for positions by rank already rotated.
        v: `[B, H, T, D]`.
        scale: factor on the logits, before the cap.
        softcap: see `plain`.
        s_aux: see `plain`.

    Returns:
        The output `[B, H*G, Q, D]`.

    Raises:
        UnsupportedModelError: a compiled step.
    """
    if getattr(plan, "static", False):
        raise UnsupportedModelError(
            "compiled steps have no soft-capping and no learned sinks (missing part: scores)"
        )
    if isinstance(layer, RingLayer):
        out = _ring(layer, plan, q, k, v, scale, softcap, s_aux)
        layer.commit()
        return out
    assert isinstance(layer, RankedLayer)
    return _ranked(layer, plan, q, k, v, scale, softcap, s_aux)


def _ring(
    layer: RingLayer,
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    if plan.one and not plan.padded:  # all that is stored is seen, the head turned already
        return _merged([_part(q, k, v, scale, softcap, None)[:2]], s_aux)[0]
    position, row_seen = plan.on(q.device)
    if plan.one:
        keys = layer.positions_of(plan.after(q.device), k.shape[2], room=1)
    elif layer.held:
        stored = layer.positions_of(row_seen, layer.held, room=1)
        keys = torch.cat([stored, position[:, None]], 2)
    else:
        keys = position[:, None]
    keys = keys[:, :, None]  # [B, 1, 1, T]
    outs = []
    for first in range(0, plan.length, _BLOCK):
        block = slice(first, first + _BLOCK)
        at = position[:, None, block, None]
        seen = (keys >= 0) & (keys <= at)
        queries = q[:, :, block]
        if layer.window is None:
            parts = [_part(queries, k, v, scale, softcap, seen)[:2]]
        else:
            near = seen & (keys >= layer.head) & (at - keys <= layer.window)
            parts = [_part(queries, k, v, scale, softcap, near)[:2]]
            if layer.head:
                turned = _turned(layer, plan, queries, position[:, block])
                head = seen & (keys < layer.head)
                parts.append(_part(turned, k, v, scale, softcap, head)[:2])
        outs.append(_merged(parts, s_aux)[0])
    return torch.cat(outs, 2)


def _turned(layer: RingLayer, plan: Plan, q: Tensor, at: Tensor) -> Tensor:
    """Turn queries to their distance from the head inside the cache."""
    if layer.rope is None:
        return q
    shift = head_shift(at.clamp(min=0), plan.base, layer.head, layer.window)
    cos, sin = layer.rope.turn(-shift, q.device)
    return layer.rope.rotate(q, (cos[:, None], sin[:, None]))  # type: ignore[no-any-return]


def _ranked(
    layer: RankedLayer,
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    assert layer.position is not None
    position, _ = plan.on(q.device)
    keys = layer.position[:, :, : layer.length] if plan.length == 1 else layer.chunk_positions()
    weight = _query_weights(layer, plan, position)
    sums = torch.zeros(*k.shape[:3], device=q.device) if layer.policy.needs_scores else None
    G = q.shape[1] // k.shape[1]
    outs = []
    for first in range(0, plan.length, _BLOCK):
        block = slice(first, first + _BLOCK)
        at = position[:, None, block, None]
        seen = (keys[:, :, None] >= 0) & (keys[:, :, None] <= at)  # a pad query (-1) sees nothing
        out, lse, logits = _part(q[:, :, block], k, v, scale, softcap, seen.repeat_interleave(G, 1))
        out, lse = _merged([(out, lse)], s_aux)
        outs.append(out)
        if sums is not None:
            whole = torch.where(lse == float("-inf"), float("inf"), lse)
            received = torch.exp(logits - whole[..., None]) * weight[:, None, block, None]
            sums += received.sum(2).unflatten(1, (-1, G)).sum(2)
    layer.commit(sums)
    return torch.cat(outs, 2)


def _query_weights(layer: RankedLayer, plan: Plan, position: Tensor) -> Tensor:
    """Return by how much each query's attention counts in the scores, `[B, Q]`."""
    policy = layer.policy
    later = plan.after(position.device) - 1 - position
    weight = torch.pow(torch.tensor(policy.decay_factor, device=position.device), later.float())
    weight[:, : votes.first_scored(policy, plan.length)] = 0.0
    return weight


def _part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, log-sum-exp (-inf where nothing is seen) and float32 logits of one block."""
    B, heads, Q, D = q.shape
    grouped = q.reshape(B, k.shape[1], -1, D)
    logits = torch.matmul(grouped, k.mT).float().view(B, heads, Q, -1) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(logits, -1)
    safe = torch.where(lse == float("-inf"), 0.0, lse)
    weights = torch.exp(logits - safe[..., None]).to(v.dtype).view(B, k.shape[1], -1, k.shape[2])
    return torch.matmul(weights, v).view(B, heads, Q, -1), lse, logits


def _merged(parts: list[Any], s_aux: Tensor | None) -> tuple[Tensor, Tensor]:
    if s_aux is not None:
        out, lse = parts[0]
        sink = s_aux.float().reshape(1, -1, 1).to(lse.device).expand_as(lse)
        parts = [*parts, (torch.zeros_like(out), sink)]
    return library.merge(parts)
