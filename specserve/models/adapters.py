"""LoRA adapters of a target (Hu et al. 2021, arXiv 2106.09685): the matrices that may have one, and the arrays of
several adapters side by side, of which each row of a step uses one or none.

Matrices of dense attention and of dense MLPs may be adapted. Every one of them has room for as many pairs as there may
be adapters, of the largest rank that any may have. What an adapter lacks is zeros.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specserve.errors import CheckpointError
from specserve.kernels.matmul import AdaptedMatrix
from specserve.models.config import ModelConfig
from specserve.models.layers import Mlp
from specserve.models.mixers.attention import Attention
from specserve.models.params import ParamSpec
from specserve.models.target import TargetParams, target_spec
from specserve.pytree import pytree


class Pair(Protocol):
    """The interface of an adapter's part for a matrix W [d_out, d_in], as it is read: scale * B A is added to W."""

    @property
    def a(self) -> Any: ...  # [rank, d_in], of any float dtype

    @property
    def b(self) -> Any: ...  # [d_out, rank]

    @property
    def scale(self) -> float: ...


Adapter = Mapping[str, Pair]  # by the checkpoint's names of the matrices
# the products that are made as one on CPUs, in the order of their outputs (`fuse_attention`, `fuse_mlp`)
_FUSED = {"q": ("q", "k", "v"), "gate": ("gate", "up")}
_MATRICES = {"attention": ("q", "k", "v", "o", "gate"), "mlp": ("gate", "up", "down")}


@pytree
class Pairs:
    """The pairs of one matrix, or of several that are fused: of these each has its own part of the ranks."""

    a: Any  # [adapter, d_in, rank], in the layout that products take
    b: Any  # [adapter, rank, d_out]


Adapters = tuple[dict[str, Pairs], ...]  # by layer, then by block and matrix: "attention.q"


@dataclass(frozen=True)
class _Place:
    """A parameter that may be adapted."""

    layer: int
    block: str
    matrix: str
    spec: ParamSpec

    @property
    def outputs(self) -> np.ndarray:
        """The outputs of the checkpoint's tensor that it has."""
        own = np.arange(self.spec.shape[1])
        return self.spec.part.places(own) if self.spec.part else own


def _places(config: ModelConfig) -> Iterator[_Place]:
    for i, layer in enumerate(target_spec(config).layers):
        for block, kind in (("attention", Attention), ("mlp", Mlp)):
            own: Any = getattr(layer, block)
            if isinstance(own, kind):
                specs = ((matrix, getattr(own, matrix)) for matrix in _MATRICES[block])
                yield from (_Place(i, block, matrix, spec) for matrix, spec in specs if spec is not None)


def adaptable(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the matrices of a target that may be adapted, by the checkpoint's names, with the shape [d_out, d_in] that
    each has there."""
    return {place.spec.name: place.spec.stored_shape for place in _places(config)}  # type: ignore[misc]


def bytes_of(config: ModelConfig, max_loras: int, max_rank: int) -> int:
    """Return the bytes of the pairs of so many adapters of a target, of this rank each."""
    places = (place.spec.shape for place in _places(config))
    return sum(map(sum, places)) * max_rank * max_loras * jnp.dtype(config.dtype).itemsize


def check_adapter(config: ModelConfig, adapter: Adapter, max_rank: int, where: str) -> None:
    """Check that an adapter is one of this target, of a rank that there is room for. Raises CheckpointError."""
    shapes = adaptable(config)
    if not shapes:
        raise CheckpointError(f"{where}: no matrix of this target can be adapted: it has no dense attention or MLP")
    for name, pair in adapter.items():
        if name not in shapes:
            known = ", ".join(sorted({known.split(".")[-2] for known in shapes}))
            raise CheckpointError(
                f"{where}: it adapts {name}, which this server cannot; it adapts {known} of layers 0 to "
                f"{config.num_layers - 1}, where these are dense"
            )
        a, b = (np.asarray(side, np.float32) for side in (pair.a, pair.b))
        rank, (d_out, d_in) = len(a), shapes[name]
        if a.shape != (rank, d_in) or b.shape != (d_out, rank):
            raise CheckpointError(
                f"{where}: the pair of {name} has shapes {list(a.shape)} and {list(b.shape)}; expected [{rank}, "
                f"{d_in}] and [{d_out}, {rank}] for this target; it is an adapter of another one"
            )
        if rank > max_rank:
            raise CheckpointError(f"{where}: {name} has rank {rank}, over --max-lora-rank {max_rank}; raise that")
        if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(pair.scale)):
            raise CheckpointError(f"{where}: the pair of {name} has values that are not numbers")


def side_by_side(
    params: TargetParams, config: ModelConfig, adapters: Sequence[Adapter | None], max_rank: int
) -> Iterator[tuple[int, str, np.ndarray, np.ndarray]]:
    """Yield the layer and the name of each matrix of `params` that may be adapted, and the pairs of all adapters, None
    of which is zeros: float32 arrays [adapter, d_in, rank] and [adapter, rank, d_out], as `Pairs` has them."""
    by_matrix = {(place.layer, place.block, place.matrix): place for place in _places(config)}
    for layer, block, matrix in by_matrix:
        own: Any = getattr(params.layers[layer], block)
        if getattr(own, matrix) is None:
            continue  # it is a part of a fused one
        members = [by_matrix[layer, block, matrix]]
        for other in _FUSED.get(matrix, ())[1:]:
            if (layer, block, other) in by_matrix and getattr(own, other) is None:
                members.append(by_matrix[layer, block, other])
        widths = [place.spec.shape[1] for place in members]
        a = np.zeros((len(adapters), members[0].spec.shape[0], max_rank * len(members)), np.float32)
        b = np.zeros((len(adapters), max_rank * len(members), sum(widths)), np.float32)
        for i, place in enumerate(members):
            first, start = i * max_rank, sum(widths[:i])
            for number, adapter in enumerate(adapters):
                if adapter is None or place.spec.name not in adapter:
                    continue
                pair = adapter[place.spec.name]
                narrow, wide = (np.asarray(side, np.float32) for side in (pair.a, pair.b))
                ranks = slice(first, first + len(narrow))
                a[number, :, ranks] = narrow.T
                b[number, ranks, start : start + widths[i]] = wide[place.outputs].T * np.float32(pair.scale)
        yield layer, f"{block}.{matrix}", a, b


def adapted(params: TargetParams, adapters: Adapters, pair_ids: jax.Array) -> TargetParams:
    """Return the parameters of which each row uses the adapter of its number in `pair_ids`, or none where that is -1.
    `pair_ids` is int32, shaped as the tokens that run through the target."""
    layers = list[Any](params.layers)
    for i, own in enumerate(adapters):
        for name, pairs in own.items():
            block, matrix = name.split(".")
            before = getattr(layers[i], block)
            after = AdaptedMatrix(getattr(before, matrix), pairs.a, pairs.b, pair_ids)
            layers[i] = dataclasses.replace(layers[i], **{block: dataclasses.replace(before, **{matrix: after})})
    return dataclasses.replace(params, layers=tuple(layers))
