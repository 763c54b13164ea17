"""Attention over pages on NVIDIA GPUs: one Pallas kernel, lowered through Triton.

A program reads a part of one sequence's pages for one KV head, and multiplies them by a tile of query rows. Where batch
and KV heads alone do not fill a GPU the prefix is split over several programs, whose results XLA merges by their
log-sum-exps (flash-decoding). The page table is read in the kernel, so nothing is gathered, and pages that a sequence
does not have cost nothing.

Bytes read from memory: lens * kv_head * (head_dim + v_dim) * itemsize for each sequence, once for all tiles of rows
where the second-level cache holds what they share; v_dim is not counted where the values are the keys' first channels.
For each split and row of queries (v_dim + 1) * 4 bytes are written and read again. FLOPs: 2 * lens * kv_head * row *
(head_dim + v_dim) for each sequence, rows rounded up to a tile.

Triton's blocks have powers of two as sizes, and its matrix products at least 16 of each. So rows are padded to tiles,
and channels are cut into powers of two (576 = 512 + 64), of which the last is padded to 16. Nothing of that is copied:
loads and stores are masked.
"""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specserve.kernels.rows import NEG_INF

_MIN_TILE = 16  # Triton's products take no less
_PROGRAMS = 256  # keep the 108 to 148 multiprocessors of a data-centre GPU busy with about two programs each
_MIN_SPLIT = 128  # keys of a split, at least: with fewer, writing and merging results costs more than reading keys


def takes(shape: tuple[int, ...], dtype: Any) -> bool:
    """Return whether the kernel can take pages of keys of this shape, [page, kv_head, page_size, head_dim], and dtype.

    Triton addresses an array of less than 4 GiB with signed 32-bit indices, which entries of one byte overflow at
    2 GiB; and GPUs before compute capability 8.9 cannot convert float8. Such pages are left to XLA.
    """
    if jnp.dtype(dtype) == jnp.float8_e4m3fn:
        capability = str(getattr(jax.devices()[0], "compute_capability", ""))  # "8.0"
        if re.fullmatch(r"\d+\.\d+", capability) and float(capability) < 8.9:
            return False
    return jnp.dtype(dtype).itemsize > 1 or not 2**31 <= math.prod(shape) <= 2**32


def attend_pages(
    q: jax.Array,  # [batch, kv_head, row, head_dim], scaled
    k_pages: jax.Array,  # [page, kv_head, page_size, head_dim]
    v_pages: jax.Array | None,  # [page, kv_head, page_size, v_dim]; None: the values are the keys' first v_dim channels
    page_table: jax.Array,  # [batch, pages] int32; ids past the used ones may be anything
    lens: jax.Array,  # [batch] int32, committed entries; 0 is allowed
    positions: jax.Array | None,  # [batch, row] int32, None where there is no window
    *,
    v_dim: int,
    first: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    k_scale: jax.Array | None = None,  # [page, kv_head, page_size] float32, of int8 or float8 pages
    v_scale: jax.Array | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:  # [batch, kv_head, row, v_dim] and [batch, kv_head, row], float32
    """Softmax attention over the prefix alone, and the log-sum-exp of the scores.

    A row sees entry i if first <= i < lens and, with a window, its position is less than `window` after i. Nothing else
    is read, so whatever lies there is never heard. A row that sees nothing gives 0 with a log-sum-exp of NEG_INF.
    Scores are multiplied by `k_scale`, and probabilities by `v_scale` before the product with the values. Products are
    computed in the dtype of the queries and summed in float32.
    """
    batch, num_kv_heads, num_rows, head_dim = q.shape
    page_size, width = k_pages.shape[2], page_table.shape[1]
    row_tile, key_tile, num_warps = _tiles(head_dim, v_dim)
    row_tile = min(row_tile, max(_MIN_TILE, pl.next_power_of_2(num_rows)))
    num_tiles = pl.cdiv(num_rows, row_tile)
    most = max(1, width * page_size // _MIN_SPLIT)
    num_splits = min(most, pl.cdiv(_PROGRAMS, batch * num_kv_heads * num_tiles))
    kernel = functools.partial(
        _kernel,
        row_tile=row_tile,
        key_tile=key_tile,
        num_tiles=num_tiles,
        num_splits=num_splits,
        v_dim=v_dim,
        first=first,
        window=window,
        softcap=softcap,
    )
    if not window:
        positions = None
    arrays = (q, k_pages, v_pages, page_table, lens, positions, k_scale, v_scale)
    out, lse = pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((batch, num_kv_heads, num_splits, num_rows, v_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, num_kv_heads, num_splits, num_rows), jnp.float32),
        ),
        grid=(num_splits * num_tiles, num_kv_heads, batch),
        in_specs=[None if array is None else pl.BlockSpec() for array in arrays],
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=2),
        interpret=interpret,
        name="attend_pages",
    )(*arrays)
    return _merge(out, lse)


def _tiles(head_dim: int, v_dim: int) -> tuple[int, int, int]:
    """The rows and the keys of a tile at most, and the number of warps, so that registers hold it."""
    if v_dim > 256:
        return 16, 32, 8
    if max(head_dim, v_dim) > 128:
        return 32, 32, 4
    return 64, 64, 4


def _merge(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge the results of the splits of a prefix, the third axis of both arrays, into one softmax."""
    if lse.shape[2] == 1:
        return out[:, :, 0], lse[:, :, 0]
    largest = jnp.max(lse, axis=2, keepdims=True)
    weights = jnp.exp(lse - largest)
    total = jnp.sum(weights, axis=2)
    merged = jnp.sum(weights[..., None] * out, axis=2) / total[..., None]
    return merged, largest[:, :, 0] + jnp.log(total)


def _kernel(
    q_ref: Any,  # all arrays are whole, in global memory
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    lens_ref: Any,
    positions_ref: Any,
    k_scale_ref: Any,
    v_scale_ref: Any,
    out_ref: Any,  # [batch, kv_head, split, row, v_dim]
    lse_ref: Any,  # [batch, kv_head, split, row]
    *,
    row_tile: int,
    key_tile: int,
    num_tiles: int,
    num_splits: int,
    v_dim: int,
    first: int,
    window: int,
    softcap: float,
) -> None:
    """Attend to one split of one sequence, for one KV head and one tile of rows."""
    tile, split = jax.lax.rem(pl.program_id(0), num_tiles), jax.lax.div(pl.program_id(0), num_tiles)
    head, b = pl.program_id(1), pl.program_id(2)
    num_rows, head_dim = q_ref.shape[2:]
    rows = tile * row_tile + jnp.arange(row_tile, dtype=jnp.int32)
    is_row = rows < num_rows
    length = jnp.minimum(lens_ref[b], table_ref.shape[1] * k_ref.shape[2])  # a table is never read past its end
    begin, positions = jnp.int32(first), None
    if window:
        furthest = jnp.iinfo(jnp.int32).max  # of rows that are padding: they must not move the begin
        positions = plgpu.load(positions_ref.at[b, rows], mask=is_row, other=furthest)
        begin = jnp.maximum(begin, jnp.min(positions) - (window - 1))
    share = pl.cdiv(jnp.maximum(length - begin, 0), num_splits * key_tile) * key_tile  # keys of each split
    start = begin + split * share
    stop = jnp.minimum(start + share, length)
    parts = _powers(0, head_dim)
    if v_ref is None:
        parts = *_powers(0, v_dim), *_powers(v_dim, head_dim)
    queries = [_load(q_ref, (b, head, rows), part, is_row) for part in parts]
    v_parts = _powers(0, v_dim)

    def add(i: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        """Add a tile of keys: their largest score, sum of exponentials, and values so far."""
        largest, total, *values = carry
        index = start + i * key_tile + jnp.arange(key_tile, dtype=jnp.int32)
        is_key = index < stop
        page = plgpu.load(table_ref.at[b, jax.lax.div(index, k_ref.shape[2])], mask=is_key, other=0)
        page = jnp.clip(page, 0, k_ref.shape[0] - 1)
        where = (page, head, jax.lax.rem(index, k_ref.shape[2]))
        keys = [_load(k_ref, where, part, is_key).astype(q_ref.dtype) for part in parts]
        scores = jnp.zeros((row_tile, key_tile), jnp.float32)
        for query, key in zip(queries, keys, strict=True):
            scores += _product(query, key, 1)
        if k_scale_ref is not None:
            scores *= plgpu.load(k_scale_ref.at[where], mask=is_key, other=0.0)[None]
        if softcap:
            scores = softcap * jnp.tanh(scores / softcap)
        is_seen = jnp.broadcast_to(is_key[None], scores.shape)
        if positions is not None:
            is_seen &= positions[:, None] - index[None] < window
        scores = jnp.where(is_seen, scores, NEG_INF)
        now = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.where(is_seen, jnp.exp(scores - now[:, None]), 0.0)
        decay = jnp.exp(largest - now)
        total = total * decay + jnp.sum(weights, axis=1)
        if v_ref is None:
            seen, scale_ref = keys[: len(v_parts)], k_scale_ref
        else:
            seen = [_load(v_ref, where, part, is_key).astype(q_ref.dtype) for part in v_parts]
            scale_ref = v_scale_ref
        if scale_ref is not None:
            weights *= plgpu.load(scale_ref.at[where], mask=is_key, other=0.0)[None]
        weights = weights.astype(q_ref.dtype)
        values = [old * decay[:, None] + _product(weights, own, 0) for old, own in zip(values, seen, strict=True)]
        return now, total, *values

    nothing = [jnp.zeros((row_tile, size), jnp.float32) for _, size, _ in v_parts]
    unseen = (jnp.full(row_tile, NEG_INF, jnp.float32), jnp.zeros(row_tile, jnp.float32), *nothing)
    largest, total, *values = jax.lax.fori_loop(0, pl.cdiv(stop - start, key_tile), add, unseen)
    has_seen = total > 0
    total = jnp.where(has_seen, total, 1.0)
    plgpu.store(lse_ref.at[b, head, split, rows], jnp.where(has_seen, largest + jnp.log(total), NEG_INF), mask=is_row)
    for (begin, size, end), value in zip(v_parts, values, strict=True):
        channels = begin + jnp.arange(size, dtype=jnp.int32)
        is_kept = is_row[:, None] & (channels < end)[None]
        place = out_ref.at[b, head, split, rows[:, None], channels[None]]
        plgpu.store(place, value / total[:, None], mask=is_kept)


def _powers(start: int, stop: int) -> tuple[tuple[int, int, int], ...]:
    """Cut channels into blocks whose sizes are powers of two, largest first: (start, size, stop). The last may be
    padded: 0 to 88 is (0, 64, 88), (64, 16, 88), (80, 16, 88)."""
    parts = []
    while start < stop:
        size = max(_MIN_TILE, 1 << ((stop - start).bit_length() - 1))
        parts.append((start, size, stop))
        start += size
    return tuple(parts)


def _load(ref: Any, where: tuple[Any, ...], part: tuple[int, int, int], is_there: jax.Array) -> jax.Array:
    """Channels of rows [row, size], 0 where there are none. `where` indexes the array's leading axes, the row's by an
    array of them."""
    start, size, stop = part
    channels = start + jnp.arange(size, dtype=jnp.int32)[None]
    mask = is_there[:, None]
    mask = jnp.broadcast_to(mask, (mask.shape[0], size)) if start + size <= stop else mask & (channels < stop)
    place = tuple(index[:, None] if index.ndim else index for index in where)
    return plgpu.load(ref.at[(*place, channels)], mask=mask, other=jnp.zeros((), ref.dtype))


def _product(x: jax.Array, other: jax.Array, axis: int) -> jax.Array:
    """The product of two matrices along the second axis of `x` and this one of the other, in float32."""
    return jax.lax.dot_general(x, other, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
