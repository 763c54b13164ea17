"""`report.html`: what a run has come to, in one file that needs no network. Made of what is on disk and of the run's
notes, so it can be made at any time; whatever comes from users' data is escaped by the template."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specserve import config
from specserve.data.dataset import Dataset
from specserve.drafters.speculation import parse_speculation
from specserve.speculative.vocab import coverage
from specserve.train import forecast
from specserve.train.charts import Chart, Series, line_chart, number
from specserve.train.forecast import PowerLaw
from specserve.train.run_folder import SETTINGS_FILE
from specserve.train.settings import TrainRun

REPORT_FILE = "report.html"
TEMPLATE = "report.html.j2"
AHEAD = 2.0  # how far the curve is drawn, in samples so far

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """What the report is made of."""

    run: TrainRun
    notes: Mapping[str, Any]  # of the exported head: target, fingerprint, `data_summary`
    rows: Sequence[Row]  # of metrics.jsonl
    ending: str  # why the run ended
    provenance: Mapping[str, Any]


def write(path: Path, report: Report) -> None:
    path.write_text(render(report), encoding="utf-8")


def render(report: Report) -> str:
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["number"] = number
    steps = [row for row in report.rows if row["loss"] is not None]
    all_measured = [row for row in report.rows if row["tau"] is not None]
    measured = comparable(all_measured)
    curve = tau_curve(report.run, measured)
    return environment.get_template(TEMPLATE).render(
        run=report.run,
        notes=report.notes,
        ending=report.ending,
        tiles=_tiles(steps, measured),
        charts=_charts(steps, measured, curve, num_others=len(all_measured) - len(measured)),
        outlook=outlook(curve),
        measured=measured[-1] if measured else None,
        depth=_depth(measured),
        data=report.notes.get("data_summary", {}),
        settings=_settings(report.run),
        provenance=_shown(report),
        commands=commands(report.run, is_stopped=report.ending.startswith("stopped")),
    )


def comparable(measured: Sequence[Row]) -> list[Row]:
    """Those that measured what the last one did; a resumed run may measure something else than before."""
    return [row for row in measured if row.get("measurement") == measured[-1].get("measurement")]


def tau_curve(run: TrainRun, measured: Sequence[Row]) -> PowerLaw | None:
    """The forecast's curve over loss-bearing tokens, where there is one."""
    by_tokens = {row["tokens"]: row["tau"] for row in comparable(measured) if row["tokens"]}
    tree = parse_speculation(run.eval.speculation[0])
    assert tree is not None
    return forecast.fit(list(by_tokens), list(by_tokens.values()), longest=1.0 + tree.depth)


def outlook(curve: PowerLaw | None) -> list[str]:
    """The forecast in words; empty where there is none."""
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
    """What to do with the head, and how."""
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
    """The training data in numbers, by source: what was used, cut and left out, and how much of what is to be
    predicted the draft vocabulary holds."""
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
    """Name, value, and what to know about it."""
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


def _charts(steps: Sequence[Row], measured: Sequence[Row], curve: PowerLaw | None, *, num_others: int) -> list[Chart]:
    def by_rollout(key: str) -> list[Series]:
        count = max((len(row.get(key, ())) for row in steps), default=0)
        points = [tuple((row["step"], row[key][k]) for row in steps if len(row.get(key, ())) > k) for k in range(count)]
        return [Series(f"step {k}", own) for k, own in enumerate(points)]

    def single(key: str, name: str) -> list[Series]:
        return [Series(name, tuple((row["step"], row[key]) for row in steps if row.get(key) is not None))]

    charts = [
        _tau_chart(measured, curve, num_others),
        line_chart("Loss by rollout step", "step", by_rollout("rollout_loss"), note="nats, over the draft vocabulary"),
        line_chart(
            "Accuracy by rollout step",
            "step",
            by_rollout("rollout_accuracy"),
            note="how often its best token is the target's",
        ),
        line_chart(
            "Acceptance by rollout step",
            "step",
            by_rollout("rollout_acceptance"),
            note="how often a token drawn from it would be taken",
        ),
        line_chart("Learning rate", "step", single("learning_rate", "learning rate"), y_from_zero=True),
        line_chart("Gradient norm", "step", single("gradient_norm", "norm"), note="before it is clipped"),
    ]
    return [chart for chart in charts if chart.lines]


def _tau_chart(measured: Sequence[Row], curve: PowerLaw | None, num_others: int) -> Chart:
    points = tuple((row["tokens"], row["tau"]) for row in measured)
    series, band = [Series("tau", points, is_dotted=True)], []
    if curve is not None:
        last = points[-1][0]
        ahead = np.linspace(last, AHEAD * last, 24).tolist()
        fitted = np.linspace(min(x for x, _ in points if x), AHEAD * last, 60).tolist()
        series.append(Series("forecast", tuple((x, curve.at(x).expected) for x in fitted), is_dashed=True))
        band = [(x, at.low, at.high) for x in ahead for at in [curve.at(x)]]
    note = "tokens per target forward on held-out prompts"
    if num_others:
        note += f"; {num_others} earlier measurements, of something else, are left out"
    return line_chart("Tau", "tokens", series, band=band, note=note)


def _depth(measured: Sequence[Row]) -> int:
    arms = measured[-1].get("arms", {}) if measured else {}
    return max((len(arm["accept_rate"]) for arm in arms.values()), default=0)


def _settings(run: TrainRun) -> list[tuple[str, str, bool]]:
    """Name, value, and whether somebody has chosen it."""
    found = []
    for leaf in config.leaves(TrainRun):
        value: Any = run
        for part in leaf.name.split("."):
            value = getattr(value, part)
        text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        found.append((leaf.name, text, value != leaf.default))
    return found


def _shown(report: Report) -> list[tuple[str, str]]:
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
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
