"""Bulk eviction in place: the kept slots of the tail move into the holes in front."""

import torch
from torch import Tensor

from kvevict.kernels.contract import FLOATS, INTEGERS, check_buffer, check_tensor, require
from kvevict.kernels.dispatch import interpreted, on_device
from kvevict.kernels.tuning import power_of_two

MOVES_PER_PROGRAM = 16


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
    """Evict many slots at once so that the kept ones lie in front, without a second buffer.

    A head that keeps n slots moves only those that lie behind slot n, each into a hole in front:
    the fewest bytes there can be. Sources and targets are disjoint, so all moves run at once.
    Slot order is not kept; it means nothing, as each slot knows its position.

    Args:
        keys: `[B, H, C, D]` contiguous, changed in place.
        values: `[B, H, C, D]` contiguous, changed in place.
        position: int64 or int32 `[B, H, C]`, changed in place; -1 behind the kept slots.
        keep: bool `[B, H, C]`, False for empty slots too.
        scores: float32 `[B, H, C]`, moved along; 0 behind the kept slots.
        rank: int32 `[B, H, C]`, moved along; -1 behind the kept slots.
        workspace: int32 `[2, B, H, C]` for the list of moves; allocated here when not given.

    Returns:
        int32 `[B, H]`, slots kept per row and head.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; names value and remedy.
    """
    check_buffer("keys", keys, keys)
    check_buffer("values", values, keys)
    B, H, C, D = keys.shape
    device = keys.device
    require(keys.dtype in FLOATS, f"keys are {keys.dtype}: give float32, float16 or bfloat16")
    require(B * H < 65536, f"{B} rows x {H} KV heads: give fewer than 65536 in one call")
    check_tensor("position", position, (B, H, C), INTEGERS, device)
    check_tensor("keep", keep, (B, H, C), (torch.bool,), device)
    check_tensor("scores", scores, (B, H, C), (torch.float32,), device)
    check_tensor("rank", rank, (B, H, C), (torch.int32,), device)
    check_tensor("workspace", workspace, (2, B, H, C), (torch.int32,), device)
    if workspace is None:
        workspace = torch.empty(2, B, H, C, dtype=torch.int32, device=device)
    lengths = torch.empty(B, H, dtype=torch.int32, device=device)
    source, target = workspace.unbind()
    flags = {"HAS_SCORES": scores is not None, "HAS_RANK": rank is not None}

    with on_device(device):
        from kvevict.kernels.fill_holes_kernel import move_slots_kernel, plan_moves_kernel

        plan_moves_kernel[(B * H,)](
            keep, source, target, lengths, position, scores, rank, C,
            **flags, BLOCK_C=32 if interpreted() else 1024, num_warps=4, num_stages=1,
            enable_fp_fusion=True,
        )  # fmt: skip
        move_slots_kernel[(-(-C // MOVES_PER_PROGRAM), B * H)](
            source, target, keys, values, position, scores, rank, C,
            **flags, D=D, DP=power_of_two(D), BLOCK_I=MOVES_PER_PROGRAM, num_warps=4, num_stages=1,
            enable_fp_fusion=True,
        )  # fmt: skip
    return lengths
