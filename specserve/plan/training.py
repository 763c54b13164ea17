"""The cost of a training run, by shape arithmetic: `specserve train --dry-run`. Nothing is loaded but a config.json,
and nothing of a model's size is allocated."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import numpy as np
import psutil
from jax.sharding import Mesh

from specserve import processes
from specserve.checkpoints.configs import find_config
from specserve.devices import Device
from specserve.drafters.interface import TrainedDrafter
from specserve.mesh import dtype_of, mesh_sizes, whole
from specserve.models.config import ModelConfig
from specserve.models.params import abstract, num_params
from specserve.models.presets import TargetSize, target_size
from specserve.models.sharding import held_by_each, part_shapes, total_bytes
from specserve.models.target import TargetParams
from specserve.plan.activations import Activations
from specserve.plan.collectives import Collective, span, step_collectives
from specserve.plan.work import MemoryPart, abstract_mesh, target_held
from specserve.serve.programs.placement import bytes_per_token
from specserve.train import moments
from specserve.train.acceptance import MAX_SLOTS
from specserve.train.capture import captured_layers
from specserve.train.features import bytes_per_position
from specserve.train.flops import StepFlops, StepShape, step_flops
from specserve.train.optimizer import make_optimizer
from specserve.train.run.checks import check_settings, plan_drafter
from specserve.train.settings import TrainRun, TrainSettings

PROGRAM_BYTES = 350_000_000  # of a run's process, once all are compiled; about as much for every target (docs/log)
PROMPT_TOKENS = 256  # of a held-out prompt, whose length is not known before the data is read
ACCELERATOR = "gpu"  # the platform of a plan, wherever it is made, where no other is asked for


@dataclass(frozen=True)
class RunPlan:
    """The memory and the operations that a run would take, if it began."""

    run: TrainRun
    config_from: str
    shape: StepShape
    mesh: dict[str, int]  # devices by axis, of those with more than one
    memory: tuple[MemoryPart, ...]  # of training: the parts that stay, then what a step needs besides
    answering: tuple[MemoryPart, ...]  # on a CPU before that, where the target answers; elsewhere it takes what is free
    without_remat: int  # bytes on each device more, if no rollout step were computed again
    host_bytes: int  # of each device's moments, in the host's memory
    flops: StepFlops
    collectives: tuple[Collective, ...]  # of a step

    @property
    def target(self) -> ModelConfig:
        return self.shape.target

    @property
    def drafter(self) -> TrainedDrafter:
        return self.shape.drafter

    @property
    def target_size(self) -> TargetSize:
        return target_size(self.target)

    @property
    def head_size(self) -> int:
        """The number of the head's parameters, all of them trained."""
        return num_params(self.drafter.spec())

    @property
    def captured_bytes(self) -> tuple[int, int]:
        """The bytes of a position, were it captured, and of the same states in bfloat16."""
        features = self.run.features
        num_taps, vocab_size = len(captured_layers(features, self.drafter)), self.drafter.draft_vocab_size
        return bytes_per_position(self.target, num_taps, vocab_size, features.capture_format, features.capture_top_k)

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def positions(self) -> int:
        """The number of positions that a step computes over all devices, padding included."""
        return self.shape.positions

    @property
    def device_bytes(self) -> int:
        """The bytes that the run takes on each device, in whichever stage takes more."""
        return max(sum(part.num_bytes for part in parts) for parts in (self.memory, self.answering))

    def sending_seconds(self, device: Device) -> float:
        """Return how long sending takes in a step between such devices, where nothing is sent at the same time. Bytes
        go over the network where their group reaches beyond the devices that NVLink or ICI joins."""
        return sum(each.num_bytes / device.rate_among(span(self.mesh, each.axes)) for each in self.collectives)

    def positions_per_second(self, device: Device, share: float = 1.0) -> float:
        """The speed of training on such devices, if each computes at this share of its peak and sends when it does not
        compute."""
        computing = self.flops.total.executed / self.num_devices / (device.peak * share)
        return self.positions / (computing + self.sending_seconds(device))


def make_plan(run: TrainRun, platform: str = ACCELERATOR) -> RunPlan:
    """Work out what a run would take on devices of a platform as JAX names them. Raises ConfigError or CheckpointError
    where the run itself would."""
    check_settings(run)
    processes.check(run.coordinator, run.num_processes, run.process_id)
    target, config_from = find_config(run.target)
    target = replace(target, dtype=dtype_of(platform))
    drafter = plan_drafter(run, target).with_dtype(target.dtype)
    shape = StepShape.of(run.train, target, drafter, run.states_from)
    sizes = mesh_sizes(run.mesh)
    mesh = abstract_mesh(sizes)
    weights = _weights(shape, run.quantization, mesh, platform)
    state, host_bytes = _state(run.train, drafter, mesh)
    head = state[0]
    activations = Activations(shape, mesh, platform)
    parts = [weights, *state, *activations.parts()]
    if run.states_from == "layers" and run.data.eval_prompts:
        parts += _held_out(run, target, drafter, mesh, activations.num_bytes)
    answering = list[MemoryPart]()
    if platform == "cpu":
        always = _process()
        parts = [*always, *parts]
        if run.data.regenerate:
            answering += [*always, *_answering(run, target)]
    return RunPlan(
        run,
        config_from,
        shape,
        {axis: size for axis, size in sizes.items() if size > 1},
        tuple(parts),
        tuple(answering),
        activations.rollout(remat=False) - activations.rollout(remat=True),
        host_bytes,
        step_flops(shape, platform, mesh),
        step_collectives(shape, mesh, head.num_bytes),  # its gradient has its size
    )


def _process() -> tuple[MemoryPart, ...]:
    """Count what a run takes where the host's memory is the device's: this process as it is, and its programs."""
    return (
        MemoryPart("process", psutil.Process().memory_info().rss, "Python, JAX and this package"),
        MemoryPart("programs", PROGRAM_BYTES, "compiled, and traced"),
    )


def _answering(run: TrainRun, target: ModelConfig) -> tuple[MemoryPart, ...]:
    """Count what a CPU holds while the target answers: all of its weights, and the caches of its answers."""
    slots = run.data.answer_slots
    cache = slots * run.train.seq_len * bytes_per_token(target, None)
    return (
        MemoryPart("target's weights", total_bytes(target_held(target, None, run.quantization, "cpu")), "all of them"),
        MemoryPart("caches", cache, f"{slots} answers at once, of at most {run.train.seq_len:,} tokens"),
    )


def _held_out(
    run: TrainRun, target: ModelConfig, drafter: TrainedDrafter, mesh: Mesh, of_step: int
) -> tuple[MemoryPart, ...]:
    """Count the caches of the held-out prompts that are answered at once to measure tau, beyond the memory that a step
    needs for a while, which is free then."""
    slots = min(MAX_SLOTS, run.data.eval_prompts)
    each = min(PROMPT_TOKENS, run.train.seq_len) + run.eval.eval_tokens
    more = slots * each * bytes_per_token(target, drafter, mesh) - of_step
    if more <= 0:
        return ()
    return (MemoryPart("held-out answers", more, f"{slots} prompts of {PROMPT_TOKENS} tokens, beyond a step's memory"),)


def _weights(shape: StepShape, quantization: str, mesh: Mesh, platform: str) -> MemoryPart:
    """Count the bytes of the target's weights that each device holds: all of them where its layers run in the step."""
    parts, is_quantized = [field.name for field in fields(TargetParams)], quantization != "none"
    if shape.states_from == "service":
        parts.remove("layers")
    if shape.states_from == "capture":
        parts = ["embedding"]
        if shape.costs().shares_output:
            parts.append("head")
    what = shape.target.dtype
    if is_quantized:
        what = f"{quantization} matrices, the rest {what}"
    if not shape.has_layers:
        what = f"the {' and '.join(parts)} alone, {what}"
    held = target_held(shape.target, mesh, quantization, platform)
    return MemoryPart("target's weights", total_bytes(each for each in held if each.field in parts), what)


def _state(settings: TrainSettings, drafter: TrainedDrafter, mesh: Mesh) -> tuple[tuple[MemoryPart, ...], int]:
    """Count what training the head keeps on each device, and the bytes of it that are in the host's memory."""
    params, places = abstract(drafter.spec(), "float32"), drafter.place(mesh)
    masters = total_bytes(held_by_each(drafter.spec(), "float32", places))
    state = jax.eval_shape(make_optimizer(settings).init, params)
    rest: Any = whole(mesh)
    state_places = moments.place(state, params, places, rest)
    on_host, on_device = _bytes(state, state_places)
    what = {"float32": "float32", "int8": "8 bits, a scale for each 256", "host": "in the host's memory"}
    parts = (
        MemoryPart("head", masters, "float32"),
        MemoryPart("gradient", masters, "float32"),
        MemoryPart("moments", on_device, f"{settings.optimizer}, {what[settings.moments]}"),
    )
    return parts, on_host


def _bytes(arrays: Any, places: Any) -> tuple[int, int]:
    """Count the bytes that each device has of the arrays in the host's memory, and in its own."""
    leaves, found = jax.tree.leaves(arrays), [0, 0]
    shapes = part_shapes([leaf.shape for leaf in leaves], places)
    for leaf, shape, place in zip(leaves, shapes, jax.tree.leaves(places), strict=True):
        found[place.memory_kind != moments.HOST] += math.prod(shape) * np.dtype(leaf.dtype).itemsize
    return found[0], found[1]
