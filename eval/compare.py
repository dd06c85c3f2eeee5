"""compare: token-level against message-level eviction on one trajectory, at equal token budgets."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvevict.agent.formats import to_normal
from kvevict.agent.history import History
from kvevict.agent.prices import Prices
from kvevict.errors import HistoryError
from kvevict.eval import choices, statistics
from kvevict.eval.caches import patched
from kvevict.eval.compare_turn import Protocol, TurnBench
from kvevict.eval.compare_view import view
from kvevict.eval.grid import Cell, Outcome, cells, ranks, run_cells
from kvevict.eval.planted import DEPTHS, Fact, plant
from kvevict.eval.results import RunFolder, write_json
from kvevict.models.spans import Turn, chat_messages, render

_KEY = ("policy", "level", "realisation", "budget")
_WARM_UP = 2  # groups that may leave before a turn is worth measuring
VIEW = "view.json"


@dataclass(frozen=True)
class Plan:
    """Which turns are scored.

    Attributes:
        messages: of the trajectory, as chat-template messages.
        turns: places of the assistant's messages, ascending.
        left_out: turns whose context is longer than was allowed.
    """

    messages: list[Turn]
    turns: list[int]
    left_out: int


def plan(history: History, tokenizer: Any, turns: int = 4, max_context: int = 8192) -> Plan:
    """Choose assistant turns, evenly from the first that has something to evict to the last.

    Args:
        history: the trajectory.
        tokenizer: with a chat template.
        turns: how many at most.
        max_context: most tokens before a turn.

    Raises:
        HistoryError: no turn that can be measured.
    """
    messages, _ = chat_messages(history)
    said = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    fit: list[int] = []
    left_out = 0
    for place in said:
        empty = not messages[place]["content"].strip() and not messages[place].get("tool_calls")
        if place == 0 or empty or not _droppable(messages[:place]):
            continue
        if len(render(messages[:place], tokenizer).ids) > max_context:
            left_out = sum(1 for x in said if x >= place)
            break
        fit.append(place)
    if not fit:
        raise HistoryError(
            f"no assistant turn has {_WARM_UP} groups to evict before it within {max_context} "
            f"tokens ({len(messages)} messages, {len(said)} turns): give a longer trajectory, or "
            "more --max-context"
        )
    spread = np.linspace(0, len(fit) - 1, min(turns, len(fit))).round().astype(int)
    return Plan(messages, [fit[i] for i in spread], left_out)


def _droppable(messages: Sequence[Turn]) -> bool:
    history = to_normal(list(messages), "hf")
    roots = choices.roots(history)
    free = [g for g in history.groups if not roots & set(range(g.start, g.stop))]
    return len(free) >= _WARM_UP


def run(
    model: Any,
    tokenizer: Any,
    history: History,
    *,
    protocol: Protocol | None = None,
    turns: int = 4,
    max_context: int = 8192,
    depths: Sequence[float] = DEPTHS,
    prices: Prices,
    title: str = "",
    folder: RunFolder | None = None,
) -> list[Outcome]:
    """Score every turn under every policy, level, realisation and budget.

    Facts are planted before the last turn alone, and asked there.

    Args:
        model: with full attention in every layer; patched for the call if it is not.
        tokenizer: with a chat template.
        history: the trajectory.
        protocol: budgets, realisations, lengths.
        turns: how many, see `plan`.
        max_context: most tokens before a turn.
        depths: of the facts; none for no facts.
        prices: for the cost of the next request.
        title: of the page's panes.
        folder: keeps finished turns.

    Returns:
        A row a (policy, level, realisation, budget) over all turns, then a row a turn. In a row,
        sums over turns are divided by sums of tokens; `nll_delta` is against the full cache on the
        same tokens, with a 95% paired bootstrap interval over turns.

    Raises:
        HistoryError: a trajectory without a turn to measure.
        UnsupportedModelError: a layer without full attention.
    """
    protocol = protocol or Protocol()
    chosen = plan(history, tokenizer, turns, max_context)
    todo = cells([{"turn": t} for t in chosen.turns], lambda k: f"turn {k['turn']}")

    def work(cell: Cell) -> Outcome:
        last = cell.key["turn"] == chosen.turns[-1]
        return _turn(model, tokenizer, chosen, cell.key["turn"], protocol, depths, last, title)

    with patched(model):
        done = run_cells(todo, work, folder, "compare")
    shown = done[-1].row.pop("view")
    if folder is not None and ranks()[0] == 0:
        write_json(folder.path / VIEW, shown)  # too much for a row
    return [*_pooled(done, prices, protocol.seed), *_per_turn(done)]


def _turn(
    model: Any,
    tokenizer: Any,
    chosen: Plan,
    turn: int,
    protocol: Protocol,
    depths: Sequence[float],
    last: bool,
    title: str,
) -> Outcome:
    messages = chosen.messages
    facts: list[Fact] = []
    if last and depths:
        messages, facts = plant(messages, turn, depths, protocol.seed)
    steps = steps_of(messages[:turn], tokenizer) if last else []
    bench = TurnBench(model, tokenizer, messages, (turn, turn + 1), facts, protocol, steps)
    began = time.perf_counter()
    found = bench.run()
    row: dict[str, Any] = {"turn": turn, "rows": found.rows, "facts": found.facts}
    if last:
        name = f"turn {turn} of {title}" if title else f"turn {turn}"
        row["view"] = view(bench, found, name)
    timing = {"prefill_seconds": bench.prefill_seconds, "row_seconds": found.seconds}
    return Outcome(row, {**timing, "run_seconds": time.perf_counter() - began})


def steps_of(messages: Sequence[Turn], tokenizer: Any, most: int = 8) -> list[int]:
    """Return the ends of up to `most` messages, in tokens, spread over a context."""
    stops = sorted({s.stop for s in render(messages, tokenizer).spans if s.size})
    goals = np.linspace(stops[-1] / most, stops[-1], most)
    return sorted({min(stops, key=lambda s: (abs(s - g), s)) for g in goals})


# -- rows over turns ------------------------------------------------------------------------------


@dataclass
class _Pool:
    rows: list[dict[str, Any]] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def _pooled(done: Sequence[Outcome], prices: Prices, seed: int) -> list[Outcome]:
    pools: dict[tuple[Any, ...], _Pool] = {}
    for outcome in done:
        seconds = outcome.timing.get("row_seconds", [])
        for row, took in zip(outcome.row["rows"], seconds, strict=True):
            pool = pools.setdefault(tuple(row[k] for k in _KEY), _Pool())
            pool.rows.append(row)
            pool.turns.append(outcome.row["turn"])
            pool.seconds.append(took)
    full = next(p for k, p in pools.items() if k[0] == "full")
    base = {t: _bucket(r) for t, r in zip(full.turns, full.rows, strict=True)}
    return [_outcome(key, pool, base, prices, seed) for key, pool in pools.items()]


def _bucket(row: dict[str, Any]) -> statistics.Bucket:
    return {"start": 0, "count": row["tokens_scored"], "nll_sum": row["nll_sum"]}


def _outcome(
    key: tuple[Any, ...], pool: _Pool, base: dict[int, Any], prices: Prices, seed: int
) -> Outcome:
    rows = pool.rows
    scored = sum(r["tokens_scored"] for r in rows)
    parts = [_bucket(r) for r in rows]
    delta, low, high = statistics.difference(parts, [base[t] for t in pool.turns], seed)
    asked = [f for r in rows for f in r.get("facts", ())]
    row: dict[str, Any] = {
        **dict(zip(_KEY, key, strict=True)),
        "kind": "comparison",
        "nll": statistics.mean(parts),
        "nll_delta": delta,
        "nll_delta_low": low,
        "nll_delta_high": high,
        "kl": sum(r["kl_sum"] for r in rows) / scored,
        "top1_agreement": sum(r["top1_sum"] for r in rows) / scored,
        "fact_nll": _mean([f["nll"] for f in asked]),
        "fact_exact": _mean([float(f["exact"]) for f in asked]),
        "fact_nll_by_carrier": _by(asked, "carrier"),
        "fact_nll_by_depth": _by(asked, "depth"),
        "turns": len(rows),
        "tokens_scored": scored,
        "fits": all(r["fits"] for r in rows),
        "settings": list(dict.fromkeys(r["setting"] for r in rows if r.get("setting"))),
        "prompt_cost": _mean([prompt_cost(r, prices) for r in rows]),
    }
    means = ("budget_tokens", "kept_tokens", "kept_share", "mass_kept", "mass_bound")
    for name in (*means, "recomputed_tokens"):
        row[name] = _mean([float(r[name]) for r in rows if r.get(name) is not None])
    return Outcome(row, {"seconds": _mean(pool.seconds)})


def prompt_cost(row: dict[str, Any], prices: Prices) -> float:
    """Return the dollars of the next request's input under a prompt cache, per 1,000 requests.

    What was recomputed is what a prompt cache has to write anew (P5); the rest is read.
    """
    written = int(row["recomputed_tokens"])
    read = max(0, int(row["kept_tokens"]) - written)
    return 1000 * prices.cost(0, written, read, 0)


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None


def _by(asked: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for fact in asked:
        found.setdefault(str(fact[name]), []).append(fact["nll"])
    return {k: sum(v) / len(v) for k, v in sorted(found.items())}


def _per_turn(done: Sequence[Outcome]) -> list[Outcome]:
    """Return a row a turn: its size, and how well cheap scores agree with the oracle."""
    found = []
    for outcome in done:
        facts = outcome.row["facts"]
        row = {"kind": "turn", "policy": "full", "turn": outcome.row["turn"]}
        row |= {k: facts[k] for k in ("groups", "context_tokens", "floor_tokens", "style")}
        row |= {f"oracle_{k}": v for k, v in facts["correlation"].items()}
        row["facts_planted"] = len(next(iter(outcome.row["rows"])).get("facts", ()))
        timing = {k: outcome.timing[k] for k in ("prefill_seconds", "run_seconds")}
        found.append(Outcome(row, timing))
    return found
