"""Attention over the committed prefix, which lies in pages: `attend_pages`, and which kernel computes it.

The prefix needs no mask but lengths and windows, so the query heads of a KV head and their n queries are rows of one
product. The result comes with its log-sum-exp, by which `kernels.attention` merges it with the new keys. A backend's
kernels may attend to these too (`attend_both`).
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from specserve.kernels import native
from specserve.kernels.block import NEG_INF, NewKeys
from specserve.kernels.pages import Pages, in_ranks, own_pages
from specserve.mesh import fitting_partition, over_parts, program_platform, traced_mesh, traced_once
from specserve.pytree import pytree, static

logger = logging.getLogger(__name__)

Axes = tuple[str | None, ...]  # logical, of an array's first dimensions
_STATIC = "v_dim", "first", "window", "softcap"  # arguments of the kernels that are no arrays


@dataclass(frozen=True)
class PagesKernel:
    """The kernel of a backend that attends to pages."""

    attend: Callable[..., Any]  # see `paged_gpu.attend_pages`
    takes_new: bool = False  # it attends to new keys too, where they are given


@pytree
class PagedPrefix:
    """The committed keys and values of one layer, found through a page table shared by all layers."""

    pages: Pages
    page_table: jax.Array  # [batch, pages] int32; only these are read, so callers cut the table to what is in use
    lens: jax.Array  # [batch] int32, committed entries, at most pages * page_size
    first: int = static(default=0)  # entries before this index are never visible (the draft has no entry 0)
    # Sum over keys in the order of the sequence, new ones in their places after the prefix (they must be consecutive):
    # then a result does not depend on which keys are new. Slower, because the pages are copied together.
    is_exact: bool = static(default=False)


def attend_pages(
    q: jax.Array,  # [batch, kv_head, row, head_dim], scaled
    prefix: PagedPrefix,
    positions: jax.Array | None,  # [batch, row] int32, of the queries; None where there is no window
    *,
    v_dim: int,
    softcap: float = 0.0,
    window: int = 0,
) -> tuple[jax.Array, jax.Array]:  # [batch, kv_head, row, v_dim] and [batch, kv_head, row], float32
    """Softmax attention over the prefix alone, and the log-sum-exp of the scores.

    A row sees entry i if `first` <= i < its sequence's length and, with a window, its position is less than `window`
    after i. A row that sees nothing has a log-sum-exp of at most NEG_INF and finite values, which a merge leaves out.
    """
    kernel = kernel_for(prefix.pages)
    if kernel is None:
        return _gathered(q, prefix, positions, v_dim=v_dim, softcap=softcap, window=window)
    run = functools.partial(kernel.attend, v_dim=v_dim, first=prefix.first, window=window, softcap=softcap)
    rows = _partition(("batch", "kv_heads"), q.shape[:2])
    return _on_each_device(run, _arrays(q, prefix, positions), (rows, rows), prefix.pages.num_ranks)


def attend_both(
    q: jax.Array,  # [batch, kv_head, row, head_dim], scaled
    new: NewKeys,
    prefix: PagedPrefix,
    positions: jax.Array | None,  # [batch, row] int32, as for `attend_pages`
    *,
    v_dim: int,
    softcap: float = 0.0,
    window: int = 0,
) -> jax.Array | None:  # [batch, n, head, v_dim], in q's dtype
    """Softmax attention over the prefix and the new keys, where a kernel of the backend computes both; else None. Rows
    see the prefix as in `attend_pages`, and of the new keys those of the mask. One that sees nothing gives 0."""
    kernel = kernel_for(prefix.pages)
    if kernel is None or not kernel.takes_new:
        return None
    of_keys: Axes = ("batch", None, "kv_heads")
    axes = NewKeys(of_keys, of_keys, ("batch",), of_keys, of_keys, ("kv_heads",))
    own = {f"new_{field}": (getattr(new, field), cut) for field, cut in vars(axes).items()}

    def run(**given: Any) -> Any:
        of_new = NewKeys(*(given.pop(name) for name in own))
        options = {"v_dim": v_dim, "first": prefix.first, "window": window, "softcap": softcap}
        return kernel.attend(**given, new=of_new, **options)

    result = _partition(of_keys, (len(q), 1, q.shape[1]))
    return _on_each_device(run, _arrays(q, prefix, positions) | own, result, prefix.pages.num_ranks)


def reads_by_page(pages: Sequence[Pages], mesh: Any | None) -> bool:
    """Return whether attention over these pages, one for each layer, reads only what a sequence has, whatever the
    table's width. The kernels of GPUs and TPUs do, and so does the native one on CPU, which takes no mesh. Elsewhere
    XLA gathers the whole table. Arrays may be shapes alone."""
    if program_platform() == "cpu":
        return mesh is None and native.is_available()
    refused = next((each for each in pages if kernel_for(each) is None), None)
    if refused is not None:
        logger.warning(
            "the kernel of this %s cannot take pages of %s %s, so XLA's own operations gather them, which is slower; "
            "give --page-size 32 or another --kv-cache-dtype",
            *(program_platform(), refused.k.dtype, refused.k.shape),
        )
    return refused is None


def kernel_for(pages: Pages) -> PagesKernel | None:
    """The kernel of the default backend that takes these pages. None: XLA gathers all pages of the table (a copy) and
    multiplies page by page. That is so on CPU without the native kernels, and where a kernel reports that it cannot
    take the pages (`takes` in `paged_gpu` and `paged_tpu`)."""
    if pages.layout == "columns" or native.are_left_out():
        return None
    # Pallas takes a while to import, which other backends need not wait for
    if program_platform() == "gpu":
        from specserve.kernels import paged_gpu

        if paged_gpu.takes(pages.own_shape, pages.k.dtype):
            return PagesKernel(traced_once(paged_gpu.attend_pages, *_STATIC), takes_new=True)
    if program_platform() == "tpu":
        from specserve.kernels import paged_tpu

        if paged_tpu.takes(pages.k, pages.v):
            attend = traced_once(paged_tpu.attend_pages, *_STATIC, "v_first")
            return PagesKernel(functools.partial(attend, v_first=pages.v_first))
    return None


def _arrays(q: jax.Array, prefix: PagedPrefix, positions: jax.Array | None) -> dict[str, tuple[jax.Array | None, Axes]]:
    """The arguments of a kernel by their names, and how a mesh cuts each."""
    pages = prefix.pages
    of_page = ("pages" if pages.num_ranks > 1 else None, "kv_heads")
    return {
        "q": (q, ("batch", "kv_heads")),
        "k_pages": (pages.k, of_page),
        "v_pages": (pages.v, of_page),
        "page_table": (prefix.page_table, ("batch",)),
        "lens": (prefix.lens, ("batch",)),
        "positions": (positions, ("batch",)),
        "k_scale": (pages.k_scale, of_page),
        "v_scale": (pages.v_scale, of_page),
    }


def _partition(axes: Axes, shape: tuple[int, ...]) -> Any:
    """Return how the mesh that is traced for cuts an array of this shape, where it divides it; None without a mesh."""
    mesh = traced_mesh()
    return None if mesh is None else fitting_partition(mesh, axes, shape[: len(axes)])


def _on_each_device(
    run: Callable[..., Any], arrays: dict[str, tuple[jax.Array | None, Axes]], results: Any, num_ranks: int
) -> Any:
    """On a mesh each device runs the kernel on its own sequences and KV heads, where the mesh divides them: the
    compiler cannot cut a kernel. Of pages that data ranks share out it has those of its rank."""
    if traced_mesh() is None:
        return run(**{name: array for name, (array, _) in arrays.items()})
    absent = {name: None for name, (array, _) in arrays.items() if array is None}
    given = {name: array for name, (array, _) in arrays.items() if array is not None}
    partitions = {name: _partition(arrays[name][1], array.shape) for name, array in given.items()}
    everywhere = ("batch", "kv_heads", "experts", "sequence")  # no axis is left to the compiler

    def own(given: dict[str, jax.Array]) -> Any:
        if num_ranks > 1:
            given = given | {"page_table": own_pages(given["page_table"], len(given["k_pages"]))}
        return run(**given, **absent)

    return over_parts(own, everywhere, (partitions,), results)(given)


def _gathered(
    q: jax.Array, prefix: PagedPrefix, positions: jax.Array | None, *, v_dim: int, softcap: float, window: int
) -> tuple[jax.Array, jax.Array]:
    """`attend_pages` by XLA's operations, page by page, so that only the gathered pages are copied."""
    pages = prefix.pages
    k_pages = take_pages(pages.k, prefix).astype(q.dtype)
    k_axes = "bpkhs" if pages.layout == "columns" else "bpksh"
    if pages.v is not None:
        v_pages, v_axes = take_pages(pages.v, prefix).astype(q.dtype), "bpksh"
    elif pages.layout == "columns":
        v_pages, v_axes = k_pages[..., :v_dim, :], k_axes
    else:
        v_pages, v_axes = k_pages[..., pages.v_first : pages.v_first + v_dim], k_axes
        k_pages = k_pages[..., : q.shape[-1]]
    v_scale = pages.k_scale if pages.values_are_keys else pages.v_scale
    batch, width = prefix.page_table.shape
    per_page_q = jnp.broadcast_to(q[:, None], (batch, width, *q.shape[1:]))
    scores = jnp.einsum(f"bpkrh,{k_axes}->bpkrs", per_page_q, k_pages, preferred_element_type=jnp.float32)
    if pages.k_scale is not None:
        scores *= take_pages(pages.k_scale, prefix)[:, :, :, None]
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    index = jnp.arange(width * pages.page_size)
    is_visible = (index >= prefix.first) & (index < prefix.lens[:, None])
    if window:  # then rows differ in what they see
        assert positions is not None, "a window goes by positions"
        seen = is_visible[:, None] & (positions[:, :, None] - index < window)  # [batch, row, entry]
        is_visible = seen.reshape(batch, -1, width, 1, pages.page_size).transpose(0, 2, 3, 1, 4)
    else:
        is_visible = is_visible.reshape(batch, width, 1, 1, pages.page_size)
    scores = jnp.where(is_visible, scores, NEG_INF)
    largest = jnp.max(scores, axis=(1, 4))  # [batch, kv_head, row]
    weights = jnp.exp(scores - largest[:, None, ..., None])
    total = jnp.sum(weights, axis=(1, 4))
    if v_scale is not None:
        weights *= take_pages(v_scale, prefix)[:, :, :, None]
    out = jnp.einsum(f"bpkrs,{v_axes}->bpkrh", weights.astype(q.dtype), v_pages, preferred_element_type=jnp.float32)
    return jnp.sum(out, axis=1) / total[..., None], largest + jnp.log(total)


def take_pages(array: jax.Array, prefix: PagedPrefix) -> jax.Array:  # [batch, pages, *array.shape[1:]]
    """A copy of the pages that the prefix's table names, of one of the arrays of its pages. Ids out of range give some
    page or other."""

    def take(array: jax.Array, page_table: jax.Array) -> jax.Array:
        return array.at[page_table].get(mode="clip")

    return in_ranks(take, prefix.pages.num_ranks)(array, prefix.page_table)
