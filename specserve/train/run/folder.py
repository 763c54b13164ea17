"""The output folder of a run: its lock, the settings that the run was started with, and its metrics line by line.

It holds `run.yaml`, `metrics.jsonl`, `state/` (see `checkpoints.train_state`) and the exported head. This file knows
no training.
"""

import dataclasses
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from specserve import config
from specserve.checkpoints.tensors import SINGLE_FILE
from specserve.errors import CheckpointError, ConfigError
from specserve.host import hold, whole_file
from specserve.train.run.checks import check_settings
from specserve.train.settings import TrainRun

METRICS_FILE = "metrics.jsonl"
SETTINGS_FILE = "run.yaml"
STATE_FOLDER = "state"

# A resumed run may change these settings. Everything else decides the curve, or the shape of the state.
MAY_CHANGE = frozenset(
    {
        "target",  # where it lies; that it is the same one is checked by its fingerprint
        "mesh",
        "coordinator",
        "num_processes",
        "process_id",
        "join_seconds",
        "ray",
        "ray_address",
        "num_workers",
        "max_failures",
        "check_weights",
        "output",
        "trackers",
        "dry_run",
        "data.workers",
        "data.answer_slots",
        "data.eval_prompts",
        "draft.export_dtype",
        "train.max_steps",
        "train.max_minutes",
        "train.accumulate",
        "train.remat",
        "train.log_every",
        "train.eval_every",
        "train.save_every",
        "train.keep",
        "train.patience",
        "train.resume",
        "eval.speculation",
        "eval.temperature",
        "eval.eval_tokens",
        "eval.bench",
        "eval.bench_limit",
        "service.target_service",
        "service.target_mesh",
        "service.target_ahead",
    }
)


class RunFolder:
    """A folder that this process alone may write, until it is closed or the process dies."""

    def __init__(self, run: TrainRun, *, is_first: bool = True) -> None:
        """Make or open it. Of several processes only the first locks and writes. Raises ConfigError where the settings
        do not go with what is there, CheckpointError where the folder cannot be written."""
        check_settings(run)
        self.path = Path(run.output)
        self.is_first = is_first
        self._lock: TextIO | None = None
        try:
            if self.path.exists() and not self.path.is_dir():
                raise ConfigError(f"{self.path} is a file; give another --output")
            if run.train.resume and not (self.path / SETTINGS_FILE).is_file():
                raise ConfigError(f"{self.path}: no run was started here, so there is nothing to --resume")
            self.path.mkdir(parents=True, exist_ok=True)
            if is_first:
                self._lock = _locked(self.path)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be written ({error.strerror}); give another --output"
            ) from error
        try:
            self._check(run)
            # the file says nothing of this start: a later run resumes only where that is asked for
            train = dataclasses.replace(run.train, resume=False)
            self._settings = config.to_yaml(dataclasses.replace(run.shared, dry_run=False, train=train))
            if not (run.train.resume and self.has_state):
                self.keep_settings()
        except BaseException:
            self.close()
            raise

    def keep_settings(self) -> None:
        """Write the settings of the run, which a run that goes on from a state does once that is its target's."""
        if self.is_first:
            _replace(self.path / SETTINGS_FILE, self._settings)

    @property
    def state(self) -> Path:
        return self.path / STATE_FOLDER

    @property
    def has_state(self) -> bool:
        """Return whether a whole state of the run is saved here."""
        return self.saved_step is not None

    @property
    def saved_step(self) -> int | None:
        """The step of the newest whole state that is saved here; None where there is none."""
        if not self.state.is_dir():
            return None
        return max((int(entry.name) for entry in self.state.iterdir() if entry.name.isdecimal()), default=None)

    def close(self) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check(self, run: TrainRun) -> None:
        settings = self.path / SETTINGS_FILE
        if not run.train.resume:
            if self.has_state:
                raise ConfigError(f"{self.path} holds the state of a run; {self._ways_on(run)}")
            if (self.path / SINGLE_FILE).exists() and not settings.is_file():
                raise ConfigError(f"{self.path} holds weights that no run here has written; give another --output")
            return
        before = config.values(config.resolve(TrainRun, file=settings))
        different = [
            f"{name} was {before[name]}, now it is {now}"
            for name, now in config.values(run).items()
            if name not in MAY_CHANGE and before[name] != now
        ]
        if different:
            raise ConfigError(
                f"{self.path}: cannot --resume with other settings, the curve would be another one: "
                f"{'; '.join(different)}. Go on with `--config {settings} --resume`, or begin a new run from this head "
                f"(--init-from {self.path} and another --output)"
            )

    def _ways_on(self, run: TrainRun) -> str:
        """Return the ways on for a run that finds another one here, with which it can go on if that has its target."""
        try:
            there = config.resolve(TrainRun, file=self.path / SETTINGS_FILE).target
        except (ConfigError, OSError):
            there = "which its settings do not say"
        if there == run.target:
            return "go on with it (--resume), give another --output, or remove the folder"
        return f"give another --output, or remove the folder; only a run of its target, {there}, can --resume it"


class MetricsFile:
    """`metrics.jsonl`: one JSON object per line. Of several processes only the first writes."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.path / METRICS_FILE
        self._file: TextIO | None = None
        self._is_first = folder.is_first

    def open(self, step: int, *, is_measured: bool) -> None:
        """Open the file for a run that goes on after this step, whose head was measured already or not. Rows of later
        steps, half a line at the end, and the measurements of an ending that this run has not come to yet are dropped.
        Raises CheckpointError."""
        if not self._is_first:
            return

        def stays(row: dict[str, Any]) -> bool:
            is_loss = row["tau"] is None
            return row["step"] < step or (row["step"] == step and (is_loss or is_measured))

        left = [line for row, line in self._rows() if stays(row) and not row.get("is_last")] if step else []
        try:
            _replace(self._path, "".join(left))
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be written ({error.strerror})") from error

    def write(self, row: dict[str, Any]) -> None:
        """Append one row, all of whose numbers are finite. Raises CheckpointError when the disk is full."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise CheckpointError(
                f"{self._path}: cannot be written ({error.strerror}); make room and go on with --resume"
            ) from error

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _rows(self) -> Iterable[tuple[dict[str, Any], str]]:
        if not self._path.is_file():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):  # the process died in the middle of it
                return
            try:
                row = json.loads(line)
            except ValueError as error:
                raise CheckpointError(
                    f"{self._path}, line {number}: not JSON ({error}); repair or remove it"
                ) from error
            yield row, line


def wait_until_free(folder: Path, seconds: float) -> None:
    """Wait at most so long until no process trains in the folder: one that was killed may take a moment to be gone."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            _locked(folder).close()
            return
        except ConfigError:
            time.sleep(0.1)


def _locked(folder: Path) -> TextIO:
    """Lock the folder. The lock goes with the process, however that ends."""
    try:
        return hold(folder)
    except BlockingIOError:
        raise ConfigError(
            f"{folder}: another process is training there; wait for it, or give another --output"
        ) from None


def _replace(path: Path, text: str) -> None:
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
