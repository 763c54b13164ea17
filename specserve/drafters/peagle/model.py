"""The P-EAGLE head (arXiv 2602.01469): an EAGLE-3 network, and the inputs of its masked slots.

Entry t of a sequence consumes (the target's feature at t-1, the token at t), as in EAGLE-3, and predicts the token at
t+1. Masked slots after it consume (a learned feature, the mask's token), and slot j predicts the token at t+1+j. A slot
sees the entries of the sequence and the slots before it. The caller decides what attends to what, so that training and
serving share these functions.
"""

import jax
import jax.numpy as jnp

from specserve.drafters.eagle3.model import (
    DraftInputs,
    Eagle3Params,
    Output,
    draft_inputs,
    draft_spec,
    fuse_features,
)
from specserve.drafters.peagle.config import PEagleConfig
from specserve.models.params import ParamSpec
from specserve.pytree import pytree


@pytree
class PEagleParams:
    network: Eagle3Params
    mask_hidden: jax.Array  # [1, 1, taps * target_d_model], the tapped states of a masked slot

    @property
    def output(self) -> Output:
        """The parameters that make logits of states, see `eagle.model.draft_logits`."""
        return self.network.output


def mask_spec(config: PEagleConfig) -> ParamSpec:
    """The parameter beside the network's, drawn with deviation 1 as published heads have it at first."""
    size = len(config.network.aux_layers) * config.network.target_d_model
    return ParamSpec((1, 1, size), (None, None, None), "mask_hidden")


def head_spec(config: PEagleConfig) -> PEagleParams:
    """The parameters of a head as `ParamSpec`s."""
    mask: object = mask_spec(config)
    return PEagleParams(draft_spec(config.network), mask)  # type: ignore[arg-type]


def masked_feature(params: PEagleParams, config: PEagleConfig) -> jax.Array:  # [1, 1, d_model]
    """Return the feature that masked slots have in place of the target's."""
    return fuse_features(params.network, config.network, params.mask_hidden)


def inputs_with_masks(
    params: PEagleParams,
    config: PEagleConfig,
    embedding: jax.Array,  # [vocab, d_model], see `eagle.model.token_embedding`
    token_ids: jax.Array,  # [batch, known] int32, may be none
    features: jax.Array,  # [batch, known, d_model], of the positions before them
    position_ids: jax.Array,  # [batch, n] int32; all slots after the known ones are masked
) -> DraftInputs:
    """Compute the inputs of the first layer for entries of known tokens, and for masked slots after them."""
    batch, n = position_ids.shape
    num_masked = n - token_ids.shape[1]
    masks = jnp.full((batch, num_masked), config.mask_token_id, token_ids.dtype)
    mask = masked_feature(params, config).astype(features.dtype)
    masked = jnp.broadcast_to(mask, (batch, num_masked, features.shape[2]))
    return draft_inputs(
        params.network,
        config.network,
        embedding,
        jnp.concatenate([token_ids, masks], axis=1),
        jnp.concatenate([features, masked], axis=1),
        position_ids,
    )
