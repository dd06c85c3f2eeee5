"""Scores that are no numbers are an error, found soon and without a wait per token.

Half precision overflows in a broken or badly scaled model; NaN in a score would make every later
choice of what stays arbitrary, without a word.
"""

from typing import Any

import torch

from kvevict.errors import CacheError
from kvevict.plan import Plan
from kvevict.ranked import RankedLayer

_EVERY = 64  # tokens between looks at a device where a look waits for all work in flight


def check_scores(layers: list[Any], plan: Plan | None = None) -> None:
    """Look at the scores of all layers: after every chunk, and after tokens now and then.

    Args:
        layers: of a cache; those without scores are passed over.
        plan: of the forward that just ended; None to look whatever it was.

    Raises:
        CacheError: NaN or infinity among them.
    """
    ranked = [x for x in layers if isinstance(x, RankedLayer) and x.score is not None]
    if not ranked or not ranked[0].policy.needs_scores:
        return
    asynchronous = ranked[0].score.device.type != "cpu"  # type: ignore[union-attr]
    if plan is not None and plan.length == 1 and asynchronous and (plan.seen + 1) % _EVERY:
        return
    books = [] if plan is None else plan.ledgers
    stacks = [ledger.score for ledger in books] or [x.score for x in ranked]
    # A sum is finite exactly if its terms are (they are probabilities, far from overflow).
    sums = torch.stack([x.sum().to(stacks[0].device) for x in stacks])
    if not bool(torch.isfinite(sums).all()):
        raise CacheError(
            "attention scores are not finite: the model's logits overflowed (try bfloat16 or "
            "float32); the cache cannot choose any more, call reset()"
        )
