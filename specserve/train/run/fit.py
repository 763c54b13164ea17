"""The sizes of a run that fit a device and a time.

There is one ladder of sizes. Its first rung is how published heads were trained, on accelerators; each rung below has
half of the positions a step, and is cheaper for each position. A run takes the highest rung on which enough steps fit
its time, and on a device that was measured (a CPU, say) only one whose steps end within a moment. So a faster device or
more time never gives smaller sizes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specserve import config
from specserve.devices import Device
from specserve.errors import ConfigError
from specserve.models.config import ModelConfig
from specserve.models.presets import DRAFT_VOCAB_SIZE, target_size
from specserve.train.flops import StepShape, step_flops
from specserve.train.run.budget import ANSWERS_SHARE, ENDING_SHARE, seconds_of
from specserve.train.run.checks import plan_drafter
from specserve.train.settings import TrainRun


@dataclass(frozen=True)
class Rung:
    """The sizes of a rung."""

    rows: int
    seq_len: int
    rollout: int
    vocab_size: int
    answer_tokens: int = 0  # 0: what a row holds
    is_remat: bool = False

    @property
    def positions(self) -> int:
        """The number of positions of a step."""
        return self.rows * self.seq_len

    def settings(self, target: ModelConfig) -> dict[str, Any]:
        """Return these sizes as settings of a run for a target, which may be too small for them."""
        return {
            "data.answer_tokens": self.answer_tokens,
            "draft.vocab_size": min(self.vocab_size, target.vocab_size),
            "train.batch_size": self.rows,
            "train.seq_len": min(self.seq_len, target.max_len),
            "train.rollout": self.rollout,
            "train.remat": self.is_remat,
        }


LADDER = (
    Rung(8, 2048, 7, DRAFT_VOCAB_SIZE, is_remat=True),
    Rung(4, 2048, 7, DRAFT_VOCAB_SIZE, is_remat=True),
    Rung(4, 1024, 5, 16_000, 512),
    Rung(4, 512, 4, 8_192, 256),
    Rung(2, 512, 4, 8_192, 256),
    Rung(1, 512, 3, 8_192, 256),
)
STEP_SECONDS = 5.0  # of a step on a device that was measured, at most: Ctrl-C waits for one, and small ones learn more
ENOUGH_STEPS = 300  # a run of fewer takes smaller steps
LEAST_STEPS = 100  # with fewer of the smallest steps a head has learnt too little for a run to make sense
MOST_SECONDS = 86400.0  # of training there: a day


@dataclass(frozen=True)
class RunFit:
    """The rung that fits."""

    sizes: Rung
    step_seconds: float
    num_steps: float  # there is time for so many; infinite where there is no bound
    has_room: bool  # the device has memory for the target's weights

    @property
    def makes_sense(self) -> bool:
        """Return whether enough can be learnt in the time, on this device."""
        return self.has_room and self.num_steps >= LEAST_STEPS

    @property
    def is_possible(self) -> bool:
        """Return whether enough can be learnt on this device at all, whatever the time of this run."""
        return self.has_room and self.step_seconds * ENOUGH_STEPS <= MOST_SECONDS


def training_seconds(budget: float, *, is_answered: bool) -> float:
    """Return the part of a budget that is for training."""
    return budget * (1 - ENDING_SHARE - (ANSWERS_SHARE if is_answered else 0.0))


def time_for_training(settings: Mapping[str, Any]) -> float:
    """Return the seconds that a run under these settings has for training, at most."""
    seconds = 60 * settings.get("train.max_minutes", 0.0) or MOST_SECONDS
    if budget := settings.get("budget"):
        is_answered = settings.get("data.regenerate", False)
        seconds = min(seconds, training_seconds(seconds_of(budget), is_answered=is_answered))
    return seconds


def fit(
    device: Device, target: ModelConfig, given: Mapping[str, Any], *, seconds: float = math.inf, num_devices: int = 1
) -> RunFit:
    """Find the highest rung that fits so many seconds of training on such devices, beside the settings that are given.
    It is the lowest one where none does."""
    most = STEP_SECONDS if device.is_measured else math.inf
    has_room = weight_bytes(target, device) <= device.memory or not device.is_measured
    rate = device.peak * device.share_of_peak * num_devices
    found = []
    for sizes in LADDER:
        try:
            step = _flops(device, target, {**sizes.settings(target), **given}) / rate
        except ConfigError:  # the settings that were given need longer rows
            continue
        found.append(RunFit(sizes, step, seconds / step, has_room))
        if step <= most and seconds / step >= ENOUGH_STEPS:
            break
    # settings that no rung can take are reported by the checks of the run
    return found[-1] if found else RunFit(LADDER[0], math.inf, 0.0, has_room)


def weight_bytes(target: ModelConfig, device: Device) -> int:
    """Return the bytes of the target's weights as the device would compute with them: a CPU in float32."""
    size = target_size(target).bf16_bytes
    return 2 * size if device.kind == "cpu" else size


def largest_target(target: ModelConfig, fitted: RunFit, device: Device) -> float:
    """Estimate how many parameters a target may have for enough steps on this device, by what this target costs: a
    step's operations, and the memory, grow with the parameters."""
    by_time = fitted.num_steps / ENOUGH_STEPS
    by_memory = device.memory / (2 * weight_bytes(target, device))  # as much again for everything else
    return target_size(target).total * min(by_time, by_memory)


def _flops(device: Device, target: ModelConfig, settings: Mapping[str, Any]) -> float:
    """Count the operations of a step under these settings. Raises ConfigError where they do not go together."""
    run = config.resolve(TrainRun, arguments=settings)
    platform = "cpu" if device.kind == "cpu" else "gpu"
    return step_flops(_shape(run, target), platform).total.executed


def _shape(run: TrainRun, target: ModelConfig) -> StepShape:
    return StepShape.of(run.train, target, plan_drafter(run, target), run.states_from)
