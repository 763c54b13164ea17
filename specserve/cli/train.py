"""`specserve train`: a draft head for a target."""

import os
import shlex
import traceback

from specserve.cli.options import command, show_error
from specserve.errors import SpecServeError
from specserve.train.settings import TrainRun


@command(TrainRun)
def train(run: TrainRun) -> None:
    """Train a draft head against a frozen target and write it to a folder that `serve --draft` takes."""
    if run.dry_run:
        from specserve.cli.plan_view import show_plan

        show_plan(run)
        return
    from specserve import processes

    processes.join(run.coordinator, run.num_processes, run.process_id)
    try:
        _train(run)
    except Exception as error:
        if not run.coordinator:
            raise
        _report(error)
        os._exit(2)  # an orderly end would wait for the other processes, and they for this one


def _train(run: TrainRun) -> None:
    from rich.markup import escape

    from specserve import processes
    from specserve.cli.progress import console
    from specserve.cli.training_bar import TrainingBar
    from specserve.train.observers import observing
    from specserve.train.prepare import prepare
    from specserve.train.run_folder import SETTINGS_FILE, RunFolder

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
    """Now, for nothing else comes after it."""
    if isinstance(error, SpecServeError):
        show_error(error)
    else:
        traceback.print_exception(error)
