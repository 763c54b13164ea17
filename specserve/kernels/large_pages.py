"""Memory for weights, which every step reads from one end to the other, and for arrays that begin as zeros."""

import contextlib
import ctypes
import math
import mmap
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from specserve import host

_LARGE_PAGE = 2 << 20  # of x86-64 and AArch64, where the kernel's base page has 4 KiB
_SHARED_MAPPING = 16 * _LARGE_PAGE  # smaller arrays lie in one mapping side by side
_FEW = 8  # numbers that share 64 bits, at most
_PART = 1 << 20  # bytes that are worth a thread
_MOST_PARTS = 16
_ALIGNMENT = 64  # of arrays that XLA takes without a copy
_mapping = threading.Lock()
_shared = np.empty(0, np.uint8)  # the rest of the last mapping


def empty_in_large_pages(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array without values, in memory that the kernel is asked to map in large pages.

    It is for arrays that every step reads from one end to the other: with pages of 4 KiB a processor waits for
    addresses half of the time (docs/log). Linux maps large pages on request, unless its settings forbid them. Elsewhere
    this is `numpy.empty`. The memory is free again once no array lies in its mapping.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(shape, dtype)
    global _shared
    with _mapping:
        if num_bytes >= _SHARED_MAPPING:
            piece = _map_large_pages(num_bytes)
        else:
            if _shared.nbytes < num_bytes:
                _shared = _map_large_pages(_SHARED_MAPPING)
            piece, _shared = _shared, _shared[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
    return piece[:num_bytes].view(dtype).reshape(shape)


def copied(view: np.ndarray) -> np.ndarray:
    """A contiguous copy of a view of two axes or more in such memory. NumPy would copy along the last axis, which of a
    packed matrix has one to four numbers. It is made number by number of that axis, and of parts of the first axis on
    all cores at once, which is four times as fast."""
    made = empty_in_large_pages(view.shape, view.dtype)

    def copy(part: slice) -> None:
        if view.shape[-1] <= _FEW:
            for i in range(view.shape[-1]):
                np.copyto(made[part, ..., i], view[part, ..., i])
        else:
            np.copyto(made[part], view[part])

    num_parts = max(1, min(len(view), view.nbytes // _PART, _MOST_PARTS))
    ends = [len(view) * i // num_parts for i in range(num_parts + 1)]
    if num_parts == 1:
        copy(slice(None))
        return made
    with ThreadPoolExecutor(host.num_cores()) as threads:
        list(threads.map(copy, map(slice, ends, ends[1:])))
    return made


def give_back_zeros(address: int, num_bytes: int) -> bool:
    """Return the whole pages of a piece of memory to the system, which maps zeros there again where it is next used.
    Returns whether it was done: on Linux alone, and only where there is nothing but zeros. The memory must be of
    `malloc`, and nobody may write to it meanwhile."""
    if not sys.platform.startswith("linux"):
        return False
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if size <= 0 or np.ctypeslib.as_array((ctypes.c_uint64 * (size // 8)).from_address(begin)).max():
        return False
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED) == 0


def _map_large_pages(num_bytes: int) -> np.ndarray:
    """Map at least `num_bytes` bytes of memory, rounded up to whole large pages, beginning at the start of one."""
    size = -(-num_bytes // _LARGE_PAGE) * _LARGE_PAGE
    mapping = mmap.mmap(-1, size + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # this kernel has no large pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    begin = -whole.ctypes.data % _LARGE_PAGE
    return whole[begin : begin + size]
