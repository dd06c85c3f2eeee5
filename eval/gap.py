"""gap: the same text as if it stood much later in the stream; millions of real tokens are slow.

The head is fed where it is, the rest at positions a gap further on. Positions inside the cache do
not see the gap at all; original positions run out of the trained length, and the loss explodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvevict.eval import statistics
from kvevict.eval.caches import CacheSettings, check_longer, feed, patched, policies_at
from kvevict.eval.grid import Cell, Outcome, cells, run_cells
from kvevict.eval.results import RunFolder
from kvevict.eval.texts import Tokens
from kvevict.policy import Policy

_HEAD = 4  # tokens before the gap, where the policy has no head of its own


def run(
    model: Any,
    text: Tokens,
    policies: Sequence[str | Policy],
    gaps: list[int],
    *,
    budgets: Sequence[str | int] = (),
    settings: CacheSettings | None = None,
    span: int = 1020,
    bucket: int = 64,
    folder: RunFolder | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Score a text behind gaps, with the given positions and with original ones.

    Args:
        model: a decoder-only model; patched for the call if it is not.
        text: only its first head + span tokens are read.
        policies: policies or their strings.
        gaps: in tokens; 0 is added as the control.
        budgets: tokens or shares to bring the policies to.
        settings: chunk, positions, backend, evict_every.
        span: tokens read behind the gap.
        bucket: positions a bucket.
        folder: an opened folder that keeps finished cells.
        seed: of the bootstrap.

    Returns:
        A row of kind "gap" for every policy, kind of positions and gap: `nll` over the tokens
        after the largest budget, and `nll_delta` to gap 0.

    Raises:
        PolicyError: a bad policy or budget.
        KvevictError: a span not longer than the largest budget.
    """
    settings = settings or CacheSettings()
    chosen = policies_at(policies, budgets, min(len(text.ids), span))
    tokens = min(len(text.ids), span + _HEAD)
    check_longer(chosen, tokens, "the span behind a gap")
    first = max([_HEAD, *(p.capacity or 0 for p in chosen)])
    with patched(model):
        keys = [
            {"policy": p, "positions": how, "gap": gap}
            for p in chosen
            for how in _kinds(model, p, settings)
            for gap in sorted({0, *gaps})
        ]
    todo = cells(keys, lambda k: f"gap-{k['policy']}-{k['positions']}-{k['gap']}")

    def work(cell: Cell) -> Outcome:
        policy, gap = cell.key["policy"], cell.key["gap"]
        own = replace(settings, positions=cell.key["positions"])
        cache = own.cache(model, policy)
        head = max(_HEAD, (policy.extents or (0,))[0])
        ids = text.ids[:tokens]
        _, last = feed(model, ids[:head], cache, own)
        nll, _ = feed(model, ids[head:], cache, own, last=last, start=gap)
        row = own.facts(cache) | {
            "kind": "gap",
            "gap": gap,
            "head": head,
            "tokens_fed": tokens,
            "tokens_scored": tokens - first,
            "scored_from": first,
            "scored_to": tokens,
            "bos": text.bos,
            "buckets": statistics.buckets(nll, bucket, first - head, head),
        }
        row["nll"] = statistics.mean(row["buckets"])
        row["perplexity"] = statistics.perplexity(row["nll"])
        return Outcome(row)

    with patched(model):
        done = run_cells(todo, work, folder, "gap")
    control: Outcome | None = None
    for key, outcome in zip(keys, done, strict=True):
        control = outcome if key["gap"] == 0 else control
        assert control is not None
        found = statistics.difference(outcome.row["buckets"], control.row["buckets"], seed)
        outcome.row["nll_delta"], *_ = found
        outcome.row["nll_delta_low"], outcome.row["nll_delta_high"] = found[1:]
    return done


def _kinds(model: Any, policy: Policy, settings: CacheSettings) -> list[str]:
    """Return the kinds of positions to compare: the one that is in force, and the original."""
    return list(dict.fromkeys([settings.cache(model, policy).positions, "original"]))
