"""A run under JAX's profiler: the trace that XProf, TensorBoard and Perfetto show, and its longest operations.

JAX writes an `.xplane.pb` for XProf and the same events as JSON. The JSON is read here, which takes the standard
library alone.
"""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.errors import DataError

_NUMBER = re.compile(r"(\.\d+)+$")
DEVICE_THREAD = "XLA Ops"  # where accelerators have their operations


@dataclass(frozen=True)
class Operation:
    """The runs of all operations of one kind in one compiled program, such as `dot.3` and `dot.7`."""

    program: str
    name: str
    seconds: float  # its own: what runs inside it, as in the body of a loop, is not counted
    count: int


def newest_trace(folder: Path) -> Path:
    """The JSON of the trace that was written last below a folder. Raises DataError where there is none."""
    found = sorted(folder.glob("plugins/profile/*/*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise DataError(f"{folder}: the profiler has written no trace there")
    return found[-1]


def read_operations(file: Path) -> list[Operation]:
    """The operations of a trace, the longest first. Raises DataError where the file is damaged."""
    try:
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise DataError(f"{file}: not a trace of JAX's profiler ({error})") from error
    return operations(events)


def operations(events: Iterable[Mapping[str, Any]]) -> list[Operation]:
    """The operations among the events of a trace (Chrome's format, times in microseconds), the longest first."""
    events = list(events)
    device = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and event["args"].get("name") == DEVICE_THREAD
    }
    by_thread: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        thread = event.get("pid", 0), event.get("tid", 0)
        if event.get("ph") == "X" and ("hlo_op" in event.get("args", {}) or thread in device):
            by_thread[thread].append(event)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for of_thread in by_thread.values():
        around: list[tuple[float, tuple[str, str]]] = []  # ends and names of those that are not over
        for event in sorted(of_thread, key=lambda event: (event["ts"], -event.get("dur", 0))):
            start, spent = event["ts"], event.get("dur", 0)
            while around and around[-1][0] <= start:
                around.pop()
            arguments = event.get("args", {})
            key = str(arguments.get("hlo_module", "")), _NUMBER.sub("", str(arguments.get("hlo_op", event["name"])))
            seconds[key] += spent / 1e6
            counts[key] += 1
            if around:
                seconds[around[-1][1]] -= spent / 1e6
            around.append((start + spent, key))
    found = [Operation(*key, total, counts[key]) for key, total in seconds.items()]
    return sorted(found, key=lambda operation: -operation.seconds)
