"""Device code of `fill_holes`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def plan_moves_kernel(
    keep_ptr, source_ptr, target_ptr, length_ptr, position_ptr, scores_ptr, rank_ptr, C,
    HAS_SCORES: tl.constexpr, HAS_RANK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """List the moves of one KV head: the i-th kept slot of the tail goes into the i-th hole.

    Also empties the dropped slots of the tail, which no move touches.
    """
    bh = tl.program_id(0).to(tl.int64)
    base = bh * C
    length = 0
    for c0 in range(0, C, BLOCK_C):
        slots = c0 + tl.arange(0, BLOCK_C)
        kept = tl.load(keep_ptr + base + slots, mask=slots < C, other=0) != 0
        length += tl.sum(kept.to(tl.int32), 0)
    holes = 0
    movers = 0
    for c0 in range(0, C, BLOCK_C):
        slots = c0 + tl.arange(0, BLOCK_C)
        inside = slots < C
        kept = tl.load(keep_ptr + base + slots, mask=inside, other=0) != 0
        hole = (slots < length) & (kept == 0)
        mover = (slots >= length) & kept
        hole_index = holes + tl.cumsum(hole.to(tl.int32), 0) - 1
        mover_index = movers + tl.cumsum(mover.to(tl.int32), 0) - 1
        tl.store(target_ptr + base + hole_index, slots, mask=hole)
        tl.store(source_ptr + base + mover_index, slots, mask=mover)
        holes += tl.sum(hole.to(tl.int32), 0)
        movers += tl.sum(mover.to(tl.int32), 0)
        dropped = inside & (slots >= length) & (kept == 0)
        tl.store(position_ptr + base + slots, -1, mask=dropped)
        if HAS_SCORES:
            tl.store(scores_ptr + base + slots, 0.0, mask=dropped)
        if HAS_RANK:
            tl.store(rank_ptr + base + slots, -1, mask=dropped)
    for c0 in range(0, C, BLOCK_C):
        index = c0 + tl.arange(0, BLOCK_C)
        tl.store(source_ptr + base + index, -1, mask=(index >= movers) & (index < C))
    tl.store(length_ptr + bh, length)


@triton.jit
def move_slots_kernel(
    source_ptr, target_ptr, k_ptr, v_ptr, position_ptr, scores_ptr, rank_ptr, C,
    D: tl.constexpr, DP: tl.constexpr, HAS_SCORES: tl.constexpr, HAS_RANK: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Carry out a block of moves. Sources and targets are disjoint sets: no order is needed."""
    base = tl.program_id(1).to(tl.int64) * C
    index = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    source = tl.load(source_ptr + base + index, mask=index < C, other=-1)
    used = source >= 0
    if tl.max(source, 0) >= 0:
        origin = base + tl.maximum(source, 0)
        target = base + tl.load(target_ptr + base + index, mask=used, other=0)
        dims = tl.arange(0, DP)
        mask = used[:, None] & (dims < D)[None, :]
        key = tl.load(k_ptr + origin[:, None] * D + dims, mask=mask, other=0.0)
        value = tl.load(v_ptr + origin[:, None] * D + dims, mask=mask, other=0.0)
        tl.store(k_ptr + target[:, None] * D + dims, key, mask=mask)
        tl.store(v_ptr + target[:, None] * D + dims, value, mask=mask)
        place = tl.load(position_ptr + origin, mask=used, other=-1)
        if HAS_SCORES:
            score = tl.load(scores_ptr + origin, mask=used, other=0.0)
        if HAS_RANK:
            rank = tl.load(rank_ptr + origin, mask=used, other=-1)
        # Every warp holds these values before the sources are emptied.
        tl.debug_barrier()
        tl.store(position_ptr + target, place, mask=used)
        tl.store(position_ptr + origin, -1, mask=used)
        if HAS_SCORES:
            tl.store(scores_ptr + target, score, mask=used)
            tl.store(scores_ptr + origin, 0.0, mask=used)
        if HAS_RANK:
            tl.store(rank_ptr + target, rank, mask=used)
            tl.store(rank_ptr + origin, -1, mask=used)
