"""statistics: sums over buckets of a stream, and what they say with which certainty."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

Bucket = dict[str, Any]
_DRAWS = 2000


def buckets(nll: Tensor, size: int, first: int = 1, offset: int = 0) -> list[Bucket]:
    """Cut per-token losses into buckets by position; every scored token is in exactly one.

    Args:
        nll: float32 `[N]` nats, of the tokens at positions offset, offset + 1, ...
        size: positions a bucket; buckets start at multiples of it.
        first: tokens before this index are not scored.
        offset: position of the first.

    Returns:
        `{"start", "count", "nll_sum"}` each; the sums in float64.
    """
    values = nll.numpy().astype(np.float64)
    found = []
    at = first
    while at < len(values):
        start = (offset + at) // size * size
        end = min(start + size - offset, len(values))
        part = values[at:end]
        found.append({"start": start, "count": len(part), "nll_sum": float(part.sum())})
        at = end
    return found


def mean(parts: Sequence[Bucket]) -> float:
    """Return the mean loss over buckets, from sums and counts; nan for none."""
    count = sum(b["count"] for b in parts)
    return sum(b["nll_sum"] for b in parts) / count if count else math.nan


def perplexity(nll: float) -> float:
    """Return exp of a mean loss, infinite where it overflows."""
    return math.exp(nll) if nll < 700 else math.inf


def interval(parts: Sequence[Bucket], seed: int = 0) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the mean loss over buckets; nan for fewer than 2."""
    sums = np.array([b["nll_sum"] for b in parts])
    return _bootstrap(sums, np.array([b["count"] for b in parts]), seed)


def difference(
    parts: Sequence[Bucket], control: Sequence[Bucket], seed: int = 0
) -> tuple[float, float, float]:
    """Return mean loss minus the control's, with its 95% paired bootstrap interval.

    Raises:
        ValueError: buckets of other tokens than the control's.
    """
    counts = [b["count"] for b in parts]
    if counts != [b["count"] for b in control]:
        raise ValueError("only buckets of the same tokens can be compared")
    sums = np.array([b["nll_sum"] for b in parts]) - np.array([b["nll_sum"] for b in control])
    low, high = _bootstrap(sums, np.array(counts), seed)
    return mean(parts) - mean(control), low, high


def mean_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Return the mean of some values with its 95% bootstrap interval."""
    numbers = np.array(values, dtype=np.float64)
    low, high = _bootstrap(numbers, np.ones(len(numbers)), seed)
    return (float(numbers.mean()) if len(numbers) else math.nan), low, high


def _bootstrap(sums: np.ndarray, counts: np.ndarray, seed: int) -> tuple[float, float]:
    if len(sums) < 2:
        return math.nan, math.nan
    draws = np.random.default_rng(seed).integers(0, len(sums), (_DRAWS, len(sums)))
    means = sums[draws].sum(-1) / counts[draws].sum(-1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
