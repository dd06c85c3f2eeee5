"""The kernels' operations in plain torch: slow, obvious, the oracle of every test.

Each function has the signature and the in-place effects of its twin in this room. Arithmetic is
float32, or float64 where the inputs are.
"""

import torch
from torch import Tensor

from kvevict.kernels.contract import Attention, Decoded, scale_of


def column_sum(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    lengths: Tensor | None = None,
    q_lo: int = 0,
    out: Tensor | None = None,
    decay: float = 1.0,
) -> Tensor:
    """Sum each key's attention over queries and query group; see `column_sum.column_sum`."""
    wide = _wide(q)
    grouped = _grouped(q, k.shape[1]).to(wide)  # [B, H, G, M, D]
    logits = grouped @ k.to(wide)[:, :, None].mT * scale_of(scale, q.shape[-1])
    M = q.shape[2]
    seen = _visible(q, k, causal, key_mask, lengths)[:, :, None]  # [B, H, 1, M, N]
    lse = lse.to(wide).unflatten(1, (k.shape[1], -1))[..., None]  # [B, H, G, M, 1]
    mass = torch.where(seen & lse.isfinite(), torch.exp(logits - lse), 0.0)
    weight = decay ** torch.arange(M - 1, -1, -1, device=q.device, dtype=wide)
    weight[:q_lo] = 0
    fresh = (mass * weight[:, None]).sum((2, 3))  # [B, H, N]
    if out is None:
        return fresh
    return out.mul_(decay**M).add_(fresh)


def attention_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Attention:
    """Attend and return the log-sum-exp; see `attention_lse.attention_lse`."""
    wide = _wide(q)
    grouped = _grouped(q, k.shape[1]).to(wide)
    logits = grouped @ k.to(wide)[:, :, None].mT * scale_of(scale, q.shape[-1])
    seen = _visible(q, k, causal, key_mask, lengths)[:, :, None]
    out, lse, _ = _softmax(logits, seen, v.to(wide))
    return Attention(out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2), "reference")


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    query_position: Tensor,
    *,
    scale: float | None = None,
    sinks: int = 0,
    window: int | None = None,
    q_sink: Tensor | None = None,
    rank: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    scores: Tensor | None = None,
    decay: float = 1.0,
    recent: int | None = None,
    evict: bool = False,
    by_age: bool = False,
) -> Decoded:
    """Attend to the slots of a cache, score them, pick a victim; see `decode.decode`."""
    wide = _wide(q)
    H, Q = k.shape[1], q.shape[2]
    keys = k.to(wide)
    if rank is not None and cos is not None and sin is not None:
        keys = _rotated(keys, cos.to(wide), sin.to(wide), rank.clamp(min=0).long())
    keys = keys[:, :, None].mT  # [B, H, 1, D, C]
    logits = _grouped(q, H).to(wide) @ keys  # [B, H, G, Q, C]
    is_sink = (position >= 0) & (position < sinks)  # [B, H, C]
    if q_sink is not None:
        shifted = _grouped(q_sink, H).to(wide) @ keys
        logits = torch.where(is_sink[:, :, None, None], shifted, logits)
    logits = logits * scale_of(scale, q.shape[-1])
    distance = query_position[:, None, :, None] - position[:, :, None]  # [B, H, Q, C]
    seen = (position >= 0)[:, :, None] & (distance >= 0)
    if window is not None:
        seen &= is_sink[:, :, None] | (distance <= window)
    out, lse, mass = _softmax(logits, seen[:, :, None], v.to(wide))
    if scores is not None:
        weight = decay ** torch.arange(Q - 1, -1, -1, device=q.device, dtype=wide)
        scores.mul_(decay**Q).add_((mass * weight[:, None]).sum((2, 3)))
        scores.masked_fill_(position < 0, 0.0)
    victim = None
    if recent is not None:
        last = query_position.amax(1)
        victim = _victim(position, last, scores, sinks, recent, by_age)
        if evict:
            _evict(position, rank, victim)
    return Decoded(out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2), victim, "reference")


def write_slot(
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    slot: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    new_position: Tensor,
    *,
    scores: Tensor | None = None,
    rank: Tensor | None = None,
    new_rank: Tensor | None = None,
) -> None:
    """Write tokens into slots in place; see `write_slot.write_slot`."""
    C = keys.shape[2]
    for b, h, t in torch.cartesian_prod(*(torch.arange(n) for n in slot.shape)).tolist():
        c = int(slot[b, h, t])
        if not 0 <= c < C:
            continue
        keys[b, h, c] = new_keys[b, h, t]
        values[b, h, c] = new_values[b, h, t]
        position[b, h, c] = new_position[b, t]
        if scores is not None:
            scores[b, h, c] = 0.0
        if rank is not None and new_rank is not None:
            rank[b, h, c] = new_rank[b, h, t]


def fill_holes(
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    keep: Tensor,
    *,
    scores: Tensor | None = None,
    rank: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Move the kept slots of the tail into the holes in front; see `fill_holes.fill_holes`."""
    payloads = [keys, values, position]
    payloads += [t for t in (scores, rank) if t is not None]
    lengths = keep.sum(2, dtype=torch.int32)
    for b in range(keep.shape[0]):
        for h in range(keep.shape[1]):
            n = int(lengths[b, h])
            holes = (~keep[b, h, :n]).nonzero()[:, 0]
            movers = keep[b, h, n:].nonzero()[:, 0] + n
            for payload in payloads:
                payload[b, h, holes] = payload[b, h, movers]
            position[b, h, n:] = -1
            if scores is not None:
                scores[b, h, n:] = 0.0
            if rank is not None:
                rank[b, h, n:] = -1
    return lengths


def slot_rank(position: Tensor) -> Tensor:
    """Return each slot's place in time order among the live slots of its head, -1 if empty.

    Args:
        position: integers `[B, H, C]`, -1 empty.

    Returns:
        int32 `[B, H, C]`.
    """
    last = torch.iinfo(position.dtype).max
    order = position.masked_fill(position < 0, last).argsort(dim=-1, stable=True)
    return order.argsort(-1).masked_fill(position < 0, -1).int()


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _grouped(q: Tensor, H: int) -> Tensor:
    grouped: Tensor = q.unflatten(1, (H, -1))  # [B, H, G, M, D]
    return grouped


def _visible(
    q: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None, lengths: Tensor | None
) -> Tensor:
    B, H, N = k.shape[:3]
    M = q.shape[2]
    key = torch.arange(N, device=q.device)
    query = torch.arange(M, device=q.device)[:, None]
    if lengths is None:
        lengths = torch.full((B, H), N, device=q.device)
    end = lengths[:, :, None, None]
    seen = (key < end).expand(B, H, M, N)
    if causal:
        seen = seen & (key <= query + end - M)
    if key_mask is not None:
        seen = seen & (key_mask[:, None] if key_mask.dim() == 2 else key_mask)[:, :, None]
    return seen


def _softmax(logits: Tensor, seen: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, log-sum-exp and probabilities; 0, -inf and 0 where nothing is seen."""
    lse = torch.where(seen, logits, -torch.inf).logsumexp(-1)
    mass = torch.where(seen, torch.exp(logits - lse[..., None]), 0.0)
    # What no query sees must not matter, whatever its bits are.
    used = seen.any(-2).any(2)[..., None]  # [B, H, N, 1]
    return mass @ torch.where(used, values, 0.0)[:, :, None], lse, mass


def _rotated(keys: Tensor, cos: Tensor, sin: Tensor, rank: Tensor) -> Tensor:
    first, second = keys.chunk(2, -1)
    c, s = cos[rank], sin[rank]  # [B, H, C, D / 2]
    return torch.cat((first * c - second * s, second * c + first * s), -1)


def _victim(
    position: Tensor,
    last: Tensor,
    scores: Tensor | None,
    sinks: int,
    recent: int,
    by_age: bool,
) -> Tensor:
    victim = torch.full(position.shape[:2], -1, dtype=torch.int64, device=position.device)
    for b in range(position.shape[0]):
        for h in range(position.shape[1]):
            now = int(last[b])
            best: tuple[float, ...] = ()
            for slot, place in enumerate(position[b, h].tolist()):
                if place < 0:
                    worth = (-1.0, 0.0, -1.0, float(slot))
                elif place < sinks or place > now - recent:
                    continue
                else:
                    score = 0.0 if scores is None else float(scores[b, h, slot])
                    worth = (0.0, score / (now + 1 - place) if by_age else score, place, slot)
                if not best or worth < best:
                    best = worth
                    victim[b, h] = slot
    return victim


def _evict(position: Tensor, rank: Tensor | None, victim: Tensor) -> None:
    for b in range(position.shape[0]):
        for h in range(position.shape[1]):
            slot = int(victim[b, h])
            if slot < 0 or position[b, h, slot] < 0:
                continue
            position[b, h, slot] = -1
            if rank is not None:
                row = rank[b, h]
                row[row > row[slot].clone()] -= 1
                row[slot] = -1
