"""pages: results as one self-contained HTML page; every value is escaped, nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kvevict.eval.compare_page import embedded, script_source
from kvevict.eval.compare_script import SCRIPT
from kvevict.eval.compare_style import STYLE
from kvevict.eval.figures import Figure, Heat, figures, label
from kvevict.eval.page_template import TEMPLATE
from kvevict.eval.results import write_text
from kvevict.eval.svg import draw

Row = dict[str, Any]
_COLUMNS = (
    "task",
    "length",
    "depth",
    "context",
    "policy",
    "budget",
    "position",
    "gap",
    "positions",
    "nll",
    "perplexity",
    "nll_evicting",
    "perplexity_evicting",
    "stream_nll",
    "fresh_nll",
    "nll_delta",
    "kl",
    "top1_agreement",
    "attention_mass",
    "exact_match",
    "answer_nll",
    "answer_rank",
    "string_match",
    "distance_tokens",
    "prompt_nll",
    "distinct_4grams",
    "ended",
    "tokens_scored",
    "kept_tokens",
    "cache_bytes",
    "chunk",
    "evict_every",
    "backend",
    "bos",
    "departures",
    "tokens_per_second",
)
# A comparison has measures of its own, and an order that sets cost beside loss.
_COMPARE = (
    "policy",
    "level",
    "realisation",
    "budget",
    "nll",
    "nll_delta",
    "kl",
    "top1_agreement",
    "fact_nll",
    "fact_exact",
    "kept_tokens",
    "kept_share",
    "mass_kept",
    "recomputed_tokens",
    "prompt_cost",
    "fits",
    "seconds",
)


@dataclass(frozen=True)
class Column:
    """A column of a table: its title, and "words" or "number"."""

    title: str
    kind: str


@dataclass(frozen=True)
class Table:
    """A table, its cells as they are shown."""

    title: str
    columns: list[Column]
    rows: list[list[str]]


@dataclass(frozen=True)
class Part:
    """One result on a page."""

    title: str
    note: str
    tables: list[Table]
    figures: list[dict[str, Any]]
    maps: list[dict[str, Any]]
    facts: list[tuple[str, str]]
    panes: str = ""
    panes_title: str = ""
    figures_first: bool = False


def part(
    whole: dict[str, Any],
    title: str,
    columns: Sequence[str] = (),
    view: dict[str, Any] | None = None,
) -> Part:
    """Return a result as a part of a page.

    Args:
        whole: with `command`, `config`, `versions` and `rows`, as `--json` prints them.
        title: heading.
        columns: of the table; none: all known measures that the rows have.
        view: of a comparison, shown as two panes.
    """
    command, rows = str(whole.get("command", "")).removeprefix("eval "), whole.get("rows", [])
    drawn = figures(command, rows)
    compared = command == "compare"
    columns = columns or (_COMPARE if compared else ())
    config = whole.get("config", {})
    facts = [("command", command)]
    facts += [(f"config.{k}", str(v)) for k, v in config.items()]
    facts += [(f"versions.{k}", str(v)) for k, v in whole.get("versions", {}).items()]
    if whole.get("hardware"):
        facts.append(("hardware", str(whole["hardware"])))
    kinds = list(dict.fromkeys(row.get("kind", "") for row in rows))
    grouped = {k: [r for r in rows if r.get("kind", "") == k] for k in kinds}
    return Part(
        title,
        note(config, whole.get("versions", {})),
        [table(part, k.replace("_", " "), columns) for k, part in grouped.items()],
        _drawn([f for f in drawn if not _is_map(f)]),
        _drawn([f for f in drawn if _is_map(f)]),
        facts,
        embedded(view) if view else "",
        view["title"] if view else "",
        figures_first=compared,
    )


def note(config: dict[str, Any], versions: dict[str, Any]) -> str:
    """Return model, precision, chunk, seed and commit in one line."""
    names = ("model", "dtype", "device", "chunk", "positions", "evict_every", "seed")
    said = [f"{n} {config[n]}" for n in names if config.get(n) is not None]
    texts = [t.get("name", "?") for t in config.get("texts", []) if isinstance(t, dict)]
    if texts:
        said.append("text " + ", ".join(texts))
    if versions.get("commit"):
        said.append(f"commit {versions['commit']}")
    return "; ".join(said)


def table(rows: list[Row], title: str = "", columns: Sequence[str] = ()) -> Table:
    """Return rows as a table; columns without a value anywhere are left out."""
    names = [c for c in columns or _COLUMNS if any(r.get(c) not in (None, {}) for r in rows)]
    kinds = [_kind([r.get(n) for r in rows]) for n in names]
    heads = [Column(n.replace("_", " "), k) for n, k in zip(names, kinds, strict=True)]
    return Table(title, heads, [[_cell(r, n) for n in names] for r in rows])


def _cell(row: Row, name: str) -> str:
    """Return a row's cell, with its 95% interval where it has one."""
    if name == "policy":
        return label(row)
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    if low is None or high is None or row.get(name) is None:
        return cell(row.get(name))
    return f"{cell(row[name])} [{cell(low)}, {cell(high)}]"


def cell(value: Any) -> str:
    """Return a value as a table shows it."""
    if value is None or value == {}:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return str(value)


def table_page(path: Path, title: str, whole: dict[str, Any], columns: Sequence[str] = ()) -> None:
    """Write one result as a page of its own; arguments as for `part`."""
    write_page(path, title, "One result.", [part(whole, str(whole.get("command", "")), columns)])


def write_page(path: Path, title: str, lead: str, parts: list[Part]) -> None:
    """Write a page in one step.

    Raises:
        KvevictError: the folder cannot be written to.
    """
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    panes = any(p.panes for p in parts)
    text = page.from_string(TEMPLATE).render(
        title=title,
        lead=lead,
        parts=parts,
        style=Markup(STYLE if panes else ""),
        script=Markup(SCRIPT if panes else ""),
        script_source=Markup(script_source()),
    )
    write_text(path, text)


def _drawn(found: list[Figure]) -> list[dict[str, Any]]:
    pictures = [{"title": f.title, "svg": draw(f)} for f in found]
    return [p for p in pictures if p["svg"]]


def _is_map(figure: Figure) -> bool:
    return isinstance(figure, Heat) and not figure.numbers


def _kind(values: list[Any]) -> str:
    numbers = all(isinstance(v, int | float) or v is None for v in values)
    return "number" if numbers else "words"
