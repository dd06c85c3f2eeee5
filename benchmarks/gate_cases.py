"""What the compile gate compiles: each kernel with its types, constants and tile sizes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvevict.kernels.decode import merge_block
from kvevict.kernels.tuning import Config, config, power_of_two

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
HALF_POINTERS = ("q_ptr", "q_sink_ptr", "k_ptr", "v_ptr", "out_ptr", "new_k_ptr", "new_v_ptr")
OTHER_POINTERS = {
    "mask_ptr": "*i1",
    "keep_ptr": "*i1",
    "length_ptr": "*i32",
    "rank_ptr": "*i32",
    "new_rank_ptr": "*i32",
    "source_ptr": "*i32",
    "target_ptr": "*i32",
    "position_ptr": "*i64",
    "query_position_ptr": "*i64",
    "new_position_ptr": "*i64",
    "slot_ptr": "*i64",
    "victim_ptr": "*i64",
}
FLOATS = ("scale_log2", "decay_log2", "decay_all")


@dataclass(frozen=True)
class Case:
    """One compilation.

    Attributes:
        kernel: module and function, "column_sum_kernel.column_sum_kernel".
        label: what is special about it, for the table.
        dtype: of queries, keys and values.
        head_dim: D.
        tile: tile sizes, warps and stages.
        constants: values of the constexpr arguments.
        absent: pointers that are None in this case.
        dots: whether tensor cores are expected (matrix products in half precision).
        half_out: whether `out_ptr` has the dtype of the queries.
    """

    kernel: str
    label: str
    dtype: torch.dtype
    head_dim: int
    tile: Config
    constants: dict[str, Any]
    absent: tuple[str, ...] = ()
    dots: bool = False
    half_out: bool = True

    def signature(self, arg_names: list[str]) -> dict[str, str]:
        """Return the type of every argument as the ahead-of-time compiler wants it."""
        return {name: self._type(name) for name in arg_names}

    def _type(self, name: str) -> str:
        if name in self.constants or name in self.absent:
            return "constexpr"
        if name in OTHER_POINTERS:
            return OTHER_POINTERS[name]
        if name in HALF_POINTERS and (name != "out_ptr" or self.half_out):
            return f"*{TYPES[self.dtype]}"
        if name.endswith("_ptr") or name in FLOATS:
            return "*fp32" if name.endswith("_ptr") else "fp32"
        return "i32"


def cases(arch: str, full: bool) -> Iterator[Case]:
    """Yield the compilations for one architecture.

    Args:
        arch: "sm_80", "sm_90", "sm_100" or "gfx942".
        full: every variant; else each tile size once, with the heaviest set of options.
    """
    for head_dim in (64, 128, 256):
        for heavy in (True, False) if full and head_dim == 128 else (True,):
            yield _column_sum(arch, head_dim, torch.bfloat16, heavy)
            yield _attention(arch, head_dim, torch.bfloat16, heavy)
        for mode in ("scores", "two_queries", "rope") if full else ("rope",):
            yield _split(arch, head_dim, torch.bfloat16, mode, 4)
        for mode in ("two_queries", "rope") if full else ("rope",):
            yield _split(arch, head_dim, torch.bfloat16, mode, 32)
    odd = ((80, torch.float16),) if full else ()
    for head_dim, dtype in (*odd, *((d, torch.float32) for d in (64, 128, 256))):
        yield _column_sum(arch, head_dim, dtype, True)
        yield _attention(arch, head_dim, dtype, True)
        for mode in ("two_queries", "rope") if full else ("rope",):
            yield _split(arch, head_dim, dtype, mode, 4)
    for rows in (1, 4, 16, 128) if full else (4, 128):
        yield _merge(128 if rows < 16 else 256, rows)
    yield from _moves(256)
    if full:
        yield from _ones(arch)


def _precision(dtype: torch.dtype) -> dict[str, Any]:
    return {"UPCAST": False, "PRECISION": "ieee" if dtype == torch.float32 else "tf32"}


def _column_sum(arch: str, head_dim: int, dtype: torch.dtype, heavy: bool) -> Case:
    tile = config("column_sum", arch, head_dim, dtype)
    flags = dict.fromkeys(("HAS_MASK", "HAS_LENGTHS", "ACCUMULATE", "DECAY"), heavy)
    constants = {
        "G": 4, "D": head_dim, "DP": power_of_two(head_dim), "CAUSAL": True, **flags,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, **_precision(dtype),
    }  # fmt: skip
    absent = () if heavy else ("mask_ptr", "length_ptr")
    label = "mask, lengths, accumulate, decay" if heavy else "causal"
    return Case(
        "column_sum_kernel.column_sum_kernel", label, dtype, head_dim, tile, constants, absent,
        dots=True, half_out=False,
    )  # fmt: skip


def _attention(arch: str, head_dim: int, dtype: torch.dtype, heavy: bool) -> Case:
    tile = config("attention_lse", arch, head_dim, dtype)
    constants = {
        "G": 4, "D": head_dim, "DP": power_of_two(head_dim), "CAUSAL": True, "HAS_MASK": heavy,
        "HAS_LENGTHS": heavy, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        **_precision(dtype),
    }  # fmt: skip
    absent = () if heavy else ("mask_ptr", "length_ptr")
    label = "mask, lengths" if heavy else "causal"
    return Case(
        "attention_lse_kernel.attention_lse_kernel", label, dtype, head_dim, tile, constants,
        absent, dots=True,
    )  # fmt: skip


def _split(arch: str, head_dim: int, dtype: torch.dtype, mode: str, rows: int) -> Case:
    tile = config("decode", arch, head_dim, dtype, rows)
    rope, two = mode == "rope", mode == "two_queries"
    constants = {
        "G": 4, "D": head_dim, "DP": power_of_two(head_dim), "TWO_QUERIES": two, "ROPE": rope,
        "WINDOW": two, "SCORES": not two, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        **_precision(dtype),
    }  # fmt: skip
    absent = () if two else ("q_sink_ptr",)
    absent += () if rope else ("rank_ptr", "cos_ptr", "sin_ptr")
    absent += ("logits_ptr",) if two else ()
    label = f"{mode}, {tile.block_m} rows"
    return Case(
        "decode_split_kernel.decode_split_kernel", label, dtype, head_dim, tile, constants, absent,
        dots=True,
    )  # fmt: skip


def _merge(head_dim: int, rows: int) -> Case:
    tile = Config(min(16, rows), merge_block(rows), 4, 2)
    constants = {
        "G": max(1, rows // 16), "D": head_dim, "DP": head_dim, "QP": 16, "RP": rows,
        "SCORES": True, "DECAY": True, "PICK": True, "EVICT": True, "HAS_RANK": True,
        "BY_AGE": True, "BLOCK_M": tile.block_m, "BLOCK_C": tile.block_n,
    }  # fmt: skip
    return Case(
        "decode_merge_kernel.decode_merge_kernel", f"scores, pick, evict, {rows} rows",
        torch.bfloat16, head_dim, tile, constants,
    )  # fmt: skip


def _ones(arch: str) -> Iterator[Case]:
    """Yield kernels whose sizes are 1: a launch makes constants of those, in a code path apart."""
    bf16 = torch.bfloat16
    for case, sizes in (
        (_column_sum(arch, 128, bf16, True), ("H", "BH", "M", "N", "q_lo")),
        (_attention(arch, 128, bf16, True), ("H", "M", "N")),
        (_split(arch, 128, bf16, "two_queries", 4), ("H", "Q", "C", "splits", "sinks")),
        (_split(arch, 128, bf16, "rope", 4), ("Q", "splits")),
        (_merge(128, 4), ("H", "Q", "C", "splits", "sinks", "recent")),
        (_merge(128, 4), ("Q",)),
        *((move, ("H", "T", "C")) for move in _moves(128)),
    ):
        ones = dict.fromkeys(sizes, 1)
        yield replace(
            case, label=f"sizes of 1: {', '.join(sizes)}", constants=case.constants | ones
        )


def _moves(head_dim: int) -> Iterator[Case]:
    flags = {"HAS_SCORES": True, "HAS_RANK": True}
    sized = {"D": head_dim, "DP": head_dim, **flags}
    for kernel, tile, constants in (
        ("write_slot_kernel.write_slot_kernel", Config(1, 1, 1, 1), sized),
        ("fill_holes_kernel.plan_moves_kernel", Config(1, 1024, 4, 1), {**flags, "BLOCK_C": 1024}),
        ("fill_holes_kernel.move_slots_kernel", Config(16, 1, 4, 1), {**sized, "BLOCK_I": 16}),
    ):
        yield Case(kernel, "scores, rank", torch.bfloat16, head_dim, tile, constants)
