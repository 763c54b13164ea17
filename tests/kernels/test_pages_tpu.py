"""`pages_tpu.write_pages` writes what XLA's scatter does, and touches nothing else.

Some batches run in the interpreter of TPU kernels with its checks on: memory begins as NaN, copies may be executed as
late as when they are waited for, reads out of bounds and races are errors. It takes seconds for each, so most run in
Pallas' plain one.
"""

import dataclasses
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from specserve.kernels import pages as pages_module
from specserve.kernels import pages_gpu, pages_tpu
from specserve.kernels.pages import Layout, Pages, share_out, write_pages
from specserve.mesh import make_mesh, on_mesh, whole

NUM_PAGES = 7
CHECKED = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True, dma_execution_mode="on_wait")


@dataclasses.dataclass(frozen=True)
class Row:
    """What one sequence writes: so many entries from an offset on, the kept ones a run of them, on pages of its own."""

    offset: int
    begin: int
    num_kept: int
    pages: tuple[int, ...]


def places(rows: list[Row], num_entries: int, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The pages and the offsets of all entries, [batch, m]."""
    page = np.full((len(rows), num_entries), NUM_PAGES, np.int32)
    offset = np.zeros_like(page)
    for b, row in enumerate(rows):
        for i in range(num_entries):
            offset[b, i] = (row.offset + i) % page_size
            nth = (row.offset + i) // page_size
            if row.begin <= i < row.begin + row.num_kept and nth < len(row.pages):
                page[b, i] = row.pages[nth]
    return page, offset


def check(
    rows: list[Row], num_entries: int, dtype: str, *, heads: int = 2, channels: Sequence[int], interpret: Any = True
) -> None:
    rng = np.random.default_rng(0)
    tile = 32 // jnp.dtype(dtype).itemsize
    page_size = 2 * tile
    page, offset = places(rows, num_entries, page_size)

    def some(*shape: int) -> jax.Array:
        return jnp.asarray(rng.integers(-100, 100, shape), dtype)

    arrays = [some(NUM_PAGES, heads, page_size, each) for each in channels]
    entries = [some(len(rows), num_entries, heads, each) for each in channels]
    pltpu.reset_tpu_interpret_mode_state()
    run = jax.jit(lambda *given: pages_tpu.write_pages(*given, interpret=interpret))
    got = jax.device_get(run(arrays, entries, jnp.asarray(page), jnp.asarray(offset)))
    for array, own, result in zip(arrays, entries, got, strict=True):
        expected = np.array(array)
        for b, i in np.ndindex(page.shape):
            if page[b, i] < NUM_PAGES:
                expected[page[b, i], :, offset[b, i]] = np.asarray(own)[b, i]
        np.testing.assert_array_equal(result, expected)


@st.composite
def batches(draw: Any) -> tuple[list[Row], int]:
    num_entries, free = draw(st.integers(1, 40)), list(range(NUM_PAGES))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, min(2, num_entries)))
        pages = tuple(free.pop() for _ in range(draw(st.integers(0, 2))))
        rows.append(Row(draw(st.integers(0, 15)), begin, draw(st.integers(0, num_entries - begin)), pages))
    return rows, num_entries


@settings(max_examples=25, deadline=None)
@given(batches(), st.sampled_from(["float32", "bfloat16", "int8"]), st.sampled_from([1, 2]))
def test_entries_come_to_their_places(batch: tuple[list[Row], int], dtype: str, heads: int) -> None:
    check(*batch, dtype, heads=heads, channels=[128, 64])


CASES: dict[str, tuple[list[Row], int, str]] = {
    "nobody writes": ([Row(0, 0, 0, ()), Row(0, 0, 0, ())], 1, "bfloat16"),
    "one between padded slots": ([Row(0, 0, 0, ()), Row(5, 0, 1, (3,)), Row(0, 0, 0, ())], 1, "bfloat16"),
    "over the middle of a page": ([Row(7, 1, 3, (2,)), Row(12, 0, 4, (6, 5))], 4, "float32"),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_races_and_nothing_is_read_before_it_is_there(name: str) -> None:
    check(*CASES[name], channels=[128], interpret=CHECKED)


SERVED = {"float32": [64, 128], "bfloat16": [256, 128], "int8": [576]}  # channels of heads, and of latents


@pytest.mark.libtpu
@pytest.mark.parametrize("generation", ["v4:2x2x1", "v5e:2x2", "v6e:2x2", "tpu7x:2x2x1"])
def test_served_pages_compile_for_tpus(generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiler of real devices, which need not be there."""
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # or libtpu asks the network which device it has
    place = jax.sharding.SingleDeviceSharding(topologies.get_topology_desc(generation, "tpu").devices[0])

    def shape(*sizes: int, dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    for dtype, channels in SERVED.items():
        arrays = [shape(NUM_PAGES, 8, 64, each, dtype=dtype) for each in channels]
        entries = [shape(3, 5, 8, each, dtype=dtype) for each in channels]
        jax.jit(pages_tpu.write_pages).lower(arrays, entries, *[shape(3, 5, dtype="int32")] * 2).compile()


@pytest.mark.tpu
@pytest.mark.parametrize("dtype", SERVED)
def test_compiled_for_this_tpu_it_is_the_same(dtype: str) -> None:
    for rows, num_entries, _ in CASES.values():
        check(rows, num_entries, dtype, heads=8, channels=SERVED[dtype], interpret=False)


@pytest.mark.parametrize(
    ("layout", "num_ranks", "kernel"), [("rows", 2, pages_tpu), ("joined", 1, pages_tpu), ("rows", 2, pages_gpu)]
)
def test_devices_of_a_mesh_write_their_own_heads_and_pages(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, layout: Layout, num_ranks: int, kernel: ModuleType
) -> None:
    """Of a path through new entries, some in 8 bits; padding names no page. As XLA's scatter does without a mesh."""
    mesh, page_size, heads, dim = make_mesh(data=2, tensor=2), 32, 2, 8
    monkeypatch.setattr(pages_module, "default_layout", lambda _head_dim: layout)
    pages = [Pages.zeros(8, page_size, heads, dim, dtype) for dtype in ("int8", "int8")]
    new = [tuple(jnp.asarray(rng.standard_normal((2, 5, heads, dim)), jnp.float32) for _ in range(2)) for _ in pages]
    page = jnp.asarray([[1, 1, 3], [6, 9, 9]], jnp.int32)  # the second row is of the second data rank
    offset, path = jnp.asarray([[30, 31, 0], [5, 6, 7]], jnp.int32), jnp.asarray([[0, 2, 4], [1, 0, 0]], jnp.int32)
    expected = write_pages(pages, new, page, offset, path)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(expected))
    monkeypatch.setattr(
        pages_module, "writer_for", lambda _pages: functools.partial(kernel.write_pages, interpret=True)
    )
    run = jax.jit(on_mesh(mesh, lambda pages: write_pages(pages, new, page, offset, path)))
    found = run(jax.device_put([share_out(each, num_ranks) for each in pages], whole(mesh)))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(found), jax.tree.leaves(expected))


def test_arrays_that_fast_memory_does_not_hold_at_once_go_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_tpu, "_VMEM", 1)
    check([Row(3, 0, 4, (2,)), Row(14, 1, 3, (5, 0))], 4, "bfloat16", channels=[128, 128, 256])
