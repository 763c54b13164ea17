"""`specserve bench engine`: how fast the engine is, from one client to many."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from rich.markup import escape

from specserve.checkpoints.tensors import write_json
from specserve.cli.progress import console
from specserve.drafters.speculation import parse_speculation
from specserve.errors import DataError
from specserve.eval.bench.comparison import BenchArm, Comparison, num_prompts
from specserve.eval.bench.engine import BenchReport, run_bench
from specserve.eval.bench.synthetic import bench_models
from specserve.eval.prompts import load_chats, random_length, random_prompts
from specserve.eval.report import bench_lines, bench_table, coupling_table
from specserve.eval.settings import BenchRun
from specserve.provenance import collect
from specserve.serve.launch import Models
from specserve.serve.progress import Bars


def engine(run: BenchRun, others: Callable[[Path], Mapping[str, BenchArm]] | None = None) -> None:
    """Measure plain decoding, fixed speculations and `auto` on the same questions in one process, in turns, print
    tables and write the report. `others` makes further arms of the target's folder, by
    name. Raises ConfigError, CheckpointError or DataError."""
    for name in run.arms:
        if name != "auto":
            parse_speculation(name)  # a wrong one is reported before minutes of work
    run = replace(run, input_len=random_length(run.bench, run.input_len, run.max_model_len - run.max_tokens))
    models = bench_models(run)
    further = others(models.target.folder) if others else {}
    report = _measure(run, models, _prompts(run, models), further)
    _show(report)
    if run.output:
        draft = models.draft.name if models.draft else ""
        facts = {"target": models.name, "draft": draft, "settings": asdict(run)}
        write_json(Path(run.output), {**facts, **report.to_json(), "provenance": collect()})
        console.print(f"report written to {escape(run.output)}")


def _prompts(run: BenchRun, models: Models) -> list[list[int]]:
    if run.input_len:
        return random_prompts(range(1, models.target.config.vocab_size), num_prompts(run), run.input_len, run.seed)
    assert models.tokenizer is not None
    chats = load_chats(run.bench, num_prompts(run), run.history)
    rendered = [models.tokenizer.render_chat(chat) for chat in chats]
    prompts = [prompt for prompt in rendered if len(prompt) + run.max_tokens <= run.max_model_len]
    if not prompts:
        raise DataError(f"{run.bench}: no prompt leaves room for {run.max_tokens} tokens; raise --max-model-len")
    lengths = sorted(map(len, prompts))
    console.print(
        f"{len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens, median {lengths[len(lengths) // 2]}; "
        f"{len(rendered) - len(prompts)} do not fit"
    )
    return prompts


def _measure(run: BenchRun, models: Models, prompts: list[list[int]], others: Mapping[str, BenchArm]) -> BenchReport:
    with Bars() as progress:
        compiling = progress.add("compiling")
        rounds = len(run.temperature) * len(run.concurrency) * run.rounds
        asking = progress.add("asking", total=rounds)

        def on_warmup(arm: str, done: int, total: int, name: str) -> None:
            progress.update(compiling, completed=done, total=total, note=f"{arm}: {name}")

        def on_round(comparison: Comparison) -> None:
            rates = ", ".join(f"{name} {result.rates[-1]:.0f}" for name, result in comparison.arms.items())
            note = f"{comparison.concurrency} clients, T={comparison.temperature:g}: {rates} tokens/s"
            progress.update(asking, advance=1, note=note)

        return run_bench(models, run, prompts, others=others, on_warmup=on_warmup, on_round=on_round)


def _show(report: BenchReport) -> None:
    for temperature in report.run.temperature:
        console.print(bench_table(report.comparisons, temperature))
    if report.couplings:
        console.print(coupling_table(report.couplings))
    for line in bench_lines(report):
        console.print(line, highlight=False)
