"""The kernels for packed rows give what blocks of scores through memory give: softmax, log-sum-exp and gradients.
Interpreted where there is no such device."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from paging import TRITON, lower_for_cuda
from rounding import assert_same, tolerance

from specserve.kernels import rows, rows_gpu, rows_tpu
from specserve.kernels.rows import Documents, attend_rows, kernel_for
from specserve.mesh import made_for, make_mesh, on_mesh, whole

CASES = {
    "plain": {},
    "all options": {"softcap": 3.0, "window": 70, "scale": 0.5, "sinks": True},
    "sinks, narrow window": {"window": 5, "sinks": True},
}


def _kernel(name: str) -> Any:
    kernel, how = rows_gpu, True
    if name == "tpu":
        kernel, how = rows_tpu, pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    return SimpleNamespace(
        attend=lambda *args, **options: kernel.attend(*args, **options, interpret=how),
        gradients=lambda *args, **options: kernel.gradients(*args, **options, interpret=how),
    )


def _arrays(rng: np.random.Generator, seq: int) -> tuple[Any, ...]:
    """Queries, keys, values, sinks, and cotangents of both results; four documents a row, and padding."""

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    ids = np.sort(rng.integers(1, 5, (2, seq)), axis=1).astype(np.int32)
    ids[1, -seq // 5 :] = 0
    arrays = normal(2, seq, 4, 24), normal(2, seq, 2, 24), normal(2, seq, 2, 16), normal(4)
    return *arrays, normal(2, seq, 4, 16), normal(2, seq, 4), Documents(jnp.asarray(ids))


def _run(documents: Documents, options: dict[str, Any]) -> Any:
    def both(q: Any, k: Any, v: Any, sinks: Any, d_out: jax.Array, d_lse: jax.Array) -> tuple[jax.Array, Any]:
        given = options | ({"sinks": sinks} if options.get("sinks") else {})
        out, lse = attend_rows(q, k, v, documents, **given)
        return jnp.sum(out * d_out) + jnp.sum(lse * d_lse), (out, lse)

    return jax.grad(both, (0, 1, 2, 3), has_aux=True)


@pytest.mark.parametrize("name", ["gpu", "tpu"])
@pytest.mark.parametrize(
    ("case", "axes"), [*((case, {}) for case in CASES), ("all options", {"data": 2, "tensor": 2})], ids=str
)
def test_a_kernel_gives_what_blocks_give(
    name: str, case: str, axes: dict[str, int], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows that tiles do not divide, where a kernel takes them. Over a mesh each device has its own rows and
    heads."""
    monkeypatch.setattr(rows_tpu, "TILES", (32,))
    *args, documents = _arrays(rng, 300 if name == "gpu" else 96)
    blocks = jax.jit(_run(documents, CASES[case]))
    expected, rounding = blocks(*args), tolerance(blocks, *args)
    monkeypatch.setattr(rows, "kernel_for", lambda *_arrays: _kernel(name))
    mesh = make_mesh(**axes) if axes else None
    found = jax.jit(on_mesh(mesh, _run(documents, CASES[case])))(*jax.device_put(args, whole(mesh)))
    assert_same(found, expected, rounding)


def test_each_platform_has_the_kernel_that_takes_its_shapes() -> None:
    def chosen(seq: int, head_dim: int, **axes: int) -> Any:
        shapes = [jax.ShapeDtypeStruct((2, seq, heads, head_dim), jnp.bfloat16) for heads in (4, 2)]
        found: list[Any] = []

        def look() -> jax.Array:
            found.append(kernel_for(*shapes))  # type: ignore[arg-type]
            return jnp.zeros(())

        jax.eval_shape(on_mesh(make_mesh(**axes) if axes else None, look))
        return found[0]

    assert chosen(1024, 128) is None, "a CPU's blocks are as fast"
    with made_for("gpu"):
        assert (chosen(1000, 128), chosen(1000, 512)) == (rows_gpu, None)
    with made_for("tpu"):
        assert (chosen(1024, 128), chosen(1000, 128)) == (rows_tpu, None)


@pytest.mark.parametrize(("head_dim", "v_dim"), [(64, 64), (128, 128), (192, 128), (256, 256), (80, 80)])
def test_the_kernels_are_three_triton_calls(head_dim: int, v_dim: int) -> None:
    """Lowered for a GPU where there is none: all shapes and types are ones that Triton's dialect takes."""

    def run(q: Any, k: Any, v: Any, ids: Any, sinks: Any) -> Any:
        def both(q: Any, k: Any, v: Any) -> Any:
            out, lse = attend_rows(q, k, v, Documents(ids), softcap=30.0, sinks=sinks, window=512)
            return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

        return jax.grad(both, (0, 1, 2))(q, k, v)

    heads = [
        jax.ShapeDtypeStruct((2, 1000, n, dim), "bfloat16") for n, dim in ((8, head_dim), (2, head_dim), (2, v_dim))
    ]
    ids, sinks = jax.ShapeDtypeStruct((2, 1000), "int32"), jax.ShapeDtypeStruct((8,), "float32")
    assert lower_for_cuda(run, *heads, ids, sinks).count(TRITON) == 3
