"""The use of Ray, which runs many of our processes over many machines: it is found, checked and attached to. Ray
schedules, restarts and moves bytes; what a process computes is ours."""

import importlib
import logging
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any

import numpy as np
from packaging.version import Version

import specserve
from specserve import log
from specserve.errors import CapacityError, ConfigError, SpecServeError, as_line

logger = logging.getLogger(__name__)

OLDEST, BEYOND = Version("2.60"), Version("3")  # of Ray; what `serve` and `train` ask of it is of 2.60
JOIN_SECONDS = 20  # to reach a cluster that is there
START_SECONDS = 120  # for one of our own to start; Ray's 30 are too few where other programs run, and the log shows it
START_VARIABLE = "RAY_raylet_start_wait_time_s"  # Ray's own, of other seconds
KINDS = {"cpu": "CPU", "cuda": "GPU", "gpu": "GPU", "rocm": "GPU", "tpu": "TPU"}  # JAX's platforms, as Ray's resources
COMPUTING = (
    "JAX_",
    "XLA_",
    "LIBTPU_",
    "NCCL_",
    "SPECSERVE_",
)  # variables that workers find in their environment as this process did
_INSTALL = "pip install 'specserve[scale]'"


def check(is_asked: bool, address: str, num_workers: int) -> None:
    """Check that these settings of a command go together. Raises ConfigError."""
    if not is_asked and (address or num_workers > 1):
        raise ConfigError("--num-workers and --ray-address are for workers on Ray; give --ray too")


def connect(address: str = "") -> Any:
    """Return Ray as a module, attached to the cluster at this address: host:port, `auto` for the one on this machine,
    or "" for one of its own on this machine, which ends with this process. A process that Ray itself has started, or
    that is attached already, stays where it is. Raises ConfigError where Ray is missing, of another version, or not
    there."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
    patience = JOIN_SECONDS
    if not address:
        patience = START_SECONDS
    seconds = float(os.environ.setdefault(START_VARIABLE, str(patience)))
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # lines of several workers that differ in numbers alone
    ray = load("ray")
    if not OLDEST <= (found := Version(ray.__version__)) < BEYOND:
        raise ConfigError(f"Ray {found} is installed, needed is {OLDEST} to before {BEYOND}: {_INSTALL}")
    if ray.is_initialized():
        return ray
    where = address or "a cluster of its own on this machine"
    logger.info("attaching to Ray: %s", where)
    try:
        _knock(address)
        with log.waiting(logger.info, f"Ray: {where}", seconds):
            ray.init(address=address or "local", log_to_driver=True, include_dashboard=None if address else False)
    except Exception as error:  # Ray raises a bare one where its processes take too long to start
        what = as_line(error)
        if not address:
            raise ConfigError(f"Ray could not start on this machine ({what}); its logs are in /tmp/ray") from error
        raise ConfigError(
            f"ray address {address!r} cannot be reached ({what}): is `ray start --head` running there, of the same Ray "
            "and Python versions?"
        ) from error
    return ray


def _knock(address: str) -> None:
    """Raises OSError where nobody listens at host:port, which Ray would try to reach for minutes."""
    host, _, port = address.rpartition(":")
    if "://" not in address and port.isdecimal():
        socket.create_connection((host, int(port)), JOIN_SECONDS).close()


def load(module: str) -> Any:
    """A module of Ray's, such as `ray.serve`. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{module} cannot be imported ({error}): {_INSTALL}") from error


@dataclass(frozen=True)
class Driver:
    """The facts about the process that asks Ray for workers, which they must have in common with it."""

    versions: tuple[tuple[str, str], ...]
    folder: str  # that it works in, which relative paths begin from

    @classmethod
    def here(cls) -> "Driver":
        """Describe this process."""
        return cls(_versions(), os.getcwd())

    def enter(self) -> None:
        """Let the worker that this is called in read relative paths as the driver does. Raises ConfigError where it has
        another version of what computes, or no such folder."""
        host, own = socket.gethostname(), dict(_versions())
        if other := [f"{name} {own[name]}, not {version}" for name, version in self.versions if own[name] != version]:
            raise ConfigError(
                f"the worker on {host} has {', '.join(other)} as the command has; install the same on all hosts"
            )
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise ConfigError(
                f"the worker on {host} has no {self.folder} ({error.strerror}); start the command in a folder that all "
                "hosts share, which its relative paths begin from"
            ) from error


def environment() -> dict[str, dict[str, str]]:
    """Ray's `runtime_env` of workers: what of this process's environment decides how they compute."""
    return {"env_vars": {name: value for name, value in os.environ.items() if name.startswith(COMPUTING)}}


def reserve(
    ray: Any,
    num_devices: int,
    num_workers: int,
    fewer: str = "--num-workers or the mesh",
    taken: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:
    """Return the resources that Ray keeps for each worker, by Ray's own names: so many devices of the kind that
    JAX_PLATFORMS names, else of the best that the cluster has. Raises ConfigError where the cluster has fewer than all
    workers need beside what others of this run have `taken`; `fewer` names the settings to lower."""
    total = ray.cluster_resources()
    named = KINDS.get(os.environ.get("JAX_PLATFORMS", "").split(",")[0].lower())
    kind = named or next((each for each in ("TPU", "GPU") if total.get(each)), "CPU")
    each = {"CPU": 1.0} | {kind: float(num_devices)}
    check_room(ray, each, num_workers, fewer, taken)
    return each


def platform_of(each: Mapping[str, float]) -> str:
    """Return JAX's platform of workers that Ray keeps these resources for (`reserve`): "cpu", "gpu" or "tpu"."""
    return next((name.lower() for name in ("TPU", "GPU") if name in each), "cpu")


def check_room(
    ray: Any,
    each: Mapping[str, float],  # worker's resources, by Ray's own names
    num_workers: int,
    fewer: str,  # the settings to lower
    taken: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Check that the whole cluster has what so many workers need, beside what others of this run have `taken`. Raises
    ConfigError."""
    total = ray.cluster_resources()
    for name, number in each.items():
        others = taken.get(name, 0.0)
        if others + number * num_workers > (there := total.get(name, 0.0)):
            beside = f", beside {others:g} of the training processes" if others else ""
            raise ConfigError(
                f"{num_workers} workers need {number * num_workers:g} {name}, {number:g} each{beside}, and the Ray "
                f"cluster has {there:g}; lower {fewer}, or add nodes"
            )


@dataclass(frozen=True)
class Pool:
    """The actors of Ray Data that share a job."""

    count: int
    each: Mapping[str, float]  # resources of each, by Ray's own names (`reserve`)
    size: int = 1  # items of a call
    calls: int = 1  # batches that an actor has at once


def map_over(
    ray: Any,
    items: Sequence[Any],
    make: Callable[..., Callable[[list[Any]], Any]],
    arguments: tuple[Any, ...],
    pool: Pool,
) -> Iterator[Any]:
    """Hand the items to actors of Ray Data, a list of `pool.size` at a time, and yield what they return in the order in
    which it comes. Each actor calls `make(*arguments)` once for the function that takes the lists; both are pickled.
    Ray starts an actor that has died again, with what it had. Raises CapacityError where that does not help, and the
    SpecServeError that an actor raised."""
    data = load("ray.data")
    context = data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    each = dict(pool.each)
    rows = [{"item": pickle.dumps(item)} for item in items]
    found = data.from_items(rows, override_num_blocks=-(-len(rows) // pool.size)).map_batches(
        _Mapper,
        fn_constructor_args=(Driver.here(), make, arguments),
        batch_size=pool.size,
        compute=data.ActorPoolStrategy(
            size=pool.count,
            max_tasks_in_flight_per_actor=pool.calls,
            max_concurrent_calls_per_actor=pool.calls,
            enable_true_multi_threading=True,
        ),
        num_cpus=each.pop("CPU"),
        num_gpus=each.pop("GPU", None),
        resources=each,
        runtime_env=environment(),
    )
    try:
        for batch in found.iter_batches(batch_size=None, prefetch_batches=0, batch_format="numpy"):
            for result in map(pickle.loads, batch["found"]):
                if isinstance(result, SpecServeError):
                    raise result
                yield result
    except ray.exceptions.RayError as error:
        raise CapacityError(
            f"the workers on Ray have ended ({as_line(error)}); run the same command again to go on"
        ) from error


class _Mapper:
    """An actor of Ray Data. An error is returned as a result, because Ray would try again if it were raised."""

    def __init__(
        self, driver: Driver, make: Callable[..., Callable[[list[Any]], Any]], arguments: tuple[Any, ...]
    ) -> None:
        self._error: SpecServeError | None = None
        try:
            driver.enter()
            log.setup("warning")
            self._call = make(*arguments)
        except SpecServeError as error:
            self._error = error

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"found": np.array([pickle.dumps(self._error or self._result(batch["item"]))], object)}

    def _result(self, items: np.ndarray) -> Any:
        try:
            return self._call(list(map(pickle.loads, items)))
        except SpecServeError as error:
            return error


def _versions() -> tuple[tuple[str, str], ...]:
    others = ((name, metadata.version(name)) for name in ("jax", "jaxlib", "numpy"))
    return (("specserve", specserve.__version__), *others)
