"""The attention function of a patched model: exact under eviction, with scores where needed.

Registered with transformers under one name. A call whose cache is not an eviction cache goes to
transformers' own SDPA function, so a bare forward of a patched model behaves as before.
"""

from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvevict.cache import EvictionCache
from kvevict.drafts import token_by_token
from kvevict.errors import UnsupportedModelError
from kvevict.kernels import library
from kvevict.kernels.attention_lse import attention_lse
from kvevict.kernels.column_sum import column_sum
from kvevict.kernels.decode import decode
from kvevict.layers import EvictionLayer
from kvevict.models import capped, votes
from kvevict.plan import Plan
from kvevict.ranked import RankedLayer
from kvevict.ring import RingLayer, head_shift

NAME = "kvevict"
_DIRECT = 1 << 21  # probabilities of a forward and row that are few enough to be held at once
_BLOCK = 256  # queries attended at a time where a mask is needed, so that masks stay O(n)

# For modules that hand `update` no keywords (GPT-NeoX; all in transformers 5.22 and 5.23): the
# cache of the forward that runs now. Per context, hence per thread.
forward_cache: ContextVar[EvictionCache | None] = ContextVar("kvevict_forward_cache", default=None)
# Set while the probe runs: a list that records every call.
probe_calls: ContextVar[list[dict[str, Any]] | None] = ContextVar("kvevict_probe", default=None)


def eviction_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    kvevict_layer: EvictionLayer | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend for a patched model.

    Args:
        module: transformers' attention module.
        query: `[B, H*G, Q, D]`.
        key: `[B, H, T, D]`, what the cache's `update` returned.
        value: `[B, H, T, D]`.
        attention_mask: transformers' mask; ignored where the cache is ours.
        dropout: must be 0 where the cache is ours.
        scaling: factor on the logits; D**-0.5 when None.
        kvevict_layer: the evicting layer, where the module passes keywords on.
        softcap: c where logits are capped by `c * tanh(logit / c)`.
        s_aux: `[H*G]`, a learned logit per head with nothing behind it.
        **kwargs: whatever else transformers passes.

    Returns:
        The output `[B, Q, H*G, D]`, and None for the weights.
    """
    layer = kvevict_layer
    if layer is None:
        calls = probe_calls.get()
        if calls is not None:
            call = {"module": module, "key": key, "value": value, "mask": attention_mask}
            calls.append({**call, "softcap": softcap, "s_aux": s_aux, **kwargs})
        cache = forward_cache.get()
        index = getattr(module, "layer_idx", None)
        if cache is not None and index is not None:
            known = cache.layers[index]
            layer = known if isinstance(known, EvictionLayer) else None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    special = softcap is not None or s_aux is not None
    if layer is None and special:
        out = capped.plain(query, key, value, attention_mask, scale, softcap, s_aux)
        return out.transpose(1, 2).contiguous(), None
    if layer is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    if dropout:
        raise UnsupportedModelError("attention dropout with an eviction cache: call model.eval()")
    plan = layer.plan
    assert plan is not None
    if plan.draft and isinstance(layer, RankedLayer):

        def attend(part: EvictionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            none = (None, 0.0, scaling)
            return eviction_attention(module, q, k, v, *none, part, softcap, s_aux)[0]

        return token_by_token(layer, plan, query, key, value, attend), None
    if special:
        if isinstance(layer, RankedLayer) and layer.rope is not None and layer.rope.style != "none":
            query, key = _by_rank(layer, plan, query, key)
        out = capped.attend(layer, plan, query, key, value, scale, softcap, s_aux)
    elif isinstance(layer, RingLayer):
        out = _ring(layer, plan, query, key, value, scale)
    else:
        assert isinstance(layer, RankedLayer)
        out = _ranked(layer, plan, query, key, value, scale)
    return out.transpose(1, 2).contiguous(), None


def _one_query(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend one query over everything: the group's heads stand in as queries, no key repeats."""
    B, heads, _, D = q.shape
    grouped = q.view(B, k.shape[1], -1, D)
    out = F.scaled_dot_product_attention(grouped, k, v, scale=scale)
    return out.reshape(B, heads, 1, -1)  # type: ignore[no-any-return]


# -- head and window ------------------------------------------------------------------------------


def _ring(layer: RingLayer, plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    if plan.one and not plan.padded:
        out = _one_query(q, k, v, scale)
    elif plan.padded:
        out = _ring_padded(layer, plan, q, k, v, scale)
    elif not layer.held and (layer.window is None or plan.length <= layer.window + 1):
        out, _ = library.attention_lse(q, k, v, scale, causal=True)
    elif layer.window is None:
        out, _ = _stored_then_chunk(layer.held, q, k, v, scale)
    else:
        out = _ring_chunk(layer, plan, q, k, v, scale)
    layer.commit()
    return out


def _stored_then_chunk(
    held: int, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend a chunk to all stored keys and causally to itself, without a mask."""
    own = library.attention_lse(q, k[:, :, held:], v[:, :, held:], scale, causal=True)
    if not held:
        return own
    return library.merge([library.attention_lse(q, k[:, :, :held], v[:, :, :held], scale), own])


def _ring_chunk(
    layer: RingLayer, plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> Tensor:
    """Attend a chunk under head and band, block by block; work and masks are O(Q * (S + W))."""
    device, held, head, window = q.device, layer.held, layer.head, layer.window
    assert window is not None
    position, row_seen = plan.on(device)

    def key_positions() -> Tensor:
        stored = layer.positions_of(row_seen, held, room=1)[0, 0]
        return torch.cat([stored, position[0]])

    where = plan.shared(("keys", device), key_positions)  # [T]
    outs = []
    for first in range(0, plan.length, _BLOCK):
        last = min(first + _BLOCK, plan.length)
        low = held + max(0, first - window) if first >= window else min(head, held)
        low = max(low, head - plan.start if not held else low)
        span = slice(low, held + last)

        def visible(first: int = first, last: int = last, span: slice = span) -> Tensor:
            at, keys = position[0, first:last, None], where[None, span]
            seen = (keys >= head) & (keys <= at) & (at - keys <= window)
            mask: Tensor = seen[None, None]  # [1, 1, block, span]
            return mask

        mask = plan.shared(("band", first, device), visible)
        block = q[:, :, first:last]
        parts = [library.attention_lse(block, k[:, :, span], v[:, :, span], scale, mask=mask)]
        if head:
            parts.append(_head_part(layer, plan, block, k, v, scale, first, last))
        outs.append(library.merge(parts)[0])
    return torch.cat(outs, 2) if len(outs) > 1 else outs[0]


def _head_part(
    layer: RingLayer,
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    first: int,
    last: int,
) -> tuple[Tensor, Tensor]:
    """Attend a block to the head, its queries turned to their distance inside the cache."""
    device, head = q.device, min(layer.head, k.shape[2])
    at = plan.on(device)[0][:, first:last]  # [1, block]
    if layer.rope is not None and plan.start + last > layer.head + (layer.window or 0):
        turn = plan.shared(
            ("query", layer.rope.key, first, device), lambda: _query_turn(layer, plan, at, device)
        )
        q = layer.rope.rotate(q, turn)

    def visible() -> Tensor:
        return (torch.arange(head, device=device) <= at[0, :, None])[None, None]

    mask = None
    if plan.start + first < head:
        mask = plan.shared(("head mask", first, device), visible)
    return library.attention_lse(q, k[:, :, :head], v[:, :, :head], scale, mask=mask)


def _query_turn(layer: RingLayer, plan: Plan, at: Tensor, device: Any) -> Any:
    shift = head_shift(at.clamp(min=0), plan.base, layer.head, layer.window)
    cos, sin = layer.rope.turn(-shift, device)
    return cos[:, None], sin[:, None]  # [B, 1, block, R/2], for all heads


def _ring_padded(
    layer: RingLayer, plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> Tensor:
    """Attend rows of different lengths: head and window each under a mask of their own."""
    device, head, window = q.device, layer.head, layer.window
    position, row_seen = plan.on(device)

    def key_positions() -> Tensor:
        if plan.one:
            return layer.positions_of(plan.after(device), k.shape[2], room=1)
        if not layer.held:
            return position[:, None]
        stored = layer.positions_of(row_seen, layer.held, room=1)
        return torch.cat([stored, position[:, None]], 2)

    where = plan.shared(("keys", device), key_positions)  # [B, 1, T]
    outs = []
    for first in range(0, plan.length, _BLOCK):
        last = min(first + _BLOCK, plan.length)
        at = position[:, None, first:last, None]  # [B, 1, block, 1]
        keys = where[:, :, None]  # [B, 1, 1, T]
        seen = (keys >= 0) & (keys <= at)
        block = q[:, :, first:last]
        if window is None:
            outs.append(library.attention_lse(block, k, v, scale, mask=seen)[0])
            continue
        near = seen & (keys >= head) & (at - keys <= window)
        parts = [library.attention_lse(block, k, v, scale, mask=near)]
        if head:
            if layer.rope is not None:
                block = layer.rope.rotate(
                    block, _query_turn(layer, plan, position[:, first:last], device)
                )
            parts.append(library.attention_lse(block, k, v, scale, mask=seen & (keys < head)))
        outs.append(library.merge(parts)[0])
    return torch.cat(outs, 2)


# -- ranked ---------------------------------------------------------------------------------------


def _ranked(
    layer: RankedLayer, plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> Tensor:
    if layer.rope is not None and layer.rope.style != "none":
        q, k = _by_rank(layer, plan, q, k)
    elif plan.length == 1 and layer.backend == "triton" and layer.policy.scores == "sum":
        return _fused_step(layer, plan, q, scale)
    if plan.length == 1 and not plan.padded:
        return _ranked_step(layer, q, k, v, scale)
    if plan.padded:
        return _ranked_padded(layer, plan, q, k, v, scale)
    triton = layer.backend == "triton"
    few = q.shape[1] * plan.length * k.shape[2] <= _DIRECT
    if few and layer.policy.needs_scores and not triton:
        weight = votes.by_query(layer.policy, plan.length, q.device)
        out, sums = library.attention_sums(q, k, v, scale, weight)
        layer.commit(sums)
        return out
    if triton:
        out, lse, _ = attention_lse(q, k.contiguous(), v.contiguous(), scale=scale, causal=True)
    else:
        out, lse = _stored_then_chunk(layer.held, q, k, v, scale)
    received: Tensor | None = None
    if layer.policy.needs_scores:
        later = torch.arange(plan.length - 1, -1, -1, device=lse.device)
        lse = votes.decayed(layer.policy, lse, later)
        q_lo = votes.first_scored(layer.policy, plan.length)
        if triton:
            received = column_sum(q, k.contiguous(), lse, scale=scale, causal=True, q_lo=q_lo)
        else:
            received = library.column_sum(q, k, lse, scale, causal=True, q_lo=q_lo)
    layer.commit(received)
    return out


def _fused_step(layer: RankedLayer, plan: Plan, q: Tensor, scale: float) -> Tensor:
    """Attend one token a row over the slots and add its probabilities to the scores, fused."""
    at = plan.on(q.device)[0].expand(q.shape[0], -1).contiguous()
    alone = layer.policy.scope == "head"  # else heads' sums are added up before they count
    scores = layer.score if alone else torch.zeros_like(layer.score)
    done = decode(
        q,
        layer.keys,
        layer.values,
        layer.position,
        at,
        scale=scale,
        scores=scores,
        decay=layer.policy.decay_factor if alone else 1.0,
    )
    layer.commit(None if alone else scores[:, :, : layer.length])
    return done.out


def _ranked_step(layer: RankedLayer, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    if not layer.policy.needs_scores:
        out = _one_query(q, k, v, scale)
        layer.commit()
        return out
    B, heads, _, D = q.shape
    grouped = q.view(B, k.shape[1], -1, D) * scale
    weights = torch.softmax(torch.matmul(grouped, k.mT), -1, dtype=torch.float32)  # [B, H, G, T]
    out = torch.matmul(weights.to(v.dtype), v).reshape(B, heads, 1, -1)
    layer.commit(weights.sum(2))
    return out


def _ranked_padded(
    layer: RankedLayer, plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> Tensor:
    position, _ = plan.on(q.device)
    if plan.length == 1:
        assert layer.position is not None
        where = layer.position[:, :, : layer.length]
    else:
        where = layer.chunk_positions()
    B, heads = q.shape[:2]
    H = k.shape[1]
    sums = torch.zeros(B, H, k.shape[2], device=q.device) if layer.policy.needs_scores else None
    q_lo = votes.first_scored(layer.policy, plan.length)
    left = plan.after(q.device) - 1 - position  # real tokens of the row that come after each
    outs = []
    for first in range(0, plan.length, _BLOCK):
        last = min(first + _BLOCK, plan.length)
        at = position[:, None, first:last, None]
        keys = where[:, :, None]
        seen = (keys >= 0) & (keys <= at)  # [B, H, block, T]; a pad query (-1) sees nothing
        wide = seen.repeat_interleave(heads // H, 1)
        block = q[:, :, first:last]
        out, lse = library.attention_lse(block, k, v, scale, mask=wide)
        outs.append(out)
        if sums is not None and last > q_lo:
            lse = votes.decayed(layer.policy, lse, left[:, None, first:last])
            lo = max(q_lo - first, 0)
            sums += library.column_sum(block, k, lse, scale, mask=seen, q_lo=lo)
    layer.commit(sums)
    return torch.cat(outs, 2)


def _by_rank(layer: RankedLayer, plan: Plan, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate raw keys and queries by their rank among what is stored, per row and KV head."""
    if plan.length == 1:
        assert layer.position is not None
        where = layer.position[:, :, : layer.length]
        own = (where == plan.on(q.device)[0][:, None]).to(torch.int8).argmax(-1, keepdim=True)
    else:
        where = layer.chunk_positions()
        own = torch.arange(layer.held, where.shape[2], device=q.device).expand(*where.shape[:2], -1)
    end = torch.iinfo(where.dtype).max
    rank = torch.where(where < 0, end, where).argsort(dim=-1, stable=True).argsort(-1)  # [B, H, T]
    cos, sin = layer.rope.turn(rank, q.device)
    k = layer.rope.rotate(k, (cos, sin))
    G = q.shape[1] // k.shape[1]
    cos, sin = layer.rope.turn(rank.gather(2, own), q.device)
    q = layer.rope.rotate(q, (cos.repeat_interleave(G, 1), sin.repeat_interleave(G, 1)))
    return q, k
