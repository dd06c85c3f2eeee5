"""report: every result below a folder on one page that can be opened anywhere."""

from __future__ import annotations

from pathlib import Path

from kvevict.errors import KvevictError
from kvevict.eval import pages, png
from kvevict.eval.compare_page import load_view
from kvevict.eval.figures import figures
from kvevict.eval.results import RESULT, load_result


def find(folder: Path) -> list[Path]:
    """Return the results in a folder and in the folders below it.

    Raises:
        KvevictError: there are none.
    """
    if not folder.is_dir():
        raise KvevictError(f"{folder} is no folder: give one that `kvevict eval ... --out` wrote")
    found = sorted(folder.rglob(RESULT))
    if not found:
        raise KvevictError(
            f"{folder} holds no {RESULT}: give a folder that `kvevict eval ... --out` wrote; a "
            "stopped run gets its result when it is finished with --resume"
        )
    return found


def run(folder: Path, out: Path | None = None, with_png: bool = False) -> list[Path]:
    """Write the page, and PNG files of its figures where wanted.

    Args:
        folder: with results in it or below it.
        out: the page; None: report.html in the folder.
        with_png: also write every figure as PNG, to figures/ beside the page.

    Returns:
        The files written, the page first.

    Raises:
        KvevictError: no results, a damaged or newer one, or matplotlib is missing.
    """
    results = {path: load_result(path) for path in find(folder)}
    page = out or folder / "report.html"
    parts = [
        pages.part(
            whole,
            _title(path, folder, whole),
            view=load_view(path.parent) if whole["command"] == "compare" else None,
        )
        for path, whole in results.items()
    ]
    lead = f"{len(parts)} result{'s' if len(parts) > 1 else ''} of kvevict."
    pages.write_page(page, f"kvevict: {folder.resolve().name}", lead, parts)
    written = [page]
    if with_png:
        for path, whole in results.items():
            drawn = figures(whole["command"], whole["rows"])
            written += png.write(drawn, page.parent / "figures", path.parent.name)
    return written


def _title(path: Path, folder: Path, whole: dict[str, object]) -> str:
    place = path.parent.relative_to(folder).as_posix()
    return f"{whole['command']}" + (f": {place}" if place != "." else "")
