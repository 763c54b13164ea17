"""`specserve bench`: how fast, from one client to many."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specserve.cli.options import command
from specserve.config import setting

if TYPE_CHECKING:
    from specserve.eval.bench_cells import Arm, Plan
    from specserve.eval.bench_engine import BenchReport
    from specserve.serve.launch import Models
    from specserve.train.settings import TrainSettings

app = typer.Typer(help="Measurements of speed.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measurements of speed."""


@dataclass(frozen=True)
class BenchRun:
    """Everything that `specserve bench engine` can be told."""

    draft: str = setting("", help="folder of a draft head; empty: the bundled one with the bundled target, else none")
    target: str = setting("", help="preset, Hugging Face folder or hub id; empty: the one the draft was trained for")
    arms: tuple[str, ...] = setting(
        ("chain:3", "tree:4x2x7", "auto"), help="speculations to measure against plain decoding, as for serve"
    )
    concurrency: tuple[int, ...] = setting((1, 2, 4, 8, 16, 32), help="clients at once", ge=1)
    temperature: tuple[float, ...] = setting((0.0, 1.0), help="0 is greedy", ge=0)
    bench: str = setting("pydoc", help="pydoc, mt-bench, or a .jsonl of questions")
    history: int = setting(2, help="answered questions that a chat of pydoc brings along, at most", ge=0)
    rounds: int = setting(3, help="how often the arms take turns at each concurrency", ge=1)
    requests: int = setting(8, help="questions per round and arm, or as many as there are clients", ge=1)
    max_tokens: int = setting(128, help="longest answer", ge=2)
    max_model_len: int = setting(1024, help="prompt and answer together", ge=8)
    coupling: bool = setting(True, help="also measure what it brings that the draft ranks with the target's noise")
    transformers: bool = setting(False, help="also measure transformers' generate, greedy and one client (needs torch)")
    seed: int = setting(0, help="of the sampling", ge=0)
    output: str = setting("", help="write the JSON report here")


@app.command("engine")
@command(BenchRun)
def engine(run: BenchRun) -> None:
    """Measure plain decoding, fixed speculations and `auto` on the same questions in one process, in turns."""
    from rich.markup import escape

    from specserve.checkpoints.source import resolve_target
    from specserve.checkpoints.tensors import write_json
    from specserve.cli.progress import console
    from specserve.eval.bench_cells import Plan
    from specserve.eval.transformers_arm import transformers_arms
    from specserve.provenance import collect
    from specserve.serve.launch import load_models
    from specserve.speculative.tree import parse_speculation

    for name in run.arms:
        if name != "auto":
            parse_speculation(name)  # a wrong one is said before minutes of work
    plan = Plan(run.concurrency, run.temperature, run.rounds, run.requests, run.max_tokens, run.seed)
    models = load_models(run.target, run.draft)
    others = dict(transformers_arms(resolve_target(models.name).folder)) if run.transformers else {}
    report = _measure(run, models, _prompts(run, models, plan), plan, others)
    _show(report)
    if run.output:
        facts = {"target": models.name, "draft": run.draft or "bundled", "settings": asdict(run)}
        write_json(Path(run.output), {**facts, **report.to_json(), "provenance": collect()})
        console.print(f"report written to {escape(run.output)}")


def _prompts(run: BenchRun, models: "Models", plan: "Plan") -> list[list[int]]:
    from specserve.cli.progress import console
    from specserve.errors import DataError
    from specserve.eval.prompts import load_chats

    assert models.tokenizer is not None
    chats = load_chats(run.bench, plan.num_prompts, run.history)
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


def _measure(
    run: BenchRun, models: "Models", prompts: list[list[int]], plan: "Plan", others: "Mapping[str, Arm]"
) -> "BenchReport":
    from rich.progress import Progress

    from specserve.cli.progress import bar_columns, console
    from specserve.eval.bench_cells import Cell
    from specserve.eval.bench_engine import run_bench

    with Progress(*bar_columns(), console=console, transient=True) as progress:
        compiling = progress.add_task("compiling", note="")
        rounds = len(run.temperature) * len(run.concurrency) * run.rounds
        asking = progress.add_task("asking", total=rounds, note="")

        def on_warmup(arm: str, done: int, total: int, name: str) -> None:
            progress.update(compiling, completed=done, total=total, note=f"{arm}: {name}")

        def on_round(cell: Cell) -> None:
            rates = ", ".join(f"{name} {result.rates[-1]:.0f}" for name, result in cell.arms.items())
            note = f"{cell.concurrency} clients, T={cell.temperature:g}: {rates} tokens/s"
            progress.update(asking, advance=1, note=note)

        return run_bench(
            models,
            run.arms,
            prompts,
            plan,
            max_model_len=run.max_model_len,
            others=others,
            has_coupling=run.coupling,
            on_warmup=on_warmup,
            on_round=on_round,
        )


def _show(report: "BenchReport") -> None:
    from specserve.cli.progress import console
    from specserve.eval.report import bench_lines, bench_table, coupling_table

    for temperature in report.plan.temperatures:
        console.print(bench_table(report.cells, temperature))
    if report.couplings:
        console.print(coupling_table(report.couplings))
    for line in bench_lines(report):
        console.print(line, highlight=False)


@dataclass(frozen=True)
class TrainBenchRun:
    """Everything that `specserve bench train` can be told."""

    target: str = setting("pydoc", help="preset, Hugging Face folder or hub id")
    source: str = setting("pydoc", help="conversations, as for train")
    conversations: int = setting(2000, help="use so many of them, drawn by the seed", ge=8)
    batch_size: int = setting(8, help="rows per step", ge=1)
    seq_len: int = setting(256, help="tokens per row", ge=64)
    rollout: int = setting(4, help="training-time-test steps", ge=1, le=8)
    loss: str = setting("ce", help="as for train", choices=("ce", "kl", "tv", "lk", "lk-hybrid"))
    remat: bool = setting(False, help="compute rollout steps again in the backward pass")
    draft_vocab_size: int = setting(4096, help="draft vocabulary", ge=1)
    rounds: int = setting(5, help="how often the arms take turns", ge=1)
    steps: int = setting(8, help="steps of each arm in a round", ge=1)
    memory_seq_len: int = setting(2048, help="tokens per row for which memory is compared; 0: not at all", ge=0)
    seed: int = setting(0, help="which conversations, and the order", ge=0)
    output: str = setting("", help="write the JSON report here")


@app.command("train")
@command(TrainBenchRun)
def train(run: TrainBenchRun) -> None:
    """Measure a training step against the naive formulation on the same conversations and shapes, in turns."""
    import numpy as np
    from rich.markup import escape
    from rich.progress import Progress

    from specserve.checkpoints.load import load_target
    from specserve.checkpoints.source import resolve_target
    from specserve.checkpoints.tensors import write_json
    from specserve.cli.progress import bar_columns, console
    from specserve.data import sources
    from specserve.data.documents import tokenize
    from specserve.eval import bench_train
    from specserve.eval.report import memory_table, training_lines, training_table
    from specserve.mesh import default_dtype
    from specserve.provenance import collect
    from specserve.tokenizer import Tokenizer
    from specserve.train.settings import DraftSettings

    settings = _train_settings(run)
    folder = resolve_target(run.target).folder
    target = load_target(folder, dtype=default_dtype())
    chosen = sources.load(run.source, split="train")
    order = np.random.default_rng(run.seed).permutation(len(chosen))[: run.conversations]
    documents = tokenize([chosen[i] for i in order], Tokenizer.load(folder), run.seq_len).documents
    target_ids = np.arange(min(run.draft_vocab_size, target.config.vocab_size), dtype=np.int32)
    with Progress(*bar_columns(), console=console, transient=True) as progress:
        task = progress.add_task("compiling, then in turns", total=run.rounds, note="")

        def on_round(report: bench_train.TrainBenchReport) -> None:
            note = ", ".join(f"{name} {arm.useful[-1]:.0f} useful tokens/s" for name, arm in report.arms.items())
            progress.update(task, advance=1, note=note)

        report = bench_train.run_bench(
            *(target, documents, target_ids, settings, DraftSettings()),
            rounds=run.rounds,
            steps=run.steps,
            on_round=on_round,
        )
    console.print(training_table(report))
    for line in training_lines(report):
        console.print(line, highlight=False)
    found = {"settings": asdict(run), **report.to_json()}
    if run.memory_seq_len:
        cells = bench_train.memory_cells(settings, target.config, run.draft_vocab_size, [run.memory_seq_len])
        console.print(memory_table(cells))
        found["memory"] = [asdict(cell) for cell in cells]
    if run.output:
        write_json(Path(run.output), {**found, "provenance": collect()})
        console.print(f"report written to {escape(run.output)}")


@dataclass(frozen=True)
class MemoryBenchRun:
    """Everything that `specserve bench memory` can be told."""

    target: str = setting("qwen3-8b", help="preset, whose shapes are taken; nothing is loaded")
    batch_size: int = setting(1, help="rows per step", ge=1)
    seq_len: tuple[int, ...] = setting((512, 1024, 2048, 4096, 8192), help="tokens per row", ge=64)
    rollout: int = setting(7, help="training-time-test steps", ge=1, le=8)
    loss: str = setting("ce", help="as for train", choices=("ce", "kl", "tv", "lk", "lk-hybrid"))
    draft_vocab_size: int = setting(32_000, help="draft vocabulary", ge=1)
    num_layers: int = setting(0, help="layers of the target, 5 or more; 0: all, which take minutes to compile", ge=0)
    output: str = setting("", help="write the JSON report here")


@app.command("memory")
@command(MemoryBenchRun)
def memory(run: MemoryBenchRun) -> None:
    """Compile a training step of a target's shapes, and the naive formulation's, and say what memory they take."""
    from dataclasses import replace

    from specserve.checkpoints.tensors import write_json
    from specserve.cli.progress import console
    from specserve.errors import ConfigError
    from specserve.eval import bench_train
    from specserve.eval.report import memory_table
    from specserve.mesh import default_dtype
    from specserve.models.presets import PRESETS

    if run.target not in PRESETS:
        raise ConfigError(f"--target {run.target}: not a preset; `specserve targets` lists them")
    if 0 < run.num_layers < 5:
        raise ConfigError(f"--num-layers {run.num_layers}: a head taps three layers, so give 5 or more")
    target = replace(PRESETS[run.target].config(), dtype=default_dtype())
    target = replace(target, num_layers=run.num_layers) if run.num_layers else target
    settings = _train_settings(run)
    with console.status("compiling"):
        cells = bench_train.memory_cells(settings, target, run.draft_vocab_size, run.seq_len)
    console.print(memory_table(cells))
    if run.output:
        write_json(Path(run.output), {"settings": asdict(run), "memory": [asdict(cell) for cell in cells]})


def _train_settings(run: TrainBenchRun | MemoryBenchRun) -> "TrainSettings":
    from specserve import config
    from specserve.train.settings import TrainSettings

    shared = {name: getattr(run, name) for name in ("batch_size", "rollout", "loss")}
    rest = {"seq_len": run.seq_len, "remat": run.remat} if isinstance(run, TrainBenchRun) else {}
    return config.resolve(TrainSettings, arguments={**shared, **rest})
