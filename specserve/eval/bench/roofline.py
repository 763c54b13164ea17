"""The place of a step under the roof: its work (`plan.work`) over its time, as shares of measured peaks.

The work is what any implementation must do; what this one does besides counts as time lost. The compiled program's own
counts cannot take its place: XLA counts the body of a loop once, and nothing of a native kernel.

The peaks are measured in this process, beside the steps: the fastest of several kernels that do nothing but read, or
multiply. The steps themselves count among those kernels, so that a share (MBU, MFU) is at most 1.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from specserve.drafters.interface import TrainedDrafter
from specserve.eval.bench.step_times import bytes_read, read_bandwidth
from specserve.models.config import ModelConfig
from specserve.models.sharding import total_bytes
from specserve.plan.work import DeviceWork, Replica, abstract_mesh
from specserve.speculative.drafter import Weights
from specserve.speculative.tree import Tree
from specserve.train.speed import best_seconds, matmul_peak

READ_SIDE, PRODUCT_SIDES = 8192, (0, 512, 1024, 2048)  # of square matrices; 0: as large as suits the device


@dataclass(frozen=True)
class Peaks:
    """The speeds that the devices of a run reach together."""

    bytes_per_second: float
    flops_per_second: float

    def at_least(self, bytes_per_second: float, flops_per_second: float) -> "Peaks":
        """Return the peaks after another kernel was seen to reach these speeds."""
        return Peaks(max(self.bytes_per_second, bytes_per_second), max(self.flops_per_second, flops_per_second))


@dataclass(frozen=True)
class Roofline:
    """The place of a step under the roof: its work, its time and the shares of the peaks that it reaches."""

    speculation: str
    batch_size: int
    context: int  # committed tokens of each sequence
    work: DeviceWork
    seconds: float
    draft_seconds: float
    peaks: Peaks

    @property
    def mbu(self) -> float:
        """The share of the memory bandwidth, 0 to 1."""
        rate = self.work.read / self.seconds
        return rate / self.peaks.at_least(rate, 0).bytes_per_second

    @property
    def mfu(self) -> float:
        """The share of the multiplication rate, 0 to 1."""
        rate = self.work.flops / self.seconds
        return rate / self.peaks.at_least(0, rate).flops_per_second

    def to_json(self) -> dict[str, Any]:
        return {
            "speculation": self.speculation,
            "batch_size": self.batch_size,
            "context": self.context,
            "step_ms": 1e3 * self.seconds,
            "draft_ms": 1e3 * self.draft_seconds,
            "verify_ms": 1e3 * (self.seconds - self.draft_seconds),
            "bytes": self.work.read,
            "flops": self.work.flops,
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
) -> DeviceWork:
    """Count the bytes and operations of a step of `batch` sequences with `context` committed tokens each. `weights` are
    those that the step takes, which may be narrower than its arithmetic. `drafter` is the head's, and is needed for
    trees that a head proposes."""
    replica, nodes = Replica(config, drafter, abstract_mesh({})), 1
    passes = []
    if tree is not None:
        nodes += tree.num_nodes
        for each in replica.drafts(batch, tree, context):
            assert weights.draft is not None, "a head that proposes has weights"
            stored = sum(leaf.nbytes for leaf in jax.tree.leaves(weights.draft.params))
            passes.append(replace(each, weights=each.weights * stored / total_bytes(replica.head_held)))
    forward = replica.forward(batch, nodes, context)
    passes.append(replace(forward, weights=forward.weights * bytes_read(weights.target) / replica.matrix_bytes))
    return DeviceWork(*(sum(getattr(each, name) for each in passes) for name in ("flops", "weights", "cache")))


def measure_peaks(dtype: str, num_devices: int = 1) -> Peaks:
    """Measure what the first device can do, times the number of devices; those of a CPU are one. The best of several
    kernels, each of which is run for a moment."""
    matrix, row = jnp.ones((READ_SIDE, READ_SIDE), dtype), jnp.ones((1, READ_SIDE), dtype)
    reading = matrix.nbytes / best_seconds(lambda: jnp.dot(row, matrix))
    flops = max(matmul_peak(dtype, side) for side in PRODUCT_SIDES)
    if jax.default_backend() == "cpu":
        num_devices = 1
    return Peaks(num_devices * max(reading, read_bandwidth()), num_devices * flops)
