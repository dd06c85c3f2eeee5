"""Rewrite the README's policy table from the registry: `python -m benchmarks.readme [--check]`."""

import sys
from pathlib import Path

from kvevict.cli import policy_rows

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- policies: written by `python -m benchmarks.readme` -->", "<!-- /policies -->"


def table() -> str:
    """Return the policy table in Markdown."""
    lines = ["| policy and defaults | keeps | source |", "| --- | --- | --- |"]
    lines += [f"| `{row['policy']}` | {row['keeps']} | {row['source']} |" for row in policy_rows()]
    return "\n".join(lines)


def rewritten(text: str) -> str:
    """Return the README with the table of now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    """Rewrite the file, or with --check exit 1 where it differs."""
    text = README.read_text(encoding="utf-8")
    new = rewritten(text)
    if "--check" in sys.argv:
        return int(new != text)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
