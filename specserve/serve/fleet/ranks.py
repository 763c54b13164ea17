"""A server over several processes: how they find each other, what they must agree on, and that all end with one.

The first process has the requests, the scheduler and the clock, and a `LeadingRunner`, which sends every program that
it runs to the others before it runs it itself. The others have the same models over the same mesh and `follow`: they
run the same programs in the same order, so every device takes part in each. Messages go over TCP, where the end of a
process is noticed at once, and that of a machine by the kernel's own probes.
"""

import contextlib
import hmac
import json
import os
import queue
import secrets
import signal
import socket
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import psutil
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import specserve
from specserve.errors import ConfigError, as_line
from specserve.mesh import COMPILER_FLAGS
from specserve.processes import ProcessError, is_first, listen, read_line
from specserve.serve.fleet import messages
from specserve.serve.programs.runner import Runner
from specserve.serve.settings import PROGRAM, ServeRun, names_of
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import Proposal

CONNECT_SECONDS = 30.0  # for all to connect, once all have joined (`processes.join`)
SILENCE_SECONDS = 8  # after which a machine that answers no probe is taken for dead
_ADDRESS_BYTES = 1024

Lost = Callable[[ProcessError], None]  # called on a thread of its own, and once: no process goes on alone


class _Wire:
    """The connection of two processes, over which messages go both ways. They are read at once, on a thread of its
    own."""

    def __init__(self, connection: socket.socket, what: str, on_end: Callable[[str], None]) -> None:
        """Open the wire. `on_end` is called with how the other side, which the text names, has ended."""
        connection.settimeout(None)
        _probe(connection)
        self._connection, self._what, self._on_end = connection, what, on_end
        self._sending = threading.RLock()  # a frame is sent as a whole; a signal's handler may send one too
        self._arrived: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        self.on_leave: Callable[[], None] = lambda: None
        self.on_lost: Callable[[str], None] = lambda _why: None
        self._thread = threading.Thread(target=self._receive, name="ranks", daemon=True)
        self._thread.start()

    def send(self, frame: bytes) -> None:
        """Send a message. Raises OSError where the other side has ended; the reading thread has reported that
        already."""
        with self._sending:
            self._connection.sendall(frame)

    def notify(self, word: str, *values: str) -> None:
        """Send a message if the other side is still there."""
        with contextlib.suppress(OSError):
            self.send(messages.write(word, values))

    def take(self) -> tuple[bytes, bytes]:
        """Wait for the next message, and return its two parts. Raises ProcessError when none will come."""
        parts = self._arrived.get()
        if parts is None:
            self._arrived.put(None)
            raise ProcessError(f"{self._what} has ended")
        return parts

    def take_value(self) -> Any:
        """Wait for the next message, and return its only value."""
        _, [value] = messages.read(*self.take())
        return value

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _receive(self) -> None:
        reason = "it closed its connection"
        try:
            with self._connection.makefile("rb") as stream:
                while len(lengths := stream.read(messages.LENGTHS.size)) == messages.LENGTHS.size:
                    text, body = (stream.read(length) for length in messages.LENGTHS.unpack(lengths))
                    if text.startswith(_LEAVE):
                        self.on_leave()
                    elif text.startswith(_LOST):
                        self.on_lost(messages.read(text, body)[1][0])
                    else:
                        self._arrived.put((text, body))
        except (OSError, ValueError) as error:
            reason = str(error)
        self._connection.close()
        self._arrived.put(None)
        self._on_end(f"{self._what} has ended ({reason})")


_LEAVE, _LOST, _END = b'["leave"', b'["lost"', b'["end"'  # how messages of these words begin


class _Rank(ABC):
    """The common part of the first process and the others."""

    def __init__(self, on_lost: Lost) -> None:
        self._on_lost, self._lock = on_lost, threading.Lock()
        self._has_gone = threading.Event()  # another process
        self.lost: ProcessError | None = None  # why this server cannot go on
        self._is_over = False

    def failed(self, error: Exception) -> ProcessError:
        """Notify the other processes that this server cannot go on after an error of this process. Returns the error to
        raise: where another process has ended, that is the reason why this one fails."""
        self._has_gone.wait(1.0)
        return self._give_up(as_line(error))

    def reason(self, error: Exception) -> Exception:
        """Return the error to report for an error that ends this process: where another process has ended, that is the
        reason."""
        if not isinstance(error, ConfigError):
            self._has_gone.wait(1.0)
        return self.lost or error

    def agree(self, facts: Mapping[str, object]) -> None:
        """Check that all processes have the same facts. Raises ConfigError, on all of them, that names those that
        differ."""
        own = {name: _short(str(value)) for name, value in facts.items()}
        if wrong := self._decide(json.dumps(own), _differences):
            raise ConfigError(f"the processes of this server differ: {wrong}; give all of them the same")

    def least(self, number: int) -> int:
        """Return the smallest of the numbers that the processes give."""
        return self._decide(number, lambda numbers: min(numbers.values()))

    @abstractmethod
    def _decide(self, own: Any, rule: Callable[[Mapping[int, Any]], Any]) -> Any:
        """Return, in all processes, what the rule makes of the values that they give, by number of process. Every
        process has to call it."""

    def _gone(self, how: str) -> None:
        """Note that another process has ended."""
        self._give_up(how)
        self._has_gone.set()

    def _give_up(self, why: str) -> ProcessError:
        with self._lock:
            is_first = self.lost is None and not self._is_over
            if is_first:
                self.lost = ProcessError(f"{why}; this server cannot go on, start all of its processes again")
        if is_first:
            self._notify_all(why)
            threading.Thread(target=self._on_lost, args=(self.lost,), name="ranks-lost", daemon=True).start()
        return self.lost or ProcessError(why)

    @abstractmethod
    def _notify_all(self, why: str) -> None:
        """Notify all processes that learn of it only through this one."""


class Leader(_Rank):
    """The first process, which sends all others what to run."""

    def __init__(self, listener: socket.socket, token: str, num_others: int, on_lost: Lost) -> None:
        """Wait until all others are connected. Raises ProcessError."""
        super().__init__(on_lost)
        self._wires: dict[int, _Wire] = {}
        listener.settimeout(CONNECT_SECONDS)
        while len(self._wires) < num_others:
            try:
                connection, _ = listener.accept()
                secret, _, number = read_line(connection, CONNECT_SECONDS).partition(" ")
            except OSError as error:
                there = sorted(self._wires)
                raise ProcessError(
                    f"of {num_others} other processes only {there} have connected to the first one ({error}); every "
                    "host must be able to reach all ports of the first one's"
                ) from error
            if not hmac.compare_digest(secret.encode(), token.encode()) or not number.isdecimal():
                connection.close()  # a stranger's
                continue
            wire = _Wire(connection, f"process {number}", self._gone)
            wire.on_leave = _stop
            self._wires[int(number)] = wire
        listener.close()

    def send(self, frame: bytes) -> None:
        """Send a message to all others. Raises ProcessError where one of them is not there any more."""
        if self.lost is not None:
            raise self.lost
        for number, wire in self._wires.items():
            try:
                wire.send(frame)
            except OSError as error:
                raise self._give_up(f"process {number} has ended ({error})") from error

    def _decide(self, own: Any, rule: Callable[[Mapping[int, Any]], Any]) -> Any:
        found = rule({0: own, **{number: wire.take_value() for number, wire in sorted(self._wires.items())}})
        self.send(messages.write("fact", (found,)))
        return found

    def _notify_all(self, why: str) -> None:
        for wire in self._wires.values():  # side by side, as the lost one may never take it
            threading.Thread(target=wire.notify, args=("lost", why), name="ranks-notify", daemon=True).start()

    def __enter__(self) -> "Leader":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let all others end as well. After an error nothing is sent: then they end with one of their own."""
        if kind is None or not issubclass(kind, Exception):
            self._is_over = True
            with contextlib.suppress(ProcessError):
                self.send(messages.write("end"))


class Follower(_Rank):
    """A process that is not the first one, and runs what that sends."""

    def __init__(self, connection: socket.socket, on_lost: Lost) -> None:
        super().__init__(on_lost)
        self._wire = _Wire(connection, "the first process", self._gone)
        self._wire.on_lost = self._gone

    def _decide(self, own: Any, rule: Callable[[Mapping[int, Any]], Any]) -> Any:
        del rule  # the first process's
        self._wire.send(messages.write("fact", (own,)))
        return self._wire.take_value()

    def frames(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the two parts of each message of what is to be run, until the first process ends. Raises ProcessError
        when it has ended without a message."""
        while not (parts := self._wire.take())[0].startswith(_END):
            yield parts
        self._is_over = True

    def _notify_all(self, why: str) -> None:
        """Notify nobody: the first process has a connection to each of the others."""

    def leave(self) -> None:
        """Ask the first process to drain and to end all processes, because this one is to stop."""
        self._wire.notify("leave")


class LeadingRunner(Runner):
    """The runner of the first process, which has all others run what it runs."""

    def __init__(self, leader: Leader, *models_and_shapes: Any, **options: Any) -> None:
        """Take what `Runner` takes, besides the leader."""
        self._leader = leader
        super().__init__(*models_and_shapes, **options)

    def run(self, program: StepProgram, *values: Any) -> Any:
        self._leader.send(messages.write("run", (program, *values), self.shapes.trees))
        return super().run(program, *values)

    def forget_answers(self) -> None:
        self._leader.send(messages.write("forget_answers"))
        super().forget_answers()

    def beyond_repair(self, error: Exception | None = None) -> Exception | None:
        """Return why this server cannot go on: another process has ended, or a step has failed, of which the other
        processes may have done more or less."""
        if error is None:
            return self._leader.lost
        return self._leader.failed(error)


def follow(runner: Runner, frames: Iterable[tuple[bytes, bytes]]) -> None:
    """Run what a `LeadingRunner` has sent, in its order; `frames` are those of `Follower.frames`."""
    proposal: Proposal | None = None
    for text, body in frames:
        word, values = messages.read(text, body, runner.shapes.trees, proposal)
        if word == "forget_answers":
            runner.forget_answers()
            continue
        result = runner.run(*values)
        if isinstance(result, Proposal):
            proposal = result


def connect(coordinator: str, on_lost: Lost) -> Leader | Follower | None:
    """Connect the processes that have joined, with the first one; None where there is only one. `on_lost` is called
    when one of them has ended, and is to end this one too. Raises ProcessError."""
    if jax.process_count() == 1:
        return None
    if not is_first():
        hosts, port, token = json.loads(_broadcast(b""))
        return Follower(_reach(hosts, port, f"{token} {jax.process_index()}\n".encode()), on_lost)
    listener = listen(0, backlog=jax.process_count())
    hosts, token = [coordinator.rpartition(":")[0].strip("[]")], secrets.token_hex(16)
    if coordinator == "auto":
        hosts = _own_addresses()
    _broadcast(json.dumps([hosts[:8], listener.getsockname()[1], token]).encode())
    return Leader(listener, token, jax.process_count() - 1, on_lost)


def _broadcast(text: bytes) -> bytes:
    """Return the first process's text, in all of them."""
    row = np.zeros(_ADDRESS_BYTES, np.uint8)
    row[: len(text)] = np.frombuffer(text, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(row), np.uint8).tobytes().rstrip(b"\0")


def check_mesh(mesh: Mesh | None) -> None:
    """Check that every device of every process has a part in the mesh. Raises ConfigError."""
    expected, found = jax.device_count(), 1
    if mesh is not None:
        found = mesh.size
    if jax.process_count() > 1 and found != expected:
        raise ConfigError(
            f"{jax.process_count()} processes need a mesh over all of their {expected} devices, got one over {found}; "
            f"give --mesh, such as tensor={expected}"
        )


def facts_of(run: ServeRun) -> dict[str, object]:
    """Return the facts that must be alike before anything is loaded."""
    names = [*names_of(PROGRAM), "num_processes"]  # the first process alone reads the others
    settings = {f"--{name.replace('_', '-')}": getattr(run, name) for name in names}
    # XLA makes other programs with other flags: sums are rounded otherwise there, and collectives wait for each other
    flags = {name: [f for f in os.environ.get(name, "").split() if "dump" not in f] for name in COMPILER_FLAGS}
    device = jax.devices()[0]
    return {
        "the version of specserve": specserve.__version__,
        "that of jax": jax.__version__,
        "that of XLA and its devices' driver": device.client.platform_version,
        "the kind of device": device.device_kind,
        **flags,
        **settings,
    }


def _stop() -> None:
    """Stop this process as a signal to it would: it drains."""
    os.kill(os.getpid(), signal.SIGTERM)


def _differences(written: Mapping[int, str]) -> str:
    """Return which facts, of the processes by their numbers, differ from those of the first one."""
    (_, own), *others = [(number, json.loads(text)) for number, text in written.items()]
    return "; ".join(
        f"{name} is {theirs.get(name, 'unknown')} in process {number} and {value} in the first"
        for number, theirs in others
        for name, value in own.items()
        if theirs.get(name) != value
    )


def _short(text: str) -> str:
    if len(text) > 80:
        return f"of checksum {zlib.crc32(text.encode()):08x}"
    return text or "empty"


def _own_addresses() -> list[str]:
    """Return the addresses of this machine that others may reach."""
    found = [address for each in psutil.net_if_addrs().values() for address in each]
    return [
        address.address
        for address in found
        if address.family in (socket.AF_INET, socket.AF_INET6)
        and not address.address.startswith(("127.", "::1", "fe80", "169.254."))
    ] or ["localhost"]


def _reach(hosts: Sequence[str], port: int, hello: bytes) -> socket.socket:
    """Connect with the first process, at whichever of its addresses answers. Raises ProcessError."""
    reasons = []
    for host in hosts:
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS / len(hosts))
            connection.sendall(hello)
            return connection
        except OSError as error:
            reasons.append(f"{host}:{port}: {error}")
    raise ProcessError(f"the first process cannot be reached ({'; '.join(reasons)})")


def _probe(connection: socket.socket) -> None:
    """Have the kernel ask whether the other machine is there, when nothing else is sent; and send at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": (SILENCE_SECONDS - 2) // 2}
    options["TCP_USER_TIMEOUT"] = SILENCE_SECONDS * 1000  # milliseconds, of what was sent and not acknowledged
    for name, value in options.items():
        if hasattr(socket, name):  # not everywhere all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
