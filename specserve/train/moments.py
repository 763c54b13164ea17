"""Smaller memory for an optimiser's moments between steps: they are kept in 8 bits, or in the host's memory.

Both are wrappers of an optax transformation whose state calls its moments `mu` (of the gradient) and `nu` (of its
square). Only those of matrices are touched; vectors, of which there are few, stay as they are.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import memory
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.tree_util import GetAttrKey, tree_map_with_path

from specserve.errors import ConfigError
from specserve.pytree import pytree, static

BLOCK = 256  # neighbours along a matrix's last axis that share a scale
OCTAVES = 16  # from a block's largest magnitude to the smallest whose code is not 0
HOST = "pinned_host"


@pytree
class Codes:
    """Magnitudes on a logarithmic scale below the largest of their block, in 8 bits.

    Block-wise scales and a code that is finest for small values are those of Dettmers et al. 2022 (arXiv 2110.02861,
    sections 2.1 and 2.2); theirs is a tree of decimal exponents, this one has equal steps in the logarithm.
    """

    codes: jax.Array  # the shape of the parameter; int8 with a sign, or uint8; 0 is 0
    largest: jax.Array  # [..., last axis / BLOCK rounded up] float32
    is_squared: bool = static()  # uint8 of squares: twice the octaves, so the same range for their roots


@pytree
class EightBitState:
    inner: Any  # the wrapped transformation's state, its moments as `Codes`
    count: jax.Array  # [] int32, updates so far


@pytree
class HostState:
    moments: Any  # the wrapped transformation's whole state; what is large in it lies in the host's memory


def encode(values: jax.Array, count: jax.Array, *, is_squared: bool) -> Codes:
    """A moment in 8 bits; `is_squared` values are never negative.

    A value moves by less than a step: by 9.2% at most, a square by 9.1% (its root by 4.5%), and below 2^-16 of its
    block's largest becomes 0, or, of a square whose root is divided by, the smallest code. Rounding is up or down by a
    fraction that moves with `count`, in proportion to the distances: a moment that changes by less than a step
    each time would otherwise stay where it is for good.
    """
    levels, octaves = _scale_of(is_squared)
    magnitude = jnp.abs(values)
    largest = jnp.max(_by_block(magnitude), axis=-1)
    share = magnitude / _spread(jnp.where(largest > 0, largest, 1.0), values.shape[-1])
    place = levels + jnp.log2(jnp.maximum(share, 1e-30)) * (levels / octaves)
    code = jnp.clip(jnp.floor(place + _fractions(values.shape, count)), 0, levels)
    if is_squared:
        return Codes(jnp.where(share > 0, jnp.maximum(code, 1), 0).astype(jnp.uint8), largest, is_squared)
    return Codes((code * jnp.sign(values)).astype(jnp.int8), largest, is_squared)


def decode(stored: Codes) -> jax.Array:
    """Restore in float32 the moment that `encode` has kept."""
    levels, octaves = _scale_of(stored.is_squared)
    code = stored.codes.astype(jnp.float32)
    share = jnp.where(code == 0, 0.0, jnp.exp2((jnp.abs(code) - levels) * (octaves / levels)))
    return jnp.sign(code) * share * _spread(stored.largest, code.shape[-1])


def in_eight_bits(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation with its moments as `Codes` between updates: 2 bytes and a bit for each entry of a matrix
    where Adam has 8."""

    def init(params: optax.Params) -> EightBitState:
        count = jnp.int32(0)
        return EightBitState(_pack(inner.init(params), count), count)

    def update(
        updates: optax.Updates, state: EightBitState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, EightBitState]:
        unpacked = jax.tree.map(lambda leaf: decode(leaf) if _is_codes(leaf) else leaf, state.inner, is_leaf=_is_codes)
        updates, new = inner.update(updates, unpacked, params)
        count = state.count + 1
        return updates, EightBitState(_pack(new, count), count)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]  # optax types a state as any pytree


def on_host(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation with its moments in the host's memory between updates, to which the program that is
    compiled around it takes them back (see `place`). Raises ConfigError where the devices have no such memory."""
    device = jax.local_devices()[0]
    if HOST not in (kinds := [known.kind for known in device.addressable_memories()]):
        raise ConfigError(
            f"train.moments=host needs devices with {HOST} memory, {device.device_kind} has {', '.join(kinds)}; take "
            "train.moments=int8, which needs a quarter of the memory"
        )

    def init(params: optax.Params) -> HostState:
        return HostState(inner.init(params))

    def update(
        updates: optax.Updates, state: HostState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, HostState]:
        updates, new = inner.update(updates, _to_device(state.moments), params)
        return updates, HostState(new)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def are_on_host(state: Any) -> bool:
    return isinstance(state, HostState)


def place(
    state: Any,  # of an optimiser, or its shapes
    params: Any,  # or their shapes
    of_params: Any,  # where each of them lives
    rest: Sharding,  # where everything else does
) -> Any:
    """Return where each array of an optimiser's state lives. A parameter's moments live where the parameter does, or
    in the host's memory if `on_host` keeps them there."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    places = [
        (path, leaf.shape, own) for (path, leaf), own in zip(leaves, structure.flatten_up_to(of_params), strict=True)
    ]

    def visit(path: tuple[Any, ...], leaf: Any) -> Any:
        shape = leaf.codes.shape if _is_codes(leaf) else leaf.shape
        own = next((own for name, same, own in places if path[-len(name) :] == name and shape == same), rest)
        if _is_codes(leaf):
            return Codes(own, _but_last(own, len(shape)), leaf.is_squared)  # type: ignore[arg-type]
        return own.with_memory_kind(HOST) if are_on_host(state) and _moment(path, leaf) else own

    return tree_map_with_path(visit, state, is_leaf=_is_codes)


def _but_last(place: Sharding, rank: int) -> Sharding:
    """Return the same sharding without a cut along the last axis."""
    if not isinstance(place, NamedSharding):
        return place
    axes = [*place.spec, *[None] * (rank - len(place.spec))]
    return NamedSharding(place.mesh, PartitionSpec(*axes[:-1]))


def _pack(state: Any, count: jax.Array) -> Any:
    def visit(path: tuple[Any, ...], leaf: jax.Array) -> Any:
        moment = _moment(path, leaf)
        return encode(leaf, count, is_squared=moment == "nu") if moment else leaf

    return tree_map_with_path(visit, state)


def _to_device(state: Any) -> Any:
    to = memory.Space.Device
    return tree_map_with_path(lambda path, x: jax.device_put(x, to) if _moment(path, x) else x, state)


def _moment(path: tuple[Any, ...], leaf: jax.Array) -> str:
    """Return which moment of a matrix a leaf of an optax state is: mu, nu, or none ("")."""
    names = [key.name for key in path if isinstance(key, GetAttrKey) and key.name in ("mu", "nu")]
    return names[0] if names and leaf.ndim > 1 else ""


def _is_codes(node: Any) -> bool:
    return isinstance(node, Codes)


def _scale_of(is_squared: bool) -> tuple[int, int]:  # levels, octaves
    return (255, 2 * OCTAVES) if is_squared else (127, OCTAVES)


def _by_block(x: jax.Array) -> jax.Array:  # [..., n] -> [..., blocks, BLOCK]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % BLOCK)])
    return x.reshape(*x.shape[:-1], -1, BLOCK)


def _spread(scale: jax.Array, size: int) -> jax.Array:  # [..., blocks] -> [..., size]
    return jnp.repeat(scale, BLOCK, axis=-1)[..., :size]


def _fractions(shape: tuple[int, ...], count: jax.Array) -> jax.Array:
    """A number in [0, 1) for each entry. From one count to the next all of them move by the same irrational share of 1,
    so that each is spread evenly over time; those of neighbours differ by another."""
    size = 1
    for axis in shape:
        size *= axis
    phase = jax.lax.iota(jnp.uint32, size).reshape(shape) * jnp.uint32(0x9E3779B9)
    phase = phase + count.astype(jnp.uint32) * jnp.uint32(0x6A09E667)
    return (phase >> 8).astype(jnp.float32) * 2.0**-24
