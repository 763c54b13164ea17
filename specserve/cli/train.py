"""`specserve train`: a draft head for a target, from the target's name to a head that was measured."""

import functools
import logging
import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.markup import escape
from rich.progress import Progress

from specserve import config, processes
from specserve.answers import cache as answers
from specserve.answers.cache import AnswerProgress, Watch
from specserve.answers.own_questions import Asked
from specserve.checkpoints.configs import find_config, is_known_here
from specserve.checkpoints.source import resolve_target
from specserve.cli import evaluate
from specserve.cli.options import report_error
from specserve.cli.plan_view import show_outline, show_plan
from specserve.cli.progress import console
from specserve.cli.training_bar import TrainingBar
from specserve.data import dataset
from specserve.errors import CheckpointError, DataError, SpecServeError
from specserve.eval.prompts import load_questions
from specserve.eval.settings import EvalRun
from specserve.mesh import mesh_sizes
from specserve.plan.training import make_plan
from specserve.serve.progress import bar_columns
from specserve.train.remote import workers
from specserve.train.run import budget as budgets
from specserve.train.run.budget import Budget
from specserve.train.run.folder import SETTINGS_FILE, RunFolder
from specserve.train.run.observers import observing
from specserve.train.run.prepare import Mixture, load_mixture, prepare
from specserve.train.run.recipe import BENCH
from specserve.train.settings import DataSettings, TrainRun
from specserve.train.trainer import Observer, Trainer
from specserve.train.trainer import Progress as Moment

logger = logging.getLogger(__name__)

DATA_FILE = "data.jsonl"  # in the folder of a run that ends with it
SHOWN_EVERY = 60.0  # seconds, where there is no terminal for a bar


def train(run: TrainRun) -> None:
    """Train in this process, or in one of several that run this command. With `dry_run`, print the plan and return."""
    if run.dry_run:
        show_plan(make_plan(run))
        return
    if run.ray:
        workers.fit(run, _train)
        return

    processes.join(run.coordinator, run.num_processes, run.process_id, run.join_seconds)
    try:
        _train(run)
    except Exception as error:
        if not run.coordinator:
            raise
        report_error(error)
        # an orderly end would wait for the other processes, and they for this one
        os._exit(processes.exit_status(error))


def _train(run: TrainRun, listen: Callable[[Trainer], None] = lambda _trainer: None) -> None:
    """Run the stages: read the data, have the target answer, train, measure. `listen` is given the trainer of the
    first process before it begins, and may stop it."""
    with RunFolder(run, is_first=processes.is_first()) as folder:
        if not folder.is_first:
            prepare(run, folder).train()
            return
        if not is_known_here(run.target):
            resolve_target(run.target, needs_weights=False)
        show_outline(make_plan(run), console)
        with observing(run) as observers:
            mixture = None
            budget = budgets.begin(run.budget, folder.path, is_resumed=run.train.resume)
            if not run.is_of_several:  # read before the weights: where there is no hub, the error comes at once
                mixture = _read(run.target, run.data)
            benches = [bench for bench in run.eval.bench if _is_there(bench)]
            if run.data.regenerate and mixture:
                answer = functools.partial(answers.answer, run, resolve_target(run.target), mixture, budget)
                mixture, budget = _answered(answer, run.output)
            if run.data_only:
                _write_data(run, mixture or ())
                return
            last = _learn(run, folder, mixture, budget, observers, listen)
    if last.ending.startswith("stopped"):
        _show_how_to_go_on(run.output, f"{last.ending} at step {last.step}")
        return
    for bench in benches:
        _measure(run, bench)


def _read(name: str, data: DataSettings) -> Mixture:
    """Read the sources of a run for the target of this name, of which the tokenizer and the config are enough."""
    try:
        folder = resolve_target(name, needs_weights=False).folder
    except CheckpointError:
        resolve_target(name)  # its error names the weights too
        raise
    target, _ = find_config(str(folder))
    return load_mixture(name, data, target.vocab_size, needs_answers=not data.regenerate)


def _write_data(run: TrainRun, mixture: Mixture) -> None:
    """Write the conversations that the run would train on, and say what to go on with."""
    path = Path(run.output) / DATA_FILE
    drawn = dataset.draw(mixture, run.data.max_conversations, run.train.seed)
    number = dataset.write_conversations(drawn, path)
    next_command = f"specserve train --target {shlex.quote(run.target)} --source {shlex.quote(str(path))}"
    line = f"{number:,} conversations are in {escape(str(path))}; next: [bold]{escape(next_command)}[/]"
    console.print(line, highlight=False, soft_wrap=True)


def _is_there(bench: str) -> bool:
    """Return whether there are questions to measure on at the end. The default questions may not be reachable, which
    is logged before training and does not stop it."""
    try:
        return bool(load_questions(bench, 0))
    except DataError as error:
        if bench != BENCH:
            raise
        logger.warning("the head will not be measured on %s: %s", bench, error)
        return False


def _answered(answer: Callable[[Watch], tuple[Mixture, Budget | None]], output: str) -> tuple[Mixture, Budget | None]:
    """Have the target answer, and show how far it is. Answers that are there when the process ends are kept."""
    shown = [time.monotonic()]
    with Progress(*bar_columns(), console=console) as progress:
        compiling = progress.add_task("compiling", note="", visible=False)
        asking = progress.add_task("asking itself", note="", visible=False)
        answering = progress.add_task("answering", note="", visible=False)

        def on_warmup(done: int, total: int, name: str) -> None:
            progress.update(compiling, completed=done, total=total, note=name, visible=True)

        def on_question(asked: Asked, number: int) -> None:
            done, note = len(asked.kept), f"of {asked.num_candidates:,}"
            progress.update(asking, completed=done, total=number, note=note, visible=True)
            if not console.is_terminal and time.monotonic() > shown[-1] + SHOWN_EVERY:
                shown.append(time.monotonic())
                console.print(f"asked itself {done:,} questions of {number:,}", highlight=False, soft_wrap=True)

        def on_answer(so_far: AnswerProgress) -> None:
            account = so_far.account
            note = f"{account.num_tokens:,} tokens  {account.tokens_per_second:,.0f} tokens/s"
            progress.update(answering, completed=so_far.done, total=so_far.total, note=note, visible=True)
            if not console.is_terminal and time.monotonic() > shown[-1] + SHOWN_EVERY:
                shown.append(time.monotonic())
                console.print(f"answered {so_far.done:,} of {so_far.total:,}  {note}", highlight=False, soft_wrap=True)

        try:
            return answer(Watch(on_warmup, on_question, on_answer))
        except KeyboardInterrupt:
            progress.stop()
            _show_how_to_go_on(output, "stopped; the answers so far are kept")
            raise


def _learn(
    run: TrainRun,
    folder: RunFolder,
    mixture: Mixture | None,
    budget: Budget | None,
    observers: Sequence[Observer],
    listen: Callable[[Trainer], None],
) -> Moment:
    """Train for as many steps as the settings ask for, or the budget has time for. Returns the last moment."""
    begin = time.monotonic()
    if budget:
        run = budget.apply(run)
    trainer = prepare(run, folder, mixture)
    if budget and not budget.steps:
        with console.status("measuring a step"):
            seconds = trainer.learner.time_steps(budget.probe_seconds)
        spent = budget.spent + time.monotonic() - begin
        budget = budget.with_steps(most=run.train.max_steps, seconds_each=seconds, spent=spent)
        budgets.record(folder.path, budget)
        console.print(f"{budget.steps:,} steps of {seconds:.3g} s fit the budget", highlight=False)
        run = budget.apply(run)
        trainer.rebound(run.train)
    listen(trainer)
    with TrainingBar(trainer) as bar:
        last = trainer.train([bar.update, *observers])
    if not last.ending.startswith("stopped"):
        bar.summary(f"specserve serve --draft {shlex.quote(run.output)}")
    return last


def _measure(run: TrainRun, bench: str) -> None:
    """Measure the head as `specserve eval` does. An error here is logged, and the head stays."""
    report, mesh = Path(run.output) / f"eval-{Path(bench).stem}.json", ""
    if not run.is_of_several:  # of several processes only the first one measures, on its own
        mesh = _of_one_copy(run.mesh)
    flags = {
        "draft": run.output,
        "target": run.target,
        "quantization": run.quantization,
        "mesh": mesh,
        "bench": bench,
        "speculation": ",".join(run.eval.speculation),
        "temperature": str(run.eval.temperature[0]),
        "output": str(report),
    }
    try:
        evaluate.evaluate(config.resolve(EvalRun, flags=flags))
    except SpecServeError as error:
        logger.warning("the head is there, but was not measured on %s: %s", bench, error)


def _of_one_copy(mesh: str) -> str:
    """Return the parts of a mesh that cut the models. One question is asked at a time, for which one copy of them is
    enough."""
    sizes = mesh_sizes(mesh)
    return ",".join(f"{axis}={sizes[axis]}" for axis in ("tensor", "expert") if axis in sizes)


def _show_how_to_go_on(folder: str, what: str) -> None:
    settings = escape(shlex.quote(str(Path(folder) / SETTINGS_FILE)))
    console.print(f"{what}; go on with specserve train --config {settings} --resume", highlight=False, soft_wrap=True)
