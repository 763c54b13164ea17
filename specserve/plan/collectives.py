"""The bytes that the devices of a mesh send each other in a training step, from shapes alone.

A device sends what it would in rings, which is how collectives run unless links allow better. Over p devices that is
(p - 1) n for an all-gather of parts of n bytes and for a reduce-scatter whose results have n bytes, and 2 (p - 1) / p
n for an all-reduce of n bytes (Patarasu and Yuan 2009, Bandwidth optimal all-reduce algorithms). The counts are those
of the present implementation, in which each sum is sent once, at its end; XLA's compiler for CPUs sends the gradients
of every rollout step by themselves. Keys and values along `sequence` are an estimate from above. Anything smaller than
a position's width, such as the sums of a softmax whose vocabulary is cut, is left out.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specserve.drafters.learning import Costs
from specserve.mesh import LOGICAL_TO_MESH, MESH_AXES, gathered, num_parts, on_each_device
from specserve.models.config import ModelConfig
from specserve.models.sharding import held_by_each, place_target, total_bytes
from specserve.models.target import TargetParams, target_spec
from specserve.train.flops import StepShape


@dataclass(frozen=True)
class Collective:
    """The bytes that each device sends in one step to those that differ from it along some axes of the mesh."""

    what: str
    axes: tuple[str, ...]
    num_bytes: int


def step_collectives(shape: StepShape, mesh: Mesh, gradient_bytes: int) -> tuple[Collective, ...]:
    """Count what is sent in a step, axis by axis of the mesh. `gradient_bytes` are those of the head's gradient on each
    device."""
    target, costs, positions = shape.target, shape.costs(), shape.positions_of_each(mesh)
    found = [*_gradient(mesh, gradient_bytes * shape.accumulate), *_head(shape, costs, mesh, positions)]
    found += _gathers(shape, mesh)
    if shape.has_layers:
        found += [_experts(target, mesh, positions), *_layers(target, mesh, positions)]
    if shape.has_logits and _is_cut(mesh, target.vocab_size):
        of_each = costs.states * shape.distributions * shape.drafter.draft_vocab_size
        found.append(_sums("the target's logits of the draft's tokens", mesh, positions * of_each * 4))
    return tuple(each for each in found if each.num_bytes)


def span(sizes: Mapping[str, int], axes: tuple[str, ...]) -> int:
    """Return how many consecutive devices, as a mesh of these sizes numbers them, a group along these axes spans, from
    its first to its last."""
    found, stride = 1, 1
    for axis in reversed(MESH_AXES):
        size = sizes.get(axis, 1)
        if axis in axes:
            found += (size - 1) * stride
        stride *= size
    return found


def _gathered(parts: int, part: float) -> int:
    return round((parts - 1) * part)


def _summed(parts: int, size: float) -> int:
    return round(2 * (parts - 1) / parts * size)


def _is_cut(mesh: Mesh, vocab_size: int) -> bool:
    return on_each_device(mesh, "vocab", vocab_size) < vocab_size


def _sums(what: str, mesh: Mesh, size: float) -> Collective:
    return Collective(what, LOGICAL_TO_MESH["heads"], _summed(num_parts(mesh, "heads"), size))


def _gradient(mesh: Mesh, size: int) -> list[Collective]:
    """List the sums of the head's gradient: devices that share its parameters out get the sum of their own part."""
    shared = LOGICAL_TO_MESH["embed"]
    cut = {*LOGICAL_TO_MESH["batch"], *LOGICAL_TO_MESH["sequence"]} - {*shared}
    axes, what = tuple(axis for axis in MESH_AXES if axis in cut), "the head's gradient"
    return [
        Collective(what, axes, _summed(math.prod(mesh.shape[axis] for axis in axes), size)),
        Collective(what, shared, _gathered(num_parts(mesh, "embed"), size)),
    ]


def gathered_bytes(spec: Any, dtype: str, place: Callable[[Mesh], Any], mesh: Mesh) -> int:
    """Return the bytes of a spec tree's parameters that a device lacks, and gathers, to multiply by them."""
    whole, own = (total_bytes(held_by_each(spec, dtype, place(each))) for each in (gathered(mesh), mesh))
    return whole - own


def multiplied_by(target: ModelConfig) -> TargetParams:
    """Return the spec of a target without embeddings of which rows are only looked up: these are sent, not all."""
    spec: Any = target_spec(target)
    if spec.layer_inputs is not None:
        spec = dataclasses.replace(spec, layer_inputs=dataclasses.replace(spec.layer_inputs, table=None))
    return spec if spec.head is None else dataclasses.replace(spec, embedding=None)


def _gathers(shape: StepShape, mesh: Mesh) -> list[Collective]:
    """List the parameters that devices gather: the target's once, and the head's, which stay until they are learnt."""
    target, drafter, axes = shape.target, shape.drafter, LOGICAL_TO_MESH["embed"]
    spec = multiplied_by(target)
    if not shape.has_layers:
        spec = dataclasses.replace(spec, layers=())
    of_target = gathered_bytes(spec, target.dtype, lambda mesh: place_target(target, spec, mesh), mesh)
    of_head = gathered_bytes(drafter.spec(), drafter.dtype, drafter.place, mesh)
    return [
        Collective("the target's parameters", axes, of_target),
        Collective("the head's parameters", axes, of_head),
    ]


def _head(shape: StepShape, costs: Costs, mesh: Mesh, positions: int) -> list[Collective]:
    """List what the head sends. Its layers' sums are added up forward and backward, and so are the gradients of the
    states that make logits. Keys and values are gathered forward, once more where steps are computed again, and their
    gradients are sent back. Layers with experts send tokens."""
    draft, rollout = shape.drafter, shape.rollout
    each = positions * np.dtype(draft.dtype).itemsize
    kv = costs.kv * on_each_device(mesh, "kv_heads", costs.num_kv_heads) / costs.num_kv_heads
    of_states = costs.states * rollout.length * draft.d_model if _is_cut(mesh, draft.draft_vocab_size) else 0
    gathers = (2 if rollout.remat else 1) + 2  # an all-reduce is two
    along, experts = LOGICAL_TO_MESH["sequence"], LOGICAL_TO_MESH["experts"]
    return [
        _sums("sums of the head's layers", mesh, each * (costs.summed + of_states)),
        Collective("the head's keys and values", along, _gathered(num_parts(mesh, "sequence"), each * kv * gathers)),
        Collective("tokens of the head's experts", experts, _gathered(num_parts(mesh, "experts"), each * costs.routed)),
    ]


def _experts(target: ModelConfig, mesh: Mesh, positions: int) -> Collective:
    """Count what mixtures send: tokens go to the devices that have their experts, with ids and weights, and sums
    come back."""
    layers = sum(target.kind(i).has_experts for i in range(target.num_layers))
    each = 2 * target.d_model * np.dtype(target.dtype).itemsize + 8 * (target.experts.top_k if target.experts else 0)
    size = _gathered(num_parts(mesh, "experts"), positions * each * layers)
    return Collective("tokens of the target's experts", LOGICAL_TO_MESH["experts"], size)


def _layers(target: ModelConfig, mesh: Mesh, positions: int) -> list[Collective]:
    """List what the target's layers send: sums after every mixer and MLP and of the embedding, and keys and
    values."""
    each = positions * np.dtype(target.dtype).itemsize
    sums = target.num_blocks + _is_cut(mesh, target.vocab_size)
    kv = sum(_kv_dim(target, i, mesh) for i in range(target.num_layers))
    size = _gathered(num_parts(mesh, "sequence"), each * kv)
    return [
        _sums("sums of the target's layers", mesh, each * sums * target.d_model),
        Collective("the target's keys and values", LOGICAL_TO_MESH["sequence"], size),
    ]


def _kv_dim(target: ModelConfig, i: int, mesh: Mesh) -> int:
    """Return how many numbers a device has in a layer for a position's keys and values, which are those of its own
    heads, and none in a layer that sees another's. Latents are expanded. A recurrent layer takes the whole input."""
    kind = target.kind(i)
    mixer, own = kind.mixer, target.of(kind)
    if mixer == "latent" and (latent := target.latent):
        return on_each_device(mesh, "heads", target.num_heads) * (latent.nope_dim + latent.rope_dim + latent.v_dim)
    if mixer == "none" or kind.kv_from is not None:
        return 0
    if mixer != "attention":
        return target.d_model
    return on_each_device(mesh, "kv_heads", own.num_kv_heads) * (own.head_dim + own.value_dim)
