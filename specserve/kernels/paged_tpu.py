"""Attention over the committed prefix on TPUs: one Mosaic kernel that reads the pages where they are.

`attend_pages` knows queries, pages and lengths. Of masks it knows a window alone; new keys, trees and models are not
its business. `takes` reports which arrays it can serve.

With b sequences of s visible keys in whole pages, H KV heads, r rows, head_dim d, v_dim e, and page items of w
bytes (d and e are rounded up to 128 lanes, as they lie in memory; e counts no copies where values are keys):

    bytes moved   b H (s (d + e) w ceil(r / r') + r (d x q's item + 4 e))
    FLOPs         2 b H s r (d + e), and b H s r exponentials
    VMEM          2 h k (d + e) w  +  2 h r' (d x q's item + 4 e)  +  1,024 h r'  +  12 r' k + k (d + e) x q's item
                  pages, twice        queries and results, twice      max and sum    scores and converted pages

in blocks of h heads, r' rows and k keys, which are chosen so that this stays below 12 MiB. Scales, of 4 bytes
each, are gathered for the whole table before the kernel reads them, so they move three times.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specserve.errors import ConfigError
from specserve.kernels.block import NEG_INF

_LANES = 128  # of a vector register; arrays of fewer channels take as many
# Of one block; fewer where fast memory is short. More keys would be worked on in vain where a sequence is short, and
# more rows unrolled into programs that compile for minutes.
_MAX_ROWS, _MAX_HEADS, _MAX_KEYS = 512, 8, 512
_VMEM = 12 * 2**20  # bytes planned for a program; compilers grant 16 MiB on every generation unless asked for more
_SMEM = 2**19  # bytes of page tables and schedules, in a scalar memory of 1 MiB
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)
_NO_PROGRAM = 2**31 - 1


@dataclass(frozen=True)
class _Blocks:
    """The sizes of the blocks that a program holds at a time: KV heads, query rows of each, and pages."""

    heads: int
    rows: int
    pages: int
    page_size: int

    @property
    def keys(self) -> int:
        return self.pages * self.page_size

    def place(self, page: Any, block: Any) -> Any:
        """Return the slice of its block in which the keys of the sequence's `page` lie."""
        offset = (page - block * self.pages) * self.page_size
        return pl.ds(pl.multiple_of(offset, self.page_size), self.page_size)


def attend_pages(
    q: jax.Array,  # [batch, kv_head, row, head_dim], scaled; row = group * n
    k_pages: jax.Array,  # [page, kv_head, page_size, head_dim]
    v_pages: jax.Array | None,  # [page, kv_head, page_size, v_dim]; None: the values are v_dim channels of k_pages
    page_table: jax.Array,  # [batch, pages] int32; ids past the pages in use are never read
    lens: jax.Array,  # [batch] int32, committed entries, at most pages * page_size
    positions: jax.Array | None,  # [batch, row] int32; None where there is no window
    *,
    v_dim: int,
    v_first: int = 0,  # where they are, the first of them; the keys are the channels before, or all of them where 0
    first: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    k_scale: jax.Array | None = None,  # [page, kv_head, page_size] float32, of quantised pages
    v_scale: jax.Array | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:  # [batch, kv_head, row, v_dim] float32 and [batch, kv_head, row] float32
    """Softmax attention of query rows over the committed prefix of their sequence, and the log-sum-exp of their scores.

    Entry i of sequence b is visible to a row if first <= i < lens[b] and, where there is a window, if the row's
    position - i < window. A row that sees nothing gets zeros and a log-sum-exp of NEG_INF (-1e30, finite). Scores and
    softmax are float32. Products have operands of q's dtype (float32 instead of float16, which the matrix unit lacks),
    to which pages of another dtype are converted in fast memory; float32 products are exact to float32, by several
    passes. Scores of quantised keys are multiplied by `k_scale`, and probabilities by `v_scale` before their product
    with the values. Where values are keys, they have the keys' scale, and `v_scale` is None. Heads of few channels keep
    their values behind their keys, in the same registers (`v_first`).

    One program serves some KV heads, a block of their query rows and one sequence. It copies the pages from the first
    that any of its rows sees to the last one in use, up to 512 keys at a time. While it works on one block of keys the
    next one is on its way, that of the next program included, so only the first copy of a call is waited for in full.

    Raises ConfigError for pages that the kernel cannot take; `takes` reports so beforehand.
    """
    if (reason := _refusal(k_pages, v_pages)) is not None:
        raise ConfigError(f"attention over pages on TPU: {reason}")
    assert v_pages is not None or v_first or v_scale is None, "values that are keys have the keys' scale"
    assert positions is not None or not window, "a window goes by positions"
    if q.dtype != jnp.bfloat16:
        q = q.astype(jnp.float32)
    own = slice(v_first, v_first + v_dim)
    if v_first:  # the keys' channels of the sums are left out at the end, which costs the matrix unit nothing
        q, v_dim = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, k_pages.shape[-1] - q.shape[-1]))), k_pages.shape[-1]
    blocks = _plan(q, k_pages, v_pages, v_dim, page_table.shape[1])
    assert blocks is not None, "what `takes` promises"
    pages = {name: in_hbm(array, interpret) for name, array in (("k", k_pages), ("v", v_pages)) if array is not None}
    scales = {name: scale for name, scale in (("k", k_scale), ("v", v_scale)) if scale is not None}
    given = {"first": first, "window": window, "softcap": softcap, "interpret": interpret}
    run = functools.partial(_attend_pages, pages=pages, scales=scales, blocks=blocks, v_dim=v_dim, **given)
    parts = _parts(len(q), page_table.shape[1], row_blocks=-(-q.shape[2] // blocks.rows))
    arrays = (q, page_table, lens, positions if window else None)
    results = [run(*jax.tree.map(lambda x, i=i: x[i], arrays)) for i in parts]
    out, lse = results[0] if len(results) == 1 else jax.tree.map(lambda *each: jnp.concatenate(each), *results)
    return out[..., own], lse


def in_hbm(pages: jax.Array, interpret: bool | pltpu.InterpretParams) -> jax.Array:
    """The pages, kept in the large memory: the compiler would fetch small arrays into the fast one as a whole."""
    return pages if interpret else pltpu.with_memory_space_constraint(pages, pltpu.HBM)


def _parts(batch: int, num_pages: int, row_blocks: int) -> list[slice]:
    """The batch in parts of as many sequences as the scalar memory can name the pages of. Raises ConfigError where it
    is none."""
    most = _SMEM // (4 * (num_pages + 1 + 3 * row_blocks))
    if most == 0:
        raise ConfigError(f"attention over pages on TPU: a table of {num_pages} pages; use larger pages")
    return [slice(i, i + most) for i in range(0, batch, most)]


def takes(k_pages: jax.Array, v_pages: jax.Array | None) -> bool:
    """Return whether `attend_pages` can read pages of these shapes and dtypes. Else its error gives the reason."""
    return _refusal(k_pages, v_pages) is None


def _refusal(k_pages: jax.Array, v_pages: jax.Array | None) -> str | None:
    """Return why the kernel cannot take these pages, or None where it can. The compilers for TPU v4 to v7x take all
    other pages."""
    page_size, head_dim = k_pages.shape[2:]
    all_pages = [pages for pages in (k_pages, v_pages) if pages is not None]
    v_dim = all_pages[-1].shape[3]
    for pages in all_pages:
        if pages.dtype not in _DTYPES:
            return f"pages must be one of {', '.join(str(jnp.dtype(each)) for each in _DTYPES)}, not {pages.dtype}"
        tile = 32 // pages.dtype.itemsize  # the sublanes that a register has for the type
        if page_size % tile:
            return f"pages of {pages.dtype} must hold a multiple of {tile} tokens, not {page_size}"
    for dtype in (jnp.float32, jnp.bfloat16):
        q = jax.ShapeDtypeStruct((1, k_pages.shape[1], _MAX_ROWS, head_dim), dtype)
        if _plan(q, k_pages, v_pages, v_dim, _MAX_KEYS) is None:
            sizes = f"{page_size} tokens with {head_dim} + {v_dim} channels"
            return f"pages of {sizes} do not fit into {_VMEM} bytes of fast memory twice; use smaller pages"
    return None


def _plan(
    q: jax.Array | jax.ShapeDtypeStruct, k_pages: jax.Array, v_pages: jax.Array | None, v_dim: int, width: int
) -> _Blocks | None:
    """The largest blocks that fit into fast memory: rows first, since each block of rows reads all pages again. Keys
    are next, since the sums are scaled anew for each block of keys."""
    kv_heads, num_rows, head_dim = q.shape[1:]
    page_size, item = k_pages.shape[2], q.dtype.itemsize
    d, e = _up(head_dim, _LANES), _up(v_dim, _LANES)
    stored = d
    if v_pages is not None:
        stored += e

    def fits(heads: int, rows: int, keys: int) -> bool:
        pages = 2 * heads * keys * stored * k_pages.dtype.itemsize
        queries = 2 * heads * rows * (d * item + 4 * e) + 1024 * heads * rows
        return pages + queries + 12 * rows * keys + keys * stored * item <= _VMEM

    sublanes = 32 // item
    step = _LANES // math.gcd(_LANES, page_size)  # pages, so that blocks of keys are whole registers of scales
    for most in (_MAX_ROWS, _MAX_ROWS // 2, _MAX_ROWS // 4, _MAX_ROWS // 8, sublanes):
        rows = _up(-(-num_rows // -(-num_rows // most)), sublanes)
        for keys in (_MAX_KEYS, _MAX_KEYS // 2, _MAX_KEYS // 4):
            pages = min(_up(width, step), max(step, keys // page_size // step * step))
            for heads in (h for h in range(min(kv_heads, _MAX_HEADS), 0, -1) if kv_heads % h == 0):
                if fits(heads, rows, pages * page_size):
                    return _Blocks(heads, rows, pages, page_size)
    return None


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _per_sequence(scale: jax.Array, page_table: jax.Array, blocks: _Blocks) -> jax.Array:  # [batch, kv_head, entry]
    """The scales of the pages of each table row in the order of its sequence, since a register holds the scales of
    more keys than a page has. A key has 4 bytes of scale for each head_dim bytes of its own."""
    found = scale.at[page_table].get(mode="clip").transpose(0, 2, 1, 3)
    found = found.reshape(*found.shape[:2], -1)
    return jnp.pad(found, ((0, 0), (0, 0), (0, -found.shape[-1] % blocks.keys)))


def _schedule(starts: jax.Array, lens: jax.Array, keys: int) -> tuple[jax.Array, jax.Array]:
    """Return for each program (a sequence and a block of rows, in this order) the number of blocks of keys that the
    programs before it work on, and the next program after it that has any."""
    ends = lens[:, None]
    num_blocks = jnp.where(starts < ends, -(-ends // keys) - starts // keys, 0).reshape(-1)
    busy = jnp.where(num_blocks > 0, jnp.arange(len(num_blocks), dtype=jnp.int32), _NO_PROGRAM)
    following = jax.lax.cummin(jnp.append(busy[1:], _NO_PROGRAM), reverse=True)
    return (jnp.cumsum(num_blocks) - num_blocks).astype(jnp.int32), following.astype(jnp.int32)


def _attend_pages(
    q: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    positions: jax.Array | None,
    *,
    pages: dict[str, jax.Array],
    scales: dict[str, jax.Array],
    blocks: _Blocks,
    v_dim: int,
    first: int,
    window: int,
    softcap: float,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, jax.Array]:
    """`attend_pages` of as many sequences as one call can serve."""
    batch, kv_heads, num_rows, _ = q.shape
    row_blocks = -(-num_rows // blocks.rows)
    padding = row_blocks * blocks.rows - num_rows
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))
    lens = jnp.minimum(lens, page_table.shape[1] * blocks.page_size)  # no id is read from beyond the table
    starts = jnp.full((batch, row_blocks), first, jnp.int32)
    by_position = []
    if positions is not None:
        positions = jnp.pad(positions, ((0, 0), (0, padding)), constant_values=2**31 - 1)  # padding sees nothing
        oldest = positions.reshape(batch, row_blocks, blocks.rows).min(axis=-1) - window + 1
        starts = jnp.maximum(starts, oldest)
        by_position = [positions[..., None]]
    scales = {name: _per_sequence(scale, page_table, blocks) for name, scale in scales.items()}
    call = _call(q, by_position, pages, scales, blocks, v_dim, window, softcap, interpret)
    scalars = (page_table.reshape(-1), lens, starts.reshape(-1), *_schedule(starts, lens, blocks.keys))
    out, lse = call(*scalars, q, by_position, pages, scales)
    return out[:, :, :num_rows], lse.reshape(batch, kv_heads, -1)[:, :, :num_rows]


def _call(
    q: jax.Array,
    by_position: list[jax.Array],
    pages: dict[str, jax.Array],
    scales: dict[str, jax.Array],
    blocks: _Blocks,
    v_dim: int,
    window: int,
    softcap: float,
    interpret: bool | pltpu.InterpretParams,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The kernel over all programs, to be called with the scalars and the four groups of arrays."""
    batch, kv_heads, num_rows, head_dim = q.shape
    row_blocks = num_rows // blocks.rows
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)

    def per_program(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, blocks.heads, *shape), lambda h, b, r, *_: (b, h, r, *[0] * (len(shape) - 1)))

    return pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, window=window, softcap=softcap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(kv_heads // blocks.heads, batch, row_blocks),
            in_specs=[
                per_program(blocks.rows, head_dim),
                [pl.BlockSpec((1, blocks.rows, 1), lambda _, b, r, *__: (b, r, 0)) for _ in by_position],
                dict.fromkeys(pages, in_hbm),
                dict.fromkeys(scales, in_hbm),
            ],
            out_specs=[per_program(blocks.rows, v_dim), per_program(1, 1, blocks.rows)],
            scratch_shapes=[
                {name: pltpu.VMEM((2, blocks.heads, blocks.keys, x.shape[-1]), x.dtype) for name, x in pages.items()},
                {name: pltpu.VMEM((2, kv_heads, blocks.keys), jnp.float32) for name in scales},
                pltpu.VMEM((blocks.heads, blocks.rows, 1), jnp.float32),
                pltpu.VMEM((blocks.heads, blocks.rows, 1), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, kv_heads, num_rows, v_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, row_blocks, 1, blocks.rows), jnp.float32),
        ],
        # only the groups of heads are independent: programs of one group hand buffers on to each other
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="attend_pages",
    )


@dataclass(frozen=True)
class _Copies:
    """The copies of a block of keys into one of two buffers: the pages of it that its program needs, and the scales."""

    table: Any  # the refs of `_kernel`
    lens: Any
    starts: Any
    pages: dict[str, Any]
    scales: dict[str, Any]
    page_buffers: dict[str, Any]
    scale_buffers: dict[str, Any]
    semaphores: Any
    blocks: _Blocks
    head: Any  # the first of the program's heads

    def start(self, program: Any, block: Any, slot: Any) -> None:
        self._each(lambda copy: copy.start(), program, block, slot)

    def wait(self, program: Any, block: Any, slot: Any) -> None:
        self._each(lambda copy: copy.wait(), program, block, slot)

    def _each(self, act: Callable[[Any], None], program: Any, block: Any, slot: Any) -> None:
        batch, page_size = self.lens.shape[0], self.blocks.page_size
        sequence, width = _div(program, self.starts.shape[0] // batch), self.table.shape[0] // batch
        semaphore = self.semaphores.at[slot]

        def copy_page(page: Any, _: None) -> None:
            place = self.blocks.place(page, block)
            heads = pl.ds(self.head, self.blocks.heads)
            page_id = self.table[sequence * width + page]
            for name, source in self.pages.items():
                target = self.page_buffers[name].at[slot, :, place]
                act(pltpu.make_async_copy(source.at[page_id, heads], target, semaphore))

        begin = jnp.maximum(block * self.blocks.pages, _div(self.starts[program], page_size))
        end = jnp.minimum((block + 1) * self.blocks.pages, _div(self.lens[sequence] + page_size - 1, page_size))
        jax.lax.fori_loop(begin, end, copy_page, None)
        keys = self.blocks.keys
        for name, source in self.scales.items():
            part = source.at[sequence, :, pl.ds(pl.multiple_of(block * keys, keys), keys)]
            act(pltpu.make_async_copy(part, self.scale_buffers[name].at[slot], semaphore))


def _div(x: Any, y: Any) -> Any:
    """x // y of numbers that are not negative, which is fewer instructions than of any."""
    return jax.lax.div(x, jnp.int32(y))


def _kernel(
    table: Any,  # [batch * pages]
    lens: Any,  # [batch]
    starts: Any,  # [batch * row_block]: the first entry that a program's rows see
    before: Any,  # [batch * row_block]: the blocks of keys of the programs before
    following: Any,  # [batch * row_block]: the next program that has keys to read
    q: Any,  # [1, head, row, head_dim]
    by_position: list[Any],  # [1, row, 1] where there is a window
    pages: dict[str, Any],  # [page, kv_head, page_size, channel] each
    scales: dict[str, Any],  # [batch, kv_head, entry] each
    out: Any,  # [1, head, row, v_dim]; holds the sums until the end
    lse: Any,  # [1, head, 1, 1, row]
    page_buffers: dict[str, Any],  # [2, head, key, channel] each
    scale_buffers: dict[str, Any],  # [2, kv_head, key] each
    largest: Any,  # [head, row, 1]: of the scores so far
    total: Any,  # [head, row, 1]: the sum of exp(score - largest)
    semaphores: Any,  # [2]
    *,
    blocks: _Blocks,
    window: int,
    softcap: float,
) -> None:
    sequence, head = pl.program_id(1), pl.program_id(0) * blocks.heads
    program = sequence * pl.num_programs(2) + pl.program_id(2)
    copies = _Copies(table, lens, starts, pages, scales, page_buffers, scale_buffers, semaphores, blocks, head)
    of_values, of_scale = ("v" if "v" in group else "k" for group in (pages, scales))
    keys, values = page_buffers["k"], page_buffers[of_values]
    start, end = starts[program], lens[sequence]
    first_block = _div(start, blocks.keys)
    num_blocks = jnp.where(start < end, _div(end + blocks.keys - 1, blocks.keys) - first_block, 0)

    @pl.when(program == 0)
    def _() -> None:  # memory may hold NaN by chance, and a probability of 0 times NaN is NaN
        values[...] = jnp.zeros_like(values)

    @pl.when((before[program] == 0) & (num_blocks > 0))
    def _() -> None:
        copies.start(program, first_block, 0)

    out[...] = jnp.zeros_like(out)
    largest[...] = jnp.full_like(largest, NEG_INF / 2)  # so that hidden scores, NEG_INF, weigh exp(-5e29) = 0
    total[...] = jnp.zeros_like(total)

    def clear(page: Any, block: Any, slot: Any) -> None:
        """Write zeros over the values of a page that no row sees, for the same reason."""
        place = blocks.place(page, block)
        found = values[slot, :, place].astype(jnp.float32)
        index = page * blocks.page_size + jax.lax.broadcasted_iota(jnp.int32, found.shape, 1)
        values[slot, :, place] = jnp.where((index >= start) & (index < end), found, 0).astype(values.dtype)

    def attend(h: int, slot: Any, is_visible: jax.Array, scale: dict[str, jax.Array]) -> None:
        precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        multiply = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
        scores = multiply(q[0, h], keys[slot, h].astype(q.dtype), (((1,), (1,)), ((), ())))
        if "k" in scale:
            scores *= scale["k"]
        if softcap:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(is_visible, scores, NEG_INF)
        new_largest = jnp.maximum(largest[h], jnp.max(scores, axis=1, keepdims=True))
        shrink, weights = jnp.exp(largest[h] - new_largest), jnp.exp(scores - new_largest)
        largest[h], total[h] = new_largest, shrink * total[h] + jnp.sum(weights, axis=1, keepdims=True)
        if scale:
            weights *= scale[of_scale]
        found = values[slot, h, :, : out.shape[-1]].astype(q.dtype)
        out[0, h] = shrink * out[0, h] + multiply(weights.astype(q.dtype), found, (((1,), (0,)), ((), ())))

    def work(step: Any, _: None) -> None:
        block, slot = first_block + step, (before[program] + step) & 1
        successor, is_last = following[program], step + 1 == num_blocks

        @pl.when(~is_last)
        def _() -> None:
            copies.start(program, block + 1, 1 - slot)

        @pl.when(is_last & (successor != _NO_PROGRAM))
        def _() -> None:
            copies.start(successor, _div(starts[successor], blocks.keys), 1 - slot)

        copies.wait(program, block, slot)
        if jnp.issubdtype(values.dtype, jnp.floating):
            first_page, last_page = _div(start, blocks.page_size), _div(end, blocks.page_size)
            pl.when((step == 0) & (first_page * blocks.page_size < start))(lambda: clear(first_page, block, slot))
            pl.when(is_last & (last_page * blocks.page_size < end))(lambda: clear(last_page, block, slot))
        index = block * blocks.keys + jax.lax.broadcasted_iota(jnp.int32, (1, blocks.keys), 1)
        is_held = (index >= start) & (index < end)
        is_visible = is_held
        if window:
            is_visible &= by_position[0][0] - index < window
        for h in range(blocks.heads):
            scale = {name: jnp.where(is_held, x[slot, pl.ds(head + h, 1)], 0) for name, x in scale_buffers.items()}
            attend(h, slot, is_visible, scale)

    jax.lax.fori_loop(0, num_blocks, work, None)
    for h in range(blocks.heads):
        sees_any = total[h] > 0
        out[0, h] /= jnp.where(sees_any, total[h], 1)
        lse[0, h, 0] = jnp.where(sees_any, largest[h] + jnp.log(total[h]), NEG_INF).T
