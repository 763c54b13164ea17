"""Compiled programs in the user's cache folder, so that a later start neither traces nor compiles them.

A program is looked for before it is traced. So the name of its file is a hash of all that decides what would be traced
and what it would be compiled for: the code that is traced, the versions and settings of JAX and XLA, the processor and
its devices, the objects that the functions are bound to, and the arguments. Where a file cannot be used, a warning is
logged and the program is compiled anew.
"""

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import threading
import zlib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import serialize_executable

import specserve
from specserve import host
from specserve.drafters.registry import outside_files
from specserve.errors import first_line
from specserve.kernels import native
from specserve.mesh import COMPILER_FLAGS
from specserve.serve.programs.calls import Call, shape_of

logger = logging.getLogger(__name__)

LARGEST_BYTES = 2**29  # of all files together; what was not used for longest goes first
# The code that programs are made of: `calls` and all that it imports, and the drafters. A test holds the list.
TRACED = (
    *(f"{name}.py" for name in ("errors", "host", "mesh", "pytree")),
    *(f"{room}/**/*.py" for room in ("kernels", "models", "speculative", "drafters")),
    *(f"serve/{name}.py" for name in ("programs/calls", "programs/placement")),
    f"kernels/native/{native.build.LIBRARY}",
)
_JAX_HIT = "/jax/compilation_cache/cache_hits"


class ProgramCache:
    """The files of one folder, for functions that are bound to the same `facts`. Every method may be called from any
    thread, and several processes may share the folder, which is written and read by its user alone, because loading a
    program runs what is in its file."""

    def __init__(self, folder: Path, facts: Sequence[str], devices: Sequence[Any]) -> None:
        self._folder, self._facts, self._devices = folder, tuple(facts), tuple(devices)
        self._has_failed, self._lock = False, threading.Lock()

    def load(self, call: Call) -> Any:
        """Return the compiled program, or None where there is no file that can be used."""
        path = self._path(call)
        try:
            name, serialized, results = pickle.loads(zlib.decompress(path.read_bytes()))
            if name != path.name:
                raise ValueError(f"it holds {name}")
            _set_up_lapack()
            program = serialize_executable.deserialize_and_load(
                serialized,
                jax.tree.structure((call.arguments, {})),
                jax.tree.structure(results),
                execution_devices=self._devices,
            )
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn_once("cannot be read from", error)
            return None
        except Exception as error:  # zlib, pickle and XLA raise anything for a damaged file
            logger.warning("%s cannot be used, its program is compiled anew: %s", path, first_line(error))
            return None
        with contextlib.suppress(OSError):  # a folder that may only be read
            os.utime(path)  # it is used
        return program

    def has(self, call: Call) -> bool:
        """Return whether there is a file for the program."""
        return self._path(call).is_file()

    def compile(self, call: Call) -> Any:
        """Compile a program, and keep it in a file."""
        hits = _of_jax.num_hits
        compiled = call.compile()
        # XLA writes only a part of what it has itself read from a file, so what a compilation cache of JAX's had stays
        # there
        if _of_jax.num_hits == hits:
            self._write(self._path(call), compiled)
        return compiled

    def _write(self, path: Path, compiled: jax.stages.Compiled) -> None:
        try:
            serialized, _, results = serialize_executable.serialize(compiled)
            # a tree of numbers stands for the structure of the results; a structure itself cannot always be pickled
            content = path.name, serialized, jax.tree.unflatten(results, range(results.num_leaves))
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            host.write_whole(path, zlib.compress(pickle.dumps(content), level=1))
            self._make_room()
        except Exception as error:  # a full disk, or a backend that cannot write programs: none needs to be kept
            self._warn_once("cannot be kept in", error)

    def _warn_once(self, what: str, error: Exception) -> None:
        with self._lock:
            has_failed, self._has_failed = self._has_failed, True
        if not has_failed:
            logger.warning("compiled programs %s %s: %s", what, self._folder, first_line(error))

    def _make_room(self) -> None:
        files: list[tuple[os.stat_result, Path]] = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another thread's, renamed or removed meanwhile
                files.append((path.stat(), path))
        excess = sum(status.st_size for status, _ in files) - LARGEST_BYTES
        for status, path in sorted(files, key=lambda file: file[0].st_mtime):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= status.st_size

    def _path(self, call: Call) -> Path:
        leaves, tree = jax.tree.flatten(jax.tree.map(shape_of, call.arguments))
        name = call.function.__name__
        facts = (*_surroundings(), *self._facts, *map(str, self._devices), name, call.static, tree, leaves)
        digest = hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:32]
        return self._folder / f"{name.strip('_')}-{digest}"


def _surroundings() -> tuple[object, ...]:
    """Return the facts that decide about every program of this process."""
    settings = {name: value for name, value in jax.config.values.items() if "_cache" not in name}  # type: ignore[attr-defined]
    device = jax.devices()[0]
    return (
        _code(),
        *_outside(),
        metadata.version("jax"),
        metadata.version("jaxlib"),
        device.client.platform_version,
        device.device_kind,
        settings,
        [os.environ.get(name) for name in COMPILER_FLAGS],
        host.processor(),
        host.num_cores(),  # XLA's CPU backend cuts its work for them
        native.is_available(),
        native.describe(),
    )


@functools.cache
def _set_up_lapack() -> None:
    """Let programs that are loaded call LAPACK on CPUs, as those of recurrent layers do for `triangular_solve`. JAX
    sets LAPACK up when it lowers such an operation, and a process that loads all its programs lowers none: its first
    call of LAPACK would be a jump to nowhere."""
    if jax.default_backend() == "cpu":
        matrix = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        jax.jit(jnp.linalg.cholesky).lower(matrix)


@functools.cache
def _code() -> str:
    """A hash of the package's own code that is traced."""
    folder, digest = Path(specserve.__file__).parent, hashlib.sha256()
    for path in sorted(path for pattern in TRACED for path in folder.glob(pattern)):
        digest.update(f"\0{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _outside() -> list[str]:
    """Hashes of the code of drafters from outside, in the order of their files."""
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in outside_files()]


class _OfJax(threading.local):
    num_hits = 0  # of a compilation cache of JAX's, by this thread


_of_jax = _OfJax()


def _count_hits(event: str, **_facts: Any) -> None:
    _of_jax.num_hits += event == _JAX_HIT


jax.monitoring.register_event_listener(_count_hits)
