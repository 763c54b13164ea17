"""`attend` equals its plain twin: any mask, any page table, any width, in both layouts of pages."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paging import as_stored, attend_by_kernel, in_floats, make_prefix
from rounding import assert_same, tolerance

from specserve.kernels import reference
from specserve.kernels.attention import attend
from specserve.kernels.pages import Layout, quantize

_OPTIONS = ("softcap", "window")
_attend = jax.jit(attend, static_argnames=_OPTIONS)  # one program instead of twenty small ones
_attend_by_kernel = jax.jit(attend_by_kernel, static_argnames=_OPTIONS)
LAYOUTS: tuple[Layout, ...] = ("columns", "rows", "joined")


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _tree_mask(rng: np.random.Generator, batch: int, n: int) -> np.ndarray:
    """Node i sees itself and its ancestors, of a random tree for each sequence."""
    mask = np.zeros((batch, n, n), bool)
    for b in range(batch):
        for i in range(n):
            if i:
                mask[b, i] = mask[b, rng.integers(i)]
            mask[b, i, i] = True
    return mask


def _check(
    seed: int,
    *,
    batch: int,
    n: int,
    earlier: int,
    kv_heads: int,
    group: int,
    dims: tuple[int, int],
    page_size: int,
    width: int,
    first: int,
    window: int,
    softcap: float,
    has_sinks: bool,
    is_latent: bool,
    stored: str,
    layout: Layout,
    is_exact: bool = False,
    is_kernel: bool = False,
) -> None:
    """Attention over random pages, of which a table names some, and new keys is that of the plain twin. Pages keep
    numbers of the dtype `stored`."""
    rng, (head_dim, v_dim) = np.random.default_rng(seed), dims
    m = earlier + n  # new keys, of which the last are the queries' own
    room = -(-m // page_size) if is_exact else 0  # new keys take their places in the sequence's own pages
    num_entries, width, num_pages = width * page_size, width + room, batch * (width + room) + 3
    table = rng.permutation(num_pages)[: batch * width].reshape(batch, width).astype(np.int32)
    lens = rng.integers(0, num_entries + 1, batch).astype(np.int32)  # ragged, empty and full among them
    # entries that nobody may see would be heard in the answer
    k_pages, v_pages = (5 * _normal(rng, num_pages, kv_heads, page_size, dim) for dim in dims)
    k, v = (_normal(rng, batch, m, kv_heads, dim) for dim in dims)
    q, sinks = _normal(rng, batch, n, kv_heads * group, head_dim), _normal(rng, kv_heads * group)
    mask, positions = _tree_mask(rng, batch, m)[:, earlier:], lens[:, None] + np.arange(m, dtype=np.int32)
    (k_pages, k_scale, _), (v_pages, v_scale, _) = (as_stored(x, stored) for x in (k_pages, v_pages))
    # new keys that lie on the grid: between its steps a rounding would be a step
    k, v = (as_stored(x, stored)[2] for x in (k, v))
    if is_kernel:  # it reads nothing else
        _silence((k_pages, v_pages, k_scale, v_scale), table, lens, first, window - earlier if window else 0)
        table = np.where(np.arange(width) < -(-lens[:, None] // page_size), table, rng.integers(-9, 999, table.shape))
    if is_latent:
        v_pages, v_scale, v = None, None, k[..., :v_dim]
    prefix = make_prefix(
        k_pages, v_pages, table, lens, first, layout=layout, is_exact=is_exact, k_scale=k_scale, v_scale=v_scale
    )
    given = {"softcap": softcap, "window": window}
    run = functools.partial(_attend_by_kernel if is_kernel else _attend, **given)
    args = (*map(jnp.asarray, (q, k, v, mask)), prefix)

    def found(*args: Any) -> jax.Array:
        return run(*args, sinks=jnp.asarray(sinks) if has_sinks else None, position_ids=jnp.asarray(positions))

    expected = reference.attend(
        q, k, v, mask, prefix, **given, sinks=sinks if has_sinks else None, position_ids=positions
    )
    assert_same(found(*args), expected, tolerance(found, *args[:-1], in_floats(prefix)))


def _silence(
    arrays: tuple[np.ndarray | None, ...], table: np.ndarray, lens: np.ndarray, first: int, window: int
) -> None:
    """NaN in every entry that no query sees, of arrays [page, kv_head, page_size, ...]. The first query's position is
    the length."""
    for array in arrays:
        if array is None:
            continue
        heard = array.copy()
        array[...] = 127 if array.dtype == np.int8 else np.nan
        for row, length in zip(table, lens, strict=True):
            for i in range(max(first, length - window + 1 if window else 0), length):
                where = row[i // array.shape[2]], slice(None), i % array.shape[2]
                array[where] = heard[where]


CASES = {
    "seed": st.integers(0, 2**32 - 1),
    "batch": st.integers(1, 3),
    "n": st.sampled_from([1, 2, 5, 9]),
    "earlier": st.sampled_from([0, 0, 3]),
    "kv_heads": st.sampled_from([1, 2]),
    "group": st.sampled_from([1, 3]),
    "first": st.sampled_from([0, 1]),
    "window": st.sampled_from([0, 0, 1, 6]),
    "softcap": st.sampled_from([0.0, 0.0, 20.0]),
    "has_sinks": st.booleans(),
    "is_latent": st.booleans(),
    "stored": st.sampled_from(["float32", "bfloat16", "int8", "float8_e4m3fn"]),
}


@settings(max_examples=25)
@given(
    **CASES,
    page_size=st.sampled_from([1, 4, 16]),
    width=st.sampled_from([1, 2, 5]),
    layout=st.sampled_from(LAYOUTS),
    is_exact=st.booleans(),
)
def test_paged_attention_matches_reference_with_tree_mask(seed: int, **case: Any) -> None:
    _check(seed, dims=(8, 8), **case)


KERNEL_CASES = {
    **CASES,
    "dims": st.sampled_from([(8, 8), (24, 16), (88, 40)]),  # blocks of channels: padded, 16 and a part, 64 and a part
    "page_size": st.sampled_from([1, 3, 16]),
    "width": st.sampled_from([1, 5, 24]),  # up to three splits, of which some are empty
}


# windows that cut, within splits; trees whose nodes see other windows
KERNEL_CASE: dict[str, Any] = {
    "seed": 1,
    "batch": 2,
    "n": 5,
    "earlier": 2,
    "kv_heads": 1,
    "group": 3,
    "first": 1,
    "window": 6,
    "softcap": 0.0,
}
KERNEL_CASE |= {"has_sinks": True, "is_latent": False, "stored": "int8", "dims": (24, 16), "page_size": 16, "width": 24}


@settings(max_examples=15)
@example(**KERNEL_CASE)
@example(**KERNEL_CASE | {"window": 0, "stored": "float32"})
@example(**KERNEL_CASE | {"n": 70})  # more new keys than a tile has
@given(**KERNEL_CASES)
def test_the_gpu_kernel_matches_reference_and_reads_nothing_else(seed: int, **case: Any) -> None:
    """Interpreted. Entries that no query sees are NaN, and table entries past the used ones are out of range."""
    _check(seed, layout="rows", is_kernel=True, **case)


@pytest.mark.gpu
@settings(max_examples=50)
@given(**KERNEL_CASES)
def test_the_compiled_gpu_kernel_matches_reference_and_reads_nothing_else(seed: int, **case: Any) -> None:
    """On the device, in float32 throughout (by default products of float32 numbers have ten bits there)."""
    assert jax.default_backend() == "gpu", "run with JAX_PLATFORMS=cuda"
    with jax.default_matmul_precision("highest"):
        _check(seed, layout="rows", is_kernel=True, **case)


@pytest.mark.tpu
@settings(max_examples=15)
@given(**KERNEL_CASES | {"page_size": st.sampled_from([32, 64])})
def test_the_compiled_tpu_kernel_matches_reference_and_reads_nothing_else(seed: int, **case: Any) -> None:
    """The same on a TPU, whose pages fill registers."""
    assert jax.default_backend() == "tpu", "run with JAX_PLATFORMS=tpu"
    with jax.default_matmul_precision("highest"):
        _check(seed, layout="rows", is_kernel=True, **case)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["int8", "float8_e4m3fn"]), st.sampled_from(["float32", "bfloat16"]))
def test_quantised_entries_are_those_of_the_plain_twin(seed: int, stored: str, dtype: str) -> None:
    """To the bit, whatever the magnitude; an entry of zeros stays one."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(_normal(rng, 5, 3, 8) * 10.0 ** rng.integers(-20, 20, (5, 3, 1)), dtype).at[0, 0].set(0)
    got, expected = jax.jit(quantize, static_argnums=1)(x, stored), reference.quantize(np.asarray(x), np.dtype(stored))
    assert np.array_equal(got[1], expected[1])
    assert np.array_equal(np.asarray(got[0], np.float32), expected[0].astype(np.float32))
    error = np.abs(reference.dequantize(*expected) - np.asarray(x, np.float32))
    largest = np.abs(np.asarray(x, np.float32)).max(axis=-1, keepdims=True)
    assert (error <= largest * (0.5001 / 127 if stored == "int8" else 2.0**-4)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_attention_does_not_depend_on_which_keys_are_new(rng: np.random.Generator, layout: Layout) -> None:
    """Bit for bit: a token attends as the first of its step or the last, alone or beside other sequences, whatever is
    left in the pages. The other way adds in another order, which a test may see."""
    n, length, page_size, num_kv_heads, group, head_dim = 8, 48, 4, 2, 2, 16
    q = _normal(rng, length, num_kv_heads * group, head_dim)
    k, v = _normal(rng, length, num_kv_heads, head_dim), _normal(rng, length, num_kv_heads, head_dim)
    width = length // page_size
    causal = jnp.asarray(np.tril(np.ones((1, n, n), bool)))

    def outputs(starts: list[int], *, is_exact: bool) -> np.ndarray:  # [batch, n, head, head_dim]
        """Every sequence is the same text, of which `start` tokens are committed and the next n are new."""
        batch = len(starts)
        k_pages, v_pages = (_normal(rng, batch * width, num_kv_heads, page_size, head_dim) * 9 for _ in range(2))
        table = rng.permutation(batch * width).reshape(batch, width).astype(np.int32)
        for row, start in enumerate(starts):
            for i in range(start):
                k_pages[table[row, i // page_size], :, i % page_size] = k[i]
                v_pages[table[row, i // page_size], :, i % page_size] = v[i]
        new = np.array(starts)[:, None] + np.arange(n)
        prefix = make_prefix(k_pages, v_pages, table, starts, layout=layout, is_exact=is_exact)
        return np.asarray(_attend(*map(jnp.asarray, (q[new], k[new], v[new])), causal, prefix))

    starts = [0, 1, 5, 12, 17, 19, 33, 40]
    exact: dict[int, set[bytes]] = {}
    merged: dict[int, set[bytes]] = {}
    for found, is_exact in ((exact, True), (merged, False)):
        for _ in range(4):
            order = rng.permutation(starts).tolist()
            for start, row in zip(order, outputs(order, is_exact=is_exact), strict=True):
                for i in range(n):
                    found.setdefault(start + i, set()).add(row[i].tobytes())
    assert {len(each) for each in exact.values()} == {1}
    assert max(len(each) for each in merged.values()) > 1, "nothing was tested"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_table_entries_past_the_length_are_never_heard(rng: np.random.Generator, layout: Layout) -> None:
    """The scheduler fills unused table entries with an id out of range."""
    q, k, v = (_normal(rng, 1, 2, 2, 4) for _ in range(3))
    k_pages, v_pages = _normal(rng, 3, 2, 4, 4), _normal(rng, 3, 2, 4, 4)
    mask = np.ones((1, 2, 2), bool)

    def args(table: list[int]) -> tuple[Any, ...]:
        return (*map(jnp.asarray, (q, k, v, mask)), make_prefix(k_pages, v_pages, [table], [5], layout=layout))

    narrow = args([2, 0])
    assert_same(_attend(*args([2, 0, 3, 3])), _attend(*narrow), tolerance(_attend, *narrow))


@pytest.mark.parametrize("batch_of_mask", [1, 3])
def test_attention_without_pages_matches_reference(rng: np.random.Generator, batch_of_mask: int) -> None:
    q = _normal(rng, 3, 7, 6, 8)
    k, v = _normal(rng, 3, 7, 2, 8), _normal(rng, 3, 7, 2, 8)
    mask = _tree_mask(rng, batch_of_mask, 7)
    args = tuple(map(jnp.asarray, (q, k, v, mask)))
    assert_same(_attend(*args), reference.attend(q, k, v, mask), tolerance(_attend, *args))


@pytest.mark.parametrize("run", [_attend, _attend_by_kernel])
def test_a_query_that_sees_nothing_is_finite(rng: np.random.Generator, run: Any) -> None:
    q, k, v = (jnp.asarray(_normal(rng, 1, 3, 2, 4)) for _ in range(3))
    args = (q, k, v, jnp.zeros((1, 3, 3), bool))
    out = run(*args)
    assert_same(out, np.broadcast_to(np.mean(v, axis=1, keepdims=True), out.shape), tolerance(run, *args))
    pages = _normal(rng, 2, 2, 4, 4)
    prefix = make_prefix(pages, pages, [[0, 1]], [0], layout="rows")
    assert np.isfinite(np.asarray(run(q, k, v, jnp.zeros((1, 3, 3), bool), prefix))).all()
