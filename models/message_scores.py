"""message_scores: the importance of messages, read from the attention that the model computed.

The cache's column sums are taken per span, so a score costs no forward of its own. Three things
would mislead, and each is corrected: the first tokens are sinks and take much of the mass (they are
left out), early text was open to more queries (divided by exposure), and long messages collect more
(`density` divides by size).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from kvevict.errors import PolicyError

Aggregate = Literal["sum", "density", "topk"]


def check_aggregate(aggregate: str) -> None:
    """Check the name of an aggregate.

    Raises:
        PolicyError: another than the three.
    """
    if aggregate not in get_args(Aggregate):
        raise PolicyError(f"aggregate {aggregate!r}: give {', '.join(get_args(Aggregate))}")


def token_scores(mass: np.ndarray, exposure: np.ndarray | None, sinks: int = 4) -> np.ndarray:
    """Return the attention per query that could see each token, float64 `[N]`; sinks get 0.

    Args:
        mass: `[N]`, accumulated attention.
        exposure: `[N]`, queries that could see each token; None leaves sums as they are.
        sinks: first tokens left out.
    """
    scores = np.asarray(mass, dtype=np.float64).copy()
    if exposure is not None:
        scores /= np.maximum(np.asarray(exposure, dtype=np.float64), 1.0)
    scores[:sinks] = 0.0
    return scores


def message_scores(
    scores: np.ndarray,
    spans: Sequence[tuple[int, int]],
    aggregate: Aggregate = "sum",
    top: int = 8,
) -> np.ndarray:
    """Return one score a span, float64.

    Args:
        scores: `[N]`, of the tokens.
        spans: (start, stop) of every message.
        aggregate: "sum" (P2: additive, as `Slots.coarsened` adds), "density" (the mean), or "topk"
            (the mean of the `top` largest: one needed line in a long output counts).
        top: tokens of "topk".

    Raises:
        PolicyError: another aggregate.
    """
    check_aggregate(aggregate)
    found = np.zeros(len(spans))
    for index, (start, stop) in enumerate(spans):
        part = scores[start:stop]
        if not len(part):
            continue
        if aggregate == "topk":
            found[index] = np.sort(part)[-top:].mean()
        else:
            found[index] = part.sum() / (len(part) if aggregate == "density" else 1)
    return found
