"""Build the native kernels: all the C++ beside this file becomes one plain shared library.

It is not a CPython extension, so one library serves every Python of a platform. pip's build hook, `hatch_build.py`,
loads this file by its path before anything is installed, so it imports nothing but the standard library. From a
checkout, `python -m specserve.kernels.native build` builds again and shows all that the compiler prints.

The XLA headers are those that ship in jaxlib. pip's isolated build environment gets the oldest jaxlib that specserve
runs on (pyproject.toml), because XLA takes kernels that were built for an older FFI and refuses those for a newer one.
"""

import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
LIBRARY = "libspecserve_kernels.so"
MARKER = "not_built.txt"  # lies in place of the library, and gives the reason
AGAIN = "python -m specserve.kernels.native build"

FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-Wno-psabi", "-fPIC", "-fvisibility=hidden", "-pthread")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", *_AVX2)
# The last word of a source's name: which machines it is for, and what its compiler may use there beyond the baseline.
VARIANTS = {
    "avx2": ("x86_64", _AVX2),
    "amx": ("x86_64", (*_AVX512, "-mavx512vnni")),
    "vnni": ("x86_64", (*_AVX512, "-mavx512vnni")),
    "avxvnni": ("x86_64", (*_AVX2, "-mavxvnni")),
    "avx512": ("x86_64", _AVX512),
    "neon": ("aarch64", ()),
    "dotprod": ("aarch64", ("-march=armv8.2-a+dotprod",)),
}
NEW_FLAGS = ("-mavxvnni",)  # GCC 11, Clang 12: what an older compiler compiles without


class NotBuilt(Exception):
    """The library could not be built. The message is one line; `output` is all that the compiler printed."""

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.output = output


def machine() -> str:
    """The processor architecture that this process runs on, under one name for each: x86_64 or aarch64, for example."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def sources(folder: Path = FOLDER) -> list[Path]:
    """The C++ files that are compiled on this machine. An installed wheel has none."""
    return [path for path in sorted(folder.glob("*.cc")) if _variant(path)[0] in (None, machine())]


def _variant(source: Path) -> tuple[str | None, tuple[str, ...]]:
    return VARIANTS.get(source.stem.rpartition("_")[2], (None, ()))


def source_hash(folder: Path = FOLDER) -> str | None:
    """A hash of the sources and the compiler's flags. A library that carries another hash is stale. None where there
    are no sources, as in an installed wheel."""
    files = [*folder.glob("*.cc"), *folder.glob("*.h")]
    if not files:
        return None
    digest = hashlib.sha256(repr((FLAGS, VARIANTS)).encode())
    for path in sorted(files):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str]:
    """The C++ compiler as the first words of a command: $CXX where it is set, else a compiler on the path. Raises
    NotBuilt."""
    wish = os.environ.get("CXX", "")
    if wish:
        command = shlex.split(wish)
        if command and shutil.which(command[0]):
            return command
    else:
        for name in ("g++", "clang++", "c++"):
            if found := shutil.which(name):
                return [found]
    given = wish and f" (CXX is {wish})"
    raise NotBuilt(
        f"no C++ compiler when specserve was installed{given}; "
        "install one (Debian: apt install g++) and run pip install again"
    )


def find_headers() -> Path:
    """The folder with XLA's headers. jax.ffi.include_dir() would give it, but needs jax, which building does not.
    Raises NotBuilt."""
    jaxlib = importlib.util.find_spec("jaxlib")
    for folder in (jaxlib and jaxlib.submodule_search_locations) or ():
        if (Path(folder) / "include" / "xla" / "ffi" / "api" / "ffi.h").is_file():
            return Path(folder) / "include"
    raise NotBuilt("no jaxlib with XLA's headers where specserve was built; run pip install again, with a network")


def compile_command(compiler: list[str], source: Path, output: Path) -> list[str]:
    """The command that makes an object file of one source."""
    define = f'-DSPECSERVE_SOURCE_HASH="{source_hash(source.parent)}"'
    own = (flag for flag in _variant(source)[1] if flag not in NEW_FLAGS or _knows(compiler, flag))
    flags = (*FLAGS, *own, *_architecture(), "-isystem", str(find_headers()), define)
    return [*compiler, *flags, "-c", str(source), "-o", str(output)]


def _knows(compiler: list[str], flag: str) -> bool:
    command = [*compiler, flag, "-E", "-x", "c++", os.devnull]
    return not subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


def _architecture() -> tuple[str, ...]:
    if sys.platform != "darwin":
        return ()
    # a Mac's compiler builds for the Mac's own processor, even where Python runs translated
    return "-arch", platform.machine()


def build(folder: Path = FOLDER, into: Path | None = None) -> Path:
    """Compile the sources of `folder` and link them into `into`, by default beside them. Return the library's path.
    Raises NotBuilt."""
    into = into or folder
    if sys.platform not in ("linux", "darwin"):
        raise NotBuilt(f"there are no native kernels for {platform.system()} yet")
    if not sources(folder):
        raise NotBuilt("there are no C++ sources here; `pip install` from a checkout or an sdist has them")
    compiler = find_compiler()
    with tempfile.TemporaryDirectory() as scratch:
        objects = {source: Path(scratch) / f"{source.stem}.o" for source in sources(folder)}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda pair: _run(compile_command(compiler, *pair), pair[0].name), objects.items()))
        linked = Path(scratch) / LIBRARY
        _run([*compiler, *FLAGS, *_architecture(), "-shared", *map(str, objects.values()), "-o", str(linked)], LIBRARY)
        # a process that runs the library of before keeps its file; nobody ever sees half of the new one
        partial = into / f"{LIBRARY}.{os.getpid()}"
        shutil.copyfile(linked, partial)
        partial.replace(into / LIBRARY)
    (into / MARKER).unlink(missing_ok=True)
    return into / LIBRARY


def _run(command: list[str], product: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        lines = done.stdout.strip().splitlines() or [f"exit status {done.returncode}"]
        first = next((line for line in lines if "error" in line), lines[-1]).strip()
        raise NotBuilt(
            f"{product} was not made by {Path(command[0]).name}: {first}; `{AGAIN}` shows it all", done.stdout
        )


def build_or_say(folder: Path, into: Path) -> str | None:
    """Build the library. Where that fails, leave a file with the reason in its place, and return the reason. It
    raises nothing that a machine without a compiler, or with an odd one, could cause, so an installation goes on
    without the library."""
    try:
        build(folder, into)
    except (NotBuilt, OSError) as error:
        reason = " ".join(str(error).split())
        try:
            (into / LIBRARY).unlink(missing_ok=True)  # it would be one of other sources
            (into / MARKER).write_text(f"{reason}\n")
        except OSError:  # a checkout that cannot be written: the line that is returned has to do
            logger.debug("no %s in %s", MARKER, into)
        return reason
    return None


def main() -> None:
    """Build the library beside the sources, and show what the compiler prints where that fails."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    try:
        logger.info("built %s", build())
    except NotBuilt as error:
        raise SystemExit(f"{error.output}not built: {error}") from None
