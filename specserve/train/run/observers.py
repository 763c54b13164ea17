"""The observers of a run beside the progress bar: the trackers that it asked for, and the report, which is written
whenever and however it ends."""

import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specserve import config, provenance
from specserve.interop.notes import read_notes
from specserve.train.run import report, trackers
from specserve.train.run.budget import decided
from specserve.train.run.folder import METRICS_FILE
from specserve.train.run.report import REPORT_FILE, RunReport
from specserve.train.settings import TrainRun
from specserve.train.trainer import Observer, Progress

logger = logging.getLogger(__name__)


@contextmanager
def observing(run: TrainRun) -> Iterator[Sequence[Observer]]:
    """The observers of a run, whose folder is there. Raises ConfigError where a tracker cannot begin: enter it before
    anything large is loaded."""
    folder = Path(run.output)
    opened = trackers.open_trackers(run.trackers, folder, dataclasses.asdict(run))

    def track(progress: Progress) -> None:
        if not progress.ending:
            for tracker in opened:
                tracker.log(progress.row())

    def write_report(progress: Progress) -> None:
        if progress.ending:
            found = RunReport(
                output=run.output,
                settings=config.changed(decided(run)),
                notes=read_notes(folder),
                rows=read_metrics(folder),
                ending=progress.ending,
                provenance=provenance.collect(),
            )
            try:
                report.write(folder / REPORT_FILE, found)
            except OSError as error:  # the head and the metrics are safe
                logger.error("%s: cannot be written (%s)", folder / REPORT_FILE, error.strerror)

    try:
        yield track, write_report
    finally:
        trackers.close(opened)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read `metrics.jsonl` of a run that has ended, one dictionary per line."""
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
