"""Writing entries into pages on NVIDIA GPUs: one Pallas kernel for many layers, lowered through Triton.

XLA's scatter writes in place too, but takes a launch for the keys and one for the values of each layer. `paged_gpu`
reads what is written here; `pages` knows when to call it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_AT_ONCE = 8192  # bytes of entries that the registers of a warp hold beside their addresses


def write_pages(
    arrays: Sequence[jax.Array],  # [page, kv_head, page_size, channels] each, of any number of layers
    entries: Sequence[jax.Array],  # [batch, n, kv_head, channels] each, of the arrays' dtypes
    page: jax.Array,  # [batch, m] int32; a page out of range is nowhere
    offset: jax.Array,  # [batch, m] int32
    path: jax.Array | None,  # [batch, m] int32, of the n entries those that are written; None: all in order, m = n
    *,
    interpret: bool = False,
) -> list[jax.Array]:
    """The arrays with the entries in their places. Nothing but the entries is read, and nothing else written."""
    written: list[jax.Array] = []
    for part in _parts(entries):
        count, heads = len(arrays[part]), max(x.shape[2] for x in entries[part])
        given = (*arrays[part], *entries[part], page, offset, path)
        written += pl.pallas_call(
            _kernel,
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[part]],
            grid=(*page.shape, heads),
            in_specs=[None if x is None else pl.BlockSpec() for x in given],
            input_output_aliases={i: i for i in range(count)},
            compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
            interpret=interpret,
            name="write_pages",
        )(*given)
    return written


def _parts(entries: Sequence[jax.Array]) -> Iterator[slice]:
    """Cut the arrays into runs of those that one call writes."""
    begin = used = 0
    for i, each in enumerate(entries):
        size = pl.next_power_of_2(each.shape[3]) * each.dtype.itemsize
        if i > begin and used + size > _AT_ONCE:
            yield slice(begin, i)
            begin, used = i, 0
        used += size
    yield slice(begin, len(entries))


def _kernel(*refs: Any) -> None:
    """Write one entry of all layers, for one KV head. All is loaded before anything is stored, so that the loads do not
    wait for each other."""
    count = (len(refs) - 3) // 3
    entries, (page_ref, offset_ref, path_ref), written = (
        refs[count : 2 * count],
        refs[2 * count : -count],
        refs[-count:],
    )
    b, i, head = (pl.program_id(axis) for axis in range(3))
    page, offset = page_ref[b, i], offset_ref[b, i]
    source = i if path_ref is None else path_ref[b, i]

    def places(x: Any, y: Any) -> tuple[jax.Array, jax.Array]:
        """The channels of an entry x, and those of them that are kept in pages y."""
        channels = jnp.arange(pl.next_power_of_2(x.shape[3]), dtype=jnp.int32)
        is_kept = (page >= 0) & (page < y.shape[0]) & (head < x.shape[2])
        return channels, (channels < x.shape[3]) & is_kept

    found = []
    for x, y in zip(entries, written, strict=True):
        channels, is_kept = places(x, y)
        found.append(plgpu.load(x.at[b, source, head, channels], mask=is_kept))
    for x, y, entry in zip(entries, written, found, strict=True):
        channels, is_kept = places(x, y)
        plgpu.store(y.at[page, head, offset, channels], entry, mask=is_kept)
