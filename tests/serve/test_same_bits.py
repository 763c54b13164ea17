"""On the native kernels a token gets the same numbers, to the bit, however it is served: alone or in a batch, in a
prompt's chunk, a plain step or a tree. Then speculation cannot flip even a near-tie."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_architectures import CASES, _target

from specserve.checkpoints.load import Target
from specserve.kernels import native
from specserve.models.cache import Cache, Prefix
from specserve.models.target import forward, logits
from specserve.serve.layouts import make_layouts

pytestmark = pytest.mark.skipif(not native.is_available(), reason=native.describe())

PAGE_SIZE, WIDTH = 4, 8
LENGTH = 26


def _logits(target: Target, text: np.ndarray, pieces: list[int], batch: int, *, has_siblings: bool) -> np.ndarray:
    """The logits [LENGTH, vocab] of a text that is served in these pieces, by a sequence in the middle of a batch whose
    others read something else. With siblings, each token of a piece has a wrong one beside it, as in a tree."""
    weights = make_layouts(target, None).many.target
    config = target.config
    rng = np.random.default_rng(len(pieces) + batch)
    cache = Cache.zeros(config, num_slots=batch, num_pages=batch * WIDTH, page_size=PAGE_SIZE)
    table = jnp.asarray(rng.permutation(batch * WIDTH).reshape(batch, WIDTH), jnp.int32)
    texts = rng.integers(3, config.vocab_size, (batch, LENGTH))
    texts[batch // 2] = text

    @native.serving
    def run(cache: Cache, token_ids: Any, position_ids: Any, mask: Any, start: Any) -> Any:
        prefix = Prefix(table, start, slots=jnp.arange(batch))
        out = forward(weights, config, token_ids, position_ids, mask, cache=cache, prefix=prefix)
        return out.new, logits(weights, config, out.hidden_states)

    program, found, start = jax.jit(run), [], 0
    for n in pieces:
        index = np.arange(start, start + n)
        token_ids, position_ids = texts[:, index], np.broadcast_to(index, (batch, n))
        mask = np.tril(np.ones((n, n), bool))
        path = np.arange(n)
        if has_siblings:
            path = 2 * path
            token_ids = np.stack([token_ids, (token_ids + 7) % config.vocab_size], axis=2).reshape(batch, -1)
            position_ids, mask = np.repeat(position_ids, 2, axis=1), np.kron(mask, [[1, 0], [1, 0]]).astype(bool)
            mask[path + 1, path], mask[path + 1, path + 1] = False, True
        new, out = program(
            cache,
            jnp.asarray(token_ids, jnp.int32),
            jnp.asarray(position_ids, jnp.int32),
            jnp.asarray(mask[None]),
            jnp.full(batch, start, jnp.int32),
        )
        kept = jax.tree.map(lambda x, path=path: x[:, path], new)
        cache = cache.write(kept, table, jnp.broadcast_to(jnp.asarray(index), (batch, n)), jnp.ones((batch, n), bool))
        found.append(np.asarray(out)[batch // 2, path])
        start += n
    return np.concatenate(found)


@pytest.mark.parametrize(
    "name", ["dense", "experts", "latents", "windows and softcaps", "windows and sinks"]
)  # recurrent layers sum by chunks, in XLA
def test_a_token_gets_the_same_bits_however_it_is_served(name: str) -> None:
    target = _target(CASES[name])
    text = np.random.default_rng(0).integers(3, target.config.vocab_size, LENGTH)
    whole = _logits(target, text, [LENGTH], 1, has_siblings=False)
    ways = {
        "in a batch, prompt and plain steps": ([16] + [1] * 10, 3, False),
        "in chunks": ([5, 16, 5], 2, False),
        "in trees": ([1, 4, 1, 4, 4, 8, 4], 2, True),
    }
    for way, (pieces, batch, has_siblings) in ways.items():
        got = _logits(target, text, pieces, batch, has_siblings=has_siblings)
        wrong = (got != whole).any(axis=1)
        assert not wrong.any(), f"{way}: {wrong.sum()} of {LENGTH} rows, by {np.abs(got - whole).max():.1e} at most"
