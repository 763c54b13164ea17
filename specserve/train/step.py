"""One training step as one donated program: frozen target, rollout, loss, gradient of the head, optimiser."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from specserve.mesh import on_mesh, whole
from specserve.models import target as target_model
from specserve.models.config import DraftConfig, ModelConfig
from specserve.models.draft import DraftParams, token_embedding
from specserve.models.target import TargetParams
from specserve.pytree import pytree
from specserve.speculative.sampling import argmax
from specserve.speculative.vocab import DraftVocab
from specserve.train.unroll import RolloutMetrics, Rows, Teacher, rollout_loss, visible_within_documents


@dataclass(frozen=True)
class LossConfig:
    """The static part of the step."""

    target: ModelConfig
    draft: DraftConfig
    rollout: int
    rollout_decay: float


@pytree
class TrainState:
    """What a step changes, and what a resumed run needs besides the data position."""

    params: DraftParams
    optimizer: optax.OptState
    step: jax.Array  # [] int32


@pytree
class StepMetrics:
    loss: jax.Array  # [] float32
    rollout: RolloutMetrics
    gradient_norm: jax.Array  # [] float32
    n_tokens: jax.Array  # [] int32, loss-bearing tokens of the batch


def teach(
    params: TargetParams, config: LossConfig, vocab: DraftVocab, rows: Rows
) -> tuple[jax.Array, Teacher]:  # aux hidden states [batch, seq, taps * d_model], and the labels
    """Run the frozen target over packed rows."""
    mask = visible_within_documents(rows.document_ids)
    out = target_model.forward(
        params, config.target, rows.token_ids, rows.position_ids, mask, aux_layers=config.draft.aux_layers
    )
    assert out.aux_hidden_states is not None
    logits = target_model.logits(params, config.target, out.hidden_states)
    drafted = logits[..., vocab.target_ids]
    is_drafted = jnp.max(drafted, axis=-1) >= jnp.max(logits, axis=-1)
    best = jnp.where(is_drafted, argmax(drafted), -1)
    return out.aux_hidden_states, Teacher(jax.nn.softmax(drafted, axis=-1), best)


def make_step(
    config: LossConfig, optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> Callable[[TrainState, TargetParams, DraftVocab, Rows, jax.Array], tuple[TrainState, StepMetrics]]:
    """The jitted step; the state is donated. Its last argument scales the learning rate."""

    def step(
        state: TrainState, target: TargetParams, vocab: DraftVocab, rows: Rows, lr_scale: jax.Array
    ) -> tuple[TrainState, StepMetrics]:
        aux, teacher = jax.lax.stop_gradient(teach(target, config, vocab, rows))

        def loss_of(params: DraftParams) -> tuple[jax.Array, RolloutMetrics]:
            return rollout_loss(
                params,
                config.draft,
                jax.lax.stop_gradient(token_embedding(params, target.embedding)),
                rows,
                aux.astype(config.draft.dtype),
                teacher,
                length=config.rollout,
                decay=config.rollout_decay,
            )

        (loss, metrics), gradient = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        tree: Any = state.params  # optax types its trees by their containers, and ours is a dataclass
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, tree)
        params: Any = optax.apply_updates(tree, jax.tree.map(lambda update: update * lr_scale, updates))
        new = TrainState(params=params, optimizer=optimizer_state, step=state.step + 1)
        n_tokens = jnp.sum(rows.loss_mask, dtype=jnp.int32)
        return new, StepMetrics(loss, metrics, optax.tree.norm(gradient), n_tokens)

    return jax.jit(on_mesh(mesh, step), donate_argnums=0, out_shardings=whole(mesh))
