"""Several processes as one run, on one machine or many (`jax.distributed`).

The file owns how they join, what they must agree on, which rows of a batch each one reads, and that all end when one
does.
"""

import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from specserve.errors import ConfigError, SpecServeError

START_SECONDS = 300  # to wait for all to come
SILENCE_SECONDS = 100  # after which a process that no longer answers is taken for dead, and all end
STATUS = re.compile("(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): ")


class ProcessError(SpecServeError):
    """Another process of the run has ended, so this one cannot go on."""


def check(coordinator: str, num_processes: int, process_id: int) -> None:
    """Check that these are possible settings of one of several processes, or of a single one. Raises ConfigError."""
    if not coordinator and (num_processes != 1 or process_id):
        raise ConfigError("num_processes and process_id need a coordinator: host:port of the first one, or auto")
    if process_id >= num_processes and coordinator not in ("", "auto"):
        raise ConfigError(f"process_id is {process_id}, of {num_processes} processes it is 0 to {num_processes - 1}")


def join(coordinator: str, num_processes: int, process_id: int) -> None:
    """Make this process one of several; call it before anything asks for devices. Without a coordinator's address
    nothing is done. Raises ConfigError."""
    check(coordinator, num_processes, process_id)
    if not coordinator:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # between CPUs; accelerators have their own
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM, which we answer ourselves
    is_told = coordinator != "auto"
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator if is_told else None,
            num_processes=num_processes if is_told else None,
            process_id=process_id if is_told else None,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=SILENCE_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"coordinator {coordinator}: process {process_id} of {num_processes} could not join ({_line(error)}); "
            "every process needs the same address of the first one, a number of its own, and a way there"
        ) from error


class Agreement:
    """The largest of the numbers that each process gives, once per step. It is read a step late, so that no device
    waits for a host; only the first reading waits. With a single process it is that process's own numbers."""

    def __init__(self) -> None:
        self._place = NamedSharding(Mesh(np.array(jax.devices()), "device"), PartitionSpec("device"))
        self._unread: jax.Array | None = None

    def __call__(self, *said: int) -> list[int]:
        """Give this process's numbers, each below 2^31, and get the largest of all processes, as of the step before."""
        if jax.process_count() == 1:
            return list(said)
        own = np.tile(np.array(said, np.int32), (jax.local_device_count(), 1))
        new = jnp.max(jax.make_array_from_process_local_data(self._place, own), axis=0)
        old, self._unread = self._unread, new
        return np.asarray(new if old is None else old).tolist()


def check_same(what: str, value: Any) -> None:
    """Check that every process has the same value. Raises ConfigError."""
    digest = zlib.crc32(repr(value).encode()) >> 1
    highest, lowest = Agreement()(digest, -digest)
    if highest != -lowest:
        raise ConfigError(f"the processes of this run differ in {what}; give all of them the same")


def shard_of(place: Sharding | None, shape: tuple[int, int]) -> tuple[int, int]:
    """The slice of a batch's rows that this process needs for its devices, as (index, number of slices). Raises
    ConfigError where its rows are no such slice."""
    if place is None or jax.process_count() == 1:
        return 0, 1
    rows = {index[0].indices(shape[0])[:2] for index in place.addressable_devices_indices_map(shape).values() if index}
    if not rows:
        raise ConfigError("the mesh has no device of this process; give every process a part of it, such as data=N")
    begin, end = min(start for start, _ in rows), max(stop for _, stop in rows)
    if begin % (end - begin) or shape[0] % (end - begin):
        raise ConfigError(
            f"rows {begin} to {end} of {shape[0]} are no even share; let data x expert be a multiple of the hosts"
        )
    return begin // (end - begin), shape[0] // (end - begin)


def place_shard(
    rows: np.ndarray,  # [rows of the shard, seq, ...]
    shard: tuple[int, int],
    place: Sharding | None,
) -> jax.Array:  # [batch, seq, ...]
    """Make the array of the whole batch over all devices from this process's shard of it."""
    if place is None:
        return jax.device_put(rows)
    first = shard[0] * len(rows)
    shape = (len(rows) * shard[1], *rows.shape[1:])

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        begin, end, _ = index[0].indices(shape[0])
        return rows[begin - first : end - first, *index[1:]]

    return jax.make_array_from_callback(shape, place, part)


def as_lost(error: Exception) -> ProcessError | None:
    """The ProcessError to raise where a computation failed because another process has ended; None for other errors."""
    is_runtime = isinstance(error, jax.errors.JaxRuntimeError) or STATUS.match(str(error))
    if jax.process_count() == 1 or not is_runtime:
        return None
    return ProcessError(
        f"process {jax.process_index()} cannot go on without the others, one of which has ended ({_line(error)}); "
        "start all of them again with --resume"
    )


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def is_first() -> bool:
    """Whether this process is the first one, which writes the run's files."""
    return jax.process_index() == 0
