"""Matrices rounded to few bits where they lie: each device of a mesh has its own part, and the scales of that."""

import dataclasses

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from specserve.kernels.matmul import QuantizedMatrix, Rounded, quantize


def place_of_scale(place: Sharding | None, ndim: int) -> Sharding | None:
    """Return where the scales of a quantised matrix live: as its values do, but whole along the inputs, of which there
    are few."""
    if not isinstance(place, NamedSharding):
        return place
    axes = [*place.spec, *[None] * (ndim - len(place.spec))]
    axes[-2] = None
    return NamedSharding(place.mesh, PartitionSpec(*axes))


def round_at(matrix: jax.Array, to: Rounded, place: Sharding) -> QuantizedMatrix:
    """Round a matrix that lies at `place`. Scales of parts that are not made of whole blocks are whole along the
    inputs; XLA alone would give every device all of such a matrix."""
    found = quantize(matrix, to)
    if not isinstance(place, NamedSharding):
        return found
    of_scale: Sharding | None = place
    if place.shard_shape(matrix.shape)[-2] % found.block:
        of_scale = place_of_scale(place, matrix.ndim)
    offset = None if found.offset is None else of_scale
    places = dataclasses.replace(found, values=place, scale=of_scale, offset=offset)  # type: ignore[arg-type]
    return jax.lax.with_sharding_constraint(found, places)
