"""A mixture of experts over a mesh. Experts, and the channels of each, are cut; tokens go to the devices that have
their experts, and the devices' partial results are added."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from specserve.kernels.matmul import QuantizedMatrix
from specserve.kernels.nibbles import NibbleMatrix, WordMatrix
from specserve.mesh import (
    ACTIVATIONS,
    fitting_partition,
    join_parts,
    num_parts,
    over_parts,
    part_index,
    partition,
    share_sum,
    sum_parts,
    traced_mesh,
)
from specserve.models.params import ParamSpec, is_spec

# (experts, x [token, d_model], more of the tokens) -> expert_ids [token, top_k], weights [token, top_k]
Choose = Callable[..., tuple[jax.Array, jax.Array]]
# (experts, x [token, d_model], expert_ids [token, top_k], weights [token, top_k]) -> [token, d_model]
Compute = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]


def in_parts(
    choose: Choose,
    compute: Compute,
    spec: Any,  # of the experts
    experts: Any,  # a pytree with `down` and `down_bias`, and a router that is whole everywhere
    x: jax.Array,  # [batch, seq, d_model]
    *more: jax.Array,  # [batch, seq], which `choose` takes too
) -> jax.Array:  # [batch, seq, d_model]
    """Choose each token's experts, run `compute` on every device's own experts and add up the results. Without a mesh
    only call both.

    Each device has its own tokens, and routes them, where batch and sequence are cut, or all of them where the mesh
    does not divide their number. Devices with different experts then have different tokens too, so they exchange them:
    each takes the tokens of all of them, computes those that chose its experts, and gets back the sums of its own (an
    all-gather and a reduce-scatter, as vLLM's `allgather_reducescatter`). Shapes are static and no token is dropped,
    however many choose one expert. Left to itself XLA would sum each expert's output over the devices before it is
    weighted, fetch other devices' matrices for products that pick theirs, and sort the tokens of all devices together;
    nor can it cut a kernel's work.

    For a device, the id of an expert that is elsewhere becomes the number of its own experts, one past the last, with
    weight 0.
    """

    mesh, cut = traced_mesh(), ["experts"]
    if _has_whole_blocks(experts.down, num_parts(mesh, "mlp")):
        cut.append("mlp")
    if mesh is None or all(num_parts(mesh, axis) == 1 for axis in (*cut, *ACTIVATIONS)):
        rows = x.reshape(-1, x.shape[-1])
        own_more = (part.reshape(-1) for part in more)
        return compute(experts, rows, *choose(experts, rows, *own_more)).reshape(x.shape)
    is_exchanged = num_parts(mesh, "experts") > 1 and len(x) % num_parts(mesh, "batch") == 0

    def own(experts: Any, x: jax.Array, *more: jax.Array) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        tokens = rows, *choose(experts, rows, *(part.reshape(-1) for part in more))
        rows, expert_ids, weights = join_parts(tokens, "experts") if is_exchanged else tokens
        num_experts = experts.down.shape[0]
        expert_ids = expert_ids - part_index("experts") * num_experts
        is_own = (expert_ids >= 0) & (expert_ids < num_experts)
        if "mlp" in cut and experts.down_bias is not None:  # the shared bias is added once
            bias = jnp.where(part_index("mlp") == 0, experts.down_bias, 0)
            experts = dataclasses.replace(experts, down_bias=bias)
        expert_ids, weights = jnp.where(is_own, expert_ids, num_experts), jnp.where(is_own, weights, 0.0)
        y = compute(experts, rows, expert_ids, weights)
        y = sum_parts(share_sum(y, "experts"), cut[1:]) if is_exchanged else sum_parts(y, cut)
        return y.reshape(x.shape)

    specs = jax.tree.map(partial(_partitions, cut), spec, experts, is_leaf=is_spec)
    rows = fitting_partition(mesh, (*ACTIVATIONS, None), x.shape)
    of_more = [fitting_partition(mesh, ACTIVATIONS, part.shape) for part in more]
    return over_parts(own, [*cut, *ACTIVATIONS], (specs, rows, *of_more), rows)(experts, x, *more)


def _partitions(cut: list[str], spec: ParamSpec, weight: Any) -> Any:
    """Return how the arrays of a parameter enter `over_parts`, which cuts along these axes."""
    if isinstance(weight, NibbleMatrix | WordMatrix):
        stack, inputs, outputs = spec.axes
        parts = [partition(axes, cut) for axes in weight.axes((stack,), inputs, outputs)]
        return jax.tree.unflatten(jax.tree.structure(weight), parts)
    if not isinstance(weight, QuantizedMatrix):
        return partition(spec.axes, cut)
    scale_axes = spec.axes if weight.scale.shape[-2] > 1 else (*spec.axes[:-2], None, spec.axes[-1])
    values, scale = partition(spec.axes, cut), partition(scale_axes, cut)
    offset = None if weight.offset is None else scale
    return dataclasses.replace(weight, values=values, scale=scale, offset=offset)


def _has_whole_blocks(weight: Any, num_parts: int) -> bool:
    """Return whether each part holds whole blocks of a matrix's scales when its inputs are cut into `num_parts` equal
    parts. If not, XLA decides how it is cut."""
    if not isinstance(weight, QuantizedMatrix) or weight.scale.shape[-2] == 1:
        return True
    return weight.shape[-2] % (num_parts * weight.block) == 0
