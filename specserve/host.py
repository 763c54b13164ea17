"""Requests to the operating system: memory, cores, cache files, priorities, and the end of the process."""

import contextlib
import ctypes
import fcntl
import functools
import gc
import logging
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TextIO

import psutil

logger = logging.getLogger(__name__)

# of glibc's malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_LARGEST = 2**31 - 1
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_TOP_PAD_BYTES = 64 << 20
LOCK_FILE = ".lock"  # of a folder that one process has for itself
COMPILER_THREAD = "specserve-compiler"
_LOWEST_PRIORITY = 19  # of nice(2)
_LOW_PRIORITY = 13  # Linux shares a processor by weights, of which this has 56, and 0 has 1,024
_is_own = False
GPU_SHARE = "0.92"  # of its memory; the rest is for what the driver and libraries take besides


def free_memory_maps() -> int | None:
    """Return how many more pieces of memory the kernel lets this process map, or None where that is not known. On CPU
    every compiled program takes up to a thousand, three for each of its kernels."""
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        return limit - Path("/proc/self/maps").read_bytes().count(b"\n")
    except (OSError, ValueError):
        return None


def free_memory() -> int:
    """The bytes that processes may take before the host swaps, or fails."""
    return psutil.virtual_memory().available


def total_memory() -> int:
    """The bytes of memory that the host has."""
    return psutil.virtual_memory().total


def num_cores() -> int:
    """The number of cores that this process may use, which is that of the machine where a process cannot be bound to
    cores."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):
        return len(process.cpu_affinity() or ())
    return psutil.cpu_count() or 1


def granted_cores() -> float:
    """The processors whose time this process may have: its cores, or fewer where a container of Linux has a quota."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())  # "max": no number
        return min(num_cores(), quota / period)
    return num_cores()


def processor() -> str:
    """Describe the processor and its instructions, as far as the system reports them. Machine code that a compiler has
    made for one processor runs wherever the text is the same. Elsewhere than on Linux the text names the machine."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.machine()} {platform.node()}"
    # The facts of the first core. What differs between two moments, as its frequency does, is left out.
    generic = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features")
    arm = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part")
    lines = [line for line in text.split("\n\n")[0].splitlines() if line.split("\t")[0] in generic + arm]
    return f"{platform.machine()} " + "; ".join(lines)


def cache_folder() -> Path:
    """The user's folder for what can be made again: compiled programs and measured costs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specserve"


@contextlib.contextmanager
def whole_file(path: Path, *, is_shared: bool = False) -> Iterator[Path]:
    """Give a file to write beside `path`, which takes its place at the end: a reader sees the old file or the new one,
    never half of one, also where the machine stops at any moment. What was written is on the disk before it takes that
    place, and its name is there at the end. Where other processes may write the same file (`is_shared`) each writes a
    file of its own name; otherwise what a killed process has left is overwritten the next time. Raises OSError."""
    own = ""
    if is_shared:
        own = f".{os.getpid()}-{threading.get_ident()}"
    partial = path.with_name(f"{path.name}{own}.partial")
    try:
        yield partial
        take_place(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def take_place(made: Path, path: Path) -> None:
    """Have a file take the place of another, or a folder of whole files an empty one's or none's: what it holds is on
    the disk before, and its name at the end, also where the machine stops at any moment. Raises OSError."""
    settle(made)
    os.replace(made, path)
    settle(path.parent)


def settle(path: Path) -> None:
    """Have what was written to a file on the disk, or the names in a folder, also where the machine stops. Raises
    OSError."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def hold(folder: Path, *, waits: bool = False) -> TextIO:
    """Hold a folder for this process until the file that is returned is closed, or the process ends, however it does.
    Raises BlockingIOError where another one holds it, unless it `waits` for that one, and OSError."""
    file = (folder / LOCK_FILE).open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that only this user may read, and that several of the user's processes may write at once. Raises
    OSError."""
    with whole_file(path, is_shared=True) as partial:
        partial.touch(mode=0o600)
        partial.write_bytes(content)


def take_gpu_memory() -> None:
    """Let this process, which has not used JAX yet, take most of a GPU's memory at its first use, where JAX alone takes
    three quarters; unless the environment says how much."""
    if not {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & os.environ.keys():
        os.environ["XLA_CLIENT_MEM_FRACTION"] = GPU_SHARE


@functools.cache
def keep_freed_memory() -> bool:
    """Let the process keep the memory that it frees; call it once everything large is loaded.

    XLA's CPU backend takes the scratch memory of a program anew at every run. glibc gives such large pieces back to the
    kernel each time, and faulting them in again costs more than the program (docs/log). Returns whether it could be
    done; elsewhere than on Linux with glibc nothing changes.
    """
    if platform.libc_ver()[0] != "glibc":
        logger.debug("freed memory is not kept: this is not glibc")
        return False
    mallopt = ctypes.CDLL(None).mallopt
    options = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _LARGEST), (_M_TOP_PAD, _TOP_PAD_BYTES))
    results = [mallopt(name, value) for name, value in options]  # all of them, even where the first fails
    return all(results)


def give_back_freed_memory() -> None:
    """Return freed memory that the process has kept to the system; after compiling that is hundreds of megabytes.
    Elsewhere than on Linux with glibc nothing happens."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Turn Python's garbage collector off within the context, which is meant for imports. It would walk all modules
    again and again, though none is garbage, which is a tenth of the imports' time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def own_process() -> None:
    """Note that this process is specserve's alone, so that nothing else needs what its imports leave out."""
    global _is_own
    _is_own = True


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Import within the context as where PyTorch is not installed, in a process that is specserve's alone. Libraries
    that read tokenizers import it where it is there, which takes seconds and half a gigabyte; nothing here needs it."""
    if not _is_own or "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def lower_priority() -> bool:
    """Give this thread, and those that it starts, the lowest priority. Returns whether it could be done: threads have
    priorities of their own on Linux alone."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    except OSError as error:
        logger.debug("a thread keeps its priority: %s", error)
        return False
    return True


def let_wait(pid: int, *, is_idle: bool = False) -> None:
    """Have a process of ours, and the threads that it starts from now on, run in the time that no other one wants, and
    beside others that want all of a processor in a twentieth of it: with less, it would never come to an end there.
    Where memory ends, it is the first to be killed.

    One that `is_idle` gets next to nothing beside such others; but it gives way at once to a thread that wakes up,
    where any other may first run for milliseconds, in which the threads of a step wait for the one that is late."""
    try:
        os.setpriority(os.PRIO_PROCESS, pid, _LOW_PRIORITY)
        if is_idle and sys.platform == "linux":
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
        with Path(f"/proc/{pid}/oom_score_adj").open("w") as file:
            file.write("1000")
    except OSError as error:  # macOS has no such file
        logger.debug("process %d keeps its priority: %s", pid, error)


def end_with_parent() -> None:
    """Have the kernel kill this process where the thread ends that has started it, even if it is stopped then. Linux
    alone can do that; elsewhere a stopped process of a dead session is hung up on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def is_compiling() -> bool:
    """Return whether a thread of this process compiles programs (`serve.programs.compile_queue`)."""
    return any(thread.name == COMPILER_THREAD for thread in threading.enumerate())


def leave(status: int) -> NoReturn:
    """End the process at once, after flushing logs and output. It is for a process that is done while one of its
    threads still compiles. A compile cannot be interrupted, and a process whose interpreter ends under it aborts."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
