"""The building blocks that target and draft share: norms, products and the gated MLP.

Functions named `*_spec` return the same dataclasses as the parameters, with `ParamSpec`s in place of arrays.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.kernels.matmul import Weight, matmul, matmul_float32
from specserve.kernels.rowwise import UNGATED, Activation, gated, rms_norm
from specserve.models.config import ModelConfig
from specserve.models.params import TensorPart, matrix, optional, vector
from specserve.pytree import pytree


def normed(config: ModelConfig, x: jax.Array, weight: jax.Array | None) -> jax.Array:  # [..., d_model]
    """The norm of a residual stream, or the stream itself where there is none."""
    if weight is None:
        return x
    if not config.centred_norms:
        return rms_norm(x, weight, config.norm_eps, offset=config.norm_offset)
    # a product, whose results do not depend on how many rows there are, unlike those of a sum
    mean = matmul_float32(x, jnp.ones((x.shape[-1], 1), x.dtype)) / x.shape[-1]
    return rms_norm(x.astype(jnp.float32) - mean, weight, config.norm_eps, offset=config.norm_offset).astype(x.dtype)


@pytree
class Mlp:
    gate: Weight  # [d_model, d_ff]; with up None it holds both side by side (`fuse_mlp`), unless there is but one
    up: Weight | None  # [d_model, d_ff]; None also of an activation that is not gated (`rowwise.UNGATED`)
    down: Weight  # [d_ff, d_model]
    gate_bias: jax.Array | None
    up_bias: jax.Array | None
    down_bias: jax.Array | None


def mlp_spec(config: ModelConfig, prefix: str, *, d_ff: int = 0, fused: str = "", has_bias: bool = False) -> Mlp:
    """The parameters of one MLP as `ParamSpec`s. `d_ff` is the config's unless given. `fused` names a checkpoint's
    tensor that holds gate and up together."""
    d_ff = d_ff or config.d_ff
    halves = TensorPart(0, d_ff, 2 * d_ff, 2 * d_ff), TensorPart(d_ff, 2 * d_ff, 2 * d_ff, 2 * d_ff)
    parts, is_gated = [optional(fused, half) for half in halves], config.activation not in UNGATED
    names = config.names
    gate, up = (f"{prefix}.{fused or name}" for name in (names.mlp_gate if is_gated else names.mlp_up, names.mlp_up))
    down = f"{prefix}.{names.mlp_down}"
    axes = ("embed", "mlp")
    return Mlp(
        gate=matrix(f"{gate}.weight", config.d_model, d_ff, axes, part=parts[0]),
        up=optional(is_gated, matrix(f"{up}.weight", config.d_model, d_ff, axes, part=parts[1])),
        down=matrix(f"{down}.weight", d_ff, config.d_model, ("mlp", "embed")),
        gate_bias=optional(has_bias, vector(f"{gate}.bias", d_ff, "mlp", init="zeros", part=parts[0])),
        up_bias=optional(has_bias and is_gated, vector(f"{up}.bias", d_ff, "mlp", init="zeros", part=parts[1])),
        down_bias=optional(has_bias, vector(f"{down}.bias", config.d_model, init="zeros")),
    )


def norm_spec(name: str, size: int, *, offset: bool = False, is_float32: bool = False) -> Any:
    """The weight of an `rms_norm`, which begins without effect: as ones, or as zeros with `offset`."""
    return vector(f"{name}.weight", size, init="zeros" if offset else "ones", is_float32=is_float32)


def linear(x: jax.Array, weight: Weight, bias: jax.Array | None = None, *, add: jax.Array | None = None) -> jax.Array:
    """Compute x @ weight + bias, and add that to `add` where it is given: x is [..., d_in], weight [d_in, d_out], bias
    [d_out] or None, and `add`, the residual stream, [..., d_out]."""
    if bias is None:
        return matmul(x, weight, add)
    y = matmul(x, weight) + bias
    return y if add is None else add + y


def mlp(
    params: Mlp, x: jax.Array, activation: Activation = "silu", *, add: jax.Array | None = None
) -> jax.Array:  # [..., d_model] -> [..., d_model]
    """Compute down(act(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202), or down(act(gate(x))) where the activation
    is not gated, and add it to `add` where that is given."""
    gate = linear(x, params.gate, params.gate_bias)
    up = None if params.up is None else linear(x, params.up, params.up_bias)
    return linear(gated(gate, up, activation), params.down, params.down_bias, add=add)


def fuse_mlp(params: Mlp) -> Mlp:
    """Join gate and up into one matrix: on CPU one product has less to dispatch and to wait for than two. An MLP that
    is not gated, or whose matrices are stored in two ways, stays as it is."""
    if params.up is None or not are_alike(params.gate, params.up):
        return params
    gate_up, bias = side_by_side(params.gate, params.up), side_by_side(params.gate_bias, params.up_bias)
    return Mlp(gate_up, None, params.down, bias, None, params.down_bias)


def are_alike(*parts: Any) -> bool:
    """Return whether matrices are stored alike, so that they can be joined: plain, or in few bits with scales and
    offsets of the same blocks. Files of mixed types store the projections of a layer in several ways."""
    return len({(jax.tree.structure(part), *(leaf.dtype for leaf in jax.tree.leaves(part))) for part in parts}) == 1


def side_by_side(*parts: Any) -> Any:
    """Join matrices or vectors along their outputs, their last axis. Returns None where there are none (a projection
    without bias)."""
    if parts[0] is None:
        return None
    # on the host, where nothing is compiled for it; of quantised ones also the scales
    return jax.tree.map(lambda *leaves: jax.device_put(np.concatenate(leaves, axis=-1)), *parts)
