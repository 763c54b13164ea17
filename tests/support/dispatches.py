"""The programs that a process dispatches, in their order, as JAX's monitoring reports them."""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from specserve import host
from specserve.mesh import COMPILE_EVENT
from specserve.serve.programs.compile_queue import DISPATCH_EVENT

FOLDER = "SPECSERVE_TEST_DISPATCHES"  # the variable that names where processes write what they dispatch
COMPILED = "compiled "  # how the line of a function begins that is compiled because it is called


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """The programs that this process dispatches meanwhile."""
    lines: list[str] = []
    listener = _of_dispatches(lines.append)
    jax.monitoring.register_event_listener(listener)
    try:
        yield lines
    finally:
        jax.monitoring.unregister_event_listener(listener)


def write_down() -> None:
    """Write what this process dispatches to a file, from now on to its end. What stands outside the list of a server's
    programs is seen once, since JAX reports what it compiles."""
    file = _file(os.getpid()).open("a", buffering=1)

    def write(line: str) -> None:
        print(line, file=file)

    def on_compiled(event: str, _seconds: float, **facts: Any) -> None:
        if event == COMPILE_EVENT and threading.current_thread().name != host.COMPILER_THREAD:
            write(COMPILED + str(facts["fun_name"]))

    jax.monitoring.register_event_listener(_of_dispatches(write))
    jax.monitoring.register_event_duration_secs_listener(on_compiled)


def mix() -> None:
    """Have the server of this process run prompts side by side and beside steps, as on an accelerator."""
    from specserve.serve import sizes

    make = sizes.make_shapes

    def mixing(*args: Any, **options: Any) -> Any:
        return dataclasses.replace(make(*args, **options), is_mixing=True, prompt_tokens=64)

    sizes.make_shapes = mixing


def read(process: int) -> list[str]:
    """What a process, by its number in the system, has written down: from the first sequence on also what it compiled
    between two dispatches."""
    lines = _file(process).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if "kind='admission'" in line)
    return [line for i, line in enumerate(lines) if i > first or not line.startswith(COMPILED)]


def _file(process: int) -> Path:
    return Path(os.environ[FOLDER], f"{process}.txt")


def _of_dispatches(hear: Callable[[str], object]) -> Callable[..., None]:
    def listener(event: str, **facts: Any) -> None:
        if event == DISPATCH_EVENT:
            hear(facts["program"])

    return listener
