"""`specserve bench latency` and `bench throughput`: one engine in this process, under the result keys of vLLM's
commands of these names; and what its steps cost, in parts and as shares of what the machine can do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specserve.drafters.speculation import describe
from specserve.errors import DataError
from specserve.eval.bench.comparison import ArmResult, EngineArm
from specserve.eval.bench.roofline import Roofline, measure_peaks, step_work
from specserve.eval.bench.step_times import steps_timed, time_step
from specserve.eval.prompts import RANDOM, load_prompts, random_length, random_prompts
from specserve.eval.settings import LatencyRun, ThroughputRun
from specserve.mesh import num_parts
from specserve.serve.engine.engine import Engine
from specserve.serve.engines import measured_engine
from specserve.serve.launch import Models, with_cache_dtype
from specserve.serve.programs.shapes import check_shared_out
from specserve.serve.requests.request import SamplingParams
from specserve.serve.settings import ServeRun

PERCENTILES = (10, 25, 50, 75, 90, 99)
MOST_WAYS = 4  # of stepping that are timed, those that the run took most often
REPEATS = 7
OnProgress = Callable[[str, int, int], None]  # the work's name, how much of it is done, of how much


@dataclass(frozen=True)
class Measured:
    """The results of a benchmark, and the rooflines of its steps."""

    result: dict[str, Any]  # under vLLM's keys, and ours
    rooflines: tuple[Roofline, ...]


def latency(models: Models, run: LatencyRun, on_progress: OnProgress = lambda _what, _done, _total: None) -> Measured:
    """Answer the same batch again and again, each time with nothing cached, and measure how long it takes. Raises
    ConfigError or DataError."""
    prompts = latency_prompts(models, run)
    params = [_params(run, i, ignore_eos=True) for i in range(run.batch_size)]
    longest = run.input_len + run.output_len + steps_timed(REPEATS) + 32  # room for the steps that are timed
    found = ArmResult()
    with _engine(models, run, run.batch_size, longest, on_progress) as engine:
        arm = EngineArm(engine)
        for number in range(run.num_iters_warmup):
            on_progress("warming up", number, run.num_iters_warmup)
            arm.forget()
            arm.ask(prompts, params, run.batch_size)
        for number in range(run.num_iters):
            on_progress("answering", number, run.num_iters)
            arm.forget()
            found.add_round(arm, prompts, params, run.batch_size)
        _trace(arm, prompts, params, run.profile)
    result = {
        "avg_latency": float(np.mean(found.seconds)),
        "latencies": found.seconds,
        "percentiles": {str(p): float(np.percentile(found.seconds, p)) for p in PERCENTILES},
    }
    context = run.input_len + run.output_len // 2
    return _with_steps(models, engine, result, found, run.batch_size, context, on_progress)


def throughput(
    models: Models, run: ThroughputRun, on_progress: OnProgress = lambda _what, _done, _total: None
) -> Measured:
    """Answer all prompts as fast as the engine can. Raises ConfigError or DataError."""
    check_shared_out("--max-slots", run.max_slots, num_parts(models.mesh, "batch"))
    prompts = throughput_prompts(models, run)
    params = [_params(run, i, ignore_eos=False) for i in range(len(prompts))]
    slots = min(run.max_slots, len(prompts))
    found = ArmResult()
    with _engine(models, run, slots, run.max_model_len, on_progress) as engine:
        arm = EngineArm(engine)
        arm.ask(prompts[:1], params[:1], 1)  # first touches of memory
        arm.forget()
        shown = EngineArm(engine, lambda done: on_progress("answering", done, len(prompts)))
        found.add_round(shown, prompts, params, len(prompts))
        _trace(arm, prompts[:slots], params[:slots], run.profile)
    [seconds] = found.seconds
    num_tokens = found.num_tokens + sum(map(len, prompts))
    result = {
        "elapsed_time": seconds,
        "num_requests": len(prompts),
        "total_num_tokens": num_tokens,
        "requests_per_second": len(prompts) / seconds,
        "tokens_per_second": num_tokens / seconds,
        "output_tokens_per_second": found.num_tokens / seconds,
    }
    middle = sorted(map(len, prompts))[len(prompts) // 2] + run.output_len // 2
    context = max(1, min(middle, run.max_model_len - steps_timed(REPEATS) - 32))
    return _with_steps(models, engine, result, found, slots, context, on_progress)


def _params(run: LatencyRun | ThroughputRun, i: int, *, ignore_eos: bool) -> SamplingParams:
    return SamplingParams(
        max_tokens=run.output_len, temperature=run.temperature, seed=run.seed + i, ignore_eos=ignore_eos
    )


def latency_prompts(models: Models, run: LatencyRun) -> list[list[int]]:
    """Make `batch_size` prompts of one length, which are the last tokens of longer ones. Raises DataError."""
    missing = f"no prompt has {run.input_len} tokens; lower --input-len, or ask --bench {RANDOM}"
    prompts = _prompts(models, run, run.batch_size, run.input_len, lambda length: length >= run.input_len, missing)
    return [prompt[-run.input_len :] for prompt in prompts]


def with_length(run: ThroughputRun) -> ThroughputRun:
    """Return the settings with the length that random prompts have. Raises ConfigError, see `random_length`."""
    return replace(run, input_len=random_length(run.bench, run.input_len, run.max_model_len - run.output_len))


def throughput_prompts(models: Models, run: ThroughputRun) -> list[list[int]]:
    """Make the benchmark's prompts, which all leave room for their answers. Raises ConfigError or DataError."""
    room, length = run.max_model_len - run.output_len, with_length(run).input_len
    missing = f"no prompt leaves room for {run.output_len} tokens; raise --max-model-len, which is {run.max_model_len}"
    return _prompts(models, run, run.num_prompts, length, lambda length: length <= room, missing)


def _prompts(
    models: Models,
    run: LatencyRun | ThroughputRun,
    number: int,
    length: int,  # of random ones
    fits: Callable[[int], bool],  # whether a prompt of so many tokens can be asked
    missing: str,  # the error where none fits
) -> list[list[int]]:
    """Make so many prompts, again and again the same ones where a bench has fewer."""
    if run.bench == RANDOM:
        return random_prompts(range(1, models.target.config.vocab_size), number, length, run.seed)
    assert models.tokenizer is not None
    prompts = load_prompts(run.bench, number, models.tokenizer.render_chat, fits)
    if not prompts:
        raise DataError(f"--bench {run.bench}: {missing}")
    return [prompts[i % len(prompts)] for i in range(number)]


def _engine(
    models: Models, run: LatencyRun | ThroughputRun, num_slots: int, max_model_len: int, on_progress: OnProgress
) -> Engine:
    return measured_engine(
        with_cache_dtype(models, ServeRun(kv_cache_dtype=run.kv_cache_dtype)),
        run.speculation,
        num_slots=num_slots,
        max_model_len=max_model_len,
        on_warmup=lambda done, total, name: on_progress(f"compiling {name}", done, total),
    )


def _trace(arm: EngineArm, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], folder: str) -> None:
    """Answer these prompts once more under JAX's profiler, where a folder for its trace is given."""
    if folder:
        arm.forget()
        with jax.profiler.trace(str(Path(folder).expanduser())):
            arm.ask(prompts, params, len(prompts))


def _with_steps(
    models: Models,
    engine: Engine,
    result: dict[str, Any],
    found: ArmResult,
    batch_size: int,
    context: int,
    on_progress: OnProgress,
) -> Measured:
    """Add the counts of speculation and the costs of the steps to the result. The engine has stopped."""
    num_steps = max(1, found.steps.total())
    runner, rooflines, timed = engine.runner, [], found.steps.most_common(MOST_WAYS)
    ways = {describe(tree): tree for tree in runner.shapes.trees}
    drafter = models.head.drafter if models.head else None
    config = runner.config.target  # with the dtype of the cache
    on_progress("measuring the machine's peaks", 0, 1)
    peaks = measure_peaks(config.dtype, 1 if models.mesh is None else models.mesh.size)
    for number, (name, _) in enumerate(timed):
        on_progress(f"timing steps of {name}", number, len(timed))
        tree = ways[name]
        step, draft = time_step(runner, tree, context=context, batch=batch_size, repeats=REPEATS)
        weights = runner.inputs.layout_for(batch_size, tree)
        work = step_work(config, weights, drafter, tree, batch=batch_size, context=context)
        rooflines.append(Roofline(name, batch_size, context, work, step, draft, peaks))
    result |= {
        "output_throughput": found.num_tokens / sum(found.seconds),
        "tau": found.acceptance.tau,
        "accept_rate": found.acceptance.accept_rate,
        "steps_by_speculation": dict(found.steps),
        "step_ms": 1e3 * found.busy_seconds / num_steps,
        "host_ms": 1e3 * found.host_seconds / num_steps,
        "steps": [roofline.to_json() for roofline in rooflines],
        "peak_bytes_per_second": peaks.bytes_per_second,
        "peak_flops_per_second": peaks.flops_per_second,
    }
    return Measured(result, tuple(rooflines))
