"""The head that a run begins with."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.checkpoints.load import Target
from specserve.drafters.eagle3.config import Eagle3Config, default_taps
from specserve.drafters.eagle3.model import Eagle3Params, draft_spec
from specserve.errors import ConfigError
from specserve.models.config import ModelConfig
from specserve.models.params import init_params
from specserve.models.rope import plain_rope
from specserve.models.target import head_columns


def new_config(settings: Any, config: ModelConfig, draft_vocab_size: int, *, num_layers: int = 1) -> Eagle3Config:
    """Return the network's shape, which is the target's, with so many layers, where the settings say nothing. Raises
    ConfigError."""
    num_heads = settings.num_heads or config.num_heads
    # beside latent attention a head is a plain one, with keys as wide as the target's own without position
    head_dim = config.latent.nope_dim if config.latent else config.head_dim
    num_kv_heads = settings.num_kv_heads or min(num_heads if config.latent else config.num_kv_heads, num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"draft.num_heads is {num_heads}, which {num_kv_heads} draft.num_kv_heads do not divide")
    aux_layers = settings.aux_layers or default_taps(config)
    if any(not 0 <= i < config.num_layers for i in aux_layers):
        raise ConfigError(f"draft.aux_layers {aux_layers}: the target has layers 0..{config.num_layers - 1}")
    d_model = settings.d_model or config.d_model
    return Eagle3Config(
        d_model=d_model,
        target_d_model=config.d_model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        d_ff=settings.d_ff or config.d_ff,
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        max_len=config.max_len,
        aux_layers=aux_layers,
        num_layers=settings.num_layers or num_layers,
        norm_eps=config.norm_eps,
        rope=plain_rope(config.rope),
        has_embedding=d_model != config.d_model,
        norm_output=settings.norm_output,
        fc_norm=settings.fc_norm,
    )


def initial_params(config: Eagle3Config, target: Target, target_ids: np.ndarray, seed: int) -> Eagle3Params:
    """Make a fresh head whose output rows and final norm are the target's own. A head of another width begins with the
    target's embedding and output rows as near as its width allows (`_in_width`), and a final norm of ones."""
    params: Eagle3Params = init_params(draft_spec(config), jax.random.key(seed), config.dtype)
    columns = head_columns(target.params, jnp.asarray(target_ids)).astype(config.dtype)
    if config.d_model != config.target_d_model:
        embedding = _in_width(target.params.embedding.astype(config.dtype), config.d_model)
        return dataclasses.replace(params, embedding=embedding, head=_in_width(columns.T, config.d_model).T)
    norm = jnp.array(target.params.norm + (1.0 if target.config.norm_offset else 0.0), config.dtype)
    return dataclasses.replace(params, head=columns, norm=norm)


def _in_width(rows: jax.Array, width: int) -> jax.Array:  # [n, d] -> [n, width]
    """Return rows by their coordinates along the directions in which they are longest together, those of a truncated
    SVD, so that products between them change as little as the width allows. Zeros fill a larger width."""
    _, directions = jnp.linalg.eigh(rows.T @ rows)  # the shortest first
    return jnp.pad(rows @ directions[:, ::-1][:, :width], ((0, 0), (0, max(0, width - rows.shape[1]))))
