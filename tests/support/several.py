"""`specserve serve` as several processes that are one server."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import httpx
from engines import PATIENCE, wait_until
from served import SCRIPT, environment, free_ports


class Several:
    """`specserve serve` as several processes with Gloo between them; `more` are flags of all of them."""

    def __init__(
        self,
        folder: Path,
        cache: Path,
        *,
        mesh: str = "tensor=2",
        count: int = 2,
        ids: Sequence[int] | None = None,  # of those that are started; None: all
        host: str = "127.0.0.1",  # of the first one
        changes: Sequence[str] = (),  # further flags of the last one
        variables: Mapping[str, str] = MappingProxyType({}),  # of the last one's environment
        more: Sequence[str] = (),
        inside: Callable[[int], list[str]] = lambda _number: [],  # the command that each is started by
        script: str = SCRIPT,  # in Python, which ends with the command line
    ) -> None:
        ports = free_ports(2)
        self.url = f"http://{host}:{ports[0]}"
        flags = ["--target", str(folder), "--speculation", "ngram:3", "--max-slots", "2", "--mesh", mesh]
        flags += ["--max-model-len", "64", "--no-constrained", "--host", host, "--port", str(ports[0])]
        flags += ["--coordinator", f"{host}:{ports[1]}", "--num-processes", str(count), "--drain-seconds", "60", *more]
        self.ids = list(range(count)) if ids is None else list(ids)
        command = [sys.executable, "-c", script, "serve", *flags]
        self.processes = [
            subprocess.Popen(
                [*inside(i), *command, "--process-id", str(i), *(changes if i == self.ids[-1] else ())],
                env=environment(cache) | (variables if i == self.ids[-1] else {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i in self.ids
        ]

    def __enter__(self) -> "Several":
        return self

    def __exit__(self, error: object, *_exc: object) -> None:
        for each in self.processes:
            each.kill()
            said, _ = each.communicate()
            if error is not None:
                print(said)  # pytest shows it

    def wait_until_ready(self) -> None:
        wait_until(lambda: self.status("/ready") == 200 or any(each.poll() is not None for each in self.processes))
        assert self.status("/ready") == 200, self.end()

    def status(self, path: str) -> int:
        try:
            return httpx.get(self.url + path, timeout=PATIENCE).status_code
        except httpx.TransportError:
            return 0

    def end(self, seconds: float = PATIENCE) -> list[tuple[int, str]]:
        """How each has ended, and what it has said."""
        return [(each.returncode, said) for each in self.processes for said in [each.communicate(timeout=seconds)[0]]]
