"""Device code of `attention_lse`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from kvevict.kernels.tile_kernel import mm, softmax_step


@triton.jit
def _attend(
    acc, m, mass, q, rows, k_ptr, v_ptr, mask_ptr, stride_kn, stride_vn, start, stop, length, shift,
    scale_log2, D: tl.constexpr, DP: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    HAS_MASK: tl.constexpr, BLOCK_N: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of queries to the keys start..stop."""
    dims = tl.arange(0, DP)
    for n0 in range(start, stop, BLOCK_N):
        keys = n0 + tl.arange(0, BLOCK_N)
        real = keys < length
        if HAS_MASK:
            real = real & (tl.load(mask_ptr + keys, mask=real, other=0) != 0)
        far = keys.to(tl.int64)
        k = tl.load(
            k_ptr + far[:, None] * stride_kn + dims,
            mask=real[:, None] & (dims < D)[None, :],
            other=0.0,
        )  # [BLOCK_N, DP]
        # Masked values may hold anything, and 0 * nan is nan: they are never loaded.
        v = tl.load(
            v_ptr + far[:, None] * stride_vn + dims,
            mask=real[:, None] & (dims < D)[None, :],
            other=0.0,
        )
        logits = mm(q, tl.trans(k), UPCAST, PRECISION) * scale_log2
        if MASKED:
            seen = real[None, :]
            if CAUSAL:
                seen = seen & (keys[None, :] <= rows[:, None] + shift)
            logits = tl.where(seen, logits, float("-inf"))
        p, alpha, m, mass = softmax_step(logits, m, mass)
        if not UPCAST:
            p = p.to(v.dtype)
        acc = acc * alpha[:, None] + mm(p, v, UPCAST, PRECISION)
    return acc, m, mass


@triton.jit
def attention_lse_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, length_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn, stride_mb, stride_mh,
    H, heads, M, N, scale_log2,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_LENGTHS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of queries of one head to all keys that it sees."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(M, BLOCK_M)
    # The last queries have the most keys: they start first.
    m0 = (tiles - 1 - pid // heads) * BLOCK_M
    bq = (pid % heads).to(tl.int64)
    bh = bq // G
    b = bh // H
    h = bh % H
    rows = m0 + tl.arange(0, BLOCK_M)
    inside = rows < M
    dims = tl.arange(0, DP)
    q = tl.load(
        q_ptr + b * stride_qb + (bq % (H * G)) * stride_qh
        + rows.to(tl.int64)[:, None] * stride_qm + dims,
        mask=inside[:, None] & (dims < D)[None, :],
        other=0.0,
    )  # fmt: skip
    length = N
    if HAS_LENGTHS:
        length = tl.load(length_ptr + bh).to(tl.int32)
    shift = length - M
    # Keys below `full` are seen by the whole tile, those from `stop` on by none of it.
    stop = length
    full = length // BLOCK_N * BLOCK_N
    if CAUSAL:
        stop = tl.maximum(tl.minimum(length, m0 + BLOCK_M + shift), 0)
        full = tl.minimum(full, tl.maximum(m0 + shift + 1, 0) // BLOCK_N * BLOCK_N)
    if HAS_MASK:
        full = 0
    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, DP], dtype=tl.float32)
    k_head = k_ptr + b * stride_kb + h * stride_kh
    v_head = v_ptr + b * stride_vb + h * stride_vh
    mask_head = mask_ptr
    if HAS_MASK:
        mask_head += b * stride_mb + h * stride_mh
    else:
        acc, m, mass = _attend(
            acc, m, mass, q, rows, k_head, v_head, mask_head, stride_kn, stride_vn, 0, full, length,
            shift, scale_log2, D, DP, CAUSAL, False, False, BLOCK_N, UPCAST, PRECISION,
        )  # fmt: skip
    acc, m, mass = _attend(
        acc, m, mass, q, rows, k_head, v_head, mask_head, stride_kn, stride_vn, full, stop, length,
        shift, scale_log2, D, DP, CAUSAL, True, HAS_MASK, BLOCK_N, UPCAST, PRECISION,
    )  # fmt: skip
    # A row that has seen nothing: out 0, and a log-sum-exp that stays at -inf.
    mass = tl.where(mass == 0.0, 1.0, mass)
    tl.store(
        out_ptr + (bq * M + rows)[:, None] * D + dims,
        acc / mass[:, None],
        mask=inside[:, None] & (dims < D)[None, :],
    )
    lse = (m + tl.log2(mass)) * 0.6931471805599453
    tl.store(lse_ptr + bq * M + rows, lse, mask=inside)
