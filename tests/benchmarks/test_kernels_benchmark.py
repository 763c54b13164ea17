"""The kernels that are timed compute what XLA does, and their bytes and operations are those of the shape."""

import jax
import pytest
from kernels import FORMATS, AttentionShape, attention, milliseconds, products
from rounding import assert_same, tolerance

from specserve.checkpoints.load import Target
from specserve.kernels import native

SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 8, "page_size": 4}


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8"])
def test_attention_is_timed_by_both(kv_cache_dtype: str) -> None:
    work = attention(AttentionShape(**SMALL, kv_cache_dtype=kv_cache_dtype), 2, 8, 3)
    found = milliseconds(work, 1e-3, has_xla=True)
    has_kernel = jax.default_backend() != "cpu" or native.is_available()
    assert ("own" in found) == has_kernel
    assert min(map(min, found.values())) > 0
    assert ("xla" in milliseconds(work, 1e-3, has_xla=False)) != has_kernel  # something is timed everywhere
    entry = 2 * 2 * (8 * 4 if kv_cache_dtype == "float32" else 8 + 4)  # keys and values of two heads
    if jax.default_backend() == "cpu":
        assert work.num_bytes == 2 * 8 * entry + 2 * (2 * 3 * 4 * 8) * 4


def test_products_are_those_of_a_step_in_every_format(shallow_target: Target) -> None:
    formats = list(FORMATS) if jax.default_backend() == "cpu" else ["bfloat16"]
    works = list(products(str(shallow_target.folder), (1, 3), 0, formats))
    layer = 32 * (4 + 2 + 2) * 8 + 4 * 8 * 32 + 3 * 32 * 48  # as a server multiplies: q|k|v and gate|up at once
    elements, ends = 2 * layer + 32 * 64, 2 * (32 + 64 + 32 + 32 + 32 + 96 + 48 + 32) + 32 + 64
    assert len(works) == 2 * (4 if jax.default_backend() == "cpu" else 1)
    for work, rows, size in zip(works, (1, 3) * 4, (4, 4, 2, 2, 1, 1, 0.625, 0.625), strict=False):
        assert work.num_flops == 2 * rows * elements
        if jax.default_backend() == "cpu":
            assert work.num_bytes == size * elements + 4 * rows * ends
        if work.own is not None:
            own, xla = (jax.jit(native.serving(work.function))(*each) for each in (work.own, work.xla))
            assert_same(own, xla, tolerance(work.function, *work.xla))
