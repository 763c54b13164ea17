"""The server's own choice while other processes come and go: tokens/s of plain decoding, a fixed chain and `auto`, in
each phase of a load that is played to all of them. `auto` should be within 3% of the better of the two.

Run from the checkout: `python benchmarks/changing_load.py --clients 1,4,16`. A phase has so many processes that take a
core each; its first seconds are left out, in which the server may find out. With `--record FILE` the seconds of single
steps under the same load are written instead, by which a test plays that load to the controller alone.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
from over_http import CONTEXT, processor, questions

from specserve.checkpoints.source import BUNDLED_FOLDER
from specserve.drafters.speculation import parse_speculation
from specserve.serve.engine.engine import Engine
from specserve.serve.engines import measured_engine
from specserve.serve.launch import load_models
from specserve.serve.requests.request import Delta, SamplingParams
from specserve.speculative.program import StepProgram

PHASES = (0, 1, 2, 0, 2, 1, 0)  # processes
SECONDS, SETTLING = 10.0, 5.0  # of a phase, and those that are left out
WAYS = ("off", "chain:3")
PAIRS = 700  # of steps in a record, for each batch


def spin() -> None:
    while True:
        pass


@contextlib.contextmanager
def load(number: int) -> Iterator[None]:
    """Have so many processes take a core each."""
    processes = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(number)]
    for each in processes:
        each.start()
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.join()


def record(file: Path, batches: Sequence[int]) -> None:
    """Time a step of each way in turns, under each phase of the load, and write pairs of seconds by batch and phase."""
    found: dict[str, Any] = {"processor": processor(), "processes": PHASES, "seconds": SECONDS, "ways": WAYS}
    runner = measured_engine(load_models("", ""), WAYS[1], num_slots=max(batches), max_model_len=CONTEXT).runner
    trees = [parse_speculation(way) for way in WAYS]
    for batch in batches:
        programs = [StepProgram(batch, runner.shapes.widths[-1], tree) for tree in trees]
        found[str(batch)] = [_phase(runner, programs, number) for number in PHASES]
    file.write_text(json.dumps(found, separators=(",", ":")) + "\n")


def _phase(runner: Any, programs: Sequence[StepProgram], number: int) -> list[list[float]]:
    pairs = []
    with load(number):
        time.sleep(1.0)  # until the processes have begun
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            pairs.append([_seconds(runner, program) for program in programs])
    return [[float(f"{each:.3g}") for each in pair] for pair in pairs[:: max(1, len(pairs) * len(PHASES) // PAIRS)]]


def _seconds(runner: Any, program: StepProgram) -> float:
    runner.run(program)  # as what follows another program takes longer
    jax.block_until_ready(runner.state)
    begin = time.perf_counter()
    runner.run(program)
    jax.block_until_ready(runner.state)
    return time.perf_counter() - begin


def play(engine: Engine, prompts: Iterator[list[int]], clients: int, max_tokens: int) -> list[float]:
    """Have clients ask all the time, and return the answers' tokens/s in each phase."""
    free, counts = queue.SimpleQueue[bool](), [0]  # whether to go on, for each client without a question
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)

    def on_delta(delta: Delta) -> None:
        counts[0] += len(delta.token_ids)
        if delta.finish_reason is not None:
            free.put(True)

    def ask() -> None:
        while free.get():
            engine.submit(next(prompts), params, on_delta)

    thread, rates = threading.Thread(target=ask), []
    thread.start()
    for _ in range(clients):
        free.put(True)
    for number in PHASES:
        with load(number):
            time.sleep(SETTLING)
            before, begin = counts[0], time.perf_counter()
            time.sleep(SECONDS - SETTLING)
            rates.append((counts[0] - before) / (time.perf_counter() - begin))
    free.put(False)
    thread.join()
    return rates


def main() -> None:
    """Print a table for each number of clients, or write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,4,16", help="at once, with commas; of a record: sequences of a step")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--record", type=Path, help="write the seconds of steps here instead")
    given = parser.parse_args()
    clients = [int(each) for each in given.clients.split(",")]
    if given.record:
        record(given.record, clients)
        return
    models = load_models("", "")
    asked = questions(BUNDLED_FOLDER, "pydoc", 60, CONTEXT - given.max_tokens - 32)
    print(f"{processor()}; tokens/s of answers, by the processes beside it")
    with ExitStack() as stack:
        engines = {
            way: stack.enter_context(measured_engine(models, way, num_slots=max(clients), max_model_len=CONTEXT))
            for way in (*WAYS, "auto")
        }
        for number in clients:
            print(f"\n| {number} clients |", " | ".join(map(str, PHASES)), "|\n" + "|---" * (1 + len(PHASES)) + "|")
            for way, engine in engines.items():
                rates = play(engine, itertools.cycle(asked), number, given.max_tokens)
                print("|", " | ".join([f"`{way}`", *(f"{rate:.0f}" for rate in rates)]), "|", flush=True)


if __name__ == "__main__":
    main()
