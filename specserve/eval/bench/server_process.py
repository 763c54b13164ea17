"""A `specserve serve` of its own, as a process, for measurements from outside; and the moments of its start."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from specserve.errors import SpecServeError
from specserve.eval.bench.streams import Streams, stream_body
from specserve.eval.client import Client, RefusedError, UnreachableError
from specserve.serve.http.transport.keys import VARIABLE

START_SECONDS = 3600.0  # a first start compiles every program
STOP_SECONDS = 40.0
PROGRAMS_LEFT = "specserve:programs_left"
FIRST_PROMPT, FIRST_TOKENS = tuple(range(100, 164)), 32  # token ids; what they say does not matter


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

    def wait_until_ready(self, on_wait: Callable[[str], None] = lambda _line: None) -> None:
        """Wait until it answers; it may still compile. `on_wait` is called now and then with the last line of its
        output. Raises SpecServeError where it ends first."""
        self._wait("/ready", lambda _body: True, on_wait)

    def wait_until_complete(self) -> None:
        """Wait until every program is compiled. Raises SpecServeError where it ends first."""
        self._wait("/metrics", lambda body: _value(body, PROGRAMS_LEFT) == 0)

    def _wait(
        self, path: str, is_there: Callable[[str], bool], on_wait: Callable[[str], None] = lambda _line: None
    ) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise SpecServeError(f"the server ended with status {self._process.returncode}:\n{self.last_lines()}")
            with contextlib.suppress(UnreachableError, RefusedError):
                if is_there(self.client.text(path)):
                    return
            on_wait(self._last_message())
            time.sleep(0.2)
        raise SpecServeError(f"the server is not there after {START_SECONDS:.0f} s:\n{self.last_lines()}")

    def last_lines(self) -> str:
        """Return the last lines of its output."""
        text = Path(self._log.name).read_text(errors="replace")
        return "\n".join(f"  {line}" for line in text.splitlines()[-12:])

    def _last_message(self) -> str:
        """Return the last message of its log, without the date and place of a line."""
        lines = Path(self._log.name).read_text(errors="replace").split("\n")
        line = next((line for line in reversed(lines) if line.strip()), "")
        return re.sub(r"^\S+ \S+ [A-Z]+ [\w.]+: ", "", line.strip())

    @property
    def resident_bytes(self) -> int:
        """The memory that it holds now."""
        return psutil.Process(self._process.pid).memory_info().rss


def _value(metrics: str, name: str) -> float | None:
    """The value of a gauge in a Prometheus text; None where it is not there."""
    found = [float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name)]
    return sum(found) if found else None


@dataclass(frozen=True)
class Moment:
    """A moment of a server's start: when it was reached, and how much memory the process held then."""

    what: str
    seconds: float  # since its process began
    num_bytes: int  # resident


def moments_of_a_start(flags: Sequence[str], cache: Path) -> Iterator[Moment]:
    """Start a server whose cache folder is in `cache`, and tell when it is ready, has given a first answer and has
    every program. Raises SpecServeError."""
    # nor may a cache of JAX's own help
    with ServerProcess(flags, {"XDG_CACHE_HOME": str(cache), "JAX_ENABLE_COMPILATION_CACHE": "false"}) as server:

        def moment(what: str) -> Moment:
            return Moment(what, time.monotonic() - server.begin, server.resident_bytes)

        server.wait_until_ready()
        yield moment("ready")
        model = server.client.first_model()
        path, body = stream_body(model, FIRST_PROMPT, max_tokens=FIRST_TOKENS, temperature=0, ignore_eos=True)
        reply = Streams(server.client).ask(path, body)
        if reply.error:
            raise SpecServeError(f"the server does not answer: {reply.error}\n{server.last_lines()}")
        yield moment(f"a first answer of {FIRST_TOKENS} tokens")
        server.wait_until_complete()
        yield moment("all programs")


def serve_flags(target: str, draft: str, speculation: str, max_slots: int, max_model_len: int) -> list[str]:
    """The flags of `specserve serve` for these settings, of which an empty one, or 0, is left to its defaults."""
    values = {"--target": target, "--draft": draft, "--speculation": speculation}
    values |= {"--max-slots": str(max_slots or ""), "--max-model-len": str(max_model_len or "")}
    return [part for flag, value in values.items() if value for part in (flag, value)]
