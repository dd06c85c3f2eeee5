"""Device code of `column_sum`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from kvevict.kernels.tile_kernel import mm


@triton.jit
def _add_queries(
    total, k, keys, q_ptr, lse_ptr, stride_qm, start, stop, M, shift, scale_log2, decay_log2,
    D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr, DECAY: tl.constexpr,
    BLOCK_M: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the attention that the queries start..stop of one head pay to a tile of keys."""
    dims = tl.arange(0, DP)
    for m0 in range(start, stop, BLOCK_M):
        rows = m0 + tl.arange(0, BLOCK_M)
        inside = rows < M
        q = tl.load(
            q_ptr + rows.to(tl.int64)[None, :] * stride_qm + dims[:, None],
            mask=inside[None, :] & (dims[:, None] < D),
            other=0.0,
        )  # [DP, BLOCK_M]
        lse = tl.load(lse_ptr + rows, mask=inside, other=float("inf")) * 1.4426950408889634
        # A query that sees nothing must add nothing, whichever sign its infinity has.
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
        if DECAY:
            lse -= (M - 1 - rows).to(tl.float32) * decay_log2
        p = tl.exp2(mm(k, q, UPCAST, PRECISION) * scale_log2 - lse[None, :])
        if MASKED:
            p = tl.where(keys[:, None] <= rows[None, :] + shift, p, 0.0)
        total += tl.sum(p, 1)
    return total


@triton.jit
def column_sum_kernel(
    q_ptr, k_ptr, lse_ptr, mask_ptr, length_ptr, out_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_mb, stride_mh,
    H, BH, M, N, q_lo, scale_log2, decay_log2, decay_all,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_LENGTHS: tl.constexpr, ACCUMULATE: tl.constexpr,
    DECAY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum one tile of keys of one KV head over all queries of its group: no atomics."""
    pid = tl.program_id(0)
    bh = (pid % BH).to(tl.int64)
    n0 = (pid // BH) * BLOCK_N
    b = bh // H
    h = bh % H
    keys = n0 + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, DP)
    length = N
    if HAS_LENGTHS:
        length = tl.load(length_ptr + bh).to(tl.int32)
    alive = keys < length
    k = tl.load(
        k_ptr + b * stride_kb + h * stride_kh + keys.to(tl.int64)[:, None] * stride_kn + dims,
        mask=alive[:, None] & (dims < D)[None, :],
        other=0.0,
    )  # [BLOCK_N, DP]
    # Key j is seen by the queries i >= j - shift: the last query sees the last key.
    shift = length - M
    first = q_lo
    full = q_lo
    if CAUSAL:
        first = tl.maximum(q_lo, n0 - shift)
        diagonal = tl.maximum(n0 + BLOCK_N - 1 - shift - first, 0)
        full = tl.minimum(first + (diagonal + BLOCK_M - 1) // BLOCK_M * BLOCK_M, M)
    first = tl.where(n0 >= length, M, first)
    full = tl.where(n0 >= length, M, full)
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for g in range(G):
        head = h * G + g
        q_head = q_ptr + b * stride_qb + head * stride_qh
        lse_head = lse_ptr + (bh * G + g) * M
        if CAUSAL:
            total = _add_queries(
                total, k, keys, q_head, lse_head, stride_qm, first, full, M, shift, scale_log2,
                decay_log2, D, DP, True, DECAY, BLOCK_M, UPCAST, PRECISION,
            )  # fmt: skip
        total = _add_queries(
            total, k, keys, q_head, lse_head, stride_qm, full, M, M, shift, scale_log2,
            decay_log2, D, DP, False, DECAY, BLOCK_M, UPCAST, PRECISION,
        )  # fmt: skip
    if HAS_MASK:
        alive = alive & (
            tl.load(mask_ptr + b * stride_mb + h * stride_mh + keys, mask=alive, other=0) != 0
        )
    # Masked keys are no part of lse, so what they gathered is dropped here, once.
    total = tl.where(alive, total, 0.0)
    place = out_ptr + bh * N + keys
    if ACCUMULATE:
        total += decay_all * tl.load(place, mask=keys < N, other=0.0)
    tl.store(place, total, mask=keys < N)
