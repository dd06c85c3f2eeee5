"""stream: loss against position for long streams, in constant memory, resumable.

An absolute loss on a stream proves nothing, since the text itself gets harder and easier. The
control is a fresh start: a new cache that begins shortly before a position must give the same loss
there as the cache that has read everything.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvevict.errors import KvevictError
from kvevict.eval import statistics
from kvevict.eval.caches import CacheSettings, feed, patched, policies_at
from kvevict.eval.checkpoint import Checkpoints, Progress, check_savable
from kvevict.eval.grid import Cell, Outcome, cells, ranks, run_cells, token_bar
from kvevict.eval.kept_map import Snapshots
from kvevict.eval.memory import resident_bytes
from kvevict.eval.results import RunFolder
from kvevict.eval.texts import Tokens
from kvevict.models.stream import Step
from kvevict.policy import Policy

_CHECKPOINTS = "checkpoints"
_FINE = 64  # tokens a bucket in the fresh-start control


@dataclass(frozen=True)
class FreshStarts:
    """Where and how the fresh-start control is taken.

    Attributes:
        count: positions, spread evenly over the stream; 0 for none.
        lead: tokens that the new cache reads before the position; None: the budget, at least 256.
        span: tokens compared from the position on.
    """

    count: int = 4
    lead: int | None = None
    span: int = 512

    def places(self, policy: Policy, total: int) -> list[tuple[int, int]]:
        """Return (first token read, first token compared) of every control."""
        lead = self.lead if self.lead is not None else max(256, policy.capacity or 0)
        last = total - self.span
        found = []
        for i in range(self.count):
            position = last * (i + 1) // self.count
            if position - lead > lead:  # nearer to the start both are the same stream
                found.append((position - lead, position))
        return found


@dataclass(frozen=True)
class _Job:
    """What the cells of one run share."""

    model: Any
    text: Tokens
    settings: CacheSettings
    bucket: int
    fresh: FreshStarts
    checkpoint_every: int
    folder: RunFolder | None


def run(
    model: Any,
    text: Tokens,
    policies: Sequence[str | Policy],
    *,
    budgets: Sequence[str | int] = (),
    settings: CacheSettings | None = None,
    bucket: int = 1024,
    fresh: FreshStarts | None = None,
    checkpoint_every: int = 0,
    folder: RunFolder | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Score a long stream under every policy, with fresh-start controls.

    Args:
        model: a decoder-only model; patched for the call if it is not.
        text: the stream.
        policies: policies or their strings.
        budgets: tokens or shares to bring the policies to.
        settings: chunk, positions, backend, evict_every.
        bucket: positions a bucket.
        fresh: where the control is taken.
        checkpoint_every: tokens between two checkpoints, a multiple of the chunk; 0 for none.
        folder: an opened folder; checkpoints need one.
        seed: of the bootstrap.

    Returns:
        A row of kind "stream" for every policy (`nll`, `buckets`, `memory`: cache bytes along the
        way), then rows of kind "fresh_start" (`stream_nll`, `fresh_nll`, `nll_delta` with its
        paired 95% interval, `position`, `lead`).

    Raises:
        PolicyError: a bad policy or budget.
        KvevictError: a checkpoint interval that is no multiple of the chunk.
    """
    settings = settings or CacheSettings()
    fresh = fresh or FreshStarts()
    chosen = policies_at(policies, budgets, len(text.ids))
    if settings.chunk and checkpoint_every % settings.chunk:
        raise KvevictError(
            f"checkpoint_every={checkpoint_every}: give a multiple of the chunk {settings.chunk}"
        )
    if checkpoint_every and folder is None:
        raise KvevictError("checkpoints need a folder: give --out")
    job = _Job(model, text, settings, bucket, fresh, checkpoint_every, folder)
    keys: list[dict[str, Any]] = [{"kind": "stream", "policy": p} for p in chosen]
    keys += [
        {"kind": "fresh_start", "policy": policy, "place": place}
        for policy in chosen
        for place in fresh.places(policy, len(text.ids))
    ]
    todo = cells(keys, lambda k: f"{k['kind']}-{k['policy']}-{k.get('place', ('', ''))[1]}")

    def work(cell: Cell) -> Outcome:
        return _fresh(job, cell) if cell.key["kind"] == "fresh_start" else _stream(job, cell)

    with patched(model):
        done = run_cells(todo, work, folder, "stream")
    if folder is not None and ranks()[0] == 0:
        shutil.rmtree(folder.path / _CHECKPOINTS, ignore_errors=True)  # every stream is done
    return _finish(keys, done, seed)


# -- one stream -----------------------------------------------------------------------------------


def _stream(job: _Job, cell: Cell) -> Outcome:
    where = job.folder.path / _CHECKPOINTS / cell.name if job.folder else None
    kept = Checkpoints(where if job.checkpoint_every else None)
    ids, policy = job.text.ids, cell.key["policy"]
    cache = job.settings.cache(job.model, policy)
    if job.checkpoint_every:
        check_savable(cache)
    found = kept.load(job.model)
    progress = Progress()
    if found is not None:
        cache, progress = found
    watch = _Watch(cache, job.bucket, Snapshots(cache, len(ids)), progress.notes)
    span = job.checkpoint_every or len(ids)
    with token_bar(len(ids), str(policy), len(progress.nll)) as bar:

        def on_step(step: Step) -> None:
            watch.after(step)
            bar.update(len(step.nll))

        while len(progress.nll) < len(ids):
            at = len(progress.nll)
            part = ids[at : at + span]
            nll, last = feed(
                job.model, part, cache, job.settings, last=progress.last, on_step=on_step
            )
            progress = Progress(torch.cat([progress.nll, nll]), last, watch.notes())
            if len(progress.nll) < len(ids):
                kept.save(cache, progress)
    outcome = _stream_outcome(job, policy, progress, watch)
    outcome.row = job.settings.facts(cache) | outcome.row
    return outcome


def _stream_outcome(job: _Job, policy: Policy, progress: Progress, watch: _Watch) -> Outcome:
    nll = progress.nll
    row: dict[str, Any] = {
        "kind": "stream",
        "tokens_fed": len(nll),
        "tokens_scored": len(nll) - 1,
        "scored_from": 1,
        "scored_to": len(nll),
        "bos": job.text.bos,
        "buckets": statistics.buckets(nll, job.bucket),
    }
    row["nll"] = statistics.mean(row["buckets"])
    row["perplexity"] = statistics.perplexity(row["nll"])
    row["memory"] = watch.memory
    row["kept_map"] = watch.shots.map()
    row["at_fresh_starts"] = [
        statistics.buckets(nll[p : p + job.fresh.span], _FINE, 0, p)
        for _, p in job.fresh.places(policy, len(nll))
    ]
    seconds = sum(t["seconds"] for t in watch.track)
    timing = {
        "seconds_feeding": seconds,
        "tokens_per_second": len(nll) / seconds,
        "track": watch.track,
    }
    return Outcome(row, timing, {"nll": nll.numpy()})


class _Watch:
    """Takes down memory and speed along a stream, once a bucket."""

    def __init__(self, cache: Any, bucket: int, shots: Snapshots, notes: dict[str, Any]) -> None:
        self.shots = shots
        self.memory: list[dict[str, int]] = notes.get("memory", [])
        self.track: list[dict[str, Any]] = notes.get("track", [])
        shots.resume(notes.get("shots", []))
        self._cache = cache
        self._bucket = bucket
        self._began = time.perf_counter()
        self._from = cache.seen

    def after(self, step: Step) -> None:
        self.shots.after(step)
        seen = step.start + len(step.nll)
        if seen // self._bucket > step.start // self._bucket:
            self.note(seen)

    def note(self, seen: int) -> None:
        now = time.perf_counter()
        if seen == self._from:
            return
        self.memory.append({"position": seen, "cache_bytes": self._cache.nbytes()})
        self.track.append(
            {
                "position": seen,
                "seconds": now - self._began,
                "tokens_per_second": (seen - self._from) / (now - self._began),
                "resident_bytes": resident_bytes(),
            }
        )
        self._began, self._from = now, seen

    def notes(self) -> dict[str, Any]:
        self.note(self._cache.seen)
        return {"memory": self.memory, "track": self.track, "shots": self.shots.found}


# -- the control ----------------------------------------------------------------------------------


def _fresh(job: _Job, cell: Cell) -> Outcome:
    first, position = cell.key["place"]
    ids: Tensor = job.text.ids[first : position + job.fresh.span]
    cache = job.settings.cache(job.model, cell.key["policy"])
    nll, _ = feed(job.model, ids, cache, job.settings)
    row = job.settings.facts(cache) | {
        "kind": "fresh_start",
        "position": position,
        "lead": position - first,
        "scored_from": position,
        "scored_to": position + job.fresh.span,
        "buckets": statistics.buckets(nll[position - first :], _FINE, 0, position),
    }
    return Outcome(row, {}, {"nll": nll.numpy()})


def _finish(keys: list[dict[str, Any]], done: list[Outcome], seed: int) -> list[Outcome]:
    """Compare every control with its stream."""
    at: dict[str, list[Any]] = {}
    for key, outcome in zip(keys, done, strict=True):
        row, policy = outcome.row, str(key["policy"])
        if key["kind"] == "stream":
            row["nll_low"], row["nll_high"] = statistics.interval(row["buckets"], seed)
            at[policy] = row.pop("at_fresh_starts")
            continue
        same = at[policy].pop(0)
        row["stream_nll"] = statistics.mean(same)
        row["fresh_nll"] = statistics.mean(row["buckets"])
        row["tokens_scored"] = sum(b["count"] for b in same)
        found = statistics.difference(same, row["buckets"], seed)
        row["nll_delta"], row["nll_delta_low"], row["nll_delta_high"] = found
    return done
