"""`report.html`: what a run has come to, in one file that needs no network. It is made of what is on disk and of the
run's notes, so it can be made at any time; whatever comes from users' data is escaped by the template."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specserve.data.dataset import Dataset
from specserve.host import whole_file
from specserve.speculative.vocab import coverage
from specserve.train.run.folder import SETTINGS_FILE
from specserve.train.run.page import line_chart, number, template

REPORT_FILE = "report.html"
TEMPLATE = "report.html.j2"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunReport:
    """The data that the report is made of."""

    output: str  # the run's folder
    settings: Mapping[str, Any]  # those that are not the defaults
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
    newest = next(reversed(measured), None)
    arms = (newest or {}).get("arms", {})
    depth = max((len(arm["accept_rate"]) for arm in arms.values()), default=0)
    return template(Path(__file__).parent, TEMPLATE).render(
        output=report.output,
        notes=report.notes,
        ending=report.ending,
        tiles=_tiles(steps, measured),
        charts=_charts(steps, measured, num_others=len(all_measured) - len(measured)),
        measured=newest,
        depth=depth,
        depth_names=[f"depth {d}" for d in range(1, depth + 1)],
        data=report.notes.get("data_summary", {}),
        settings=[(name, _text(value)) for name, value in report.settings.items()],
        provenance=_shown(report),
        commands=commands(
            report.output, is_stopped=report.ending.startswith("stopped"), lora=report.notes.get("lora", "")
        ),
    )


def comparable(measured: Sequence[Row]) -> list[Row]:
    """Keep the measurements of what the last one measured; a resumed run may measure something else than before."""
    return [row for row in measured if row.get("measurement") == measured[-1].get("measurement")]


def serve_command(output: str, lora: str = "") -> str:
    """Return the command that serves the head in this folder, beside the adapter that it follows, if any."""
    command = f"specserve serve --draft {shlex.quote(output)}"
    return f"{command} --lora {shlex.quote(f'{Path(lora).absolute().name}={lora}')}" if lora else command


def commands(output: str, *, is_stopped: bool = False, lora: str = "") -> list[tuple[str, str]]:
    """List what one may do with the head in this folder, each with the command for it."""
    folder = output.rstrip("/")
    head, settings, other = map(shlex.quote, (output, f"{folder}/{SETTINGS_FILE}", f"{folder}-2"))
    last = ("Train it further", f"specserve train --config {settings} --init-from {head} --output {other}")
    if is_stopped:
        last = ("Go on", f"specserve train --config {settings} --resume")
    # `eval` runs the target without adapters
    measure = [] if lora else [("Measure its speed", f"specserve eval --draft {head}")]
    return [
        ("Serve it", serve_command(output, lora)),
        *measure,
        ("Give it to vLLM", f"specserve export {head} --to vllm"),
        last,
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


def _charts(steps: Sequence[Row], measured: Sequence[Row], *, num_others: int) -> list[str]:
    """Draw the charts that have something to show."""
    note = "tokens per target forward on held-out prompts"
    if num_others:
        note += f"; {num_others} earlier measurements, of something else, are left out"
    charts = [line_chart("Tau", "tokens", {"tau": [(row["tokens"], row["tau"]) for row in measured]}, note=note)]
    for title, key, note in CHARTS:
        values = [(row["step"], np.atleast_1d(row[key])) for row in steps if row.get(key) is not None]
        depth = max((len(y) for _, y in values), default=0)
        lines = {f"step {k}": [(x, y[k]) for x, y in values if len(y) > k] for k in range(depth)}
        charts.append(line_chart(title, "step", lines, note=note, y_from_zero=key == "learning_rate"))
    return [chart for chart in charts if chart]


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _shown(report: RunReport) -> list[tuple[str, str]]:
    known = {
        "target": report.notes.get("target", ""),
        "target_fingerprint": report.notes.get("target_fingerprint", ""),
        **{name: report.notes[name] for name in ("lora", "lora_fingerprint") if name in report.notes},
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
