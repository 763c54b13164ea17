"""A model's parameters as one tree of `ParamSpec`s, from which initialisation, loading, export and sharding derive."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding


@dataclass(frozen=True)
class TensorPart:
    """Says which outputs of a stored tensor make up a parameter, where a checkpoint keeps several parameters in one
    tensor.

    Output j belongs to it if start <= j % period < stop. A period of the whole tensor gives one block of outputs (q, k
    and v side by side). A period of 2 gives every other output (gate and up in turns). The period of a head gives a
    block within each head (a head's query, then its gate). For example TensorPart(2, 4, 4, 8) takes outputs 2, 3, 6
    and 7 of eight. Of these each run of `width` is taken `times` times in a row.
    """

    start: int
    stop: int
    period: int
    total: int  # outputs of the stored tensor
    width: int = 1
    times: int = 1

    def places(self, outputs: np.ndarray) -> np.ndarray:
        """Return the places of some of the parameter's outputs, counted from 0, among those of the stored tensor."""
        once = outputs // (self.width * self.times) * self.width + outputs % self.width
        own = self.stop - self.start
        return once // own * self.period + self.start + once % own


@dataclass(frozen=True)
class ParamSpec:
    """Describes one parameter: its shape in memory, its logical axes, and where it stands in a checkpoint.

    Matrices are stored [in, out] in memory and [out, in] in checkpoints, hence `transpose`. Experts are stacked along
    the first axis in memory, [expert, in, out]; checkpoints mostly have a tensor for each.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    name: str  # in the checkpoint; with {e} for an expert's number where each expert is a tensor of its own
    transpose: bool = False  # the last two axes
    init: str = "normal"  # normal (std fan_in ** -0.5) | embedding (std 0.02) | ones | zeros
    part: TensorPart | None = None  # where the tensor holds the outputs of other parameters too
    is_float32: bool = False  # in a model of any dtype: few numbers that decide much
    instead: tuple["ParamSpec", ...] = ()  # how other checkpoints of the same family keep it

    def dtype(self, model_dtype: str) -> str:
        if self.is_float32:
            return "float32"
        return model_dtype

    @property
    def is_per_expert(self) -> bool:
        return "{e}" in self.name

    @property
    def names(self) -> list[str]:
        """The names of the tensors that the parameter is read from. Where there are several, they are in the order of
        its first axis."""
        return [self.name.format(e=e) for e in range(self.shape[0])] if self.is_per_expert else [self.name]

    def stored_in(self, shape_of: Callable[[str], tuple[int, ...] | None]) -> "ParamSpec":
        """Return how a checkpoint keeps the parameter: as one of `instead` does whose tensor is there in its shape, or
        as this one. `shape_of` a name of ours is that of its tensor, or None where there is none."""
        return next((other for other in self.instead if shape_of(other.name) == other.stored_shape), self)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that each tensor in `names` has on disk."""
        shape = self.shape[1:] if self.is_per_expert else self.shape
        if self.part:
            shape = (*shape[:-1], self.part.total)
        return (*shape[:-2], shape[-1], shape[-2]) if self.transpose else shape


# A spec tree is built with the parameters' own dataclasses, so these are typed as any leaf.


def matrix(
    name: str,
    d_in: int,
    d_out: int,
    axes: tuple[str | None, str | None],
    *,
    part: TensorPart | None = None,
    is_float32: bool = False,
) -> Any:
    return ParamSpec((d_in, d_out), axes, name, transpose=True, part=part, is_float32=is_float32)


def vector(
    name: str,
    size: int,
    axis: str | None = None,
    *,
    init: str = "ones",
    part: TensorPart | None = None,
    is_float32: bool = False,
) -> Any:
    return ParamSpec((size,), (axis,), name, init=init, part=part, is_float32=is_float32)


def embedding_table(name: str, vocab_size: int, d_model: int) -> Any:
    return ParamSpec((vocab_size, d_model), ("vocab", "embed"), name, init="embedding")


def optional(has_it: object, spec: Any) -> Any:
    """The spec, or part of one, that only some configs have: None where `has_it` is false."""
    return spec if has_it else None


def is_spec(node: Any) -> bool:
    return isinstance(node, ParamSpec)


# Names of fields. Other parameters are vectors, looked up, taken apart before they are multiplied by, or of one family.
PRODUCTS = frozenset(("q", "k", "v", "o", "gate", "up", "down", "head", "fc", "q_down", "q_nope", "q_rope", "kv_down"))
PRODUCTS |= {"inputs"}  # of all layers (`layer_inputs`)
# Rows are multiplied by these too, but they are small or cut up by head, so quantisation leaves them alone.
SMALL_PRODUCTS = frozenset(("router", "shared_gate", "beta", "decay", "k_up", "v_up"))


def is_product(path: tuple[Any, ...], names: frozenset[str] = PRODUCTS) -> bool:
    """Return whether the parameter at this path (of `jax.tree_util`) is a matrix that rows are multiplied by without a
    transpose or a lookup."""
    return jax.tree_util.keystr(path[-1:], simple=True) in names


WRITERS = frozenset(("o", "o_bias", "down", "down_bias"))  # their results are added to the residual stream


def silenced(layers: Any) -> Any:
    """Return layers that add nothing to the residual stream yet: what they write with is zero."""

    def silence(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        return jnp.zeros_like(leaf) if is_product(path, WRITERS) else leaf

    return jax.tree_util.tree_map_with_path(silence, layers)


def specs(tree: Any) -> list[ParamSpec]:
    """The leaves of a spec tree."""
    return jax.tree.leaves(tree, is_leaf=is_spec)


def num_params(tree: Any, top_k: int | None = None) -> int:
    """Count the parameters of a spec tree, or of one spec. With `top_k` only so many of each layer's stacked experts
    count, which is what one token uses."""

    def size(spec: ParamSpec) -> int:
        if top_k is not None and spec.axes[0] == "experts":
            return top_k * math.prod(spec.shape[1:])
        return math.prod(spec.shape)

    return sum(map(size, specs(tree)))


def on_device(tree: Any, places: Any) -> Any:
    """The spec tree with the shape of each parameter's part on one device, from the tree of their shardings. Stacked
    experts count in full: a token is computed by those that it chose, whichever device has them."""

    def part(spec: ParamSpec, place: Sharding) -> ParamSpec:
        shape = place.shard_shape(spec.shape)
        if spec.axes[0] == "experts":
            shape = (*spec.shape[:1], *shape[1:])
        return replace(spec, shape=shape)

    return jax.tree.map(part, tree, places, is_leaf=is_spec)


def abstract(tree: Any, dtype: str) -> Any:
    """The spec tree with a `jax.ShapeDtypeStruct` for each parameter, for shape arithmetic and for restoring without
    allocating."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype(dtype)), tree, is_leaf=is_spec)


def init_params(tree: Any, key: jax.Array, dtype: str) -> Any:
    """Draw fresh parameters. Every leaf draws from a key of its own, so adding a leaf changes no other."""

    def init(path: tuple, spec: ParamSpec) -> jax.Array:
        if spec.init == "ones":
            return jnp.ones(spec.shape, spec.dtype(dtype))
        if spec.init == "zeros":
            return jnp.zeros(spec.shape, spec.dtype(dtype))
        std = 0.02
        if spec.init != "embedding":
            std = spec.shape[-2] ** -0.5
        leaf_key = jax.random.fold_in(key, _stable_hash(jax.tree_util.keystr(path)))
        return (jax.random.normal(leaf_key, spec.shape, jnp.float32) * std).astype(spec.dtype(dtype))

    return jax.tree_util.tree_map_with_path(init, tree, is_leaf=is_spec)


def _stable_hash(text: str) -> int:
    value = 2166136261  # FNV-1a, 32 bits
    for byte in text.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value % 2**31


def is_matrix(spec: ParamSpec) -> bool:
    """Return whether the parameter is a matrix that rows are multiplied by, and not a norm, a bias or an embedding."""
    return len(spec.shape) > 1 and spec.init == "normal"
