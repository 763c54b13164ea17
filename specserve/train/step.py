"""A training step as one donated program: frozen target, rollout, loss, gradient of the head, optimiser."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, SingleDeviceSharding

from specserve.drafters.interface import TrainedDrafter
from specserve.drafters.learning import Rollout, Rows
from specserve.mesh import fitting, gather, on_mesh, whole
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams
from specserve.pytree import pytree
from specserve.speculative.vocab import DraftVocab
from specserve.train import moments
from specserve.train.chunked_loss import HiddenStates, Objective, RolloutMetrics, Sums, Teacher, sum_losses
from specserve.train.features import states_of_rows
from specserve.train.losses import LossName, Weighting, expected_length, make_loss
from specserve.train.settings import TrainSettings
from specserve.train.teachers import TeacherName, make_teacher


@dataclass(frozen=True)
class LossConfig:
    """The static part of the step."""

    target: ModelConfig
    drafter: TrainedDrafter
    rollout: Rollout
    rollout_decay: float
    loss: LossName = "ce"
    kl_decay: float = 3.0
    accumulate: int = 1
    teacher: TeacherName = "soft"
    weighting: Weighting = "decay"


def rollout_of(settings: TrainSettings, drafter: TrainedDrafter) -> Rollout:
    """Return the drafter's rollout under these settings."""
    return Rollout(drafter.num_steps(settings.rollout), settings.remat, settings.anchors)


def loss_config(settings: TrainSettings, target: ModelConfig, drafter: TrainedDrafter) -> LossConfig:
    """Return the configuration of a step under these settings. The head is computed in the target's dtype, whatever
    its own parameters are kept in."""
    return LossConfig(
        target,
        drafter.with_dtype(target.dtype),
        rollout_of(settings, drafter),
        settings.rollout_decay,
        settings.loss,
        settings.kl_decay,
        settings.accumulate,
        settings.teacher,
        settings.weighting,
    )


@pytree
class TrainState:
    """The arrays that a step changes. A resumed run needs these, and the position in the data."""

    params: Any
    optimizer: optax.OptState
    step: jax.Array  # [] int32


@pytree
class StepMetrics:
    loss: jax.Array  # [] float32
    rollout: RolloutMetrics
    gradient_norm: jax.Array  # [] float32
    n_tokens: jax.Array  # [] int32, loss-bearing tokens of the batch


@pytree
class TargetOutputs:
    """The frozen target's outputs on a batch, from which the head learns."""

    aux_hidden_states: jax.Array  # [batch, seq, taps * d_model]
    teacher: Teacher


def teach(params: TargetParams, config: LossConfig, rows: Rows) -> TargetOutputs:
    """Run the frozen target over packed rows, or take the features that were captured of it."""
    if rows.features is not None:
        teacher = make_teacher(config.teacher, rows.features.teacher, rows)
        return TargetOutputs(rows.features.aux_hidden_states(), teacher)
    taps, hidden_states = states_of_rows(params, config.target, rows, config.drafter.aux_layers)
    return TargetOutputs(taps, make_teacher(config.teacher, HiddenStates(hidden_states), rows))


def rollout_loss(
    params: Any,
    config: LossConfig,
    target: TargetParams,
    vocab: DraftVocab,
    rows: Rows,
    outputs: TargetOutputs,
    n_positions: jax.Array,  # [rollout] float32, the positions that bear loss at each step, of the whole batch
) -> tuple[jax.Array, Sums]:
    """sum_k decay^k * (sum of the loss at step k) / n_positions[k]. Positions whose best token the draft does not have
    teach nothing, and count as misses. Where states count by the expected length of their block, the sum of all is
    divided by the number of blocks, which is n_positions[0]."""
    cast: Any = jax.tree.map(lambda leaf: leaf.astype(config.drafter.dtype), params)
    cast = gather(cast, config.drafter.place)
    aux_hidden_states = outputs.aux_hidden_states.astype(config.drafter.dtype)
    states = config.drafter.learn(cast, target, rows, aux_hidden_states, config.rollout)
    decay, weigh = config.rollout_decay ** jnp.arange(config.rollout.length, dtype=jnp.float32), None
    if config.weighting == "d-pace":
        decay, weigh, n_positions = jnp.ones_like(decay), expected_length, n_positions[:1]
    loss = make_loss(config.loss, config.kl_decay)
    return sum_losses(
        Objective(config.drafter, target, config.target, vocab, loss, weigh),
        config.drafter.output(params),
        states,
        config.drafter.draft_targets(rows, config.rollout),
        decay / jnp.maximum(n_positions, 1.0),
        outputs.teacher,
    )


def loss_and_gradient(
    params: Any,
    config: LossConfig,
    target: TargetParams,
    vocab: DraftVocab,
    rows: Rows,
    run_target: Callable[[Rows], TargetOutputs],
) -> tuple[jax.Array, Sums, Any]:
    """Return the loss, the sums and the gradient of a whole batch, computed a part of it at a time. Parts are rows i,
    i + accumulate, ..., so that each is spread over the devices as the batch is."""
    n_positions = jnp.sum(config.drafter.draft_targets(rows, config.rollout).weights, axis=(1, 2))

    def of_part(rows: Rows) -> tuple[jax.Array, Sums, Any]:
        outputs = jax.lax.stop_gradient(run_target(rows))

        def loss_of(params: Any) -> tuple[jax.Array, Sums]:
            return rollout_loss(params, config, target, vocab, rows, outputs, n_positions)

        (loss, sums), gradient = jax.value_and_grad(loss_of, has_aux=True)(params)
        return loss, sums, gradient

    if config.accumulate == 1:
        return of_part(rows)
    parts = cut_rows(rows, config.accumulate)
    zero = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of_part, jax.tree.map(lambda x: x[0], parts))
    )

    def add(carry: Any, part: Rows) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, carry, of_part(part)), None

    return jax.lax.scan(add, zero, parts)[0]


def cut_rows(tree: Any, accumulate: int) -> Any:  # [batch, ...] -> [accumulate, batch / accumulate, ...]
    """Cut a batch into parts: rows i, i + accumulate, ... are part i."""
    return jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), tree)


def join_rows(tree: Any) -> Any:  # [accumulate, batch / accumulate, ...] -> [batch, ...]
    """Join the parts that `cut_rows` has cut."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), tree)


def seeds_of_step(step: jax.Array, token_ids: jax.Array) -> jax.Array:  # [], [batch, seq] -> [batch] uint32
    """A seed for each row of a step, the same again where a run is resumed."""
    number = jnp.uint32(token_ids.shape[0]) * step.astype(jnp.uint32)
    return number + jnp.arange(token_ids.shape[0], dtype=jnp.uint32)


def place_state(drafter: TrainedDrafter, optimizer: optax.GradientTransformation, mesh: Mesh | None) -> Any:
    """Return where the arrays of a TrainState live, or None for where JAX puts them. The optimiser's moments of a
    parameter are spread as the parameter is, or are in the host's memory."""
    abstract: Any = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, drafter.dtype), drafter.spec())
    kept = jax.eval_shape(optimizer.init, abstract)
    if mesh is None and not moments.are_on_host(kept):
        return None
    rest: Any = whole(mesh) or SingleDeviceSharding(jax.devices()[0])
    params = drafter.place(mesh) if mesh is not None else jax.tree.map(lambda _: rest, abstract)
    return TrainState(params, moments.place(kept, abstract, params, rest), rest)


def place_rows(mesh: Mesh | None, shape: tuple[int, ...]) -> Any:
    """Return where a batch of rows lives."""
    return None if mesh is None else fitting(mesh, ("batch", "sequence"), shape)


def make_step(
    config: LossConfig, optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> Callable[[TrainState, TargetParams, DraftVocab, Rows, jax.Array], tuple[TrainState, StepMetrics]]:
    """Make the jitted step, whose state is donated. Its last argument scales the learning rate."""

    def step(
        state: TrainState, target: TargetParams, vocab: DraftVocab, rows: Rows, lr_scale: jax.Array
    ) -> tuple[TrainState, StepMetrics]:
        rows = dataclasses.replace(rows, seeds=seeds_of_step(state.step, rows.token_ids))
        loss, sums, gradient = loss_and_gradient(
            state.params, config, target, vocab, rows, lambda part: teach(target, config, part)
        )
        tree: Any = state.params  # optax types its trees by their containers, and ours is a dataclass
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, tree)  # type: ignore[arg-type]
        params: Any = optax.apply_updates(tree, jax.tree.map(lambda update: update * lr_scale, updates))
        new = TrainState(params=params, optimizer=optimizer_state, step=state.step + 1)
        n_tokens = jnp.sum(rows.loss_mask, dtype=jnp.int32)
        return new, StepMetrics(loss, RolloutMetrics.of(sums), optax.tree.norm(gradient), n_tokens)

    places = place_state(config.drafter, optimizer, mesh)
    places = places and (places, whole(mesh))
    return jax.jit(on_mesh(mesh, step), donate_argnums=0, out_shardings=places)
