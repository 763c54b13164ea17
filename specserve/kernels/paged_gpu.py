"""Attention over pages, and over a step's new keys, on NVIDIA GPUs: two Pallas kernels, lowered through Triton.

A piece of work is a run of one sequence's keys, for one KV head and a tile of query rows. All runs of a step are about
as long, whosever keys they are, and the programs take them in turns: a long sequence among short ones occupies the
whole GPU. A second kernel merges the results of a sequence's runs by their log-sum-exps (flash-decoding), and goes on
with the new keys under their mask, so a layer's attention is two launches. The page table is read in the kernel, so
nothing is gathered, and pages that a sequence does not have cost nothing.

Runs begin at multiples of their length in the sequence. That length follows from the rows of a step, and is doubled
where the keys of all sequences would make more runs than there is room for results. Up to there the result of a row has
the same bits whatever else is in the batch.

Bytes read from memory: lens * kv_head * (head_dim + v_dim) * itemsize for each sequence, once for all tiles of rows
where the second-level cache holds what they share; v_dim is not counted where the values are the keys' first channels.
For each run and row of queries (v_dim + 1) * 4 bytes are written and read again. New keys and values are read once for
each tile of rows. FLOPs: 2 * lens * kv_head * row *
(head_dim + v_dim) for each sequence, rows rounded up to a tile.

Triton's blocks have powers of two as sizes, and its matrix products at least 16 of each. So rows are padded to tiles,
and channels are cut into powers of two (576 = 512 + 64), of which the last is padded to 16. Nothing of that is copied:
loads and stores are masked.
"""

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specserve.kernels.block import NEG_INF, NewKeys

Parts = tuple[tuple[int, int, int], ...]  # see `_powers`

_MIN_TILE = 16  # Triton's products take no less
_PROGRAMS = 512  # keep the 108 to 148 multiprocessors of a data-centre GPU busy with about four programs each
_MIN_RUN = 128  # keys of a run, at least, and more where results would take more than a share of the keys' bytes
_RESULTS_SHARE = 1 / 8
_MOST_ROWS = 4096  # of queries that have results of runs, of a KV head, beside one run of each sequence


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
    new: NewKeys | None = None,
    interpret: bool = False,
) -> Any:  # [batch, kv_head, row, v_dim] and [batch, kv_head, row], float32; with `new` [batch, n, head, v_dim]
    """Softmax attention over the prefix alone, and the log-sum-exp of the scores.

    A row sees entry i if first <= i < lens and, with a window, its position is less than `window` after i. Nothing else
    is read, so whatever lies there is never heard. A row that sees nothing gives 0 with a log-sum-exp of NEG_INF.
    Scores are multiplied by `k_scale`, and probabilities by `v_scale` before the product with the values. Products are
    computed in the dtype of the queries and summed in float32.

    With new keys it is attention over both, in the dtype of the queries, and no log-sum-exp.
    """
    batch, num_kv_heads, num_rows, head_dim = q.shape
    row_tile, key_tile, num_warps = _tiles(head_dim, v_dim)
    row_tile = min(row_tile, max(_MIN_TILE, pl.next_power_of_2(num_rows)))
    num_tiles, num_keys = pl.cdiv(num_rows, row_tile), page_table.shape[1] * k_pages.shape[2]
    lens = jnp.minimum(lens, num_keys)  # a table is never read past its end
    begins = jnp.full(batch, first, jnp.int32)
    if not window:
        positions = None
    if positions is not None:
        begins = jnp.maximum(begins, jnp.min(positions, axis=1) - (window - 1))
    of_key = (head_dim + (0 if v_pages is None else v_dim)) * k_pages.dtype.itemsize
    run = max(key_tile, _least_run(num_rows, v_dim, of_key))
    num_runs, num_programs, work = batch, batch, None
    if run < num_keys:
        num_runs += min(batch * (num_keys // run), max(1, _MOST_ROWS // num_rows))
        num_programs = min(num_runs, pl.cdiv(_PROGRAMS, num_kv_heads * num_tiles))
        work = _runs(begins, lens, run, num_runs)
    call = functools.partial(_call, interpret, num_warps, row_tile=row_tile, key_tile=key_tile, v_dim=v_dim)
    arrays = (q, k_pages, v_pages, page_table, begins, lens, positions, k_scale, v_scale, work)
    found = call("attend_pages", _kernel, arrays, num_programs, num_runs, window=window, softcap=softcap)
    if new is not None:
        return call("merge_runs", _merge_with_new, (q, *found, work, new), batch, None, softcap=softcap)
    return found if work is None else call("merge_runs", _merge, (q, *found, work), batch, batch)


def _call(
    interpret: bool,
    num_warps: int,
    name: str,
    kernel: Any,
    arrays: tuple[Any, ...],  # queries first
    num_programs: int,  # for each KV head and tile of rows
    num_results: int | None,  # each with its log-sum-exp, in float32; None: of all tokens, as `attend` gives them
    *,
    row_tile: int,
    v_dim: int,
    **options: Any,
) -> Any:
    """Launch one of the kernels."""
    q = arrays[0]
    batch, num_kv_heads, num_rows = q.shape[:3]
    if num_results is None:
        n = arrays[-1].mask.shape[1]
        results = jax.ShapeDtypeStruct((batch, n, num_kv_heads * num_rows // n, v_dim), q.dtype)
    else:
        rows = num_results, num_kv_heads, num_rows
        results = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*rows, v_dim), rows))
    return pl.pallas_call(
        functools.partial(kernel, row_tile=row_tile, v_dim=v_dim, **options),
        out_shape=results,
        grid=(pl.cdiv(num_rows, row_tile), num_kv_heads, num_programs),
        in_specs=jax.tree.map(lambda _array: pl.BlockSpec(), arrays),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=2),
        interpret=interpret,
        name=name,
    )(*arrays)


def _least_run(num_rows: int, v_dim: int, of_key: int) -> int:
    """Return how many keys a run has at least, of so many bytes each, for these rows of queries."""
    results = 2 * 4 * num_rows * v_dim
    return max(_MIN_RUN, pl.next_power_of_2(math.ceil(results / (_RESULTS_SHARE * of_key))))


def _runs(begins: jax.Array, lens: jax.Array, run: int, num_runs: int) -> jax.Array:  # [1 + batch] int32
    """Return the keys of a run, which are `run` times a power of two, and behind them the number of runs of each
    sequence and all before it. No more than `num_runs` altogether, which is more than one for each sequence."""
    length = run * 2 ** np.arange(32 - run.bit_length(), dtype=np.int32)[:, None]
    numbers = jnp.where(lens > begins, -(-lens // length) - begins // length, 0)
    fits = jnp.sum(numbers, axis=1) <= num_runs
    chosen = jnp.argmax(fits)
    return jnp.concatenate([jnp.asarray(length[:, 0])[chosen][None], jnp.cumsum(numbers[chosen])]).astype(jnp.int32)


def _tiles(head_dim: int, v_dim: int) -> tuple[int, int, int]:
    """The rows and the keys of a tile at most, and the number of warps, so that registers hold it."""
    if v_dim > 256:
        return 16, 32, 8
    if max(head_dim, v_dim) > 128:
        return 32, 32, 8
    return 64, 64, 4


def _merge(
    _q_ref: Any,
    out_ref: Any,  # [run, kv_head, row, v_dim]
    lse_ref: Any,  # [run, kv_head, row]
    work_ref: Any,
    merged_ref: Any,  # [batch, kv_head, row, v_dim]
    merged_lse_ref: Any,  # [batch, kv_head, row]
    *,
    row_tile: int,
    key_tile: int,
    v_dim: int,
) -> None:
    """Merge the results of one sequence's runs, in their order, for one KV head and a tile of rows."""
    del key_tile
    head, b = pl.program_id(1), pl.program_id(2)
    rows = pl.program_id(0) * row_tile + jnp.arange(row_tile, dtype=jnp.int32)
    is_row, parts = rows < out_ref.shape[2], _powers(0, v_dim)
    sums = _sum_runs(out_ref, lse_ref, work_ref, (b, head, rows), is_row, parts)
    _store(merged_ref, merged_lse_ref, (b, head, rows), is_row, parts, sums)


def _merge_with_new(
    q_ref: Any,  # [batch, kv_head, row, head_dim]
    out_ref: Any,  # [run, kv_head, row, v_dim]
    lse_ref: Any,  # [run, kv_head, row]
    work_ref: Any,
    new: NewKeys,  # of references
    merged_ref: Any,  # [batch, n, head, v_dim]
    *,
    row_tile: int,
    key_tile: int,
    v_dim: int,
    softcap: float,
) -> None:
    """Merge the results of one sequence's runs with its new keys, for one KV head and a tile of rows."""
    head, b = pl.program_id(1), pl.program_id(2)
    (num_rows, head_dim), (of_mask, n, m) = q_ref.shape[2:], new.mask.shape
    rows = pl.program_id(0) * row_tile + jnp.arange(row_tile, dtype=jnp.int32)
    is_row = rows < num_rows
    parts, v_parts = _channels(head_dim, v_dim, values_are_keys=new.v is None)
    queries = [_load(q_ref, (b, head, rows), part, is_row) for part in parts]
    key_tile = min(key_tile, max(_MIN_TILE, pl.next_power_of_2(m)))

    def add(i: jax.Array, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        index = i * key_tile + jnp.arange(key_tile, dtype=jnp.int32)
        is_key = index < m
        place = b if of_mask > 1 else 0, jax.lax.rem(rows, n)[:, None], index[None]
        is_seen = plgpu.load(new.mask.at[place], mask=is_row[:, None] & is_key[None], other=False)
        tile = _Keys(new.k, new.v, new.k_scale, new.v_scale, (b, index, head), is_key)
        return _add(sums, queries, tile, is_seen, parts, v_parts, softcap)

    sums = _sum_runs(out_ref, lse_ref, work_ref, (b, head, rows), is_row, v_parts)
    largest, total, *values = jax.lax.fori_loop(0, pl.cdiv(m, key_tile), add, sums)
    if new.sinks is not None:
        sinks = plgpu.load(new.sinks.at[head, rows], mask=is_row, other=NEG_INF)
        now = jnp.maximum(largest, sinks)
        decay = jnp.exp(largest - now)
        total = total * decay + jnp.exp(sinks - now)
        largest, values = now, [value * decay[:, None] for value in values]
    places = b, jax.lax.rem(rows, n), head * (num_rows // n) + jax.lax.div(rows, n)
    _store(merged_ref, None, places, is_row, v_parts, (largest, total, *values))


def _sum_runs(
    out_ref: Any,
    lse_ref: Any,
    work_ref: Any,  # see `_runs`; None: a run is a sequence
    where: tuple[Any, ...],  # the sequence, the KV head, the rows
    is_row: jax.Array,
    parts: Parts,
) -> tuple[Any, ...]:
    """Add up a sequence's runs: the largest score of each row, its sum of exponentials, its values."""
    b, head, rows = where

    def add(run: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        largest, total, *values = carry
        lse = plgpu.load(lse_ref.at[run, head, rows], mask=is_row, other=NEG_INF)
        now = jnp.maximum(largest, lse)
        decay, weight = jnp.exp(largest - now), jnp.exp(lse - now)
        found = [_load(out_ref, (run, head, rows), part, is_row) for part in parts]
        values = [old * decay[:, None] + weight[:, None] * own for old, own in zip(values, found, strict=True)]
        return now, total * decay + weight, *values

    begin, end = (b, b + 1) if work_ref is None else (jnp.where(b > 0, work_ref[b], 0), work_ref[b + 1])
    return jax.lax.fori_loop(begin, end, add, _unseen(len(rows), parts))


def _unseen(row_tile: int, parts: Parts) -> tuple[Any, ...]:
    """Return what rows have that have seen nothing: their largest score, sum of exponentials, and values."""
    nothing = [jnp.zeros((row_tile, size), jnp.float32) for _, size, _ in parts]
    return jnp.full(row_tile, NEG_INF, jnp.float32), jnp.zeros(row_tile, jnp.float32), *nothing


class _Keys(NamedTuple):
    """A tile of keys and values: the arrays that they lie in, and where. Only the last channels are left open."""

    k_ref: Any
    v_ref: Any  # None: the values are the keys' first channels
    k_scale_ref: Any
    v_scale_ref: Any
    where: tuple[Any, ...]
    is_key: jax.Array


def _add(
    sums: tuple[Any, ...],  # see `_unseen`
    queries: list[jax.Array],  # [row, channel] of each part
    tile: _Keys,
    is_seen: jax.Array,  # [row, key]
    parts: Parts,
    v_parts: Parts,
    softcap: float,
) -> tuple[Any, ...]:
    """Add a tile of keys to what rows have seen."""
    largest, total, *values = sums
    keys = [_load(tile.k_ref, tile.where, part, tile.is_key).astype(queries[0].dtype) for part in parts]
    scores = jnp.zeros(is_seen.shape, jnp.float32)
    for query, key in zip(queries, keys, strict=True):
        scores += _product(query, key, 1)
    if tile.k_scale_ref is not None:
        scores *= plgpu.load(tile.k_scale_ref.at[tile.where], mask=tile.is_key, other=0.0)[None]
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(is_seen, scores, NEG_INF)
    now = jnp.maximum(largest, jnp.max(scores, axis=1))
    weights = jnp.where(is_seen, jnp.exp(scores - now[:, None]), 0.0)
    decay = jnp.exp(largest - now)
    total = total * decay + jnp.sum(weights, axis=1)
    if tile.v_ref is None:
        seen, scale_ref = keys[: len(v_parts)], tile.k_scale_ref
    else:
        seen = [_load(tile.v_ref, tile.where, part, tile.is_key).astype(queries[0].dtype) for part in v_parts]
        scale_ref = tile.v_scale_ref
    if scale_ref is not None:
        weights *= plgpu.load(scale_ref.at[tile.where], mask=tile.is_key, other=0.0)[None]
    weights = weights.astype(queries[0].dtype)
    values = [old * decay[:, None] + _product(weights, own, 0) for old, own in zip(values, seen, strict=True)]
    return now, total, *values


def _store(
    out_ref: Any,
    lse_ref: Any,  # None: it is not written
    where: tuple[Any, ...],  # of rows, some indices by an array of them
    is_row: jax.Array,
    parts: Parts,
    sums: tuple[Any, ...],  # see `_unseen`
) -> None:
    """Write the softmax and its log-sum-exp: 0 and NEG_INF where nothing was seen."""
    largest, total, *values = sums
    has_seen = (total > 0) & (largest > NEG_INF)
    total = jnp.where(has_seen, total, 1.0)
    if lse_ref is not None:
        plgpu.store(lse_ref.at[where], jnp.where(has_seen, largest + jnp.log(total), NEG_INF), mask=is_row)
    for (begin, size, end), value in zip(parts, values, strict=True):
        channels = begin + jnp.arange(size, dtype=jnp.int32)
        is_kept = is_row[:, None] & (channels < end)[None]
        place = out_ref.at[(*(index[:, None] if index.ndim else index for index in where), channels[None])]
        plgpu.store(place, (value / total[:, None]).astype(out_ref.dtype), mask=is_kept)


def _kernel(
    q_ref: Any,  # all arrays are whole, in global memory
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    begins_ref: Any,  # [batch] the first entry that any row sees
    lens_ref: Any,
    positions_ref: Any,
    k_scale_ref: Any,
    v_scale_ref: Any,
    work_ref: Any,  # see `_runs`; None: a run is a sequence
    out_ref: Any,  # [run, kv_head, row, v_dim]
    lse_ref: Any,  # [run, kv_head, row]
    *,
    row_tile: int,
    key_tile: int,
    v_dim: int,
    window: int,
    softcap: float,
) -> None:
    """Attend to some runs of keys, for one KV head and one tile of rows."""
    head, program = pl.program_id(1), pl.program_id(2)
    num_rows, head_dim = q_ref.shape[2:]
    rows = pl.program_id(0) * row_tile + jnp.arange(row_tile, dtype=jnp.int32)
    is_row = rows < num_rows
    parts, v_parts = _channels(head_dim, v_dim, values_are_keys=v_ref is None)

    def attend(b: jax.Array, start: jax.Array, stop: jax.Array, run: jax.Array) -> None:
        """Attend to the keys from `start` to `stop` of sequence b, and write what comes of it as that run's."""
        positions = None
        if positions_ref is not None:
            positions = plgpu.load(positions_ref.at[b, rows], mask=is_row, other=jnp.iinfo(jnp.int32).max)
            # rows that are padding must not move the begin
            start = jnp.maximum(start, jnp.min(positions) - (window - 1))
        queries = [_load(q_ref, (b, head, rows), part, is_row) for part in parts]

        def add(i: jax.Array, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            index = start + i * key_tile + jnp.arange(key_tile, dtype=jnp.int32)
            is_key = index < stop
            page = plgpu.load(table_ref.at[b, jax.lax.div(index, k_ref.shape[2])], mask=is_key, other=0)
            page = jnp.clip(page, 0, k_ref.shape[0] - 1)
            is_seen = jnp.broadcast_to(is_key[None], (row_tile, key_tile))
            if positions is not None:
                is_seen &= positions[:, None] - index[None] < window
            where = (page, head, jax.lax.rem(index, k_ref.shape[2]))
            tile = _Keys(k_ref, v_ref, k_scale_ref, v_scale_ref, where, is_key)
            return _add(sums, queries, tile, is_seen, parts, v_parts, softcap)

        num_key_tiles = pl.cdiv(jnp.maximum(stop - start, 0), key_tile)
        sums = jax.lax.fori_loop(0, num_key_tiles, add, _unseen(row_tile, v_parts))
        _store(out_ref, lse_ref, (run, head, rows), is_row, v_parts, sums)

    if work_ref is None:
        attend(program, begins_ref[program], lens_ref[program], program)
        return
    length, batch = work_ref[0], lens_ref.shape[0]

    def take(i: jax.Array, _: None) -> None:
        run = program + i * pl.num_programs(2)
        b = _sequence_of(run, work_ref, batch)
        begin = begins_ref[b]
        nth = jax.lax.div(begin, length) + run - jnp.where(b > 0, work_ref[b], 0)
        attend(b, jnp.maximum(begin, nth * length), jnp.minimum(lens_ref[b], (nth + 1) * length), run)

    num_own = pl.cdiv(jnp.maximum(work_ref[batch] - program, 0), pl.num_programs(2))
    jax.lax.fori_loop(0, num_own, take, None)


def _sequence_of(run: jax.Array, work_ref: Any, batch: int) -> jax.Array:
    """The sequence that has this run: the first with more runs up to it. By bisection."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = jax.lax.div(low + high, 2)
        is_after = work_ref[middle + 1] <= run
        return jnp.where(is_after, middle + 1, low), jnp.where(is_after, high, middle)

    return jax.lax.fori_loop(0, batch.bit_length(), halve, (jnp.int32(0), jnp.int32(batch - 1)))[0]


def _channels(head_dim: int, v_dim: int, *, values_are_keys: bool) -> tuple[Parts, Parts]:
    """Cut the channels of keys, and those of values, which the keys' parts begin with where they are their channels."""
    v_parts = _powers(0, v_dim)
    return (*v_parts, *_powers(v_dim, head_dim)) if values_are_keys else _powers(0, head_dim), v_parts


def _powers(start: int, stop: int) -> Parts:
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
