"""perplexity: the loss of a text under policies and budgets, with the full cache as control.

Every token is scored once, from what the cache held before it; there are no windows whose borders
could skip, double or mis-weight a token. A chunk only sets how often a ranked policy evicts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvevict.errors import KvevictError
from kvevict.eval import statistics
from kvevict.eval.caches import (
    CacheSettings,
    check_longer,
    feed,
    patched,
    policies_at,
)
from kvevict.eval.grid import Cell, Outcome, cells, run_cells, token_bar
from kvevict.eval.kept_map import Snapshots
from kvevict.eval.results import RunFolder
from kvevict.eval.texts import Tokens
from kvevict.models.stream import Step
from kvevict.policy import Policy


def run(
    model: Any,
    texts: Tokens | Tensor | list[Tokens],
    policies: Sequence[str | Policy],
    *,
    budgets: Sequence[str | int] = (),
    settings: CacheSettings | None = None,
    bucket: int = 256,
    score_from: int = 1,
    folder: RunFolder | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Score texts under every policy at every budget.

    Args:
        model: a decoder-only model; patched for the call if it is not.
        texts: one or several token streams, each scored on its own; a bare tensor `[N]` counts as
            one without BOS.
        policies: policies or their strings.
        budgets: tokens or shares such as "20%" to bring the policies to; none: as they are.
        settings: chunk, positions, backend, evict_every.
        bucket: positions a bucket.
        score_from: first index that is scored; the first token of a stream never can be.
        folder: an opened folder that keeps finished cells.
        seed: of the bootstrap.

    Returns:
        One outcome a policy. Its row has `nll` (nats a token), `perplexity`, `nll_low` and
        `nll_high` (95% bootstrap over buckets), `nll_delta` to the full control where that ran,
        `nll_evicting` over the tokens after the largest budget, `tokens_scored`, `scored_from`,
        `scored_to` (exclusive), `buckets`, `kept_tokens`, `cache_bytes` and the settings.

    Raises:
        PolicyError: a bad policy or budget.
        KvevictError: a text not longer than the largest budget, or nothing to score.
    """
    settings = settings or CacheSettings()
    streams = [texts] if isinstance(texts, Tokens) else texts
    if isinstance(streams, Tensor):
        streams = [Tokens(streams.reshape(-1), False, {"name": "tensor"})]
    shortest = min(len(s.ids) for s in streams)
    chosen = policies_at(policies, budgets, shortest)
    check_longer(chosen, shortest, "the text")
    if not 1 <= score_from < shortest:
        raise KvevictError(f"score_from={score_from}: give 1 to {shortest - 1}")
    keys = [{"policy": p, "stream": i} for p in chosen for i in range(len(streams))]
    todo = cells(keys, lambda k: f"{k['policy']}-{k['stream']}")

    def work(cell: Cell) -> Outcome:
        stream = streams[cell.key["stream"]]
        return _score(model, stream.ids, cell.key["policy"], settings, bucket, score_from)

    with patched(model):
        done = run_cells(todo, work, folder, "perplexity")
    count = len(streams)
    groups = [done[i : i + count] for i in range(0, len(done), count)]
    after = max((p.capacity or 0 for p in chosen), default=0)
    return _compare([_merge(group, streams, after) for group in groups], seed)


def _score(
    model: Any, ids: Tensor, policy: Policy, settings: CacheSettings, bucket: int, first: int
) -> Outcome:
    cache = settings.cache(model, policy)
    shots = Snapshots(cache, len(ids))
    began = time.perf_counter()
    with token_bar(len(ids), str(policy)) as bar:

        def on_step(step: Step) -> None:
            shots.after(step)
            bar.update(len(step.nll))

        nll, _ = feed(model, ids, cache, settings, on_step=on_step)
    seconds = time.perf_counter() - began
    row = settings.facts(cache)
    row["tokens_fed"] = len(ids)
    row["scored_from"], row["scored_to"] = first, len(ids)
    row["buckets"] = statistics.buckets(nll, bucket, first)
    row["kept_map"] = shots.map()
    timing = {"tokens_per_second": len(ids) / seconds}
    return Outcome(row, timing, {"nll": nll.numpy()})


def _merge(group: list[Outcome], streams: list[Tokens], after: int) -> Outcome:
    """Join a policy's streams: sums and counts, never means of means."""
    first = group[0].row
    parts = [{"stream": i, **b} for i, o in enumerate(group) for b in o.row["buckets"]]
    row = {k: v for k, v in first.items() if k not in ("buckets", "kept_map")}
    row["streams"] = len(group)
    row["tokens_fed"] = sum(o.row["tokens_fed"] for o in group)
    row["scored_to"] = [o.row["scored_to"] for o in group]
    if len(group) == 1:
        row["scored_to"] = row["scored_to"][0]
    row["tokens_scored"] = sum(b["count"] for b in parts)
    row["bos"] = streams[0].bos
    row["nll"] = statistics.mean(parts)
    row["perplexity"] = statistics.perplexity(row["nll"])
    late = [b for b in parts if b["start"] >= after]
    row["evicting_from"] = min((b["start"] for b in late), default=None)
    row["nll_evicting"] = statistics.mean(late)
    row["perplexity_evicting"] = statistics.perplexity(row["nll_evicting"])
    row["buckets"], row["kept_map"] = parts, first["kept_map"]
    seconds = sum(o.timing["seconds"] for o in group)
    timing = {"seconds": seconds, "tokens_per_second": row["tokens_fed"] / seconds}
    return Outcome(row, timing)


def _compare(outcomes: list[Outcome], seed: int) -> list[Outcome]:
    full = next((o.row["buckets"] for o in outcomes if o.row["budget"] is None), None)
    for outcome in outcomes:
        row = outcome.row
        row["nll_low"], row["nll_high"] = statistics.interval(row["buckets"], seed)
        if full is not None:
            found = statistics.difference(row["buckets"], full, seed)
            row["nll_delta"], row["nll_delta_low"], row["nll_delta_high"] = found
    return outcomes


def nll_of(model: Any, tokens: Tensor, policy: str | Policy, chunk: int = 64) -> Tensor:
    """Return every token's loss under one policy, float32 `[N]` nats, nan for the first."""
    settings = CacheSettings(chunk=chunk)
    chosen = policies_at([policy], [], len(tokens))[0]
    with patched(model), torch.no_grad():
        return feed(model, tokens, settings.cache(model, chosen), settings)[0]
