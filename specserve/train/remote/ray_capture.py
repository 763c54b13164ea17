"""`specserve data capture`: the hidden states of a run's data, captured before it trains, here or by workers of a Ray
cluster. Each worker has the target and writes whole files of the folder, so what is there is not captured again."""

import logging
import time
from collections.abc import Callable
from typing import Any

from specserve import cluster
from specserve.checkpoints.source import resolve_target
from specserve.errors import CapacityError, ConfigError
from specserve.mesh import num_devices, parse_mesh, use_compilation_cache
from specserve.provenance import fingerprint
from specserve.train.capture import Capturer, FeatureFolder, OnRows, log_time_left
from specserve.train.run.checks import check_settings
from specserve.train.run.prepare import Materials, load_materials
from specserve.train.settings import TrainRun

logger = logging.getLogger(__name__)


def capture_states(run: TrainRun, on_rows: OnRows) -> FeatureFolder:
    """Capture what is missing of a run's features. `on_rows` hears of what this process captures. Raises what `prepare`
    does, ConfigError for settings that are not for this, and CapacityError where workers die again and again."""
    check_settings(run)
    if not run.features.capture:
        raise ConfigError("--capture DIR says where the hidden states are kept; give it")
    if run.coordinator or run.data.regenerate:
        raise ConfigError(
            "data capture is for one process or, with --ray, for workers, and for answers that are there: give no "
            "--coordinator, and with --no-regenerate the file of specserve data regenerate as --source"
        )
    if not run.ray:
        mesh = parse_mesh(run.mesh)
        return load_materials(run, mesh).capture(run.features, mesh, on_rows)
    ray = cluster.connect(run.ray_address)  # before JAX has threads, which are not for a process that forks
    try:
        materials = load_materials(run, None)
        features = materials.features(run.features)
        if features.missing():
            pool = cluster.Pool(run.num_workers, cluster.reserve(ray, num_devices(run.mesh), run.num_workers))
            _capture_on_ray(ray, pool, run.target, run.mesh, materials, features)
    finally:
        ray.shutdown()
    if left := features.missing():
        raise CapacityError(f"{features.folder}: {len(left)} files are missing; run the same command again")
    return features


def _capture_on_ray(
    ray: Any, pool: cluster.Pool, target: str, mesh: str, materials: Materials, features: FeatureFolder
) -> None:
    missing, begin = features.missing(), time.monotonic()
    data = ray.put((materials.loaded.rows, materials.data.target_ids))
    arguments = target, mesh, features, data, materials.data.loader.batch_size, materials.is_checked
    for done, number in enumerate(cluster.map_over(ray, missing, _make_writer, arguments, pool), start=1):
        log_time_left(features, number, done, len(missing), begin)


def _make_writer(
    target: str,  # as the command was given it
    mesh: str,  # of each worker
    features: FeatureFolder,
    data: Any,  # Ray's reference to (rows, draft vocabulary)
    batch_size: int,
    is_checked: bool,  # every weight of the target must be a number
) -> Callable[[list[int]], int]:
    """Load the target in a worker. Returns the function that writes the file of one number and returns the number."""
    use_compilation_cache()
    folder = resolve_target(target).folder
    if fingerprint(folder) != features.manifest.target:
        raise ConfigError(
            f"{target} is another target in {folder} of this worker than where the command was started; give all "
            "hosts the same files"
        )
    if not features.folder.is_dir():
        raise ConfigError(f"{features.folder} is not there for this worker; let --capture be on a disk that all share")
    rows, target_ids = cluster.load("ray").get(data)
    capturer = Capturer(
        features, folder, rows, target_ids, batch_size=batch_size, is_checked=is_checked, mesh=parse_mesh(mesh)
    )

    def write(numbers: list[int]) -> int:
        [number] = numbers
        capturer.write(number)
        return number

    return write
