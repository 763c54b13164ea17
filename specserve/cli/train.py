"""`specserve train`: a draft head for a target."""

import os
import shlex
import traceback

from rich.markup import escape

from specserve import processes
from specserve.cli.options import show_error
from specserve.cli.plan_view import show_plan
from specserve.cli.progress import console
from specserve.cli.training_bar import TrainingBar
from specserve.errors import SpecServeError
from specserve.train.observers import observing
from specserve.train.prepare import prepare
from specserve.train.run_folder import SETTINGS_FILE, RunFolder
from specserve.train.settings import TrainRun


def train(run: TrainRun) -> None:
    """Train in this process, or in one of several that run this command. With `dry_run`, print the plan and return."""
    if run.dry_run:
        show_plan(run)
        return

    processes.join(run.coordinator, run.num_processes, run.process_id)
    try:
        _train(run)
    except Exception as error:
        if not run.coordinator:
            raise
        _report(error)
        os._exit(2)  # an orderly end would wait for the other processes, and they for this one


def _train(run: TrainRun) -> None:
    with RunFolder(run, is_first=processes.is_first()) as folder:
        if not folder.is_first:
            prepare(run, folder).train()
            return
        with observing(run) as observers:
            trainer = prepare(run, folder)
            with TrainingBar(trainer) as bar:
                last = trainer.train([bar.update, *observers])
    if last.ending.startswith("stopped"):
        settings = escape(shlex.quote(str(folder.path / SETTINGS_FILE)))
        console.print(
            f"{last.ending} at step {last.step}; go on with specserve train --config {settings} --resume",
            highlight=False,
            soft_wrap=True,
        )
    else:
        bar.summary(f"specserve serve --draft {shlex.quote(run.output)}")


def _report(error: Exception) -> None:
    """Show the error at once, because the process ends without unwinding."""
    if isinstance(error, SpecServeError):
        show_error(error)
    else:
        traceback.print_exception(error)
