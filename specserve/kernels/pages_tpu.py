"""Writing entries into pages on TPUs: one Mosaic kernel that changes the pages where they are.

XLA's scatter would lay the pages out otherwise than the kernel that reads them, so that every call would begin and end
with a copy of each array. `paged_tpu` reads what is written here; `pages` knows when to call it.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specserve.kernels.gather import take_each
from specserve.kernels.paged_tpu import in_hbm

_LANES = 128  # of a register
_VMEM = 12 * 2**20  # bytes planned for a call; compilers grant 16 MiB on every generation unless asked for more


def write_pages(
    arrays: Sequence[jax.Array],  # [page, kv_head, page_size, channels] each, of any number of layers
    entries: Sequence[jax.Array],  # [batch, n, kv_head, channels] each, of the arrays' dtypes
    page: jax.Array,  # [batch, m] int32; a page out of range is nowhere
    offset: jax.Array,  # [batch, m] int32, of consecutive places: each is the one before plus 1, modulo page_size
    path: jax.Array | None = None,  # [batch, m] int32, of the n entries those that are written; None: all, m = n
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> list[jax.Array]:
    """The arrays with the entries in their places. Those that a row keeps follow one another.

    A register holds some tokens of a head (8 in float32, 16 in bfloat16, 32 in 8 bits), so a single one cannot be
    written. The kernel reads those that share their registers, puts the new ones among them, and writes all back. Of m
    entries of b sequences, in arrays whose items have w bytes and H heads of d channels, rounded up to 128 each:

        bytes moved   2 b H d w (m + 2 t) at most, for t tokens a register, and b H d w m of the entries

    which is below a hundredth of a step's. The pages must be such as `paged_tpu.takes` takes.
    """
    if path is not None:
        entries = [take_each(x, path) for x in entries]
    tile = 32 // arrays[0].dtype.itemsize
    batch, m = page.shape
    num_blocks = (m + tile - 2) // tile + 1  # of a register's tokens, which m consecutive ones touch at most
    shift = offset[:, 0] % tile
    token = jnp.arange(num_blocks * tile).reshape(num_blocks, tile) - shift[:, None, None]  # [batch, block, tile]
    row = jnp.arange(batch)[:, None, None]
    found = jnp.where((token >= 0) & (token < m), page[row, jnp.clip(token, 0, m - 1)], -1)
    is_kept = (found >= 0) & (found < len(arrays[0]))
    place = (offset[:, :1] // tile + jnp.arange(num_blocks)) % (arrays[0].shape[2] // tile)
    at_least, beyond = jnp.argmax(is_kept, axis=-1), tile - jnp.argmax(is_kept[..., ::-1], axis=-1)
    # A block without a kept entry stays where the one before it is, or else where the first one is: so nothing is read
    # for it, and nothing written.
    is_busy = is_kept.any(axis=-1).reshape(-1)
    step = jnp.arange(len(is_busy))
    same = jax.lax.cummax(jnp.where(is_busy, step, -1))
    same = jnp.where(same < 0, jnp.argmax(is_busy), same)
    scalars = {
        "page": jnp.maximum(jnp.where(is_kept, found, -1).max(axis=-1).reshape(-1), 0)[same],
        "place": place.reshape(-1)[same],
        "begin": jnp.where(is_busy, at_least.reshape(-1), 0),
        "end": jnp.where(is_busy, beyond.reshape(-1), 0),
        "shift": shift,
    }
    scalars = [x.astype(jnp.int32) for x in scalars.values()]
    padding = -m % tile if m > tile else 0
    entries = [jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, padding), (0, 0))) for x in entries]
    written: list[jax.Array] = []
    for part in _parts(arrays, tile):
        written += _call(arrays[part], entries[part], scalars, tile, num_blocks, interpret)
    return written


def _parts(arrays: Sequence[jax.Array], tile: int) -> Iterator[slice]:
    """Cut the arrays into runs that one call holds in fast memory: old and new tokens of a register, and the entries
    of two, each twice, since the next are on their way while these are worked on."""
    begin = used = 0
    for i, array in enumerate(arrays):
        _, heads, _, channels = array.shape
        size = 8 * heads * tile * -(-channels // 128) * 128 * array.dtype.itemsize
        if i > begin and used + size > _VMEM:
            yield slice(begin, i)
            begin, used = i, 0
        used += size
    yield slice(begin, len(arrays))


def _call(
    arrays: Sequence[jax.Array],
    entries: Sequence[jax.Array],  # [batch, kv_head, m, channels]
    scalars: Sequence[jax.Array],
    tile: int,
    num_blocks: int,
    interpret: bool | pltpu.InterpretParams,
) -> list[jax.Array]:
    rows = min(entries[0].shape[2], tile)
    last = entries[0].shape[2] // rows - 1

    def of_entries(x: jax.Array, back: int) -> pl.BlockSpec:
        """The entries of a block, or of the one before it. Beyond both ends any will do: they are not kept."""

        def index(i: Any, *_: Any) -> tuple[Any, ...]:
            block = jax.lax.rem(i, jnp.int32(num_blocks)) - back
            return jax.lax.div(i, jnp.int32(num_blocks)), 0, jnp.clip(block, 0, last), 0

        return pl.BlockSpec((1, x.shape[1], rows, x.shape[3]), index)

    def of_pages(x: jax.Array) -> pl.BlockSpec:
        shape = (1, x.shape[1], tile, x.shape[3])
        return pl.BlockSpec(shape, lambda i, page, place, *_: (page[i], 0, place[i], 0))

    count, heads = len(arrays), max(x.shape[1] for x in arrays)
    (written,) = pl.pallas_call(
        functools.partial(_kernel, tile=tile, rows=rows, num_blocks=num_blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(len(scalars[0]),),
            in_specs=[
                [of_entries(x, 1) for x in entries],
                [of_entries(x, 0) for x in entries],
                [of_pages(x) for x in arrays],
            ],
            out_specs=[[of_pages(x) for x in arrays]],
            scratch_shapes=[pltpu.VMEM((heads, 2 * tile, _LANES), jnp.float32)],
        ),
        out_shape=[[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]],
        input_output_aliases={len(scalars) + 2 * count + i: i for i in range(count)},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        interpret=interpret,
        name="write_pages",
    )(*scalars, entries, entries, [in_hbm(x, interpret) for x in arrays])
    return written


def _kernel(
    _page: Any,
    _place: Any,
    begin: Any,  # [step] the first of a register's tokens that is new
    end: Any,  # [step] the one after the last that is new, 0 where none is
    shift: Any,  # [batch] the place of a row's first entry in its register
    before: list[Any],  # [1, kv_head, row, channel] each
    own: list[Any],
    old: list[Any],  # [1, kv_head, tile, channel] each
    new: list[Any],  # of the same shapes
    both: Any,  # [kv_head, 2 * tile, _LANES] float32
    *,
    tile: int,
    rows: int,
    num_blocks: int,
) -> None:
    step = pl.program_id(0)

    # the first block is written whether it has new entries or not: it may be all that this call visits
    @pl.when((step == 0) | (end[step] > 0))
    def _() -> None:
        first = tile - shift[jax.lax.div(step, jnp.int32(num_blocks))]
        for earlier, entries, kept, result in zip(before, own, old, new, strict=True):
            heads, channels = kept.shape[1], kept.shape[3]
            for channel in range(0, channels, _LANES):  # of wider arrays Mosaic reads from aligned tokens on alone
                width = min(_LANES, channels - channel)
                part = slice(0, 1), slice(0, heads), slice(None), slice(channel, channel + width)
                both[:heads, :rows, :width] = earlier[part][0].astype(jnp.float32)
                both[:heads, tile : tile + rows, :width] = entries[part][0].astype(jnp.float32)
                moved = both[:heads, pl.ds(first, tile), :width]
                index = jax.lax.broadcasted_iota(jnp.int32, moved.shape, 1)
                is_new = (index >= begin[step]) & (index < end[step])
                mixed = jnp.where(is_new, moved, kept[part][0].astype(jnp.float32))
                result[part] = mixed[None].astype(result.dtype)
