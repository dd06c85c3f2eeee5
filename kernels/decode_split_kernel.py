"""Device code of `decode`, first pass: each program attends to one share of the slots."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from kvevict.kernels.tile_kernel import mm, softmax_step


@triton.jit
def _rotated_logits(
    q1, q2, k_ptr, cos_ptr, sin_ptr, rank, slots, live, D: tl.constexpr, HP: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return q . RoPE(k, rank), in two halves so that no half has to be swapped on the chip."""
    half = tl.arange(0, HP)
    used = live[:, None] & (half < D // 2)[None, :]
    k_place = k_ptr + slots[:, None] * D + half
    k1 = tl.load(k_place, mask=used, other=0.0)
    k2 = tl.load(k_place + D // 2, mask=used, other=0.0)
    angle = rank.to(tl.int64)[:, None] * (D // 2) + half
    c = tl.load(cos_ptr + angle, mask=used, other=0.0)
    s = tl.load(sin_ptr + angle, mask=used, other=0.0)
    first = k1.to(tl.float32)
    second = k2.to(tl.float32)
    r1 = first * c - second * s
    r2 = second * c + first * s
    if not UPCAST:
        r1 = r1.to(k1.dtype)
        r2 = r2.to(k1.dtype)
    logits = mm(q1, tl.trans(r1), UPCAST, PRECISION)
    return logits + mm(q2, tl.trans(r2), UPCAST, PRECISION)


@triton.jit
def decode_split_kernel(
    q_ptr, q_sink_ptr, k_ptr, v_ptr, position_ptr, query_position_ptr, rank_ptr, cos_ptr, sin_ptr,
    logits_ptr, part_out_ptr, part_max_ptr, part_sum_ptr,
    stride_qb, stride_qh, stride_qm, stride_sb, stride_sh, stride_sm,
    H, Q, C, splits, split_slots, sinks, window, scale_log2,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TWO_QUERIES: tl.constexpr,
    ROPE: tl.constexpr, WINDOW: tl.constexpr, SCORES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from a block of query rows of one KV head to the slots of one split.

    Writes the unnormalised output, maximum and sum of the split and, for scores, the base-2
    logits: probabilities are unknown until all splits have ended.
    """
    pid = tl.program_id(0)
    split = pid % splits
    bh = (pid // splits).to(tl.int64)
    b = bh // H
    h = bh % H
    R = G * Q
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)  # row = head of the group, query
    inside = rows < R
    dims = tl.arange(0, DP)
    head = h * G + rows // Q
    q_row = q_ptr + b * stride_qb + head * stride_qh + (rows % Q) * stride_qm
    now = tl.load(query_position_ptr + b * Q + rows % Q, mask=inside, other=-1)
    q_mask = inside[:, None] & (dims < D)[None, :]
    if ROPE:
        HP: tl.constexpr = DP // 2
        half = tl.arange(0, HP)
        half_mask = inside[:, None] & (half < D // 2)[None, :]
        q1 = tl.load(q_row[:, None] + half, mask=half_mask, other=0.0)
        q2 = tl.load(q_row[:, None] + half + D // 2, mask=half_mask, other=0.0)
    else:
        q = tl.load(q_row[:, None] + dims, mask=q_mask, other=0.0)
    if TWO_QUERIES:
        sink_row = q_sink_ptr + b * stride_sb + head * stride_sh + (rows % Q) * stride_sm
    k_head = k_ptr + bh * C * D
    v_head = v_ptr + bh * C * D
    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, DP], dtype=tl.float32)
    start = split * split_slots
    stop = tl.minimum(start + split_slots, C)
    for n0 in range(start, stop, BLOCK_N):
        near = n0 + tl.arange(0, BLOCK_N)
        slots = near.to(tl.int64)
        place = tl.load(position_ptr + bh * C + slots, mask=near < stop, other=-1)
        live = place >= 0
        if ROPE:
            rank = tl.load(rank_ptr + bh * C + slots, mask=live, other=0)
            logits = _rotated_logits(
                q1, q2, k_head, cos_ptr, sin_ptr, rank, slots, live, D, DP // 2, UPCAST, PRECISION
            )
        else:
            # Not masked by `live`: the load need not wait for the positions.
            k = tl.load(
                k_head + slots[:, None] * D + dims,
                mask=(near < stop)[:, None] & (dims < D)[None, :],
                other=0.0,
            )
            logits = mm(q, tl.trans(k), UPCAST, PRECISION)
        is_sink = place < sinks
        # Sinks lie in one or two tiles; the others skip the second product. Its operands are loaded
        # here, only the rows in use: held since before the branch they would spill.
        if TWO_QUERIES and tl.max((live & is_sink).to(tl.int32), 0) > 0:
            q_sink = tl.load(sink_row[:, None] + dims, mask=q_mask, other=0.0)
            k_sink = tl.load(
                k_head + slots[:, None] * D + dims,
                mask=(live & is_sink)[:, None] & (dims < D)[None, :],
                other=0.0,
            )
            shifted = mm(q_sink, tl.trans(k_sink), UPCAST, PRECISION)
            logits = tl.where(is_sink[None, :], shifted, logits)
        seen = live[None, :] & (place[None, :] <= now[:, None])
        if WINDOW:
            seen = seen & (is_sink[None, :] | (now[:, None] - place[None, :] <= window))
        logits = tl.where(seen, logits * scale_log2, float("-inf"))
        if SCORES:
            tl.store(
                logits_ptr + (bh * R + rows)[:, None] * C + slots[None, :],
                logits,
                mask=inside[:, None] & (near < stop)[None, :],
            )
        # An empty slot may hold anything, and 0 * nan is nan: its value is never loaded.
        v = tl.load(
            v_head + slots[:, None] * D + dims,
            mask=live[:, None] & (dims < D)[None, :],
            other=0.0,
        )
        p, alpha, m, mass = softmax_step(logits, m, mass)
        if not UPCAST:
            p = p.to(v.dtype)
        acc = acc * alpha[:, None] + mm(p, v, UPCAST, PRECISION)
    part = (bh * splits + split) * R + rows
    tl.store(part_out_ptr + part[:, None] * D + dims, acc, mask=q_mask)
    tl.store(part_max_ptr + part, m, mask=inside)
    tl.store(part_sum_ptr + part, mass, mask=inside)
