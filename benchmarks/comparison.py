"""Keep runs of `kvevict compare` and rewrite docs/comparison.md: `python -m benchmarks.comparison`.

Given run folders, their rows are first written to results/comparison.csv. The page's text is kept;
each table stands between `<!-- name -->` and `<!-- /name -->`.
"""

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS
from kvevict.eval.results import load_result

PAGE = Path(__file__).parent.parent / "docs" / "comparison.md"
FILE = RESULTS / "comparison.csv"
Row = dict[str, str]
MEASURES = ("nll", "nll_delta", "nll_delta_low", "nll_delta_high", "kl", "top1_agreement")
MEASURES += ("fact_nll", "fact_exact", "budget_tokens", "kept_tokens", "kept_share", "mass_kept")
MEASURES += ("mass_bound", "recomputed_tokens", "prompt_cost", "fits", "turns", "tokens_scored")
TURN = ("turn", "context_tokens", "floor_tokens", "groups", "style", "facts_planted")
TURN += ("oracle_sum", "oracle_density", "oracle_topk", "oracle_size", "oracle_recency")
KEY = ("trajectory", "kind", "policy", "level", "realisation", "budget")
BY = ("fact_nll_by_carrier", "fact_nll_by_depth")
MACHINE = ("machine", "torch", "transformers", "commit")
COLUMNS = (*KEY, *MEASURES, *BY, *TURN, "run_seconds", *MACHINE)
SHOWN_BUDGET = "0.5"
SHOWN = ("message_recent", "message_sum", "message_density", "oracle", "mask_last_m", "codex")


def keep(folders: Iterable[Path]) -> None:
    """Write the rows of runs to the CSV file; a trajectory that is there already is replaced."""
    rows = read() if FILE.is_file() else []
    for folder in folders:
        whole = load_result(folder / "result.json")
        name = str(whole["config"]["trajectory"])
        versions = whole["versions"]
        common = {"trajectory": name, "machine": whole["hardware"]}
        common |= {k: versions[k] for k in ("torch", "transformers", "commit")}
        rows = [r for r in rows if r["trajectory"] != name]
        rows += [{c: _text((row | common).get(c)) for c in COLUMNS} for row in whole["rows"]]
    with FILE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.5g}"
    return json.dumps(value) if isinstance(value, dict) else str(value)


def read() -> list[Row]:
    """Return the rows of the CSV file."""
    with FILE.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def number(row: Row, name: str, digits: int = 3, sign: bool = False) -> str:
    """Return a cell."""
    if not row.get(name):
        return "-"
    return f"{float(row[name]):{'+' if sign else ''},.{digits}f}"


def runs(rows: list[Row]) -> str:
    """Turns, their contexts, and how well cheap scores agree with the oracle."""
    heads = ["trajectory", "turn", "context", "roots", "groups that may go"]
    heads += [f"rank correlation: {k}" for k in ("attention", "per token", "size", "recency")]
    found = []
    for row in (r for r in rows if r["kind"] == "turn"):
        cells = [row["trajectory"], row["turn"], number(row, "context_tokens", 0)]
        cells += [number(row, "floor_tokens", 0), row["groups"]]
        names = ("oracle_sum", "oracle_density", "oracle_size", "oracle_recency")
        found.append([*cells, *(number(row, n, 2, sign=True) for n in names)])
    return markdown(heads, found)


def comparison(rows: list[Row], trajectory: str, budget: str) -> str:
    """All rows of one trajectory at one budget."""
    heads = ["policy", "by", "NLL - full", "95 %", "KL", "top-1", "fact NLL", "facts right"]
    heads += ["tokens", "mass", "recomputed", "input $ / 1,000"]
    found = []
    for row in rows:
        if row["kind"] != "comparison" or row["trajectory"] != trajectory:
            continue
        if row["budget"] not in ("", budget):
            continue
        name = row["policy"] + ("" if row["fits"] == "True" else " (over budget)")
        low, high = number(row, "nll_delta_low", 2, True), number(row, "nll_delta_high", 2, True)
        found.append(
            [
                *(name, row["realisation"], number(row, "nll_delta", 3, True)),
                *(f"{low} to {high}", number(row, "kl"), number(row, "top1_agreement", 2)),
                *(number(row, "fact_nll", 2), number(row, "fact_exact", 2)),
                *(number(row, "kept_tokens", 0), number(row, "mass_kept", 2)),
                *(number(row, "recomputed_tokens", 0), number(row, "prompt_cost", 2)),
            ]
        )
    return markdown(heads, found)


def granularity(rows: list[Row]) -> str:
    """What whole messages cost: attention mass below the bound, and loss above tokens'."""
    heads = ["trajectory", "budget", "mass: messages", "bound (P3)", "mass: H2O"]
    heads += ["NLL - full: messages", "H2O", "roots only"]
    found = []
    for name in trajectories(rows):
        for budget in budgets(rows, name):
            here = {
                r["policy"]: r
                for r in rows
                if (r["trajectory"], r["realisation"], r["budget"]) == (name, "kv", budget)
            }
            if not here.keys() >= {"message_sum", "h2o", "roots_only"}:
                continue  # run without them
            whole, token, roots = (here[p] for p in ("message_sum", "h2o", "roots_only"))
            found.append(
                [
                    *(name, budget, number(whole, "mass_kept"), number(whole, "mass_bound")),
                    *(number(token, "mass_kept"), number(whole, "nll_delta", 3, True)),
                    *(number(token, "nll_delta", 3, True), number(roots, "nll_delta", 3, True)),
                ]
            )
    return markdown(heads, found)


def realisations(rows: list[Row]) -> str:
    """Mean loss over message policies, by realisation; and what it computed again."""
    heads = ["trajectory", "NLL - full: text", "kv", "kv_reindex", "fact NLL: text", "kv"]
    heads += ["kv_reindex", "recomputed: text", "kv", "kv_reindex"]
    found = []
    for name in trajectories(rows):
        level = [r for r in rows if r["trajectory"] == name and r["level"] == "message"]
        cells = [name]
        for measure, digits in (("nll_delta", 3), ("fact_nll", 2), ("recomputed_tokens", 0)):
            for how in ("text", "kv", "kv_reindex"):
                values = [
                    float(r[measure]) for r in level if r["realisation"] == how and r[measure]
                ]
                cells.append(f"{sum(values) / len(values):,.{digits}f}" if values else "-")
        found.append(cells)
    return markdown(heads, found)


def carriers(rows: list[Row]) -> str:
    """Loss of planted facts by where they stood."""
    names = ("system", "user", "tool result", "tool arguments")
    heads = ["trajectory", "policy", "by", *names]
    found = []
    for row in rows:
        if row["budget"] not in ("", SHOWN_BUDGET) or not row["fact_nll_by_carrier"]:
            continue
        shown = row["level"] != "message" or row["policy"] in SHOWN
        if not shown or row["realisation"] == "kv_reindex":
            continue
        by = json.loads(row["fact_nll_by_carrier"])
        cells = [f"{by[n]:.2f}" if n in by else "-" for n in names]
        found.append([row["trajectory"], row["policy"], row["realisation"], *cells])
    return markdown(heads, found)


def trajectories(rows: list[Row]) -> list[str]:
    """Return the names of the trajectories."""
    return list(dict.fromkeys(r["trajectory"] for r in rows))


def budgets(rows: list[Row], trajectory: str) -> list[str]:
    """Return the budgets of a trajectory's run."""
    own = (r["budget"] for r in rows if r["trajectory"] == trajectory and r["budget"])
    return list(dict.fromkeys(own))


def tables(rows: list[Row]) -> dict[str, str]:
    """Return every table by the name of its marks."""
    found = {"runs": runs(rows), "granularity": granularity(rows)}
    found |= {"realisations": realisations(rows), "carriers": carriers(rows)}
    found |= {name: comparison(rows, name, SHOWN_BUDGET) for name in trajectories(rows)}
    first = rows[0]
    found["machine"] = (
        f"{first['machine']}; torch {first['torch']}, transformers {first['transformers']}, "
        f"commit {', '.join(dict.fromkeys(r['commit'] for r in rows))}."
    )
    return found


def rewritten(text: str, found: dict[str, str]) -> str:
    """Return the page with the tables of now."""
    for name, table in found.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, mark, rest = text.partition(begin)
        if mark:
            text = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> int:
    """Keep the runs that are named and rewrite the page."""
    folders = [Path(a) for a in sys.argv[1:]]
    if folders:
        keep(folders)
    PAGE.write_text(rewritten(PAGE.read_text("utf-8"), tables(read())), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
