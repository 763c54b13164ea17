"""On the native kernels a token gets the same numbers, to the bit, however it is served: alone or in a batch, in a
prompt's chunk, a plain step or a tree. Then speculation cannot flip even a near-tie."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_architectures import make_target

from specserve.checkpoints.load import Quantization, Target, in_few_bits
from specserve.kernels import native
from specserve.models.cache import Cache, Prefix
from specserve.models.config import ModelConfig
from specserve.models.target import forward, logits
from specserve.serve.programs.layouts import make_layouts

pytestmark = pytest.mark.skipif(not native.is_available(), reason=native.describe())

PAGE_SIZE, WIDTH = 4, 8
LENGTH = 26


Step = Callable[..., tuple[Cache, jax.Array]]


def _step(target: Target) -> Step:
    """One jitted forward that serves and then commits the tokens of a path: a program for each shape of a piece."""
    layout, config = make_layouts(target, None).many.target, target.config

    @native.serving
    def run(weights: Any, cache: Cache, table: Any, token_ids: Any, index: Any, mask: Any, path: Any) -> Any:
        batch = len(token_ids)
        prefix = Prefix(table, jnp.full(batch, index[0]), slots=jnp.arange(batch))
        out = forward(
            weights, config, token_ids, jnp.broadcast_to(index, token_ids.shape), mask, cache=cache, prefix=prefix
        )
        kept = jax.tree.map(lambda x: x[:, path], out.new)
        at = jnp.broadcast_to(index[path], (batch, len(path)))
        cache = cache.write(kept, table, at, jnp.ones(at.shape, bool))
        return cache, logits(weights, config, out.hidden_states)[batch // 2, path]

    return functools.partial(jax.jit(run), layout)


def _logits(
    step: Step, config: ModelConfig, text: np.ndarray, pieces: list[int], batch: int, *, has_siblings: bool
) -> np.ndarray:
    """The logits [LENGTH, vocab] of a text that is served in these pieces, by a sequence in the middle of a batch whose
    others read something else. With siblings, each token of a piece has a wrong one beside it, as in a tree."""
    rng = np.random.default_rng(len(pieces) + batch)
    cache = Cache.zeros(config, num_slots=batch, num_pages=batch * WIDTH, page_size=PAGE_SIZE)
    table = rng.permutation(batch * WIDTH).reshape(batch, WIDTH).astype(np.int32)
    texts = rng.integers(3, config.vocab_size, (batch, LENGTH), np.int32)
    texts[batch // 2] = text
    found, start = [], 0
    for n in pieces:
        index = np.arange(start, start + n, dtype=np.int32)
        token_ids, mask = texts[:, index], np.tril(np.ones((n, n), bool))
        path = np.arange(n, dtype=np.int32)
        if has_siblings:
            path = 2 * path
            token_ids = np.stack([token_ids, (token_ids + 7) % config.vocab_size], axis=2).reshape(batch, -1)
            index, mask = np.repeat(index, 2), np.kron(mask, [[1, 0], [1, 0]]).astype(bool)
            mask[path + 1, path], mask[path + 1, path + 1] = False, True
        cache, out = step(cache, table, token_ids, index, mask[None], path)
        found.append(np.asarray(out))
        start += n
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        *((name, "none") for name in ("dense", "experts", "latents", "windows and softcaps", "windows and sinks")),
        ("heads of two widths, keys of earlier layers", "none"),
        ("values of keys, experts beside an MLP", "none"),
        *itertools.product(("dense", "experts"), ("int8", "int4")),
    ],
)  # recurrent layers sum by chunks, in XLA
def test_a_token_gets_the_same_bits_however_it_is_served(name: str, quantization: Quantization) -> None:
    target = make_target(name, num_layers=2)
    if quantization != "none":
        target = dataclasses.replace(target, params=in_few_bits(target.params, quantization))
    text = np.random.default_rng(0).integers(3, target.config.vocab_size, LENGTH)
    serve = functools.partial(_logits, _step(target), target.config, text)
    whole = serve([LENGTH], 1, has_siblings=False)
    ways = {
        "in a batch, prompt and plain steps": ([16] + [1] * 10, 3, False),
        "in chunks": ([5, 16, 5], 2, False),
        "in trees": ([1, 4, 1, 4, 4, 8, 4], 2, True),
    }
    for way, (pieces, batch, has_siblings) in ways.items():
        got = serve(pieces, batch, has_siblings=has_siblings)
        wrong = (got != whole).any(axis=1)
        assert not wrong.any(), f"{way}: {wrong.sum()} of {LENGTH} rows, by {np.abs(got - whole).max():.1e} at most"
