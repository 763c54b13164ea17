"""The speed of a run, and how near it comes to what its devices can do. Time that is not training (compiling,
measuring, saving) does not count."""

import functools
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specserve import host
from specserve.devices import Device, find_device
from specserve.mesh import default_dtype
from specserve.train.flops import StepShape, step_flops

PEAK_SECONDS = 0.2  # spent on each measurement of a peak, after a first run that compiles
READ_SIDE = 4096  # of the matrix that is read: larger than any cache


@dataclass(frozen=True)
class StepSeconds:
    """The time of a training step: over rows that no step has seen, and over others, of which the target's states may
    be kept (`features.keep_states`)."""

    new: float
    seen: float
    num_new: int  # steps until all rows are seen

    def number_in(self, seconds: float) -> int:
        """Return how many steps fit into so much time."""
        new = min(seconds / self.new, self.num_new)
        return int(new + max(0.0, seconds - self.num_new * self.new) / self.seen)


@dataclass(frozen=True)
class Speed:
    """The speed of training and the memory in use since the last logged step."""

    tokens_per_second: float  # loss-bearing ones
    positions_per_second: float  # of the rows, padding and prompts included
    mfu: float | None  # useful operations over what the devices' matrix products reach; None: not known
    device_bytes: int | None  # the most that this process has taken of a device; None: the device reports none
    host_bytes: int  # the most memory that this process has had


class Stopwatch:
    """A stopwatch for training, with a lap between logged steps."""

    def __init__(self, *, positions: int, flops: float = 0.0, peak: float = 0.0) -> None:
        """Take the positions and the useful operations of a step, over all devices, and the operations per second that
        those reach together. 0 means not known."""
        self._positions, self._flops, self._peak = positions, flops, peak
        self._begin: tuple[float, int, int] | None = None

    def skip(self, step: int, tokens: int) -> None:
        """Leave the time since the last step out of the lap, because it was no training. `tokens` were trained on in
        all so far."""
        if self._begin:
            self._begin = (time.monotonic(), step, tokens)

    def lap(self, step: int, tokens: int, now: float) -> Speed | None:
        """End a lap with this step, which ended at a moment of the monotonic clock, and return the lap's speed. The
        first lap, which compiles, gives None."""
        before, self._begin = self._begin, (now, step, tokens)
        if before is None:
            return None
        seconds, steps = max(now - before[0], 1e-9), step - before[1]
        rate = self._flops * steps / seconds
        if self._peak:  # a lap above it shows that the peak was measured in a slow moment of the machine
            self._peak = max(self._peak, rate)
        mfu = rate / self._peak if self._flops and self._peak else None
        return Speed(
            (tokens - before[2]) / seconds, self._positions * steps / seconds, mfu, device_bytes(), host_bytes()
        )


def make_stopwatch(shape: StepShape, mesh: Mesh | None) -> Stopwatch:
    """Make a stopwatch for the steps of a run. It measures first how fast the run's devices can multiply."""
    flops = step_flops(shape, jax.default_backend())
    # devices on CPU share what the host has
    num_devices = mesh.size if mesh is not None and jax.default_backend() != "cpu" else 1
    peak = matmul_peak(default_dtype()) * num_devices
    return Stopwatch(positions=shape.positions, flops=flops.total.useful, peak=peak)


def matmul_peak(dtype: str, size: int = 0) -> float:
    """Return the floating point operations per second of a square product on the first device: the best of a few.
    Without a size it is a large one."""
    size = size or (1024 if jax.default_backend() == "cpu" else 8192)
    factor = jnp.ones((size, size), dtype)
    return 2 * size**3 / best_seconds(lambda: jnp.dot(factor, factor))


@functools.cache
def this_device() -> Device:
    """Return the first device found here: as its maker describes it, or else as it is measured in a moment. The cores
    of a CPU are one device."""
    found = jax.devices()[0]
    if device := find_device(found.device_kind):
        return device
    dtype, stats = default_dtype(), found.memory_stats() or {}
    peak = max(matmul_peak(dtype) for _ in range(3))  # other processes take some of a short time
    matrix, row = jnp.ones((READ_SIDE, READ_SIDE), dtype), jnp.ones((1, READ_SIDE), dtype)
    bandwidth = matrix.nbytes / best_seconds(lambda: jnp.dot(row, matrix))
    name = f"this machine's {found.device_kind}"
    if found.platform == "cpu":
        name = f"this machine ({host.num_cores()} cores"
    name += f"{', ' if '(' in name else ' ('}{peak / 1e9:,.0f} GFLOP/s, {bandwidth / 1e9:,.0f} GB/s)"
    return Device(
        id="here",
        name=name,
        kind=found.device_kind,
        peak=peak,
        peak_8bit=peak,
        memory=stats.get("bytes_limit", host.total_memory()),
        bandwidth=bandwidth,
        link=bandwidth,  # nothing is known of links
        linked=jax.device_count(),
        network=bandwidth,
        source="measured",
        is_measured=True,
    )


def best_seconds(run: Callable[[], jax.Array]) -> float:
    """Return the least seconds that some computation takes, of as many runs as fit into a moment."""
    run().block_until_ready()  # compiles
    best, begin = float("inf"), time.perf_counter()
    while (start := time.perf_counter()) - begin < PEAK_SECONDS:
        run().block_until_ready()
        best = min(best, time.perf_counter() - start)
    return best


def device_bytes() -> int | None:
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None


def host_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
