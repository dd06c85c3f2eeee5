"""Attention with its log-sum-exp, and column sums from it, on torch's own operations.

The log-sum-exp of a fused forward is all that accumulated attention needs beside q and k: a
probability is exp(q.k * scale - lse), and their sum over queries, chunk by chunk, costs memory
linear in the length. On CPU the forward is torch's fused flash attention, which returns the
log-sum-exp; elsewhere it is matmul and logsumexp over query chunks.
"""

import torch
from torch import Tensor

_QUERY_CHUNK = 256
_KEY_TILE = 512  # keys of a block of column sums on CPU: the passes over a block stay in its cache


def attention_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend and return the output together with the log-sum-exp of the scaled logits.

    Args:
        q: `[B, H*G, Q, D]`.
        k: `[B, H, N, D]`.
        v: `[B, H, N, D]`.
        scale: factor on the logits.
        causal: query i sees keys 0..i; only for Q = N.
        mask: bool, broadcastable to `[B, H*G, Q, N]`, True where a key is seen; a query that sees
            nothing gives output 0 and log-sum-exp -inf.

    Returns:
        The output `[B, H*G, Q, D]` in q's dtype and the natural log-sum-exp, float32 `[B, H*G, Q]`.

    Raises:
        ValueError: causal with Q != N or together with a mask.
    """
    if causal and (mask is not None or q.shape[2] != k.shape[2]):
        raise ValueError("causal=True is for Q = N without a mask; give a mask instead")
    if q.device.type == "cpu" and v.shape[-1] == q.shape[-1]:
        return _flash_cpu(q, k, v, scale, causal, mask)
    return _chunked(q, k, v, scale, causal, mask)


def _flash_cpu(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    if not k.shape[2]:  # the fused operation divides by the number of keys
        dead = torch.full(q.shape[:3], float("-inf"), device=q.device)
        return torch.zeros_like(q), dead
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
        if bias.shape[-2] == 1 and q.shape[2] > 1:
            bias = bias.expand(*bias.shape[:-2], q.shape[2], -1)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    if mask is not None:  # a dead query comes back with log-sum-exp 0
        seen = mask.any(-1)
        lse = torch.where(seen, lse, torch.full_like(lse, float("-inf")))
    return out, lse


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    B, heads, Q, D = q.shape
    H, N = k.shape[1], k.shape[2]
    outs, sums = [], []
    for start in range(0, Q, _QUERY_CHUNK):
        stop = min(start + _QUERY_CHUNK, Q)
        part = q[:, :, start:stop].reshape(B, H, -1, D)  # [B, H, G*C, D]
        logits = torch.matmul(part, k.mT).float().view(B, heads, stop - start, N) * scale
        if causal:
            row = torch.arange(start, stop, device=q.device)
            hidden = torch.arange(N, device=q.device) > row[:, None]
            logits = logits.masked_fill(hidden, float("-inf"))
        if mask is not None:
            piece = mask if mask.shape[-2] == 1 else mask[..., start:stop, :]
            logits = logits.masked_fill(~piece, float("-inf"))
        lse = torch.logsumexp(logits, -1)
        safe = torch.where(lse == float("-inf"), torch.zeros_like(lse), lse)
        weights = torch.exp(logits - safe[..., None]).to(v.dtype).view(B, H, -1, N)
        outs.append(torch.matmul(weights, v).view(B, heads, stop - start, -1))
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def attention_sums(
    q: Tensor, k: Tensor, v: Tensor, scale: float, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend a short chunk causally, and sum every key's probability over queries and group.

    All probabilities are held at once: for chunks, where that is little, it saves the second
    product of queries and keys that `column_sum` pays.

    Args:
        q: `[B, H*G, Q, D]`, the last Q positions.
        k: `[B, H, N, D]`; query i sees keys 0..N-Q+i.
        v: `[B, H, N, D]`.
        scale: factor on the logits.
        weight: float32 `[Q]`, by how much each query's probabilities count; all by 1 if None.

    Returns:
        The output `[B, H*G, Q, D]` in v's dtype and float32 sums `[B, H, N]`.
    """
    B, heads, Q, D = q.shape
    H, N = k.shape[1], k.shape[2]
    grouped = (q * scale).view(B, H, heads // H, Q, D).flatten(2, 3)  # [B, H, G*Q, D]
    logits = torch.matmul(grouped, k.mT).view(B, H, -1, Q, N)
    own = torch.ones(Q, Q, dtype=torch.bool, device=q.device).triu_(1)
    logits[..., N - Q :].masked_fill_(own, float("-inf"))
    weights = torch.softmax(logits, -1, dtype=torch.float32)
    out = torch.matmul(weights.to(v.dtype).flatten(2, 3), v)  # [B, H, G*Q, Dv]
    sums = weights.sum((2, 3)) if weight is None else torch.matmul(weight, weights.sum(2))
    return out.view(B, heads, Q, -1), sums


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of keys into attention over their union.

    Args:
        parts: outputs `[B, Hq, Q, D]` and log-sum-exps `[B, Hq, Q]` (-inf where nothing was seen).

    Returns:
        Output and log-sum-exp of the union, of the same shapes.
    """
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    total = torch.logsumexp(lses, 0)
    safe = torch.where(total == float("-inf"), torch.zeros_like(total), total)
    out = parts[0][0].float() * torch.exp(lses[0] - safe)[..., None]
    for (part, _), lse in zip(parts[1:], lses[1:], strict=True):
        out.addcmul_(part.float(), torch.exp(lse - safe)[..., None])
    return out.to(parts[0][0].dtype), total


def column_sum(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    q_lo: int = 0,
) -> Tensor:
    """Sum every key's attention probability over the queries and over the query group.

    Zhang et al. 2023 (arXiv:2306.14048), the accumulated score of H2O, per KV head.

    Args:
        q: `[B, H*G, Q, D]`.
        k: `[B, H, N, D]`.
        lse: natural log-sum-exp of each query over all keys it saw, `[B, H*G, Q]`; -inf counts
            nothing.
        scale: factor on the logits.
        causal: query i sees keys 0..N-Q+i (lower-right aligned).
        mask: bool `[B, H or 1, Q, N]`, True where a key is seen.
        q_lo: first query that counts.

    Returns:
        float32 `[B, H, N]`.
    """
    B, heads, Q, D = q.shape
    H, N = k.shape[1], k.shape[2]
    G = heads // H
    shift = torch.where(lse == float("-inf"), torch.full_like(lse, float("inf")), lse)
    score = torch.zeros(B, H, N, dtype=torch.float32, device=q.device)
    offset = N - Q if causal else 0
    tile = _KEY_TILE if q.device.type == "cpu" else N
    for start in range(q_lo, Q, _QUERY_CHUNK):
        stop = min(start + _QUERY_CHUNK, Q)
        end = offset + stop if causal else N
        part = (q[:, :, start:stop] * scale).reshape(B * H, -1, D)  # [B*H, G*C, D]
        less = shift[:, :, start:stop].reshape(B * H, -1, 1)
        for low in range(0, end, tile):
            high = min(low + tile, end)
            keys = k[:, :, low:high].reshape(B * H, high - low, D)
            logits = torch.bmm(part, keys.mT).float()  # [B*H, G*C, high - low]
            logits.sub_(less).exp_()
            weights = logits.view(B, H, G, stop - start, high - low)
            if causal and high > offset + start + 1:
                weights.tril_(offset + start - low)
            if mask is not None:
                piece = mask if mask.shape[-2] == 1 else mask[..., start:stop, :]
                # Not a product: an unseen key's logit may lie far above, and inf * 0 is nan.
                weights.masked_fill_(~piece[..., low:high].unsqueeze(2), 0.0)
            score[:, :, low:high] += weights.sum((2, 3))
    return score
