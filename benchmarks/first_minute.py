"""The first minute of a server that has no program yet and is asked at once: its tokens/s, beside those of plain
decoding and of the server's own choice later, when all is compiled.

Run from the checkout: `python benchmarks/first_minute.py --clients 0,1,16`. With 0 clients nobody asks, and the server
is complete as soon as it can be. The checkouts take turns, each start with an empty folder of programs.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from over_http import ROOT, assignment, commit, processor, questions
from served_flags import add_served, flags_of, numbers, positive, run
from server_process import PROGRAMS_LEFT, ServerProcess, value

from specserve.errors import SpecServeError
from specserve.eval.client import RefusedError, UnreachableError

TOKENS = "vllm:generation_tokens_total"
ANSWER_TOKENS, CONTEXT = 128, 1024
POLL_SECONDS = 0.2
SETTLE_SECONDS = 5.0  # until steps are timed, and until all clients have been answered once


@dataclass(frozen=True)
class Start:
    """A fresh start. Seconds count from the start of the process, tokens/s are those of all clients together."""

    name: str
    clients: int
    ready: float
    complete: float  # with nobody asking after the first minute
    left: float  # programs, after the first minute
    first: float = 0.0
    plain: float = 0.0  # later
    auto: float = 0.0


def measure(name: str, folder: str, clients: int, seconds: float, prompts: list[list[int]], flags: list[str]) -> Start:
    """Start a server of a checkout anew, and ask it as soon as it is ready."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {"PYTHONPATH": folder, "XDG_CACHE_HOME": cache}
        with ServerProcess(["--max-model-len", str(CONTEXT), "--allow-load-draft", *flags], environment) as server:
            while _metric(server, PROGRAMS_LEFT) is None:
                server.check()
                time.sleep(POLL_SECONDS)
            ready = time.monotonic() - server.begin
            with _asking(server, clients, prompts):
                first = _rate(server, seconds) if clients else 0.0
                left = _metric(server, PROGRAMS_LEFT) or 0.0
            server.wait_until_complete()
            complete = time.monotonic() - server.begin
            if not clients:
                return Start(name, clients, ready, complete, left)
            time.sleep(SETTLE_SECONDS)
            later = {}
            for speculation in ("off", "auto"):
                server.client.json("/v1/speculation", {"speculation": speculation})
                with _asking(server, clients, prompts):
                    time.sleep(SETTLE_SECONDS)
                    later[speculation] = _rate(server, seconds / 2)
    return Start(name, clients, ready, complete, left, first, later["off"], later["auto"])


def _metric(server: ServerProcess, name: str) -> float | None:
    with contextlib.suppress(UnreachableError, RefusedError):
        return value(server.client.text("/metrics"), name)
    return None


def _rate(server: ServerProcess, seconds: float) -> float:
    before, begin = _metric(server, TOKENS) or 0.0, time.monotonic()
    time.sleep(seconds)
    return ((_metric(server, TOKENS) or 0.0) - before) / (time.monotonic() - begin)


@contextlib.contextmanager
def _asking(server: ServerProcess, clients: int, prompts: list[list[int]]) -> Iterator[None]:
    """Have so many clients ask one question after another within the context."""
    is_over, numbers, failures = threading.Event(), count(), list[SpecServeError]()

    def ask() -> None:
        while not is_over.is_set() and not failures:
            number = next(numbers)
            body: dict[str, Any] = {"prompt": prompts[number % len(prompts)], "max_tokens": ANSWER_TOKENS}
            body |= {"temperature": 0, "ignore_eos": True, "cache_salt": str(number)}
            try:
                server.client.json("/v1/completions", body)
            except SpecServeError as error:
                failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def table(starts: list[Start]) -> str:
    """The medians of the starts of each checkout and number of clients."""
    columns = "checkout", "clients", "ready, s", "complete, s", "left after the first minute", "tokens/s then"
    columns += "plain later", "to plain", "auto later"
    lines = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
    for name, clients in dict.fromkeys((start.name, start.clients) for start in starts):
        alike = [start for start in starts if (start.name, start.clients) == (name, clients)]
        ready, complete, left, first, plain, auto = (
            statistics.median(getattr(start, field) for start in alike)
            for field in ("ready", "complete", "left", "first", "plain", "auto")
        )
        rates = [f"{first:.0f}", f"{plain:.0f}", "", f"{auto:.0f}"] if clients else [""] * 4
        if clients:
            ratios = [start.first / start.plain for start in alike]
            rates[2] = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {name} | {clients} | {ready:.1f} | {complete:.1f} | {left:.0f} | {' | '.join(rates)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_served(parser)
    add("--clients", type=numbers, default="0,1,16", help="how many ask at once, a start for each (%(default)s)")
    add("--rounds", type=positive, default=1, help="starts of each (%(default)s)")
    add("--seconds", type=float, default=60.0, help="of the first minute; later half as long each (%(default)s)")
    add("--max-slots", type=positive, default=16, help="of the server (%(default)s)")
    add("--checkout", type=assignment, action="append", metavar="NAME=FOLDER", help="another one; may be repeated")
    return run(parser, start_all)


def start_all(options: argparse.Namespace, target: Path) -> None:
    """Start the server of each checkout in turns, and print the table."""
    checkouts = {"this": str(ROOT), **dict(options.checkout or ())}
    prompts = questions(target, options.bench, 32, CONTEXT - ANSWER_TOKENS)
    starts: list[Start] = []
    for _ in range(options.rounds):
        for clients in options.clients:
            for name, folder in checkouts.items():
                flags = [*flags_of(options), "--max-slots", str(options.max_slots)]
                starts.append(measure(name, folder, clients, options.seconds, prompts, flags))
                print(starts[-1], flush=True)
    commits = ", ".join(f"{name} {commit(Path(folder))}" for name, folder in checkouts.items())
    print(f"\n{processor()}; {target}; {commits}\n\n{table(starts)}")


if __name__ == "__main__":
    sys.exit(main())
