"""Every kernel of the catalogue is timed beside XLA, over every shape that is asked for."""

import jax
import pytest
from rounding import assert_same, tolerance

from specserve.checkpoints.load import Target
from specserve.errors import ConfigError
from specserve.eval.bench.kernels import CATALOGUE, Bounds, measure_kernels
from specserve.eval.report import kernels_table
from specserve.eval.settings import KernelsRun
from specserve.kernels import native

SMALL = {"batch": (1, 2), "queries": (1, 3), "entries": (7,), "heads": 4, "kv_heads": 2, "head_dim": 8, "page_size": 4}
SMALL |= {"num_experts": 5, "top_k": 2, "d_model": 16, "expert_d_ff": 8}


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_every_shape_is_timed_by_both_paths(kv_cache_dtype: str) -> None:
    bounds = Bounds(bytes_per_second=1e9, flops_per_second=1e12)
    run = KernelsRun(**SMALL, seconds=1e-3, kv_cache_dtype=kv_cache_dtype, kernels=("attention",))
    rows = list(measure_kernels(run, bounds))
    assert [tuple(row.work.shape.values()) for row in rows] == [(1, 1, 7), (1, 3, 7), (2, 1, 7), (2, 3, 7)]
    has_kernel = jax.default_backend() != "cpu" or (native.is_available() and kv_cache_dtype == "auto")
    for row in rows:
        assert (row.own_ms is not None) == bool(row.work.path) == has_kernel
        assert row.xla_ms > 0
        assert row.bound_ms == pytest.approx(row.work.num_bytes / 1e6), "few operations"
    assert rows[2].work.num_bytes == 2 * rows[0].work.num_bytes
    assert kernels_table(rows).row_count == 4
    slow = Bounds(bytes_per_second=1.0, flops_per_second=1.0).raised_by(rows)
    shares = [row.within(slow).bound_ms / 1e3 / row.least_seconds for row in rows]
    assert max(shares) == pytest.approx(1), "the fastest of them is its own bound, and none is faster"
    fast = Bounds(bytes_per_second=1e18, flops_per_second=1e18)
    assert fast.raised_by(rows) == fast, "no kernel is as fast as that"


def test_experts_are_timed_over_all_rows_of_a_batch() -> None:
    rows = list(measure_kernels(KernelsRun(**SMALL, seconds=1e-3, kernels=("experts",)), Bounds(1e9, 1e12)))
    assert [row.work.shape["rows"] for row in rows] == [1, 2, 3, 6]
    assert rows[-1].work.num_flops == 6 * 2 * 3 * 2 * 16 * 8
    for row in rows:
        assert (row.own_ms is not None) == bool(row.work.path) == (jax.default_backend() != "cpu")
        assert row.work.num_bytes < 5 * 3 * 16 * 8 * 4 + 6 * 16 * 8, "no expert is counted twice"


def test_products_are_timed_in_every_format_and_for_all_rows(shallow_target: Target) -> None:
    run = KernelsRun(target=str(shallow_target.folder), rows=(1, 3), seconds=1e-3, kernels=("products",))
    rows = list(measure_kernels(run, Bounds(1e9, 1e12)))
    assert [row.work.shape["rows"] for row in rows] == [1, 3] * (3 if jax.default_backend() == "cpu" else 1)
    layer = 32 * (4 + 2 + 2) * 8 + 4 * 8 * 32 + 3 * 32 * 48  # as a server multiplies: q|k|v and gate|up at once
    elements, ends = 2 * layer + 32 * 64, 2 * (32 + 64 + 32 + 32 + 32 + 96 + 48 + 32) + 32 + 64
    for row, size in zip(rows, (4, 4, 2, 2, 1, 1), strict=False):
        num_rows = row.work.shape["rows"]
        assert row.work.num_flops == 2 * num_rows * elements
        if jax.default_backend() == "cpu":
            assert row.work.num_bytes == size * elements + 4 * num_rows * ends
        assert (row.own_ms is not None) == bool(row.work.path) == native.is_available()


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_kernel_computes_what_xla_does(name: str, shallow_target: Target) -> None:
    for work in CATALOGUE[name](KernelsRun(**SMALL, target=str(shallow_target.folder), rows=(1, 3))):
        arguments = work.make()
        own, xla = (jax.jit(function) for function in (native.serving(work.function), work.xla))
        assert_same(own(*arguments), xla(*arguments), tolerance(xla, *arguments))


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="--kernels softmax: there are attention, experts, products"):
        list(measure_kernels(KernelsRun(kernels=("softmax",)), Bounds(1, 1)))
    with pytest.raises(ConfigError, match="--top-k 9: there are --num-experts 8"):
        list(measure_kernels(KernelsRun(kernels=("experts",), num_experts=8, top_k=9), Bounds(1, 1)))
    with pytest.raises(ConfigError, match="--kv-heads 3 does not divide --heads 32"):
        list(measure_kernels(KernelsRun(kv_heads=3), Bounds(1, 1)))
