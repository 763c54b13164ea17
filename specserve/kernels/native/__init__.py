"""Native CPU kernels: C++ in one shared library, called through `jax.ffi`.

They are optional. Where the library was not built, or cannot be used, one line in the log says why, and XLA's own
products run instead. The kernels have no gradient and run on one CPU device, so only serving uses them. `serving` marks
the functions of a served step; while one of them is traced, the functions of this room (`attend`, `rms_norm`, ...) call
the kernels.
"""

import contextlib
import ctypes
import functools
import logging
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args

import jax
import jax.numpy as jnp

from specserve.kernels.native import build
from specserve.mesh import program_platform, traced_mesh

logger = logging.getLogger(__name__)

# FFI targets; each is an exported function of the library by the same name
HANDLERS = (
    "specserve_matmul",
    "specserve_attend",
    "specserve_norm",
    "specserve_gate",
    "specserve_rotate",
    "specserve_angles",
    "specserve_heads",
    "specserve_write",
    "specserve_argmax",
    "specserve_longest_match",
)

Format = Literal["float32", "bfloat16", "int8", "int4", "uint4", "fp4"]  # of a packed matrix's numbers (kernels.h)
FORMATS: tuple[Format, ...] = get_args(Format)  # each at its number in C++
STORED = ("float32", "bfloat16", "int8", "float8_e4m3fn")  # dtypes of pages that they read and write

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Tracing(threading.local):
    """A flag for each thread: whether it is tracing a served step."""

    is_serving = False


_state = _Tracing()
_is_left_out = False


class Native(NamedTuple):
    """The loaded library with its instruction set, or None with the reason why there is no library."""

    library: ctypes.CDLL | None
    text: str


def is_available() -> bool:
    """Return whether the native kernels can be called in programs for the CPU. The first answer that is no
    is logged."""
    if _is_left_out or program_platform() != "cpu":
        return False
    native = _native()
    if native.library is None:
        _warn(native.text)
    return native.library is not None


def describe() -> str:
    """The instruction set that the kernels use on this processor, or why there are none and what to do about it."""
    is_available()
    return _native().text


def panel_width(of: Format, block: int) -> int:
    """Return the number of outputs in a panel of a packed matrix, of which `block` inputs share a scale, at most all.
    The instruction set decides."""
    return _number("specserve_kernels_panel_width", of, block)


def tile_inputs(of: Format, block: int) -> int:
    """Return the number of inputs of a tile, where the processor multiplies such numbers by tiles; else 0."""
    return _number("specserve_kernels_tile_inputs", of, block)


def is_quick_with_bytes() -> bool:
    """Return whether a product of one row with int8 weights takes less time than one with bfloat16 weights, as it does
    where the instruction set has wide vectors, or multiplies bytes (docs/log.md). Elsewhere bytes take too long to
    widen."""
    library = is_available() and _native().library
    return bool(library) and _text(library, "specserve_kernels_instruction_set") not in ("avx2", "neon")


def _number(name: str, of: Format, block: int) -> int:
    library = _native().library
    assert library is not None, "packing is for native kernels"
    function = library[name]
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64, ctypes.c_int64]
    return function(FORMATS.index(of), block)


def serving(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Mark a function of a served step: while it is traced, native kernels stand in for XLA's operations
    (`is_serving`)."""

    @functools.wraps(function)
    def traced(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        before = _state.is_serving
        _state.is_serving = True
        try:
            return function(*args, **kwargs)
        finally:
            _state.is_serving = before

    return traced


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Make whatever any thread traces within the context run on XLA's own operations, as if the kernels were not
    built. That holds for the kernels of accelerators too."""
    global _is_left_out
    before, _is_left_out = _is_left_out, True
    try:
        yield
    finally:
        _is_left_out = before


def are_left_out() -> bool:
    """Return whether programs that are traced now must run on XLA's own operations alone (`left_out`)."""
    return _is_left_out


def is_serving() -> bool:
    """Return whether what is being traced is a served step on one CPU device, and there are native kernels."""
    return _state.is_serving and traced_mesh() is None and is_available()


def serves(*arrays: jax.Array) -> bool:
    """Return whether a kernel may be called for these arrays: a served step is being traced (`is_serving`), and all
    are float32, in which the kernels compute."""
    return is_serving() and all(array.dtype == "float32" for array in arrays)


def call(name: str, shape: tuple[int, ...], *args: jax.Array, **attributes: Any) -> jax.Array:
    """Call the kernel `name`, whose result is one float32 array of this shape."""
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, "float32"))(*args, **attributes)


def operand(array: jax.Array | None, dtype: str = "float32") -> jax.Array:
    """An operand of a kernel in this dtype. An array without elements stands for one that is absent."""
    if array is None:
        return jnp.zeros(0, dtype)
    return array.astype(dtype)


@functools.cache
def _native() -> Native:
    return load(Path(__file__).parent, HANDLERS)


@functools.cache
def _warn(reason: str) -> None:
    if program_platform() == "cpu":  # elsewhere nobody misses them
        logger.warning("no native CPU kernels, XLA's own products run instead: %s", reason)


def load(folder: Path, handlers: tuple[str, ...]) -> Native:
    """Open the library in a folder, check that it was made from the sources beside it, and register its handlers
    with JAX."""
    path = folder / build.LIBRARY
    expected = build.source_hash(folder)
    fix = f"run `{build.AGAIN}`" if expected else "run `pip install --force-reinstall --no-deps specserve`"
    if not path.exists():
        marker = folder / build.MARKER
        reason = f"nothing was installed from {folder}; {fix}"
        if marker.exists():
            reason = marker.read_text().strip()
        return Native(None, f"not built: {reason}")
    try:
        _check_whole(path)
        library = ctypes.CDLL(str(path))
        if expected not in (None, _text(library, "specserve_kernels_source_hash")):
            return Native(None, f"stale: the C++ sources have changed since {path.name} was built; {fix}")
        _register(library, handlers)
        name = _text(library, "specserve_kernels_instruction_set")
        if name == "none":
            return Native(None, "this processor has neither AVX2 with FMA nor NEON")
        return Native(library, name)
    # the loader (another processor, a symbol that is nowhere), ctypes (a symbol that is missing), XLA (another FFI)
    except (OSError, AttributeError, RuntimeError) as error:
        return Native(None, f"{path} cannot be used: {str(error).splitlines()[0]}; {fix}")


def _check_whole(path: Path) -> None:
    """Raise OSError for a file that was cut off. The loader of Linux would map the missing part, and the process would
    die."""
    if sys.platform != "linux":
        return
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":
        raise OSError("it is no 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", header, 0x28)  # of the sections: the last thing in the file
    size, count = struct.unpack_from("<HH", header, 0x3A)
    if path.stat().st_size < table + size * count:
        raise OSError("the file is cut off")


def _text(library: ctypes.CDLL, name: str) -> str:
    function = library[name]
    function.restype = ctypes.c_char_p
    return function().decode()


def _register(library: ctypes.CDLL, handlers: tuple[str, ...]) -> None:
    capsules = {name: jax.ffi.pycapsule(library[name]) for name in handlers}
    # Handlers registered before there is a CPU client are kept until there is one, and one that XLA refuses, of another
    # FFI version, would then break the backend itself. So the client comes first and the refusal is ours to catch.
    jax.local_devices(backend="cpu")
    for name, capsule in capsules.items():
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
