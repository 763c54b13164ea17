"""Trackers that a run's metrics are sent to, beside `metrics.jsonl`: Weights & Biases, and TensorBoard's event files.

Both are optional extras and are imported only when a run asks for them; nothing here is reached otherwise. A row is a
line of `metrics.jsonl`; what is not a number in it (names, lists, tables) is spelled out as `name/key`.
"""

import importlib
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from specserve.errors import ConfigError
from specserve.host import whole_file

WANDB_ID_FILE = "wandb-id.txt"
TENSORBOARD_FOLDER = "tensorboard"
PROJECT = "specserve"  # unless WANDB_PROJECT is set


class Tracker(Protocol):
    """Sends rows of metrics somewhere. They come in the order of their steps."""

    def log(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def open_trackers(
    names: Sequence[str],
    folder: Path,  # of the run, which keeps what a resumed run needs
    settings: Mapping[str, Any],  # of the run, nested
) -> list[Tracker]:
    """Begin the trackers of these names. Raises ConfigError where one is not installed or cannot begin."""
    kinds = {"wandb": WandbTracker, "tensorboard": TensorBoardTracker}
    trackers: list[Tracker] = []
    try:
        for name in dict.fromkeys(names):
            trackers.append(kinds[name](folder, settings))
    except BaseException:
        close(trackers)
        raise
    return trackers


def close(trackers: Sequence[Tracker]) -> None:
    for tracker in trackers:
        tracker.close()


class WandbTracker:
    """A run of Weights & Biases. Its id stays in the folder, so a resumed run goes on in the same one. Everything that
    wandb reads from its environment holds: WANDB_MODE=offline writes to the folder and needs no network."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        wandb = _load("wandb", "wandb", "wandb")
        id_file = folder / WANDB_ID_FILE
        if not id_file.is_file():
            with whole_file(id_file) as partial:
                partial.write_text(uuid.uuid4().hex[:8])
        # its terminal capture and the live bar would overwrite each other
        quiet = wandb.Settings(console="off")
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or PROJECT,
                name=folder.resolve().name,
                id=id_file.read_text().strip(),
                resume="allow",
                dir=str(folder),
                config=dict(settings),
                settings=quiet,
            )
        except (wandb.Error, ValueError) as error:
            raise ConfigError(
                f"--trackers wandb: {str(error).splitlines()[0]}; log in (`wandb login` or WANDB_API_KEY), or set "
                "WANDB_MODE=offline"
            ) from error

    def log(self, row: Mapping[str, Any]) -> None:
        self._run.log(dict(scalars(row)), step=row["step"])

    def close(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """Writes TensorBoard's event files into the folder's `tensorboard/`."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._make = _load("tensorboardX", "tensorboardX", "tensorboard").SummaryWriter
        self._folder, self._settings = folder / TENSORBOARD_FOLDER, settings
        self._is_resumed = self._folder.is_dir()
        self._writer: Any = None

    def log(self, row: Mapping[str, Any]) -> None:
        if self._writer is None:
            self._writer = self._open(row["step"])
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> Any:
        # rows of the session before are hidden from this step on, because they are logged again
        writer = self._make(str(self._folder), purge_step=step if self._is_resumed else None)
        text = "\n".join(f"    {name}: {value}" for name, value in _leaves(self._settings))
        writer.add_text("settings", text, step)
        return writer


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a row but its step, by names that trackers take: `rollout_loss/0`, `arms/chain_3_T_0/tau`."""
    for name, value in _leaves(row):
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
            yield re.sub(r"[^-/.\w]", "_", name), value


def _leaves(values: Mapping[str, Any] | Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    items = values.items() if isinstance(values, Mapping) else enumerate(values)
    for key, value in items:
        if isinstance(value, Mapping | list | tuple):
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _load(module: str, package: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"--trackers {extra} needs {package}, which is not installed; `pip install 'specserve[{extra}]'`"
        ) from error
