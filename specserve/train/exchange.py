"""How many bytes the devices of a mesh send each other in a training step, from shapes alone, and how long that takes.

Bytes are what each device sends where collectives run in rings, as they do unless links allow better. Over p devices
that is (p - 1) n for an all-gather of parts of n bytes and for a reduce-scatter whose results have n bytes, and
2 (p - 1) / p n for an all-reduce of n bytes (Patarasu and Yuan 2009, Bandwidth optimal all-reduce algorithms). They
are those of the present implementation. What is less than a position's width, such as the sums of a softmax whose
vocabulary is cut, is left out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from specserve.drafters.door import Rollout, TrainedDrafter
from specserve.mesh import LOGICAL_TO_MESH, MESH_AXES, num_parts, on_each_device
from specserve.models.config import ModelConfig
from specserve.train.teachers import TeacherName


@dataclass(frozen=True)
class Link:
    """What joins devices: its name, and the bytes that a device can send over it in a second to the next device of a
    ring."""

    name: str
    bandwidth: float


@dataclass(frozen=True)
class Exchange:
    """What each device sends to those that differ from it along some axes of the mesh, in one step."""

    what: str
    axes: tuple[str, ...]
    num_bytes: int


def step_exchanges(
    target: ModelConfig,
    draft: TrainedDrafter,
    rollout: Rollout,
    mesh: Mesh,
    *,
    batch: int,
    seq: int,
    gradient_bytes: int,  # of the head, on each device
    accumulate: int = 1,
    is_captured: bool = False,
    teacher: TeacherName = "soft",
) -> tuple[Exchange, ...]:
    """Count what is sent in a step over `batch` rows of `seq` positions, axis by axis of the mesh."""
    positions = batch * seq // (num_parts(mesh, "batch") * num_parts(mesh, "sequence"))
    has_logits = not is_captured and teacher != "data"
    found = [_gradient(mesh, gradient_bytes * accumulate), *_head(draft, rollout, mesh, positions, seq)]
    if has_logits:
        found.append(_teacher(target, draft, rollout, mesh, positions, seq))
    if not is_captured:
        found += [_experts(target, mesh, positions), *_target(target, mesh, positions)]
    return tuple(each for each in found if each.num_bytes)


def span(sizes: Mapping[str, int], axes: tuple[str, ...]) -> int:
    """How many devices in a row, as a mesh of these sizes numbers them, hold one group along these axes: from its first
    to its last."""
    found, stride = 1, 1
    for axis in reversed(MESH_AXES):
        size = sizes.get(axis, 1)
        found += (size - 1) * stride if axis in axes else 0
        stride *= size
    return found


def _gathered(parts: int, part: float) -> int:
    return round((parts - 1) * part)


def _summed(parts: int, size: float) -> int:
    return round(2 * (parts - 1) / parts * size)


def _gradient(mesh: Mesh, size: int) -> Exchange:
    axes = (*LOGICAL_TO_MESH["batch"], *LOGICAL_TO_MESH["sequence"])
    return Exchange("the head's gradient", axes, _summed(math.prod(mesh.shape[axis] for axis in axes), size))


def _experts(target: ModelConfig, mesh: Mesh, positions: int) -> Exchange:
    """Tokens go to the devices that have their experts, with ids and weights, and sums come back."""
    layers = sum(target.kind(i).has_experts for i in range(target.num_layers))
    each = 2 * target.d_model * _itemsize(target.dtype) + 8 * (target.experts.top_k if target.experts else 0)
    size = _gathered(num_parts(mesh, "experts"), positions * each * layers)
    return Exchange("tokens and the experts' sums", LOGICAL_TO_MESH["experts"], size)


def _target(target: ModelConfig, mesh: Mesh, positions: int) -> list[Exchange]:
    state = positions * target.d_model * _itemsize(target.dtype)
    sums = 2 * target.num_layers + (on_each_device(mesh, "vocab", target.vocab_size) < target.vocab_size)
    kv = sum(_kv_dim(target, i, mesh) for i in range(target.num_layers))
    return [
        Exchange(
            "sums of the target's layers", LOGICAL_TO_MESH["heads"], _summed(num_parts(mesh, "heads"), sums * state)
        ),
        Exchange(
            "keys and values of the target",
            LOGICAL_TO_MESH["sequence"],
            _gathered(num_parts(mesh, "sequence"), positions * kv * _itemsize(target.dtype)),
        ),
    ]


def _kv_dim(target: ModelConfig, i: int, mesh: Mesh) -> int:
    """How many numbers of a position's keys and values a device has in a layer: those of its heads, expanded."""
    if target.kind(i).mixer == "latent" and (latent := target.latent):
        return on_each_device(mesh, "heads", target.num_heads) * (latent.nope_dim + latent.rope_dim + latent.v_dim)
    return 2 * on_each_device(mesh, "kv_heads", target.num_kv_heads) * target.head_dim


def _itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize
