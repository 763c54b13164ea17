"""`specserve eval`: acceptance and speed of a head."""

from dataclasses import dataclass
from pathlib import Path

from specserve.cli.options import command
from specserve.config import setting


@dataclass(frozen=True)
class EvalRun:
    """Everything that `specserve eval` can be told."""

    draft: str = setting("", help="folder of a draft head; empty: the bundled one")
    target: str = setting("", help="preset, Hugging Face folder or hub id; empty: the one the draft was trained for")
    bench: str = setting("mt-bench", help="mt-bench, pydoc, or a .jsonl of questions")
    speculation: str = setting("chain:3", help="anything that serve takes but off: chain:K, auto, ngram:K, ...")
    limit: int = setting(0, help="ask only so many questions, evenly spread; 0: all", ge=0)
    max_tokens: int = setting(256, help="longest answer", ge=1)
    temperature: float = setting(0.0, help="0 is greedy", ge=0)
    concurrency: int = setting(1, help="sequences at once", ge=1)
    max_model_len: int = setting(0, help="prompt and answer together; 0: the target's context, at most 4,096", ge=0)
    output: str = setting("", help="write the JSON report here")


@command(EvalRun)
def evaluate(run: EvalRun) -> None:
    """Measure tau, acceptance by depth and category, and plain against speculative tokens/s in one run."""
    from rich.markup import escape
    from rich.progress import Progress

    from specserve.checkpoints.tensors import write_json
    from specserve.cli.progress import bar_columns, console
    from specserve.errors import ConfigError
    from specserve.eval import acceptance, prompts, report
    from specserve.eval.engines import engine_pair
    from specserve.eval.step_times import measure_steps
    from specserve.provenance import collect
    from specserve.serve.launch import load_models
    from specserve.speculative.tree import parse_speculation

    tree = None if run.speculation == "auto" else parse_speculation(run.speculation)
    if tree is None and run.speculation != "auto":
        raise ConfigError("--speculation off: there is nothing to evaluate; give a chain or a tree")
    questions = prompts.load_questions(run.bench, run.limit)
    models = load_models(run.target, run.draft)
    if models.head is None and tree is not None and tree.uses_head:
        raise ConfigError(f"there is no head for {models.name}; give one with --draft")
    with Progress(*bar_columns(), console=console, transient=True) as progress:
        task = progress.add_task("compiling", note="")
        pair = engine_pair(
            models,
            run.speculation,
            num_slots=run.concurrency,
            max_model_len=run.max_model_len,
            on_warmup=lambda done, total, name: progress.update(task, completed=done, total=total, note=name),
        )
        total = sum(len(question.turns) for question in questions)
        task = progress.add_task("answering", total=total, note="")
        times = None
        if tree is not None and tree.uses_head:
            times = measure_steps(pair.plain.runner, pair.speculative.runner, context=128)
        empty = acceptance.Report(run.bench, run.speculation, run.temperature, run.concurrency)
        with pair:
            found = acceptance.evaluate(
                pair.plain,
                pair.speculative,
                questions,
                empty,
                max_tokens=run.max_tokens,
                on_answer=lambda so_far: progress.update(
                    task, completed=so_far.num_answers + so_far.num_skipped, note=f"tau {so_far.tally.tau:.2f}"
                ),
            )
    console.print(report.summary_table([(run.draft or "bundled", found)], f"{run.bench}, {run.speculation}"))
    console.print(report.category_table(found))
    if times:
        console.print(report.step_line(times))
    if found.num_skipped:
        console.print(f"[yellow]{found.num_skipped} prompts did not fit the context and were not asked[/]")
    if run.output:
        host = pair.speculative.stats()
        steps = times.to_json() if times else {}
        steps["host_ms"] = 1e3 * host.host_seconds / max(1, host.num_steps)
        write_json(Path(run.output), {**found.to_json(), "step": steps, "provenance": collect()})
        console.print(f"report written to {escape(run.output)}")
