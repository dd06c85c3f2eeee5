"""Tile sizes: a plain table keyed by (kernel, architecture, D, rows).

No autotuner: the interpreter, ahead-of-time compilation and CUDA graphs all see the same
launches. Every entry passes `python -m benchmarks.compile_gate`; the sizes come from registers
and shared memory, not from timing on a GPU.
"""

from typing import NamedTuple

import torch

ARCHES = ("sm_80", "sm_90", "sm_100", "gfx942")


class Config(NamedTuple):
    """One launch: rows and keys of a tile, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (kernel, arch, D, rows): D is the head dim padded to a power of two; rows is the row block of
# decode and 0 elsewhere. An entry for arch "any" serves the architectures without one of their
# own. "/fp32" entries are exact float32 products without tensor cores, in small tiles. Shared
# memory stays below 99 KiB on sm_80 (so that sm_86 and sm_89 fit) and below 64 KiB on gfx942.
TABLE: dict[tuple[str, str, int, int], Config] = {
    ("column_sum", "any", 64, 0): Config(64, 128, 8, 3),
    ("column_sum", "any", 128, 0): Config(64, 128, 8, 3),
    ("column_sum", "any", 256, 0): Config(32, 64, 4, 2),
    ("column_sum", "sm_100", 128, 0): Config(64, 128, 8, 2),
    ("column_sum", "sm_100", 256, 0): Config(32, 64, 8, 2),
    ("column_sum", "gfx942", 64, 0): Config(64, 128, 8, 1),
    ("column_sum", "gfx942", 128, 0): Config(64, 128, 8, 1),
    ("column_sum/fp32", "any", 64, 0): Config(32, 32, 8, 1),
    ("column_sum/fp32", "any", 128, 0): Config(32, 32, 8, 1),
    ("column_sum/fp32", "any", 256, 0): Config(16, 32, 8, 1),
    ("attention_lse", "any", 64, 0): Config(128, 64, 8, 2),
    ("attention_lse", "any", 128, 0): Config(128, 32, 8, 2),
    ("attention_lse", "any", 256, 0): Config(64, 32, 8, 1),
    ("attention_lse", "gfx942", 256, 0): Config(64, 16, 8, 1),
    ("attention_lse/fp32", "any", 64, 0): Config(64, 32, 8, 1),
    ("attention_lse/fp32", "sm_100", 64, 0): Config(32, 32, 8, 1),
    ("attention_lse/fp32", "any", 128, 0): Config(32, 16, 8, 1),
    ("attention_lse/fp32", "any", 256, 0): Config(32, 16, 8, 1),
    ("decode", "any", 64, 16): Config(16, 64, 4, 3),
    ("decode", "any", 128, 16): Config(16, 64, 4, 2),
    ("decode", "any", 256, 16): Config(16, 32, 4, 2),
    ("decode", "any", 64, 32): Config(32, 64, 4, 3),
    ("decode", "any", 128, 32): Config(32, 64, 4, 2),
    ("decode", "any", 256, 32): Config(32, 32, 4, 2),
    ("decode", "sm_80", 256, 32): Config(32, 32, 8, 2),
    ("decode/fp32", "any", 64, 32): Config(32, 32, 8, 1),
    ("decode/fp32", "any", 128, 32): Config(32, 32, 8, 1),
    ("decode/fp32", "any", 256, 32): Config(32, 16, 16, 1),
    ("decode/fp32", "sm_100", 256, 32): Config(32, 32, 16, 1),
    ("decode/fp32", "gfx942", 128, 32): Config(32, 16, 8, 1),
    ("decode/fp32", "gfx942", 256, 32): Config(32, 16, 4, 1),
}

# Small tiles, so that small tensors take several of them.
INTERPRETER = Config(32, 32, 1, 1)


def config(kernel: str, arch: str, head_dim: int, dtype: torch.dtype, rows: int = 0) -> Config:
    """Return the tile sizes of a kernel.

    Args:
        kernel: "column_sum", "attention_lse" or "decode".
        arch: one of ARCHES, or "interpreter".
        head_dim: D, up to 256.
        dtype: of queries, keys and values.
        rows: for decode, query heads times queries; for the others 0.
    """
    block = row_block(rows, dtype) if rows else 0
    if arch == "interpreter":
        return INTERPRETER._replace(block_m=block or INTERPRETER.block_m)
    name = f"{kernel}/fp32" if dtype == torch.float32 else kernel
    D = max(64, power_of_two(head_dim))
    return TABLE.get((name, arch, D, block)) or TABLE[name, "any", D, block]


def row_block(rows: int, dtype: torch.dtype) -> int:
    """Return the rows of a decode tile: 16, the smallest that tensor cores take, or 32."""
    return 16 if rows <= 16 and dtype != torch.float32 else 32


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
