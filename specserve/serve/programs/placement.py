"""The placement of a step's arguments and results: on one device, or spread over a mesh. Arrays that recur are sent
once."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from specserve.drafters.layers import windows_of
from specserve.kernels import paged
from specserve.kernels.large_pages import give_back_zeros
from specserve.kernels.pages import PageRows, Pages, share_out
from specserve.mesh import fitting, num_parts, program_platform, put, whole
from specserve.models.cache import Cache, WindowSizes
from specserve.models.config import ModelConfig
from specserve.models.sharding import part_shapes, place_cache
from specserve.speculative.drafter import Drafter
from specserve.speculative.sampling import TokenRows
from specserve.speculative.slot_state import SlotState, StepConfig, init_state

BYTES_OF_ID = 4  # of a page's window page


@dataclasses.dataclass(frozen=True)
class Placement:
    """On a mesh a step's slots are cut by batch, over data x expert, the data ranks; so are the pages of the caches,
    which are also cut by heads; rows of a number for each token are cut as logits are; everything else that is no
    weight is whole on every device. Without one, JAX puts all of it on its default device."""

    mesh: Mesh | None

    @property
    def whole(self) -> NamedSharding | None:
        return whole(self.mesh)

    @property
    def devices(self) -> list[Any]:
        return jax.devices()[:1] if self.mesh is None else list(self.mesh.devices.flat)

    def put(self, host: Any) -> Any:
        """A pytree of NumPy arrays, whole."""
        return put(host, self.whole)

    def once(self, host: Any) -> Any:
        """A pytree of NumPy arrays for a single call, whole. Without a mesh they stay as they are, and the call sends
        them itself, in a small part of the time that it takes to make arrays of JAX of them."""
        return host if self.mesh is None else self.put(host)

    def shape(self, *shape: int, dtype: Any = np.int32) -> Any:
        """Return the shape of an array that is whole on every device."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.whole)

    def scalar(self, value: int) -> jax.Array:
        return _put(value, np.int32, self.whole)

    def flags(self, values: tuple[bool, ...]) -> jax.Array:
        return _put(values, np.bool_, self.whole)

    def slots(self, slots: tuple[int, ...]) -> jax.Array:
        """Return the slots of a step. What it computes for them follows them: each device has a part of the batch."""
        return _put(slots, np.int32, None if self.mesh is None else self.rows(len(slots)))

    def rows(self, number: int) -> NamedSharding:
        """Return where so many rows of a batch live on a mesh."""
        assert self.mesh is not None
        return fitting(self.mesh, ("batch",), (number,))

    def with_pages(self, made: Any, shapes: SlotState) -> SlotState:
        """Return the empty state that a program has made. On a mesh it is whole. Without one the program leaves the
        pages out, and they are made here one array after another: a CPU holds no memory for zeros until they are
        written to, and never that of all of them at once."""
        if self.mesh is not None:
            return made
        parts, structure = jax.tree.flatten(shapes, is_leaf=is_paged)
        others = map(_given_back, made)
        return structure.unflatten(jax.tree.map(_zeros, part) if is_paged(part) else next(others) for part in parts)

    def shapes(self, make: Callable[[], SlotState]) -> SlotState:
        """The shapes of the arrays of such a state, and where they live."""
        shapes, places = jax.eval_shape(make), self.state(make)
        if places is None:
            return shapes

        def placed(shape: jax.ShapeDtypeStruct, place: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)

        return jax.tree.map(placed, shapes, places)

    def state(self, make: Callable[[], SlotState]) -> SlotState | None:
        """Return where the arrays of such a state live."""
        if self.mesh is None:
            return None
        mesh = self.mesh

        def place(leaf: Any) -> Any:
            return _place(leaf, mesh) if _is_cut(leaf) else self.whole

        return jax.tree.map(place, jax.eval_shape(make), is_leaf=_is_cut)


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return _given_back(jnp.zeros(shape.shape, shape.dtype))


def _given_back(array: jax.Array) -> jax.Array:
    """Return an array for whose zeros a CPU holds no memory, where it has no other numbers."""
    if program_platform() == "cpu":
        give_back_zeros(array.block_until_ready().unsafe_buffer_pointer(), array.nbytes)
    return array


def is_paged(part: Any) -> bool:
    """Return whether a part of a state is the pages of a layer, every array of which begins as zeros."""
    return isinstance(part, Pages)


def _is_cut(leaf: Any) -> bool:
    return isinstance(leaf, Cache | PageRows | TokenRows)


def _place(leaf: Any, mesh: Mesh) -> Any:
    """Return where the arrays live of a part of the state that a mesh cuts."""
    if not isinstance(leaf, TokenRows):
        return place_cache(leaf, mesh)
    bias, seen = (fitting(mesh, (None, "vocab"), x.shape) for x in (leaf.bias, leaf.seen))
    return TokenRows(bias, seen, whole(mesh))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def _put(value: Any, dtype: type, place: NamedSharding | None) -> jax.Array:
    """The same slots run step after step: their array is made once, and a step then sends nothing to the device."""
    return put(np.asarray(value, dtype), place)


def bytes_per_token(target: ModelConfig, drafter: Drafter | None, mesh: Mesh | None = None) -> int:
    """Return what a token takes in the paged caches of both, on each device of its data rank. Recurrent layers take
    nothing."""
    return bytes_seen(target, drafter, 1, mesh)


def bytes_seen(target: ModelConfig, drafter: Drafter | None, context: int, mesh: Mesh | None = None) -> int:
    """Return what the tokens take in the paged caches of both which the next token after so many sees: in layers with
    a window of the target those of the window alone."""
    windows = tuple((window, window) for window in sorted({*windows_of(target)}) if 0 < window < context)
    config = StepConfig(target, drafter, max_depth=0)
    cut, _ = state_shapes(config, num_parts(mesh, "batch"), 0, context, 1, 1, windows)
    caches = [dataclasses.replace(part, window_pages={}) for part in cut if isinstance(part, Cache)]
    return _num_bytes(caches, mesh)


def bytes_per_page(target: ModelConfig, drafter: Drafter | None, page_size: int, mesh: Mesh | None = None) -> int:
    """Return what a page takes on each device of its data rank, with what a drafter keeps of each page beside its
    entries."""
    config = StepConfig(target, drafter, max_depth=0)
    one, nothing = (state_bytes(config, mesh, 0, number, page_size=page_size, max_pages=1) for number in (1, 0))
    return one - nothing


def pages_in(
    num_bytes: int,
    target: ModelConfig,
    drafter: Drafter | None,
    mesh: Mesh | None,
    *,
    page_size: int,
    windows: WindowSizes,
    most: int,
) -> int:
    """Return how many pages of a data rank fit into so many bytes of each of its devices; `most` where no layer keeps
    all tokens, so that further pages take nothing. Layers with a window have a page for each of them, but never more
    than `windows` say: so many pages take the least of what they take with any of these numbers as they are."""
    config, by_number = StepConfig(target, drafter, max_depth=0), sorted(windows, key=lambda each: each[1])
    nothing, found = state_bytes(config, mesh, 0, 0, page_size=page_size, max_pages=1), 0
    for end in range(len(windows) + 1):
        sizes: dict[str, Any] = {"page_size": page_size, "max_pages": 1, "windows": tuple(by_number[:end])}
        fixed, with_one = (state_bytes(config, mesh, 0, number, **sizes) for number in (0, 1))
        left, each = num_bytes - (fixed - nothing), with_one - fixed
        fit = left // each if each > BYTES_OF_ID * end else most if left >= most * each else 0
        found = max(found, fit)
    return found


def state_bytes(
    config: StepConfig,
    mesh: Mesh | None,
    num_slots: int,
    num_pages: int,  # of each data rank
    *,
    page_size: int,
    max_pages: int,
    windows: WindowSizes = (),
) -> int:
    """Return the bytes that the state of such a server takes on each device."""
    cut, others = state_shapes(config, num_parts(mesh, "batch"), num_slots, num_pages, page_size, max_pages, windows)
    return _num_bytes(cut, mesh) + _num_bytes(others, None)


def _num_bytes(parts: Sequence[Any], mesh: Mesh | None) -> int:
    """The bytes that parts of a state, of arrays or their shapes, take on each device."""
    leaves = jax.tree.leaves(parts)
    shapes = part_shapes([leaf.shape for leaf in leaves], mesh and [_place(part, mesh) for part in parts])
    return sum(math.prod(shape) * leaf.dtype.itemsize for shape, leaf in zip(shapes, leaves, strict=True))


@functools.lru_cache(maxsize=256)  # many meshes are asked about one state
def state_shapes(
    config: StepConfig,
    num_ranks: int,
    num_slots: int,
    num_pages: int,
    page_size: int,
    max_pages: int,
    windows: WindowSizes = (),
) -> tuple[tuple[Cache | PageRows | TokenRows, ...], tuple[jax.ShapeDtypeStruct, ...]]:
    """The parts that a mesh cuts of a state with `num_pages` for each data rank, of shapes in place of arrays, and the
    shapes of everything else."""
    sizes = {"num_slots": num_slots, "page_size": page_size, "max_pages": max_pages, "num_ranks": num_ranks}
    make = functools.partial(init_state, config, num_pages=num_ranks * num_pages, windows=windows, **sizes)
    leaves = jax.tree.leaves(jax.eval_shape(make), is_leaf=_is_cut)
    return tuple(filter(_is_cut, leaves)), tuple(leaf for leaf in leaves if not _is_cut(leaf))


def reads_by_page(target: ModelConfig, num_pages: int, page_size: int, mesh: Mesh | None = None) -> bool:
    """Return whether attention reads the pages that a sequence has, however many its table names (`kernels.paged`)."""
    cache = jax.eval_shape(lambda: Cache.zeros(target, num_slots=1, num_pages=num_pages, page_size=page_size))
    cache = share_out(cache, num_parts(mesh, "batch"))
    return paged.reads_by_page([layer for layer in cache.layers if isinstance(layer, Pages)], mesh)
