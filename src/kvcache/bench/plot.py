"""One picture of `kvcache bench attention`, written as SVG by hand: three panels.

    roofline    each decode and prefill case under the machine's two limits: bytes per second, products per second
    context     bytes per second of one sequence from short to long, with the stream limit
    batch       the same for more and more sequences

Colours are readable on light and on dark pages, and the background is the page's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import floor, log2, log10
from typing import NamedTuple
from xml.sax.saxutils import escape

from kvcache.bench.table import Cell, Table

__all__ = ["plot"]

INK, FAINT = "#7d8590", "#7d859055"
COLOURS = ("#2f81f7", "#e3792b", "#2da44e", "#bf5fd0", "#c9a227", "#d1495b", "#1aa6a6", "#9a7b5f")
WIDTH, HEIGHT = 300.0, 240.0  # of a panel's axes
LEFT, TOP, GAP = 58.0, 62.0, 78.0
LEGEND = 66.0
RADIUS = 3.5


class _Point(NamedTuple):
    x: float
    y: float
    name: str


class _Line(NamedTuple):
    """A contender's points. `joined`: by a line."""

    name: str
    points: Sequence[tuple[float, float]]
    joined: bool


class _Axis(NamedTuple):
    """Where values lie on an axis of length 1, and which are labelled."""

    label: str
    place: Callable[[float], float]
    ticks: Sequence[tuple[float, str]]


def plot(tables: Iterable[Table], *, machine: str) -> str:
    """The SVG of the tables that `bench.attention` gives. Raises `ValueError` when they are not there."""
    by_title = {table.title: table for table in tables}
    limits = _find(by_title, "Limits")
    bandwidth = max(_numbers(_column(limits, "GB/s")))
    peak = max(_numbers(_column(limits, "GFLOP/s")))
    cases = [_find(by_title, "Decode"), _find(by_title, "Prefill")]
    contexts, batches = _find(by_title, "Scaling with context"), _find(by_title, "Scaling with batch")
    roofline = _intensities(cases)
    names = list(dict.fromkeys([*(line.name for line in roofline), *_names(contexts), *_names(batches)]))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    body = [
        _text(LEFT, 20, f"Attention over the cache: {machine}", size=13, weight="600"),
        *_legend(colours),
        *_roofline(roofline, bandwidth, peak, colours, LEFT),
        *_scaling(contexts, "tokens of one sequence", bandwidth, colours, LEFT + WIDTH + GAP),
        *_scaling(batches, "sequences", bandwidth, colours, LEFT + 2 * (WIDTH + GAP)),
    ]
    width, height = LEFT + 3 * WIDTH + 2 * GAP + 20, TOP + HEIGHT + LEGEND
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    font = f'font-family="system-ui, sans-serif" font-size="11" fill="{INK}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>', *body, "</svg>\n"])


# --- what the tables say ----------------------------------------------------------------------------------------------


def _find(by_title: dict[str, Table], beginning: str) -> Table:
    for title, table in by_title.items():
        if title.startswith(beginning):
            return table
    raise ValueError(f"no table begins with {beginning!r}; expected those of `kvcache bench attention`: {[*by_title]}")


def _column(table: Table, name: str) -> list[Cell]:
    index = table.columns.index(name)
    return [row[index] for row in table.rows]


def _numbers(cells: Iterable[Cell]) -> list[float]:
    return [float(cell) for cell in cells if isinstance(cell, (int, float))]


def _names(table: Table) -> list[str]:
    return list(dict.fromkeys(str(name) for name in _column(table, "contender")))


def _points(table: Table, x: str, y: str) -> list[_Point]:
    columns = (_column(table, x), _column(table, y), _column(table, "contender"))
    return [
        _Point(float(a), float(b), str(name))
        for a, b, name in zip(*columns, strict=True)
        if isinstance(a, (int, float)) and isinstance(b, (int, float))
    ]


def _intensities(tables: Sequence[Table]) -> list[_Line]:
    """For each contender the products per byte of each case, and its products per second."""
    found: dict[str, list[tuple[float, float]]] = {}
    for table in tables:
        for speed, flops, name in _points(table, "GB/s", "GFLOP/s"):
            found.setdefault(name, []).append((flops / speed, flops))
    return [_Line(name, points, joined=False) for name, points in found.items()]


# --- panels -----------------------------------------------------------------------------------------------------------


def _roofline(lines: Sequence[_Line], bandwidth: float, peak: float, colours: dict[str, str], left: float) -> list[str]:
    every = [point for line in lines for point in line.points]
    xs = [x for x, _ in every] + [peak / bandwidth]
    ys = [y for _, y in every] + [peak]
    x_axis = _logarithmic("products per byte (FLOP/B)", min(xs) / 2, max(xs) * 2)
    y_axis = _logarithmic("GFLOP/s", min(ys) / 2, max(ys) * 2)
    low, high = min(xs) / 2, max(xs) * 2
    roof = [(low, low * bandwidth), (peak / bandwidth, peak), (high, peak)]
    limit = _Line(f"limits: {bandwidth:.1f} GB/s, {peak:.0f} GFLOP/s", roof, joined=True)
    # Decode reads each token for one query, prefill for many: nothing lies between.
    groups = [("decode", min(x for x, _ in every)), ("prefill", max(x for x, _ in every))]
    marks = [_text(left + WIDTH * x_axis.place(x), TOP + HEIGHT - 6, name, anchor="middle") for name, x in groups]
    return _panel("Roofline", x_axis, y_axis, lines, colours, left, limit) + marks


def _scaling(table: Table, label: str, bandwidth: float, colours: dict[str, str], left: float) -> list[str]:
    lines = [
        _Line(name, [(x, y) for x, y, n in _points(table, table.columns[0], "GB/s") if n == name], joined=True)
        for name in _names(table)
    ]
    xs = [x for line in lines for x, _ in line.points]
    top = 1.15 * max([bandwidth, *(y for line in lines for _, y in line.points)])
    step = 10.0 ** floor(log10(top))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if top / s <= 8)
    x_axis = _doubling(label, min(xs), max(xs))
    y_axis = _Axis("GB/s", lambda y: y / top, [(i * step, f"{i * step:g}") for i in range(int(top / step) + 1)])
    limit = _Line(f"stream limit: {bandwidth:.1f} GB/s", [(min(xs), bandwidth), (max(xs), bandwidth)], joined=True)
    return _panel(
        "Scaling with " + ("context" if "token" in label else "batch"), x_axis, y_axis, lines, colours, left, limit
    )


def _logarithmic(label: str, low: float, high: float) -> _Axis:
    span = log10(high) - log10(low)
    ticks = [(10.0**e, f"{10.0**e:g}") for e in range(floor(log10(low)) + 1, floor(log10(high)) + 1)]
    return _Axis(label, lambda value: (log10(max(value, low)) - log10(low)) / span, ticks)


def _doubling(label: str, low: float, high: float) -> _Axis:
    span = max(log2(high / low), 1.0)
    count = int(span) + 1
    values = [low * 2.0**i for i in range(0, count, 1 if count <= 8 else 2)]
    ticks = [(v, f"{v / 1024:g}k" if v >= 1024 and v % 1024 == 0 else f"{v:g}") for v in values]
    return _Axis(label, lambda value: 0.04 + 0.92 * log2(value / low) / span, ticks)


def _panel(
    title: str,
    x_axis: _Axis,
    y_axis: _Axis,
    lines: Sequence[_Line],
    colours: dict[str, str],
    left: float,
    limit: _Line,
) -> list[str]:
    def at(x: float, y: float) -> tuple[float, float]:
        return left + WIDTH * x_axis.place(x), TOP + HEIGHT * (1 - y_axis.place(y))

    bottom = TOP + HEIGHT
    parts = [_text(left, TOP - 12, f"{title}, {y_axis.label}", size=12, weight="600")]
    for value, name in x_axis.ticks:
        x, _ = at(value, limit.points[0][1])
        parts += [_segment([(x, TOP), (x, bottom)], FAINT), _text(x, bottom + 15, name, anchor="middle")]
    for value, name in y_axis.ticks:
        y = TOP + HEIGHT * (1 - y_axis.place(value))
        parts += [_segment([(left, y), (left + WIDTH, y)], FAINT), _text(left - 6, y + 4, name, anchor="end")]
    parts.append(_text(left + WIDTH / 2, bottom + 32, x_axis.label, anchor="middle"))
    places = [at(*point) for point in limit.points]
    parts.append(_segment(places, INK, dash="5 4", width=1.5))
    parts.append(_text(left + WIDTH - 4, places[-1][1] - 6, limit.name, anchor="end"))
    for line in reversed(lines):  # the first, ours, on top
        places = [at(*point) for point in line.points]
        if line.joined:
            parts.append(_segment(places, colours[line.name], width=1.8))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" fill="{colours[line.name]}"/>' for x, y in places]
    return parts


def _legend(colours: dict[str, str]) -> list[str]:
    parts, x, y = [], LEFT, TOP + HEIGHT + LEGEND - 14
    for name, colour in colours.items():
        parts += [f'<circle cx="{x + 4:.1f}" cy="{y - 4:.1f}" r="{RADIUS}" fill="{colour}"/>', _text(x + 13, y, name)]
        x += 34 + 6.2 * len(name)
    return parts


def _segment(places: Sequence[tuple[float, float]], colour: str, *, width: float = 1.0, dash: str = "") -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, weight: str = "400") -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
