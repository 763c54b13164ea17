"""The floating point operations that a training step takes, from shapes alone.

A product of [n, i] with [i, o] is 2 n i o operations; element-wise work is not counted. Useful operations are those
that any implementation must do: every matrix once forward and twice backward, attention over the keys that a causal
mask shows in a row that is one document. Executed are those of this implementation, where rollout steps are computed
again in the backward pass, attention runs over blocks of keys, and devices of a mesh repeat what it does not cut: KV
heads that it does not divide, say, or a row's recurrent layers. Shares of a peak (MFU) go by the useful ones. Every
position counts as one that bears loss, which shapes do not say; of the others no loss is computed.
"""

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from specserve.drafters.interface import TrainedDrafter
from specserve.drafters.learning import Costs, Flops, Rollout
from specserve.kernels import recurrence
from specserve.kernels.rows import mean_keys
from specserve.mesh import gathered, num_parts, on_each_device
from specserve.models.config import RECURRENT, LayerKind, ModelConfig
from specserve.models.moe import experts_computed
from specserve.models.params import is_matrix, num_params, on_device, specs
from specserve.models.sharding import place_target
from specserve.models.target import target_spec
from specserve.train.settings import StatesFrom, TrainSettings
from specserve.train.step import rollout_of
from specserve.train.teachers import TeacherName


@dataclass(frozen=True)
class StepShape:
    """The sizes and switches of a training step that decide what it costs."""

    target: ModelConfig
    drafter: TrainedDrafter
    rollout: Rollout
    batch: int  # rows, over all devices
    seq: int  # positions of a row
    accumulate: int = 1  # parts into which the batch is cut, one after another
    teacher: TeacherName = "soft"
    states_from: StatesFrom = "layers"

    @classmethod
    def of(
        cls, train: TrainSettings, target: ModelConfig, drafter: TrainedDrafter, states_from: StatesFrom
    ) -> "StepShape":
        """Return the shape of a run's steps."""
        return cls(
            *(target, drafter, rollout_of(train, drafter), train.batch_size, train.seq_len, train.accumulate),
            *(train.teacher, states_from),
        )

    @property
    def has_layers(self) -> bool:
        """True where the target's layers run in the step."""
        return self.states_from == "layers"

    @property
    def positions(self) -> int:
        """The number of positions over all devices, padding included."""
        return self.batch * self.seq

    @property
    def has_logits(self) -> bool:
        """True where the step computes the target's logits."""
        return self.states_from != "capture" and self.teacher != "data"

    @property
    def distributions(self) -> int:
        """The number of the target's distributions with which a position's states are compared."""
        return 1 if self.costs().has_one_teacher else self.rollout.length

    def positions_of_each(self, mesh: Mesh | None) -> int:
        """Return the number of positions that each device has."""
        return self.positions // (num_parts(mesh, "batch") * num_parts(mesh, "sequence"))

    def costs(self, mesh: Mesh | None = None) -> Costs:
        """Return what the head's rollout costs each device for a position."""
        return self.drafter.costs(self.rollout, self.seq, mesh)


@dataclass(frozen=True)
class StepFlops:
    """The operations of one training step, over all devices. What several devices do alike is executed by each."""

    target: Flops  # the frozen target's layers, forward
    rollout: Flops  # the head's layers over all rollout steps, forward and backward
    loss: Flops  # the output heads of both

    @property
    def total(self) -> Flops:
        """The operations of the whole step."""
        return self.target + self.rollout + self.loss


def step_flops(shape: StepShape, platform: str, mesh: Mesh | None = None) -> StepFlops:
    """Count the operations of a step on a platform ("cpu", "gpu", "tpu"), on one device or over a mesh that divides
    it."""

    def over(mesh: Mesh | None) -> tuple[Flops, Flops, Flops]:
        """Return the operations of one device of the mesh."""
        positions = shape.positions_of_each(mesh)
        forward, costs = Flops(0, 0), shape.costs(mesh)
        if shape.has_layers:
            forward = _target(shape.target, shape.seq, positions, platform, mesh)
        return forward * positions, costs.flops * positions, _loss(shape, costs, mesh) * positions

    alone = over(None)
    if mesh is None:
        return StepFlops(*alone)
    of_all = (Flops(one.useful, own.executed * mesh.size) for one, own in zip(alone, over(mesh), strict=True))
    return StepFlops(*of_all)


def _target(config: ModelConfig, seq: int, positions: int, platform: str, mesh: Mesh | None = None) -> Flops:
    """Count the forward operations of the target's layers for one position of a row of `seq`; with a mesh those of
    each device that has the position. How experts are computed depends on how many `positions` each device has, and on
    which platform."""
    total, spec = Flops(0, 0), target_spec(config)
    if mesh is not None:
        spec = on_device(spec, place_target(config, spec, gathered(mesh)))
    for i, layer in enumerate(spec.layers):
        together = positions * num_parts(
            mesh, "experts"
        )  # those that have different experts send each other their tokens
        total += _products(config, layer, together, platform) + _mixing(config, config.kind(i), seq, mesh)
    if (inputs := spec.layer_inputs) is not None:  # of a table rows are looked up
        total += _products(config, inputs.inputs, positions, platform)
    return total


def mixing_flops(config: ModelConfig, seq: int) -> float:
    """Count the useful operations between the positions of a row of `seq`, in all layers, for one position of it, as
    they are computed in serving: latent attention multiplies with the latents themselves."""
    total = 0.0
    for i in range(config.num_layers):
        kind = config.kind(i)
        if kind.mixer == "latent" and (latent := config.latent):
            width = 2 * latent.kv_rank + latent.rope_dim
            total += 2 * config.num_heads * width * mean_keys(seq, kind.window)[0]
        else:
            total += _mixing(config, kind, seq, None).useful
    return total


def _loss(shape: StepShape, costs: Costs, mesh: Mesh | None) -> Flops:
    """Count the output heads' operations for one position: the target's logits once for all states that are compared
    with them, and the draft's of every state with the gradients of both factors, if both learn."""
    target, drafter = shape.target, shape.drafter
    vocab_size, draft_size = (
        on_each_device(mesh, "vocab", size) for size in (target.vocab_size, drafter.draft_vocab_size)
    )
    teacher = 2 * target.d_model * vocab_size if shape.has_logits else 0
    each = (2 if costs.shares_output else 3) * 2 * drafter.d_model * draft_size
    return Flops(1, 1) * (costs.states * (shape.distributions * teacher + shape.rollout.length * each))


def _products(config: ModelConfig, layer: Any, positions: int, platform: str) -> Flops:
    """Count the operations of a layer's matrices with one position."""
    matrices = [spec for spec in specs(layer) if is_matrix(spec)]
    experts = config.experts
    useful = executed = num_params(matrices, experts.top_k if experts else None)
    if experts and (others := experts.num_experts - experts.top_k):
        share = (experts_computed(experts, positions, platform) - experts.top_k) / others
        executed += share * (num_params(matrices) - useful)
    return Flops(2 * useful, 2 * executed)


def _mixing(config: ModelConfig, kind: LayerKind, seq: int, mesh: Mesh | None) -> Flops:
    """Count the operations between the positions of a row, for one of them: attention's products of queries with keys
    and of weights with values, or a recurrence."""
    if kind.mixer in ("none", "conv"):
        return Flops(0, 0)
    if kind.mixer in RECURRENT:
        return _recurrence(config, kind, seq) * (num_parts(mesh, "sequence") / num_parts(mesh, "heads"))
    own, num_heads = config.of(kind), on_each_device(mesh, "heads", config.num_heads)
    width = own.head_dim + own.value_dim
    if kind.mixer == "latent" and (latent := config.latent):
        width = latent.nope_dim + latent.rope_dim + latent.v_dim
    seen, computed = mean_keys(seq, kind.window, mesh)
    return Flops(seen, computed) * (2 * num_heads * width)


def _recurrence(config: ModelConfig, kind: LayerKind, seq: int) -> Flops:
    """Count a recurrence's operations for one position. Useful are reading and writing the state; executed is what
    `kernels.recurrence` computes in blocks."""
    block = seq if seq <= recurrence.MAX_TREE else recurrence.BLOCK
    if kind.mixer in ("lightning", "mamba"):
        if (sizes := config.mamba) and kind.mixer == "mamba":
            heads, k, v = sizes.num_heads, sizes.state_dim, sizes.head_dim
        else:
            assert config.lightning is not None
            heads, k, v = config.lightning.num_heads, config.lightning.head_dim, config.lightning.head_dim
        return Flops(4 * k * v, 4 * k * v + 2 * block * (k + v) + 4 * block) * heads
    delta = config.delta
    assert delta is not None
    k, v, channels = delta.k_dim, delta.v_dim, delta.k_dim if delta.by_channel else 1
    inner = 2 * block * (2 * k + v) + block * (k + v) + 4 * block * channels
    return Flops(6 * k * v, 6 * k * v + inner) * delta.num_v_heads
