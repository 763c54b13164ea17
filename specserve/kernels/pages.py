"""The door to committing: `write_pages` puts new keys and values into the pages of all layers. Arrays in, arrays out.

The layouts of pages are those that `kernels.attention` reads.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specserve.kernels import native
from specserve.kernels.gather import take_each

# One layer's keys and values; where the values are the keys' first channels there is None. In pages: [page, kv_head,
# head_dim, page_size] and [page, kv_head, page_size, v_dim]. Of tokens: [batch, n, kv_head, head_dim or v_dim].
KeysValues = tuple[jax.Array, jax.Array | None]


def write_pages(
    pages: Sequence[KeysValues],  # layer by layer
    new: Sequence[KeysValues],  # of n tokens of each sequence, layer by layer
    page: jax.Array,  # [batch, m] int32; a page out of range is nowhere
    offset: jax.Array,  # [batch, m] int32, the place within that page
    path: jax.Array | None = None,  # [batch, m] int32, which of the n tokens; None: all of them in order, m = n
) -> list[KeysValues]:
    """The pages with the new entries in their places."""
    if native.serves(*jax.tree.leaves((pages, new))):
        return _native(pages, new, page, offset, path)
    written = []
    for (k_pages, v_pages), entries in zip(pages, new, strict=True):
        k, v = entries if path is None else jax.tree.map(functools.partial(take_each, index=path), entries)
        k_pages = k_pages.at[page, :, :, offset].set(k.astype(k_pages.dtype), mode="drop")
        if v_pages is not None:
            assert v is not None
            v_pages = v_pages.at[page, :, offset].set(v.astype(v_pages.dtype), mode="drop")
        written.append((k_pages, v_pages))
    return written


def _native(
    pages: Sequence[KeysValues],
    new: Sequence[KeysValues],
    page: jax.Array,
    offset: jax.Array,
    path: jax.Array | None,
) -> list[KeysValues]:
    """One call for all layers, which writes where the pages are."""
    if path is None:
        path = jnp.broadcast_to(jnp.arange(page.shape[1], dtype=jnp.int32), page.shape)
    arrays = [k for k, _ in pages] + [v for _, v in pages if v is not None]
    entries = [k for k, _ in new] + [v for _, v in new if v is not None]
    call = jax.ffi.ffi_call(
        "specserve_write",
        [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        input_output_aliases={3 + i: i for i in range(len(arrays))},
    )
    written = iter(call(path, page, offset, *arrays, *entries, num_keys=np.int64(len(pages))))
    keys = [next(written) for _ in pages]
    return [(k, None if v is None else next(written)) for k, (_, v) in zip(keys, pages, strict=True)]
