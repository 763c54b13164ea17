"""`specserve eval`: acceptance and speed of a head."""

from pathlib import Path

from rich.markup import escape
from rich.progress import Progress

from specserve.checkpoints.tensors import write_json
from specserve.cli.progress import bar_columns, console
from specserve.drafters.speculation import parse_speculation
from specserve.errors import ConfigError
from specserve.eval import acceptance, prompts, report
from specserve.eval.acceptance import Report
from specserve.eval.engines import engine_pair
from specserve.eval.prompts import Question
from specserve.eval.settings import EvalRun
from specserve.eval.step_times import StepTimes, measure_steps
from specserve.provenance import collect
from specserve.serve.launch import Models, load_models
from specserve.speculative.tree import Tree


def evaluate(run: EvalRun) -> None:
    """Measure tau, acceptance by depth and category, and plain against speculative tokens/s in one run, for every
    speculation that was asked for. Prints a table of each, and writes the JSON report where one is wanted."""
    ways = list(dict.fromkeys(part.strip() for part in run.speculation.split(",")))
    trees = {way: None if way == "auto" else parse_speculation(way) for way in ways}
    for way, tree in trees.items():
        if tree is None and way != "auto":
            raise ConfigError(f"--speculation {way}: there is nothing to evaluate; give a chain or a tree")
    questions = prompts.load_questions(run.bench, run.limit)
    models = load_models(run.target, run.draft)
    for way, tree in trees.items():
        if models.head is None and tree is not None and tree.uses_head:
            raise ConfigError(f"--speculation {way}: there is no head for {models.name}; give one with --draft")
    found, results = [], []
    for way, tree in trees.items():
        one, steps, times = _measure(run, way, tree, models, questions)
        found.append(one)
        results.append({**one.to_json(), "step": steps})
        if times:
            console.print(f"{way}: {report.step_line(times)}")
    name = run.draft or "bundled"
    console.print(report.summary_table([(f"{name}, {one.speculation}", one) for one in found], run.bench))
    console.print(report.category_table(found[0]))
    if found[0].num_skipped:
        console.print(f"[yellow]{found[0].num_skipped} prompts did not fit the context and were not asked[/]")
    if run.output:
        first, *others = results
        write_json(Path(run.output), {**first, "others": others, "provenance": collect()})
        console.print(f"report written to {escape(run.output)}")


def _measure(
    run: EvalRun, speculation: str, tree: Tree | None, models: Models, questions: list[Question]
) -> tuple[Report, dict[str, float], StepTimes | None]:
    """Measure one way to speculate beside plain decoding. Returns its report, the milliseconds of its steps by name,
    and where the time of a step goes if it has one tree that a head proposes."""
    with Progress(*bar_columns(), console=console, transient=True) as progress:
        task = progress.add_task(f"{speculation}: compiling", note="")
        plain, speculative = engine_pair(
            models,
            speculation,
            num_slots=run.concurrency,
            max_model_len=run.max_model_len,
            on_warmup=lambda done, total, name: progress.update(task, completed=done, total=total, note=name),
        )
        total = sum(len(question.turns) for question in questions)
        task = progress.add_task(f"{speculation}: answering", total=total, note="")
        times = None
        if tree is not None and tree.uses_head:
            times = measure_steps(plain.runner, speculative.runner, context=128)
        with plain, speculative:
            found = acceptance.evaluate(
                plain,
                speculative,
                questions,
                acceptance.Report(run.bench, speculation, run.temperature, run.concurrency),
                max_tokens=run.max_tokens,
                on_answer=lambda so_far: progress.update(
                    task,
                    completed=so_far.plain.num_answers + so_far.num_skipped,
                    note=f"tau {so_far.speculative.acceptance.tau:.2f}",
                ),
            )
    host = speculative.stats()
    steps = times.to_json() if times else {}
    steps["host_ms"] = 1e3 * host.host_seconds / max(1, host.num_steps)
    return found, steps, times
