"""The report command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvevict import console
from kvevict.eval.options import Json, Seed

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="With results in it or below it.")],
    out: Annotated[Path | None, typer.Option(help="The page; report.html there if none.")] = None,
    png: Annotated[bool, typer.Option("--png", help="Every figure as PNG too.")] = False,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Write one self-contained HTML page from a folder of results."""
    from kvevict.eval.report import run

    written = run(folder, out, png)
    if json:
        rows = [{"file": str(p), "bytes": p.stat().st_size} for p in written]
        console.emit("report", {"folder": str(folder), "png": png, "seed": seed}, rows)
        return
    typer.echo(f"Page: {written[0]}")
    for path in written[1:]:
        typer.echo(f"PNG: {path}")


if __name__ == "__main__":
    console.run(app)
