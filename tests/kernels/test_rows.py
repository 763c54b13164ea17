"""Attention of packed rows equals the dense one, in values and gradients, however it is cut."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rounding import assert_same, tolerance

from specserve.kernels import reference, rows
from specserve.kernels.attention import attend
from specserve.kernels.rows import Documents, attend_rollout, attend_rows, part_length
from specserve.mesh import make_mesh, on_mesh, whole

OPTIONS = {"softcap": 3.0, "window": 7, "scale": 0.5, "sinks": True}


def _normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def _inputs(rng: np.random.Generator, seq: int) -> tuple[jax.Array, jax.Array, jax.Array, Documents]:
    ids = np.sort(rng.integers(1, 4, (2, seq)), axis=1).astype(np.int32)
    ids[1, -seq // 5 :] = 0  # padding
    return (
        _normal(rng, 2, seq, 4, 8),
        _normal(rng, 2, seq, 2, 8),
        _normal(rng, 2, seq, 2, 6),
        Documents(jnp.asarray(ids)),
    )


@pytest.mark.parametrize(
    ("cut", "options"),
    [
        *((cut, OPTIONS) for cut in ("whole", "segments", "blocks", "uneven", "devices")),
        ("whole", {}),
        ("uneven", {}),  # in segments and blocks
    ],
)
def test_rows_equal_dense_attention_and_its_gradient(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, cut: str, options: dict
) -> None:
    if cut != "whole":
        monkeypatch.setattr(rows, "MIN_SEGMENT", 17 if cut == "uneven" else 12)
    if cut in ("blocks", "uneven", "devices"):
        monkeypatch.setattr(rows, "SCORES_AT_ONCE", 2 * 4 * 40 * 4)
    mesh = make_mesh(data=2, sequence=4) if cut == "devices" else None
    seq = 41 if cut == "uneven" else 40
    q, k, v, documents = _inputs(rng, seq)
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = _normal(rng, 4)
    position_ids = jnp.broadcast_to(jnp.arange(seq), (2, seq)) if options.get("window") else None
    weights = _normal(rng, 2, seq, 4, 6)

    def by_rows(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, _ = attend_rows(q, k, v, documents, **options)
        return jnp.sum(out * weights), out

    def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attend(q, k, v, documents.dense(), position_ids=position_ids, **options)
        return jnp.sum(out * weights), out

    run = jax.jit(on_mesh(mesh, jax.grad(by_rows, (0, 1, 2), has_aux=True)))
    plain = jax.jit(jax.grad(dense, (0, 1, 2), has_aux=True))
    assert_same(run(*jax.device_put((q, k, v), whole(mesh))), plain(q, k, v), tolerance(plain, q, k, v))


def test_no_length_falls_into_many_parts() -> None:
    """Less than twice as many as there must be, and powers of two into equal ones, of which nothing is thrown away."""
    for n in (*range(1, 300), 2048, 2053, 2056, 4096, 8191):
        for most in (1, 2, 7, 64, 100, 250, 1048):
            length = part_length(n, most)
            assert length <= most
            count = -(-n // length)
            assert count < 2 * -(-n // most)
            assert count * length - n < (1 if n.bit_count() == 1 else count)


@pytest.mark.parametrize(
    ("axes", "alone"),
    [
        ({"data": 4, "tensor": 2}, {}),
        ({"data": 2, "sequence": 4}, {"sequence": 4}),
        ({"tensor": 8}, {}),  # does not divide the heads that have keys of their own
    ],
)
def test_a_device_computes_as_many_blocks_as_its_own_rows_and_heads_need(
    monkeypatch: pytest.MonkeyPatch, axes: dict[str, int], alone: dict[str, int]
) -> None:
    monkeypatch.setattr(rows, "SCORES_AT_ONCE", 1 << 16)

    def num_blocks(axes: dict[str, int], batch: int, kv_heads: int) -> int:
        shapes = ((batch, 512, 2 * kv_heads, 8), (batch, 512, kv_heads, 8), (batch, 512, kv_heads, 8))
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        documents = Documents(jax.ShapeDtypeStruct((batch, 512), jnp.int32))
        run = on_mesh(make_mesh(**axes) if axes else None, attend_rows)
        return sum(map(int, re.findall(r"length=(\d+)", str(jax.make_jaxpr(run)(*arrays, documents)))))

    batch, kv_heads = 8 // axes.get("data", 1), 4 // (axes.get("tensor", 1) if axes != {"tensor": 8} else 1)
    assert num_blocks(axes, 8, 4) == num_blocks(alone, batch, kv_heads) > 4


def test_no_array_has_queries_times_keys(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "SCORES_AT_ONCE", 1 << 14)
    q, k, v, documents = _inputs(rng, 1024)
    gradient = jax.jit(jax.grad(lambda q, k, v: jnp.sum(attend_rows(q, k, v, documents)[0] ** 2), (0, 1, 2)))
    used = gradient.lower(q, k, v).compile().memory_analysis()
    assert used is not None
    assert used.temp_size_in_bytes < 2 * 4 * 1024 * 1024 * 4 / 8  # an eighth of the scores


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_rollout_attention_matches_reference_across_documents(rng: np.random.Generator, num_steps: int) -> None:
    q = _normal(rng, 2, 9, 4, 8)
    steps_k = tuple(_normal(rng, 2, 9, 2, 8) for _ in range(num_steps + 1))
    steps_v = tuple(_normal(rng, 2, 9, 2, 8) for _ in range(num_steps + 1))
    documents = Documents(jnp.asarray([[1] * 4 + [2] * 5, [1] * 7 + [0] * 2], jnp.int32))
    args = q, steps_k[0], steps_v[0], documents, steps_k[1:], steps_v[1:]
    plain = [np.asarray(x) for x in (q, steps_k[0], steps_v[0], documents.dense())]
    later = [tuple(map(np.asarray, steps[1:])) for steps in (steps_k, steps_v)]
    run = jax.jit(attend_rollout)
    assert_same(run(*args), reference.attend_rollout(*plain, *later), tolerance(run, *args))
