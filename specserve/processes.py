"""A run of several processes, on one machine or many (`jax.distributed`).

The file owns how they join, what they must agree on, which rows of a batch each one reads, and that all end when one
does.
"""

import contextlib
import logging
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from specserve import log
from specserve.errors import ConfigError, SpecServeError, as_line

logger = logging.getLogger(__name__)

INITIALIZE_SECONDS = 30  # for JAX to connect those that have come
# After which a process that no longer answers is taken for dead, and all end. JAX's threads that give signs of
# life are native, so neither compiling nor Python's lock delays them. JAX's own 100 would let the others hang so long.
SILENCE_SECONDS = 25
HELLO_SECONDS = 5.0  # for a process that connects to name itself
STATUS = re.compile("(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): ")
_HELLO, _COME, _WAIT = re.compile(r"specserve (\d{1,9}) (\d{1,9})"), "all have come", "waiting for "
_LONGEST_LINE = 500


class ProcessError(SpecServeError):
    """Raised because another process of the run has ended, so this one cannot go on."""


def exit_status(error: Exception) -> int:
    """Return the status that one of several processes ends with after an error: 2 where it would come again, as a wrong
    setting does, and 3 where all may go on once they are started again."""
    if isinstance(error, SpecServeError) and not isinstance(error, ProcessError):
        return 2
    return 3


def check(coordinator: str, num_processes: int, process_id: int) -> None:
    """Check that these are possible settings of one of several processes, or of a single one. Raises ConfigError."""
    if not coordinator and (num_processes != 1 or process_id):
        raise ConfigError("num_processes and process_id need a coordinator: host:port of the first one, or auto")
    if coordinator == "auto" and (num_processes != 1 or process_id):
        raise ConfigError(
            f"coordinator auto asks the launcher how many processes there are and which one this is, but num_processes "
            f"{num_processes} and process_id {process_id} are given; leave them out, or give host:port of the first one"
        )
    if coordinator not in ("", "auto") and not re.fullmatch(r".+:\d{1,5}", coordinator):
        raise ConfigError(f"coordinator {coordinator!r}: expected host:port of the first process, or auto")
    if process_id >= num_processes and coordinator not in ("", "auto"):
        raise ConfigError(f"process_id is {process_id}, of {num_processes} processes it is 0 to {num_processes - 1}")


def join(coordinator: str, num_processes: int, process_id: int, seconds: int) -> None:
    """Make this process one of several; call it before anything asks for devices. Without a coordinator's address
    nothing is done. Raises ConfigError, in all processes that have come, where they are not all there after so many
    seconds; until then they log every ten seconds which are missing."""
    check(coordinator, num_processes, process_id)
    if not coordinator:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # between CPUs; accelerators have their own
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM, which we answer ourselves
    if coordinator == "auto":
        _initialize(seconds, f"not all processes have come within {seconds} seconds; start all of them again")
        return
    try:
        meet(coordinator, num_processes, process_id, seconds)
        known = {"coordinator_address": coordinator, "num_processes": num_processes, "process_id": process_id}
        _initialize(INITIALIZE_SECONDS, _unconnected(coordinator, num_processes, process_id), **known)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"coordinator {coordinator}: process {process_id} of {num_processes} could not join ({as_line(error)}); "
            "every process needs the same address of the first one, a number of its own, and a way there"
        ) from error


def _unconnected(coordinator: str, num_processes: int, process_id: int) -> str:
    """Make the error of a process that was there with all others, when JAX does not connect them."""
    proxies = ", ".join(sorted(name for name in os.environ if name.lower().endswith("_proxy"))) or "none is"
    return (
        f"coordinator {coordinator}: all {num_processes} processes have come, but JAX's service there did not connect "
        f"process {process_id} within {INITIALIZE_SECONDS} seconds. No process may have ended meanwhile, no other "
        f"program may listen at that port, and gRPC must not go through a proxy (set here: {proxies}; unset them, or "
        "name the hosts in no_proxy); then start all of them again"
    )


def _initialize(seconds: int, late: str, **known: Any) -> None:
    """Join by JAX's own means, for less time than JAX waits, because JAX aborts a process that has waited too long.
    Without arguments JAX asks the launcher. Raises ConfigError with the text `late` after so many seconds, or what JAX
    raises."""
    outcome: list[Exception] = []

    def run() -> None:
        try:
            jax.distributed.initialize(
                **known,
                initialization_timeout=seconds + 60,
                heartbeat_timeout_seconds=SILENCE_SECONDS,
            )
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="joining", daemon=True)
    thread.start()
    with log.waiting(logger.info, "the other processes", seconds):
        thread.join(seconds)
    if thread.is_alive():
        raise ConfigError(late)
    if outcome and known:
        raise outcome[0]
    if outcome:
        raise ConfigError(
            f"coordinator auto: no launcher says who takes part ({as_line(outcome[0])}); asked are Slurm, Open MPI, "
            "Cloud TPU, and Kubernetes with pip install 'jax[k8s]'. Elsewhere give host:port of the first process, "
            "num_processes and process_id"
        )


def meet(coordinator: str, num_processes: int, process_id: int, seconds: int) -> None:
    """Wait until all processes have come, at the address where JAX will be. Raises RuntimeError, with the same words in
    all that have come, or OSError where the first process cannot listen there."""
    if process_id:
        _report(coordinator, num_processes, process_id, seconds)
        return
    with contextlib.ExitStack() as stack:
        came: dict[int, socket.socket] = {}
        wrong = _gather(stack, stack.enter_context(listen(_address(coordinator)[1])), num_processes, came, seconds)
        _send(came, wrong or _COME)
    if wrong:
        raise RuntimeError(wrong)


def _send(came: Mapping[int, socket.socket], line: str) -> None:
    for connection in came.values():
        with contextlib.suppress(OSError):
            connection.settimeout(HELLO_SECONDS)
            connection.sendall(f"{line}\n".encode())


def _gather(
    stack: contextlib.ExitStack,
    listener: socket.socket,
    num_processes: int,
    came: dict[int, socket.socket],
    seconds: int,
) -> str:
    """Wait, in the first process, for the others, whose connections end with the stack, and send them again and
    again the numbers of those that are missing. Returns the error, or an empty text."""
    deadline, word = time.monotonic() + seconds, time.monotonic() + log.SAY_SECONDS
    while True:
        for number in [number for number, connection in came.items() if _has_gone(connection)]:
            del came[number]  # it may be started again
        if len(came) == num_processes - 1:
            return ""
        missing = _listed(sorted(set(range(1, num_processes)) - set(came)))
        if (now := time.monotonic()) >= deadline:
            return f"of {num_processes} processes {missing} did not come within {seconds} seconds"
        if now >= word:
            word = now + log.SAY_SECONDS
            line = log.still_waiting(f"{missing} of {num_processes} processes", deadline - now)
            logger.info(line)
            _send(came, line)
        listener.settimeout(max(0.01, min(deadline, word) - now))
        try:
            connection = stack.enter_context(listener.accept()[0])
        except TimeoutError:
            continue
        hello = _HELLO.fullmatch(read_line(connection, HELLO_SECONDS))
        if hello is None:
            continue  # another program
        number, count = map(int, hello.groups())
        if count == num_processes and (number not in came or _has_gone(came[number])):
            came[number] = connection  # of one that was started again, where an earlier one has ended meanwhile
            continue
        came[-1] = connection
        if count != num_processes:
            return f"process {number} was told of {count} processes, and the first one of {num_processes}"
        return f"two processes have the number {number}"


def _report(coordinator: str, num_processes: int, process_id: int, seconds: int) -> None:
    """Report this process to the first one, from any other, and wait until all are there. Raises RuntimeError with the
    error that the first one sends, or where it cannot be reached."""
    deadline, word, reason = time.monotonic() + seconds, time.monotonic() + log.SAY_SECONDS, "it said nothing"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(_address(coordinator), timeout=min(left, log.SAY_SECONDS)) as connection:
                connection.sendall(f"specserve {process_id} {num_processes}\n".encode())
                while (line := read_line(connection, 3 * log.SAY_SECONDS)).startswith(_WAIT):
                    logger.info(line)
                    word = time.monotonic() + log.SAY_SECONDS
        except OSError as error:  # it is not there yet
            reason, line = as_line(error), ""
        if line == _COME:
            return
        if line.isprintable() and line:
            raise RuntimeError(line)
        if (now := time.monotonic()) >= word:
            word = now + log.SAY_SECONDS
            logger.info("%s (%s)", log.still_waiting(f"process 0 at {coordinator}", deadline - now), reason)
        time.sleep(
            0.1
        )  # the connection was closed by something else than the first process, or by it before it was ready
    raise RuntimeError(f"process 0 did not answer within {seconds} seconds: {reason}")


def _address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def listen(port: int, backlog: int | None = None) -> socket.socket:
    """Listen at a port of all addresses of this machine, those of IPv6 too where it has them; port 0 is any free one.
    Raises OSError."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", port), backlog=backlog)


def read_line(connection: socket.socket, seconds: float) -> str:
    """Return the next line, where all of it comes within this time, or an empty text. What comes after it stays."""
    line, end = b"", time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while len(line) < _LONGEST_LINE and (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            byte = connection.recv(1)
            if byte in (b"", b"\n"):
                return line.decode(errors="replace") if byte else ""
            line += byte
    return ""


def _has_gone(connection: socket.socket) -> bool:
    """Return whether the process at the other end, which sends nothing more, has ended."""
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    if len(numbers) > 8:
        shown += f" and {len(numbers) - 8} more"
    return shown


class Agreement:
    """The largest of the numbers that each process gives, once per step. It is read a step late, so that no device
    waits for a host; only the first reading waits. With a single process it is that process's own numbers."""

    def __init__(self) -> None:
        self._place = NamedSharding(Mesh(np.array(jax.devices()), "device"), PartitionSpec("device"))
        self._unread: jax.Array | None = None

    def __call__(self, *own: int) -> list[int]:
        """Give this process's numbers, each below 2^31, and get the largest of all processes, as of the step before."""
        if jax.process_count() == 1:
            return list(own)
        rows = np.tile(np.array(own, np.int32), (jax.local_device_count(), 1))
        new = jnp.max(jax.make_array_from_process_local_data(self._place, rows), axis=0)
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
            f"rows {begin} to {end} of {shape[0]} are no even share; let data x fsdp x expert be a multiple of the "
            "hosts"
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
        f"process {jax.process_index()} cannot go on without the others, one of which has ended ({as_line(error)}); "
        "start all of them again with --resume"
    )


def is_first() -> bool:
    """Return whether this process is the first one, which writes the run's files."""
    return jax.process_index() == 0
