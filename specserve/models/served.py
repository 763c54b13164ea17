"""Parameters in the form that steps of a server multiply by.

On one CPU they are joined to fewer, wider matrices, which are packed for the native kernels where these were built. On
GPUs and TPUs numbers of 4 bits are kept in 4. Others stay as they were loaded. What has its form already keeps it, so a
target can take it layer by layer while it is read, and never holds its matrices twice.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from specserve.kernels import native
from specserve.kernels.matmul import (
    PackedMatrix,
    QuantizedMatrix,
    Weight,
    experts_in_nibbles,
    in_nibbles,
    narrowed,
    pack,
)
from specserve.kernels.nibbles import PLATFORMS
from specserve.mesh import program_platform
from specserve.models.layers import Mlp, fuse_mlp
from specserve.models.mixers.attention import Attention, fuse_attention
from specserve.models.mixers.latent import LatentAttention, split_by_head
from specserve.models.moe import Moe
from specserve.models.params import PRODUCTS, SMALL_PRODUCTS, is_product
from specserve.models.target import Layer, TargetParams, with_own_head

Params = TypeVar("Params")


def is_on_one_cpu(mesh: Mesh | None) -> bool:
    """Return whether programs run on one CPU device, where the layout of a matrix decides about its product."""
    return program_platform() == "cpu" and mesh is None


def served(params: Params, mesh: Mesh | None = None) -> Params:
    """Return parameters of a target, of one of its layers or of a head in the form that steps multiply by. Where they
    are packed, a target's embeddings that are all bfloat16 numbers are kept so too."""
    if not is_on_one_cpu(mesh):
        return _in_nibbles(params) if program_platform() in PLATFORMS else params
    if not native.is_available():
        return fuse_for_cpu(params)
    if not isinstance(params, TargetParams):
        return params if _is_packed(params) else _packed(fuse_for_cpu(params))
    beside = dataclasses.replace(params, layers=())
    if not _is_packed(beside):
        table = narrowed(np.asarray(beside.embedding))
        head = table.T if beside.head is None else beside.head  # packed without a copy of the table on the way
        beside = _packed(dataclasses.replace(beside, embedding=jax.device_put(table), head=head))
    return dataclasses.replace(beside, layers=tuple(map(served, params.layers)))


def fuse_for_cpu(params: Params) -> Params:
    """The same parameters with fewer, wider products, and a target's with an output head of its own."""
    if isinstance(params, TargetParams):
        return with_own_head(dataclasses.replace(params, layers=tuple(map(fuse_for_cpu, params.layers))))
    if isinstance(params, Layer):
        if isinstance(params.attention, Attention):
            params = dataclasses.replace(params, attention=fuse_attention(params.attention))
        if isinstance(params.mlp, Mlp):
            params = dataclasses.replace(params, mlp=fuse_mlp(params.mlp))
    return params


def change_matrices(
    params: Params, *, change: Callable[[jax.Array | QuantizedMatrix], Weight], names: frozenset[str]
) -> Params:
    """Return the same parameters with other matrices where rows are multiplied by them as they are
    (`kernels.matmul`)."""

    def leaf(path: tuple, leaf: Any) -> Any:
        return change(leaf) if is_product(path, names) and len(leaf.shape) >= 2 else leaf

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=lambda x: isinstance(x, QuantizedMatrix))


def _is_packed(params: Any) -> bool:
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, PackedMatrix))
    return any(isinstance(leaf, PackedMatrix) for leaf in leaves)


def _packed(params: Params) -> Params:
    """Pack the parameters for the native kernels. Latent attention, wherever it stands, has a matrix for each head, as
    it multiplies when it serves."""

    def split(node: Any) -> Any:
        return split_by_head(node, node.num_heads) if isinstance(node, LatentAttention) else node

    apart = jax.tree.map(split, params, is_leaf=lambda node: isinstance(node, LatentAttention | QuantizedMatrix))
    return change_matrices(apart, change=pack, names=PRODUCTS | SMALL_PRODUCTS)


def _in_nibbles(params: Params) -> Params:
    def of_experts(node: Any) -> Any:
        if not isinstance(node, Moe):
            return node
        names = [name for name in ("gate", "up", "down") if getattr(node, name) is not None]
        made = experts_in_nibbles([getattr(node, name) for name in names])
        return dataclasses.replace(node, **dict(zip(names, made, strict=True)))

    packed = jax.tree.map(of_experts, params, is_leaf=lambda node: isinstance(node, Moe | QuantizedMatrix))
    return change_matrices(packed, change=in_nibbles, names=PRODUCTS)
