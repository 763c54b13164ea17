"""The placement of a model on a mesh: which sizes must divide, where its parameters and caches live, and whether they
fit.

`mesh` decides which mesh axis a logical axis is spread over.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specserve.errors import ConfigError
from specserve.mesh import Size, check_divides, describe_mesh, fitting, free_memory, shardings
from specserve.models.cache import Cache, Pages
from specserve.models.config import ModelConfig
from specserve.models.params import ParamSpec, is_product, is_spec, num_params
from specserve.models.recurrent import State
from specserve.models.target import TargetParams


def place_target(config: ModelConfig, spec: TargetParams, mesh: Mesh) -> TargetParams:
    """The sharding of each parameter. KV heads and vocabularies that the mesh does not divide are whole on every
    device. Raises ConfigError where any other size does not divide."""
    sizes = _sizes(config)
    check_divides(mesh, sizes)
    heads = math.gcd(*(size.number for size in sizes if size.axis == "heads"))
    return shardings(spec, mesh, {"heads": heads, "kv_heads": config.num_kv_heads})


def place_cache(cache: Any, mesh: Mesh) -> Any:
    """The sharding of each array of a `Cache`: heads are spread as those of the layers are, and everything else is
    whole on every device."""

    def place(layer: Pages | State) -> Pages | State:
        if isinstance(layer, Pages):
            return jax.tree.map(lambda x: fitting(mesh, (None, "kv_heads", *[None] * (x.ndim - 2)), x.shape), layer)
        conv = tuple(fitting(mesh, (None, None, "heads"), x.shape) for x in layer.conv)
        return dataclasses.replace(
            layer, matrix=fitting(mesh, (None, "heads", None, None), layer.matrix.shape), conv=conv
        )

    return Cache(tuple(map(place, cache.layers)), cache.num_pages, cache.page_size)


def num_bytes(caches: Sequence[Cache], mesh: Mesh | None = None) -> int:
    """The bytes that caches take on each device. `caches` may also be trees of shapes."""
    places = [place_cache(cache, mesh) for cache in caches] if mesh is not None else None
    leaves = jax.tree.leaves(caches)
    return _num_bytes([leaf.shape for leaf in leaves], [leaf.dtype.itemsize for leaf in leaves], places)


def check_fits(
    what: str, spec: Any, places: Any | None, mesh: Mesh | None, dtype: str, product_dtype: str | None = None
) -> None:
    """Raises ConfigError when a device has less free memory than its part of the parameters takes. The matrices that
    rows are multiplied by (`is_product`) are counted in `product_dtype` where that is given."""
    leaves: list[tuple[Any, ParamSpec]] = jax.tree_util.tree_flatten_with_path(spec, is_leaf=is_spec)[0]
    dtypes = [product_dtype if product_dtype and is_product(path) else leaf.dtype(dtype) for path, leaf in leaves]
    itemsizes = [np.dtype(name).itemsize for name in dtypes]
    shapes = [leaf.shape for _, leaf in leaves]
    whole, needed = _num_bytes(shapes, itemsizes, None), _num_bytes(shapes, itemsizes, places)
    free = free_memory(mesh)
    if needed > free:
        spread = "all of that on one device"
        if mesh is not None:
            spread = f"{needed / 1e9:,.1f} GB of that on each device of --mesh {describe_mesh(mesh)}"
        raise ConfigError(
            f"{what}: {num_params(spec):,} parameters take {whole / 1e9:,.1f} GB, {spread}, where "
            f"{free / 1e9:,.1f} GB are free; spread them over more devices (--mesh tensor=N), or take 8-bit weights "
            "(--quantization int8)"
        )


def _num_bytes(shapes: Sequence[tuple[int, ...]], itemsizes: Sequence[int], places: Any | None) -> int:
    """The bytes of the parts that each device has. Without places it is the bytes of the whole arrays."""
    if places is not None:
        shapes = [place.shard_shape(shape) for place, shape in zip(jax.tree.leaves(places), shapes, strict=True)]
    return sum(itemsize * math.prod(shape) for itemsize, shape in zip(itemsizes, shapes, strict=True))


def _sizes(config: ModelConfig) -> list[Size]:
    kinds = [config.kind(i) for i in range(config.num_layers)]
    mixers = {kind.mixer for kind in kinds}
    found = []
    if mixers & {"attention", "latent"}:
        found.append(Size("heads", "attention heads", config.num_heads))
    if config.delta is not None:
        found.append(Size("heads", "key heads of delta layers", config.delta.num_k_heads))
        found.append(Size("heads", "value heads of delta layers", config.delta.num_v_heads))
    if config.lightning is not None:
        found.append(Size("heads", "heads of lightning layers", config.lightning.num_heads))
    if not all(kind.has_experts for kind in kinds):
        found.append(Size("mlp", "channels in an MLP", config.d_ff))
    if config.experts is not None:
        found.append(Size("experts", "experts", config.experts.num_experts))
        found.append(Size("mlp", "channels in an expert", config.experts.d_ff))
        if config.experts.shared_d_ff:
            found.append(Size("mlp", "channels in a shared expert", config.experts.shared_d_ff))
    return found
