"""The cost of a training run, by shape arithmetic: `specserve train --dry-run`. Nothing is loaded but a config.json,
and nothing of a model's size is allocated."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from specserve import processes
from specserve.checkpoints.configs import find_config
from specserve.devices import Device
from specserve.drafters.interface import TrainedDrafter
from specserve.drafters.learning import Rollout
from specserve.kernels import rows
from specserve.mesh import MESH_AXES, mesh_sizes, num_parts, on_each_device, whole
from specserve.models.config import ModelConfig
from specserve.models.params import ParamSpec, abstract, is_product, is_spec, num_params
from specserve.models.presets import TargetSize, target_size
from specserve.models.sharding import place_target
from specserve.models.target import TargetParams, target_spec
from specserve.plan.collectives import Exchange, span, step_exchanges
from specserve.train import chunked_loss, moments
from specserve.train.features import bytes_per_position
from specserve.train.flops import StepFlops, step_flops
from specserve.train.optimizer import make_optimizer
from specserve.train.run.checks import check_settings, plan_drafter
from specserve.train.settings import TrainRun
from specserve.train.step import rollout_of

BACKEND = "gpu"  # a plan is for accelerators, wherever it is made


@dataclass(frozen=True)
class MemoryPart:
    """A part of the memory that a run takes on each device."""

    name: str
    num_bytes: int
    what: str


@dataclass(frozen=True)
class RunPlan:
    """The memory and the operations that a run would take, if it began."""

    run: TrainRun
    config_from: str
    target: ModelConfig
    drafter: TrainedDrafter
    mesh: dict[str, int]  # devices by axis, of those with more than one
    target_size: TargetSize
    head_size: int  # parameters of the head, all of them trained
    memory: tuple[MemoryPart, ...]  # what stays, then what a step needs besides
    without_remat: int  # bytes on each device more, if no rollout step were computed again
    host_bytes: int  # of each device's moments, in the host's memory
    captured_bytes: tuple[int, int]  # of a position, were it captured, and of the same states in bfloat16
    flops: StepFlops
    exchanges: tuple[Exchange, ...]  # what each device sends in a step

    @property
    def num_devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def positions(self) -> int:
        """The number of positions that a step computes over all devices, padding included."""
        return self.run.train.batch_size * self.run.train.seq_len

    @property
    def device_bytes(self) -> int:
        return sum(part.num_bytes for part in self.memory)

    def sending_seconds(self, device: Device) -> float:
        """Return how long a step's exchanges take between such devices, each by itself. An exchange goes over the
        network where its group reaches beyond the devices that NVLink or ICI joins."""
        return sum(each.num_bytes / device.rate_among(span(self.mesh, each.axes)) for each in self.exchanges)

    def positions_per_second(self, device: Device, share: float = 1.0) -> float:
        """The speed of training on such devices, if each computes at this share of its peak and sends when it does not
        compute."""
        computing = self.flops.total.executed / self.num_devices / (device.peak * share)
        return self.positions / (computing + self.sending_seconds(device))


def make_plan(run: TrainRun) -> RunPlan:
    """Work out what a run would take. Raises ConfigError or CheckpointError where the run itself would."""
    check_settings(run)
    processes.check(run.coordinator, run.num_processes, run.process_id)
    target, config_from = find_config(run.target)
    drafter = plan_drafter(run, target).with_dtype(target.dtype)
    sizes = mesh_sizes(run.mesh)
    mesh = abstract_mesh(sizes)
    spec = target_spec(target)
    rollout = _rollout(run, drafter, run.train.remat)
    is_captured = bool(run.features.capture)
    shared = ("embedding", "head") if drafter.costs(rollout, run.train.seq_len).shares_output else ("embedding",)
    left = shared if is_captured else tuple(field.name for field in dataclasses.fields(spec))
    left = left if run.has_layers or is_captured else tuple(name for name in left if name != "layers")
    state, host_bytes = _state(run, drafter, mesh)
    activations = _Activations(run, target, drafter, mesh)
    return RunPlan(
        run,
        config_from,
        target,
        drafter,
        {axis: size for axis, size in sizes.items() if size > 1},
        target_size(target),
        num_params(drafter.spec()),
        (_weights(run, target, spec, mesh, left), *state, *activations.parts()),
        activations.kept(remat=False) - activations.kept(remat=True),
        host_bytes,
        bytes_per_position(target, drafter, run.features.capture_format, run.features.capture_top_k),
        step_flops(
            target,
            drafter,
            rollout,
            batch=run.train.batch_size,
            seq=run.train.seq_len,
            platform=BACKEND,
            is_captured=is_captured,
            has_layers=run.has_layers,
            teacher=run.train.teacher,
            mesh=mesh,
        ),
        step_exchanges(
            target,
            drafter,
            rollout,
            mesh,
            batch=run.train.batch_size,
            seq=run.train.seq_len,
            gradient_bytes=next(part.num_bytes for part in state if part.name == "gradient"),
            accumulate=run.train.accumulate,
            is_captured=is_captured,
            has_layers=run.has_layers,
            teacher=run.train.teacher,
        ),
    )


def abstract_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Make a mesh of devices that this machine need not have: only its shape is asked for."""
    axes = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    return AbstractMesh(axes, MESH_AXES, axis_types=(AxisType.Auto,) * len(axes))  # type: ignore[return-value]


def _weights(run: TrainRun, config: ModelConfig, spec: TargetParams, mesh: Mesh, left: tuple[str, ...]) -> MemoryPart:
    """Count the bytes of the target's weights that each device holds, of which these fields are left."""
    sizes = held_by_each(config, spec, mesh, is_quantized=run.quantization != "none")
    total = sum(held.num_bytes for held in sizes if held.field in left)
    what = f"{config.dtype}" if run.quantization == "none" else f"{run.quantization} matrices, the rest {config.dtype}"
    return MemoryPart(
        "target's weights", total, f"the {' and '.join(left)} alone, {what}" if not run.has_layers else what
    )


@dataclass(frozen=True)
class Held:
    """The part of one of the target's parameters that each device holds."""

    field: str  # of `TargetParams`
    spec: ParamSpec  # of the whole parameter
    size: int  # numbers
    num_bytes: int


def held_by_each(
    config: ModelConfig, spec: TargetParams, mesh: Mesh | None, *, is_quantized: bool = False
) -> Iterator[Held]:
    """Count what each device of the mesh, or one alone, holds of the target's parameters; quantized matrices are of 8
    bits. Raises ConfigError where the mesh does not divide them."""
    leaves: list[tuple[Any, ParamSpec]] = jax.tree_util.tree_flatten_with_path(spec, is_leaf=is_spec)[0]
    shapes = [leaf.shape for _, leaf in leaves]
    if mesh is not None:
        places = jax.tree.leaves(place_target(config, spec, mesh))
        shapes = [place.shard_shape(shape) for place, shape in zip(places, shapes, strict=True)]
    for (path, leaf), shape in zip(leaves, shapes, strict=True):
        is_small = is_quantized and is_product(path)
        size = math.prod(shape)
        num_bytes = size * (1 if is_small else np.dtype(leaf.dtype(config.dtype)).itemsize)
        if is_small:  # a float32 scale for each output, if not by block
            num_bytes += 4 * size // shape[-2]
        yield Held(jax.tree_util.keystr(path[:1], simple=True), leaf, size, num_bytes)


def _state(run: TrainRun, drafter: TrainedDrafter, mesh: Mesh) -> tuple[tuple[MemoryPart, ...], int]:
    """Count what training the head keeps on each device, and the bytes of it that are in the host's memory."""
    params = abstract(drafter.spec(), "float32")
    places = drafter.place(mesh)
    masters = _bytes(params, places)
    kept = jax.eval_shape(make_optimizer(run.train).init, params)
    rest: Any = whole(mesh)
    kept_places = moments.place(kept, params, places, rest)
    on_host = _bytes(kept, kept_places, lambda place: place.memory_kind == moments.HOST)
    what = {"float32": "float32", "int8": "8 bits, a scale for each 256", "host": "in the host's memory"}
    parts = (
        MemoryPart("head", masters, "float32"),
        MemoryPart("gradient", masters, "float32"),
        MemoryPart("moments", _bytes(kept, kept_places) - on_host, f"{run.train.optimizer}, {what[run.train.moments]}"),
    )
    return parts, on_host


def _bytes(arrays: Any, places: Any, is_counted: Callable[[Any], bool] = lambda _: True) -> int:
    """Count the bytes that each device has of arrays that lie at `places`."""
    leaves = zip(jax.tree.leaves(arrays), jax.tree.leaves(places), strict=True)
    return sum(math.prod(p.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize for x, p in leaves if is_counted(p))


def _rollout(run: TrainRun, drafter: TrainedDrafter, remat: bool) -> Rollout:
    return rollout_of(dataclasses.replace(run.train, remat=remat), drafter)


@dataclass(frozen=True)
class _Activations:
    """An estimate of what a step needs on each device besides its arguments: the arrays that must be there at once.
    What XLA takes for a CPU is within 40% of it."""

    run: TrainRun
    target: ModelConfig
    drafter: TrainedDrafter
    mesh: Mesh

    @property
    def rollout(self) -> Rollout:
        return _rollout(self.run, self.drafter, self.run.train.remat)

    @property
    def positions(self) -> int:
        """The number of positions that a device computes at once."""
        train = self.run.train
        rows = -(-train.batch_size // (train.accumulate * num_parts(self.mesh, "batch")))
        return rows * -(-train.seq_len // num_parts(self.mesh, "sequence"))

    def parts(self) -> tuple[MemoryPart, ...]:
        """The estimate in parts whose sum it is."""
        train = self.run.train
        again = "computed again backward" if train.remat else "all kept"
        return (
            MemoryPart("target's features", self.features(), self.source()),
            MemoryPart("rollout", self.kept(train.remat), f"{self.drafter.num_steps(train.rollout)} steps, {again}"),
            MemoryPart("loss", self.chunk(), "logits of a chunk of positions"),
            MemoryPart("workspace", max(self.target_layer(), self.draft_layer()), "of one layer"),
        )

    def source(self) -> str:
        """Return in words where the target's states come from."""
        if self.run.features.capture:
            return "captured"
        return "taps, last state, sent" if self.run.service.target_service else "taps, last state"

    def features(self) -> int:
        """The bytes of the taps in the target's dtype and in the head's, and of the last hidden state, which is there
        again for each state that has a teacher of its own."""
        taps, width, rollout = len(self.drafter.aux_layers), self.target.d_model, self.rollout
        costs = self.drafter.costs(rollout, self.run.train.seq_len)
        last = 1 if costs.has_one_teacher else 1 + costs.states * rollout.length
        each = (taps + last) * _itemsize(self.target.dtype) + taps * _itemsize(self.drafter.dtype)
        return round(self.positions * width * each)

    def kept(self, remat: bool) -> int:
        """The bytes of all rollout steps that stay for the backward pass."""
        kept = self.drafter.costs(_rollout(self.run, self.drafter, remat), self.run.train.seq_len).kept
        return self.positions * kept * _itemsize(self.drafter.dtype)

    def chunk(self) -> int:
        """The bytes of the draft's logits and of their gradient, which their softmax becomes, and of the target's
        logits and distribution, for one chunk of positions."""
        drafter, train = self.drafter, self.run.train
        costs, steps = drafter.costs(self.rollout, train.seq_len), self.rollout.length
        distributions = 1 if costs.has_one_teacher else steps
        logits = steps * drafter.draft_vocab_size
        at_once = logits if costs.has_one_teacher else logits + distributions * self.target.vocab_size
        length = chunked_loss.chunk_length(math.ceil(self.positions * costs.states), at_once, BACKEND)
        has_logits = not self.run.features.capture and train.teacher != "data"
        teacher = 2 * self.target.vocab_size if has_logits else 0
        # of the output head, added up over chunks
        gradient = 0 if costs.shares_output else drafter.d_model * drafter.draft_vocab_size
        return 4 * (length * (2 * logits + distributions * (teacher + drafter.draft_vocab_size)) + gradient)

    def target_layer(self) -> int:
        """The bytes of the inputs and results of the target's widest layer."""
        if not self.run.has_layers:
            return 0
        config = self.target
        experts = config.experts
        parts = num_parts(self.mesh, "mlp")
        width = 3 * config.d_ff // parts
        if experts and any(config.kind(i).has_experts for i in range(config.num_layers)):
            each = experts.top_k * (3 * experts.d_ff // parts + 2 * config.d_model)
            # devices with different experts exchange their tokens
            width = max(width, each * num_parts(self.mesh, "experts") + 3 * experts.shared_d_ff // parts)
        return self.positions * (4 * config.d_model + width) * _itemsize(config.dtype) + self.scores(
            config.num_heads, config.num_kv_heads
        )

    def draft_layer(self) -> int:
        """The bytes of the results of a layer of the head, and of their gradients."""
        costs = self.drafter.costs(self.rollout, self.run.train.seq_len)
        scores = self.scores(costs.num_heads, costs.num_kv_heads)
        return self.positions * costs.workspace * _itemsize(self.drafter.dtype) + scores

    def scores(self, num_heads: int, num_kv_heads: int) -> int:
        """The bytes of one block of attention's scores and weights, in float32."""
        num_heads = num_heads // num_kv_heads * on_each_device(self.mesh, "kv_heads", num_kv_heads)
        length = max(rows.MIN_SEGMENT, -(-self.run.train.seq_len // rows.NUM_SEGMENTS))
        a_segment = self.positions * num_heads * length
        return 2 * 4 * min(a_segment, max(rows.SCORES_AT_ONCE, num_heads * self.run.train.seq_len))


def _itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize
