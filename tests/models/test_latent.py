"""Latent attention: its two forms are one sum. What indexers choose, of latents and of blocks of heads' keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeded
import spread
import tiny
from rounding import assert_same, tolerance

from specserve.kernels.pages import Pages, quantize
from specserve.kernels.rows import Documents
from specserve.models.cache import Cache, Prefix
from specserve.models.config import Latent, ModelConfig
from specserve.models.context import Context, Mask
from specserve.models.mixers import indexer
from specserve.models.mixers.indexer import Indexer, attend_to_chosen
from specserve.models.mixers.latent import LatentAttention, absorbed, expanded, latent_spec
from specserve.models.params import init_params
from specserve.models.target import TargetParams, forward


def test_what_ran_before_sees_what_it_saw(rng: np.random.Generator) -> None:
    """Of a tree that grows level by level, by what its last nodes see: whatever node they see, and its ancestors."""
    for _tree in range(20):
        parents = [-1, *(int(rng.integers(0, i)) for i in range(1, 12))]
        sees, depths = np.zeros((12, 12), bool), np.zeros(12, np.int32)
        for node, parent in enumerate(parents):
            sees[node] = sees[parent] * (parent >= 0)
            sees[node, node], depths[node] = True, depths[parent] + 1 if parent >= 0 else 0
        order = np.argsort(depths, kind="stable")
        sees, depths = sees[order][:, order], depths[order]
        last = int((depths == depths.max()).sum())
        got = np.asarray(indexer._between_all(jnp.asarray(sees[None, -last:]), jnp.asarray(depths[None])))[0]
        seen = sees[-last:].any(axis=0)
        np.testing.assert_array_equal(got[seen], sees[seen])


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
    one, other = expand(*args), absorbed(params, config, q_nope, q_rope, new, context, None)
    assert one.shape == (2, 9, 4, 10)
    assert np.abs(one).max() > 1
    assert_same(other, one, tolerance(expand, *args))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_an_indexer_chooses_by_the_published_score(
    dtype: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among committed and new tokens, in the order of the sequence, for all queries at once and for two at a time; of
    8-bit entries by what pages hold. The rest of attention is that of the chosen ones alone."""
    latent = Latent(kv_rank=6, nope_dim=4, rope_dim=2, v_dim=3, index_heads=9, index_dim=4, index_topk=5)
    lens, n, size = np.asarray([11, 3], np.int32), 5, 4
    entries, q, index_q, weights = (
        rng.normal(size=(2, *shape)).astype(np.float32) for shape in ((16, 1, 12), (n, 3, 8), (n, 9, 4), (n, 9))
    )
    table = np.asarray([[2, 0, 4], [5, 3, 1]], np.int32)
    cache = Cache((Pages.zeros(6, size, 1, latent.entry_dim, dtype, has_values=False),), 6, size)
    index = np.tile(np.arange(16, dtype=np.int32), (2, 1))
    places = jnp.asarray(index)
    cache = cache.write(((jnp.asarray(entries), None),), jnp.asarray(table), places, places < lens[:, None])
    seen = cache.attended(0, Prefix(jnp.asarray(table), jnp.asarray(lens)))
    new, table = np.stack([entries[b, end : end + n] for b, end in enumerate(lens)]), jnp.zeros((2, n, 1, 1))
    context = Context(jnp.asarray(lens[:, None] + np.arange(n)), tiny.causal(n), (table, table), None)
    no_pools = Indexer(*[jnp.zeros(0)] * 5, None)

    def run() -> np.ndarray:
        args = jnp.asarray(q), jnp.asarray(new), context, seen, (jnp.asarray(index_q), jnp.asarray(weights)), 0.5
        return np.asarray(attend_to_chosen(no_pools, latent, *args)[0])

    held = entries
    if dtype == "int8":
        values, scale = quantize(jnp.asarray(entries), jnp.dtype("int8"))
        held = np.asarray(values, np.float32) * np.asarray(scale)[..., None]
    keys, expected = held[:, :, 0], np.zeros((2, n, 3, 6), np.float32)
    for b, i in np.ndindex(2, n):
        known = keys[b, : lens[b] + i + 1]
        scores = (weights[b, i][:, None] * np.maximum(index_q[b, i] @ known[:, 8:].T, 0)).sum(0)
        known = known[np.argsort(-scores)[:5], :8]
        odds = np.exp(0.5 * q[b, i] @ known.T)
        expected[b, i] = odds / odds.sum(-1, keepdims=True) @ known[:, :6]
    np.testing.assert_allclose(run(), expected, rtol=1e-4, atol=1e-5)  # float32 sums of a few numbers
    monkeypatch.setattr(indexer, "SCORES_AT_ONCE", 2 * 2 * 17 * 9)
    np.testing.assert_allclose(run(), expected, rtol=1e-4, atol=1e-5)  # float32 sums of a few numbers


@pytest.mark.parametrize("model", ["blocks that an indexer chooses", "several streams"])
def test_blocks_of_packed_documents_are_cut_in_each(model: str) -> None:
    """So they equal each document alone, however much of it an indexer leaves out; and no token is hashed with one of
    another document."""
    target, n = spread.target_of(model), 17
    token_ids = jnp.asarray(seeded.tokens(target.config.vocab_size, seed=1)[: 2 * n].reshape(2, n))
    positions, packed = jnp.tile(jnp.arange(n, dtype=jnp.int32), (2, 1)), Documents(jnp.arange(2 * n)[None] // n)

    @jax.jit
    def run(params: TargetParams, token_ids: jax.Array, positions: jax.Array, mask: Mask) -> jax.Array:
        return forward(params, target.config, token_ids, positions, mask).hidden_states

    def alone(params: TargetParams) -> jax.Array:
        return run(params, token_ids, positions, tiny.causal(n))

    together = run(target.params, token_ids.reshape(1, -1), positions.reshape(1, -1), packed)
    assert_same(together.reshape(2, n, -1), alone(target.params), tolerance(alone, target.params))
