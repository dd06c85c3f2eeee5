"""figures: what a report draws, as plain data; `svg` and `png` turn it into pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvevict.errors import PolicyError
from kvevict.eval.caches import short

Row = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        name: shown in the legend.
        points: (x, y) in order.
        band: (low, high) for every point, or none.
        line: whether the points are joined.
        names: of the points, shown beside them where there is room; none: of the series alone.
        mark: "circle", "square", "triangle" or "diamond".
        colour: place in the list of colours; None: that of the series in its chart.
    """

    name: str
    points: list[tuple[float, float]]
    band: list[tuple[float, float]] = field(default_factory=list)
    line: bool = True
    names: list[str] = field(default_factory=list)
    mark: str = "circle"
    colour: int | None = None


@dataclass(frozen=True)
class Chart:
    """Lines or points over two axes.

    Attributes:
        name: for file names.
        title: what it shows, in words.
        x: name and unit of the axis.
        y: likewise.
        series: at least one.
        log_x: whether x is drawn on a logarithmic axis.
    """

    name: str
    title: str
    x: str
    y: str
    series: list[Series]
    log_x: bool = False


@dataclass(frozen=True)
class Heat:
    """A grid of numbers as colours.

    Attributes:
        name: for file names.
        title: what it shows.
        x: name of the columns.
        y: name of the rows.
        columns: a label each.
        rows: a label each.
        values: [row][column], None where nothing was measured.
        numbers: whether every cell states its number.
        limits: values of the two ends of the colours; None takes the data's.
    """

    name: str
    title: str
    x: str
    y: str
    columns: list[str]
    rows: list[str]
    values: list[list[float | None]]
    numbers: bool = True
    limits: tuple[float, float] | None = None


Figure = Chart | Heat


def figures(command: str, rows: list[Row]) -> list[Figure]:
    """Return what there is to draw of a result."""
    found: list[Figure] = []
    if command in ("ppl", "stream"):
        found += _by_position(rows, "nll_sum", "NLL against position", "NLL (nats per token)")
    if command == "divergence":
        found += _by_position(rows, "nll_sum", "KL to the full cache against position", "KL (nats)")
        found += _layers(rows)
    if command == "compare":
        found += _frontiers(rows)
    found += _budgets(command, rows)
    found += _memory(rows)
    found += _gaps(rows)
    found += _needles(rows)
    found += _answers(rows)
    for row in rows:
        found += kept_maps(row)
    return found


def label(row: Row) -> str:
    """Return a row's policy in few letters; a comparison's names are short as they are."""
    if "realisation" in row:
        return str(row.get("policy", ""))
    try:
        return short(str(row.get("policy", "")))
    except PolicyError:  # a policy that this installation does not know
        return str(row.get("policy", ""))


def _by_position(rows: list[Row], key: str, title: str, y: str) -> list[Figure]:
    series = []
    for row in rows:
        if row.get("kind", "stream") != "stream":
            continue
        points = [
            (b["start"] + b["count"] / 2, b[key] / b["count"])
            for b in row.get("buckets", [])
            if b.get("count") and b.get("stream", 0) == 0
        ]
        if points:
            series.append(Series(label(row), points))
    return (
        [Chart("position", title, "position in the stream (tokens)", y, series)] if series else []
    )


def _budgets(command: str, rows: list[Row]) -> list[Figure]:
    measure = {"ppl": "nll_evicting", "divergence": "kl", "streameval": "answer_nll"}.get(command)
    if measure is None:
        return []
    names: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.get(measure) is not None and row.get("kind") != "chat":
            names[str(row["policy"]).split(":")[0]].append(row)
    budgets = [row["budget"] for part in names.values() for row in part if row["budget"]]
    if len(set(budgets)) < 2:
        return []
    series = []
    for name, part in names.items():
        if part[0]["budget"] is None:  # full: a level, not a point
            level = part[0][measure]
            series.append(Series(name, [(min(budgets), level), (max(budgets), level)]))
        else:
            points = sorted((row["budget"], row[measure]) for row in part)
            series.append(Series(name, points))
    y = {"nll_evicting": "NLL after the largest budget (nats)", "kl": "KL (nats)"}
    title = "Quality against budget: lower and further left is better"
    axis = y.get(measure, "answer NLL (nats)")
    return [Chart("budget", title, "budget (tokens kept)", axis, series, log_x=True)]


_LEVELS = {"token": 0, "message": 4}
_MARKS = {"kv": "circle", "kv_reindex": "square", "text": "triangle"}


def _frontiers(rows: list[Row]) -> list[Figure]:
    """Return loss against cost, a point a row, and what no row beats at its kept share."""
    costs = {
        "recomputed_tokens": "Loss against cost: lower and further left is better",
        "kept_share": "Loss against what is kept: lower and further left is better",
    }
    found: list[Figure] = []
    for cost, title in costs.items():
        groups: dict[tuple[str, str], list[tuple[float, float, str]]] = defaultdict(list)
        for row in rows:
            if row.get("nll") is None or row.get(cost) is None:
                continue
            share = "" if row.get("budget") is None else f" {row['budget']:.0%}"
            kind = str(row.get("level")), str(row.get("realisation"))
            groups[kind].append((row[cost], row["nll"], label(row) + share))
        if sum(map(len, groups.values())) < 2:
            continue
        series = [
            Series(
                "full" if level == "none" else f"{level}, {how}",
                [(x, y) for x, y, _ in points],
                line=False,
                names=[name for _, _, name in points],
                mark=_MARKS.get(how, "diamond"),
                colour=_LEVELS.get(level, 6),
            )
            for (level, how), points in groups.items()
        ]
        if cost == "kept_share":
            best = _best([p for s in series for p in s.points])
            series.insert(0, Series("best at its share or less", best, colour=6))  # under them
        x = "recomputed tokens" if cost == "recomputed_tokens" else "share of the tokens kept"
        found.append(Chart(f"frontier-{cost}", title, x, "NLL (nats per token)", series))
    return found


def _best(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no point with as little or less cost is better than."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not best or y < best[-1][1]:
            best.append((x, y))
    return best


def _memory(rows: list[Row]) -> list[Figure]:
    series = [
        Series(label(r), [(m["position"], m["cache_bytes"] / 2**20) for m in r["memory"]])
        for r in rows
        if r.get("memory")
    ]
    speed = [
        Series(label(r), [(t["position"], t["tokens_per_second"]) for t in r["track"]])
        for r in rows
        if r.get("track")
    ]
    x = "position in the stream (tokens)"
    found: list[Figure] = []
    if series:
        found.append(Chart("memory", "Cache bytes against position", x, "MiB", series))
    if speed:
        found.append(Chart("speed", "Speed against position", x, "tokens/s", speed))
    return found


def _gaps(rows: list[Row]) -> list[Figure]:
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.get("kind") == "gap":
            name = f"{label(row)}, {row['positions']} positions"
            lines[name].append((max(row["gap"], 256), row["nll"]))
    if not lines:
        return []
    series = [Series(name, sorted(points)) for name, points in lines.items()]
    title = "The same text behind a gap (leftmost: no gap)"
    return [Chart("gap", title, "gap (tokens)", "NLL (nats per token)", series, log_x=True)]


def _needles(rows: list[Row]) -> list[Figure]:
    asked = [r for r in rows if "depth" in r and r.get("answer_nll") is not None]
    groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in asked:
        groups[str(row["task"]), row["length"]].append(row)
    found: list[Figure] = []
    for (task, length), part in groups.items():
        depths = sorted({r["depth"] for r in part if r["depth"] is not None})
        arms = list(dict.fromkeys(_arm(r) for r in part))
        if len(depths) < 2:
            continue
        at = {(_arm(r), r["depth"]): r["answer_nll"] for r in part}
        values = [[at.get((arm, d)) for d in depths] for arm in arms]
        where = f"{task}, {length:,} tokens of context"
        names = [f"{d:g}" for d in depths]
        title = f"Answer NLL by depth and policy: {where}"
        heat = Heat(f"needle-{task}-{length}", title, "depth", "policy", names, arms, values)
        series = [Series(a, [(d, at[a, d]) for d in depths if (a, d) in at]) for a in arms]
        title = f"Lost in the middle? Answer NLL over depth: {where}"
        curve = Chart(
            f"depth-{task}-{length}", title, "depth of the needle", "answer NLL (nats)", series
        )
        found += [heat, curve]
    return found


def _arm(row: Row) -> str:
    return label(row) + (" (relevant part only)" if row.get("context") == "relevant" else "")


def _answers(rows: list[Row]) -> list[Figure]:
    series = [
        Series(label(r), [(a["position"], a["answer_nll"]) for a in r["asked"]])
        for r in rows
        if r.get("asked") and "position" in r["asked"][0]
    ]
    x, y = "position in the stream (tokens)", "answer NLL (nats)"
    return [Chart("answers", "Answers along the stream", x, y, series)] if series else []


def _layers(rows: list[Row]) -> list[Figure]:
    series = [
        Series(label(r), list(enumerate(r["attention_mass_layers"])))
        for r in rows
        if r.get("attention_mass_layers")
    ]
    y = "share of full attention"
    title = "Attention mass that lies on what is kept, by layer"
    return [Chart("mass", title, "layer", y, series)] if series else []


def kept_maps(row: Row) -> list[Figure]:
    """Return one map of layers by positions for each time that a row's cache was looked at."""
    kept = row.get("kept_map")
    if not kept or not kept.get("times"):
        return []
    total: int = kept["positions"]
    found: list[Figure] = []
    for moment in kept["times"]:
        bins = len(moment["layers"][0]) if moment["layers"] else 0
        columns: Sequence[str] = [f"{total * i // bins}" for i in range(bins)]
        found.append(
            Heat(
                f"kept-{label(row)}-{moment['seen']}",
                f"Kept tokens, {label(row)}, after {moment['seen']:,} tokens",
                "position",
                "layer",
                list(columns),
                [str(i) for i in kept["layers"]],
                moment["layers"],
                numbers=False,
                limits=(0.0, 1.0),
            )
        )
    return found
