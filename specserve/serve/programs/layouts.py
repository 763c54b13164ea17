"""The weights as compiled steps take them. On CPU the layout of a matrix decides how fast a product with few
rows is."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.kernels import native
from specserve.kernels.matmul import QuantizedMatrix, Weight, block, dequantize, matmul, pack
from specserve.kernels.panels import four_bits
from specserve.mesh import whole
from specserve.models.config import ModelConfig
from specserve.models.params import PRODUCTS, is_product
from specserve.models.served import change_matrices, is_on_one_cpu, served
from specserve.models.target import TargetParams
from specserve.serve.programs.calls import shape_of
from specserve.speculative.drafter import DraftWeights, Weights

if TYPE_CHECKING:
    from specserve.models.adapters import Adapter

logger = logging.getLogger(__name__)

Params = TypeVar("Params")
Arrange = Callable[[Any], Any]  # of a tree of parameters

FEW_ROWS = 8
BLOCK_COLUMNS = 64
COPIED_BYTES = 2**30  # of weights; where they are larger, memory for a second copy of them is dearer than time
TIMED_BYTES = 2**28  # of matrices that the choice is timed on: more than caches hold
TIMED_ROUNDS = 5


@dataclass(frozen=True)
class _OnHost:
    """An array in the host's memory; programs are still compiled for its shape."""

    values: np.ndarray
    sharding: Sharding  # where it was

    @classmethod
    def of(cls, array: "jax.Array | _OnHost") -> "_OnHost":
        return cls(np.array(array), array.sharding) if isinstance(array, jax.Array) else array

    def put(self: "jax.Array | _OnHost") -> jax.Array:
        return self if isinstance(self, jax.Array) else jax.device_put(self.values, self.sharding)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype


@dataclass(frozen=True)
class Layouts:
    """The weights as programs take them, by the rows of a step: the nodes of all its sequences together. Layouts that
    would be alike are the same object."""

    one: Weights  # steps of one row
    few: Weights  # up to FEW_ROWS
    many: Weights  # and more: prompts too
    arrange: tuple[Arrange, Arrange, Arrange]  # the functions that made each of them of parameters as they are served
    mesh: Mesh | None = None

    def with_weights(self, target: TargetParams | None, head: Head | None) -> "Layouts":
        """Return the layouts of other weights, of which None are the same ones."""
        params = None if target is None else served(target, self.mesh)
        draft = None if head is None else _draft_weights(head, self.mesh)

        def change(weights: Weights, arrange: Arrange) -> Weights:
            return Weights(
                weights.target if params is None else arrange(params),
                weights.draft if draft is None else arrange(draft),
                weights.adapters,
            )

        return self._changed(change)

    def with_adapters(self, config: ModelConfig, adapters: "Sequence[Adapter | None]", max_rank: int) -> "Layouts":
        """Return the layouts of the same weights with these adapters of the target, which has this config; None: the
        place of one. Their arrays have the same shapes whatever they are."""
        from specserve.models.adapters import Pairs, side_by_side  # no other server needs it

        is_packed = is_on_one_cpu(self.mesh) and native.is_available()

        def put(pairs: np.ndarray) -> Any:
            if is_packed:
                return pack(pairs, narrows=False)
            return jax.device_put(pairs.astype(jnp.dtype(config.dtype)), whole(self.mesh))

        made: tuple[dict[str, Pairs], ...] = tuple({} for _ in range(config.num_layers))
        for layer, name, a, b in side_by_side(self.many.target, config, adapters, max_rank):
            made[layer][name] = Pairs(put(a), put(b))
        return self._changed(lambda weights, _arrange: dataclasses.replace(weights, adapters=made))

    def on_host(self) -> "Layouts":
        """Return the same weights in the host's memory, with what is needed to bring them back. On one CPU they are
        there already, in large pages."""
        if is_on_one_cpu(self.mesh):
            return self
        return self._changed(lambda weights, _arrange: jax.tree.map(_OnHost.of, weights))

    def on_devices(self) -> "Layouts":
        """Return weights that were `on_host` where they were before."""
        return self._changed(lambda weights, _arrange: jax.tree.map(_OnHost.put, weights))

    def described(self) -> "Layouts":
        """Return the same layouts of shapes in place of arrays."""
        return self._changed(lambda weights, _arrange: jax.tree.map(shape_of, weights))

    def _changed(self, change: Callable[[Weights, Arrange], Weights]) -> "Layouts":
        """Return layouts of which as many are alike."""
        made: dict[int, Weights] = {}
        for weights, arrange in zip((self.one, self.few, self.many), self.arrange, strict=True):
            if id(weights) not in made:
                made[id(weights)] = change(weights, arrange)
        one, few, many = (made[id(weights)] for weights in (self.one, self.few, self.many))
        return dataclasses.replace(self, one=one, few=few, many=many)

    def forms(self) -> Any:
        """Return the shapes, dtypes and layouts of all arrays; programs are compiled for them."""
        found = [jax.tree.flatten(jax.tree.map(jax.typeof, weights)) for weights in self.distinct]
        return [(structure, tuple(map(str, leaves))) for leaves, structure in found]

    def number(self, weights: Weights) -> int:
        """Return the index of these weights among `distinct`. Layouts with another head have the same numbers, and the
        same programs."""
        return next(i for i, each in enumerate(self.distinct) if each is weights)

    def for_rows(self, num_rows: int) -> Weights:
        return self.one if num_rows == 1 else self.few if num_rows <= FEW_ROWS else self.many

    @property
    def distinct(self) -> tuple[Weights, ...]:
        return tuple({id(weights): weights for weights in (self.one, self.few, self.many)}.values())


def make_layouts(target: Target, head: Head | None, mesh: Mesh | None = None) -> Layouts:
    """Arrange the parameters as the steps take them (`models.served`), which on one CPU is a layout for any number of
    rows. Where the native kernels were not built there, XLA's products get the layouts that are fastest here for one
    row and for a few."""
    plain = Weights(served(target.params, mesh), _draft_weights(head, mesh) if head is not None else None)
    as_served: Arrange = _as_served
    is_cut = is_on_one_cpu(mesh) and not native.is_available()
    if not is_cut or sum(leaf.nbytes for leaf in jax.tree.leaves(plain)) > COPIED_BYTES:
        return Layouts(plain, plain, plain, (as_served, as_served, as_served), mesh)
    made: dict[int, tuple[Weights, Arrange]] = {0: (plain, as_served)}

    def cut(columns: int) -> tuple[Weights, Arrange]:
        if columns not in made:
            change = functools.partial(change_matrices, change=functools.partial(_cut, columns=columns), names=PRODUCTS)
            made[columns] = Weights(change(plain.target), change(plain.draft)), change
        return made[columns]

    (one, for_one), (few, for_few) = (cut(_fastest_columns(plain, rows)) for rows in (1, FEW_ROWS // 2))
    return Layouts(one, few, plain, (for_one, for_few, as_served), mesh)


def _draft_weights(head: Head, mesh: Mesh | None) -> DraftWeights:
    """The head's weights, with matrices of 8 bits as wider numbers of the same values where that is quicker, and those
    of 4 where no kernel takes them: a head is small, so what counts is time."""
    draft = head.weights(whole(mesh))
    params = draft.params
    if is_on_one_cpu(mesh) and not native.is_quick_with_bytes():
        params = change_matrices(params, change=_widened, names=PRODUCTS)
    return dataclasses.replace(draft, params=served(params, mesh))


def _widened(leaf: jax.Array | QuantizedMatrix) -> jax.Array | QuantizedMatrix:
    if not isinstance(leaf, QuantizedMatrix):
        return leaf
    if not native.is_available():
        return dequantize(leaf, jnp.dtype(jnp.float32))
    if leaf.values.dtype == jnp.int8 and four_bits(np.asarray(leaf.values), leaf.block):
        return leaf
    return dataclasses.replace(leaf, values=leaf.values.astype(jnp.bfloat16))  # 16 bits hold 8 exactly


def _as_served(params: Params) -> Params:
    return params


# How a matrix may be cut: whole (0), in two halves so that a batched product takes two cores, or in narrow blocks.
_HALVES = -1
_CANDIDATES: tuple[int, ...] = (0, _HALVES, BLOCK_COLUMNS)


def _cut(leaf: jax.Array | QuantizedMatrix, *, columns: int) -> Weight:
    if isinstance(leaf, QuantizedMatrix) or leaf.ndim != 2 or not columns:
        return leaf
    return block(leaf, leaf.shape[1] // 2 if columns == _HALVES else columns)


def _fastest_columns(weights: Weights, num_rows: int) -> int:
    """Return the width of blocks that multiplies so many rows fastest on this machine. It is timed, because processors
    differ by a factor of two either way. The candidates take turns, and the least disturbed round of each counts."""
    matrices: list[jax.Array] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights.target):
        if is_product(path) and leaf.ndim == 2 and sum(m.nbytes for m in matrices) < TIMED_BYTES:
            matrices.append(leaf)
    run = jax.jit(lambda cut: [matmul(jnp.ones((num_rows, matrix.shape[0]), jnp.float32), matrix) for matrix in cut])
    least = dict.fromkeys(_CANDIDATES, float("inf"))
    cuts = {columns: [_cut(matrix, columns=columns) for matrix in matrices] for columns in _CANDIDATES}
    for turn in range(1 + TIMED_ROUNDS):  # the first compiles
        for columns, cut in cuts.items():
            begin = time.perf_counter()
            jax.block_until_ready(run(cut))
            if turn:
                least[columns] = min(least[columns], time.perf_counter() - begin)
    best = min(least, key=least.__getitem__)
    names = {0: "plain", _HALVES: "halves"}
    logger.info(
        "XLA's products of %d rows: %s",
        num_rows,
        ", ".join(f"{names.get(columns, f'{columns} columns')} {t * 1e3:.1f} ms" for columns, t in least.items()),
    )
    return best
