"""Tile sizes: a plain table keyed by (kernel, architecture, row width, rows).

No autotuner: the interpreter, ahead-of-time compilation and CUDA graphs all see the same
launches. Every entry passes `python -m benchmarks.compile_gate`; the sizes come from registers
and shared memory, not from timing on a GPU.
"""

from typing import NamedTuple

import torch

ARCHES = ("sm_80", "sm_90", "sm_100", "gfx942")
WIDTHS = (64, 128, 256, 512)


class Config(NamedTuple):
    """One launch: rows and keys of a tile, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (kernel, arch, width, rows): width is the padded head dim in units of 2 bytes, so that float32
# takes the entry of twice its head dim; rows is the row block of decode and 0 elsewhere. An entry
# for arch "any" serves the architectures without one of their own. Shared memory stays below
# 99 KiB on sm_80 (so that sm_86 and sm_89 fit) and below 64 KiB on gfx942.
TABLE: dict[tuple[str, str, int, int], Config] = {
    ("column_sum", "any", 64, 0): Config(64, 128, 8, 3),
    ("column_sum", "any", 128, 0): Config(64, 128, 8, 3),
    ("column_sum", "any", 256, 0): Config(32, 64, 4, 2),
    ("column_sum", "any", 512, 0): Config(16, 32, 4, 1),
    ("attention_lse", "any", 64, 0): Config(128, 64, 8, 2),
    ("attention_lse", "any", 128, 0): Config(128, 32, 8, 2),
    ("attention_lse", "any", 256, 0): Config(64, 32, 8, 1),
    ("attention_lse", "any", 512, 0): Config(32, 16, 8, 1),
    ("decode", "any", 64, 16): Config(16, 64, 4, 3),
    ("decode", "any", 128, 16): Config(16, 64, 4, 2),
    ("decode", "any", 256, 16): Config(16, 32, 4, 2),
    ("decode", "any", 512, 16): Config(16, 32, 4, 1),
    ("decode", "any", 64, 32): Config(32, 64, 4, 3),
    ("decode", "any", 128, 32): Config(32, 64, 4, 2),
    ("decode", "any", 256, 32): Config(32, 32, 4, 2),
    ("decode", "any", 512, 32): Config(32, 32, 8, 1),
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
    block = row_block(rows) if rows else 0
    if arch == "interpreter":
        return INTERPRETER._replace(block_m=block or INTERPRETER.block_m)
    width = max(64, power_of_two(head_dim) * dtype.itemsize // 2)
    own = TABLE.get((kernel, arch, width, block))
    return own or TABLE[kernel, "any", width, block]


def row_block(rows: int) -> int:
    """Return the rows of a decode tile: 16, the smallest that tensor cores take, or 32."""
    return 16 if rows <= 16 else 32


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
