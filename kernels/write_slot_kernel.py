"""Device code of `write_slot`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def write_slot_kernel(
    k_ptr, v_ptr, position_ptr, scores_ptr, rank_ptr, slot_ptr,
    new_k_ptr, new_v_ptr, new_position_ptr, new_rank_ptr,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    H, T, C,
    D: tl.constexpr, DP: tl.constexpr, HAS_SCORES: tl.constexpr, HAS_RANK: tl.constexpr,
):  # fmt: skip
    """Write one token of one KV head."""
    pid = tl.program_id(0).to(tl.int64)
    bh = pid // T
    t = pid % T
    b = bh // H
    h = bh % H
    slot = tl.load(slot_ptr + pid).to(tl.int64)
    if (slot >= 0) & (slot < C):
        dims = tl.arange(0, DP)
        row = (bh * C + slot) * D + dims
        key = tl.load(
            new_k_ptr + b * stride_kb + h * stride_kh + t * stride_kt + dims, mask=dims < D
        )
        value = tl.load(
            new_v_ptr + b * stride_vb + h * stride_vh + t * stride_vt + dims, mask=dims < D
        )
        tl.store(k_ptr + row, key, mask=dims < D)
        tl.store(v_ptr + row, value, mask=dims < D)
        tl.store(position_ptr + bh * C + slot, tl.load(new_position_ptr + b * T + t))
        if HAS_SCORES:
            tl.store(scores_ptr + bh * C + slot, 0.0)
        if HAS_RANK:
            tl.store(rank_ptr + bh * C + slot, tl.load(new_rank_ptr + pid))
