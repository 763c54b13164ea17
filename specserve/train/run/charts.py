"""Geometry of the report's line charts: numbers in, SVG coordinates and tick labels out. The template draws them and
chooses the colours."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

WIDTH, HEIGHT = 360, 216  # of a chart, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 24  # margins, the left one at least
LETTER, GAP = 6.6, 6  # width of the widest digit of a label, and from the label to the chart
MAX_POINTS = 240  # of a drawn line; more of them are averaged in groups
MAX_SHOWN = 40  # rows of the table of values, and points of a line that are marked

Point = tuple[float, float]
Tick = tuple[float, str]  # where it stands, in SVG units, and its label


@dataclass(frozen=True)
class ChartLine:
    """A line to draw. Points that are not finite are left out."""

    name: str
    points: Sequence[Point]
    is_dotted: bool = False  # its points are measurements, which are marked where they are few
    is_dashed: bool = False  # it is a forecast, which is drawn but stands in no table


@dataclass(frozen=True)
class Line:
    """A series as SVG paths."""

    name: str
    kind: str  # solid or dashed
    shade: float  # 0 for the first line, 1 for the last
    path: str
    dots: str  # the marked points, as lines without length


@dataclass(frozen=True)
class Chart:
    """The parts of a chart that the template draws, and the same values as a table."""

    title: str
    note: str
    x_name: str
    lines: list[Line]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    left: float  # margin, in which the widest label fits
    band: str  # an SVG polygon's points
    columns: list[str]
    rows: list[list[str]]


def line_chart(
    title: str,
    x_name: str,
    series: Sequence[ChartLine],
    *,
    band: Sequence[tuple[float, float, float]] = (),  # x, low, high
    y_from_zero: bool = False,
    note: str = "",
) -> Chart | None:
    """Lay out a chart whose axes fit what is drawn; None where there is nothing to draw."""
    drawn = [(each, _thin(points)) for each in series if len(points := _finite(each.points))]
    if not drawn:
        return None
    edge = np.array([(x, low) for x, low, _ in band] + [(x, high) for x, _, high in reversed(band)]).reshape(-1, 2)
    x, y = np.concatenate([edge, *(points for _, points in drawn)]).T
    y_at, y_ticks = _axis(np.append(y, 0.0) if y_from_zero else y, HEIGHT - BOTTOM, TOP, is_rounded=True)
    left = max(LEFT, GAP + LETTER * max(len(label) for _, label in y_ticks))
    x_at, x_ticks = _axis(x, left, WIDTH - RIGHT)

    def path(points: np.ndarray, between: str) -> str:
        return between.join(f"{x_at(x):.1f} {y_at(y):.1f}" for x, y in points)

    lines = []
    for i, (each, points) in enumerate(drawn):
        is_marked = (each.is_dotted and len(points) <= MAX_SHOWN) or len(points) == 1
        dots = f"M{path(points, 'h0M')}h0" if is_marked else ""
        shade = i / max(len(drawn) - 1, 1)
        lines.append(Line(each.name, "dashed" if each.is_dashed else "solid", shade, f"M{path(points, 'L')}", dots))
    columns, rows = _table([each for each in series if not each.is_dashed])
    return Chart(title, note, x_name, lines, x_ticks, y_ticks, left, path(edge, " "), [x_name, *columns], rows)


def _axis(
    values: np.ndarray, start: float, stop: float, *, is_rounded: bool = False
) -> tuple[Callable[[float], float], list[Tick]]:
    """Make a linear scale from values to SVG units, with some five ticks; a rounded one begins and ends with a tick."""
    low, high = float(values.min()), float(values.max())
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    size = nice((high - low) / 4)
    if is_rounded:
        low, high = math.floor(low / size + 1e-9) * size, math.ceil(high / size - 1e-9) * size
    scale = functools.partial(np.interp, xp=(low, high), fp=(start, stop))
    ticks = range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)
    return scale, [(round(float(scale(i * size)), 1), number(i * size)) for i in ticks]


def nice(size: float) -> float:
    """Find the smallest of 1, 2, 2.5, 5 times a power of ten that is not below `size`."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= size * (1 - 1e-9))


def number(value: float) -> str:
    """Write a number with few significant digits: 0.0008, 1.25, 12k, 3.4M."""
    for limit, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / size:.3g}{unit}"
    return f"{value:.4g}"


def _finite(points: Iterable[Point]) -> np.ndarray:  # [point, 2]
    array = np.array(list(points), float).reshape(-1, 2)
    return array[np.isfinite(array).all(axis=1)]


def _thin(points: np.ndarray) -> np.ndarray:
    """Average neighbouring points where there are too many to draw."""
    groups = np.array_split(points, min(len(points), MAX_POINTS))
    return np.array([group.mean(axis=0) for group in groups])


def _table(series: Sequence[ChartLine]) -> tuple[list[str], list[list[str]]]:
    """Tabulate series: their names, and evenly spread rows of values, the last one among them."""
    found = [dict(map(tuple, _finite(each.points))) for each in series]
    xs = sorted({x for values in found for x in values}, reverse=True)
    kept = xs[:: max(1, -(-len(xs) // MAX_SHOWN))][::-1]
    rows = [[f"{x:,.0f}", *(f"{values[x]:.4g}" if x in values else "" for values in found)] for x in kept]
    return [each.name for each in series], rows
