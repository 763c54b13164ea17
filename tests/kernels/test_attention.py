"""`attend` equals its plain twin: any mask, any page table, any width."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import assert_same, tolerance

from specserve.kernels import reference
from specserve.kernels.attention import PagedPrefix, attend

_attend = jax.jit(attend)  # one program instead of twenty small ones


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


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 3),
    n=st.sampled_from([1, 2, 5, 9]),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    page_size=st.sampled_from([1, 4, 16]),
    width=st.sampled_from([1, 2, 5]),
    first=st.sampled_from([0, 1]),
    is_exact=st.booleans(),
)
def test_paged_attention_matches_reference_with_tree_mask(
    seed: int, batch: int, n: int, kv_heads: int, group: int, page_size: int, width: int, first: int, is_exact: bool
) -> None:
    rng = np.random.default_rng(seed)
    room = -(-n // page_size) if is_exact else 0  # new keys take their places in the sequence's own pages
    num_entries, width = width * page_size, width + room
    head_dim, num_pages = 8, batch * width + 3
    table = rng.permutation(num_pages)[: batch * width].reshape(batch, width).astype(np.int32)
    lens = rng.integers(0, num_entries + 1, batch).astype(np.int32)  # ragged, empty and full among them
    # entries that nobody may see would be heard in the answer
    k_pages = _normal(rng, num_pages, kv_heads, head_dim, page_size) * 5
    v_pages = _normal(rng, num_pages, kv_heads, page_size, head_dim) * 5
    prefix = PagedPrefix(*map(jnp.asarray, (k_pages, v_pages, table, lens)), first, is_exact)
    q = _normal(rng, batch, n, kv_heads * group, head_dim)
    k, v = _normal(rng, batch, n, kv_heads, head_dim), _normal(rng, batch, n, kv_heads, head_dim)
    mask = _tree_mask(rng, batch, n)
    args = (*map(jnp.asarray, (q, k, v, mask)), prefix)
    assert_same(_attend(*args), reference.attend(q, k, v, mask, prefix), tolerance(_attend, *args))


def test_exact_attention_does_not_depend_on_which_keys_are_new(rng: np.random.Generator) -> None:
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
        k_pages = _normal(rng, batch * width, num_kv_heads, head_dim, page_size) * 9
        v_pages = _normal(rng, batch * width, num_kv_heads, page_size, head_dim) * 9
        table = rng.permutation(batch * width).reshape(batch, width).astype(np.int32)
        for row, start in enumerate(starts):
            for i in range(start):
                k_pages[table[row, i // page_size], :, :, i % page_size] = k[i]
                v_pages[table[row, i // page_size], :, i % page_size] = v[i]
        new = np.array(starts)[:, None] + np.arange(n)
        prefix = PagedPrefix(
            *map(jnp.asarray, (k_pages, v_pages, table, np.array(starts, np.int32))), is_exact=is_exact
        )
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


def test_table_entries_past_the_length_are_never_heard(rng: np.random.Generator) -> None:
    """The scheduler fills unused table entries with an id out of range."""
    q, k, v = (_normal(rng, 1, 2, 2, 4) for _ in range(3))
    k_pages, v_pages = _normal(rng, 3, 2, 4, 4), _normal(rng, 3, 2, 4, 4)
    mask = np.ones((1, 2, 2), bool)

    def args(table: list[int]) -> tuple[Any, ...]:
        lens = jnp.asarray([5], jnp.int32)
        prefix = PagedPrefix(jnp.asarray(k_pages), jnp.asarray(v_pages), jnp.asarray([table], jnp.int32), lens)
        return (*map(jnp.asarray, (q, k, v, mask)), prefix)

    narrow = args([2, 0])
    assert_same(_attend(*args([2, 0, 3, 3])), _attend(*narrow), tolerance(_attend, *narrow))


@pytest.mark.parametrize("batch_of_mask", [1, 3])
def test_attention_without_pages_matches_reference(rng: np.random.Generator, batch_of_mask: int) -> None:
    q = _normal(rng, 3, 7, 6, 8)
    k, v = _normal(rng, 3, 7, 2, 8), _normal(rng, 3, 7, 2, 8)
    mask = _tree_mask(rng, batch_of_mask, 7)
    args = tuple(map(jnp.asarray, (q, k, v, mask)))
    assert_same(_attend(*args), reference.attend(q, k, v, mask), tolerance(_attend, *args))


def test_a_query_that_sees_nothing_is_finite(rng: np.random.Generator) -> None:
    q, k, v = (jnp.asarray(_normal(rng, 1, 3, 2, 4)) for _ in range(3))
    args = (q, k, v, jnp.zeros((1, 3, 3), bool))
    out = _attend(*args)
    assert_same(out, np.broadcast_to(np.mean(v, axis=1, keepdims=True), out.shape), tolerance(_attend, *args))
    pages = jnp.asarray(_normal(rng, 2, 2, 4, 4))
    prefix = PagedPrefix(pages, pages, jnp.asarray([[0, 1]], jnp.int32), jnp.asarray([0], jnp.int32))
    assert np.isfinite(np.asarray(attend(q, k, v, jnp.zeros((1, 3, 3), bool), prefix))).all()
