"""Attention within packed training rows (`attend_rows`), and with the later steps of a rollout (`attend_rollout`).

No array has queries times keys of a whole row. On GPUs and TPUs a kernel keeps scores on the chip (`kernel_for`).
Elsewhere blocks of queries are computed one after the other, and again in the backward pass, and a block leaves out the
keys after it, which none of its queries sees.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from specserve.kernels import native
from specserve.kernels.block import attend_seen
from specserve.mesh import (
    fitting_partition,
    num_parts,
    on_each_device,
    over_parts,
    part_index,
    partition,
    program_platform,
    traced_mesh,
)
from specserve.pytree import pytree

NUM_SEGMENTS = 8  # queries are cut into at most so many runs, each of which sees only the keys up to its own end
MIN_SEGMENT = 128  # shorter runs cost more in dispatch than the keys they save
SCORES_AT_ONCE = 1 << 25  # of all rows and heads that a device has: 128 MB in float32

# q [batch, kv_head, group, n, head_dim], its positions, k, v [batch, m, kv_head, ...], their positions, sinks
# -> [batch, kv_head, group, n, v_dim] and [batch, kv_head, group, n]
Block = Callable[..., tuple[jax.Array, jax.Array]]


@pytree
class Documents:
    """The mask of packed rows, given by document ids: attention is causal and never crosses documents."""

    ids: jax.Array  # [batch, seq] int32

    def dense(self) -> jax.Array:  # [batch, seq, seq] bool
        """The mask as an array: True where the first position sees the second."""
        index = jnp.arange(self.ids.shape[1])
        return (index[:, None] >= index) & (self.ids[:, :, None] == self.ids[:, None])

    def depths(self) -> jax.Array:  # [batch, seq] int32
        """Return each token's number in its document, counted from 1. A document's tokens must stand together. For
        example ids [7, 7, 7, 2, 2] give [1, 2, 3, 1, 2]."""
        index = jnp.arange(self.ids.shape[1])
        is_first = jnp.pad(self.ids[:, 1:] != self.ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        return index + 1 - jax.lax.cummax(jnp.where(is_first, index, 0), axis=1)


@pytree
class _Positions:
    """The document and the index in the row of some queries or keys, which decide what sees what."""

    ids: jax.Array  # [batch, n] int32, their documents
    index: jax.Array  # [n] int32, in the row

    def cut(self, start: jax.Array | int, length: int) -> "_Positions":
        ids = jax.lax.dynamic_slice_in_dim(self.ids, start, length, axis=1)
        return _Positions(ids, jax.lax.dynamic_slice_in_dim(self.index, start, length))


def attend_rows(
    q: jax.Array,  # [batch, seq, head, head_dim]
    k: jax.Array,  # [batch, seq, kv_head, head_dim]
    v: jax.Array,  # [batch, seq, kv_head, v_dim]
    documents: Documents,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,  # [head]
    window: int = 0,
) -> tuple[jax.Array, jax.Array]:  # [batch, seq, head, v_dim], and each softmax's log-sum-exp [batch, seq, head]
    """Causal attention within documents, with the options of `attention.attend`. Over a mesh that cuts the sequence,
    each device computes its own queries and gathers the keys of all devices."""
    q, options = q * (scale or q.shape[3] ** -0.5), _Options(softcap, window)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)
    if (kernel := kernel_for(q, v)) is None:
        return _by_blocks(options, q, k, v, documents.ids, sinks)
    return _by_kernel(options, kernel, q, k, v, documents.ids, sinks)


@dataclass(frozen=True)
class _Options:
    softcap: float
    window: int


def kernel_for(q: jax.Array, v: jax.Array) -> ModuleType | None:
    """Return the module with the kernel of the platform that a program is made for, where it takes arrays of these
    shapes; None: blocks of scores go through memory. So it is on CPUs, and over a mesh that cuts rows."""
    mesh = traced_mesh()
    if native.are_left_out() or num_parts(mesh, "sequence") > 1:
        return None
    # Pallas takes a while to import, which other backends need not wait for
    if program_platform() == "gpu":
        from specserve.kernels import rows_gpu

        return rows_gpu if rows_gpu.takes(q, v) else None
    if program_platform() == "tpu":
        from specserve.kernels import rows_tpu

        return rows_tpu if rows_tpu.takes(q, v) else None
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_kernel(
    options: _Options,
    kernel: Any,
    q: jax.Array,  # [batch, seq, head, head_dim], scaled
    k: jax.Array,
    v: jax.Array,
    ids: jax.Array,  # [batch, seq] int32
    sinks: jax.Array | None,  # [head] float32
) -> tuple[jax.Array, jax.Array]:
    return _forward(options, kernel, q, k, v, ids, sinks)[0]


def _forward(options: _Options, kernel: Any, *arrays: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
    q, k, v, ids, sinks = arrays
    run = functools.partial(kernel.attend, softcap=options.softcap)
    out, lse = _on_each_device(run, (q, k, v, _firsts(ids, options.window), sinks), (_HEADS, _LSE))
    return (out, lse.swapaxes(1, 2)), (*arrays, out, lse)


def _backward(options: _Options, kernel: Any, kept: Any, cotangents: tuple[jax.Array, jax.Array]) -> Any:
    q, k, v, ids, sinks, out, lse = kept
    d_out, d_lse = cotangents[0], cotangents[1].swapaxes(1, 2)
    products = jnp.einsum("bnhv,bnhv->bhn", d_out, out, preferred_element_type=jnp.float32)
    delta = products - d_lse
    run = functools.partial(kernel.gradients, softcap=options.softcap)
    given = q, k, v, _firsts(ids, options.window), lse, d_out, delta
    d_q, d_k, d_v = _on_each_device(run, given, (_HEADS, _HEADS, _HEADS))
    d_sinks = None if sinks is None else -jnp.sum(jnp.exp(sinks[:, None] - lse) * delta, axis=(0, 2))
    return d_q, d_k, d_v, None, d_sinks


_by_kernel.defvjp(_forward, _backward)
_HEADS, _LSE, _ROWS = ("batch", None, "kv_heads"), ("batch", "kv_heads"), ("batch",)


def _firsts(ids: jax.Array, window: int) -> jax.Array:  # [batch, seq] int32
    """Return the first key of each row that a query sees: the first of its document, or of its window."""
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)
    firsts = index + 1 - Documents(ids).depths().astype(jnp.int32)
    return jnp.maximum(firsts, index - window + 1) if window else firsts


def _on_each_device(run: Callable[..., Any], arrays: tuple[Any, ...], results: tuple[tuple[Any, ...], ...]) -> Any:
    """Call a kernel, on a mesh on every device with its own rows and KV heads, where the mesh divides them: the
    compiler cannot cut a kernel."""
    mesh = traced_mesh()
    if mesh is None:
        return run(*arrays)
    (batch, seq), num_kv_heads = arrays[0].shape[:2], arrays[1].shape[2]
    sizes = {"batch": batch, "kv_heads": num_kv_heads}

    def cut(axes: tuple[str | None, ...]) -> Any:
        return fitting_partition(mesh, axes, tuple(sizes.get(axis or "", seq) for axis in axes))

    by_rank = {1: ("kv_heads",), 2: _ROWS, 3: _LSE, 4: _HEADS}  # sinks, numbers of rows, log-sum-exps, heads
    partitions = tuple(None if array is None else cut(by_rank[array.ndim]) for array in arrays)
    everywhere = ("batch", "kv_heads", "experts", "sequence")  # no axis is left to the compiler
    return over_parts(run, everywhere, partitions, tuple(map(cut, results)))(*arrays)


def _by_blocks(
    options: _Options, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """`attend_rows` of scaled queries by XLA's operations, with a block of scores in memory at a time."""
    batch, seq, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    q = q.reshape(batch, seq, num_kv_heads, num_heads // num_kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    if sinks is not None:
        sinks = sinks.reshape(num_kv_heads, -1)
    block = jax.checkpoint(functools.partial(_block, softcap=options.softcap, window=options.window))
    positions = _Positions(ids, jnp.arange(seq))
    if num_parts(traced_mesh(), "sequence") == 1:
        out, lse = _by_segment(block, options.window, q, k, v, positions, sinks)
    else:

        def own(
            q: jax.Array, ids: jax.Array, k: jax.Array, v: jax.Array, positions: _Positions, sinks: jax.Array | None
        ) -> tuple[jax.Array, jax.Array]:
            length = ids.shape[1]
            return _by_block(block, q, positions.cut(part_index("sequence") * length, length), k, v, positions, sinks)

        cut = ("sequence",)
        queries, of_ids, whole = partition((None,) * 3 + cut, cut), partition((None, *cut), cut), partition((), cut)
        run = over_parts(own, cut, (queries, of_ids, whole, whole, whole, whole), (queries, queries))
        out, lse = run(q, ids, k, v, positions, sinks)
    out, lse = jnp.moveaxis(out, 3, 1), jnp.moveaxis(lse, 3, 1)
    return out.reshape(batch, seq, num_heads, -1), lse.reshape(batch, seq, num_heads)


def attend_rollout(
    q: jax.Array,  # [batch, seq, head, head_dim], queries of rollout step len(steps_k)
    k: jax.Array,  # [batch, seq, kv_head, head_dim], keys of rollout step 0
    v: jax.Array,  # [batch, seq, kv_head, v_dim]
    documents: Documents,
    steps_k: tuple[jax.Array, ...],  # one [batch, seq, kv_head, head_dim] for each later step, this one included
    steps_v: tuple[jax.Array, ...],
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,  # [head]
    window: int = 0,
) -> jax.Array:  # [batch, seq, head, v_dim]
    """Attention of a training-time-test rollout (Li et al. 2025, arXiv 2503.01840, section 3.2), with the options of
    `attention.attend`. Position t sees the entries of step 0 that it saw at step 0, and its own entry of each later
    step. That is what the draft sees in serving after len(steps_k) proposed tokens. A window counts those too.

    The scores of its own entries join the softmax over step 0 by log-sum-exp (Milakov and Gimelshein 2018, arXiv
    1805.02867), so the keys of step 0 are never copied beside them.
    """
    assert not window or window > len(steps_k), f"a window of {window} for a rollout of {1 + len(steps_k)} steps"
    rest = window and window - len(steps_k)
    out, lse = attend_rows(q, k, v, documents, scale=scale, softcap=softcap, sinks=sinks, window=rest)
    if not steps_k:
        return out
    by_group = (*q.shape[:2], k.shape[2], -1)  # [batch, seq, kv_head, group, ...]
    grouped = (q * (scale or q.shape[3] ** -0.5)).reshape(*by_group, q.shape[3])
    products = [jnp.einsum("bnkgh,bnkh->bnkg", grouped, own, preferred_element_type=jnp.float32) for own in steps_k]
    if softcap:
        products = [softcap * jnp.tanh(product / softcap) for product in products]
    scores = jnp.stack([lse.reshape(by_group), *products], axis=-1)
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    merged = out.reshape(*by_group, v.shape[3]) * shares[..., :1]
    for i, own in enumerate(steps_v, start=1):
        merged += shares[..., i, None] * own[:, :, :, None]
    return merged.reshape(out.shape)


class Unrolled:
    """The mask of one step of a rollout (`attend_rollout`), given by the keys and values of the steps before. Attention
    leaves the step's own in `own`, as it had them: a layer that keeps less of a token still attends with these. An
    object lives while one layer of one step is traced."""

    def __init__(self, documents: Documents, earlier: Sequence[tuple[jax.Array, jax.Array]]) -> None:
        self.documents, self.earlier = documents, tuple(earlier)
        self.own: tuple[jax.Array, jax.Array] | None = None

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
        """Attend as `attend_rollout` does, with the same options, and keep this step's keys and values in `own`."""
        assert self.own is None, "one layer attends once"
        self.own = k, v
        (first_k, first_v), *later = [*self.earlier, self.own]
        steps_k, steps_v = tuple(k for k, _ in later), tuple(v for _, v in later)
        return attend_rollout(q, first_k, first_v, self.documents, steps_k, steps_v, **options)


def _by_segment(
    block: Block, window: int, q: jax.Array, k: jax.Array, v: jax.Array, positions: _Positions, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Compute run after run of queries, each with the keys up to the run's last query."""
    found = []
    for first, start, stop in _segments(q.shape[3], window):
        queries, keys = positions.cut(start, stop - start), positions.cut(first, stop - first)
        part = q[:, :, :, start:stop]
        found.append(_by_block(block, part, queries, k[:, first:stop], v[:, first:stop], keys, sinks))
    out, lse = zip(*found, strict=True)
    return jnp.concatenate(out, axis=3), jnp.concatenate(lse, axis=3)


def _by_block(
    block: Block,
    q: jax.Array,
    queries: _Positions,
    k: jax.Array,
    v: jax.Array,
    keys: _Positions,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Compute attention over as many queries at once as SCORES_AT_ONCE allows."""
    batch, num_kv_heads, group, n, _ = q.shape
    mesh = traced_mesh()
    num_heads = on_each_device(mesh, "kv_heads", num_kv_heads) * group
    fitting = max(1, SCORES_AT_ONCE // (on_each_device(mesh, "batch", batch) * num_heads * k.shape[1]))
    if fitting >= n:
        return block(q, queries, k, v, keys, sinks)
    length = part_length(n, fitting)
    if missing := -n % length:
        q = jnp.pad(q, [(0, 0)] * 3 + [(0, missing), (0, 0)])
        queries = _Positions(jnp.pad(queries.ids, ((0, 0), (0, missing))), jnp.pad(queries.index, (0, missing)))

    def one(start: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = jax.lax.dynamic_slice_in_dim(q, start, length, axis=3)
        return block(part, queries.cut(start, length), k, v, keys, sinks)

    out, lse = jax.lax.map(one, jnp.arange(0, n, length))  # [block, batch, kv_head, group, length, ...]
    out, lse = jnp.moveaxis(out, 0, 3).reshape(*q.shape[:4], -1), jnp.moveaxis(lse, 0, 3).reshape(q.shape[:4])
    return out[:, :, :, :n], lse[:, :, :, :n]


def part_length(n: int, most: int) -> int:
    """The length of the parts into which n items are cut, at most `most`.

    Parts should be few, and equal, so that none needs padding. If n has a divisor above half of `most`, that is the
    length: part_length(96, 40) is 32. Otherwise it is the length that makes the fewest parts, and the last part is
    padded, by fewer items than there are parts: part_length(97, 40) is 33, for parts of 33, 33 and 31.
    """
    most = min(most, n)
    divisor = max(size for size in range(1, most + 1) if n % size == 0)
    if 2 * divisor > most:
        return divisor
    return -(-n // -(-n // most))


def _block(
    q: jax.Array,
    queries: _Positions,
    k: jax.Array,
    v: jax.Array,
    keys: _Positions,
    sinks: jax.Array | None,
    *,
    softcap: float,
    window: int,
) -> tuple[jax.Array, jax.Array]:
    distance = queries.index[:, None] - keys.index
    is_seen = (distance >= 0) & (queries.ids[:, :, None] == keys.ids[:, None])
    if window:
        is_seen &= distance < window
    return attend_seen(q, k, v, is_seen, sinks, softcap=softcap)


def mean_keys(seq: int, window: int, mesh: Mesh | AbstractMesh | None = None) -> tuple[float, float]:
    """Return how many keys a query sees, and how many are computed for it. Both are means over a row of one document
    with `seq` tokens. A window of 0 means none. Over a mesh that cuts rows all keys are computed for each."""
    reach = min(window or seq, seq)
    seen = (reach * (reach + 1) / 2 + (seq - reach) * reach) / seq
    if num_parts(mesh, "sequence") > 1:
        return seen, seq
    computed = sum((stop - start) * (stop - first) for first, start, stop in _segments(seq, window))
    return seen, computed / seq


def _segments(seq: int, window: int) -> list[tuple[int, int, int]]:
    """The runs into which the queries of a row are cut: (first key, first query, end of both) of each."""
    length = max(MIN_SEGMENT, -(-seq // NUM_SEGMENTS))
    reach = window or seq
    starts = range(0, seq, length)
    return [(max(0, start - reach + 1), start, min(start + length, seq)) for start in starts]
