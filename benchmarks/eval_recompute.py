"""One token under StreamingLLM against recomputing the window, as in figure 10 of its paper.

    python -m benchmarks.eval_recompute smollm2-135m 256 512 1024

CPU milliseconds a token are compared, medians of interleaved rounds.
"""

import json
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from benchmarks.common import paired
from kvevict import console
from kvevict.eval.caches import CacheSettings, feed
from kvevict.eval.texts import encode, read
from kvevict.models.patch import patch
from kvevict.models.small import load
from kvevict.policies import StreamingLLM

ROUNDS, STEPS = 5, 8


def cached(model: Any, ids: torch.Tensor, window: int) -> Callable[[], Any]:
    """Return the step of a full cache: one token each time that it is called."""
    cache, rest = CacheSettings().cache(model, StreamingLLM(4, window - 4)), count(window * 2)
    feed(model, ids[: window * 2], cache, CacheSettings())
    one = CacheSettings(chunk=1)

    def step() -> None:
        at = next(rest)
        feed(model, ids[at : at + 1], cache, one)

    return step


def recomputed(model: Any, ids: torch.Tensor, window: int) -> Callable[[], Any]:
    """Return the step that reads the whole window again for one token."""

    def step() -> None:
        with torch.no_grad():
            model(ids[-window:][None], use_cache=False)

    return step


def main() -> None:
    """Print one JSON object."""
    name, *windows = sys.argv[1:] or ["smollm2-135m", "256"]
    model, tokenizer = load(name)
    rows = []
    for window in map(int, windows):
        ids = encode(tokenizer, read(None), window * 2 + (ROUNDS + 1) * STEPS).ids
        with patch(model):
            cases = {"cached": cached(model, ids, window), "again": recomputed(model, ids, window)}
            found = paired(cases, ROUNDS, repeat=STEPS)
        rows.append(
            {
                "window": window,
                "cached_ms": found["cached"]["cpu_ms"],
                "recompute_ms": found["again"]["cpu_ms"],
                "ratio": found["again"]["ratio"],
            }
        )
    print(json.dumps({"model": name, "machine": console.machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
