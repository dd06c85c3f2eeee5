"""svg: figures as inline SVG, every text escaped, nothing fetched."""

from __future__ import annotations

import base64
import math
import struct
import zlib

from markupsafe import Markup, escape

from kvevict.eval.figures import Chart, Figure, Heat, Series

COLOURS = ("#1f6fb4", "#d1495b", "#2e8b57", "#8a5cb8", "#c77d0a", "#3f7f93", "#7a7a7a", "#b23a9a")
_W, _H = 680, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 44


def draw(figure: Figure) -> Markup:
    """Return a figure as an SVG element."""
    return chart(figure) if isinstance(figure, Chart) else heat(figure)


def chart(figure: Chart) -> Markup:
    """Return lines over two axes, with a legend below."""
    xs = [x for s in figure.series for x, _ in s.points]
    ys = [y for s in figure.series for _, y in s.points if math.isfinite(y)]
    lines = [s for s in figure.series if s.line]
    if not ys or (lines == figure.series and max(len(s.points) for s in lines) < 2):
        return Markup("")
    if figure.log_x:
        to_x = _scale(math.log(min(xs)), math.log(max(xs)), _LEFT, _W - _RIGHT)
    else:
        to_x = _scale(min(xs), max(xs), _LEFT, _W - _RIGHT)
    low, high = _padded(min(ys), max(ys))
    to_y = _scale(low, high, _H - _BOTTOM, _TOP)
    at_x = (lambda x: to_x(math.log(x))) if figure.log_x else to_x
    out = [_frame(figure, len(figure.series))]
    for tick in ticks(low, high):
        y = to_y(tick)
        out.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        out.append(_text(_LEFT - 6, y + 4, _number(tick), "end"))
    marks = sorted(set(xs)) if figure.log_x else ticks(min(xs), max(xs))
    last = -math.inf
    for tick in marks:
        x = at_x(tick)
        if x - last > 46:
            out.append(_text(x, _H - _BOTTOM + 16, _number(tick), "middle"))
            last = x
    named: list[tuple[float, float, str]] = []
    for index, series in enumerate(figure.series):
        colour = _colour(series, index)
        at = [(at_x(x), to_y(y)) for x, y in series.points if math.isfinite(y)]
        if series.line and len(at) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
            out.append(
                f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{path}"/>'
            )
        if len(at) <= 40 or not series.line:
            finite = [p for p in series.points if math.isfinite(p[1])]
            names = series.names or [series.name] * len(at)
            for (x, y), (px, py), name in zip(at, finite, names, strict=True):
                known = f"{name} ({series.name})" if series.names else name
                note = f"{known}: {_number(px)}, {py:.4g}"
                out.append(_mark(series.mark, x, y, colour, note))
            named += [(x, y, name) for (x, y), name in zip(at, series.names, strict=False)]
        y = _H + 14 + 18 * index
        if series.line:
            out.append(f'<rect x="{_LEFT}" y="{y - 9}" width="14" height="4" fill="{colour}"/>')
        else:
            out.append(_mark(series.mark, _LEFT + 7, y - 7, colour, series.name))
        out.append(_text(_LEFT + 20, y - 3, series.name, "start"))
    out += _tags(named)
    return Markup("".join(out) + "</svg>")


def _colour(series: Series, index: int) -> str:
    return COLOURS[(index if series.colour is None else series.colour) % len(COLOURS)]


def _mark(kind: str, x: float, y: float, colour: str, note: str) -> str:
    """Return a point of a chart, with a text that shows when it is pointed at."""
    shapes = {
        "square": ((-3, -3), (3, -3), (3, 3), (-3, 3)),
        "triangle": ((0, -4), (4, 3), (-4, 3)),
        "diamond": ((0, -4.5), (4.5, 0), (0, 4.5), (-4.5, 0)),
    }
    inside = f'fill="{colour}"><title>{escape(note)}</title>'
    if kind not in shapes:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" {inside}</circle>'
    path = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in shapes[kind])
    return f'<polygon points="{path}" {inside}</polygon>'


def _tags(named: list[tuple[float, float, str]]) -> list[str]:
    """Return names beside points, the lowest points first, where they cover nothing."""
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y, _ in named]
    out = []
    for x, y, name in sorted(named, key=lambda n: (-n[1], n[0], n[2])):
        wide = 5.4 * len(name)
        for left, top in ((x + 6, y - 5), (x - 6 - wide, y - 5), (x + 3, y - 14), (x + 3, y + 5)):
            box = left, top, left + wide, top + 10
            inside = left > _LEFT and box[2] < _W - _RIGHT and box[3] < _H - _BOTTOM and top > 0
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                out.append(
                    f'<text class="tag" x="{left:.1f}" y="{top + 8:.1f}">{escape(name)}</text>'
                )
                break
    return out


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _frame(figure: Chart, entries: int) -> str:
    height = _H + 12 + 18 * entries
    return (
        f'<svg viewBox="0 0 {_W} {height}" role="img" aria-label="{escape(figure.title)}">'
        + f'<line class="axis" x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{_H - _BOTTOM}" '
        + f'y2="{_H - _BOTTOM}"/>'
        + _text((_LEFT + _W) / 2, _H - 8, figure.x, "middle")
        + f'<text transform="translate(13 {(_H - _BOTTOM) / 2}) rotate(-90)" '
        + f'text-anchor="middle">{escape(figure.y)}</text>'
    )


def heat(figure: Heat) -> Markup:
    """Return a grid of colours: cells with numbers, or one small image for many cells."""
    flat = [v for row in figure.values for v in row if v is not None]
    if not flat:
        return Markup("")
    low, high = figure.limits or (min(flat), max(flat))
    return _grid(figure, low, high) if figure.numbers else _image(figure, low, high)


def _grid(figure: Heat, low: float, high: float) -> Markup:
    left = 12 + 6.4 * max(len(r) for r in figure.rows)
    wide = max(46.0, (_W - left - _RIGHT) / len(figure.columns))
    height = 26 * len(figure.rows) + 48
    width = left + wide * len(figure.columns) + _RIGHT
    out = [
        f'<svg viewBox="0 0 {width:.0f} {height}" role="img" aria-label="{escape(figure.title)}">'
    ]
    for i, name in enumerate(figure.rows):
        out.append(_text(left - 8, 26 * i + 22, name, "end"))
        for j, value in enumerate(figure.values[i]):
            if value is None:
                continue
            share = (value - low) / (high - low) if high > low else 0.0
            colour, ink = _shade(share)
            x, y = left + wide * j, 26 * i + 4
            note = escape(f"{name}, {figure.x} {figure.columns[j]}: {value:.4g}")
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide - 2:.1f}" height="24" fill="{colour}">'
                f"<title>{note}</title></rect>"
                f'<text x="{x + wide / 2 - 1:.1f}" y="{y + 16}" text-anchor="middle" '
                f'style="fill:{ink}">{value:.2f}</text>'
            )
    for j, name in enumerate(figure.columns):
        out.append(_text(left + wide * (j + 0.5), height - 28, name, "middle"))
    out.append(_text(left + wide * len(figure.columns) / 2, height - 8, figure.x, "middle"))
    return Markup("".join(out) + "</svg>")


def _image(figure: Heat, low: float, high: float) -> Markup:
    span = high - low or 1.0
    pixels = [[round(255 * (1 - ((v or 0.0) - low) / span)) for v in row] for row in figure.values]
    data = base64.b64encode(png_bytes(pixels)).decode()
    tall = max(60, 3 * len(pixels))
    out = [
        f'<svg class="small" viewBox="0 0 330 {tall + 40}" role="img" '
        f'aria-label="{escape(figure.title)}">',
        f'<image x="34" y="4" width="290" height="{tall}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{data}"/>',
        f'<rect x="34" y="4" width="290" height="{tall}" fill="none" class="axis"/>',
        _text(30, 14, figure.rows[0], "end"),
        _text(30, tall + 2, figure.rows[-1], "end"),
        _text(34, tall + 18, figure.columns[0], "start"),
        _text(324, tall + 18, figure.columns[-1], "end"),
        _text(179, tall + 34, f"{figure.y} by {figure.x}; dark: kept", "middle"),
    ]
    return Markup("".join(out) + "</svg>")


def png_bytes(pixels: list[list[int]]) -> bytes:
    """Return a grey-scale PNG of rows of values 0 (black) to 255."""

    def part(kind: bytes, body: bytes) -> bytes:
        check = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)

    size = struct.pack(">IIBBBBB", len(pixels[0]), len(pixels), 8, 0, 0, 0, 0)
    raw = b"".join(b"\0" + bytes(min(255, max(0, p)) for p in row) for row in pixels)
    body = part(b"IHDR", size) + part(b"IDAT", zlib.compress(raw, 9)) + part(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def ticks(low: float, high: float) -> list[float]:
    """Return some four round numbers between two values."""
    if high <= low:
        return [low]
    rough = (high - low) / 4
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough)
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _padded(low: float, high: float) -> tuple[float, float]:
    room = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    return low - room, high + room


class _Scale:
    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._span = low, (high - low) or 1.0
        self._start, self._size = start, end - start

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) / self._span * self._size


_scale = _Scale


def _shade(share: float) -> tuple[str, str]:
    """Return a colour from pale (0) to deep (1), and the ink that can be read on it."""
    pale, deep = (235, 242, 250), (20, 70, 130)
    mixed = [round(a + (b - a) * share) for a, b in zip(pale, deep, strict=True)]
    return f"rgb({mixed[0]},{mixed[1]},{mixed[2]})", "#fff" if share > 0.55 else "#222"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _number(value: float) -> str:
    if abs(value) >= 10_000:
        for unit, name in ((1e6, "M"), (1e3, "k")):
            if abs(value) >= unit:
                return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"
