"""The server's own choice while other processes come and go: tokens/s of plain decoding, a fixed chain and `auto`, in
each phase of a load, in which they take turns. `auto` should be within 3% of the better of the two.

Run from the checkout: `python benchmarks/changing_load.py --clients 1,4,16`. A phase has so many processes that take a
core each; the first seconds of a turn are left out, in which the server may find out. With `--record FILE` the seconds
of single steps under the same load are written instead, by which a test plays that load to the controller alone.
"""

import argparse
import itertools
import json
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from environments import load
from over_http import CONTEXT, MARGIN, processor, questions
from served_flags import add_served, numbers, positive, run

from specserve.drafters.speculation import parse_speculation
from specserve.serve.engine.engine import Engine
from specserve.serve.engines import measured_engine
from specserve.serve.launch import load_models
from specserve.serve.requests.request import Delta, SamplingParams
from specserve.speculative.program import StepProgram

PHASES = (0, 1, 2, 0, 2, 1, 0)  # processes
SECONDS, SETTLING = 10.0, 5.0  # of a phase, and those that are left out
WAYS = ("off", "chain:3")
# of a record: seconds of a phase, the ways of calls that follow each other, and how many are kept of each kind
RECORDED, TURNS, MOST = 5.0, "0000000010000000011111111101111111", 40


def record(given: argparse.Namespace, target: Path) -> None:
    """Write the seconds of steps as the controller sees them in each phase of the load, where the ways take turns: for
    each number of clients, phase and way, the calls behind one of the same way, and those behind one of the other, as
    the seconds of a step and the number of steps."""
    found: dict[str, Any] = {"processor": processor(), "processes": PHASES, "seconds": SECONDS, "ways": WAYS}
    asked = itertools.cycle(questions(target, given.bench, 60, CONTEXT - given.max_tokens - MARGIN))
    models, most = load_models(given.target, given.draft), max(given.clients)
    with measured_engine(models, "auto", num_slots=most, max_model_len=CONTEXT) as engine:
        seen = _take_turns(engine)
        for number in given.clients:
            phases = [play(engine, asked, number, given.max_tokens, each, RECORDED, settling=1.0) for each in PHASES]
            found[str(number)] = [_calls(seen, number, begin, end) for _, begin, end in phases]
    given.record.write_text(json.dumps(found, separators=(",", ":")) + "\n")


def _take_turns(engine: Engine) -> list[Any]:
    """Have the ways of an engine take TURNS, and return the list of what it observes, to which it adds."""
    choice: Any = engine.rounds.choice
    choose, observe, seen = choice.choose, choice.observe_seconds, []
    chain = parse_speculation(WAYS[1])
    tree = next(each for each in engine.runner.shapes.trees if each and chain and each.num_nodes == chain.num_nodes)
    turns = itertools.cycle(map(int, TURNS))

    def chosen(decode: Any, *rest: Any) -> Any:
        choice.step_only((None, tree)[next(turns)])
        return choose(decode, *rest)

    def observed(program: StepProgram, seconds: float, num_steps: int, *, is_switch: bool, is_exact: bool) -> None:
        if is_exact:
            seen.append((time.perf_counter(), program, float(f"{seconds:.3g}"), num_steps, is_switch))
        observe(program, seconds, num_steps, is_switch=is_switch, is_exact=is_exact)

    choice.choose, choice.observe_seconds = chosen, observed
    return seen


def _calls(seen: list[Any], clients: int, begin: float, end: float) -> list[list[list[tuple[float, int]]]]:
    """Return what was seen between two times of batches as large as the clients are many."""
    of_phase = [each for each in seen if begin < each[0] < end and each[1].batch == clients]
    return [
        [
            [(each[2], each[3]) for each in of_phase if (each[1].tree is not None, each[4]) == (way, behind)][:MOST]
            for behind in (False, True)
        ]
        for way in (False, True)
    ]


def play(
    engine: Engine,
    prompts: Iterator[list[int]],
    clients: int,
    max_tokens: int,
    processes: int,
    seconds: float,
    settling: float,
) -> tuple[float, float, float]:
    """Have clients ask all the time, beside so many processes. Returns the answers' tokens/s once it has settled, and
    when that part began and ended. It leaves the engine at rest."""
    free, counts = queue.SimpleQueue[bool](), [0]  # whether to go on, for each client without a question
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)

    def on_delta(delta: Delta) -> None:
        counts[0] += len(delta.token_ids)
        if delta.finish_reason is not None:
            free.put(True)

    def ask() -> None:
        while free.get():
            engine.submit(next(prompts), params, on_delta)

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(clients):
        free.put(True)
    with load(processes):
        time.sleep(settling)
        before, begin = counts[0], time.perf_counter()
        time.sleep(seconds - settling)
        end, number = time.perf_counter(), counts[0] - before
    free.put(False)
    thread.join()
    while engine.stats().num_running or engine.stats().num_waiting:
        time.sleep(0.05)
    return number / (end - begin), begin, end


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--clients", type=numbers, default="1,4,16", help="at once, with commas; of a record: sequences of a step"
    )
    parser.add_argument("--max-tokens", type=positive, default=128)
    add_served(parser)
    parser.add_argument("--record", type=Path, help="write the seconds of steps here instead")
    return run(parser, measure)


def measure(given: argparse.Namespace, target: Path) -> None:
    """Print a table for each number of clients, or write the record."""
    if given.record:
        record(given, target)
        return
    clients = given.clients
    models = load_models(given.target, given.draft)
    asked = questions(target, given.bench, 60, CONTEXT - given.max_tokens - MARGIN)
    print(f"{processor()}; {models.name}; tokens/s of answers, by the processes beside it")
    with ExitStack() as stack:
        engines = {
            way: stack.enter_context(measured_engine(models, way, num_slots=max(clients), max_model_len=CONTEXT))
            for way in (*WAYS, "auto")
        }
        for number in clients:
            prompts = {way: itertools.cycle(asked) for way in engines}
            rates: dict[str, list[float]] = {way: [] for way in engines}
            for turn, beside in enumerate(PHASES):
                first = turn % len(engines)
                for way in [*engines][first:] + [*engines][:first]:
                    played = play(engines[way], prompts[way], number, given.max_tokens, beside, SECONDS, SETTLING)
                    rates[way].append(played[0])
            print(f"\n| {number} clients |", " | ".join(map(str, PHASES)), "|\n" + "|---" * (1 + len(PHASES)) + "|")
            for way, of_phases in rates.items():
                print("|", " | ".join([f"`{way}`", *(f"{rate:.0f}" for rate in of_phases)]), "|", flush=True)
            better = [max(pair) for pair in zip(*(rates[way] for way in WAYS), strict=True)]
            shares = [own / best for own, best in zip(rates["auto"], better, strict=True)]
            print("| to the better |", " | ".join(f"{share:.2f}" for share in shares), "|", flush=True)


if __name__ == "__main__":
    sys.exit(main())
