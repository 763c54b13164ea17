"""`specserve eval`: acceptance and speed of heads, of speculation settings, and of servers."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.markup import escape

from specserve.checkpoints.tensors import write_json
from specserve.cli.progress import console
from specserve.eval import evaluation, report
from specserve.eval.evaluation import Evaluation, TauVerdict, verdicts
from specserve.eval.settings import EvalRun
from specserve.provenance import collect


def evaluate(run: EvalRun) -> None:
    """Measure tau, acceptance by depth and category, and plain against speculative tokens/s in one run, for every
    head, speculation, temperature and concurrency that was asked for. Prints a table of each, and writes the JSON
    report with --output. Exit status 1 where a published tau is outside its interval."""
    found = evaluation.evaluate(run)
    _show(found, run.limit)
    judged = verdicts(found.reports, run.expect)
    for verdict in judged:
        console.print(f"[{'green' if verdict.holds else 'red'}]{escape(verdict.text)}[/]")
    if run.output:
        _write(run, found, judged)
    if not all(verdict.holds for verdict in judged):
        raise typer.Exit(1)


def _show(found: Evaluation, limit: int) -> None:
    limited = ", evenly spread (--limit)" if found.num_questions == limit else ""
    for name, times in found.steps.items():
        console.print(f"{name}: {report.step_line(times)}")
    title = f"{found.target}: {found.bench}, {found.num_questions} questions{limited}; intervals of 95%"
    console.print(report.summary_table([(each.name, each) for each in found.reports], title))
    first = found.reports[0].temperature, found.reports[0].concurrency
    for each in found.reports:  # the report has those of every temperature and concurrency
        is_first = (each.temperature, each.concurrency) == first
        if is_first and len(each.by_category) > 1 and each.has_counts:
            console.print(report.category_table(each))
    if found.differences:
        console.print(report.difference_table(found.differences))
    for each in found.reports:
        for note in each.notes:
            console.print(f"[yellow]{escape(each.name)}: {escape(note)}[/]")
    if skipped := found.reports[0].num_skipped:
        console.print(f"[yellow]{skipped} prompts did not fit the context and were not asked[/]")


def _write(run: EvalRun, found: Evaluation, judged: Sequence[TauVerdict]) -> None:
    """Write the report, without the secrets among the settings."""
    settings = {name: value for name, value in dataclasses.asdict(run).items() if name != "api_key"}
    provenance = collect()
    if run.api_key:
        provenance["argv"] = [str(word).replace(run.api_key, "***") for word in provenance["argv"]]  # type: ignore[union-attr]
    facts = {**found.to_json(), "verdicts": [verdict.to_json() for verdict in judged]}
    write_json(Path(run.output), {**facts, "settings": settings, "provenance": provenance})
    console.print(f"report written to {escape(run.output)}")
