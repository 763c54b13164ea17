"""Latent attention: its two forms are one sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from rounding import assert_same, tolerance

from specserve.models.config import Latent, ModelConfig
from specserve.models.context import Context
from specserve.models.latent import LatentAttention, absorbed, expanded, latent_spec
from specserve.models.params import init_params


@pytest.mark.parametrize("q_rank", [0, 12])
def test_the_absorbed_form_is_the_expanded_one(q_rank: int, rng: np.random.Generator) -> None:
    latent = Latent(kv_rank=16, nope_dim=8, rope_dim=4, v_dim=10, q_rank=q_rank)
    config = ModelConfig("test", 8, 32, 1, 4, 1, 4, 8, 64, latent=latent, attention_scale=12**-0.5)
    params: LatentAttention = init_params(latent_spec(config, "l", config.d_model), jax.random.key(0), "float32")
    q_nope, q_rope, new = (
        jnp.asarray(rng.normal(size=(2, 9, *rest)), jnp.float32) for rest in ((4, 8), (4, 4), (1, 20))
    )
    table = jnp.zeros((2, 9, 1, 2))
    context = Context(jnp.zeros((2, 9), jnp.int32), tiny.causal(9), (table, table), None)

    @jax.jit
    def expand(params: LatentAttention, *given: jax.Array) -> jax.Array:
        return expanded(params, config, *given, context)

    args = params, q_nope, q_rope, new
    one, other = expand(*args), absorbed(params, config, q_nope, q_rope, new, None, context)
    assert one.shape == (2, 9, 4, 10)
    assert np.abs(one).max() > 1
    assert_same(other, one, tolerance(expand, *args))
