"""The launcher of a group of processes on a Ray cluster, for training and for serving: an actor for each process.

Ray finds room for all of them at once. They end together and are started again together, on other hosts where one is
lost; but an error that would come again ends the group. A subclass of `GroupProcess` has what each process runs.
"""

import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specserve import cluster, log
from specserve.errors import CapacityError, ConfigError, SpecServeError, as_line
from specserve.processes import ProcessError

logger = logging.getLogger(__name__)

LOG_SECONDS = 1.0  # for the last lines of the processes to arrive
TPU_LABELS = ("ray.io/tpu-topology", "ray.io/accelerator-type")  # of Ray's nodes


class DiedError(ProcessError):
    """Raised where a process was killed or its host was lost. Errors of the other processes follow from that."""


class GroupProcess:
    """The actor of one process of a group. Ray calls `stop` while `run` runs, on another thread."""

    def address(self) -> str:
        """Return the address at which the others would find this process: its host and a free port."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{cluster.load('ray').util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def run(self, address: str, number: int, count: int, attempt: int) -> None:
        """Run process `number` of `count`, the first of which is at this address; attempts count from 0. Raises
        ProcessError where all may be started again, and other errors where the group has to end."""
        raise NotImplementedError

    def stop(self, signal_number: int) -> bool:
        """Ask the process to end as this signal would. Returns whether it can."""
        raise NotImplementedError


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that are started together, and what Ray keeps for them."""

    kind: type[GroupProcess]
    arguments: tuple[Any, ...]  # of its constructor
    count: int
    each: Mapping[str, float]  # resources of each process, by Ray's own names
    fewer: str  # the settings to lower where there is no room
    join_seconds: int  # for Ray to find room
    restarts: int
    strategy: str = "PACK"  # of Ray's placement group
    tpu_slice: tuple[str, str] | None = None  # topology and accelerator type, where the hosts are those of one slice
    end_seconds: float | None = None  # for the others to end after an error; None: as long as they take


def launch(ray: Any, group: ProcessGroup) -> None:
    """Run the group until all processes have ended, by themselves or because SIGTERM or Ctrl-C stopped them. Raises the
    error of a process that would come again, CapacityError where Ray finds no room, ProcessError where processes die
    again and again, and KeyboardInterrupt for a signal that comes before they can stop, or a second one."""
    with _interrupts() as signals:
        for attempt in range(1 + group.restarts):
            errors, is_stopped = _attempt(ray, group, attempt, signals)
            if not errors:
                return
            if lasting := lasting_error(errors):
                raise lasting
            if is_stopped or attempt == group.restarts:
                what = "; ".join(f"worker {number}: {as_line(error)}" for number, error in sorted(errors.items()))
                raise ProcessError(f"the processes on Ray have ended ({what})")
            logger.warning("all workers are started again, for the %d. of %d times", attempt + 1, group.restarts)


def lasting_error(errors: Mapping[int, SpecServeError]) -> SpecServeError | None:
    """Return the error that would come again, the first by number of process. It is None where a process died, because
    the others' errors followed from that."""
    if any(isinstance(error, DiedError) for error in errors.values()):
        return None
    own = [error for _, error in sorted(errors.items()) if not isinstance(error, ProcessError)]
    return next(iter(own), None)


def tpu_slice(nodes: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """Return topology and accelerator type of the slices of a cluster, from the labels of its nodes with TPUs. Raises
    ConfigError where there is not one kind of slice."""
    labels = [node["Labels"] for node in nodes if node["Alive"] and node["Resources"].get("TPU")]
    kinds = {(each.get(TPU_LABELS[0], ""), each.get(TPU_LABELS[1], "")) for each in labels}
    if len(kinds) != 1 or not all(*kinds):
        raise ConfigError(
            f"workers with TPUs are those of one slice, and the labels {' and '.join(TPU_LABELS)} of the cluster's "
            f"nodes are {sorted(kinds) or 'missing'}; give the --ray-address of a cluster with slices of one kind"
        )
    return kinds.pop()


def _attempt(
    ray: Any, group: ProcessGroup, attempt: int, signals: Sequence[int]
) -> tuple[dict[int, SpecServeError], bool]:
    """Start all processes and wait until they have ended. Returns their errors by number, and whether one of the
    `signals` that came meanwhile stopped them."""
    with _room(group) as room:
        wait_for_room(ray, group, room.ready())
        actors: list[Any] = []
        try:
            actors += [_actor(ray, group, room, number) for number in range(group.count)]
            try:
                address = ray.get(actors[0].address.remote())
            except ray.exceptions.RayError as error:
                return {0: DiedError(f"it has died ({type(error).__name__})")}, False
            calls = {
                actor.run.remote(address, number, group.count, attempt): number for number, actor in enumerate(actors)
            }
            try:
                return wait(ray, group, actors, calls), False
            except KeyboardInterrupt:
                if not any(ray.get([actor.stop.remote(signals[-1]) for actor in actors])):
                    raise
                return wait(ray, group, actors, calls), True
        finally:
            time.sleep(LOG_SECONDS)
            for actor in actors:
                ray.kill(actor)


def wait(ray: Any, group: ProcessGroup, actors: Sequence[Any], calls: Mapping[Any, int]) -> dict[int, SpecServeError]:
    """Wait until the calls, which have the numbers of their processes, have ended. Returns the errors by number. Where
    a process died the others are stopped, as they may go on without noticing."""
    errors: dict[int, SpecServeError] = {}
    left, timeout = list(calls), None
    while left:
        ended, left = ray.wait(left, num_returns=1, timeout=timeout)
        if not ended:  # the others wait for what has ended
            break
        number = calls[ended[0]]
        error = _error(ray, ended[0])
        if error is None:
            continue
        errors[number] = error
        logger.warning("worker %d of %d: %s", number, group.count, as_line(error))
        timeout = group.end_seconds
        if isinstance(error, DiedError):
            for actor in actors:
                actor.stop.remote(signal.SIGTERM)
    return errors


def _error(ray: Any, call: Any) -> SpecServeError | None:
    """Return the error that a call has ended with, if any."""
    try:
        ray.get(call)
    except ray.exceptions.RayTaskError as error:  # raised by the process
        if isinstance(error.cause, SpecServeError):
            return error.cause
        logger.error("%s", error)  # with its traceback
        return SpecServeError(f"{type(error.cause).__name__}: {error.cause}")
    except ray.exceptions.RayError as error:
        return DiedError(f"it has died ({type(error).__name__})")
    return None


def _actor(ray: Any, group: ProcessGroup, room: Any, number: int) -> Any:
    each = dict(group.each)
    scheduling = cluster.load("ray.util.scheduling_strategies")
    kind = ray.remote(group.kind).options(
        num_cpus=each.pop("CPU"),
        num_gpus=each.pop("GPU", 0.0),
        resources=each,
        max_concurrency=2,  # `stop` beside `run`
        scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(room, number),
        runtime_env=cluster.environment(),
    )
    return kind.remote(*group.arguments)


@contextlib.contextmanager
def _room(group: ProcessGroup) -> Iterator[Any]:
    """Ask Ray for room for all processes, and give it back afterwards."""
    each = dict(group.each)
    if group.tpu_slice is None:
        groups = cluster.load("ray.util.placement_group")
        room = groups.placement_group([each] * group.count, strategy=group.strategy)
        try:
            yield room
        finally:
            groups.remove_placement_group(room)
        return
    try:
        reserved = cluster.load("ray.util.tpu").slice_placement_group(*group.tpu_slice, resources_per_bundle=each)
    except (RuntimeError, ValueError) as error:
        raise CapacityError(f"Ray keeps no slice of {' '.join(group.tpu_slice)} for the workers ({error})") from error
    with contextlib.ExitStack() as stack:
        stack.callback(reserved.shutdown)
        if reserved.num_bundles < group.count:
            raise ConfigError(
                f"{group.count} workers are more than the {reserved.num_bundles} of a slice of "
                f"{' '.join(group.tpu_slice)}; lower {group.fewer}"
            )
        yield reserved.placement_group


def wait_for_room(ray: Any, group: ProcessGroup, ready: Any) -> None:
    """Wait until Ray's reference to the room is ready, and log what is waited for. Raises CapacityError."""
    left, end = float(group.join_seconds), time.monotonic() + group.join_seconds
    while not ray.wait([ready], timeout=min(log.SAY_SECONDS, left))[0]:
        free = ray.available_resources()
        needed = ", ".join(f"{number:g} {name} ({free.get(name, 0):g} free)" for name, number in group.each.items())
        what = f"room on Ray for {group.count} workers with {needed} each"
        if (left := end - time.monotonic()) <= 0:
            raise CapacityError(
                f"there was no {what} within {group.join_seconds} seconds; lower {group.fewer}, add nodes, or raise "
                "--join-seconds"
            )
        logger.info(log.still_waiting(what, left))


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """A context in which SIGTERM and Ctrl-C raise KeyboardInterrupt. It gives the list of the signals that came."""
    signals: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():  # no other one may set handlers
        before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
