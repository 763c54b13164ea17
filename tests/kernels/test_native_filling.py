"""Rows that only fill a batch, a chunk or a tree: native kernels compute nothing of them, and nothing else changes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import as_stored, make_prefix

from specserve.kernels import native
from specserve.kernels.attention import attend
from specserve.kernels.matmul import matmul, pack
from specserve.kernels.rowwise import ACTIVATIONS, gated

pytestmark = [
    pytest.mark.skipif(not native.is_available(), reason=native.describe()),
    pytest.mark.usefixtures("each_instruction_set"),
]


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("has_sum", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 70])
def test_rows_of_zeros_are_left_out_of_products(rng: np.random.Generator, rows: int, has_sum: bool) -> None:
    """Wherever they stand: multiplied by a weight that is infinite they would not be numbers."""
    weight = _normal(rng, 40, 33)
    weight[:, 5] = np.inf
    is_live = rng.random(rows) < 0.5
    x = np.where(is_live[:, None], np.abs(_normal(rng, rows, 40)), rng.choice([0.0, -0.0], (rows, 40)))
    add = _normal(rng, rows, 33) if has_sum else None

    def run(x: Any, add: Any) -> np.ndarray:
        return np.asarray(jax.jit(native.serving(matmul))(jnp.asarray(x), pack(weight), add))

    got = run(x.astype(np.float32), add)
    assert (got[~is_live] == (0.0 if add is None else add[~is_live])).all()
    if is_live.any():
        alone = run(x[is_live].astype(np.float32), None if add is None else add[is_live])
        assert (got[is_live] == alone).all(), "a row depends on those that fill"
        assert np.isinf(alone[:, 5]).all()


@pytest.mark.parametrize("stored", native.STORED)
def test_queries_that_see_nothing_are_left_out_of_attention(rng: np.random.Generator, stored: str) -> None:
    """Not even themselves; of the pages before them they see nothing either. All of one sequence are such, and the last
    ones of another."""
    batch, n, heads, head_dim, page_size, width = 3, 40, 2, 8, 4, 3
    q, k, v = (_normal(rng, batch, n, heads, head_dim) for _ in range(3))
    k_kept, k_scale, _ = as_stored(_normal(rng, batch * width, heads, page_size, head_dim), stored)
    v_kept, v_scale, _ = as_stored(_normal(rng, batch * width, heads, page_size, head_dim), stored)
    table = np.arange(batch * width, dtype=np.int32).reshape(batch, width)
    prefix = make_prefix(k_kept, v_kept, table, np.array([5, 12, 0], np.int32), 0, k_scale=k_scale, v_scale=v_scale)
    causal = np.tril(np.ones((n, n), bool))[None]
    is_live = np.arange(n) < np.array([[n], [13], [0]])

    def run(mask: np.ndarray) -> np.ndarray:
        return np.asarray(jax.jit(native.serving(attend))(*map(jnp.asarray, (q, k, v, mask)), prefix))

    got, whole = run(causal & is_live[:, :, None]), run(causal)
    assert (got[~is_live] == 0).all()
    assert (got[is_live] == whole[is_live]).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_of_zeros_are_left_out(rng: np.random.Generator, activation: Any) -> None:
    """Also where what they gate is no number."""
    gate, up = _normal(rng, 6, 35), _normal(rng, 6, 35)
    gate[2:4], up[3] = 0, np.nan
    got = np.asarray(jax.jit(native.serving(lambda gate, up: gated(gate, up, activation)))(gate, up))
    assert (got[2:4] == 0).all()
    assert (got[[0, 1, 4, 5]] != 0).all()
