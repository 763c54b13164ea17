"""`specserve verify`: the proof that speculation changes nothing, on the user's own target and head."""

import dataclasses
import json
from pathlib import Path

import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from specserve.checkpoints.tensors import write_json
from specserve.cli.progress import console
from specserve.drafters.speculation import describe
from specserve.eval.report import table
from specserve.eval.settings import VerifyRun
from specserve.eval.verify.proof import ProofSize, Prover
from specserve.eval.verify.report import FALSE_ALARMS, Mismatch, ProofReport, Row
from specserve.eval.verify.runners import load_prompts, make_bench, ways_to_prove
from specserve.provenance import collect
from specserve.serve.engines import load
from specserve.serve.launch import Models
from specserve.serve.progress import Bars
from specserve.speculative.tree import Tree

SHOWN_BUGS, SHOWN_TIES = 5, 2


def verify(run: VerifyRun) -> None:
    """Have plain decoding and every way to speculate answer the same requests, and show where they differ. Exit status
    1 where a difference is a bug."""
    models = load(run, run.draft)
    trees = ways_to_prove(models, run.speculation)
    prompts = load_prompts(models, run.bench, run.limit)
    report = _prove(run, models, trees, prompts)
    facts = {
        "target": models.name,
        "draft": models.draft.name if models.draft else "",
        "ways": list(map(describe, trees)),
    }
    found_json = {**facts, **report.to_json(), "settings": dataclasses.asdict(run), "provenance": collect()}
    if run.json:
        print(json.dumps(found_json, indent=2))
    else:
        _show(report)
    if run.output:
        write_json(Path(run.output), found_json)
        if not run.json:
            console.print(f"report written to {escape(run.output)}")
    if report.num_bugs:
        raise typer.Exit(1)


def _prove(run: VerifyRun, models: Models, trees: list[Tree], prompts: list[list[int]]) -> ProofReport:
    report = ProofReport()
    longest = max(map(len, prompts)) + 2 * run.max_tokens + 1
    size = ProofSize(run.max_tokens, run.draws, run.seed)
    with Bars() as bars:
        compiling, asking = bars.add("compiling programs"), bars.add("answering, tokens")

        def on_warmup(done: int, total: int, name: str) -> None:
            bars.update(compiling, completed=done, total=total, note=name)

        def on_progress(what: str, done: int, total: int | None) -> None:
            bars.update(asking, completed=done, total=total, note=what)

        bench = make_bench(models, trees, max_model_len=longest, on_warmup=on_warmup)
        Prover(bench, prompts, size, report, on_progress).run()
    return report


def _show(report: ProofReport) -> None:
    console.print(_rows_table(report))
    console.print(_tests_table(report))
    for verdict, most in (("bug", SHOWN_BUGS), ("tie", SHOWN_TIES)):
        found = [each for each in report.mismatches if each.verdict == verdict]
        for mismatch in found[:most]:
            console.print(_traced(mismatch), highlight=False)
        if len(found) > most:
            console.print(f"and {len(found) - most} more: --output writes all of them")
    console.print(
        f"{report.num_compared:,} log-probabilities of programs of different shapes: {report.noise:.1e} apart at most",
        highlight=False,
    )
    console.print(f"[{_color(report)}]{escape(report.verdict)}[/]", highlight=False)


def _color(report: ProofReport) -> str:
    if report.num_bugs:
        return "bold red"
    if report.untested:
        return "yellow"
    return "bold green"


def _rows_table(report: ProofReport) -> Table:
    shown = table(
        "answers, against plain decoding", ("speculation", "check"), ("answers", "tokens", "tau", "ties", "bugs", "")
    )
    last = ""
    for row in report.rows:
        if last and row.way != last:
            shown.add_section()
        tau = name = ""
        if row.acceptance.num_steps and row.way != "off":
            tau = f"{row.acceptance.tau:.2f}"
        if row.way != last:
            name = row.way
        shown.add_row(
            *(name, row.check, str(row.num_answers), f"{row.num_tokens:,}"),
            *(tau, str(row.num_ties), _bugs(row), escape(row.note)),
        )
        last = row.way
    return shown


def _bugs(row: Row) -> str:
    if row.num_bugs:
        return f"[bold red]{row.num_bugs}[/]"
    return "0" if row.is_tested else "[yellow]-[/]"


def _tests_table(report: ProofReport) -> Table:
    title = f"tests; together they fail where nothing is wrong in {FALSE_ALARMS:g} of all runs (p < {report.limit:.1e})"
    shown = table(title, ("speculation", "test"), ("found", "p", ""))
    for test in report.tests:
        verdict = "[bold red]bug[/]" if test in report.failed else "passed"
        shown.add_row(test.way, test.what, test.statistic, f"{test.p_value:.2g}", verdict)
    return shown


def _traced(found: Mismatch) -> Group:
    color, lead = {"bug": "red", "tie": "yellow"}[found.verdict], ""
    if found.lead is not None:
        lead = f"; the rule's own choice leads by {found.lead:.1e}"
    lines = [
        f"[bold {color}]{found.verdict}[/] {found.way}, {found.check}: {escape(found.ask)}",
        f"  {found.kind} {found.position}: plain decoding {escape(found.plain)}, this way {escape(found.other)}{lead}",
    ]
    for name, top in (("plain", found.plain_top), ("this way", found.other_top)):
        if top:
            values = ", ".join(f"{token_id} {value:.6f}" for token_id, value in top)
            lines.append(f"  [dim]most likely there, {name}:[/] {values}")
    return Group(*lines)
