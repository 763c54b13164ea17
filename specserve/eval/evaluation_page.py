"""`specserve eval` as a page for people: one file that needs no network, with what the JSON report has."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specserve.eval.acceptance import SpeculationReport
from specserve.eval.evaluation import Evaluation, TauVerdict
from specserve.host import whole_file
from specserve.train.run.page import line_chart, template

TEMPLATE = "evaluation.html.j2"


def write(
    path: Path,
    found: Evaluation,
    verdicts: Sequence[TauVerdict],
    settings: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> None:
    """Write the page of an evaluation."""
    depth = max(len(report.accept_rate) for report in found.reports)
    page = template(Path(__file__).parent, TEMPLATE).render(
        found=found,
        verdicts=verdicts,
        tiles=_tiles(found.reports),
        charts=_charts(found.reports),
        notes=[f"{report.name}: {note}" for report in found.reports for note in report.notes],
        depth=depth,
        depth_names=[f"depth {d}" for d in range(1, depth + 1)],
        date=provenance["utc_time"],
        settings=[(name, _text(value)) for name, value in settings.items()],
        provenance=[(name.replace("_", " "), _text(value)) for name, value in provenance.items()],
    )
    with whole_file(path) as partial:
        partial.write_text(page, encoding="utf-8")


def _text(value: Any) -> str:
    return shlex.join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _tiles(reports: Sequence[SpeculationReport]) -> list[tuple[str, str, str]]:
    """List the large figures on top, each as its name, its value, and the head or server that it belongs to."""
    tiles = []
    if told := [report for report in reports if report.tau is not None]:
        best = max(told, key=lambda report: report.tau or 0.0)
        tiles.append(("highest tau", f"{best.tau:.2f}", best.name))
    if compared := [report for report in reports if not report.is_yardstick]:
        fastest = max(compared, key=lambda report: report.speculative.ratio)
        tiles.append(("fastest", f"{fastest.gain:.2f}x", f"of plain decoding: {fastest.name}"))
        answers = sum(report.speculative.num_answers for report in compared)
        same = sum(report.speculative.num_identical for report in compared)
        tiles.append(("same answers", f"{same / max(1, answers):.1%}", f"{same:,} of {answers:,} as of plain decoding"))
    tiles.append(("tokens", f"{sum(report.speculative.num_tokens for report in reports):,}", "in all answers together"))
    return tiles


def _charts(reports: Sequence[SpeculationReport]) -> list[str]:
    """Lay out the charts: acceptance over depth, and the effects of temperature and concurrency where several were
    measured."""
    first = reports[0].temperature, reports[0].concurrency
    own = [report for report in reports if (report.temperature, report.concurrency) == first]
    by_depth = {r.name: enumerate(r.accept_rate, start=1) for r in own if r.accept_rate}
    charts = [line_chart("Acceptance by depth", "depth", by_depth, y_from_zero=True, note="given acceptance above")]
    at_once = [report for report in reports if report.temperature == first[0] and not report.is_yardstick]
    charts.append(_over(at_once, "Gain by concurrency", "at once", lambda r: (r.concurrency, r.gain)))
    at_temperatures = [report for report in reports if report.concurrency == first[1] and report.tau is not None]
    charts.append(_over(at_temperatures, "Tau by temperature", "temperature", lambda r: (r.temperature, r.tau)))
    return [chart for chart in charts if chart]


def _over(reports: Sequence[SpeculationReport], title: str, axis: str, point: Any) -> str | None:
    """Make a line for each head and way to speculate. There are none where the axis has one value only."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for report in reports:
        lines.setdefault(report.name, []).append(point(report))
    return line_chart(title, axis, {name: points for name, points in lines.items() if len(points) > 1})
