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
from specserve.kernels.gather import take_each
from specserve.mesh import over_parts, part_index, partition, program_platform, sum_parts
from specserve.pytree import pytree, static

# The keys of a page are [head_dim, page_size] or [page_size, head_dim]; its values are rows of tokens in both layouts.
Layout = Literal["columns", "rows"]

LARGEST = {jnp.dtype("int8"): 127.0, jnp.dtype("float8_e4m3fn"): 448.0}  # of the dtypes of quantised pages

KeysValues = tuple[jax.Array, jax.Array | None]  # of tokens: [batch, n, kv_head, head_dim or v_dim]
Result = TypeVar("Result")


def default_layout() -> Layout:
    """Return how pages are laid out on the default backend.

    On CPU keys are columns: then both products of a page, q k and p v, are matrix products without a transpose, which
    is 1.5 to 2.5 times faster there (docs/log). The kernels of accelerators read tokens as rows, whose channels lie
    side by side in memory, and matrix units transpose for nothing.
    """
    if program_platform() == "cpu":
        return "columns"
    return "rows"


@pytree
class Pages:
    """The keys and values of one layer, in pages under the page table that all layers share."""

    k: jax.Array  # [page, kv_head, head_dim, page_size], or [page, kv_head, page_size, head_dim] where rows
    v: jax.Array | None  # [page, kv_head, page_size, v_dim]; None: the values are the keys' first channels
    k_scale: jax.Array | None = None  # [page, kv_head, page_size] float32, of 8-bit keys (`quantize`); None: plain ones
    v_scale: jax.Array | None = None  # the same of 8-bit values
    layout: Layout = static(default="columns")
    num_ranks: int = static(default=1)  # data ranks that share them out

    @classmethod
    def zeros(
        cls, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: str, *, has_values: bool = True
    ) -> "Pages":
        """Make empty pages in the layout of the default backend. Those of an 8-bit dtype have scales."""
        layout = default_layout()
        rows = (num_pages, num_kv_heads, page_size, head_dim)
        columns = (num_pages, num_kv_heads, head_dim, page_size)
        k, scale = jnp.zeros({"rows": rows, "columns": columns}[layout], dtype), None
        if jnp.dtype(dtype) in LARGEST:
            scale = jnp.zeros(rows[:3], jnp.float32)
        if not has_values:
            return cls(k, None, scale, None, layout)
        return cls(k, jnp.zeros(rows, dtype), scale, scale, layout)

    @property
    def page_size(self) -> int:
        return self.k.shape[{"rows": 2, "columns": 3}[self.layout]]

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
            return old.at[page].set(rows, mode="drop")

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


def write_pages(
    pages: Sequence[Pages],  # layer by layer
    new: Sequence[KeysValues],  # of n tokens of each sequence, layer by layer
    page: jax.Array,  # [batch, m] int32; a page out of range is nowhere
    offset: jax.Array,  # [batch, m] int32, the place within that page
    path: jax.Array | None = None,  # [batch, m] int32, which of the n tokens; None: all of them in order, m = n
) -> list[Pages]:
    """The pages with the new entries in their places."""
    if native.serves(*jax.tree.leaves((pages, new))):
        return _native(pages, new, page, offset, path)

    def put(layer: Pages, page: jax.Array, offset: jax.Array, entries: KeysValues, path: jax.Array | None) -> Pages:
        k, v = entries if path is None else jax.tree.map(functools.partial(take_each, index=path), entries)
        k_scale, v_scale = layer.k_scale, layer.v_scale
        if k_scale is not None:
            k, scale = quantize(k, layer.k.dtype)
            k_scale = k_scale.at[page, :, offset].set(scale, mode="drop")
        place = layer.k.at[page, :, offset] if layer.layout == "rows" else layer.k.at[page, :, :, offset]
        k_pages, v_pages = place.set(k.astype(layer.k.dtype), mode="drop"), layer.v
        if v_pages is not None:
            assert v is not None
            if v_scale is not None:
                v, scale = quantize(v, v_pages.dtype)
                v_scale = v_scale.at[page, :, offset].set(scale, mode="drop")
            v_pages = v_pages.at[page, :, offset].set(v.astype(v_pages.dtype), mode="drop")
        return Pages(k_pages, v_pages, k_scale, v_scale, layer.layout, layer.num_ranks)

    return [
        in_ranks(put, layer.num_ranks)(layer, page, offset, entries, path)
        for layer, entries in zip(pages, new, strict=True)
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
    arrays = [layer.k for layer in pages] + [layer.v for layer in pages if layer.v is not None]
    entries = [k for k, _ in new] + [v for _, v in new if v is not None]
    call = jax.ffi.ffi_call(
        "specserve_write",
        [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        input_output_aliases={3 + i: i for i in range(len(arrays))},
    )
    written = iter(call(path, page, offset, *arrays, *entries, num_keys=np.int64(len(pages))))
    keys = [next(written) for _ in pages]
    return [Pages(k, None if layer.v is None else next(written)) for k, layer in zip(keys, pages, strict=True)]
