"""The head that a run begins with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.checkpoints.load import Target
from specserve.drafters.eagle3 import start
from specserve.drafters.peagle.config import NUM_SLOTS, PEagleConfig
from specserve.drafters.peagle.model import PEagleParams, mask_spec
from specserve.errors import ConfigError
from specserve.models.config import ModelConfig
from specserve.models.params import init_params

FEWEST_LAYERS, MOST_LAYERS = 2, 4


def new_config(settings: Any, target: ModelConfig, draft_vocab_size: int) -> PEagleConfig:
    """The head's shape: an EAGLE-3 head's with more layers, as all slots share one pass. Raises ConfigError."""
    if settings.block_size == 1:
        raise ConfigError("draft.block_size 1: a head without a masked slot is an EAGLE-3 head; give 2 or more")
    mask_token_id = settings.mask_token if settings.mask_token >= 0 else target.vocab_size - 1
    if mask_token_id >= target.vocab_size:
        raise ConfigError(f"draft.mask_token {mask_token_id}: the target has tokens 0..{target.vocab_size - 1}")
    num_layers = min(MOST_LAYERS, max(FEWEST_LAYERS, target.num_layers // 8))
    network = start.new_config(settings, target, draft_vocab_size, num_layers=num_layers)
    return PEagleConfig(network, mask_token_id, settings.block_size or NUM_SLOTS)


def initial_params(config: PEagleConfig, target: Target, target_ids: np.ndarray, seed: int) -> PEagleParams:
    """Make a fresh network (`eagle.start.initial_params`), and masked states drawn with deviation 1."""
    network = start.initial_params(config.network, target, target_ids, seed)
    key = jax.random.fold_in(jax.random.key(seed), 1)
    return PEagleParams(network, init_params(mask_spec(config), key, config.network.dtype))


def fit_states(
    params: PEagleParams, config: PEagleConfig, aux_hidden_states: jax.Array, is_token: jax.Array
) -> PEagleParams:
    """Scale the feature as that of an EAGLE-3 head. A masked slot has the mean of the target's states."""
    network = start.fit_states(params.network, config.network, aux_hidden_states, is_token)
    states = aux_hidden_states.astype(params.mask_hidden.dtype)
    mean = jnp.mean(states, axis=(0, 1), keepdims=True, where=is_token[..., None])
    return PEagleParams(network, mean)
