"""What the CPU benchmarks share: paired timing and CSV files that say where from.

Cases are interleaved round by round in one process, and the figure to read is a case's ratio to
the base case of the same run: machines are noisy, ratios of interleaved medians much less so.
CPU time is what a loaded machine can still measure; wall time is given beside it.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve others

import torch

from kvevict import console
from kvevict.eval.bench import paired

__all__ = ["arguments", "paired", "text_ids", "write_csv"]

RESULTS = Path(__file__).parent / "results"


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
