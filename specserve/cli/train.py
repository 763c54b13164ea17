"""`specserve train`: a draft head for a target, from the target's name to a head that was measured."""

import contextlib
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.markup import escape

from specserve import config, processes
from specserve.answers import cache as answers
from specserve.answers.cache import AnswerProgress
from specserve.answers.own_questions import Asked
from specserve.checkpoints.configs import find_config, is_known_here
from specserve.checkpoints.source import resolve_target
from specserve.cli import evaluate
from specserve.cli.interrupts import STATUS, Interrupts
from specserve.cli.options import report_error
from specserve.cli.plan_view import show_outline, show_plan
from specserve.cli.progress import console
from specserve.cli.training_bar import TrainingBar
from specserve.cli.watch import StageState, StageWatch
from specserve.data import dataset
from specserve.errors import CheckpointError, DataError, SpecServeError
from specserve.eval.prompts import load_questions
from specserve.eval.settings import EvalRun
from specserve.mesh import mesh_sizes
from specserve.plan.training import make_plan
from specserve.train.remote import workers
from specserve.train.run import budget as budgets
from specserve.train.run.budget import Budget
from specserve.train.run.folder import SETTINGS_FILE, RunFolder
from specserve.train.run.observers import observing
from specserve.train.run.prepare import Mixture, load_mixture, prepare
from specserve.train.run.recipe import BENCH
from specserve.train.run.report import serve_command
from specserve.train.settings import DataSettings, TrainRun
from specserve.train.trainer import SAVING, Observer, Trainer
from specserve.train.trainer import Progress as Moment

logger = logging.getLogger(__name__)

MOST_PASSES = 10  # over all conversations, before a budget is said to be too short for its steps
DATA_FILE = "data.jsonl"  # in the folder of a run that ends with it


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
        with _ending_in_time(run, folder) as (watch, interrupts), observing(run) as observers:
            mixture, start = None, time.monotonic()
            budget = budgets.begin(run.budget, folder.path, is_resumed=run.train.resume)
            if not run.is_of_several:  # read before the weights: where there is no hub, the error comes at once
                watch.begin("reading the questions and answers")
                mixture = _read(run.target, run.data)
            benches = [bench for bench in run.eval.bench if _is_there(bench, run.lora)]
            if run.data.regenerate and mixture:
                watch.begin("loading the target")
                target = resolve_target(run.target)
                budget = budget and budget.after(time.monotonic() - start)
                mixture, budget = answers.answer(run, target, mixture, budget, _showing(watch))
            if run.data_only:
                _write_data(run, mixture or ())
                return

            def begin(trainer: Trainer) -> None:
                interrupts.is_saving = lambda: trainer.doing.what == SAVING
                listen(trainer)

            last = _learn(run, folder, mixture, budget, observers, begin, watch)
            if last.ending.startswith("stopped"):
                interrupts.is_reported = True
                _show_how_to_go_on(run.output, f"{last.ending} at step {last.step}")
                return
    with Interrupts(lambda: _show_how_to_go_on(run.output, "stopped while measuring; the head is there")):
        for bench in benches:
            _measure(run, bench)


@contextlib.contextmanager
def _ending_in_time(run: TrainRun, folder: RunFolder) -> Iterator[tuple[StageWatch, Interrupts]]:
    """Watch over the stages of a run, which Ctrl-C ends within seconds. Processes of a run of several stop together,
    after the step that they are in."""
    watch = StageWatch()

    def say() -> None:
        kept = "the answers that are there are kept"
        if step := folder.saved_step:
            kept = f"the state of step {step:,} is kept"
        _show_how_to_go_on(run.output, f"stopped while {watch.stage}; {kept}")

    interrupts = Interrupts(say)
    with contextlib.ExitStack() as stack:
        if not run.is_of_several:
            stack.enter_context(interrupts)
        stack.enter_context(watch)
        try:
            yield watch, interrupts
        except KeyboardInterrupt:
            interrupts.report()
            raise SystemExit(STATUS) from None


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
    if run.lora:
        next_command += f" --lora {shlex.quote(run.lora)}"
    line = f"{number:,} conversations are in {escape(str(path))}; next: [bold]{escape(next_command)}[/]"
    console.print(line, highlight=False, soft_wrap=True)


def _is_there(bench: str, lora: str) -> bool:
    """Return whether there are questions to measure on at the end. The default questions may not be reachable, which
    is logged before training and does not stop it; nor does an adapter, which only a server has beside its target."""
    if lora:
        logger.warning("the head will not be measured on %s: a server with --lora says its tau by adapter", bench)
        return False
    try:
        return bool(load_questions(bench, 0))
    except DataError as error:
        if bench != BENCH:
            raise
        logger.warning("the head will not be measured on %s: %s", bench, error)
        return False


def _showing(watch: StageWatch) -> answers.Watch:
    """Return what shows on the watch how far the answers are."""
    shown = StageState()

    def show(stage: str, state: StageState) -> None:
        nonlocal shown
        shown = state
        if watch.stage != stage:
            watch.begin(stage, lambda: shown)

    def on_warmup(done: int, total: int, name: str) -> None:
        show("compiling", StageState(f"{done} of {total} programs, the last one {name}", done / max(1, total)))

    def on_question(asked: Asked, number: int) -> None:
        text = f"{len(asked.kept):,} of at most {number:,} questions, {asked.num_candidates:,} candidates"
        show("asking itself", StageState(text, len(asked.kept) / number))

    def on_answer(so_far: AnswerProgress) -> None:
        account = so_far.account
        text = (
            f"{so_far.done:,} of about {so_far.total:,} conversations, {account.num_so_far:,} tokens, "
            f"{account.tokens_per_second:,.0f} tokens/s"
        )
        show("answering", StageState(text, so_far.done / max(1, so_far.total)))

    return answers.Watch(on_warmup, on_question, on_answer)


def _learn(
    run: TrainRun,
    folder: RunFolder,
    mixture: Mixture | None,
    budget: Budget | None,
    observers: Sequence[Observer],
    listen: Callable[[Trainer], None],
    watch: StageWatch,
) -> Moment:
    """Train for as many steps as the settings ask for, or the budget has time for. Returns the last moment."""
    begin = time.monotonic()
    if budget:
        run = budget.apply(run)
    watch.begin("loading the target and the rows")
    trainer = prepare(run, folder, mixture, watch.counting("capturing the target's states", "rows"))
    if budget and not budget.steps:
        watch.begin("compiling and timing a step")
        step, measuring = trainer.learner.time_steps(budget.probe_seconds), 0.0
        if trainer.evaluator and budget.ending_seconds >= budgets.TIMED_FROM:
            watch.begin("timing a measurement of tau")
            start = time.monotonic()
            trainer.evaluator.measure(trainer.learner.state.params, is_last=False)
            measuring = time.monotonic() - start
        budget = budget.after(time.monotonic() - begin)
        budget = budget.with_steps(most=run.train.max_steps, step=step, measuring=measuring)
        budgets.record(folder.path, budget)
        run = budget.apply(run)
        trainer.rebound(run.train)
        times = f"tau is measured {budget.measurements} times" if budget.measurements > 1 else "tau at the end"
        seconds = f"{step.new:.3g} s" + (f", {step.seen:.3g} s over rows seen before," if step.seen < step.new else "")
        watch.say(f"{budget.steps:,} steps of {seconds} fit the budget; {times}")
        passes = budget.steps / trainer.learner.data.loader.num_new_steps
        if passes > MOST_PASSES:
            logger.warning(
                "%d steps read all conversations %.0f times, so the head learns them by heart: the budget had time for "
                "few. A longer --budget answers more",
                *(budget.steps, passes),
            )
    listen(trainer)
    bar = TrainingBar(trainer, watch)
    last = trainer.train([bar.update, *observers])
    if not last.ending.startswith("stopped"):
        bar.summary(serve_command(run.output, run.lora))
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
        "limit": str(run.eval.bench_limit),
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
