"""Speed of the kernels and of whole models on one GPU, over what it could reach.

`python -m benchmarks.gpu` runs the kernel tests on the GPU first; where one fails, nothing is
timed. Then it times each kernel and whole decode steps and prefills of Llama-3-8B with random
weights, and writes benchmarks/results/gpu.csv and gpu.json. It stops starting cases after seven
minutes. Without CUDA it exits 2. `--smoke` runs tiny sizes on the CPU under the interpreter and
prints no time: it exercises this script.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks import counting, gpu_kernels, gpu_models
from benchmarks.compile_gate import kernel_commit
from benchmarks.counting import Limits
from kvevict.kernels.dispatch import interpreted

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
SECONDS = 420.0
Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu.csv, gpu.json")
    parser.add_argument("--skip-models", action="store_true", help="kernels only")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU, no times")
    options = parser.parse_args(argv)
    began = time.monotonic()
    if options.smoke:
        if not interpreted():  # Triton reads the variable when it is imported
            command = [sys.executable, "-m", "benchmarks.gpu", *(argv or sys.argv[1:])]
            env = os.environ | {"TRITON_INTERPRET": "1"}
            return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    elif not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA device and finds none", file=sys.stderr)
        return 2
    elif not _correct():
        print("kernel tests are red on this GPU: no speed is printed", file=sys.stderr)
        return 1
    rows = _run(options.smoke, options.skip_models, began + SECONDS)
    if options.smoke:
        print(f"{len(rows)} cases ran")
    else:
        _write(rows, options.out)
    return 1 if any(row.get("error") for row in rows) else 0


def _correct() -> bool:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/kernels",
        "-q",
        "-x",
        "-m",
        "gpu and not slow",
    ]
    return subprocess.run(command, cwd=ROOT, check=False, timeout=240).returncode == 0


@torch.no_grad()
def _run(smoke: bool, skip_models: bool, deadline: float) -> list[Row]:
    limits = counting.H200 if smoke else measure_limits()
    clock: Callable[[Callable[[], Any], bool], float] = _once if smoke else milliseconds
    rows: list[Row] = []

    def report(row: Row) -> None:
        rows.append(row)
        print("  ".join(f"{k}={v}" for k, v in row.items()), flush=True)

    for case in gpu_kernels.kernel_cases(gpu_kernels.TINY if smoke else gpu_kernels.Sizes()):
        row: Row = {"case": case.name, **case.shape}
        if time.monotonic() > deadline - (0 if skip_models or smoke else 150):
            report(row | {"skipped": "out of time"})
            continue
        took = _guard(row, lambda case=case: clock(case.call, case.graph))
        if took:
            row |= _achieved(took, case.work, limits)
        report(row)
    if skip_models:
        return rows
    import kvevict

    model = gpu_models.build(smoke)
    sizes = gpu_models.TINY if smoke else gpu_models.Sizes()
    with kvevict.patch(model):
        for scenario in gpu_models.scenarios(model, sizes):
            row = {"case": scenario.name, **scenario.shape}
            if time.monotonic() > deadline:
                report(row | {"skipped": "out of time"})
                continue
            took = _guard(row, lambda prepare=scenario.prepare: clock(prepare(), False))
            if took:
                row |= {"ms": round(took, 4)}
            report(row)
            if not smoke:
                torch.cuda.empty_cache()
    return rows


def _guard(row: Row, call: Callable[[], float]) -> float | None:
    """Run a case; one that does not fit into memory is a result, not the end of the run."""
    try:
        return call()
    except torch.cuda.OutOfMemoryError:
        row["skipped"] = "out of memory"
    except RuntimeError as error:
        row["error"] = str(error).splitlines()[0][:200]
    return None


def _once(call: Callable[[], Any], graph: bool) -> float:
    call()
    return 0.0


def milliseconds(call: Callable[[], Any], graph: bool) -> float:
    """Return the median time of a call, by graph replay where launches would hide it."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    run, per_run = call, 1
    if graph:
        captured = torch.cuda.CUDAGraph()
        per_run = 10
        with torch.cuda.graph(captured):
            for _ in range(per_run):
                call()
        run = captured.replay
    times = []
    spent = time.monotonic()
    while len(times) < 5 or (len(times) < 50 and time.monotonic() - spent < 0.4):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / per_run)
    return statistics.median(times)


def measure_limits() -> Limits:
    """Return what this GPU reaches on a copy of 1 GiB and on a bfloat16 product."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.numel() / milliseconds(lambda: target.copy_(source), False) * 1e3
    n = 8192
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    product = 2.0 * n**3 / milliseconds(lambda: a @ a, False) * 1e3
    device = torch.cuda.get_device_properties(0)
    clock = getattr(device, "clock_rate", 1_700_000) * 1e3
    exps = 16.0 * device.multi_processor_count * clock
    print(f"copy {copied / 1e12:.2f} TB/s, product {product / 1e12:.0f} TFLOP/s", flush=True)
    return Limits(copied, product, exps)


def _achieved(ms: float, work: counting.Work, limits: Limits) -> Row:
    floor = counting.floor_seconds(work, limits) * 1e3
    return {
        "ms": round(ms, 5),
        "floor_ms": round(floor, 5),
        "of_floor": round(floor / ms, 3),
        "tb_per_s": round(work.nbytes / ms / 1e9, 3),
        "tflop_per_s": round(work.flops / ms / 1e9, 1),
        "fits_l2": work.nbytes < 50e6,
    }


def _write(rows: list[Row], folder: Path) -> None:
    tags = {
        "gpu": torch.cuda.get_device_name(),
        "torch": version("torch"),
        "triton": version("triton"),
        "transformers": version("transformers"),
        "cuda": torch.version.cuda,
        "commit": kernel_commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(key for row in rows for key in row)) + list(tags)
    with (folder / "gpu.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **tags} for row in rows)
    report = json.dumps({**tags, "rows": rows}, indent=1)
    (folder / "gpu.json").write_text(report + "\n")


if __name__ == "__main__":
    sys.exit(main())
