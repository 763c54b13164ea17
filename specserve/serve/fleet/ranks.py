"""A server over several processes: how they find each other, what they must agree on, and that all end with one.

The first process has the requests, the scheduler and the clock. The others have the same models over the same mesh and
run the plans that the first one sends (`plans`), in its order, so every device takes part in every program. Plans go
over TCP, where the end of a process is noticed at once, and that of a machine by the kernel's own probes.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import psutil
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import specserve
from specserve.errors import ConfigError
from specserve.processes import ProcessError
from specserve.serve.fleet import plans
from specserve.serve.fleet.plans import Plan
from specserve.serve.settings import ServeRun
from specserve.speculative.tree import Proposal, Tree

CONNECT_SECONDS = 30.0  # for all to connect, once all have joined (`processes.join`)
SILENCE_SECONDS = 8  # after which a machine that answers no probe is taken for dead
_ADDRESS_BYTES = 1024
_SAME = (  # the settings that decide about programs and the state; the first process alone reads the others
    *("quantization", "draft_quantization", "kv_cache_dtype", "mesh", "speculation", "max_slots", "max_model_len"),
    *("page_size", "cache_tokens", "cache_gb", "cache_fraction", "deterministic", "constrained", "num_processes"),
)

Lost = Callable[[ProcessError], None]  # called on a thread of its own, and once: no process goes on alone


class _Wire:
    """The connection of two processes, over which plans go both ways. Messages are read at once, on a thread of its
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
        """Send a plan. Raises OSError where nobody is there; the reading thread has reported that already."""
        with self._sending:
            self._connection.sendall(frame)

    def tell(self, word: str, *arguments: str) -> None:
        """Send a message that is no plan, if anybody is there."""
        with contextlib.suppress(OSError):
            self.send(plans.write(Plan(word, arguments), ()))

    def take(self, trees: Sequence[Tree | None] = (), proposal: Callable[[], Proposal | None] = lambda: None) -> Plan:
        """Wait for the next plan, and return it. Raises ProcessError when none will come."""
        parts = self._arrived.get()
        if parts is None:
            self._arrived.put(None)
            raise ProcessError(f"{self._what} has ended")
        return plans.read(*parts, trees, proposal())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _receive(self) -> None:
        reason = "it closed its connection"
        try:
            with self._connection.makefile("rb") as stream:
                while len(lengths := stream.read(plans.LENGTHS.size)) == plans.LENGTHS.size:
                    text, body = (stream.read(length) for length in plans.LENGTHS.unpack(lengths))
                    if text.startswith(_LEAVE):
                        self.on_leave()
                    elif text.startswith(_LOST):
                        self.on_lost(plans.read(text, body, ()).arguments[0])
                    else:
                        self._arrived.put((text, body))
        except (OSError, ValueError) as error:
            reason = str(error)
        self._connection.close()
        self._arrived.put(None)
        self._on_end(f"{self._what} has ended ({reason})")


_LEAVE, _LOST = b'["leave"', b'["lost"'  # how a follower's wish to stop begins, and the first one's word of an end


class _Rank:
    """The common part of the first process and the others."""

    def __init__(self, on_lost: Lost) -> None:
        self._on_lost, self._lock = on_lost, threading.Lock()
        self._has_gone = threading.Event()  # another process
        self.lost: ProcessError | None = None  # why this server cannot go on
        self._is_over = False

    def failed(self, error: Exception) -> ProcessError:
        """Tell the other processes that this server cannot go on after an error of this process. Returns the error to
        raise: where another process has ended, that is the reason why this one fails."""
        self._has_gone.wait(1.0)
        return self._give_up(str(error).splitlines()[0] if str(error) else type(error).__name__)

    def reason(self, error: Exception) -> Exception:
        """Return the error to report for an error that ends this process: where another process has ended, that is the
        reason."""
        if not isinstance(error, ConfigError):
            self._has_gone.wait(1.0)
        return self.lost or error

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
            self._tell_all(why)
            threading.Thread(target=self._on_lost, args=(self.lost,), name="ranks-lost", daemon=True).start()
        return self.lost or ProcessError(why)

    def _tell_all(self, why: str) -> None:
        """Tell all processes that hear of it only through this one."""


class Leader(_Rank):
    """The first process, which tells all others what to run."""

    def __init__(self, listener: socket.socket, token: str, num_others: int, on_lost: Lost) -> None:
        """Wait until all others are connected. Raises ProcessError."""
        super().__init__(on_lost)
        self.trees: Sequence[Tree | None] = ()  # that plans may name
        self._wires: dict[int, _Wire] = {}
        listener.settimeout(CONNECT_SECONDS)
        while len(self._wires) < num_others:
            try:
                connection, _ = listener.accept()
                connection.settimeout(CONNECT_SECONDS)
                said, _, number = _line(connection).partition(" ")
            except OSError as error:
                there = sorted(self._wires)
                raise ProcessError(
                    f"of {num_others} other processes only {there} have connected to the first one ({error}); every "
                    "host must be able to reach all ports of the first one's"
                ) from error
            if not hmac.compare_digest(said.encode(), token.encode()) or not number.isdecimal():
                connection.close()  # somebody else
                continue
            wire = _Wire(connection, f"process {number}", self._gone)
            wire.on_leave = _stop
            self._wires[int(number)] = wire
        listener.close()

    def send(self, plan: Plan) -> None:
        """Have all others run this plan. Raises ProcessError where one of them is not there any more."""
        if self.lost is not None:
            raise self.lost
        frame = plans.write(plan, self.trees)
        for number, wire in self._wires.items():
            try:
                wire.send(frame)
            except OSError as error:
                raise self._give_up(f"process {number} has ended ({error})") from error

    def agree(self, facts: Mapping[str, object]) -> None:
        """Check that all processes have the same facts. Raises ConfigError, on all of them, that names those that
        differ."""
        own = _told(facts)
        wrong = [
            f"{name} is {theirs.get(name, 'unknown')} in process {number} and {value} in the first"
            for number, theirs in ((number, json.loads(text)) for number, text in self._said())
            for name, value in json.loads(own).items()
            if theirs.get(name) != value
        ]
        self.send(Plan("say", ("; ".join(wrong),)))
        _refuse("; ".join(wrong))

    def least(self, number: int) -> int:
        """Return the smallest of the numbers that the processes give."""
        smallest = min(number, *(theirs for _, theirs in self._said()))
        self.send(Plan("say", (smallest,)))
        return smallest

    def _said(self) -> list[tuple[int, Any]]:
        return [(number, wire.take().arguments[0]) for number, wire in sorted(self._wires.items())]

    def _tell_all(self, why: str) -> None:
        for wire in self._wires.values():  # side by side, as the lost one may never take it
            threading.Thread(target=wire.tell, args=("lost", why), name="ranks-tell", daemon=True).start()

    def __enter__(self) -> "Leader":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let all others end as well. After an error nothing is said: then they end with one of their own."""
        if kind is None or not issubclass(kind, Exception):
            self._is_over = True
            with contextlib.suppress(ProcessError):
                self.send(Plan("end"))


class Follower(_Rank):
    """A process that is not the first one, and runs the plans that it gets."""

    def __init__(self, connection: socket.socket, on_lost: Lost) -> None:
        super().__init__(on_lost)
        self._wire = _Wire(connection, "the first process", self._gone)
        self._wire.on_lost = self._gone

    def agree(self, facts: Mapping[str, object]) -> None:
        """Take part in `Leader.agree`, with this process's facts."""
        self._wire.send(plans.write(Plan("say", (_told(facts),)), ()))
        _refuse(self._wire.take().arguments[0])

    def least(self, number: int) -> int:
        """Take part in `Leader.least`, with this process's number."""
        self._wire.send(plans.write(Plan("say", (number,)), ()))
        return self._wire.take().arguments[0]

    def plans(self, trees: Sequence[Tree | None], proposal: Callable[[], Proposal | None]) -> Iterator[Plan]:
        """Yield all plans that are to be run, until the first process ends. `proposal` gives the last one that was
        made. Raises ProcessError when the first process has ended without saying so."""
        while (plan := self._wire.take(trees, proposal)).name != "end":
            yield plan
        self._is_over = True

    def leave(self) -> None:
        """Tell the first process that this one is to stop, so that it drains and ends all of them."""
        self._wire.tell("leave")


def connect(coordinator: str, on_lost: Lost) -> Leader | Follower | None:
    """Connect the processes that have joined, with the first one; None where there is only one. `on_lost` is called
    when one of them has ended, and is to end this one too. Raises ProcessError."""
    if jax.process_count() == 1:
        return None
    is_first, dual = jax.process_index() == 0, socket.has_dualstack_ipv6()
    told = np.zeros(_ADDRESS_BYTES, np.uint8)
    listener, token = None, ""
    if is_first:
        family = socket.AF_INET6 if dual else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=jax.process_count())
        token, port = secrets.token_hex(16), listener.getsockname()[1]
        hosts = [coordinator.rpartition(":")[0].strip("[]")] if coordinator != "auto" else _own_addresses()
        text = json.dumps([hosts[:8], port, token]).encode()
        told[: len(text)] = np.frombuffer(text, np.uint8)
    told = np.asarray(multihost_utils.broadcast_one_to_all(told), np.uint8)
    if listener is not None:
        return Leader(listener, token, jax.process_count() - 1, on_lost)
    hosts, port, token = json.loads(told.tobytes().rstrip(b"\0"))
    return Follower(_reach(hosts, port, f"{token} {jax.process_index()}\n".encode()), on_lost)


def check_mesh(mesh: Mesh | None) -> None:
    """Check that every device of every process has a part in the mesh. Raises ConfigError."""
    wanted, found = jax.device_count(), 1 if mesh is None else mesh.size
    if jax.process_count() > 1 and found != wanted:
        raise ConfigError(
            f"{jax.process_count()} processes need a mesh over all of their {wanted} devices, got one over {found}; "
            f"give --mesh, such as tensor={wanted}"
        )


def facts_of(run: ServeRun) -> dict[str, object]:
    """Return the facts that must be alike before anything is loaded."""
    settings = {f"--{name.replace('_', '-')}": getattr(run, name) for name in _SAME}
    return {"the version of specserve": specserve.__version__, "that of jax": jax.__version__, **settings}


def _stop() -> None:
    """Stop this process as if it had been told to stop itself: it drains."""
    os.kill(os.getpid(), signal.SIGTERM)


def _told(facts: Mapping[str, object]) -> str:
    return json.dumps({name: _short(str(value)) for name, value in facts.items()})


def _short(text: str) -> str:
    return f"of checksum {zlib.crc32(text.encode()):08x}" if len(text) > 80 else text or "empty"


def _refuse(wrong: str) -> None:
    if wrong:
        raise ConfigError(f"the processes of this server differ: {wrong}; give all of them the same")


def _line(connection: socket.socket) -> str:
    """Read the first line that comes, of at most 64 bytes."""
    got = b""
    while not got.endswith(b"\n") and len(got) < 64:
        byte = connection.recv(1)
        if not byte:
            break
        got += byte
    return got.decode(errors="replace").strip()


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
    wanted = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": (SILENCE_SECONDS - 2) // 2}
    wanted["TCP_USER_TIMEOUT"] = SILENCE_SECONDS * 1000  # milliseconds, of what was sent and not acknowledged
    for name, value in wanted.items():
        if hasattr(socket, name):  # not everywhere all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
