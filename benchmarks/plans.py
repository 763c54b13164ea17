"""What messages to the other processes of a server cost a round, on the thread that dispatches it.

Run from the checkout: `python benchmarks/plans.py`. The others are real processes on this machine, which read and drop
what they are sent. So the network's own time is not in it: that passes while the device works.
"""

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from over_http import processor

from specserve.drafters.speculation import parse_speculation
from specserve.serve.engine.options import sampler_rows
from specserve.serve.fleet import messages, ranks
from specserve.serve.fleet.ranks import Leader
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.program import StepProgram

TREE = parse_speculation("chain:3")
SLOTS = tuple(range(64))
ROWS = sampler_rows(SamplingParams(), 0)
MESSAGES = {
    "a step of 64 sequences": (StepProgram(64, 128, TREE), SLOTS, 1, None),
    "new pages": (StepProgram(kind="page table"), np.zeros((3, 32), np.int32)),
    "a prompt's chunk": (StepProgram(1, 128, kind="prefill", chunk=1024), (0,), (1024,), (True,), None),
    "an admission, prompt of 2,000": (
        *(StepProgram(kind="admission"), 0, np.zeros(2000, np.int32), np.zeros(63, np.int32)),
        *(0, ROWS, None, 0.0, False),
    ),
    "verification, masks of 64 x 4 x 150,000 tokens": (
        *(StepProgram(64, 128, TREE, kind="verification"), SLOTS, None),
        np.zeros((64, 4, 18_750), np.uint8),
    ),
}


def _read(port: int, number: int) -> None:
    """One of the other processes."""
    with ranks._reach(["127.0.0.1"], port, f"token {number}\n".encode()) as connection:
        while connection.recv(1 << 20):
            pass


@contextmanager
def leading(num_others: int) -> Iterator[Leader]:
    """The first of so many processes more."""
    listener = socket.create_server(("127.0.0.1", 0))
    context, port = multiprocessing.get_context("spawn"), listener.getsockname()[1]
    others = [context.Process(target=_read, args=(port, number), daemon=True) for number in range(1, 1 + num_others)]
    for other in others:
        other.start()
    with Leader(listener, "token", num_others, lambda error: None) as leader:  # noqa: ARG005 (they are not waited for)
        yield leader
    for other in others:
        other.terminate()
        other.join()


def measure(leader: Leader, values: tuple[Any, ...], rounds: int) -> list[float]:
    """Microseconds of each message."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        leader.send(messages.write("run", values, (TREE,)))
        found.append((time.perf_counter() - begin) * 1e6)
        time.sleep(0.001)  # as between two steps
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", default="2,4,8", help="of the server together")
    parser.add_argument("--rounds", type=int, default=500)
    asked = parser.parse_args()
    print(f"{processor()}\n")
    print(f"{'processes':>9} {'bytes':>10} {'median us':>10} {'p99 us':>8}  message")
    for number in map(int, asked.processes.split(",")):
        with leading(number - 1) as leader:
            for name, values in MESSAGES.items():
                size = len(messages.write("run", values, (TREE,)))
                times = measure(leader, values, asked.rounds)
                slow = statistics.quantiles(times, n=100)[-1]
                print(f"{number:>9} {size:>10,} {statistics.median(times):>10.1f} {slow:>8.1f}  {name}", flush=True)


if __name__ == "__main__":
    main()
