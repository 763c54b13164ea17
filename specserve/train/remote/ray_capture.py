"""`specserve data capture`: the hidden states of a run's data, captured before it trains, here or by workers of a Ray
cluster. Each worker has the target and writes whole files of the folder, so what is there is not captured again."""

import logging
import pickle
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from specserve import cluster, log
from specserve.checkpoints.source import resolve_target
from specserve.errors import CapacityError, ConfigError, SpecServeError
from specserve.mesh import num_devices, parse_mesh, use_compilation_cache
from specserve.provenance import fingerprint
from specserve.train.capture import Capturer, FeatureFolder, capture, say_left
from specserve.train.run.checks import check_settings
from specserve.train.run.prepare import load_materials
from specserve.train.settings import TrainRun

logger = logging.getLogger(__name__)


def capture_states(run: TrainRun) -> FeatureFolder:
    """Capture what is missing of a run's features. Raises what `prepare` does, ConfigError for settings that are not
    for this, and CapacityError where workers die again and again."""
    check_settings(run)
    if not run.features.capture:
        raise ConfigError("--capture DIR says where the hidden states are kept; give it")
    if run.coordinator or run.data.regenerate:
        raise ConfigError(
            "data capture is for one process or, with --ray, for workers, and for answers that are there: give no "
            "--coordinator, and with --no-regenerate the file of specserve data regenerate as --source"
        )
    if run.ray:
        return _capture_on_ray(run)
    mesh = parse_mesh(run.mesh)
    has = load_materials(run, mesh)
    features = has.features(run)
    capture(features, has.source.folder, run, has.loaded.rows, has.data.target_ids, mesh)
    return features


def _capture_on_ray(run: TrainRun) -> FeatureFolder:
    ray = cluster.connect(run.ray_address)  # before JAX has threads, which are not for a process that forks
    try:
        has = load_materials(run, None)
        features = has.features(run)
        if missing := features.missing():
            rows = ray.put((has.loaded.rows, has.data.target_ids))
            _capture(ray, _Told(run, cluster.Driver.here(), features, rows), missing)
    finally:
        ray.shutdown()
    if left := features.missing():
        raise CapacityError(f"{features.folder}: {len(left)} files are missing; run the same command again")
    return features


@dataclass(frozen=True)
class _Told:
    """The message that every worker gets."""

    run: TrainRun
    driver: cluster.Driver
    features: FeatureFolder
    rows: Any  # the reference of (rows, draft vocabulary) in Ray's store


def _capture(ray: Any, told: _Told, missing: list[int]) -> None:
    run, begin = told.run, time.monotonic()
    each = cluster.reserve(ray, num_devices(run.mesh), run.num_workers)
    items = [pickle.dumps(number) for number in missing]
    written = cluster.map_over(ray, items, Worker, (told,), run.num_workers, size=1, calls=1, each=each)
    for done, found in enumerate(map(pickle.loads, written), start=1):
        if isinstance(found, Exception):
            raise found
        say_left(told.features, found, done, len(missing), begin)


class Worker:
    """A worker with one target, as an actor of Ray Data. An error is returned as a result, because Ray would try again
    if it were raised."""

    def __init__(self, told: _Told) -> None:
        self._error: SpecServeError | None = None
        try:
            told.driver.enter()
            log.setup("warning")
            use_compilation_cache()
            self._capturer = _capturer(told)
        except SpecServeError as error:
            self._error = error

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"found": np.array([pickle.dumps(self._error or self._write(raw)) for raw in batch["item"]], object)}

    def _write(self, raw: bytes) -> int | SpecServeError:
        number = pickle.loads(raw)
        try:
            self._capturer.write(number)
        except SpecServeError as error:
            return error
        return number


def _capturer(told: _Told) -> Capturer:
    run, features = told.run, told.features
    folder = resolve_target(run.target).folder
    if fingerprint(folder) != features.manifest.target:
        raise ConfigError(
            f"{run.target} is another target in {folder} of this worker than where the command was started; give all "
            "hosts the same files"
        )
    if not features.folder.is_dir():
        raise ConfigError(f"{features.folder} is not there for this worker; let --capture be on a disk that all share")
    rows, ids = cluster.load("ray").get(told.rows)
    return Capturer(features, folder, run, rows, ids, parse_mesh(run.mesh))
