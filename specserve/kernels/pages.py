"""Pages of keys and values: how they are laid out, and `write_pages`, which commits new ones. Arrays in, arrays out.

`kernels.paged` reads what is written here. The layout is the backend's choice, and nothing outside of this room needs
to know it.

Over a mesh pages may be shared out over its data ranks, the parts into which it cuts a batch: with R of them, rank r
has the r-th part of the pages on its own devices, and the r-th part of a batch's rows names pages of that part alone.
Page ids count through all ranks. Each rank reads and writes its own part (`in_ranks`), so no page ever travels.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specserve.kernels import native
from specserve.kernels.gather import put_each, take_each
from specserve.mesh import (
    fitting_partition,
    over_parts,
    part_index,
    partition,
    program_platform,
    sum_parts,
    traced_mesh,
)
from specserve.pytree import pytree, static

# The keys of a page are [head_dim, page_size] or [page_size, head_dim]; its values are rows of tokens in both layouts.
# Joined rows hold a token's values behind its keys.
Layout = Literal["columns", "rows", "joined"]

PAGE_SIZE, TPU_PAGE_SIZE = 32, 128  # tokens, where none is set
LANES = 128  # of a TPU's vector register: arrays of fewer channels take as much of its memory
LARGEST = {jnp.dtype("int8"): 127.0, jnp.dtype("float8_e4m3fn"): 448.0}  # of the dtypes of quantised pages

KeysValues = tuple[jax.Array, jax.Array | None]  # of tokens: [batch, n, kv_head, head_dim or v_dim]
Result = TypeVar("Result")
Writer = Callable[..., list[jax.Array]]  # see `pages_tpu.write_pages`


def default_layout(head_dim: int) -> Layout:
    """Return how pages of heads of so many channels are laid out on the default backend.

    On CPU keys are columns: then both products of a page, q k and p v, are matrix products without a transpose, which
    is 1.5 to 2.5 times faster there (docs/log). The kernels of accelerators read tokens as rows, whose channels lie
    side by side in memory, and matrix units transpose for nothing. On TPUs, keys and values of half a register or less
    share one.
    """
    if program_platform() == "cpu":
        return "columns"
    if program_platform() == "tpu" and 2 * head_dim <= LANES:
        return "joined"
    return "rows"


def default_page_size(platform: str) -> int:
    """Return the tokens of a page where none is set. The kernel of TPUs copies page by page, and starting the copy of a
    small one takes longer than the copy; elsewhere smaller pages share more of a prompt."""
    return TPU_PAGE_SIZE if platform == "tpu" else PAGE_SIZE


@pytree
class Pages:
    """The keys and values of one layer, in pages under the page table that all layers share."""

    # [page, kv_head, head_dim, page_size], or [page, kv_head, page_size, head_dim] where rows, of head_dim + v_dim
    # channels where joined
    k: jax.Array
    # [page, kv_head, page_size, v_dim]; None: the values are channels of k, from `v_first` on
    v: jax.Array | None
    k_scale: jax.Array | None = None  # [page, kv_head, page_size] float32, of 8-bit keys (`quantize`); None: plain ones
    v_scale: jax.Array | None = None  # the same of 8-bit values
    layout: Layout = static(default="columns")
    num_ranks: int = static(default=1)  # data ranks that share them out
    v_first: int = static(default=0)  # the keys' channels, of joined rows; 0 where values are the keys' first channels

    @classmethod
    def zeros(
        cls,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        *,
        v_dim: int = 0,  # 0: head_dim
        has_values: bool = True,
    ) -> "Pages":
        """Make empty pages in the layout of the default backend. Those of an 8-bit dtype have scales."""
        v_dim = v_dim or head_dim
        layout = default_layout(max(head_dim, v_dim))
        rows = (num_pages, num_kv_heads, page_size, head_dim)
        columns = (num_pages, num_kv_heads, head_dim, page_size)
        scale = jnp.zeros(rows[:3], jnp.float32) if jnp.dtype(dtype) in LARGEST else None
        if layout == "joined" and has_values:
            both = jnp.zeros((*rows[:3], head_dim + v_dim), dtype)
            return cls(both, None, scale, scale, layout, v_first=head_dim)
        k = jnp.zeros(columns if layout == "columns" else rows, dtype)
        if not has_values:
            return cls(k, None, scale, None, "columns" if layout == "columns" else "rows")
        return cls(k, jnp.zeros((*rows[:3], v_dim), dtype), scale, scale, layout)

    @property
    def page_size(self) -> int:
        return self.k.shape[3 if self.layout == "columns" else 2]

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the keys that a data rank has."""
        return self.k.shape[0] // self.num_ranks, *self.k.shape[1:]

    @property
    def values_are_keys(self) -> bool:
        """Return whether the values are the keys' own first channels, as of latents."""
        return self.v is None and self.v_first == 0

    @property
    def is_quantized(self) -> bool:
        return self.k_scale is not None


@pytree
class PageRows:
    """A row for each page beside its entries, under the page table that all layers share."""

    rows: jax.Array  # [page, n]
    num_ranks: int = static(default=1)  # data ranks that share them out

    def row(self, page: jax.Array) -> jax.Array:  # [] int32 -> [n]
        """The row of one page, on every device. An id out of range gives some row or other."""
        if self.num_ranks == 1:
            return self.rows.at[page].get(mode="clip")

        def own(rows: jax.Array, page: jax.Array) -> jax.Array:
            local = own_pages(page, len(rows))
            row = rows.at[local].get(mode="clip")
            return sum_parts(jnp.where(local < len(rows), row, 0), ("batch",))

        whole = partition((), ())
        return over_parts(own, ("batch",), (_PARTS, whole), whole)(self.rows, page)

    def put(self, page: jax.Array, rows: jax.Array) -> "PageRows":
        """Write rows, [batch, m, n], of these pages, [batch, m] int32; ids out of range are dropped."""

        def write(old: jax.Array, page: jax.Array, rows: jax.Array) -> jax.Array:
            return put_each(old, page, None, rows)

        return dataclasses.replace(self, rows=in_ranks(write, self.num_ranks)(self.rows, page, rows))


_PARTS = partition(("batch",), ("batch",))  # of rows, and of pages, which are cut like them


def in_ranks(function: Callable[..., Result], num_ranks: int) -> Callable[..., Result]:
    """A function of a pytree of page arrays [page, ...], of page ids [batch, m] and of further pytrees of rows
    [batch, ...], as each data rank runs it: with its own pages and rows, and page ids that count from its first page.
    Results are of pages or of rows."""
    if num_ranks == 1:
        return function

    def own(pages: Any, page: jax.Array, *rows: Any) -> Result:
        return function(pages, own_pages(page, len(jax.tree.leaves(pages)[0])), *rows)

    return over_parts(own, ("batch",), _PARTS, _PARTS)


def own_pages(page: jax.Array, num_own: int) -> jax.Array:
    """Return page ids as they count from the first of a data rank's `num_own` pages; `num_own`, which is out of range,
    for those of other ranks. Call it within `over_parts`."""
    local = page - part_index("pages") * num_own
    return jnp.where((local >= 0) & (local < num_own), local, num_own)


def share_out(tree: Any, num_ranks: int) -> Any:
    """A pytree whose pages are shared out over so many data ranks, as the mesh must have them too."""

    def shared(leaf: Any) -> Any:
        if not is_by_page(leaf):
            return leaf
        return dataclasses.replace(leaf, num_ranks=num_ranks)

    return jax.tree.map(shared, tree, is_leaf=is_by_page)


def is_by_page(leaf: Any) -> bool:
    """Return whether this is of arrays that begin with an axis of pages."""
    return isinstance(leaf, Pages | PageRows)


def quantize(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """An entry's keys or values of a head in 8 bits: numbers of this dtype, and the float32 scale that gives them back.

    `x` is [..., dim], the scale [...]. The largest of `dim` numbers becomes the dtype's largest, so that an entry
    depends on no other, whenever it is committed. int8 rounds to the nearest of 255 equal steps, float8_e4m3fn to four
    significant bits."""
    largest = LARGEST[jnp.dtype(dtype)]
    x = x.astype(jnp.float32)
    # products: XLA divides by a constant in some programs and multiplies by its inverse in others
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), 1e-30) * np.float32(1 / largest)
    x = x * (1 / scale)[..., None]
    if jnp.issubdtype(dtype, jnp.integer):
        x = jnp.round(x)
    return jnp.clip(x, -largest, largest).astype(dtype), scale


def as_kept(x: jax.Array, pages: Pages) -> jax.Array:
    """Round keys or values to what pages without scales keep of them, in the dtype that they have. XLA may leave out a
    conversion there and back."""
    if pages.is_quantized or pages.k.dtype == x.dtype:
        return x
    kept = jnp.finfo(pages.k.dtype)
    return jax.lax.reduce_precision(x, kept.nexp, kept.nmant)


def write_pages(
    pages: Sequence[Pages],  # layer by layer
    new: Sequence[KeysValues],  # of n tokens of each sequence, layer by layer
    page: jax.Array,  # [batch, m] int32; a page out of range is nowhere
    offset: jax.Array,  # [batch, m] int32, the place within that page
    path: jax.Array | None = None,  # [batch, m] int32, which of the n tokens; None: all of them in order, m = n
) -> list[Pages]:
    """The pages with the new entries in their places. The places of a row follow one another, and so do those of them
    that are somewhere."""
    if native.serves(*jax.tree.leaves(new)) and all(layer.k.dtype.name in native.STORED for layer in pages):
        return _native(pages, new, page, offset, path)
    rows = [_as_stored(layer, *entries) for layer, entries in zip(pages, new, strict=True)]
    if (writer := writer_for(pages)) is not None:
        pages = _in_place(writer, pages, rows, page, offset, path)
        rows = [dataclasses.replace(entries, k=None, v=None) for entries in rows]
    if path is not None:
        rows = jax.tree.map(functools.partial(take_each, index=path), rows)

    def put(layer: Pages, page: jax.Array, offset: jax.Array, entries: _Rows) -> Pages:
        written: dict[str, jax.Array] = {}
        for name in ("k", "v", "k_scale", "v_scale"):
            array, own = getattr(layer, name), getattr(entries, name)
            if own is not None:
                is_column = name == "k" and layer.layout == "columns"
                place = array.at[page, :, :, offset] if is_column else array.at[page, :, offset]
                written[name] = place.set(own, mode="drop")
        return dataclasses.replace(layer, **written)

    return [
        in_ranks(put, layer.num_ranks)(layer, page, offset, entries) for layer, entries in zip(pages, rows, strict=True)
    ]


@pytree
class _Rows:
    """Entries as pages store them, each [batch, m, kv_head, ...]; None where nothing is to be written."""

    k: jax.Array | None
    v: jax.Array | None
    k_scale: jax.Array | None
    v_scale: jax.Array | None


def _as_stored(layer: Pages, k: jax.Array, v: jax.Array | None) -> _Rows:
    k_scale = v_scale = None
    if layer.k_scale is not None:
        k, k_scale = quantize(k, layer.k.dtype)
    if layer.values_are_keys:
        return _Rows(k.astype(layer.k.dtype), None, k_scale, None)
    assert v is not None
    if layer.v_scale is not None:
        v, v_scale = quantize(v, layer.k.dtype)
    k, v = k.astype(layer.k.dtype), v.astype(layer.k.dtype)
    if layer.layout == "joined":
        return _Rows(jnp.concatenate([k, v], axis=-1), None, k_scale, v_scale)
    return _Rows(k, v, k_scale, v_scale)


def writer_for(pages: Sequence[Pages]) -> Writer | None:
    """The kernel that writes these pages in place. None: XLA's scatter, which does so itself on CPUs and GPUs, on these
    with two launches a layer; on TPUs it copies all of them wherever the kernel that reads them stands beside it."""
    if native.are_left_out() or not pages:
        return None
    # Pallas takes a while to import, which other backends need not wait for
    if program_platform() == "gpu":
        from specserve.kernels import paged_gpu, pages_gpu

        if all(layer.layout != "columns" and paged_gpu.takes(layer.own_shape, layer.k.dtype) for layer in pages):
            return pages_gpu.write_pages
    if program_platform() == "tpu":
        from specserve.kernels import paged_tpu, pages_tpu

        if all(paged_tpu.takes(layer.k, layer.v) for layer in pages):
            return pages_tpu.write_pages
    return None


def _in_place(
    writer: Writer,
    pages: Sequence[Pages],
    rows: Sequence[_Rows],
    page: jax.Array,
    offset: jax.Array,
    path: jax.Array | None,
) -> list[Pages]:
    """The pages with the entries of all layers but their scales, each device having written its own KV heads."""
    arrays = [array for layer in pages for array in (layer.k, layer.v) if array is not None]
    entries = [each for own in rows for each in (own.k, own.v) if each is not None]
    mesh, is_shared = traced_mesh(), pages[0].num_ranks > 1
    if mesh is None:
        written = iter(writer(arrays, entries, page, offset, path))
    else:
        by_row = "batch" if is_shared else None
        of_page, of_entry = ("pages" if is_shared else None, "kv_heads"), (by_row, None, "kv_heads")

        def cut(array: jax.Array, axes: tuple[str | None, ...]) -> Any:
            return fitting_partition(mesh, axes, array.shape[: len(axes)])

        partitions = [cut(array, of_page) for array in arrays]
        of_entries = [cut(each, of_entry) for each in entries]

        def own(
            arrays: list[jax.Array], entries: list[jax.Array], page: jax.Array, *places: jax.Array
        ) -> list[jax.Array]:
            offset, path = (*places, None)[:2]
            return writer(arrays, entries, own_pages(page, len(arrays[0])) if is_shared else page, offset, path)

        places = [x for x in (page, offset, path) if x is not None]
        of_places = [cut(x, (by_row,)) for x in places]
        everywhere = ("batch", "kv_heads", "experts", "sequence")  # no axis is left to the compiler
        run = over_parts(own, everywhere, (partitions, of_entries, *of_places), partitions)
        written = iter(run(arrays, entries, *places))
    return [
        dataclasses.replace(layer, k=next(written), v=None if layer.v is None else next(written)) for layer in pages
    ]


def _native(
    pages: Sequence[Pages],
    new: Sequence[KeysValues],
    page: jax.Array,
    offset: jax.Array,
    path: jax.Array | None,
) -> list[Pages]:
    """Write the new entries of all layers by one native call, in place."""
    assert all(layer.layout == "columns" for layer in pages), "the native kernels keep keys as columns"
    if path is None:
        path = jnp.broadcast_to(jnp.arange(page.shape[1], dtype=jnp.int32), page.shape)
    values = [layer for layer in pages if layer.v is not None]
    places = [(layer, "k") for layer in pages] + [(layer, "v") for layer in values]
    places += [(layer, f"{name}_scale") for layer, name in places if layer.is_quantized]
    arrays = [getattr(layer, name) for layer, name in places]
    entries = [k for k, _ in new] + [v for _, v in new if v is not None]
    call = jax.ffi.ffi_call(
        "specserve_write",
        [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        input_output_aliases={3 + i: i for i in range(len(arrays))},
    )
    written: dict[int, dict[str, jax.Array]] = {}
    results = call(path, page, offset, *arrays, *entries, num_keys=np.int64(len(pages)))
    for (layer, name), array in zip(places, results, strict=True):
        written.setdefault(id(layer), {})[name] = array
    return [dataclasses.replace(layer, **written[id(layer)]) for layer in pages]
