"""What the steps of a target and its head cost: in service shapes, and in making their programs.

Run from the checkout: `python benchmarks/steps.py`. The steps take turns, so that a noisy moment does not fall on one
of them; then each is run again and again, as a server runs it. To compare two commits, run it in a checkout of each, in
turns. With `--target` a preset's shapes are run, with random weights and a random EAGLE-3 head, so that nothing is
downloaded: a step's time does not depend on their values; or the model of a folder. With `--mesh` they are spread over
several devices.

With `--account ROWS` plain steps of so many sequences are accounted for in place of that: each operation of their
program, by XLA's own profiler, beside the bytes of the weights that it reads. `--account 1 --target FOLDER
--quantization int4`, for example.
"""

import argparse
import dataclasses
import math
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from served_flags import device

from specserve.checkpoints.load import QUANTIZATIONS, Quantization, Target, in_few_bits
from specserve.checkpoints.source import BUNDLED
from specserve.devices import REFERENCE, find_device
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.drafters.registry import DraftSettings, load_kind
from specserve.drafters.speculation import describe, parse_speculation
from specserve.errors import ConfigError
from specserve.eval.bench.step_times import bytes_read, fill, read_bandwidth
from specserve.eval.bench.synthetic import draw_target
from specserve.kernels.pages import default_page_size
from specserve.mesh import SERVING_AXES, default_dtype, parse_mesh
from specserve.models.config import ModelConfig
from specserve.models.params import init_params
from specserve.models.presets import PRESETS
from specserve.plan.ahead import Counted, here
from specserve.plan.ahead import describe as describe_device
from specserve.plan.compiled import SLICES
from specserve.serve.launch import Models, load_models
from specserve.serve.programs.program_list import list_programs
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import DEEP_AT_ONCE, make_batch_sizes, make_shapes
from specserve.speculative.program import StepProgram

DRAFT_VOCAB = 32_000
BITS = {"u8": 8, "s8": 8, "f16": 16, "bf16": 16}  # of XLA's types, where not 32


@dataclass
class StepCost:
    """One step: its program, and the seconds of its runs."""

    program: StepProgram
    making: float  # seconds of the processor, all threads
    num_fusions: int  # operations of the compiled program, those inside of fusions left out
    num_calls: int
    seconds: list[float]
    queued: float = 0.0  # seconds of a run where the host starts the next one meanwhile, as a server does


def measure_steps(
    ways: Sequence[str],
    *,
    target: str = BUNDLED,
    num_layers: int = 0,
    quantization: Quantization = "none",
    mesh: str = "",
    num_slots: int = 8,
    max_model_len: int = 1024,
    page_size: int = 0,
    num_rounds: int = 60,
    least_batch: int = 0,
    burst: int = 0,
    has_prompts: bool = False,
    prompt_tokens: int = -1,
) -> Iterator[StepCost]:
    """Compile a step of each way to speculate, for each number of sequences at the longest contexts, and time them over
    sequences of padding. Of a preset the first layers are run; 0: all. `page_size`, `least_batch` and `burst` change
    the tokens of a page, the smallest batch and the steps that a call may make; 0: as a server has them. With
    `has_prompts` prefills are timed in place of steps, and, where a server has programs of both in one, those with the
    most sequences; `prompt_tokens` are those of prompts side by side in one program, -1: as a server has them."""
    devices, page_size = parse_mesh(mesh, SERVING_AXES), page_size or default_page_size(jax.default_backend())
    models = _models(target, num_layers, devices, quantization)
    shapes = make_shapes(
        [parse_speculation(way) for way in ways],
        models.target.config,
        devices,
        num_slots=num_slots,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=num_slots * -(-max_model_len // page_size),
    )
    if least_batch:
        shapes = dataclasses.replace(shapes, batch_sizes=make_batch_sizes(num_slots, shapes.num_ranks, least_batch))
    if burst:
        shapes = dataclasses.replace(shapes, most_steps=burst)
    if prompt_tokens >= 0:
        shapes = dataclasses.replace(shapes, prompt_tokens=prompt_tokens)
    runner = Runner(models.target, models.head, shapes, has_constrained=False, mesh=devices)
    kinds = ("prefill", "mixed") if has_prompts else ("step",)
    timed = [program for program in list_programs(runner) if program.kind in kinds and not program.is_scored]
    timed = [each for each in timed if each.width == shapes.widths[-1]]
    timed = [each for each in timed if each.kind != "mixed" or each.batch == shapes.batch_sizes[-1]]
    costs = [_compile(runner, program) for program in timed]
    _time(runner, costs, num_rounds)
    yield from costs


def _models(target: str, num_layers: int, mesh: Mesh | None, quantization: Quantization) -> Models:
    if target != BUNDLED and not Path(target).is_dir():
        return random_models(target, num_layers, mesh, quantization)
    name = "" if target == BUNDLED else target
    return load_models(name, "", quantization=quantization, draft_quantization=quantization, mesh=mesh)


@dataclass(frozen=True)
class Operation:
    """What one kind of operation takes of a step."""

    name: str
    calls: float
    seconds: float  # the profiler's own time for each call among them
    num_bytes: int  # of the weights that it multiplies by


@dataclass(frozen=True)
class Account:
    """A plain step by its operations."""

    operations: list[Operation]
    seconds: float  # of a step, without the profiler
    traced: float  # with it
    num_bytes: int  # of all weights
    bandwidth: float  # bytes that memory gives in a second, the median of measurements in between


def account(
    *, target: str, num_layers: int, quantization: Quantization, rows: int, context: int = 256, num_rounds: int = 20
) -> Account:
    """Account for plain steps of `rows` sequences, of `context` tokens each at first, at most DEEP_AT_ONCE to a
    call, as a server makes them."""
    models, page_size = _models(target, num_layers, None, quantization), default_page_size(jax.default_backend())
    room = context + num_rounds + 2 * DEEP_AT_ONCE
    sizes: Any = {"num_slots": rows, "max_model_len": room, "page_size": page_size}
    shapes = make_shapes([None], models.target.config, None, num_pages=rows * -(-room // page_size), **sizes)
    runner = Runner(models.target, models.head, shapes, has_constrained=False)
    slots, at_once = runner.shapes.batches.spread(rows), min(runner.shapes.most_steps, DEEP_AT_ONCE)
    number = -(-num_rounds // at_once)

    def step() -> float:
        begin, handle = time.perf_counter(), runner.step(slots, None, num_steps=at_once)
        for _ in range(number - 1):
            following = runner.step(slots, None, num_steps=at_once)
            handle.read_each()
            handle = following
        handle.read_each()
        return (time.perf_counter() - begin) / (number * at_once)

    def afresh() -> None:
        fill(runner, context, room - 1, rows)
        runner.step(slots, None, num_steps=at_once).read_each()

    times, bandwidths = [], []
    for _ in range(5):
        afresh()
        times.append(step())
        bandwidths.append(read_bandwidth())
    program = StepProgram(len(runner.shapes.batches.pad(slots)), runner.bounds.width_of(slots), None)
    text = runner.compiled.compile(runner.call(program)).as_text() or ""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    afresh()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            traced = step()
        (file,) = Path(folder).rglob("*.xplane.pb")
        found = _operations(text, jax.profiler.ProfileData.from_file(str(file)), number * at_once)
    num_bytes = bytes_read(runner.inputs.layout_for(len(slots), None).target)
    return Account(found, statistics.median(times), traced, num_bytes, statistics.median(bandwidths))


def _operations(text: str, profile: Any, num_steps: int) -> list[Operation]:
    """The operations of a compiled program's text that a profile has times of, those first that take longest."""
    named = {
        name: _describe(*rest) for name, *rest in re.findall(r"^ +(?:ROOT )?%(\S+) = (.*?) ([\w-]+)\((.*)", text, re.M)
    }
    calls, nanoseconds = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for event in (event for plane in profile.planes for line in plane.lines for event in line.events):
        if kind := named.get(event.name):
            calls[kind] += 1
            nanoseconds[kind] += event.duration_ns
    return [
        Operation(
            kind[0], calls[kind] / num_steps, duration / 1e9 / num_steps, round(calls[kind] / num_steps * kind[1])
        )
        for kind, duration in nanoseconds.most_common()
    ]


def _describe(shape: str, opcode: str, rest: str) -> tuple[str, int] | None:
    """Return what an operation is called in an account, and the bytes of weights of a call; None if it holds others."""
    if opcode in ("while", "conditional", "call"):
        return None
    target = re.search(r'custom_call_target="(?:specserve_)?(\w+)"', rest)
    if target is None:
        return "XLA's own operations", 0
    if target[1] != "matmul":
        return target[1], 0
    operands = re.findall(r"(\w+)\[([\d,]*)\]", rest.partition("operand_layout_constraints={")[2].partition("}}")[0])
    (x, *_), weights = operands[0][1].split(",")[::-1], operands[2:5]
    sizes = [math.prod(map(int, dims.split(","))) * BITS.get(kind, 32) // 8 for kind, dims in weights if dims != "0"]
    outputs = re.findall(r",(\d+)", shape)[0]
    return f"matmul, {x} x {outputs}", sum(sizes)


def preset_pair(name: str, num_layers: int, dtype: str) -> tuple[ModelConfig, TrainedDrafter]:
    """Return a preset's target, cut to its first layers (0: whole), and the EAGLE-3 head of the whole."""
    whole = PRESETS[name].config()
    layers = num_layers or whole.num_layers
    config = dataclasses.replace(whole, num_layers=layers, layers=whole.layers[:layers], dtype=dtype)
    drafter = load_kind("eagle3").new(DraftSettings(), whole, DRAFT_VOCAB).with_dtype(dtype)
    taps = tuple(min(layer, layers - 1 - i) for i, layer in enumerate(reversed(drafter.aux_layers)))[::-1]
    make: Any = type(drafter)
    return config, make(dataclasses.replace(drafter.config, aux_layers=taps))


def count_steps(way: str, *, target: str = "qwen3-8b", num_layers: int = 4) -> Iterator[tuple[str, Counted]]:
    """Compile a step for the accelerator that is here, and for one of its kind that is not (an H100 in place of any
    GPU), and yield for each its name and the figures of its program."""
    config, drafter = preset_pair(target, num_layers, "bfloat16")
    for name, described in (("here", here()), ("without a device", describe_device(_alike(), 1))):
        page_size = default_page_size(described.platform)
        sizes: Any = {"num_slots": 8, "max_model_len": 4096, "page_size": page_size, "num_pages": 32768 // page_size}
        with described.made_for():
            shapes = make_shapes([parse_speculation(way)], config, **sizes)
        runner = described.runner(config, drafter, shapes)
        yield name, described.compile(runner, StepProgram(8, shapes.max_pages, parse_speculation(way)))


def _alike() -> str:
    """Return the name of devices like the one here, as `plan.ahead` knows those that are not here. Raises ConfigError
    where it knows none."""
    kind = jax.devices()[0].device_kind
    device = REFERENCE if jax.default_backend() == "gpu" else find_device(kind)
    if device is None or device.id not in SLICES:
        raise ConfigError(f"{kind}: no such device is known that need not be here; known are {', '.join(SLICES)}")
    return next(iter(SLICES[device.id].values()))


def random_models(
    name: str, num_layers: int = 0, mesh: Mesh | None = None, quantization: Quantization = "none"
) -> Models:
    """Make a preset's target of random weights, cut to its first layers or whole, and a random head for the whole."""
    target, head = random_pair(name, num_layers, default_dtype(), mesh, quantization=quantization)
    return Models(name, target, head, None, mesh=mesh)


def random_pair(
    name: str,
    num_layers: int,
    dtype: str,
    mesh: Mesh | None = None,
    *,
    quantization: Quantization = "none",
    is_looped: bool = False,
) -> tuple[Target, Head]:
    """Draw both at random, each parameter where the mesh has it; the head's in a dtype of its own. Where it `is_looped`
    the target is as it is trained beside. Raises ConfigError where the device has no room for it."""
    config, drafter = preset_pair(name, num_layers, dtype)
    target = draw_target(name, config, quantization=quantization, mesh=mesh, is_looped=is_looped)
    spec = drafter.spec()
    params = init_params(spec, jax.random.key(0), dtype)
    if mesh is not None:
        params = jax.device_put(params, drafter.place(mesh))
    if quantization not in ("none", "stored"):
        params = in_few_bits(params, quantization)
    return target, Head(drafter, params, np.arange(DRAFT_VOCAB, dtype=np.int32))


def _compile(runner: Runner, program: StepProgram) -> StepCost:
    start = time.process_time()
    text = runner.compiled.compile(runner.call(program)).as_text() or ""
    making = time.process_time() - start
    # of the whole program: those of a step are in the body of a burst's loop, and none is inside of a fusion
    operations = re.findall(r" = (?:\(.*?\)|\S+) (fusion|custom-call)\(", text)
    counts = operations.count("fusion"), operations.count("custom-call")
    return StepCost(program, making, *counts, [])


def _time(runner: Runner, costs: Sequence[StepCost], num_rounds: int) -> None:
    for cost in costs:
        runner.run(cost.program)
    for _ in range(num_rounds):
        for cost in costs:
            jax.block_until_ready(runner.state)
            begin = time.perf_counter()
            runner.run(cost.program)
            jax.block_until_ready(runner.state)
            cost.seconds.append(time.perf_counter() - begin)
    for cost in costs:
        begin = time.perf_counter()
        for _ in range(num_rounds):
            runner.run(cost.program)
        jax.block_until_ready(runner.state)
        cost.queued = (time.perf_counter() - begin) / num_rounds


def _print_account(found: Account) -> None:
    bound = found.num_bytes / found.bandwidth
    print(f"a step {1e3 * found.seconds:.2f} ms ({1e3 * found.traced:.2f} profiled); ", end="")
    print(f"{found.num_bytes / 1e6:.1f} MB at {found.bandwidth / 1e9:.0f} GB/s: {1e3 * bound:.2f} ms, ", end="")
    print(f"{bound / found.seconds:.0%} of it\n\n| operation | calls | us | MB | GB/s |\n|---|---|---|---|---|")
    for each in found.operations:
        rate = f"{each.num_bytes / 1e6:.1f} | {each.num_bytes / each.seconds / 1e9:.0f}" if each.num_bytes else " | "
        print(f"| {each.name} | {each.calls:.0f} | {1e6 * each.seconds:.0f} | {rate} |")
    rest = found.traced - sum(each.seconds for each in found.operations)
    print(f"| between operations, and the host | | {1e6 * rest:.0f} | | |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=BUNDLED, help="the bundled one, a folder, or a preset with random weights")
    parser.add_argument("--layers", type=int, default=0, help="the first of a preset; 0: all")
    parser.add_argument("--speculation", default="off,chain:3,tree:3x3x8", help="ways to make a step, with commas")
    formats = [each for each in QUANTIZATIONS if each != "stored"]
    parser.add_argument("--quantization", choices=formats, default="none", help="of target and head")
    parser.add_argument("--mesh", default="", help="devices to spread it over, as of `specserve serve`; empty: one")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--page-size", type=int, default=0, help="tokens of a page; 0: as a server has them")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--least-batch", type=int, default=0, help="the smallest batch; 0: as a server has it")
    parser.add_argument("--burst", type=int, default=0, help="steps that one call may make; 0: as a server has it")
    parser.add_argument("--prompts", action="store_true", help="time prefills instead, and steps beside them")
    parser.add_argument("--account", type=int, default=0, help="sequences of a plain step to account for")
    parser.add_argument("--prompt-tokens", type=int, default=-1, help="of prompts in one program; -1: as a server")
    given = parser.parse_args()
    print(f"{device()}\n")
    if given.account:
        how = {"num_layers": given.layers, "quantization": given.quantization, "num_rounds": given.rounds}
        _print_account(account(target=given.target, rows=given.account, **how))
        return
    print("| step | sequences | ms, median | ms, least | ms, queued | making, s | fusions | calls |")
    print("|---" * 8 + "|")
    ways, sizes = given.speculation.split(","), {"num_slots": given.slots, "max_model_len": given.max_model_len}
    chosen = {"target": given.target, "num_layers": given.layers, "mesh": given.mesh, "num_rounds": given.rounds}
    changed = {"page_size": given.page_size, "least_batch": given.least_batch, "burst": given.burst}
    changed |= {"has_prompts": given.prompts, "prompt_tokens": given.prompt_tokens, "quantization": given.quantization}
    for cost in measure_steps(ways, **chosen, **sizes, **changed):
        program = cost.program
        way = f"prefill of {program.chunk}" if program.kind == "prefill" else describe(program.tree)
        if program.kind == "mixed":
            way += f" beside a prefill of {program.prompts} x {program.chunk}"
        times = " | ".join(
            f"{1e3 * each:.2f}" for each in (statistics.median(cost.seconds), min(cost.seconds), cost.queued)
        )
        made = f"{cost.making:.2f} | {cost.num_fusions} | {cost.num_calls}"
        print(f"| `{way}` | {program.batch} | {times} | {made} |", flush=True)


if __name__ == "__main__":
    main()
