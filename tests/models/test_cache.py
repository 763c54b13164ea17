"""What is written to pages, and what is dropped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import as_rows

from specserve.kernels import pages as pages_module
from specserve.kernels import reference
from specserve.kernels.pages import Layout
from specserve.models.cache import Cache, Pages

PAGE_SIZE = 4


def _cache() -> Cache:
    """One layer of keys and values, one of keys whose first channels are the values."""
    layers = (Pages.zeros(5, PAGE_SIZE, 2, 3, "float32"), Pages.zeros(5, PAGE_SIZE, 2, 3, "float32", has_values=False))
    return Cache(layers, 5, PAGE_SIZE)


def _new(rng: np.random.Generator, batch: int, n: int) -> tuple[tuple[jax.Array, jax.Array | None], ...]:
    k, v, latent = jnp.asarray(rng.standard_normal((3, batch, n, 2, 3)), jnp.float32)
    return (k, v), (latent, None)


@pytest.mark.parametrize("layout", ["columns", "rows", "joined"])
def test_kept_entries_stand_where_the_table_says_and_nothing_else_changes(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    monkeypatch.setattr(pages_module, "default_layout", lambda _head_dim: layout)
    new = _new(rng, batch=2, n=4)
    table = jnp.asarray([[3, 1], [0, 4]], jnp.int32)
    index = jnp.asarray([[2, 3, 4, 5], [7, 6, 0, 1]], jnp.int32)
    is_kept = np.array([[True, True, True, False], [True, False, True, True]])
    cache = _cache().write(new, table, index, jnp.asarray(is_kept))
    for pages, (new_k, new_v) in zip(cache.layers, new, strict=True):
        assert isinstance(pages, Pages)
        k, v = np.zeros((2, 5, 2, PAGE_SIZE, 3), np.float32)
        for b, n in zip(*np.nonzero(is_kept), strict=True):
            page, offset = table[b, index[b, n] // PAGE_SIZE], index[b, n] % PAGE_SIZE
            k[page, :, offset] = new_k[b, n]
            if new_v is not None:
                v[page, :, offset] = new_v[b, n]
        keys, values = as_rows(pages)
        np.testing.assert_array_equal(keys, k)
        if new_v is None:
            assert values is None
        else:
            np.testing.assert_array_equal(values, v)


def test_entries_outside_the_table_are_dropped(rng: np.random.Generator) -> None:
    """Past the table, before it, and in a page that was never allocated (an id out of range)."""
    table = jnp.asarray([[2, 5]], jnp.int32)  # 5 pages: 5 is out of range
    index = jnp.asarray([[-1, 4, 7, 8, 1000]], jnp.int32)
    cache = _cache().write(_new(rng, 1, 5), table, index, jnp.ones((1, 5), bool))
    assert not any(np.any(array) for array in jax.tree.leaves(cache))


def test_quantised_entries_stand_beside_their_scales(rng: np.random.Generator) -> None:
    """Of committed entries alone: those that are dropped leave no scale."""
    layers = (
        Pages.zeros(5, PAGE_SIZE, 2, 3, "int8"),
        Pages.zeros(5, PAGE_SIZE, 2, 3, "float8_e4m3fn", has_values=False),
    )
    new = _new(rng, batch=1, n=3)
    table, index = jnp.asarray([[3, 1]], jnp.int32), jnp.asarray([[2, 3, 4]], jnp.int32)
    cache = Cache(layers, 5, PAGE_SIZE).write(new, table, index, jnp.asarray([[True, True, False]]))
    for pages, (k, v) in zip(cache.layers, new, strict=True):
        assert isinstance(pages, Pages)
        keys, values = as_rows(pages)
        sides = [(keys, pages.k_scale, k), (values, pages.v_scale, v)]
        for stored, scale, entries in sides:
            if entries is None:
                assert stored is None
                assert scale is None
                continue
            assert stored is not None
            assert scale is not None
            data, scales = np.zeros((5, 2, PAGE_SIZE, 3), stored.dtype), np.zeros((5, 2, PAGE_SIZE), np.float32)
            for n in range(2):
                data[3, :, 2 + n], scales[3, :, 2 + n] = reference.quantize(np.asarray(entries)[0, n], stored.dtype)
            np.testing.assert_array_equal(np.asarray(stored, np.float32), data.astype(np.float32))
            np.testing.assert_array_equal(scale, scales)
