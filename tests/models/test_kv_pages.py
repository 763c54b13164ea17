"""What is written to pages, and what is dropped."""

import jax.numpy as jnp
import numpy as np

from specserve.models.kv_pages import KVPages

PAGE_SIZE = 4


def _pages() -> KVPages:
    return KVPages.zeros(2, 5, PAGE_SIZE, num_kv_heads=2, head_dim=3, dtype="float32")


def _new(rng: np.random.Generator, batch: int, n: int) -> tuple[tuple[jnp.ndarray, jnp.ndarray], ...]:
    values = rng.standard_normal((2, 2, batch, n, 2, 3)).astype(np.float32)
    return tuple((jnp.asarray(k), jnp.asarray(v)) for k, v in values)


def test_kept_entries_stand_where_the_table_says_and_nothing_else_changes(rng: np.random.Generator) -> None:
    new = _new(rng, batch=2, n=4)
    table = jnp.asarray([[3, 1], [0, 4]], jnp.int32)
    index = jnp.asarray([[2, 3, 4, 5], [7, 6, 0, 1]], jnp.int32)
    is_kept = np.array([[True, True, True, False], [True, False, True, True]])
    pages = _pages().write(new, table, index, jnp.asarray(is_kept))
    for layer in range(2):
        k, v = np.zeros((5, 2, 3, PAGE_SIZE), np.float32), np.zeros((5, 2, PAGE_SIZE, 3), np.float32)
        for b, n in zip(*np.nonzero(is_kept), strict=True):
            page, offset = table[b, index[b, n] // PAGE_SIZE], index[b, n] % PAGE_SIZE
            k[page, :, :, offset] = new[layer][0][b, n]
            v[page, :, offset] = new[layer][1][b, n]
        np.testing.assert_array_equal(pages.k[layer], k)
        np.testing.assert_array_equal(pages.v[layer], v)


def test_entries_outside_the_table_are_dropped(rng: np.random.Generator) -> None:
    """Past the table, before it, and in a page that was never allocated (an id out of range)."""
    table = jnp.asarray([[2, 5]], jnp.int32)  # 5 pages: 5 is out of range
    index = jnp.asarray([[-1, 4, 7, 8, 1000]], jnp.int32)
    pages = _pages().write(_new(rng, 1, 5), table, index, jnp.ones((1, 5), bool))
    assert not any(np.any(array) for array in (*pages.k, *pages.v))
