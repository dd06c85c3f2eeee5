"""What every kernel of this room promises: result tuples and the checks of its arguments.

The layouts, fixed for the whole room: queries `[B, H * G, Q, D]`; key and value buffers
`[B, H, C, D]`; positions int64 or int32 `[B, H, C]`, -1 where a slot is empty; scores float32
`[B, H, C]`. B batch, H KV heads, G query heads per KV head, Q queries, C slots, D head dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32)
MAX_HEAD_DIM = 256
MAX_DECODE_QUERIES = 16


class Attention(NamedTuple):
    """Attention with what a column sum needs afterwards.

    Attributes:
        out: `[B, H * G, M, D]`, the dtype of q; 0 for a query that sees no key.
        lse: float32 `[B, H * G, M]`, natural log-sum-exp; -inf for a query that sees no key.
        ran: the implementation that computed it: "triton", "reference" or a library's name.
    """

    out: Tensor
    lse: Tensor
    ran: str


class Decoded(NamedTuple):
    """One decode step over the slots of a cache.

    Attributes:
        out: `[B, H * G, Q, D]`, the dtype of q; 0 for a query that sees no slot.
        lse: float32 `[B, H * G, Q]`, natural log-sum-exp; -inf for a query that sees no slot.
        victim: int64 `[B, H]`, the slot for the next token, -1 where every slot is protected;
            None unless asked for.
        ran: the implementation that computed it: "triton" or "reference".
    """

    out: Tensor
    lse: Tensor
    victim: Tensor | None
    ran: str


class Sizes(NamedTuple):
    """The letters of one call: batch, KV heads, query group, queries, keys, head dim."""

    B: int
    H: int
    G: int
    M: int
    N: int
    D: int


def require(condition: bool, message: str) -> None:
    """Raise ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def sizes_of(q: Tensor, k: Tensor, v: Tensor | None = None) -> Sizes:
    """Check queries `[B, H * G, M, D]` against keys and values `[B, H, N, D]`.

    Returns:
        The six sizes.

    Raises:
        ValueError: shapes, dtypes, devices or strides that the kernels cannot serve.
    """
    require(q.dim() == 4, f"q has shape {tuple(q.shape)}: give [B, H * G, M, D]")
    for name, tensor in (("k", k), ("v", v)):
        if tensor is None:
            continue
        require(tensor.dim() == 4, f"{name} has shape {tuple(tensor.shape)}: give [B, H, N, D]")
        require(
            tensor.dtype == q.dtype,
            f"{name} is {tensor.dtype} and q is {q.dtype}: cast both to one dtype",
        )
        require(
            tensor.device == q.device,
            f"{name} is on {tensor.device} and q on {q.device}: move both to one device",
        )
        require(
            tensor.stride(3) == 1,
            f"{name} has stride {tensor.stride(3)} along D: make the last axis contiguous",
        )
    require(q.dtype in FLOATS, f"q is {q.dtype}: give float32, float16 or bfloat16")
    require(q.stride(3) == 1, f"q has stride {q.stride(3)} along D: make the last axis contiguous")
    if v is not None:
        shapes = f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}"
        require(v.shape == k.shape, f"{shapes}: make them equal")
    B, heads, M, D = q.shape
    H, N = k.shape[1], k.shape[2]
    require(
        k.shape[0] == B and k.shape[3] == D and H > 0 and heads % H == 0,
        f"q {tuple(q.shape)} does not fit k {tuple(k.shape)}: batch and D must be equal and the "
        "query heads a multiple of the KV heads",
    )
    require(
        D <= MAX_HEAD_DIM and D % 8 == 0,
        f"head dim {D}: give a multiple of 8 up to {MAX_HEAD_DIM}, or use the torch path",
    )
    return Sizes(B, H, heads // H, M, N, D)


def check_tensor(
    name: str,
    tensor: Tensor | None,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check an optional contiguous tensor.

    Raises:
        ValueError: another shape, dtype or device, or a tensor that is not contiguous.
    """
    if tensor is None:
        return
    require(tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}: give {shape}")
    require(
        tensor.dtype in dtypes,
        f"{name} is {tensor.dtype}: give {' or '.join(str(dtype) for dtype in dtypes)}",
    )
    require(tensor.device == device, f"{name} is on {tensor.device}: move it to {device}")
    require(
        tensor.is_contiguous(),
        f"{name} has strides {tensor.stride()}: give a contiguous tensor",
    )


def check_buffer(name: str, tensor: Tensor, like: Tensor) -> None:
    """Check a key or value buffer `[B, H, C, D]` that is read or written in place.

    Raises:
        ValueError: it is not contiguous, or differs from `like` in shape, dtype or device.
    """
    require(tensor.dim() == 4, f"{name} has shape {tuple(tensor.shape)}: give [B, H, C, D]")
    check_tensor(name, tensor, tuple(like.shape), (like.dtype,), like.device)


def key_mask_of(mask: Tensor | None, sizes: Sizes, device: torch.device) -> Tensor | None:
    """Return a key mask as bool `[B, H, N]` (a view where it was `[B, N]`).

    Raises:
        ValueError: another shape, dtype or device.
    """
    if mask is None:
        return None
    require(mask.dtype == torch.bool, f"key_mask is {mask.dtype}: give bool, True where real")
    require(mask.device == device, f"key_mask is on {mask.device}: move it to {device}")
    wide = mask[:, None] if mask.dim() == 2 else mask
    fits = wide.dim() == 3 and wide.shape[0] == sizes.B and wide.shape[2] == sizes.N
    require(
        fits and wide.shape[1] in (1, sizes.H) and (sizes.N == 1 or wide.stride(2) == 1),
        f"key_mask has shape {tuple(mask.shape)}: give [B, N] or [B, H, N], contiguous along N",
    )
    return wide.expand(sizes.B, sizes.H, sizes.N)


def scale_of(scale: float | None, head_dim: int) -> float:
    """Return the factor on the logits, by default 1 / sqrt(D)."""
    return head_dim**-0.5 if scale is None else float(scale)
