"""Rewrite docs/performance.md's tables from results/*.csv: `python -m benchmarks.performance`.

The text around the tables is kept; each table stands between `<!-- name -->` and `<!-- /name -->`.
"""

import csv
import sys
from pathlib import Path

from benchmarks.common import RESULTS

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
COLUMNS = {
    "decode": ("case", "budget", "dtype", "threads", "cpu_ms", "wall_ms", "ratio"),
    "context": ("case", "dtype", "cpu_ms", "ratio", "bytes_ratio", "cache_bytes"),
    "stream": ("case", "budget", "dtype", "cpu_ms", "tokens_per_cpu_second", "ratio"),
    "scores": ("case", "length", "dtype", "cpu_ms", "ratio", "peak_extra_mib"),
}


def table(name: str) -> str:
    """Return one CSV file as a Markdown table, with where it was measured."""
    file = RESULTS / f"{name}.csv"
    if not file.is_file():
        return "Not measured yet."
    rows = list(csv.DictReader(file.open()))
    columns = [c for c in COLUMNS[name] if any(row.get(c) for row in rows)]
    lines = ["| " + " | ".join(c.replace("_", " ") for c in columns) + " |"]
    lines.append("| " + " | ".join("---" for _ in columns) + " |")
    lines += ["| " + " | ".join(row.get(c) or "" for c in columns) + " |" for row in rows]
    first = rows[0]
    lines.append("")
    lines.append(
        f"{first['machine']}; torch {first['torch']}, transformers {first['transformers']}, commit "
        f"{first['commit']}, {first['date']}, load average {first['load']} at the end."
    )
    return "\n".join(lines)


def rewritten(text: str) -> str:
    """Return the page with the tables of now."""
    for name in COLUMNS:
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, found, rest = text.partition(begin)
        if found:
            text = f"{before}{begin}\n{table(name)}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> int:
    """Rewrite the page, or with --check exit 1 where it differs."""
    text = PAGE.read_text(encoding="utf-8")
    new = rewritten(text)
    if "--check" in sys.argv:
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
