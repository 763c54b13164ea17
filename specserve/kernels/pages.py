"""Pages of keys and values: how they are laid out, and `write_pages`, the door to committing. Arrays in, arrays out.

`kernels.paged` reads what is written here. The layout is the backend's choice, and nothing outside of this room needs
to know it.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specserve.kernels import native
from specserve.kernels.gather import take_each
from specserve.pytree import pytree, static

# The keys of a page are [head_dim, page_size] or [page_size, head_dim]; its values are rows of tokens in both layouts.
Layout = Literal["columns", "rows"]

LARGEST = {jnp.dtype("int8"): 127.0, jnp.dtype("float8_e4m3fn"): 448.0}  # of the dtypes of quantised pages

KeysValues = tuple[jax.Array, jax.Array | None]  # of tokens: [batch, n, kv_head, head_dim or v_dim]


def default_layout() -> Layout:
    """Return how pages are laid out on the default backend.

    On CPU keys are columns: then both products of a page, q k and p v, are matrix products without a transpose, which
    is 1.5 to 2.5 times faster there (docs/log). The kernels of accelerators read tokens as rows, whose channels lie
    side by side in memory, and matrix units transpose for nothing.
    """
    return "columns" if jax.default_backend() == "cpu" else "rows"


@pytree
class Pages:
    """The keys and values of one layer, in pages under the page table that all layers share."""

    k: jax.Array  # [page, kv_head, head_dim, page_size], or [page, kv_head, page_size, head_dim] where rows
    v: jax.Array | None  # [page, kv_head, page_size, v_dim]; None: the values are the keys' first channels
    k_scale: jax.Array | None = None  # [page, kv_head, page_size] float32, of 8-bit keys (`quantize`); None: plain ones
    v_scale: jax.Array | None = None  # the same of 8-bit values
    layout: Layout = static(default="columns")

    @classmethod
    def zeros(
        cls, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: str, *, has_values: bool = True
    ) -> "Pages":
        """Make empty pages in the layout of the default backend. Those of an 8-bit dtype have scales."""
        layout = default_layout()
        rows = (num_pages, num_kv_heads, page_size, head_dim)
        columns = (num_pages, num_kv_heads, head_dim, page_size)
        scale = jnp.zeros(rows[:3], jnp.float32) if jnp.dtype(dtype) in LARGEST else None
        return cls(
            k=jnp.zeros(rows if layout == "rows" else columns, dtype),
            v=jnp.zeros(rows, dtype) if has_values else None,
            k_scale=scale,
            v_scale=scale if has_values else None,
            layout=layout,
        )

    @property
    def page_size(self) -> int:
        return self.k.shape[2 if self.layout == "rows" else 3]

    @property
    def is_quantized(self) -> bool:
        return self.k_scale is not None


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

    def put(layer: Pages, entries: KeysValues) -> Pages:
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
        return Pages(k_pages, v_pages, k_scale, v_scale, layer.layout)

    return [put(layer, entries) for layer, entries in zip(pages, new, strict=True)]


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
