"""One forward, many ways to call it: one shot, token by token over pages, a tree of nodes. The same states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from rounding import assert_same, assert_within, of_product, tolerance

from specserve.checkpoints.load import Target
from specserve.models.cache import Cache, Prefix
from specserve.models.target import TargetOutput, TargetParams, forward, head_columns, logits
from specserve.speculative.tree import ancestor_mask

PAGE_SIZE = 8


def _cache(target: Target, num_pages: int) -> Cache:
    return Cache.zeros(target.config, num_slots=2, num_pages=num_pages, page_size=PAGE_SIZE)


def test_decoding_token_by_token_over_pages_equals_one_forward(
    shallow_target: Target, rng: np.random.Generator
) -> None:
    """Two sequences of different lengths, in pages that lie in no order."""
    config, taps = shallow_target.config, (0, 1)
    n = 21
    token_ids = jnp.asarray(rng.integers(0, config.vocab_size, (2, n)), jnp.int32)
    table = jnp.asarray(rng.permutation(8)[:6].reshape(2, 3), jnp.int32)
    starts = jnp.asarray([0, 5], jnp.int32)  # the second sequence's cache begins with its first 5 tokens
    positions = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (2, n))

    @jax.jit
    def states(params: TargetParams) -> TargetOutput:
        return forward(params, config, token_ids, positions, tiny.causal(n), aux_layers=taps)

    whole, off = states(shallow_target.params), tolerance(states, shallow_target.params)
    is_kept = positions[:, :5] < starts[:, None]
    first = jax.tree.map(lambda x: x[:, :5], whole.new)
    cache = _cache(shallow_target, 8).write(first, table, positions[:, :5], is_kept)
    run = jax.jit(functools.partial(forward, shallow_target.params, config, aux_layers=taps))
    for step in range(n - 5):
        at = starts[:, None] + step
        now = jnp.take_along_axis(token_ids, at, axis=1)
        out = run(now, at, jnp.ones((1, 1, 1), bool), cache=cache, prefix=Prefix(table, at[:, 0]))
        for name in ("hidden_states", "aux_hidden_states"):
            expected, own = (
                np.take_along_axis(np.asarray(getattr(each, name)), np.asarray(at)[..., None], axis=1)
                for each in (whole, off)
            )
            assert_same(getattr(out, name), expected, own)
        cache = cache.write(out.new, table, at, jnp.ones((2, 1), bool))


def test_a_verified_tree_equals_its_paths_run_one_by_one(shallow_target: Target, rng: np.random.Generator) -> None:
    params, config = shallow_target.params, shallow_target.config
    prompt = rng.integers(0, config.vocab_size, 13).tolist()
    parents = [0, 0, 0, 1, 1, 2, 3, 6]  # eight nodes, the root included
    tokens = rng.integers(0, config.vocab_size, 8).tolist()
    depths = [0] * 8
    for node in range(1, 8):
        depths[node] = depths[parents[node]] + 1
    n = len(prompt)
    positions = jnp.arange(n, dtype=jnp.int32)[None]
    table = jnp.asarray([[2, 0, 1]], jnp.int32)
    run = jax.jit(forward, static_argnums=1)
    first = run(params, config, jnp.asarray([prompt], jnp.int32), positions, tiny.causal(n))
    cache = _cache(shallow_target, 3).write(first.new, table, positions, jnp.ones((1, n), bool))
    out = run(
        params,
        config,
        jnp.asarray([tokens], jnp.int32),
        jnp.asarray([depths], jnp.int32) + n,
        ancestor_mask(jnp.asarray([parents], jnp.int32), max(depths)),
        cache=cache,
        prefix=Prefix(table, jnp.asarray([n], jnp.int32)),
    )
    got = np.asarray(logits(params, config, out.hidden_states))[0]
    for node in range(8):
        path = [node]
        while path[0]:
            path.insert(0, parents[path[0]])
        sequence = prompt + [tokens[i] for i in path]
        assert_same(
            got[node], tiny.target_logits(shallow_target, sequence)[-1], tiny.tolerance(shallow_target, sequence)[-1]
        )


def test_head_columns_are_columns_of_the_head(shallow_target: Target, rng: np.random.Generator) -> None:
    hidden = jnp.asarray(rng.standard_normal((3, shallow_target.config.d_model)), jnp.float32)
    chosen = jnp.asarray([5, 0, 63], jnp.int32)
    expected, columns = (
        logits(shallow_target.params, shallow_target.config, hidden)[:, chosen],
        head_columns(shallow_target.params, chosen),
    )
    assert_within(hidden @ columns, expected, of_product(hidden, columns))
