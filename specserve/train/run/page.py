"""The parts that the HTML reports share: a page in one file that needs no network (`page.html.j2`), and its charts."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import jinja2

WIDTH, HEIGHT = 360, 216  # of a chart, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 24  # margins, the left one at least
LETTER, GAP = 6.6, 6  # width of the widest digit of a label, and from the label to the chart
MAX_POINTS = 240  # of a drawn line; more of them are averaged in groups
MAX_MARKED = 40  # points of a line whose points are marked

Point = tuple[float, float]
Tick = tuple[float, str]  # where it stands, in SVG units, and its label


def template(folder: Path, name: str) -> "jinja2.Template":
    """Read a template of a folder, which may extend the page and import its macros. All values that it shows are
    escaped, and a missing value is an error."""
    import jinja2

    loader = jinja2.FileSystemLoader([folder, Path(__file__).parent])
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"number": number, "grouped": "{:,}".format}
    return environment.get_template(name)


def line_chart(
    title: str, x_name: str, lines: Mapping[str, Iterable[Point]], *, y_from_zero: bool = False, note: str = ""
) -> str | None:
    """Draw a chart of lines by name as an HTML figure, which a template shows as it is. Its axes fit the points. Points
    that are not finite are left out. Returns None where there is nothing to draw."""
    from markupsafe import Markup

    drawn = {name: _thin(points) for name, given in lines.items() if len(points := _finite(given))}
    if not drawn:
        return None
    x, y = np.concatenate([*drawn.values()]).T
    y_at, y_ticks = _axis(np.append(y, [0.0] * y_from_zero), HEIGHT - BOTTOM, TOP, is_rounded=True)
    left = max(LEFT, GAP + LETTER * max(len(label) for _, label in y_ticks))
    x_at, x_ticks = _axis(x, left, WIDTH - RIGHT)
    rule = (
        f'<path class="rule" d="M{left} {{0}}H{WIDTH - RIGHT}"/>'
        f'<text x="{left - GAP}" y="{{0}}" dy="3.5" text-anchor="end">{{1}}</text>'
    )
    parts = [Markup(rule).format(*tick) for tick in y_ticks]
    x_tick = Markup('<text x="{}" y="' + str(HEIGHT - 9) + '" text-anchor="middle">{}</text>')
    parts += [x_tick.format(*tick) for tick in x_ticks]
    legend = Markup("")
    for i, (name, points) in enumerate(drawn.items()):
        shade = Markup('style="--i:{:.3g}"').format(i / max(len(drawn) - 1, 1))
        at = [f"{x_at(x):.1f} {y_at(y):.1f}" for x, y in points]
        parts.append(Markup('<path class="line" {} d="M{}"/>').format(shade, "L".join(at)))
        if len(points) <= MAX_MARKED:
            parts.append(Markup('<path class="dots" {} d="M{}h0"/>').format(shade, "h0M".join(at)))
        legend += Markup("<span><i {}></i>{}</span>").format(shade, name)
    figure = (
        '<figure class="card"><figcaption><h3>{0}</h3><p class="quiet">{1}</p></figcaption>'
        '<svg viewBox="0 0 {2} {3}" role="img" aria-label="{0}">{4}</svg>'
        '<div class="legend"><span class="quiet axis">{5}</span>{6}</div></figure>'
    )
    return Markup(figure).format(title, note, WIDTH, HEIGHT, Markup("").join(parts), x_name, legend * (len(drawn) > 1))


def number(value: float) -> str:
    """Write a number with few significant digits: 0.0008, 1.25, 12k, 3.4M."""
    for limit, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / size:.3g}{unit}"
    return f"{value:.4g}"


def nice(size: float) -> float:
    """Find the smallest of 1, 2, 2.5, 5 times a power of ten that is not below `size`."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= size * (1 - 1e-9))


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


def _finite(points: Iterable[Point]) -> np.ndarray:  # [point, 2]
    array = np.array(list(points), float).reshape(-1, 2)
    return array[np.isfinite(array).all(axis=1)]


def _thin(points: np.ndarray) -> np.ndarray:
    """Average neighbouring points where there are too many to draw."""
    groups = np.array_split(points, min(len(points), MAX_POINTS))
    return np.array([group.mean(axis=0) for group in groups])
