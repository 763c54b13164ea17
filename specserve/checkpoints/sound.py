"""Weights that are numbers: what was loaded, or is to take its place, is checked before it serves or trains."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.checkpoints.tensors import listed
from specserve.errors import CheckpointError
from specserve.kernels.matmul import QuantizedMatrix
from specserve.kernels.nibbles import NibbleMatrix, WordMatrix
from specserve.models.params import ParamSpec, is_spec
from specserve.models.target import TargetParams


def check_weights(params: Any, spec_tree: Any, where: str, *, may_be_zero: bool = True) -> None:
    """Raises CheckpointError that names every tensor with a value that is not a number, or is infinite; and, unless
    they `may_be_zero`, every tensor that holds nothing but zeros and did not begin so."""
    expected, structure = jax.tree.flatten(spec_tree, is_leaf=is_spec)
    if isinstance(params, TargetParams) and spec_tree.head is None:
        params = dataclasses.replace(params, head=None)  # a tied head is finite where the embedding is
    weights = list(zip(expected, structure.flatten_up_to(params), strict=True))
    refuse_not_finite([name for spec, weight in weights for name in not_finite(spec, weight)], where)
    if may_be_zero:
        return
    leaves = [(spec, jax.tree.leaves(weight)) for spec, weight in weights if spec.init != "zeros"]
    if dead := [spec.name for spec, own in leaves if not any(_at_hand(leaf).any() for leaf in own)]:
        raise CheckpointError(
            f"{where}: nothing but zeros: {listed(dead)}, as if never filled; export or download the weights again"
        )


def refuse_not_finite(names: Sequence[str], where: str) -> None:
    """Raises CheckpointError that names these tensors, if there are any."""
    if names:
        named = listed(list(dict.fromkeys(names)))
        raise CheckpointError(f"{where}: not a number or infinite: {named}; copy or download the weights again")


def not_finite(spec: ParamSpec, weight: jax.Array | QuantizedMatrix | NibbleMatrix | WordMatrix) -> list[str]:
    """Return the names of the tensors of a parameter with a value that is not a number, or is infinite."""

    def is_finite_in(leaf: jax.Array) -> np.ndarray:  # for each expert
        inner = tuple(range(1, leaf.ndim)) if spec.is_per_expert else None
        numbers = _at_hand(leaf)
        is_finite = np.isfinite(numbers) if isinstance(numbers, np.ndarray) else jnp.isfinite(numbers)
        return np.atleast_1d(is_finite.all(inner))

    if isinstance(weight, NibbleMatrix | WordMatrix):
        weight = jax.lax.bitcast_convert_type(weight.scales, jnp.bfloat16)  # its scales and offsets
    floats = [leaf for leaf in jax.tree.leaves(weight) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    is_finite = np.all([is_finite_in(leaf) for leaf in floats], axis=0)
    return [name for name, is_fine in zip(spec.names, is_finite, strict=True) if not is_fine]


def _at_hand(leaf: jax.Array) -> jax.Array | np.ndarray:
    """Return an array in the host's memory as NumPy's: for each shape XLA would compile programs to look at it."""
    is_here = isinstance(leaf, jax.Array) and all(device.platform == "cpu" for device in leaf.devices())
    return np.asarray(leaf) if is_here and leaf.is_fully_addressable else leaf
