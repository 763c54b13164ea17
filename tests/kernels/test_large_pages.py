"""Arrays in large pages, and zeros that take none."""

import itertools
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import psutil
import pytest

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.kernels.large_pages import copied, empty_in_large_pages, give_back_zeros
from specserve.serve.programs.placement import bytes_per_token
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import make_shapes
from specserve.speculative.tree import chain


def test_arrays_in_large_pages_are_arrays_of_their_own() -> None:
    """Aligned as XLA needs it to take them where they lie, apart from each other, and on Linux from pages that the
    kernel was asked to map large. A shared mapping is full several times here, and one array has a mapping alone."""
    kinds = [np.dtype(np.int8), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]
    shapes = [(), (3,), (0, 4), (5, 7, 11), (2, 1 << 20), (3 << 20,), (9, 1 << 20), (1,)]
    arrays = [empty_in_large_pages(shape, kind) for _ in range(2) for shape in shapes for kind in kinds]
    for number, array in enumerate(arrays):
        array[...] = number
    for number, array in enumerate(arrays):
        assert (array == np.asarray(number, array.dtype)).all(), "two arrays overlap"
        assert array.flags.c_contiguous
        assert array.flags.writeable
    found = [(array.shape, array.dtype) for array in arrays]
    assert found == [(shape, kind) for _ in range(2) for shape in shapes for kind in kinds]
    if not sys.platform.startswith("linux"):
        return
    begins = [array.ctypes.data for array in arrays if array.size]
    assert not any(begin % 64 for begin in begins)
    large = _asked_large()
    if large:  # not of a kernel that has none
        assert all(any(begin in mapping for mapping in large) for begin in begins)


def _asked_large() -> list[range]:
    """The addresses of this process that the kernel was asked to map in large pages."""
    found, mapping = [], range(0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name = line.split()[0]
        if not name.endswith(":"):
            begin, end = name.split("-")
            mapping = range(int(begin, 16), int(end, 16))
        elif name == "VmFlags:" and "hg" in line.split():
            found.append(mapping)
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for it")
def test_zeros_are_given_back_and_numbers_are_not() -> None:
    """Whole pages of zeros, whatever lies beside them, come back as zeros; a single number keeps all."""
    array, own = np.empty(8 << 20, np.uint8), psutil.Process()
    array[:] = 0
    array[0] = array[-1] = 7  # beside the whole pages
    before = own.memory_info().rss
    assert give_back_zeros(array.ctypes.data + 1, array.nbytes - 2)
    assert before - own.memory_info().rss > 7 << 20
    assert array[0] == array[-1] == 7
    array[5 << 20] = 3
    assert not give_back_zeros(array.ctypes.data + 1, array.nbytes - 2)
    assert array.sum() == 17
    assert not give_back_zeros(array.ctypes.data, 100), "no whole page"


@pytest.mark.parametrize(
    "shape", [(0, 3), (1, 7), (5, 4, 2), (3, 700, 250, 2), (40, 3, 900, 4), (17, 1000, 65), (700, 1500)]
)
@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.bfloat16, np.float32])
def test_a_copy_of_a_view_has_its_numbers_in_its_order(
    shape: tuple[int, ...], dtype: type, rng: np.random.Generator
) -> None:
    """Whichever axes the view has moved, and whether one thread makes it or several do."""
    whole = rng.integers(-100, 100, shape).astype(dtype)
    for order in itertools.islice(itertools.permutations(range(whole.ndim)), 6):
        view = whole.transpose(order)
        made = copied(view)
        assert made.flags.c_contiguous
        assert made.dtype == dtype
        np.testing.assert_array_equal(made, view)


@pytest.mark.skipif(not sys.platform.startswith("linux") or jax.default_backend() != "cpu", reason="asks Linux for it")
@pytest.mark.parametrize("has_head", [False, True])
def test_a_server_holds_no_memory_for_pages_that_nobody_has_used(
    tiny_target: Target, tiny_head: Head, has_head: bool
) -> None:
    """Neither for the target's nor for those of a head's own layer."""
    own, sizes = psutil.Process(), []
    head, tree = (tiny_head, chain(2)) if has_head else (None, None)
    num_bytes = bytes_per_token(tiny_target.config, head and head.drafter)
    for num_pages in (64, 64 + (512 << 20) // (4 * num_bytes)):
        before = own.memory_info().rss
        fixed = {"num_slots": 1, "max_model_len": 64, "page_size": 4}
        runner = Runner(tiny_target, head, make_shapes([tree], tiny_target.config, num_pages=num_pages, **fixed))
        jax.block_until_ready(runner.state)
        sizes.append(own.memory_info().rss - before)
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(runner.state.cache))
        del runner
    assert sizes[1] - sizes[0] < 64 << 20, "of 512 MiB more"
