"""Bytes, products and exponentials that an operation cannot do without, and the time they take.

One count for benchmarks and documents. `python -m benchmarks.counting` prints the floors of
docs/kernels.md.
"""

from typing import NamedTuple

POSITION_BYTES = 8  # int64
SCORE_BYTES = 4


class Work(NamedTuple):
    """What an operation moves and computes.

    Attributes:
        nbytes: bytes of memory that must be read and written once.
        flops: floating point operations of matrix products.
        exps: exponentials.
    """

    nbytes: float
    flops: float = 0.0
    exps: float = 0.0


class Limits(NamedTuple):
    """What a GPU reaches: bytes/s of a copy, FLOP/s of a bfloat16 product, exponentials/s."""

    nbytes: float
    flops: float
    exps: float


# Reached by a copy and by a matrix product on one H200, not its data sheet; exponentials are
# 16 a clock and multiprocessor at 1.755 GHz.
H200 = Limits(4.3e12, 790e12, 132 * 16 * 1.755e9)


def floor_seconds(work: Work, limits: Limits) -> float:
    """Return the time below which no implementation can go on this GPU."""
    return max(work.nbytes / limits.nbytes, work.flops / limits.flops, work.exps / limits.exps)


def decode(
    B: int, H: int, G: int, Q: int, C: int, D: int, *, itemsize: int = 2, scored: bool = False,
    victim: bool = False, rank: bool = False,
) -> Work:  # fmt: skip
    """Count one decode step over C slots.

    Keys, values and positions are read once. Scores are read and written once; the logits that
    wait for the merge are written and read (they mostly stay in the L2 cache, counted all the
    same); picking a victim reads the positions again; rotation by rank reads the ranks.
    """
    slots = B * H * C
    nbytes = slots * (2 * D * itemsize + POSITION_BYTES)
    if scored:
        nbytes += slots * (2 * SCORE_BYTES + 2 * 4 * G * Q)
    if victim:
        nbytes += slots * POSITION_BYTES
    if rank:
        nbytes += slots * 4
    nbytes += 2 * B * H * G * Q * D * itemsize
    return Work(nbytes, 4.0 * slots * G * Q * D, slots * G * Q * (2 if scored else 1))


def attention(B: int, H: int, G: int, M: int, N: int, D: int, *, itemsize: int = 2) -> Work:
    """Count causal attention of M queries to N >= M keys, lower right aligned."""
    pairs = _pairs(M, N) * B * H * G
    nbytes = itemsize * D * (2 * B * H * N + 2 * B * H * G * M) + 4 * B * H * G * M
    return Work(nbytes, 4.0 * pairs * D, pairs)


def column_sum(
    B: int, H: int, G: int, M: int, N: int, D: int, *, itemsize: int = 2, q_lo: int = 0
) -> Work:
    """Count the column sums of causal attention over the queries from q_lo on."""
    queries = M - q_lo
    pairs = _pairs(queries, N) * B * H * G
    nbytes = itemsize * D * (B * H * N + B * H * G * queries)
    nbytes += 4 * B * H * G * queries + SCORE_BYTES * B * H * N
    return Work(nbytes, 2.0 * pairs * D, pairs)


def moves(rows: int, D: int, *, itemsize: int = 2) -> Work:
    """Count keys and values of this many slots, read once and written once."""
    return Work(4.0 * rows * D * itemsize)


def _pairs(M: int, N: int) -> float:
    return M * (N - M) + M * (M + 1) / 2


def table(limits: Limits = H200) -> str:
    """Return the floors for one layer of Llama-3-8B (H = 8, G = 4, D = 128, bfloat16)."""
    shape = (8, 4, 1)
    lines = [
        "Decode of one token, microseconds a layer: attention alone / with scores and victim.",
        "",
        "| slots | B = 1 | B = 8 | B = 16 | B = 64 |",
        "|---|---|---|---|---|",
    ]
    for C in (1024, 2048, 4096, 8192):
        cells = []
        for B in (1, 8, 16, 64):
            alone = floor_seconds(decode(B, *shape, C, 128), limits)
            full = floor_seconds(decode(B, *shape, C, 128, scored=True, victim=True), limits)
            cells.append(f"{alone * 1e6:.1f} / {full * 1e6:.1f}")
        lines.append(f"| {C} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Prefill, B = 1, milliseconds a layer.",
        "",
        "| tokens | attention | column sums | column sums of the last 32 queries |",
        "|---|---|---|---|",
    ]
    for N in (8192, 32768, 65536, 131072):
        whole = floor_seconds(attention(1, 8, 4, N, N, 128), limits)
        sums = floor_seconds(column_sum(1, 8, 4, N, N, 128), limits)
        last = floor_seconds(column_sum(1, 8, 4, N, N, 128, q_lo=N - 32), limits)
        lines.append(f"| {N} | {whole * 1e3:.2f} | {sums * 1e3:.2f} | {last * 1e3:.3f} |")
    kept = floor_seconds(moves(4096 * 8, 128), limits)
    lines += [
        "",
        f"`fill_holes`, 4,096 slots kept in each of 8 heads, all moved: {kept * 1e6:.1f} "
        "microseconds.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
