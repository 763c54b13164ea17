"""The bytes and operations that a step must do, and how near it comes to what the machine can do.

The bytes are the target's matrices once (of a mixture, those of the experts that so many tokens are expected to
choose), the committed keys and values of every sequence, and the head's matrices, keys and values once for each of its
passes. The operations are two for each parameter of a matrix and each node that runs through it, and attention's. Both
are what any implementation must do; what this one does besides counts as time lost.

The peaks are measured in this process, beside the steps: the fastest of several kernels that do nothing but read, or
multiply. The steps themselves count among those kernels, so that a share (MBU, MFU) is at most 1.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specserve.drafters.interface import TrainedDrafter
from specserve.eval.bench.step_times import bytes_read, read_bandwidth
from specserve.kernels.grouped import expected_experts
from specserve.models.config import ModelConfig
from specserve.models.params import is_matrix, num_params, specs
from specserve.models.target import target_spec
from specserve.serve.programs.placement import bytes_per_token
from specserve.speculative.drafter import Weights
from specserve.speculative.tree import Tree
from specserve.train.flops import target_flops
from specserve.train.speed import matmul_peak

READ_SIDE, PRODUCT_SIDES = 8192, (512, 1024, 2048)  # of square matrices
SECONDS = 0.3  # spent on each of them


@dataclass(frozen=True)
class Peaks:
    """The speeds that the devices of a run reach together."""

    bytes_per_second: float
    flops_per_second: float

    def at_least(self, bytes_per_second: float, flops_per_second: float) -> "Peaks":
        """Return the peaks after another kernel was seen to reach these speeds."""
        return Peaks(max(self.bytes_per_second, bytes_per_second), max(self.flops_per_second, flops_per_second))


@dataclass(frozen=True)
class StepWork:
    """The bytes and operations that a step must do."""

    num_bytes: float
    num_flops: float


@dataclass(frozen=True)
class Roofline:
    """The place of a step under the roof: its work, its time and the shares of the peaks that it reaches."""

    speculation: str
    batch_size: int
    context: int  # committed tokens of each sequence
    work: StepWork
    seconds: float
    draft_seconds: float
    peaks: Peaks

    @property
    def mbu(self) -> float:
        """The share of the memory bandwidth, 0 to 1."""
        rate = self.work.num_bytes / self.seconds
        return rate / self.peaks.at_least(rate, 0).bytes_per_second

    @property
    def mfu(self) -> float:
        """The share of the multiplication rate, 0 to 1."""
        rate = self.work.num_flops / self.seconds
        return rate / self.peaks.at_least(0, rate).flops_per_second

    def to_json(self) -> dict[str, Any]:
        return {
            "speculation": self.speculation,
            "batch_size": self.batch_size,
            "context": self.context,
            "step_ms": 1e3 * self.seconds,
            "draft_ms": 1e3 * self.draft_seconds,
            "verify_ms": 1e3 * (self.seconds - self.draft_seconds),
            "bytes": self.work.num_bytes,
            "flops": self.work.num_flops,
            "mbu": self.mbu,
            "mfu": self.mfu,
        }


def step_work(
    config: ModelConfig,
    weights: Weights,
    drafter: TrainedDrafter | None,
    tree: Tree | None,
    *,
    batch: int,
    context: int,
) -> StepWork:
    """Count the bytes and operations of a step of `batch` sequences with `context` committed tokens each. `weights` are
    those that the step takes, which may be narrower than its arithmetic. `drafter` is the head's, and is needed for
    trees that a head proposes."""
    platform = jax.default_backend()
    rows = batch * (1 + (tree.num_nodes if tree else 0))
    of_target = bytes_read(weights.target)
    if config.experts:
        spec = target_spec(config)
        of_experts = sum(num_params(each) for each in specs(spec) if each.axes and each.axes[0] == "experts")
        read = expected_experts(config.experts.num_experts, config.experts.top_k, rows) / config.experts.num_experts
        of_target -= of_target * of_experts / num_params(spec) * (1 - read)
    num_bytes = of_target + batch * context * bytes_per_token(config, None)
    # a mean over a row of twice the context sees what a token after the context sees
    layers = target_flops(config, 2 * context, rows, platform).useful
    num_flops = rows * (layers + 2 * config.d_model * config.vocab_size)
    if tree is not None and tree.uses_head:
        assert drafter is not None, "a tree that asks a head has one"
        assert weights.draft is not None, "and its weights"
        size = num_params([spec for spec in specs(drafter.spec()) if is_matrix(spec)])
        each = sum(leaf.nbytes for leaf in jax.tree.leaves(weights.draft.params)) / num_params(drafter.spec())
        entries = bytes_per_token(config, drafter) - bytes_per_token(config, None)
        num_bytes += tree.depth * (size * each + batch * context * entries)
        num_flops += 2 * size * batch * (1 + (tree.depth - 1) * tree.top_k)
    return StepWork(num_bytes, num_flops)


def measure_peaks(dtype: str, num_devices: int = 1) -> Peaks:
    """Measure what the first device can do, times the number of devices; those of a CPU are one. The best of several
    kernels, each of which is run for a moment."""
    matrix, row = jnp.ones((READ_SIDE, READ_SIDE), dtype), jnp.ones((1, READ_SIDE), dtype)
    product = jax.jit(jnp.dot)
    seconds = _best(lambda: product(row, matrix))
    rates = [matmul_peak(dtype)]
    for side in PRODUCT_SIDES:
        factor = matrix[:side, :side]
        rates.append(2 * side**3 / _best(lambda factor=factor: product(factor, factor)))
    factor = 1 if jax.default_backend() == "cpu" else num_devices
    return Peaks(factor * max(matrix.nbytes / seconds, read_bandwidth()), factor * max(rates))


def _best(run: Callable[[], jax.Array]) -> float:
    jax.block_until_ready(run())  # compiles
    best, begin = float("inf"), time.perf_counter()
    while (start := time.perf_counter()) - begin < SECONDS:
        jax.block_until_ready(run())
        best = min(best, time.perf_counter() - start)
    return best
