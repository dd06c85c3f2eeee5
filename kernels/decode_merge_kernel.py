"""Device code of `decode`, second pass: merges the splits, scores the slots, picks the victim."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def _lse_of_rows(
    part_max_ptr, part_sum_ptr, bh, rows, R, splits, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the base-2 log-sum-exp of rows over all splits, +inf where they saw nothing."""
    m = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    for split in range(0, splits):
        part = (bh * splits + split) * R + rows
        m_part = tl.load(part_max_ptr + part, mask=rows < R, other=float("-inf"))
        mass_part = tl.load(part_sum_ptr + part, mask=rows < R, other=0.0)
        m_new = tl.maximum(m, m_part)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        mass = mass * tl.exp2(m - base) + mass_part * tl.exp2(m_part - base)
        m = m_new
    dead = mass == 0.0
    return tl.where(dead, float("inf"), m + tl.log2(tl.where(dead, 1.0, mass)))


@triton.jit
def decode_merge_kernel(
    part_out_ptr, part_max_ptr, part_sum_ptr, logits_ptr, position_ptr, query_position_ptr,
    rank_ptr, scores_ptr, out_ptr, lse_ptr, victim_ptr,
    H, Q, C, splits, sinks, recent, decay_log2, decay_all,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, QP: tl.constexpr, RP: tl.constexpr,
    SCORES: tl.constexpr, DECAY: tl.constexpr, PICK: tl.constexpr, EVICT: tl.constexpr,
    HAS_RANK: tl.constexpr, BY_AGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Finish one KV head of one row of the batch."""
    bh = tl.program_id(0).to(tl.int64)
    b = bh // H
    R = G * Q
    dims = tl.arange(0, DP)
    for r0 in range(0, R, BLOCK_M):
        rows = r0 + tl.arange(0, BLOCK_M)
        lse = _lse_of_rows(part_max_ptr, part_sum_ptr, bh, rows, R, splits, BLOCK_M)
        acc = tl.zeros([BLOCK_M, DP], dtype=tl.float32)
        mask = (rows < R)[:, None] & (dims < D)[None, :]
        for split in range(0, splits):
            part = (bh * splits + split) * R + rows
            m = tl.load(part_max_ptr + part, mask=rows < R, other=float("-inf"))
            piece = tl.load(part_out_ptr + part[:, None] * D + dims, mask=mask, other=0.0)
            acc += piece * tl.exp2(m - lse)[:, None]
        tl.store(out_ptr + (bh * R + rows)[:, None] * D + dims, acc, mask=mask)
        lse = tl.where(lse == float("inf"), float("-inf"), lse * 0.6931471805599453)
        tl.store(lse_ptr + bh * R + rows, lse, mask=rows < R)

    if SCORES or PICK:
        all_rows = tl.arange(0, RP)
        if SCORES:
            # Once more, so that nothing written above is read back across warps.
            lse_all = _lse_of_rows(part_max_ptr, part_sum_ptr, bh, all_rows, R, splits, RP)
            if DECAY:
                lse_all -= (Q - 1 - all_rows % Q).to(tl.float32) * decay_log2
        queries = tl.arange(0, QP)
        places = tl.load(query_position_ptr + b * Q + queries, mask=queries < Q, other=-1)
        now = tl.max(places, 0).to(tl.int64)
        far: tl.constexpr = 0x7FFFFFFFFFFFFFFF
        empty = C
        victim = C
        victim_rank = 0
        victim_worth = float("inf")
        victim_place = tl.full([], far, dtype=tl.int64)
        for c0 in range(0, C, BLOCK_C):
            slots = c0 + tl.arange(0, BLOCK_C)
            inside = slots < C
            # A slot past the end is neither empty (-1) nor a candidate.
            place = tl.load(position_ptr + bh * C + slots, mask=inside, other=-2).to(tl.int64)
            worth = tl.zeros([BLOCK_C], dtype=tl.float32)
            if SCORES:
                logits = tl.load(
                    logits_ptr + (bh * R + all_rows)[:, None] * C + slots[None, :],
                    mask=(all_rows < R)[:, None] & inside[None, :],
                    other=float("-inf"),
                )
                score = tl.load(scores_ptr + bh * C + slots, mask=inside, other=0.0)
                if DECAY:
                    score *= decay_all
                score += tl.sum(tl.exp2(logits - lse_all[:, None]), 0)
                score = tl.where(place >= 0, score, 0.0)
                tl.store(scores_ptr + bh * C + slots, score, mask=inside)
                worth = score
            if PICK:
                if BY_AGE:
                    worth = worth / tl.maximum(now + 1 - place, 1).to(tl.float32)
                empty = tl.minimum(empty, tl.min(tl.where(place == -1, slots, C), 0))
                loose = (place >= sinks) & (place <= now - recent) & (place >= 0)
                lowest = tl.min(tl.where(loose, worth, float("inf")), 0)
                loose = loose & (worth == lowest)
                oldest = tl.min(tl.where(loose, place, far), 0)
                slot = tl.min(tl.where(loose & (place == oldest), slots, C), 0)
                better = (lowest < victim_worth) | (
                    (lowest == victim_worth) & (oldest < victim_place)
                )
                if HAS_RANK:
                    rank = tl.load(rank_ptr + bh * C + slots, mask=inside, other=-1)
                    found = tl.sum(tl.where(slots == slot, rank, 0), 0)
                    victim_rank = tl.where(better, found, victim_rank)
                victim_worth = tl.where(better, lowest, victim_worth)
                victim_place = tl.where(better, oldest, victim_place)
                victim = tl.where(better, slot, victim)
        if PICK:
            chosen = tl.where(empty < C, empty, tl.where(victim < C, victim, -1))
            tl.store(victim_ptr + bh, chosen.to(tl.int64))
            # All loads of positions and ranks have ended: `chosen` comes from a reduction of them.
            if EVICT and (empty >= C) & (victim < C):
                tl.store(position_ptr + bh * C + victim, -1)
                if HAS_RANK:
                    for c0 in range(0, C, BLOCK_C):
                        slots = c0 + tl.arange(0, BLOCK_C)
                        rank = tl.load(rank_ptr + bh * C + slots, mask=slots < C, other=-1)
                        lower = tl.where(rank > victim_rank, rank - 1, rank)
                        lower = tl.where(slots == victim, -1, lower)
                        tl.store(rank_ptr + bh * C + slots, lower, mask=slots < C)
