"""Native CPU kernels: C++ in one shared library, called through `jax.ffi`. They are optional: where the library was not
built, or cannot be used, one line in the log says why and XLA's own products run instead.
"""

import ctypes
import functools
import logging
import struct
import sys
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

# FFI targets; each is an exported function of the library by the same name
HANDLERS = ("specserve_twice",)


class Native(NamedTuple):
    """The library, or None; and its instruction set, or why there is none."""

    library: ctypes.CDLL | None
    text: str


def is_available() -> bool:
    """Whether the native kernels can be called in programs for the CPU. The first answer that is no is logged."""
    native = _native()
    if native.library is None:
        _warn(native.text)
    return native.library is not None


def describe() -> str:
    """The instruction set that the kernels use on this processor, or why there are none and what to do about it."""
    is_available()
    return _native().text


@functools.cache
def _native() -> Native:
    return load(Path(__file__).parent, HANDLERS)


@functools.cache
def _warn(reason: str) -> None:
    import jax

    if jax.default_backend() == "cpu":  # elsewhere nobody misses them
        logger.warning("no native CPU kernels, XLA's own products run instead: %s", reason)


def load(folder: Path, handlers: tuple[str, ...]) -> Native:
    """Open the library of a folder, check that it was made of the sources beside it, and register its handlers."""
    from specserve.kernels.native import build  # not above: this file is imported before `python -m ...build` runs

    path = folder / build.LIBRARY
    expected = build.source_hash(folder)
    fix = f"run `{build.AGAIN}`" if expected else "run `pip install --force-reinstall --no-deps specserve`"
    if not path.exists():
        marker = folder / build.MARKER
        reason = marker.read_text().strip() if marker.exists() else f"nothing was installed from {folder}; {fix}"
        return Native(None, f"not built: {reason}")
    try:
        _check_whole(path)
        library = ctypes.CDLL(str(path))
        if expected not in (None, _text(library, "specserve_kernels_source_hash")):
            return Native(None, f"stale: the C++ sources have changed since {path.name} was built; {fix}")
        _register(library, handlers)
        return Native(library, _text(library, "specserve_kernels_instruction_set"))
    # the loader (another processor, a symbol that is nowhere), ctypes (a symbol that is missing), XLA (another FFI)
    except (OSError, AttributeError, RuntimeError) as error:
        return Native(None, f"{path} cannot be used: {str(error).splitlines()[0]}; {fix}")


def _check_whole(path: Path) -> None:
    """Raise OSError for a file that was cut off. The loader of Linux maps what is not there, and the process dies."""
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
    import jax  # not above: `python -m specserve.kernels.native.build` should work where jax does not

    capsules = {name: jax.ffi.pycapsule(library[name]) for name in handlers}
    # Handlers registered before there is a CPU client are kept until there is one, and one that XLA refuses, of another
    # FFI version, would then break the backend itself. So the client comes first and the refusal is ours to catch.
    jax.local_devices(backend="cpu")
    for name, capsule in capsules.items():
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
