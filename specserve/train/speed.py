"""How fast a run is, and how near to what its devices can do. What is not training (compiling, measuring, saving) does
not count."""

import resource
import sys
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specserve.drafters.door import TrainedDrafter
from specserve.mesh import default_dtype
from specserve.models.config import ModelConfig
from specserve.train.flops import step_flops
from specserve.train.settings import TrainRun
from specserve.train.step import rollout_of

PEAK_SECONDS = 0.2  # spent on measuring the peak, after a first product that compiles


@dataclass(frozen=True)
class Speed:
    """Since the last logged step."""

    tokens_per_second: float  # loss-bearing ones
    positions_per_second: float  # of the rows, padding and prompts included
    mfu: float | None  # useful operations over what the devices' matrix products reach; None: not known
    device_bytes: int | None  # the most that this process has taken of a device; None: the device does not say
    host_bytes: int  # the most memory that this process has had


class Stopwatch:
    """Laps between logged steps."""

    def __init__(self, *, positions: int, flops: float = 0.0, peak: float = 0.0) -> None:
        """Positions and useful operations of a step, over all devices, and what those reach together; 0: not known."""
        self._positions, self._flops, self._peak = positions, flops, peak
        self._begin: tuple[float, int, int] | None = None

    def skip(self, step: int, tokens: int) -> None:
        """What has happened since the last step, after which so many tokens were trained on in all, was no training."""
        if self._begin:
            self._begin = (time.monotonic(), step, tokens)

    def lap(self, step: int, tokens: int) -> Speed | None:
        """Up to this step; None for the first, which compiles."""
        now = time.monotonic()
        before, self._begin = self._begin, (now, step, tokens)
        if before is None:
            return None
        seconds, steps = max(now - before[0], 1e-9), step - before[1]
        mfu = self._flops * steps / seconds / self._peak if self._flops and self._peak else None
        return Speed(
            (tokens - before[2]) / seconds, self._positions * steps / seconds, mfu, device_bytes(), host_bytes()
        )


def make_stopwatch(run: TrainRun, target: ModelConfig, drafter: TrainedDrafter, mesh: Mesh | None) -> Stopwatch:
    """A stopwatch for the steps of a run. It measures what the run's devices reach."""
    settings = run.train
    flops = step_flops(
        target,
        drafter,
        rollout_of(settings, drafter),
        batch=settings.batch_size,
        seq=settings.seq_len,
        platform=jax.default_backend(),
        is_captured=bool(run.features.capture),
        has_layers=run.has_layers,
        teacher=settings.teacher,
    )
    # devices on CPU share what the host has
    num_devices = mesh.size if mesh is not None and jax.default_backend() != "cpu" else 1
    peak = matmul_peak(default_dtype()) * num_devices
    return Stopwatch(positions=settings.batch_size * settings.seq_len, flops=flops.total.useful, peak=peak)


def matmul_peak(dtype: str) -> float:
    """Floating point operations per second of a large square product on the first device: the best of a few."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    factor = jnp.ones((size, size), dtype)
    jnp.dot(factor, factor).block_until_ready()
    best, begin = float("inf"), time.perf_counter()
    while (start := time.perf_counter()) - begin < PEAK_SECONDS:
        jnp.dot(factor, factor).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def device_bytes() -> int | None:
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None


def host_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
