"""One `ParamSpec` tree per model: initialisation, loading, export and sharding all derive from it."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its shape in memory, its logical axes, and where it stands in a checkpoint.

    Matrices are stored [in, out]; checkpoints store [out, in], hence `transpose`.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    name: str  # in the checkpoint
    transpose: bool = False
    init: str = "normal"  # normal (std fan_in ** -0.5) | embedding (std 0.02) | ones | zeros

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape on disk."""
        return self.shape[::-1] if self.transpose else self.shape


# A spec tree is built with the parameters' own dataclasses, so these are typed as any leaf.


def matrix(name: str, d_in: int, d_out: int, axes: tuple[str | None, str | None]) -> Any:
    return ParamSpec((d_in, d_out), axes, name, transpose=True)


def vector(name: str, size: int, axis: str | None = None, *, init: str = "ones") -> Any:
    return ParamSpec((size,), (axis,), name, init=init)


def embedding_table(name: str, vocab_size: int, d_model: int) -> Any:
    return ParamSpec((vocab_size, d_model), ("vocab", "embed"), name, init="embedding")


def is_spec(node: Any) -> bool:
    return isinstance(node, ParamSpec)


def specs(tree: Any) -> list[ParamSpec]:
    """The leaves of a spec tree."""
    return jax.tree.leaves(tree, is_leaf=is_spec)


def num_params(tree: Any) -> int:
    return sum(math.prod(spec.shape) for spec in specs(tree))


def abstract(tree: Any, dtype: str) -> Any:
    """The spec tree as `jax.ShapeDtypeStruct`s: for shape arithmetic and restoring without allocating."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), tree, is_leaf=is_spec)


def init_params(tree: Any, key: jax.Array, dtype: str) -> Any:
    """Fresh parameters of `dtype`; every leaf draws from its own key, so adding a leaf changes no other."""

    def init(path: tuple, spec: ParamSpec) -> jax.Array:
        if spec.init == "ones":
            return jnp.ones(spec.shape, dtype)
        if spec.init == "zeros":
            return jnp.zeros(spec.shape, dtype)
        std = 0.02 if spec.init == "embedding" else spec.shape[0] ** -0.5
        leaf_key = jax.random.fold_in(key, _stable_hash(jax.tree_util.keystr(path)))
        return (jax.random.normal(leaf_key, spec.shape, jnp.float32) * std).astype(dtype)

    return jax.tree_util.tree_map_with_path(init, tree, is_leaf=is_spec)


def _stable_hash(text: str) -> int:
    value = 2166136261  # FNV-1a, 32 bits
    for byte in text.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value % 2**31
