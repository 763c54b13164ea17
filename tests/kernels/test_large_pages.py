"""Arrays in large pages."""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from specserve.kernels.large_pages import empty_in_large_pages


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
    told = [(array.shape, array.dtype) for array in arrays]
    assert told == [(shape, kind) for _ in range(2) for shape in shapes for kind in kinds]
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
