"""Geometry of the report's line charts: numbers in, SVG coordinates and tick labels out. It knows no colours and no
meaning; the template draws."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 360, 216
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 24  # margins, the left one at least
LETTER, GAP = 6.6, 6  # of the widest digit at the labels' size, and from label to chart
MAX_POINTS = 240  # of a drawn line; more of them are averaged in groups
MAX_DOTS = 40  # of a line whose single points are marked

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[Point, ...]
    is_dotted: bool = False  # its points are measurements worth marking
    is_dashed: bool = False


@dataclass(frozen=True)
class Tick:
    at: float  # in SVG units
    label: str


@dataclass(frozen=True)
class Line:
    name: str
    path: str  # an SVG path
    dots: tuple[tuple[float, float, str], ...]  # x, y, and what it says
    is_dashed: bool


@dataclass(frozen=True)
class Chart:
    """What the template draws, and the values as a table."""

    title: str
    x_name: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    left: float = LEFT  # margin, in which the widest label fits
    band: str = ""  # an SVG polygon's points
    note: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = field(default=())


def line_chart(
    title: str,
    x_name: str,
    series: Sequence[Series],
    *,
    band: Sequence[tuple[float, float, float]] = (),  # x, low, high
    y_from_zero: bool = False,
    note: str = "",
) -> Chart:
    """Axes fit what is drawn. Points need not be finite: those that are not are left out."""
    drawn = [Series(s.name, _thin(_finite(s.points)), s.is_dotted, s.is_dashed) for s in series]
    points = [point for s in drawn for point in s.points] + [(x, y) for x, *ys in band for y in ys]
    y_values = [y for _, y in points] + ([0.0] if y_from_zero else [])
    y_axis = Axis(y_values, HEIGHT - BOTTOM, TOP, is_rounded=True)
    y_ticks = y_axis.ticks(4)
    left = max(LEFT, GAP + LETTER * max(len(tick.label) for tick in y_ticks))
    x_axis = Axis([x for x, _ in points], left, WIDTH - RIGHT)
    columns, rows = _table(x_name, [s for s in series if not s.is_dashed])
    edge = [(x, low) for x, low, _ in band] + [(x, high) for x, _, high in reversed(band)]
    return Chart(
        title=title,
        x_name=x_name,
        lines=tuple(_line(s, x_axis, y_axis) for s in drawn if s.points),
        x_ticks=x_axis.ticks(4),
        y_ticks=y_ticks,
        left=left,
        band=" ".join(f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y in edge),
        note=note,
        columns=columns,
        rows=rows,
    )


class Axis:
    """A linear scale from values to SVG units."""

    def __init__(self, values: Sequence[float], start: float, stop: float, *, is_rounded: bool = False) -> None:
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if high <= low:
            pad = abs(low) * 0.1 or 1.0
            low, high = low - pad, high + pad
        if is_rounded:
            size = nice((high - low) / 4)
            low, high = math.floor(low / size + 1e-9) * size, math.ceil(high / size - 1e-9) * size
        self.low, self.high, self._start, self._stop = low, high, start, stop

    def __call__(self, value: float) -> float:
        return self._start + (value - self.low) / (self.high - self.low) * (self._stop - self._start)

    def ticks(self, count: int) -> tuple[Tick, ...]:
        size = nice((self.high - self.low) / count)
        first, last = math.ceil(self.low / size - 1e-9), math.floor(self.high / size + 1e-9)
        return tuple(Tick(self(i * size), number(i * size)) for i in range(first, last + 1))


def nice(size: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= size * (1 - 1e-9))


def number(value: float) -> str:
    """Few significant digits: 0.0008, 1.25, 12k, 3.4M."""
    if value == 0:
        return "0"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.4g}"


def _finite(points: Sequence[Point]) -> tuple[Point, ...]:
    return tuple((x, y) for x, y in points if math.isfinite(x) and math.isfinite(y))


def _thin(points: tuple[Point, ...]) -> tuple[Point, ...]:
    size = -(-len(points) // MAX_POINTS)
    if size <= 1:
        return points
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return tuple((sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups)


def _line(series: Series, x_axis: Axis, y_axis: Axis) -> Line:
    at = [(x_axis(x), y_axis(y)) for x, y in series.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
    is_marked = (series.is_dotted and len(at) <= MAX_DOTS) or len(at) == 1
    said = [f"{series.name}: {number(y)} at {number(x)}" for x, y in series.points] if is_marked else []
    dots = tuple((x, y, text) for (x, y), text in zip(at, said, strict=False))
    return Line(series.name, path, dots, series.is_dashed)


def _table(
    x_name: str, series: Sequence[Series], max_rows: int = 40
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Evenly spread rows, the last one among them."""
    values: dict[float, dict[str, float]] = {}
    for s in series:
        for x, y in _finite(s.points):
            values.setdefault(x, {})[s.name] = y
    xs = sorted(values)
    every = -(-len(xs) // max_rows) if xs else 1
    kept = xs[::-1][::every][::-1]
    names = [s.name for s in series]
    rows = tuple(
        (f"{x:,.0f}", *(f"{values[x][name]:.4g}" if name in values[x] else "" for name in names)) for x in kept
    )
    return (x_name, *names), rows
