"""Accumulated attention per key and KV head, from the log-sum-exp of a fused forward."""

import math

import torch
from torch import Tensor

from kvevict.kernels.contract import (
    INTEGERS,
    check_tensor,
    key_mask_of,
    require,
    scale_of,
    sizes_of,
)
from kvevict.kernels.dispatch import arch_of, interpreted, on_device
from kvevict.kernels.tuning import config, power_of_two

LOG2_E = math.log2(math.e)


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
    """Sum the attention that each key receives, over queries and query group, in O(N) memory.

    Source: the accumulated attention of H2O (Zhang et al. 2023, arXiv:2306.14048, Alg. 1); with
    `q_lo` the observation window of SnapKV (Li et al. 2024, arXiv:2404.14469). The n x n matrix
    is never stored: probabilities are rebuilt from the log-sum-exp, as in the backward pass of
    FlashAttention-2. A tile of keys stays on the chip while all queries pass by, so that no
    atomics are needed and the result is deterministic.

    Args:
        q: `[B, H * G, M, D]` float32, float16 or bfloat16, rotated; finite.
        k: `[B, H, N, D]`, the keys that the forward saw.
        lse: float32 `[B, H * G, M]`, natural log-sum-exp of the forward. A query with an infinite
            value (it saw nothing, or shall not count) adds exactly 0.
        scale: factor on the logits, by default 1 / sqrt(D).
        causal: query i sees keys up to i + length - M (lower right aligned).
        key_mask: bool `[B, N]` or `[B, H, N]`, True where a key is real. Only drops those keys
            here: `lse` must be of a forward with the same mask.
        lengths: int32 or int64 `[B, H]`, stored keys per row and head, by default N.
        q_lo: only the queries from this one on count.
        out: float32 `[B, H, N]`, scores to add to, in place; by default zeros.
        decay: factor on older scores per query: query i counts decay ** (M - 1 - i) and `out`
            decay ** M.

    Returns:
        float32 `[B, H, N]`, `out` where it was given.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; names value and remedy.
    """
    sizes = sizes_of(q, k)
    B, H, G, M, N, D = sizes
    check_tensor("lse", lse, (B, H * G, M), (torch.float32,), q.device)
    check_tensor("lengths", lengths, (B, H), INTEGERS, q.device)
    check_tensor("out", out, (B, H, N), (torch.float32,), q.device)
    require(0 <= q_lo <= M, f"q_lo is {q_lo}: give 0 to M = {M}")
    require(0.0 < decay <= 1.0, f"decay is {decay}: give a factor above 0, up to 1")
    mask = key_mask_of(key_mask, sizes, q.device)
    scores = torch.empty(B, H, N, dtype=torch.float32, device=q.device) if out is None else out
    tile = config("column_sum", arch_of(q.device), D, q.dtype)

    with on_device(q.device):
        from kvevict.kernels.column_sum_kernel import column_sum_kernel

        column_sum_kernel[(-(-N // tile.block_n) * B * H,)](
            q, k, lse, mask, lengths, scores,
            *q.stride()[:3], *k.stride()[:3], *((0, 0) if mask is None else mask.stride()[:2]),
            H, B * H, M, N, q_lo, scale_of(scale, D) * LOG2_E, math.log2(decay), decay**M,
            G=G, D=D, DP=max(16, power_of_two(D)), CAUSAL=causal, HAS_MASK=mask is not None,
            HAS_LENGTHS=lengths is not None, ACCUMULATE=out is not None, DECAY=decay != 1.0,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            UPCAST=interpreted() and q.dtype == torch.bfloat16,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
    return scores
