"""A training run as workers of a Ray cluster (`specserve train --ray`), on Ray Train's JaxTrainer.

Ray places the workers, watches them and starts all of them again when one dies. Each is one process of
`jax.distributed` and runs what a process with `--coordinator` runs; the address of the first one is told through Ray.
JaxTrainer would join processes on accelerators itself, with settings of its own, so its backend is told of none. What
a run goes on from is our own state in the output folder.
"""

import dataclasses
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from specserve import cluster, log, processes
from specserve.errors import ConfigError, SpecServeError
from specserve.mesh import num_devices
from specserve.processes import ProcessError
from specserve.train.remote.target_service import reserve_targets
from specserve.train.run.folder import RunFolder, wait_until_free
from specserve.train.settings import TrainRun
from specserve.train.trainer import Stopping, Trainer

logger = logging.getLogger(__name__)

RAY_FOLDER = ".ray"  # in the output folder: what Ray Train writes of its own
PLACE_SECONDS = 30  # for Ray to find room for the workers; it tries as often as `join_seconds` takes
PATIENCE = {  # of Ray Train, as it reads it from the environment
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(PLACE_SECONDS),
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers are where the command is
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",  # else every library's log reaches the terminal
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
}
DEATH_SECONDS = 30.0  # for a worker that was killed to be gone
LOOK_SECONDS = 1.0  # between two looks at the bell
LOG_SECONDS = 1.0  # for the last lines of the workers to come
POLICY = "ray.train.v2._internal.execution.failure_handling.default"  # the logger of Ray's decisions
TPU_LABELS = {"ray.io/tpu-topology": "topology", "ray.io/accelerator-type": "accelerator_type"}


class Bell:
    """The exchange between the command and its first worker, as a Ray actor beside the command."""

    def __init__(self) -> None:
        self._number, self._attempts, self._is_training = 0, 0, False

    def begin(self) -> int:
        """Note that a group of workers begins. Returns how many there were before."""
        self._attempts, self._is_training = self._attempts + 1, False
        return self._attempts - 1

    def has_begun(self) -> bool:
        """Return whether a group of workers has begun."""
        return self._attempts > 0

    def listen(self) -> int:
        """Note that signals are heard from now on. Returns the number of the one that came, or 0."""
        self._is_training = True
        return self._number

    def ring(self, number: int) -> bool:
        """Note that a signal came to the command. Returns whether it is heard."""
        self._number = number
        return self._is_training


@dataclasses.dataclass(frozen=True)
class TrainTask:
    """The message that every worker gets."""

    run: TrainRun
    driver: cluster.Driver
    bell: Any


Listen = Callable[[Trainer], None]
Work = Callable[[TrainRun, Listen], None]


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
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    ray = cluster.connect(run.ray_address)
    try:
        each = cluster.reserve(ray, devices // run.num_workers, run.num_workers)
        if run.service.target_service:  # which the workers start: without room Ray would let them wait
            reserve_targets(ray, run, {name: number * run.num_workers for name, number in each.items()})
        bell = ray.remote(num_cpus=0)(Bell).remote()
        trainer = _trainer(run, work, bell, scaling(run.num_workers, each, ray.nodes()))
        _wait(ray, bell, trainer.fit, Room(ray, bell, each, run.num_workers, run.join_seconds))
    finally:
        time.sleep(LOG_SECONDS)
        ray.shutdown()
        shutil.rmtree(Path(run.output) / RAY_FOLDER, ignore_errors=True)


def scaling(num_workers: int, each: Mapping[str, float], nodes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The arguments of Ray's ScalingConfig for so many workers with these resources each. Workers with TPUs are those
    of one slice, whose kind the labels of the cluster's nodes tell. Raises ConfigError where they do not."""
    found: dict[str, Any] = {"num_workers": num_workers, "resources_per_worker": dict(each)}
    if "GPU" in each:
        return found | {"use_gpu": True}
    if "TPU" not in each:
        return found
    alive = [node["Labels"] for node in nodes if node["Alive"] and node["Resources"].get("TPU")]
    kinds = {tuple(labels.get(label, "") for label in TPU_LABELS) for labels in alive}
    if len(kinds) != 1 or not all(*kinds):
        raise ConfigError(
            f"workers with TPUs are those of one slice, and the labels {' and '.join(TPU_LABELS)} of the cluster's "
            f"nodes say {sorted(kinds) or 'nothing'}; give the --ray-address of a cluster with slices of one kind"
        )
    return found | {"use_tpu": True} | dict(zip(TPU_LABELS.values(), *kinds, strict=True))


def _trainer(run: TrainRun, work: Work, bell: Any, scaling: Mapping[str, Any]) -> Any:
    ray_train, jax = cluster.load("ray.train"), cluster.load("ray.train.v2.jax")

    class Verdict(ray_train.UserCallback):  # runs beside the command
        def after_exception(self, worker_exceptions: Mapping[int, Exception], **_run: Any) -> None:
            log.setup()
            for rank, error in worker_exceptions.items():
                logger.warning("worker %d of %d: %s", rank, run.num_workers, as_line(error))
            logging.getLogger(POLICY).addFilter(_without_traceback)
            if lasting := lasting_error(worker_exceptions):
                logging.getLogger("ray.train").setLevel(logging.CRITICAL + 1)  # the command says it
                raise lasting  # which ends the run

    class OurTrainer(jax.JaxTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            """Leave out the callback that takes room from workers whose controller it does not find, because it asks
            the dashboard of any cluster on this machine. Ray takes it anyway when the command's process ends."""
            every = super()._create_default_callbacks()
            return [each for each in every if type(each).__name__ != "PlacementGroupCleanerCallback"]

    return OurTrainer(
        _work,
        train_loop_config={"told": TrainTask(run, cluster.Driver.here(), bell), "work": work},
        jax_config=cluster.load("ray.train.v2.jax.config").JaxConfig(),  # joins nothing: `processes.join` does
        scaling_config=ray_train.ScalingConfig(**scaling),
        run_config=ray_train.RunConfig(
            name="run",
            storage_path=str((Path(run.output) / RAY_FOLDER).resolve()),
            failure_config=ray_train.FailureConfig(
                max_failures=run.max_failures, controller_failure_limit=-(-run.join_seconds // PLACE_SECONDS)
            ),
            worker_runtime_env=cluster.environment(),
            callbacks=[Verdict()],
        ),
    )


def _without_traceback(record: logging.LogRecord) -> bool:
    """Shorten Ray's account of a failure to what Ray does about it."""
    record.msg, record.args, record.exc_info = " ".join(record.getMessage().split("\nError: ")[0].split()), (), None
    return True


def lasting_error(failures: Mapping[int, Exception]) -> Exception | None:
    """Return the worker's error that would come again, the first by rank, from what the workers failed with. It is
    None where workers died, because the others' errors followed from that."""
    ray_errors = cluster.load("ray.train.v2._internal.exceptions")
    own = [error for error in failures.values() if not isinstance(error, ProcessError)]
    return None if any(isinstance(error, ray_errors.RayTrainError) for error in own) else next(iter(own), None)


class Room:
    """A wait for what the workers need until they begin, said every ten seconds."""

    def __init__(self, ray: Any, bell: Any, each: Mapping[str, float], num_workers: int, seconds: int) -> None:
        self._ray, self._bell, self._each, self._num_workers = ray, bell, each, num_workers
        begin = time.monotonic()
        self._end, self._word, self._is_found = begin + seconds, begin + log.SAY_SECONDS, False

    def look(self) -> None:
        """Say it, where it is time to."""
        if self._is_found or (now := time.monotonic()) < self._word:
            return
        self._word = now + log.SAY_SECONDS
        self._is_found = self._ray.get(self._bell.has_begun.remote())
        if not self._is_found:
            free = self._ray.available_resources()
            needed = ", ".join(f"{number:g} {name} ({free.get(name, 0):g} free)" for name, number in self._each.items())
            logger.info(log.still_waiting(f"{self._num_workers} workers on Ray of {needed} each", self._end - now))


def _wait(ray: Any, bell: Any, fit: Callable[[], Any], room: Room) -> None:
    """Wait on a thread of its own, since the main one alone hears signals, and Ray would end the workers at once."""
    failed: list[Exception] = []

    def run() -> None:
        try:
            fit()
        except Exception as error:
            failed.append(error)

    thread, is_told = threading.Thread(target=run, daemon=True), False
    with Stopping() as stopping:
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            room.look()
            if stopping.number and not is_told:
                is_told = True
                if not ray.get(bell.ring.remote(stopping.number)):
                    raise KeyboardInterrupt
    if failed:
        raise _reason(failed[0]) from None


def _reason(error: Any) -> Exception:
    """Return the error that a user is told for an error of Ray Train, whose classes are known only where Ray is
    installed."""
    ray_train, errors = cluster.load("ray.train"), cluster.load("ray.exceptions")
    cause = error.controller_failure if isinstance(error, ray_train.ControllerError) else error
    cause = cause.cause if isinstance(cause, errors.RayTaskError) else cause  # raised by what runs beside the command
    if isinstance(cause, SpecServeError):
        return cause
    failures = error.worker_failures if isinstance(error, ray_train.WorkerGroupError) else {}
    what = "; ".join(f"worker {rank}: {as_line(each)}" for rank, each in failures.items()) or as_line(cause)
    return ProcessError(f"the run on Ray has ended ({what}); go on with --resume")


def as_line(error: Any) -> str:
    """An error of a worker in a line. Ray says of one that has died where it was, over many."""
    if isinstance(error, cluster.load("ray.train.v2._internal.exceptions").WorkerHealthCheckFailedError):
        return f"it has died ({type(error.health_check_failure).__name__})"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _work(config: Mapping[str, Any]) -> None:
    """Run the work in a worker, as Ray calls it on a thread beside the main one."""
    ray, ray_train, told = cluster.load("ray"), cluster.load("ray.train"), config["told"]
    logging.getLogger("ray.train").setLevel(logging.CRITICAL + 1)  # of what ends this worker, `Verdict` says it
    told.driver.enter()
    log.setup()
    context = ray_train.get_context()
    rank, number = context.get_world_rank(), context.get_world_size()
    run, first = told.run, None
    logger.info("worker %d of %d is process %d on %s", rank, number, os.getpid(), socket.gethostname())
    if rank == 0:
        attempts = ray.get(told.bell.begin.remote())
        if attempts:
            wait_until_free(Path(run.output), DEATH_SECONDS)
        first = _free_address(ray), attempts
    address, attempts = cluster.load("ray.train.collective").broadcast_from_rank_zero(first)
    if attempts:
        run = dataclasses.replace(run, train=dataclasses.replace(run.train, resume=True))
    try:
        if number > 1:
            processes.join(address, number, rank, run.join_seconds)
        config["work"](run, lambda trainer: _listen(ray, told.bell, trainer))
    except Exception as error:
        if lost := processes.as_lost(error):
            raise lost from error
        raise


def _listen(ray: Any, bell: Any, trainer: Trainer) -> None:
    """Stop the run when a signal has come to the command."""

    def look() -> None:
        while not (number := ray.get(bell.listen.remote())):
            time.sleep(LOOK_SECONDS)
        trainer.stop(number)

    threading.Thread(target=look, daemon=True).start()


def _free_address(ray: Any) -> str:
    """Return the address at which the others find this process, the first one."""
    with closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"
