"""The placement of a model on a mesh: which sizes must divide, where its parameters and caches live, and whether they
fit.

`mesh` decides which mesh axis a logical axis is spread over.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from specserve.errors import ConfigError
from specserve.kernels.pages import PageRows, Pages
from specserve.mesh import (
    Size,
    check_divides,
    describe_mesh,
    fitting,
    free_memory,
    num_parts,
    shardings,
    whole,
)
from specserve.models.config import ModelConfig
from specserve.models.mixers.recurrent import State
from specserve.models.params import ParamSpec, is_product, is_spec, num_params
from specserve.models.target import TargetParams


def place_target(config: ModelConfig, spec: TargetParams, mesh: Mesh) -> TargetParams:
    """The sharding of each parameter. KV heads and vocabularies that the mesh does not divide are whole on every
    device. Raises ConfigError where any other size does not divide."""
    check_divides(mesh, _sizes(config))
    return place_whole_heads(config, spec, mesh)


def place_whole_heads(config: ModelConfig, spec: TargetParams, mesh: Mesh) -> TargetParams:
    """The same, where anything that the mesh does not divide is whole: no head is cut in any layer."""
    heads = math.gcd(*(size.number for size in _sizes(config) if size.axis == "heads"))
    return shardings(spec, mesh, {"heads": heads, "kv_heads": math.gcd(*_kv_heads(config))})


def _kv_heads(config: ModelConfig) -> set[int]:
    """The numbers of KV heads that layers have."""
    return {config.of(config.kind(i)).num_kv_heads for i in range(config.num_layers)}


def spread_kv_heads(config: ModelConfig, mesh: Mesh | AbstractMesh | None) -> ModelConfig:
    """Return the config with KV heads repeated, so that each device has one of its own, where they are fewer than the
    devices that share them out: else each device would hold and read the keys and values of all of them, of which its
    query heads see one. The config stays as it is where a device would have query heads of several KV heads."""
    devices, heads, each = num_parts(mesh, "kv_heads"), config.num_kv_heads, _kv_heads(config)
    has_attention = any(config.kind(i).mixer == "attention" for i in range(config.num_layers))
    divides = devices > heads and config.num_heads % devices == 0
    divides &= all(max(devices, own) % min(devices, own) == 0 for own in each)
    if not (has_attention and divides) or config.qk_norm == "all":  # with a weight for each channel of each head
        return config
    return dataclasses.replace(config, num_kv_heads=devices, kv_repeats=devices // heads)


def place_cache(cache: Any, mesh: Mesh) -> Any:
    """The sharding of each array of a `Cache`, or of `PageRows`: pages that data ranks share out are cut over these,
    heads are spread as those of the layers are, and everything else is whole on every device."""

    def of_page(pages: Pages | PageRows, *axes: str | None) -> Any:
        first = "pages" if pages.num_ranks > 1 else None
        return jax.tree.map(lambda x: fitting(mesh, (first, *axes, *[None] * (x.ndim - 1 - len(axes))), x.shape), pages)

    if isinstance(cache, PageRows):
        return of_page(cache)

    def place(layer: Pages | State | None) -> Pages | State | None:
        if isinstance(layer, Pages):
            return of_page(layer, "kv_heads")
        if layer is None:
            return None
        conv = tuple(fitting(mesh, (None, None, "heads"), x.shape) for x in layer.conv)
        written = layer.matrix
        if written is not None:
            written = fitting(mesh, (None, "heads", None, None), written.shape)
        return dataclasses.replace(layer, matrix=written, conv=conv)

    kept = tuple(state and place(state) for state in cache.kept)
    window_pages = dict.fromkeys(cache.window_pages, whole(mesh))
    return dataclasses.replace(cache, layers=tuple(map(place, cache.layers)), kept=kept, window_pages=window_pages)


def part_shapes(shapes: Sequence[tuple[int, ...]], places: Any | None) -> Sequence[tuple[int, ...]]:
    """The shapes of the parts that each device has of arrays at `places`. Without places they are whole."""
    if places is None:
        return shapes
    return [place.shard_shape(shape) for place, shape in zip(jax.tree.leaves(places), shapes, strict=True)]


@dataclass(frozen=True)
class Held:
    """The part of one parameter that each device holds."""

    field: str  # of the parameters' outermost dataclass
    spec: ParamSpec  # of the whole parameter
    shape: tuple[int, ...]
    num_bytes: int
    is_product: bool  # see `params.is_product`

    @property
    def size(self) -> int:
        """The count of its numbers."""
        return math.prod(self.shape)

    @property
    def scale_bytes(self) -> int:
        """The bytes of the scales of a matrix in 8 bits: a float32 for each output."""
        if not self.is_product:
            return 0
        return 4 * self.size // self.shape[-2]

    @property
    def is_expert(self) -> bool:
        """True for stacked experts, of which a token reads those that it chooses."""
        return bool(self.spec.axes) and self.spec.axes[0] == "experts"


def held_by_each(tree: Any, dtype: str, places: Any = None, product_dtype: str | None = None) -> tuple[Held, ...]:
    """Count what each device holds of a spec tree whose parameters lie at `places`, or are whole on one device. The
    matrices that rows are multiplied by are counted in `product_dtype` where that is given."""
    leaves: list[tuple[Any, ParamSpec]] = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_spec)[0]
    found = []
    for (path, spec), shape in zip(leaves, part_shapes([spec.shape for _, spec in leaves], places), strict=True):
        stored = spec.dtype(dtype)
        if product_dtype and is_product(path):
            stored = product_dtype
        num_bytes = math.prod(shape) * np.dtype(stored).itemsize
        found.append(Held(jax.tree_util.keystr(path[:1], simple=True), spec, shape, num_bytes, is_product(path)))
    return tuple(found)


def total_bytes(held: Iterable[Held]) -> int:
    """Return the bytes of these parameters on each device."""
    return sum(each.num_bytes for each in held)


def check_fits(
    what: str,
    spec: Any,
    places: Any | None,
    mesh: Mesh | None,
    dtype: str,
    product_dtype: str | None = None,
    *,
    share: float = 1.0,  # of that count, what matrices take
) -> None:
    """Raises ConfigError when a device has less free memory than its part of the parameters takes, as `held_by_each`
    counts them."""

    def counted(at: Any | None) -> float:
        held = held_by_each(spec, dtype, at, product_dtype)
        return sum(each.num_bytes * (share if each.is_product else 1) for each in held)

    whole, needed = counted(None), counted(places)
    free = free_memory(mesh)
    if needed > free:
        spread = "all of that on one device"
        if mesh is not None:
            spread = f"{needed / 1e9:,.1f} GB of that on each device of --mesh {describe_mesh(mesh)}"
        raise ConfigError(
            f"{what}: {num_params(spec):,} parameters take {whole / 1e9:,.1f} GB, {spread}, where "
            f"{free / 1e9:,.1f} GB are free; spread them over more devices (--mesh tensor=N)"
            f"{'' if product_dtype == 'int8' else ', or take 8-bit weights (--quantization int8)'}"
        )


def _sizes(config: ModelConfig) -> list[Size]:
    kinds = [config.kind(i) for i in range(config.num_layers)]
    mixers = {kind.mixer for kind in kinds}
    found = [Size("embed", "channels", config.d_model)]
    if mixers & {"attention", "latent"}:
        found.append(Size("heads", "attention heads", config.num_heads))
    if config.delta is not None:
        found.append(Size("heads", "key heads of delta layers", config.delta.num_k_heads))
        found.append(Size("heads", "value heads of delta layers", config.delta.num_v_heads))
    if config.lightning is not None:
        found.append(Size("heads", "heads of lightning layers", config.lightning.num_heads))
    if config.mamba is not None:
        found.append(Size("heads", "heads of Mamba layers", config.mamba.num_heads))
        found.append(Size("heads", "groups of heads of Mamba layers", config.mamba.num_groups))
    if any(kind.has_mlp and not kind.has_experts for kind in kinds):
        found.append(Size("mlp", "channels in an MLP", config.d_ff))
    if config.experts is not None:
        found.append(Size("experts", "experts", config.experts.num_experts))
        found.append(Size("mlp", "channels in an expert", config.experts.d_ff))
        if config.experts.shared_d_ff:
            found.append(Size("mlp", "channels in a shared expert", config.experts.shared_d_ff))
    return found
