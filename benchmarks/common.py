"""What the CPU benchmarks share: paired timing, peak memory, and CSV files that say where from.

Cases are interleaved round by round in one process, and the figure to read is a case's ratio to
the base case of the same run: machines are noisy, ratios of interleaved medians much less so.
CPU time is what a loaded machine can still measure; wall time is given beside it.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve others

import torch

from kvevict import console

RESULTS = Path(__file__).parent / "results"


def paired(
    cases: dict[str, Callable[[], Any]], rounds: int, warmup: int = 1, repeat: int = 1
) -> dict[str, dict[str, float]]:
    """Time cases in turn.

    Args:
        cases: name to a function of no arguments; the first is the base of the ratios.
        rounds: times that every case is measured.
        warmup: rounds run before, not counted.
        repeat: calls timed together in a round.

    Returns:
        For each case: medians `cpu_ms` and `wall_ms` a call, `ratio` (median of the CPU times over
        the base case's median), and the quartiles `cpu_p25_ms` and `cpu_p75_ms`.
    """
    cpu: dict[str, list[float]] = {name: [] for name in cases}
    wall: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(warmup + rounds):
        for name, call in cases.items():
            began, clock = time.process_time(), time.perf_counter()
            for _ in range(repeat):
                call()
            if turn >= warmup:
                cpu[name].append((time.process_time() - began) / repeat * 1e3)
                wall[name].append((time.perf_counter() - clock) / repeat * 1e3)
    base = statistics.median(cpu[next(iter(cases))])
    out = {}
    for name in cases:
        low, middle, high = statistics.quantiles(cpu[name], n=4)
        out[name] = {
            "cpu_ms": round(middle, 3),
            "wall_ms": round(statistics.median(wall[name]), 3),
            "ratio": round(middle / base, 4),
            "cpu_p25_ms": round(low, 3),
            "cpu_p75_ms": round(high, 3),
        }
    return out


def write_csv(name: str, rows: list[dict[str, Any]]) -> Path:
    """Write rows with machine, versions, commit, date and load; replaces the file in one step."""
    versions = console.versions()
    facts = {
        "machine": console.machine(),
        "torch": versions["torch"],
        "transformers": versions["transformers"],
        "commit": versions["commit"],
        "date": datetime.date.today().isoformat(),
        "load": round(os.getloadavg()[0], 1),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    target, draft = RESULTS / f"{name}.csv", RESULTS / f".{name}.csv"
    with draft.open("w", newline="") as file:
        columns = list(dict.fromkeys(key for row in rows for key in row)) + list(facts)
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **facts} for row in rows)
    draft.replace(target)
    return target


def arguments(description: str, **extra: Any) -> argparse.Namespace:
    """Parse --threads, --dtypes and --rounds, and whatever a benchmark adds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=15)
    for name, default in extra.items():
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default)
    return parser.parse_args()


def text_ids(tokenizer: Any, count: int) -> torch.Tensor:
    """Return real text as token ids `[1, count]`, from Python's own help topics."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[key] for key in sorted(topics))
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    if ids.shape[1] < count:
        ids = ids.repeat(1, -(-count // ids.shape[1]))
    return ids[:, :count]
