"""Shim until the build is merged."""
import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from specserve.mesh import traced_mesh

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

HANDLERS = (
    "specserve_matmul",
    "specserve_attend",
    "specserve_norm",
    "specserve_gate",
    "specserve_rotate",
    "specserve_angles",
)
_is_left_out = False
_is_serving = False


@functools.cache
def _library() -> ctypes.CDLL | None:
    path = Path(__file__).parent / "libspecserve_kernels.so"
    if not path.is_file():
        return None
    library = ctypes.CDLL(str(path))
    for name in HANDLERS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return library


def is_available() -> bool:
    return not _is_left_out and jax.default_backend() == "cpu" and _library() is not None and panel_width() > 0


def panel_width() -> int:
    """Outputs of a panel of a packed matrix, which the instruction set decides."""
    library = _library()
    assert library is not None
    library.specserve_kernels_panel_width.restype = ctypes.c_int64
    return library.specserve_kernels_panel_width()


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """What is traced meanwhile runs on XLA's own products and attention, as where nothing was built."""
    global _is_left_out
    before, _is_left_out = _is_left_out, True
    try:
        yield
    finally:
        _is_left_out = before


def serving(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function of a served step: while it is traced, native kernels stand in for XLA's operations (`is_serving`)."""

    @functools.wraps(function)
    def traced(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        global _is_serving
        before, _is_serving = _is_serving, True
        try:
            return function(*args, **kwargs)
        finally:
            _is_serving = before

    return traced


def is_serving() -> bool:
    """Whether what is being traced is a served step on one CPU device, and there are native kernels."""
    return _is_serving and traced_mesh() is None and is_available()


def serves(*arrays: jax.Array) -> bool:
    """The same, for a kernel over these arrays: they take float32."""
    return is_serving() and all(array.dtype == jnp.float32 for array in arrays)
