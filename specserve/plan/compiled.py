"""The steps of a planned fleet as XLA's compiler makes them for its devices, beside the figures on paper.

A step reads what `work` counts, at the memory's full bandwidth. On a GPU each kernel that is launched takes its own
time besides; on a TPU the program's text says what its operations move (`hlo`), to which the keys and values are added
that its kernels read. What is left out is arithmetic, which bounds no step of few rows, and what devices send to each
other.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from specserve.devices import Device
from specserve.drafters.speculation import describe as describe_tree
from specserve.errors import ConfigError
from specserve.mesh import MESH_AXES, SERVING_AXES, mesh_sizes
from specserve.plan.ahead import Counted, describe
from specserve.plan.serving import ServePlan
from specserve.serve.programs.shapes import make_shapes
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import Tree

LAUNCH_SECONDS = 1.8e-6  # of a kernel in a CUDA graph that waits for the one before; small ones took an H100 1.6e-6
BATCHES = (1, 8, 32)  # sequences of the steps that are counted; each runs in the bucket that it is padded to
# by a device's id: the slices of chips that its compiler knows, by the devices that they have, the smallest first
SLICES = {
    "h100": {1: "h100", 2: "h100", 4: "h100", 8: "h100"},
    "tpu-v5e": {4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4"},
    "tpu-v6e": {4: "v6e:2x2", 8: "v6e:2x4", 16: "v6e:4x4"},
    "tpu-v7x": {8: "tpu7x:2x2x1", 16: "tpu7x:2x2x2"},
}


@dataclass(frozen=True)
class CompiledStep:
    """A step of one replica, on each of its devices."""

    way: str
    batch: int  # rows of sequences, padding included
    read: float  # bytes of weights and of committed keys and values
    cache: float  # of them, bytes of keys and values
    counted: Counted
    device: Device

    @property
    def bound(self) -> float:
        """The seconds in which the memory gives what must be read."""
        return self.read / self.device.bandwidth

    @property
    def seconds(self) -> float:
        """The seconds that the compiled program cannot be under."""
        moved = max(self.read, self.counted.moved_bytes + self.cache)
        return moved / self.device.bandwidth + self.counted.launches * LAUNCH_SECONDS

    def to_json(self) -> dict[str, Any]:
        """Return what was counted, in the units that the names carry."""
        counted = self.counted
        return {
            "way": self.way,
            "batch": self.batch,
            "bytes_read": self.read,
            "bytes_of_arguments": counted.argument_bytes,
            "bytes_written_in_place": counted.aliased_bytes,
            "bytes_beside": counted.temporary_bytes,
            "bytes_moved": counted.moved_bytes,
            "launches": counted.launches,
            "graphs": counted.parts,
            "ms_at_least": 1e3 * self.seconds,
            "of_the_bound": self.bound / self.seconds,
        }


def compile_steps(plan: ServePlan) -> tuple[CompiledStep, ...]:
    """Compile plain and speculative steps of the plan's replicas, which takes up to minutes. Raises ConfigError where
    the compiler for the devices is not installed or not known, or the target is one of 8-bit weights."""
    order, fleet = plan.order, plan.fleet
    run, target, slices = order.run, fleet.replica.target, SLICES.get(order.device.id, {})
    size = next((number for number in slices if number >= fleet.devices), None)
    if size is None:
        raise ConfigError(
            f"--compile: steps on {fleet.devices} x {order.device.name} cannot be compiled here; those of "
            f"{', '.join(f'up to {max(known)} {name}' for name, known in SLICES.items())} can"
        )
    if order.is_quantized:
        raise ConfigError(f"--compile: leave out --quantization {run.quantization}; 16-bit weights alone are compiled")
    described = describe(slices[size], fleet.devices)
    mesh = None
    if fleet.mesh:
        sizes = mesh_sizes(fleet.mesh, SERVING_AXES)
        shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
        mesh = Mesh(np.array(described.devices).reshape(shape), MESH_AXES, (AxisType.Auto,) * len(shape))
    trees: list[Tree | None] = [None, *((order.tree,) if order.tree else ())]
    with described.made_for():
        shapes = make_shapes(
            trees,
            target,
            mesh,
            num_slots=fleet.fit.num_slots,
            max_model_len=run.prompt + run.answer,
            page_size=order.page_size,
            num_pages=fleet.fit.num_pages,
        ).with_windows(target, order.step.drafter)
    runner, replica, found = described.runner(target, order.head, shapes, mesh), fleet.replica, []
    buckets = dict.fromkeys(next((size for size in shapes.batch_sizes if size >= n), 0) for n in BATCHES)
    for tree in trees:
        for batch in filter(None, buckets):
            context = run.prompt + run.answer // 2
            work = [replica.forward(batch, shapes.num_nodes(tree), context)]
            work += replica.drafts(batch, tree, context) if tree else ()
            counted = described.compile(runner, StepProgram(batch, shapes.max_pages, tree))
            read, cache = sum(each.read for each in work), sum(each.cache for each in work)
            found.append(CompiledStep(describe_tree(tree), batch, read, cache, counted, order.device))
    return tuple(found)
