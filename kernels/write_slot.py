"""Eviction of single tokens: the new token is written over the victim's slot, nothing moves."""

from torch import Tensor

from kvevict.kernels.contract import FLOATS, INTEGERS, check_buffer, check_tensor, require
from kvevict.kernels.dispatch import on_device
from kvevict.kernels.tuning import power_of_two


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
    """Write new tokens into given slots of a cache, in place and without allocation.

    Slot order means nothing (each slot knows its position), so evicting one token moves 4 * D
    bytes per head in place of the whole cache. Race-free as long as the slots of one head differ.

    Args:
        keys: `[B, H, C, D]` contiguous, written in place.
        values: `[B, H, C, D]` contiguous, written in place.
        position: int64 or int32 `[B, H, C]`, written in place.
        slot: int64 or int32 `[B, H, T]`, distinct within a head; a token whose slot is outside
            0..C-1 (-1: a finished row) is skipped.
        new_keys: `[B, H, T, D]`.
        new_values: `[B, H, T, D]`.
        new_position: `[B, T]`, dtype of `position`.
        scores: float32 `[B, H, C]`; the written slots start at 0.
        rank: int32 `[B, H, C]`, place in time order; needs `new_rank`.
        new_rank: int32 `[B, H, T]`.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; names value and remedy.
    """
    check_buffer("keys", keys, keys)
    check_buffer("values", values, keys)
    B, H, C, D = keys.shape
    require(slot.dim() == 3, f"slot has shape {tuple(slot.shape)}: give [B, H, T]")
    T = slot.shape[2]
    device = keys.device
    require(keys.dtype in FLOATS, f"keys are {keys.dtype}: give float32, float16 or bfloat16")
    check_tensor("slot", slot, (B, H, T), INTEGERS, device)
    check_tensor("position", position, (B, H, C), INTEGERS, device)
    check_tensor("new_position", new_position, (B, T), (position.dtype,), device)
    for name, tensor in (("new_keys", new_keys), ("new_values", new_values)):
        require(
            tuple(tensor.shape) == (B, H, T, D) and tensor.stride(3) == 1,
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: give "
            f"{(B, H, T, D)}, contiguous along D",
        )
        require(
            tensor.dtype == keys.dtype and tensor.device == device,
            f"{name} is {tensor.dtype} on {tensor.device}: give {keys.dtype} on {device}",
        )
    check_tensor("scores", scores, (B, H, C), (FLOATS[0],), device)
    check_tensor("rank", rank, (B, H, C), (INTEGERS[1],), device)
    check_tensor("new_rank", new_rank, (B, H, T), (INTEGERS[1],), device)
    require((rank is None) == (new_rank is None), "rank and new_rank: give both or none")

    with on_device(device):
        from kvevict.kernels.write_slot_kernel import write_slot_kernel

        write_slot_kernel[(B * H * T,)](
            keys, values, position, scores, rank, slot,
            new_keys, new_values, new_position, new_rank,
            *new_keys.stride()[:3], *new_values.stride()[:3], H, T, C,
            D=D, DP=power_of_two(D), HAS_SCORES=scores is not None, HAS_RANK=rank is not None,
            num_warps=1, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
