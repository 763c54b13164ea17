"""Layers that repeat, as one array for each parameter of a turn.

A program that names every layer is compiled for every layer: minutes, of a deep target on an accelerator. So what runs
over rows alone loops over equal layers there (`stack_layers`). A pattern of layers, such as five with a window and one
without, is one turn of the loop. On CPUs separate layers are as fast to compile, and faster to run.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from specserve.mesh import program_platform
from specserve.models.config import ModelConfig
from specserve.pytree import pytree

Params = TypeVar("Params", bound=Any)


@pytree
class Stack:
    """Layers that repeat: turn after turn the layers of one pattern."""

    layers: tuple[Any, ...]  # of the pattern; every array is [turn, ...]

    @property
    def num_turns(self) -> int:
        """The number of times that the pattern repeats."""
        return jax.tree.leaves(self.layers)[0].shape[0]

    @property
    def num_layers(self) -> int:
        """The number of layers, all turns together."""
        return len(self.layers) * self.num_turns

    def __iter__(self) -> Iterator[Any]:
        """Give the layers one by one, in order, each cut out of the stack."""
        for turn in range(self.num_turns):
            for layer in self.layers:
                yield jax.tree.map(lambda leaf, at=turn: jax.lax.index_in_dim(leaf, at, keepdims=False), layer)


def each_layer(layers: Sequence[Any]) -> Iterator[Any]:
    """Give the layers of a target one by one, those in stacks too."""
    for part in layers:
        if isinstance(part, Stack):
            yield from part
        else:
            yield part


def last_layer(layers: Sequence[Any]) -> Any:
    """Return the last layer of a target."""
    last = layers[-1]
    if not isinstance(last, Stack):
        return last
    return jax.tree.map(lambda leaf: leaf[-1], last.layers[-1])


def stack_layers(params: Params, config: ModelConfig) -> Params:
    """Return a target's parameters with a `Stack` in place of the layers that repeat. The separate layers' arrays are
    given up one after another, so that there is never more than one array of a stack beside the whole. Arrays may be
    shapes alone."""
    layers, stacked, first = params.layers, list[Any](), 0
    for period, turns in runs([_key(config, i, layer) for i, layer in enumerate(layers)]):
        own = layers[first : first + period * turns]
        first += period * turns
        stacked += own if turns == 1 else [Stack(tuple(_join(own[place::period]) for place in range(period)))]
    return dataclasses.replace(params, layers=tuple(stacked))


def looped(params: Params, config: ModelConfig) -> Params:
    """Return the parameters stacked where that pays: on accelerators."""
    if program_platform() == "cpu":
        return params
    return stack_layers(params, config)


def runs(keys: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Cut a sequence into patterns that repeat: the length and the number of turns of each, from the first to the last.
    From each place on it is the pattern that covers most, and the shortest of those. For example the sequence ABBABBAC
    gives [(3, 2), (1, 1), (1, 1)]."""
    found, first = list[tuple[int, int]](), 0
    while first < len(keys):
        best = (1, 1)
        for period in range(1, (len(keys) - first) // 2 + 1):
            pattern, turns = keys[first : first + period], 1
            while keys[first + turns * period : first + (turns + 1) * period] == pattern:
                turns += 1
            if turns > 1 and period * turns > best[0] * best[1]:
                best = (period, turns)
        found.append(best)
        first += best[0] * best[1]
    return found


def _key(config: ModelConfig, i: int, layer: Any) -> Hashable:
    """Return all of a layer that must be equal where one program runs several of them."""
    leaves, structure = jax.tree.flatten(layer)
    kind = dataclasses.replace(config.kind(i), slope_scale=1.0)  # a number, which may be another in each turn
    return kind, structure, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)


def _join(layers: Sequence[Any]) -> Any:
    """Stack the arrays of equal layers."""
    each, structure = [jax.tree.leaves(layer) for layer in layers], jax.tree.structure(layers[0])
    return jax.tree.unflatten(structure, [_stack(leaves) for leaves in zip(*each, strict=True)])


def _stack(leaves: Sequence[Any]) -> Any:
    place = _of_turns(leaves[0].sharding)
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype, sharding=place)
    stacked = jax.jit(lambda leaves: jnp.stack(leaves), out_shardings=place)(list(leaves)).block_until_ready()
    for leaf in leaves:
        leaf.delete()
    return stacked


def _of_turns(place: Sharding | None) -> Sharding | None:
    """Return where a stack of arrays lives whose turns live at a place: each device has its part of every turn."""
    if not isinstance(place, NamedSharding):
        return place
    return NamedSharding(place.mesh, PartitionSpec(None, *place.spec), memory_kind=place.memory_kind)
