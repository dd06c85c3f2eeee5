"""Masked attention that returns its log-sum-exp, for what a library's forward cannot serve."""

import torch
from torch import Tensor

from kvevict.kernels.column_sum import LOG2_E
from kvevict.kernels.contract import (
    INTEGERS,
    Attention,
    check_tensor,
    key_mask_of,
    scale_of,
    sizes_of,
)
from kvevict.kernels.dispatch import arch_of, interpreted, on_device
from kvevict.kernels.tuning import config, power_of_two


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
    """Attend with any mix of causal mask, key mask and ragged lengths, and return (out, lse).

    Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691), Alg. 1. Differs: a query that sees no
    key gets out 0 and lse -inf, and so adds exactly 0 to a column sum or a merge. A forward of
    cuDNN or FlashAttention is faster where it applies; this is the fallback.

    Args:
        q: `[B, H * G, M, D]` float32, float16 or bfloat16, rotated.
        k: `[B, H, N, D]`.
        v: `[B, H, N, D]`; masked keys and values may hold anything.
        scale: factor on the logits, by default 1 / sqrt(D).
        causal: query i sees keys up to i + length - M (lower right aligned).
        key_mask: bool `[B, N]` or `[B, H, N]`, True where a key is real.
        lengths: int32 or int64 `[B, H]`, stored keys per row and head, by default N.

    Returns:
        out, lse and "triton".

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; names value and remedy.
    """
    sizes = sizes_of(q, k, v)
    B, H, G, M, N, D = sizes
    check_tensor("lengths", lengths, (B, H), INTEGERS, q.device)
    mask = key_mask_of(key_mask, sizes, q.device)
    out = torch.empty(B, H * G, M, D, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H * G, M, dtype=torch.float32, device=q.device)
    tile = config("attention_lse", arch_of(q.device), D, q.dtype)

    with on_device(q.device):
        from kvevict.kernels.attention_lse_kernel import attention_lse_kernel

        attention_lse_kernel[(-(-M // tile.block_m) * B * H * G,)](
            q, k, v, mask, lengths, out, lse,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *((0, 0) if mask is None else mask.stride()[:2]),
            H, B * H * G, M, N, scale_of(scale, D) * LOG2_E,
            G=G, D=D, DP=max(16, power_of_two(D)), CAUSAL=causal, HAS_MASK=mask is not None,
            HAS_LENGTHS=lengths is not None, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            UPCAST=interpreted() and q.dtype == torch.bfloat16,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
    return Attention(out, lse, "triton")
