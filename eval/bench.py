"""bench: what a decode step costs on this machine under each policy, paired in one run."""

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from transformers.cache_utils import DynamicCache

from kvevict import console
from kvevict.cache import EvictionCache
from kvevict.errors import KvevictError
from kvevict.eval.demo import policies
from kvevict.models.patch import patch
from kvevict.models.releases import cache_argument
from kvevict.models.small import SMALL, load
from kvevict.models.stream import stream

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def paired(
    cases: dict[str, Callable[[], Any]], rounds: int, warmup: int = 1, repeat: int = 1
) -> dict[str, dict[str, float]]:
    """Time cases in turn, round by round in one process.

    Machines are noisy, ratios of interleaved medians much less so; CPU time is what a loaded
    machine can still measure, wall time is given beside it.

    Args:
        cases: name to a function of no arguments; the first is the base of the ratios.
        rounds: times that every case is measured, at least 2.
        warmup: rounds run before, not counted.
        repeat: calls timed together in a round.

    Returns:
        For each case: medians `cpu_ms` and `wall_ms` a call, `ratio` (median CPU time over the
        base case's) and the quartiles `cpu_p25_ms` and `cpu_p75_ms`.
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


@torch.no_grad()
def decode_rows(
    model: Any, budget: int, context: int, rounds: int = 10, repeat: int = 2
) -> list[dict[str, Any]]:
    """Time a decode step under each policy of the demo against a DynamicCache at the context.

    Args:
        model: a decoder-only model.
        budget: tokens kept.
        context: tokens read before, which the full cache holds.
        rounds: measured rounds.
        repeat: steps timed together.

    Returns:
        One row a case: `policy`, `cpu_ms`, `wall_ms`, `ratio`, quartiles, `cache_bytes`.

    Raises:
        KvevictError: a context that does not fill the budget.
    """
    if context <= budget:
        raise KvevictError(f"context={context} does not fill budget={budget}: give a longer one")
    name = cache_argument(model)
    ids = torch.arange(context, device=model.device)[None] * 7 % model.config.vocab_size
    one = ids[:, :1]
    with patch(model):
        caches: dict[str, Any] = {"DynamicCache": DynamicCache(config=model.config)}
        for first in range(0, context, 512):
            part = ids[:, first : first + 512]
            model(part, **{name: caches["DynamicCache"]}, use_cache=True)
        for policy in policies(budget)[1:]:
            caches[policy] = EvictionCache(model, policy)
            for _ in stream(model, ids, caches[policy], chunk=512):
                pass

        def step(cache: Any) -> Callable[[], Any]:
            def call() -> None:
                model(one, **{name: cache}, use_cache=True)
                if one.is_cuda:
                    torch.cuda.synchronize()

            return call

        figures = paired({k: step(c) for k, c in caches.items()}, rounds, repeat=repeat)
    rows = []
    for policy, cache in caches.items():
        held = cache.nbytes() if isinstance(cache, EvictionCache) else _bytes(cache)
        row = {"policy": "full" if policy == "DynamicCache" else policy, "budget": budget}
        rows.append(row | {"context": context} | figures[policy] | {"cache_bytes": held})
    return rows


def _bytes(cache: Any) -> int:
    return sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)


@app.command()
def bench(
    model: Annotated[str, typer.Argument(help="Folder, hub id or smollm2-135m.")] = SMALL,
    budget: Annotated[int, typer.Option(min=8)] = 256,
    context: Annotated[int, typer.Option(min=16, help="Tokens read before.")] = 4096,
    rounds: Annotated[int, typer.Option(min=2)] = 10,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="A torch device such as cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of every random draw.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout.")
    ] = False,
) -> None:
    """Time a decode step under each policy against a full cache at the same context."""
    torch.manual_seed(seed)
    loaded, _ = load(model, dtype=dtype, device=device)
    rows = decode_rows(loaded, budget, context, rounds)
    config = {"model": model, "dtype": dtype, "device": device, "machine": console.machine()}
    if as_json:
        console.emit("bench", config | {"seed": seed, "rounds": rounds}, rows)
    else:
        console.show(rows, title=f"{model}, decode step, {context:,} tokens read, {dtype}")
