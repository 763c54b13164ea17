"""A mixture of experts over a mesh. Experts, and the channels of each, are cut, and the devices' partial results are
added."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specserve.kernels.matmul import QuantizedMatrix
from specserve.mesh import (
    ACTIVATIONS,
    num_parts,
    over_parts,
    part_index,
    partition,
    sum_parts,
    traced_mesh,
    traced_platform,
)
from specserve.models.params import ParamSpec, is_spec

# (experts, x [token, d_model], expert_ids [token, top_k], weights [token, top_k]) -> [token, d_model]
Compute = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]


def in_parts(
    compute: Compute,
    spec: Any,  # of the experts
    experts: Any,  # a pytree with `down` and `down_bias`, every array of which begins with the axis of the experts
    x: jax.Array,  # [batch, seq, d_model]
    expert_ids: jax.Array,  # [batch, seq, top_k]
    weights: jax.Array,  # [batch, seq, top_k]
) -> jax.Array:  # [batch, seq, d_model]
    """Run `compute` on every device's own experts and add up the results. Without a mesh only call `compute`.

    For a device, the id of an expert that is elsewhere becomes the number of its own experts, one past the last, with
    weight 0. Left to itself XLA would sum each expert's output over the devices before it is weighted, and would fetch
    other devices' matrices for products that pick theirs.

    On accelerators each device also has its own tokens, where batch and sequence are cut, or all of them where the
    mesh does not divide their number. XLA would sort the tokens of all devices together, and cannot cut a kernel's
    work. On CPU it decides.
    """

    def flat(experts: Any, *arrays: jax.Array) -> jax.Array:
        y = compute(experts, *(array.reshape(-1, array.shape[-1]) for array in arrays))
        return y.reshape(*arrays[0].shape[:-1], y.shape[-1])

    mesh, cut = traced_mesh(), ["experts"]
    if _has_whole_blocks(experts.down, num_parts(mesh, "mlp")):
        cut.append("mlp")
    own_rows = () if traced_platform() == "cpu" else ACTIVATIONS
    if all(num_parts(mesh, axis) == 1 for axis in (*cut, *own_rows)):
        return flat(experts, x, expert_ids, weights)

    def own(experts: Any, x: jax.Array, expert_ids: jax.Array, weights: jax.Array) -> jax.Array:
        num_experts = experts.down.shape[0]
        expert_ids = expert_ids - part_index("experts") * num_experts
        is_own = (expert_ids >= 0) & (expert_ids < num_experts)
        if "mlp" in cut and experts.down_bias is not None:  # which is added once
            bias = jnp.where(part_index("mlp") == 0, experts.down_bias, 0)
            experts = dataclasses.replace(experts, down_bias=bias)
        expert_ids, weights = jnp.where(is_own, expert_ids, num_experts), jnp.where(is_own, weights, 0.0)
        return sum_parts(flat(experts, x, expert_ids, weights), cut)

    def partitions(spec: ParamSpec, weight: Any) -> Any:
        if not isinstance(weight, QuantizedMatrix):
            return partition(spec.axes, cut)
        scale_axes = spec.axes if weight.scale.shape[-2] > 1 else (*spec.axes[:-2], None, spec.axes[-1])
        values, scale = partition(spec.axes, cut), partition(scale_axes, cut)
        return dataclasses.replace(weight, values=values, scale=scale)

    specs = jax.tree.map(partitions, spec, experts, is_leaf=is_spec)
    divided = [axis for axis, size in zip(own_rows, x.shape, strict=False) if size % num_parts(mesh, axis) == 0]
    rows = partition((*ACTIVATIONS, None), divided)
    return over_parts(own, [*cut, *own_rows], (specs, rows, rows, rows), rows)(experts, x, expert_ids, weights)


def _has_whole_blocks(weight: Any, num_parts: int) -> bool:
    """Whether cutting a matrix's inputs into `num_parts` equal parts leaves whole blocks of its scales in each. If not,
    XLA decides how it is cut."""
    if not isinstance(weight, QuantizedMatrix) or weight.scale.shape[-2] == 1:
        return True
    return weight.shape[-2] % (num_parts * weight.block) == 0
