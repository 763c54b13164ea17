"""A `specserve serve` of its own, as a process, for measurements from outside."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from specserve.errors import SpecServeError
from specserve.eval.client import Client, RefusedError, UnreachableError
from specserve.serve.http.transport.keys import VARIABLE

START_SECONDS = 3600.0  # a first start compiles every program
STOP_SECONDS = 40.0
PROGRAMS_LEFT = "specserve:programs_left"


class ServerProcess:
    """Starts a server on a free port, in a `with`; its output goes to a file that is removed at the end."""

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """`flags` are those of `specserve serve`, without a port."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.client = Client(f"http://127.0.0.1:{port}")
        self._command = [sys.executable, "-m", "specserve.cli.main", "serve", "--port", str(port), *flags]
        self._environment = {**os.environ, VARIABLE: "", **(environment or {})}  # its own client has no key

    def __enter__(self) -> "ServerProcess":
        self._log = tempfile.NamedTemporaryFile("w+b", suffix=".log")
        self.begin = time.monotonic()
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log, env=self._environment)
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._process.kill()
        self._process.wait()
        self._log.close()
        self.client.close()

    def wait_until_complete(self) -> None:
        """Wait until every program is compiled. Raises SpecServeError where it ends first."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self.check()
            with contextlib.suppress(UnreachableError, RefusedError):
                if value(self.client.text("/metrics"), PROGRAMS_LEFT) == 0:
                    return
            time.sleep(0.2)
        raise SpecServeError(f"the server is not there after {START_SECONDS:.0f} s:\n{self.last_lines()}")

    def check(self) -> None:
        """Check that the process runs. Raises SpecServeError."""
        if self._process.poll() is not None:
            raise SpecServeError(f"the server ended with status {self._process.returncode}:\n{self.last_lines()}")

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop it, and every process that it has started, until the context ends."""
        own = psutil.Process(self._process.pid)
        own.suspend()  # first, so that it starts no other one
        try:
            children = own.children(recursive=True)
            _each(children, psutil.Process.suspend)
            yield
            _each(children, psutil.Process.resume)
        finally:
            own.resume()

    def has_child(self, module: str) -> bool:
        """Return whether a process runs that it has started as this module."""
        for process in psutil.Process(self._process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in process.cmdline():
                    return True
        return False

    def last_lines(self) -> str:
        """Return the last lines of its output."""
        text = Path(self._log.name).read_text(errors="replace")
        return "\n".join(f"  {line}" for line in text.splitlines()[-12:])

    @property
    def resident_bytes(self) -> int:
        """The memory that it holds now."""
        return psutil.Process(self._process.pid).memory_info().rss


def _each(processes: Sequence[psutil.Process], act: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            act(process)


def value(metrics: str, name: str) -> float | None:
    """The value of a gauge in a Prometheus text; None where it is not there."""
    found = [float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name)]
    return sum(found) if found else None
