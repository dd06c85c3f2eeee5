"""png: figures as PNG files through matplotlib, the extra `plots`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvevict.errors import KvevictError
from kvevict.eval.figures import Chart, Figure
from kvevict.eval.svg import COLOURS


def write(figures: list[Figure], folder: Path, prefix: str) -> list[Path]:
    """Write every figure to its own file.

    Raises:
        KvevictError: matplotlib is not installed, or the folder cannot be written to.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise KvevictError('PNG needs matplotlib: pip install "kvevict[plots]"') from error
    written = []
    for number, figure in enumerate(figures):
        canvas: Any = Canvas(figsize=(7.2, 4.2), layout="constrained", dpi=150)
        FigureCanvasAgg(canvas)
        axes = canvas.add_subplot()
        axes.set_title(figure.title, fontsize=9, loc="left")
        axes.set_xlabel(figure.x)
        axes.set_ylabel(figure.y)
        _chart(axes, figure) if isinstance(figure, Chart) else _heat(canvas, axes, figure)
        slug = re.sub(r"[^a-z0-9]+", "-", f"{prefix}-{number:02d}-{figure.name}".lower())
        path = folder / f"{slug.strip('-')[:90]}.png"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            canvas.savefig(path, metadata={"Software": None})
        except OSError as error:
            raise KvevictError(f"cannot write {path}: {error.strerror}") from error
        written.append(path)
    return written


def _chart(axes: Any, figure: Chart) -> None:
    for index, series in enumerate(figure.series):
        xs, ys = zip(*series.points, strict=True)
        mark = {"square": "s", "triangle": "^", "diamond": "D"}.get(series.mark, "o")
        style = f"-{mark}" if series.line else mark
        colour = COLOURS[(index if series.colour is None else series.colour) % len(COLOURS)]
        axes.plot(xs, ys, style, color=colour, label=series.name, markersize=3, linewidth=1.4)
    if figure.log_x:
        axes.set_xscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _heat(canvas: Any, axes: Any, figure: Any) -> None:
    low, high = figure.limits or (None, None)
    values = [[float("nan") if v is None else v for v in row] for row in figure.values]
    shown = axes.imshow(values, aspect="auto", cmap="Blues", vmin=low, vmax=high)
    canvas.colorbar(shown)
    if len(figure.columns) <= 16:
        axes.set_xticks(range(len(figure.columns)), figure.columns)
        axes.set_yticks(range(len(figure.rows)), figure.rows, fontsize=7)
