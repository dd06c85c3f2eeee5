"""Compile every kernel for GPUs that need not be here: registers, shared memory, spills.

`python -m benchmarks.compile_gate` exits 1 if a kernel spills registers to memory, needs more
shared memory than the GPU has, or misses the tensor cores where it multiplies matrices in half
precision. The table goes to benchmarks/results/compile_gate.csv.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gate_cases import TYPES, Case, cases
from kvevict.kernels.tuning import ARCHES

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

RESULTS = Path(__file__).parent / "results" / "compile_gate.csv"
# Bytes of shared memory for one program. sm_80 has 163 KiB, but 99 KiB keeps sm_86 and sm_89.
SHARED_LIMIT = {"sm_80": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
TENSOR_CORES = r"\b(HMMA|HGMMA|UTCHMMA|UTCQMMA|mma\.sync|wgmma|tcgen05\.mma|v_mfma)"


@dataclass(frozen=True)
class Row:
    """One compiled kernel; `local_bytes` is memory that registers were spilled to."""

    kernel: str
    case: str
    arch: str
    dtype: str
    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    registers: int
    shared_bytes: int
    local_bytes: int
    tensor_cores: str
    verdict: str


def main(argv: list[str] | None = None) -> int:
    """Run the gate and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", action="append", choices=ARCHES, help="default: all")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument("--quick", action="store_true", help="each tile size once on every arch")
    parser.add_argument("--out", type=Path, default=RESULTS, help="CSV file, empty for none")
    parser.add_argument("--table", action="store_true", help="print the last run's table, only")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.table:
        print(markdown(options.out))
        return 0
    if not options.here:
        return _in_clean_process(sys.argv[1:] if argv is None else argv)
    commit = kernel_commit()  # of what is about to be compiled
    rows = []
    for arch in options.arch or ARCHES:
        for case in cases(arch, full=arch == "sm_90" and not options.quick):
            if options.kernel in case.kernel:
                rows.append(compile_case(case, arch))
                print(_line(rows[-1]), flush=True)
    if options.out.name:
        _write(rows, options.out, commit)
    bad = [row for row in rows if row.verdict != "ok"]
    print(f"{len(rows)} kernels compiled, {len(bad)} refused")
    return 1 if bad or not rows else 0


def _in_clean_process(argv: list[str]) -> int:
    """Run again where the interpreter is off: it is chosen when a kernel is decorated."""
    with tempfile.TemporaryDirectory() as cache:
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        env |= {"TRITON_CACHE_DIR": cache, "TRITON_DEFAULT_FP_FUSION": "1"}
        command = [sys.executable, "-m", "benchmarks.compile_gate", "--here", *argv]
        root = Path(__file__).parents[1]
        return subprocess.run(command, env=env, cwd=root, check=False).returncode


def compile_case(case: Case, arch: str) -> Row:
    """Compile one kernel for one architecture and judge the result."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = case.kernel.split(".")
    kernel = getattr(import_module(f"kvevict.kernels.{module}"), name)
    names = list(kernel.arg_names)
    signature = case.signature(names)
    given = {name: value for name, value in case.constants.items() if name in names}
    constants = {**given, **dict.fromkeys(case.absent)}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n] != "constexpr" and (n.endswith("_ptr") or n.startswith("stride_"))
    }
    target = (
        GPUTarget("hip", arch, 64) if arch == "gfx942" else GPUTarget("cuda", int(arch[3:]), 32)
    )
    tile = case.tile
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs=constants, attrs=aligned),
        target=target,
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )
    registers, local = _resources(compiled, arch)
    used = sorted(set(re.findall(TENSOR_CORES, _assembly(compiled))))
    shared = int(compiled.metadata.shared)
    verdicts = []
    if local:
        verdicts.append(f"{local} bytes of registers spilled")
    if shared > SHARED_LIMIT[arch]:
        verdicts.append(f"{shared} bytes shared, {SHARED_LIMIT[arch]} available")
    if case.dots and case.dtype != torch.float32 and not used:
        verdicts.append("no tensor cores")
    return Row(
        name, case.label, arch, TYPES[case.dtype], case.head_dim, *tile, registers, shared, local,
        "+".join(used), "; ".join(verdicts) or "ok",
    )  # fmt: skip


def _assembly(compiled: CompiledKernel) -> str:
    asm = compiled.asm
    return str(asm["amdgcn"] if "amdgcn" in asm else asm["ptx"])


def _resources(compiled: CompiledKernel, arch: str) -> tuple[int, int]:
    """Return registers per thread and bytes of local memory per thread."""
    if arch == "gfx942":
        text = compiled.asm["amdgcn"]
        private = _number(r"\.private_segment_fixed_size:\s*(\d+)", text)
        return _number(r"\.vgpr_count:\s*(\d+)", text), private
    import triton

    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [tool, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text) + _number(
        r"LOCAL:(\d+)", text
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern!r} in the compiler's report: {text[:200]!r}")
    return int(found[1])


def _line(row: Row) -> str:
    return (
        f"{row.arch:7} {row.kernel:22} {row.dtype} D={row.head_dim:<3} {row.block_m}x{row.block_n} "
        f"w{row.num_warps} s{row.num_stages}: {row.registers} registers, "
        f"{row.shared_bytes / 1024:.0f} KiB shared, {row.local_bytes} B spilled, "
        f"{row.tensor_cores or '-'} [{row.case}] {row.verdict}"
    )


def markdown(path: Path = RESULTS) -> str:
    """Return the table of docs/kernels.md: what every architecture compiles, by kernel and size."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        key = (row["kernel"], row["case"], f"{row['head_dim']} {row['dtype']}")
        cell = f"{row['registers']} / {int(row['shared_bytes']) / 1024:.0f} / {row['local_bytes']}"
        found.setdefault(key, {})[row["arch"]] = f"{cell} {row['tensor_cores']}".strip()
    lines = [f"| kernel | options | D | {' | '.join(ARCHES)} |", "|---" * (3 + len(ARCHES)) + "|"]
    for (kernel, *rest), cells in sorted(found.items()):
        if set(cells) == set(ARCHES):
            name = kernel.removesuffix("_kernel")
            lines.append(f"| `{name}` | {' | '.join([*rest, *(cells[a] for a in ARCHES)])} |")
    return "\n".join(lines)


def kernel_commit() -> str:
    """Return the commit checked out, with "-dirty" where kernels differ from it."""

    def git(*words: str) -> str:
        root = Path(__file__).parents[1]
        done = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "kernels", "benchmarks/gate_cases.py")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if changed else "")


def _write(rows: list[Row], path: Path, commit: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tags = {"triton": version("triton"), "torch": version("torch"), "commit": commit}
    table = [asdict(row) | tags for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0], lineterminator="\n") if table else None
        if writer is not None:
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    sys.exit(main())
