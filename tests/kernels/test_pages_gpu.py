"""`pages_gpu.write_pages` writes what NumPy does, and touches nothing else. Over a mesh it is a law of
`test_pages_tpu`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import TRITON, lower_for_cuda

from specserve.kernels import pages_gpu

NUM_PAGES, PAGE_SIZE, NUM_NODES = 5, 4, 6


CASES = {
    "seed": st.integers(0, 2**32 - 1),
    "batch": st.integers(1, 3),
    "m": st.integers(1, 6),
    "has_path": st.booleans(),
    "dtype": st.sampled_from(["float32", "bfloat16", "int8"]),
    "at_once": st.sampled_from([8192, 1]),
}


def _check(seed: int, batch: int, m: int, has_path: bool, dtype: str, at_once: int, *, interpret: bool) -> None:
    """Of heads and channels as layers differ in them; pages out of range are nowhere, on either side."""
    rng, n = np.random.default_rng(seed), NUM_NODES if has_path else m
    places = rng.permutation(NUM_PAGES * PAGE_SIZE)[: batch * m].reshape(batch, m)
    page = np.where(rng.random((batch, m)) < 0.7, places // PAGE_SIZE, rng.choice([-1, NUM_PAGES, 2**30], (batch, m)))
    page, offset = page.astype(np.int32), (places % PAGE_SIZE).astype(np.int32)
    path = np.sort(rng.integers(0, n, (batch, m))).astype(np.int32) if has_path else None
    shapes = (2, 8), (1, 24), (2, 5)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.integers(-100, 100, shape), dtype)

    arrays = [draw(NUM_PAGES, heads, PAGE_SIZE, channels) for heads, channels in shapes]
    entries = [draw(batch, n, *shape) for shape in shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages_gpu, "_AT_ONCE", at_once)
        where = jnp.asarray(page), jnp.asarray(offset), None if path is None else jnp.asarray(path)
        found = pages_gpu.write_pages(arrays, entries, *where, interpret=interpret)
    for array, own, result in zip(arrays, entries, found, strict=True):
        expected = np.array(array)
        for b, i in np.ndindex(page.shape):
            if 0 <= page[b, i] < NUM_PAGES:
                expected[page[b, i], :, offset[b, i]] = np.asarray(own)[b, i if path is None else path[b, i]]
        np.testing.assert_array_equal(result, expected)


@settings(max_examples=25, deadline=None)
@given(**CASES)
def test_entries_come_to_their_places(**case: Any) -> None:
    _check(**case, interpret=True)


@pytest.mark.gpu
@settings(max_examples=25, deadline=None)
@given(**CASES)
def test_entries_come_to_their_places_on_the_device(**case: Any) -> None:
    _check(**case, interpret=False)


@pytest.mark.parametrize(("heads", "channels", "calls"), [(8, 128, 3), (1, 576, 18)])
def test_many_layers_are_one_launch(heads: int, channels: int, calls: int) -> None:
    """36 layers of keys and values, lowered for a GPU where there is none; each array is written where it is."""

    def shape(*sizes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    arrays = [shape(100, heads, 32, channels)] * 72
    entries, places = [shape(8, 4, heads, channels)] * 72, [shape(8, 4, dtype="int32")] * 3
    module = lower_for_cuda(pages_gpu.write_pages, arrays, entries, *places)
    assert module.count(TRITON) == calls
    assert module.count("output_operand_alias<") == 72, "pages are copied"
