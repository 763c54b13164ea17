"""The head that a run begins with."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.checkpoints.load import Target
from specserve.drafters.eagle3.config import Eagle3Config, default_taps
from specserve.drafters.eagle3.model import Eagle3Params, draft_spec, fuse_features
from specserve.drafters.layers import check_taps, layers_like
from specserve.models.config import ModelConfig
from specserve.models.params import init_params, silenced
from specserve.models.target import head_columns, whole_norm


def new_config(settings: Any, config: ModelConfig, draft_vocab_size: int, *, num_layers: int = 1) -> Eagle3Config:
    """Return the network's shape, which is the target's, with so many layers, where the settings say nothing. Raises
    ConfigError."""
    d_model = settings.d_model or config.d_model
    aux_layers = settings.aux_layers or default_taps(config)
    check_taps(aux_layers, config)
    return Eagle3Config(
        d_model=d_model,
        target_d_model=config.d_model,
        **layers_like(config, settings, settings.num_layers or num_layers),
        qk_norm="head" if settings.qk_norm else "",
        draft_vocab_size=draft_vocab_size,
        aux_layers=aux_layers,
        has_embedding=d_model != config.d_model,
        norm_output=settings.norm_output,
        fc_norm=settings.fc_norm,
    )


def initial_params(config: Eagle3Config, target: Target, target_ids: np.ndarray, seed: int) -> Eagle3Params:
    """Make a fresh head that says what the target's output head makes of the last tapped state. The feature is that
    state, its layers add nothing to it yet, and final norm and output rows are the target's own. In another width the
    embedding, the output rows and the state are as near to the target's as that allows (`_directions`)."""
    params: Eagle3Params = init_params(draft_spec(config), jax.random.key(seed), config.dtype)
    params = dataclasses.replace(params, layers=silenced(params.layers))
    columns = head_columns(target.params, jnp.asarray(target_ids)).astype(config.dtype)
    norm = whole_norm(target.params, target.config).astype(config.dtype)
    if config.d_model == config.target_d_model:
        state = jnp.eye(config.d_model, dtype=config.dtype)
        return dataclasses.replace(params, fc=_of_last(params.fc, state), head=columns, norm=norm)
    rows, table = (columns * norm[:, None]).T, target.params.embedding.astype(config.dtype)
    state = _directions(rows, config.d_model)
    embedding = table @ _directions(table, config.d_model)
    return dataclasses.replace(params, embedding=embedding, fc=_of_last(params.fc, state), head=(rows @ state).T)


def fit_states(
    params: Eagle3Params, config: Eagle3Config, aux_hidden_states: jax.Array, is_token: jax.Array
) -> Eagle3Params:
    """Scale the feature to 1, the size of a layer's normed inputs, at the median position, because a few hold states
    that are far larger than all others (Sun et al. 2024, arXiv 2402.17762). Where it is much larger, as states of the
    target are, what a layer adds to it counts for little and is learnt late. Where it is much smaller, the first
    updates of the layer, which has added nothing so far, outweigh it."""
    features = fuse_features(params, config, aux_hidden_states)
    sizes = jnp.sqrt(jnp.mean(jnp.square(features.astype(jnp.float32)), axis=-1))
    median = jnp.nanmedian(jnp.where(is_token, sizes, jnp.nan))
    scale = jnp.where(median > 0, 1.0 / median, 1.0)
    fc: Any = params.fc  # a plain matrix, as it learns
    return dataclasses.replace(params, fc=fc * scale.astype(fc.dtype))


def _of_last(fc: Any, state: jax.Array) -> jax.Array:  # [taps * d, width], [d, width]
    """Return the matrix that takes the last tap alone, by `state`."""
    return jnp.zeros_like(fc).at[-len(state) :].set(state)


def _directions(rows: jax.Array, width: int) -> jax.Array:  # [n, d] -> [d, width]
    """Return the directions in which rows are longest together, those of a truncated SVD: products between rows by
    their coordinates along these change as little as the width allows. Zeros fill a larger width."""
    _, directions = jnp.linalg.eigh(rows.T @ rows)  # the shortest first
    return jnp.pad(directions[:, ::-1][:, :width], ((0, 0), (0, max(0, width - rows.shape[1]))))
