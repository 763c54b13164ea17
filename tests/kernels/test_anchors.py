"""Attention of blocks at anchors equals the dense one over the row and all blocks side by side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rounding import assert_same, tolerance

from specserve.kernels import rows
from specserve.kernels.anchors import Anchors, attend_anchors
from specserve.kernels.attention import attend
from specserve.mesh import make_mesh, on_mesh, whole

BATCH, SEQ, NUM_ANCHORS = 2, 24, 11


def _normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def _dense_mask(anchors: Anchors, own_mask: np.ndarray, window: int) -> np.ndarray:
    """[batch, anchor * slot, seq + anchor * own], entry by entry."""
    slots, own = own_mask.shape
    mask = np.zeros((BATCH, NUM_ANCHORS, slots, SEQ + NUM_ANCHORS * own), bool)
    for b, a, s in np.ndindex(BATCH, NUM_ANCHORS, slots):
        first, stop, index = (int(x[b, a]) for x in (anchors.first, anchors.stop, anchors.index))
        for entry in range(first, stop):
            mask[b, a, s, entry] = not window or index + s - entry < window
        mask[b, a, s, SEQ + a * own : SEQ + (a + 1) * own] = own_mask[s]
    return mask.reshape(BATCH, NUM_ANCHORS * slots, -1)


@pytest.mark.parametrize("kind", ["block", "elements"])
@pytest.mark.parametrize("cut", ["whole", "chunks", "devices"])
def test_anchors_equal_dense_attention_and_its_gradient(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, cut: str, kind: str
) -> None:
    """A causal block of three slots with a window and sinks, and single slots that see elements of several depths. Some
    anchors see nothing of the row. Eleven anchors fill neither chunks nor devices."""
    if cut != "whole":
        monkeypatch.setattr(rows, "SCORES_AT_ONCE", BATCH * 4 * 3 * SEQ * 4)
    mesh = make_mesh(data=2, sequence=4) if cut == "devices" else None
    own_mask = np.tril(np.ones((3, 3), bool)) if kind == "block" else np.ones((1, 4), bool)
    window, sinks = (5, _normal(rng, 4)) if kind == "block" else (0, None)
    slots, own = own_mask.shape
    stop = np.sort(rng.integers(0, SEQ, (BATCH, NUM_ANCHORS))).astype(np.int32)
    anchors = Anchors(*map(jnp.asarray, (np.where(stop < SEQ // 2, 0, SEQ // 2).astype(np.int32), stop, stop)))
    mask = jnp.asarray(_dense_mask(anchors, own_mask, window))
    arrays = (
        _normal(rng, BATCH, NUM_ANCHORS, slots, 4, 8),
        _normal(rng, BATCH, SEQ, 2, 8),
        _normal(rng, BATCH, SEQ, 2, 6),
        _normal(rng, BATCH, NUM_ANCHORS, own, 2, 8),
        _normal(rng, BATCH, NUM_ANCHORS, own, 2, 6),
    )
    weights = _normal(rng, BATCH, NUM_ANCHORS, slots, 4, 6)

    def by_anchor(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v, own_k, own_v = arrays
        out = attend_anchors(q, k, v, anchors, own_k, own_v, own_mask, sinks=sinks, window=window)
        return jnp.sum(out * weights), out

    def dense(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v, own_k, own_v = arrays
        k, v = (jnp.concatenate([x, y.reshape(BATCH, -1, *y.shape[3:])], axis=1) for x, y in ((k, own_k), (v, own_v)))
        out = attend(q.reshape(BATCH, -1, 4, 8), k, v, mask, sinks=sinks).reshape(weights.shape)
        return jnp.sum(out * weights), out

    run = jax.jit(on_mesh(mesh, jax.grad(by_anchor, tuple(range(5)), has_aux=True)))
    plain = jax.jit(jax.grad(dense, tuple(range(5)), has_aux=True))
    assert_same(run(*jax.device_put(arrays, whole(mesh))), plain(*arrays), tolerance(plain, *arrays))


def test_no_array_has_anchors_times_the_row(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "SCORES_AT_ONCE", 1 << 14)
    seq, num_anchors, slots = 512, 256, 4
    at = jnp.broadcast_to(jnp.arange(num_anchors, dtype=jnp.int32) * 2, (1, num_anchors))
    own = jax.ShapeDtypeStruct((1, num_anchors, slots, 1, 8), jnp.float32)
    row = jax.ShapeDtypeStruct((1, seq, 1, 8), jnp.float32)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, own_k: jax.Array, own_v: jax.Array) -> jax.Array:
        mask = np.ones((slots, slots), bool)
        return jnp.sum(attend_anchors(q, k, v, Anchors(at * 0, at, at), own_k, own_v, mask) ** 2)

    used = jax.jit(jax.grad(loss, tuple(range(5)))).lower(own, row, row, own, own).compile().memory_analysis()
    assert used is not None
    assert used.temp_size_in_bytes < num_anchors * slots * seq * 4 / 2  # half of the scores
