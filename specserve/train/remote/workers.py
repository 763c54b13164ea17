"""A training run as workers of a Ray cluster (`specserve train --ray`).

Ray places the workers, and all of them are started again when one dies. Each is one process of `jax.distributed` and
runs what a process with `--coordinator` runs. A run goes on from its own state in the output folder.
"""

import dataclasses
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from specserve import cluster, launcher, log, processes
from specserve.drafters.registry import add_module
from specserve.errors import ConfigError
from specserve.launcher import GroupProcess, ProcessGroup
from specserve.mesh import num_devices
from specserve.processes import ProcessError
from specserve.train.remote.target_service import reserve_targets
from specserve.train.run.folder import RunFolder, wait_until_free
from specserve.train.settings import TrainRun
from specserve.train.trainer import Trainer

logger = logging.getLogger(__name__)

DEATH_SECONDS = 30.0  # for a worker that was killed to be gone
END_SECONDS = 5.0  # for the errors of the other workers, which then wait for the one that has ended

Work = Callable[[TrainRun, Callable[[Trainer], None]], None]  # the run, and a function that is given its trainer


class TrainingProcess(GroupProcess):
    """A worker, as an actor of Ray."""

    def __init__(self, run: TrainRun, work: Work, driver: cluster.Driver) -> None:
        self._run, self._work, self._driver = run, work, driver
        self._trainer: Trainer | None = None

    def run(self, address: str, number: int, count: int, attempt: int) -> None:
        self._driver.enter()
        log.setup()
        add_module(self._run.drafter_module)  # settings that come from another process were checked there alone
        logger.info("worker %d of %d is process %d on %s", number, count, os.getpid(), socket.gethostname())
        run = self._run
        if attempt:
            run = dataclasses.replace(run, train=dataclasses.replace(run.train, resume=True))
        if attempt and number == 0:
            wait_until_free(Path(run.output), DEATH_SECONDS)
        try:
            if count > 1:
                processes.join(address, count, number, run.join_seconds)
            self._work(run, self._begin)
        except Exception as error:
            if lost := processes.as_lost(error):
                raise lost from error
            raise

    def stop(self, signal_number: int) -> bool:
        if self._trainer is None:
            return False
        self._trainer.stop(signal_number)
        return True

    def _begin(self, trainer: Trainer) -> None:
        self._trainer = trainer


def fit(run: TrainRun, work: Work) -> None:
    """Have `work` done by every worker, until it is done, or was stopped by Ctrl-C or SIGTERM. `work` is a function of
    a module, which each worker imports. Raises what a worker raised, ConfigError where the cluster is missing or too
    small, ProcessError where workers die again and again, and KeyboardInterrupt when it was stopped before training."""
    devices = num_devices(run.mesh)
    if devices % run.num_workers:
        raise ConfigError(
            f"--mesh {run.mesh or 'of one device'}: {devices} devices, which {run.num_workers} workers do not "
            f"share evenly; with --num-workers {run.num_workers} give a mesh such as data={run.num_workers}"
        )
    with RunFolder(run):  # refuses what is wrong with it before anything starts
        pass
    ray = cluster.connect(run.ray_address)
    try:
        each = cluster.reserve(ray, devices // run.num_workers, run.num_workers)
        if run.service.target_service:  # the workers start them, and without room Ray would let them wait
            reserve_targets(ray, run.service, {name: number * run.num_workers for name, number in each.items()})
        group = ProcessGroup(
            TrainingProcess,
            (run, work, cluster.Driver.here()),
            count=run.num_workers,
            each=each,
            fewer="--num-workers or the mesh",
            join_seconds=run.join_seconds,
            restarts=run.max_failures,
            tpu_slice=launcher.tpu_slice(ray.nodes()) if "TPU" in each else None,
            end_seconds=END_SECONDS,
        )
        launcher.launch(ray, group)
    except ProcessError as error:
        raise ProcessError(f"{error}; go on with --resume") from error
    finally:
        ray.shutdown()
