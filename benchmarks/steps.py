"""What the steps of the bundled target and its head cost: in service shapes, and in making their programs.

Run from the checkout: `python benchmarks/steps.py`. The steps take turns, so that a noisy moment does not fall on one
of them. To compare two commits, run it in a checkout of each, in turns.
"""

import argparse
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

from specserve.drafters.speculation import describe, parse_speculation
from specserve.serve.launch import load_models
from specserve.serve.programs.program_list import list_programs
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import make_shapes
from specserve.speculative.program import StepProgram

PAGE_SIZE = 16


@dataclass
class StepCost:
    """One step: its program, and the seconds of its runs."""

    program: StepProgram
    lowering: float  # seconds of the processor, all threads
    compiling: float
    num_fusions: int  # operations of the compiled program, those inside of fusions left out
    num_calls: int
    seconds: list[float]


def measure_steps(
    ways: Sequence[str], *, num_slots: int = 8, max_model_len: int = 1024, num_rounds: int = 60
) -> Iterator[StepCost]:
    """Compile a step of each way to speculate, for one sequence and for all slots at the longest contexts, and time
    them over sequences of padding."""
    models = load_models("", "")
    shapes = make_shapes(
        [parse_speculation(way) for way in ways],
        models.target.config,
        num_slots=num_slots,
        max_model_len=max_model_len,
        page_size=PAGE_SIZE,
        num_pages=num_slots * max_model_len // PAGE_SIZE,
    )
    runner = Runner(models.target, models.head, shapes, has_constrained=False)
    steps = [program for program in list_programs(runner) if program.kind == "step"]
    costs = [_compile(runner, program) for program in steps if program.width == shapes.widths[-1]]
    for cost in costs:
        runner.compile(cost.program)
        runner.run(cost.program)
    for _ in range(num_rounds):
        for cost in costs:
            jax.block_until_ready(runner.state)
            begin = time.perf_counter()
            runner.run(cost.program)
            jax.block_until_ready(runner.state)
            cost.seconds.append(time.perf_counter() - begin)
    yield from costs


def _compile(runner: Runner, program: StepProgram) -> StepCost:
    start = time.process_time()
    lowered = runner.call(program).lower()
    middle = time.process_time()
    text = lowered.compile().as_text() or ""
    end = time.process_time()
    entry = text[text.index("\nENTRY ") :]
    operations = re.findall(r" = (?:\(.*?\)|\S+) (fusion|custom-call)\(", entry)
    counts = operations.count("fusion"), operations.count("custom-call")
    return StepCost(program, middle - start, end - middle, *counts, [])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculation", default="off,chain:3,tree:3x3x8", help="ways to make a step, with commas")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    print("| step | sequences | ms, median | ms, least | lowering, s | compiling, s | fusions | calls |")
    print("|---|---|---|---|---|---|---|---|")
    ways = given.speculation.split(",")
    for cost in measure_steps(ways, num_slots=given.slots, max_model_len=given.max_model_len, num_rounds=given.rounds):
        size, tree = cost.program.batch, cost.program.tree
        times = f"{1e3 * statistics.median(cost.seconds):.2f} | {1e3 * min(cost.seconds):.2f}"
        made = f"{cost.lowering:.2f} | {cost.compiling:.2f} | {cost.num_fusions} | {cost.num_calls}"
        print(f"| `{describe(tree)}` | {size} | {times} | {made} |")


if __name__ == "__main__":
    main()
