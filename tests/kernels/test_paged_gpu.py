"""The GPU's kernel over pages: its arithmetic in 16 bits, on meshes, and what it is lowered to. That it attends to what
it should is a law of `test_attention`."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paging import TRITON, attend_by_kernel, lower_for_cuda, make_prefix
from rounding import assert_same, tolerance

from specserve.kernels import paged_gpu
from specserve.kernels.attention import attend
from specserve.kernels.block import NewKeys
from specserve.kernels.paged_gpu import attend_pages, takes
from specserve.kernels.pages import share_out
from specserve.mesh import make_mesh, on_mesh, whole


def _shape(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("rows", "head_dim", "v_dim", "page_size", "dtype", "window", "stored", "calls"),
    [
        (4, 128, 128, 16, "bfloat16", 0, "bfloat16", 2),  # grouped heads, one token
        (64, 128, 128, 64, "bfloat16", 1024, "int8", 2),  # a tree
        (4096, 256, 256, 64, "bfloat16", 0, "bfloat16", 1),  # a prompt
        (128, 576, 512, 64, "bfloat16", 0, "bfloat16", 1),  # latents
        (16, 576, 512, 64, "bfloat16", 0, "float8_e4m3fn", 2),
        (7, 80, 80, 1, "float32", 0, "float32", 1),  # nothing is a power of two
    ],
)
def test_it_is_one_triton_call_and_one_that_merges_runs(
    rows: int, head_dim: int, v_dim: int, page_size: int, dtype: str, window: int, stored: str, calls: int
) -> None:
    """Lowered for a GPU where there is none: all shapes and types are ones that Triton's dialect takes. Where one run
    holds all keys, there is nothing to merge but new keys."""
    batch, kv_heads, pages, width = 2, 1 if v_dim < head_dim else 8, 1000, 50

    def run(
        q: Any, k: Any, v: Any, table: Any, lens: Any, positions: Any, k_scale: Any, v_scale: Any, *new: Any
    ) -> Any:
        given = {"v_dim": v_dim, "window": window, "softcap": 30.0, "k_scale": k_scale, "v_scale": v_scale}
        return attend_pages(q, k, v, table, lens, positions, **given, new=new[0] if new else None)

    scale = _shape(pages, kv_heads, page_size, dtype="float32") if stored != dtype else None
    n = rows // 4 or 1
    own_scale = None if scale is None else _shape(batch, n, kv_heads, dtype="float32")
    new = NewKeys(
        _shape(batch, n, kv_heads, head_dim, dtype=stored),
        _shape(batch, n, kv_heads, v_dim, dtype=stored) if v_dim == head_dim else None,
        _shape(1, n, n, dtype="bool"),
        own_scale,
        own_scale if v_dim == head_dim else None,
        _shape(kv_heads, rows, dtype="float32"),
    )
    arrays = (
        _shape(batch, kv_heads, rows, head_dim, dtype=dtype),
        _shape(pages, kv_heads, page_size, head_dim, dtype=stored),
        _shape(pages, kv_heads, page_size, v_dim, dtype=stored) if v_dim == head_dim else None,
        _shape(batch, width),
        _shape(batch),
        _shape(batch, rows) if window else None,
        scale,
        scale if v_dim == head_dim else None,
    )
    for own, expected in (((), calls), ((new,), 2)):
        module = lower_for_cuda(run, *arrays, *own)
        assert module.count(TRITON) == expected
        assert "gather" not in module, "pages are copied"


def _attend(
    lens: list[int], keys: list[int], *, width: int, window: int = 0, has_new: bool = False
) -> tuple[np.ndarray, ...]:
    """Interpreted attention of sequences of these lengths, each with the queries of these keys, to one text, and to
    new keys of their own."""
    rng, page_size, heads, dim, rows = np.random.default_rng(0), 16, 2, 16, 3
    text = rng.standard_normal((2, heads, width * page_size, dim)).astype(np.float32)
    q = rng.standard_normal((5, heads, rows, dim)).astype(np.float32)[keys]
    k, v = text.reshape(2, heads, width, page_size, dim).swapaxes(1, 2)
    table = np.broadcast_to(np.arange(width, dtype=np.int32), (len(lens), width))
    length = jnp.asarray(lens, jnp.int32)
    positions = jnp.broadcast_to(length[:, None], (len(lens), rows)) if window else None
    new = None
    if has_new:
        new_k, new_v = rng.standard_normal((2, 5, rows, heads, dim)).astype(np.float32)[:, keys]
        new = NewKeys(new_k, new_v, np.tril(np.ones((1, rows, rows), bool)))
    found = attend_pages(q, k, v, table, length, positions, v_dim=dim, window=window, new=new, interpret=True)
    return (np.asarray(found),) if has_new else tuple(map(np.asarray, found))


@pytest.mark.parametrize(("window", "has_new"), [(0, False), (300, False), (0, True), (300, True)])
def test_the_bits_of_a_row_are_those_of_any_batch(window: int, has_new: bool) -> None:
    lens, keys = [3, 1000, 0, 130, 257], [4, 0, 1, 3, 2]
    attend_to = functools.partial(_attend, width=64, window=window, has_new=has_new)
    together = attend_to(lens, keys)
    for i, (length, key) in enumerate(zip(lens, keys, strict=True)):
        for all_rows, own in zip(together, attend_to([length], [key]), strict=True):
            np.testing.assert_array_equal(all_rows[i], own[0])


def test_runs_are_longer_where_there_is_no_room_for_all_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are those of one run for each sequence, up to rounding, and of as many runs as there may be."""
    lens, keys, begins = [900, 1024, 0, 17], [0, 1, 2, 3], jnp.zeros(4, jnp.int32)
    work = {room: np.asarray(paged_gpu._runs(begins, jnp.asarray(lens), 128, room)) for room in (99, 8, 4)}
    assert {room: (each[0], each[-1]) for room, each in work.items()} == {99: (128, 17), 8: (512, 5), 4: (1024, 3)}
    many = _attend(lens, keys, width=64)
    monkeypatch.setattr(paged_gpu, "_MOST_ROWS", 1)
    some = _attend(lens, keys, width=64)
    monkeypatch.setattr(paged_gpu, "_MIN_RUN", 4096)
    for each in (many, some):
        for found, once in zip(each, _attend(lens, keys, width=64), strict=True):
            np.testing.assert_allclose(found, once, rtol=1e-5, atol=1e-5)


def test_pages_whose_indices_would_overflow_are_left_to_xla() -> None:
    entries = 2**20
    assert takes((entries, 8, 16, 128), "bfloat16")
    assert takes((entries // 16, 8, 16, 128), "int8")
    assert not takes((entries // 8, 8, 16, 128), "int8")


@pytest.mark.parametrize(("capability", "can"), [("8.0", False), ("8.9", True), ("12.0", True), ("gfx942", True)])
def test_float8_is_left_to_xla_where_the_gpu_cannot_convert_it(
    monkeypatch: pytest.MonkeyPatch, capability: str, can: bool
) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])
    assert takes((1, 1, 1, 1), "float8_e4m3fn") == can
    assert takes((1, 1, 1, 1), "int8")


def test_devices_of_a_mesh_attend_to_their_own_heads(rng: np.random.Generator) -> None:
    """Interpreted. Sequences and KV heads are cut where they divide, and whole where not."""
    mesh = make_mesh(data=2, tensor=2)
    for batch, kv_heads in ((2, 2), (3, 2), (2, 1)):
        page_size, head_dim, n, width = 4, 8, 3, 5
        k_pages, v_pages = rng.standard_normal((2, 16, kv_heads, page_size, head_dim)).astype(np.float32)
        table, lens = rng.integers(0, 16, (batch, width)), rng.integers(0, width * page_size, batch)
        prefix = make_prefix(k_pages, v_pages, table, lens, layout="rows")
        q = jnp.asarray(rng.standard_normal((batch, n, kv_heads * 2, head_dim)), jnp.float32)
        k, v = jnp.asarray(rng.standard_normal((2, batch, n, kv_heads, head_dim)), jnp.float32)
        sinks = jnp.asarray(rng.standard_normal(kv_heads * 2), jnp.float32)
        args = (q, k, v, jnp.asarray(np.tril(np.ones((1, n, n), bool))), prefix, sinks)
        by_kernel, run = (
            jax.jit(on_mesh(own_mesh, lambda *args, by=by: by(*args[:-1], sinks=args[-1])))
            for by, own_mesh in ((attend_by_kernel, mesh), (attend, None))
        )
        assert_same(by_kernel(*jax.device_put(args, whole(mesh))), run(*args), tolerance(run, *args))


def test_data_ranks_of_a_mesh_attend_to_their_own_pages(rng: np.random.Generator) -> None:
    """Interpreted, and by XLA's operations. Rows of a rank name pages of its part; padding names none."""
    mesh, num_pages, page_size, head_dim, n, width, heads = make_mesh(data=2, tensor=2), 16, 4, 8, 3, 5, 2
    k_pages, v_pages = rng.standard_normal((2, num_pages, heads, page_size, head_dim)).astype(np.float32)
    table, lens = rng.integers(0, 8, (4, width)), np.array([0, 13, 20, 7])
    table[2:] += 8
    table[[0, 3], 2:] = num_pages
    prefix = make_prefix(k_pages, v_pages, table, lens, layout="rows")
    q = jnp.asarray(rng.standard_normal((4, n, heads * 2, head_dim)), jnp.float32)
    k, v = jnp.asarray(rng.standard_normal((2, 4, n, heads, head_dim)), jnp.float32)
    given = (q, k, v, jnp.asarray(np.tril(np.ones((1, n, n), bool))))
    run = jax.jit(attend)
    expected, error = run(*given, prefix), tolerance(run, *given, prefix)
    shared = dataclasses.replace(prefix, pages=share_out(prefix.pages, 2))
    for by in (attend_by_kernel, attend):
        spread = jax.device_put((*given, shared), whole(mesh))
        assert_same(jax.jit(on_mesh(mesh, lambda *args, by=by: by(*args)))(*spread), expected, error)
