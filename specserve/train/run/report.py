"""`report.html`: what a run has come to, in one file that needs no network. It is made of what is on disk and of the
run's notes, so it can be made at any time; whatever comes from users' data is escaped by the template."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from specserve import config
from specserve.data.dataset import Dataset
from specserve.drafters.speculation import parse_speculation
from specserve.host import whole_file
from specserve.speculative.vocab import coverage
from specserve.train.run import forecast
from specserve.train.run.charts import Chart, ChartLine, line_chart, number
from specserve.train.run.folder import SETTINGS_FILE
from specserve.train.run.forecast import PowerLaw
from specserve.train.run.pages import template
from specserve.train.settings import TrainRun

REPORT_FILE = "report.html"
TEMPLATE = "report.html.j2"
AHEAD = 2.0  # how far the curve is drawn, in samples so far

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunReport:
    """The data that the report is made of."""

    run: TrainRun
    notes: Mapping[str, Any]  # of the exported head: target, fingerprint, `data_summary`
    rows: Sequence[Row]  # of metrics.jsonl
    ending: str  # why the run ended
    provenance: Mapping[str, Any]


def write(path: Path, report: RunReport) -> None:
    """Write the report's page."""
    page = render(report)
    with whole_file(path) as partial:
        partial.write_text(page, encoding="utf-8")


def render(report: RunReport) -> str:
    """Make the report's page, in HTML."""
    steps = [row for row in report.rows if row["loss"] is not None]
    all_measured = [row for row in report.rows if row["tau"] is not None]
    measured = comparable(all_measured)
    curve = tau_curve(report.run, measured)
    arms = measured[-1].get("arms", {}) if measured else {}
    depth = max((len(arm["accept_rate"]) for arm in arms.values()), default=0)
    chosen, as_they_come = _settings(report.run)
    return template(Path(__file__).parent, TEMPLATE).render(
        run=report.run,
        notes=report.notes,
        ending=report.ending,
        tiles=_tiles(steps, measured),
        charts=_charts(steps, measured, curve, num_others=len(all_measured) - len(measured)),
        outlook=outlook(curve),
        measured=measured[-1] if measured else None,
        depth=depth,
        depth_names=[f"depth {d}" for d in range(1, depth + 1)],
        data=report.notes.get("data_summary", {}),
        chosen=chosen,
        as_they_come=as_they_come,
        provenance=_shown(report),
        commands=commands(report.run, is_stopped=report.ending.startswith("stopped")),
    )


def comparable(measured: Sequence[Row]) -> list[Row]:
    """Keep the measurements of what the last one measured; a resumed run may measure something else than before."""
    return [row for row in measured if row.get("measurement") == measured[-1].get("measurement")]


def tau_curve(run: TrainRun, measured: Sequence[Row]) -> PowerLaw | None:
    """Fit the forecast's curve over loss-bearing tokens; None where the measurements allow none."""
    by_tokens = {row["tokens"]: row["tau"] for row in comparable(measured) if row["tokens"]}
    tree = parse_speculation(run.eval.speculation[0])
    assert tree is not None
    return forecast.fit(list(by_tokens), list(by_tokens.values()), longest=1.0 + tree.depth)


def outlook(curve: PowerLaw | None) -> list[str]:
    """Say the forecast in words, one sentence for each number of samples; nothing where there is none."""
    if curve is None:
        return []
    words = ((2.0, "as many samples again"), (10.0, "ten times as many samples in all"))
    found = [(text, curve.unit * times, curve.at(curve.unit * times)) for times, text in words]
    return [
        f"With {text} ({number(tokens)} tokens), tau {at.expected:.2f} is expected, {at.low:.2f} to {at.high:.2f} "
        "in nine cases of ten."
        for text, tokens, at in found
    ]


def commands(run: TrainRun, *, is_stopped: bool = False) -> list[tuple[str, str]]:
    """List what one may do with the head, each with the command for it."""
    folder, settings = shlex.quote(run.output), shlex.quote(f"{run.output.rstrip('/')}/{SETTINGS_FILE}")
    more = f"--init-from {folder} --output {shlex.quote(run.output.rstrip('/') + '-2')}"
    return [
        ("Serve it", f"specserve serve --draft {folder}"),
        ("Measure its speed", f"specserve eval --draft {folder}"),
        ("Give it to vLLM", f"specserve export {folder} --to vllm"),
        ("Go on", f"specserve train --config {settings} --resume")
        if is_stopped
        else ("Train it further", f"specserve train --config {settings} {more}"),
    ]


def summarize(dataset: Dataset, target_ids: np.ndarray) -> dict[str, Any]:
    """Put the training data in numbers, by source and in all: what was used, cut and left out, and which share of the
    tokens to predict the draft vocabulary holds. `target_ids` [draft_vocab] are its tokens."""
    sources = []
    for report in dataset.reports:
        tokenized = report.tokens.tokenized
        sources.append(
            {
                "name": report.tokens.source.name,
                "weight": report.tokens.source.weight,
                "conversations": tokenized.counts["rows"],
                "documents": len(tokenized.documents),
                "tokens": tokenized.num_tokens,
                "loss_tokens": tokenized.num_loss_tokens,
                "rows": report.num_rows,
                "padding": report.padding_share,
                "coverage": coverage(report.counts, target_ids),
                "truncated_documents": tokenized.counts["truncated"],
                "truncated_tokens": tokenized.counts["truncated tokens"],
                "dropped": tokenized.counts["dropped"] + tokenized.counts["rejected"],
                "unusable": len(report.tokens.source.problems),
                "withheld": report.tokens.source.num_withheld,
            }
        )
    summed = ("conversations", "documents", "tokens", "loss_tokens", "rows", "truncated_documents", "truncated_tokens")
    return {
        "draft_vocab": len(target_ids),
        "coverage": coverage(dataset.counts, target_ids),
        "padding": dataset.rows.padding_share,
        **{key: sum(source[key] for source in sources) for key in (*summed, "dropped", "unusable", "withheld")},
        "sources": sources,
    }


def _tiles(steps: Sequence[Row], measured: Sequence[Row]) -> list[tuple[str, str, str]]:
    """List the large figures on top, each as its name, its value, and what to know about it."""
    tiles = []
    if measured:
        best = max(measured, key=lambda row: row["tau"])
        tiles.append(("tau", f"{measured[-1]['tau']:.2f}", f"best {best['tau']:.2f} at step {best['step']:,}"))
    if steps:
        last = steps[-1]
        tiles.append(("loss", f"{last['loss']:.3f}", f"from {steps[0]['loss']:.3f}"))
        end = max((*steps, *measured), key=lambda row: row["step"])  # between two logged steps, where it was measured
        tiles.append(("steps", f"{end['step']:,}", f"{number(end['tokens'])} tokens learned from"))
        seconds = max(row["seconds"] for row in (*steps, *measured))
        tiles.append(("time", duration(seconds), "measuring and compiling included"))
    fast = [row for row in steps if "tokens_per_second" in row]
    if fast:
        shares = [row["mfu"] for row in fast if row["mfu"] is not None]
        rate = float(np.median([row["tokens_per_second"] for row in fast]))
        share = f"{np.median(shares):.0%} of the measured peak" if shares else "median"
        tiles.append(("tokens/s", f"{rate:,.0f}", share))
        tiles.append(("memory", gigabytes(fast[-1]["device_bytes"] or fast[-1]["host_bytes"]), "at its most"))
    return tiles


CHARTS = (  # over steps: title, key of a row, whose value is one number or one for each rollout step, and a note
    ("Loss by rollout step", "rollout_loss", "nats, over the draft vocabulary"),
    ("Accuracy by rollout step", "rollout_accuracy", "how often its best token is the target's"),
    ("Acceptance by rollout step", "rollout_acceptance", "how often a token drawn from it would be taken"),
    ("Learning rate", "learning_rate", ""),
    ("Gradient norm", "gradient_norm", "before it is clipped"),
)


def _charts(steps: Sequence[Row], measured: Sequence[Row], curve: PowerLaw | None, *, num_others: int) -> list[Chart]:
    """Lay out the charts that have something to show."""
    charts = [_tau_chart(measured, curve, num_others)]
    for title, key, note in CHARTS:
        values = [(row["step"], np.atleast_1d(row[key])) for row in steps if row.get(key) is not None]
        series = [
            ChartLine(name, [(x, y[k]) for x, y in values if len(y) > k])
            for k in range(max((len(y) for _, y in values), default=0))
            for name in [f"step {k}" if key.startswith("rollout") else title.lower()]
        ]
        charts.append(line_chart(title, "step", series, note=note, y_from_zero=key == "learning_rate"))
    return [chart for chart in charts if chart]


def _tau_chart(measured: Sequence[Row], curve: PowerLaw | None, num_others: int) -> Chart | None:
    """Lay out what was measured over loss-bearing tokens, with the forecast where there is one."""
    points = [(row["tokens"], row["tau"]) for row in measured]
    series, band = [ChartLine("tau", points, is_dotted=True)], []
    if curve is not None:
        last = points[-1][0]
        ahead = np.linspace(last, AHEAD * last, 24).tolist()
        fitted = np.linspace(min(x for x, _ in points if x), AHEAD * last, 60).tolist()
        series.append(ChartLine("forecast", tuple((x, curve.at(x).expected) for x in fitted), is_dashed=True))
        band = [(x, at.low, at.high) for x in ahead for at in [curve.at(x)]]
    note = "tokens per target forward on held-out prompts"
    if num_others:
        note += f"; {num_others} earlier measurements, of something else, are left out"
    return line_chart("Tau", "tokens", series, band=band, note=note)


def _settings(run: TrainRun) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """List the names and values of the settings that somebody has chosen, and those of the others."""
    chosen, others = [], []
    for leaf in config.leaves(TrainRun):
        value = attrgetter(leaf.name)(run)
        text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        (others if value == leaf.default else chosen).append((leaf.name, text))
    return chosen, others


def _shown(report: RunReport) -> list[tuple[str, str]]:
    known = {
        "target": report.notes.get("target", ""),
        "target_fingerprint": report.notes.get("target_fingerprint", ""),
        **report.provenance,
    }
    return [
        (name.replace("_", " "), shlex.join(map(str, value)) if isinstance(value, list) else str(value))
        for name, value in known.items()
    ]


def duration(seconds: float) -> str:
    """Write a duration as 1:02:03, or as 2:03 below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def gigabytes(num_bytes: int) -> str:
    """Write a size in units of 10^9 bytes."""
    return f"{num_bytes / 1e9:.1f} GB"
