"""Decode over the slots of an eviction cache: attend, score and pick the victim in two launches."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvevict.kernels.column_sum import LOG2_E
from kvevict.kernels.contract import (
    INTEGERS,
    MAX_DECODE_QUERIES,
    Decoded,
    Sizes,
    check_buffer,
    check_tensor,
    require,
    scale_of,
    sizes_of,
)
from kvevict.kernels.dispatch import arch_of, interpreted, on_device, processors_of
from kvevict.kernels.tuning import config, power_of_two


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    query_position: Tensor,
    *,
    scale: float | None = None,
    sinks: int = 0,
    window: int | None = None,
    q_sink: Tensor | None = None,
    rank: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    scores: Tensor | None = None,
    decay: float = 1.0,
    recent: int | None = None,
    evict: bool = False,
    by_age: bool = False,
) -> Decoded:
    """Attend from 1 to 16 queries to the slots of a cache, in any slot order.

    A query sees the live slots whose position is not above its own. Optionally, in the same two
    launches: this step's probabilities are added to the scores, and the slot that the next token
    overwrites is chosen (and emptied). Nothing is read back to the host.

    Source: split-K decoding as in Flash-Decoding (Dao et al. 2023); scores and victim as in H2O
    (Zhang et al. 2023, arXiv:2306.14048; the authors' code: attend, accumulate, evict); `q_sink`
    and `rank` give the in-cache positions of StreamingLLM (Xiao et al. 2023, arXiv:2309.17453,
    section 3.2) and of H2O's streaming code. Differs: scores are summed over the query group.

    Args:
        q: `[B, H * G, Q, D]`, Q from 1 to 16, rotated. With `rank`: rotated by its own rank.
        k: `[B, H, C, D]` contiguous. With `rank`: before rotation.
        v: `[B, H, C, D]` contiguous. Empty slots may hold anything.
        position: int64 or int32 `[B, H, C]`, original positions, -1 empty.
        query_position: `[B, Q]`, dtype of `position`; -1 for a query that counts for nothing.
        scale: factor on the logits, by default 1 / sqrt(D).
        sinks: positions below are the head: outside the window rule, never a victim.
        window: other slots are seen up to this distance; None sees all.
        q_sink: `[B, H * G, Q, D]`, used in place of q for sink slots: the query shifted back by
            the gap between sinks and window.
        rank: int32 `[B, H, C]`, place of each slot in time order (-1 empty): keys are rotated by
            it as they are read. Kept up to date by `evict`.
        cos: float32 `[R, D / 2]`, R above the largest rank; needed with `rank`.
        sin: float32 `[R, D / 2]`.
        scores: float32 `[B, H, C]`, added to in place; 0 in empty slots afterwards.
        decay: factor on older scores per query: query t counts decay ** (Q - 1 - t), what was
            there decay ** Q.
        recent: how many of the newest positions are protected. With it a victim is chosen: the
            first empty slot, else the unprotected slot of the smallest (score, position); without
            `scores` the oldest. None chooses none.
        evict: empty the victim's slot if there was no empty one (its position becomes -1).
        by_age: compare scores divided by age, the queries that could see the slot.

    Returns:
        out, lse, the victim and "triton".

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; names value and remedy.
    """
    sizes = sizes_of(q, k, v)
    _check(q, k, v, position, query_position, sizes, q_sink, rank, cos, sin, scores)
    require(0.0 < decay <= 1.0, f"decay is {decay}: give a factor above 0, up to 1")
    require(sinks >= 0, f"sinks is {sinks}: give 0 or more")
    require(window is None or window >= 0, f"window is {window}: give 0 or more, or None")
    require(recent is None or recent >= 0, f"recent is {recent}: give 0 or more, or None")
    require(not evict or recent is not None, "evict=True: give recent too, it names the victim")
    B, H, G, Q, C, D = sizes
    R = G * Q
    device = q.device
    tile = config("decode", arch_of(device), D, q.dtype, R)
    block = tile.block_m
    plan = split_plan(B * H * -(-R // block), C, tile.block_n, processors_of(device))

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    part_out = scratch(B * H, plan.splits, R, D)
    part_max, part_sum = scratch(2, B * H, plan.splits, R).unbind()
    logits = None if scores is None else scratch(B * H, R, C)
    out = torch.empty(B, H * G, Q, D, dtype=q.dtype, device=device)
    lse = scratch(B, H * G, Q)
    victim = None
    if recent is not None:
        victim = torch.empty(B, H, dtype=torch.int64, device=device)
    DP = max(32, power_of_two(D))
    # Under ROPE a tile holds two halves of the head dim, each a power of two.
    DP = DP if rank is None else 2 * max(16, power_of_two(D // 2))

    with on_device(device):
        from kvevict.kernels.decode_merge_kernel import decode_merge_kernel
        from kvevict.kernels.decode_split_kernel import decode_split_kernel

        decode_split_kernel[(B * H * plan.splits, -(-R // block))](
            q, q_sink, k, v, position, query_position, rank, cos, sin,
            logits, part_out, part_max, part_sum,
            *q.stride()[:3], *((0, 0, 0) if q_sink is None else q_sink.stride()[:3]),
            H, Q, C, plan.splits, plan.slots, sinks, window or 0, scale_of(scale, D) * LOG2_E,
            G=G, D=D, DP=DP, TWO_QUERIES=q_sink is not None, ROPE=rank is not None,
            WINDOW=window is not None, SCORES=scores is not None, BLOCK_M=block,
            BLOCK_N=tile.block_n, UPCAST=interpreted() and q.dtype == torch.bfloat16,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
        RP = power_of_two(R)
        decode_merge_kernel[(B * H,)](
            part_out, part_max, part_sum, logits, position, query_position, rank, scores,
            out, lse, victim,
            H, Q, C, plan.splits, sinks, recent or 0, math.log2(decay), decay**Q,
            G=G, D=D, DP=max(16, power_of_two(D)), QP=power_of_two(Q), RP=RP,
            SCORES=scores is not None, DECAY=decay != 1.0, PICK=recent is not None, EVICT=evict,
            HAS_RANK=rank is not None, BY_AGE=by_age, BLOCK_M=min(16, RP),
            BLOCK_C=32 if interpreted() else merge_block(RP), num_warps=4, num_stages=2,
            enable_fp_fusion=True,
        )  # fmt: skip
    return Decoded(out, lse, victim, "triton")


class SplitPlan(NamedTuple):
    """How the slots are shared out: programs per row block, and slots for each."""

    splits: int
    slots: int


def split_plan(programs: int, slots: int, block_n: int, processors: int) -> SplitPlan:
    """Share the slots out so that every multiprocessor has about two programs.

    From shapes alone, so that launches never wait for the device and can be captured in a graph.
    """
    blocks = -(-slots // block_n)
    wanted = min(blocks, max(1, -(-2 * processors // programs)), 64)
    per_split = -(-blocks // wanted)
    return SplitPlan(-(-blocks // per_split), per_split * block_n)


def merge_block(rows: int) -> int:
    """Return the slots of a tile of the merge pass, for about 4096 logits a tile."""
    return max(32, min(1024, 4096 // rows))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    query_position: Tensor,
    sizes: Sizes,
    q_sink: Tensor | None,
    rank: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    scores: Tensor | None,
) -> None:
    B, H, _, Q, C, D = sizes
    require(
        1 <= Q <= MAX_DECODE_QUERIES,
        f"{Q} queries: give 1 to {MAX_DECODE_QUERIES}, or use attention_lse for a longer chunk",
    )
    check_buffer("k", k, k)
    check_buffer("v", v, k)
    check_tensor("position", position, (B, H, C), INTEGERS, q.device)
    check_tensor("query_position", query_position, (B, Q), (position.dtype,), q.device)
    check_tensor("scores", scores, (B, H, C), (torch.float32,), q.device)
    if q_sink is not None:
        require(rank is None, "q_sink and rank: give one of the two, both set in-cache positions")
        require(
            q_sink.shape == q.shape and q_sink.dtype == q.dtype and q_sink.device == q.device,
            f"q_sink is {tuple(q_sink.shape)} {q_sink.dtype} on {q_sink.device}: make it like q, "
            f"{tuple(q.shape)} {q.dtype} on {q.device}",
        )
        require(q_sink.stride(3) == 1, "q_sink: make the last axis contiguous")
    check_tensor("rank", rank, (B, H, C), (torch.int32,), q.device)
    given = [t is not None for t in (rank, cos, sin)]
    require(all(given) or not any(given), "rank, cos and sin: give all three or none")
    if cos is not None and sin is not None:
        shape = (cos.shape[0], D // 2)
        check_tensor("cos", cos, shape, (torch.float32,), q.device)
        check_tensor("sin", sin, shape, (torch.float32,), q.device)
