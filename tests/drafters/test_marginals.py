"""The trees of drafters whose slots are independent of each other, against every path of their slots' best tokens."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rounding import assert_same, tolerance
from scipy.special import log_softmax

from specserve.drafters.grow import Marginals, grow_tree
from specserve.speculative import sampling
from specserve.speculative.sampling import SamplerRows
from specserve.speculative.tree import DynamicTree, Proposal
from specserve.speculative.vocab import DraftVocab

BATCH, DEPTH, TOP_K, VOCAB = 6, 4, 3, 40
TARGET_IDS = np.arange(5, 5 + 2 * VOCAB, 2)
ROOTS, POSITIONS = np.arange(BATCH), np.array([3, 3, 9, 0, 30, 7])
Paths = dict[tuple[int, ...], float]


@functools.partial(jax.jit, static_argnums=0)
def _grown(tree: DynamicTree, rows: SamplerRows, logits: jax.Array) -> Proposal:
    vocab, roots = DraftVocab(jnp.asarray(TARGET_IDS, jnp.int32)), jnp.asarray(ROOTS, jnp.int32)
    slots = Marginals(rows, vocab, jnp.asarray(POSITIONS, jnp.int32), logits)
    return grow_tree(slots, tree, roots, roots[:, None])


def _best(slots: list[dict[int, float]], num_nodes: int) -> Paths:
    """Of all paths of these tokens, the best `TOP_K` of each slot, whatever comes before."""
    every = [path for depth in range(DEPTH) for path in itertools.product(*slots[: depth + 1])]
    scores = {path: sum(slot[token] for slot, token in zip(slots, path, strict=False)) for path in every}
    return dict(sorted(scores.items(), key=lambda item: -item[1])[:num_nodes])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_nodes", [5, 8, 20, 39])
def test_the_tree_is_the_best_of_all_paths_of_each_slot_s_best_tokens(
    num_nodes: int, temperature: float, rng: np.random.Generator
) -> None:
    """Of any size. A slot's scores are the head's own, with the noise of the target's draw where it is sampled. Later
    slots are surer, so that depth and width compete."""
    seeds = jnp.asarray([[row, 7] for row in range(BATCH)], jnp.uint32)
    heat = jnp.full(BATCH, temperature, jnp.float32)
    rows = dataclasses.replace(SamplerRows.greedy(BATCH), temperature=heat, seed=seeds)
    logits = jnp.asarray(rng.standard_normal((BATCH, DEPTH, VOCAB)) * [[[1], [2], [4], [6]]], jnp.float32)

    def paths(logits: jax.Array) -> list[list[tuple[tuple[int, ...], float]]]:
        proposal = jax.device_get(_grown(DynamicTree(DEPTH, TOP_K, num_nodes), rows, logits))
        out = []
        for row in range(BATCH):
            found: list[tuple[int, ...]] = [()]
            for parent, token in zip(proposal.parents[row, 1:], proposal.token_ids[row, 1:], strict=True):
                found.append((*found[parent], int(token)))
            out.append(sorted(zip(found[1:], proposal.scores[row, 1:].tolist(), strict=True)))
        return out

    listed = paths(logits)
    off = tolerance(lambda logits: [np.sort([score for _, score in row]) for row in paths(logits)], logits)
    for row, found in enumerate(listed):
        slots = []
        for slot in range(DEPTH):
            ranked = np.asarray(logits[row, slot], np.float64)
            if temperature:
                at = jnp.asarray(POSITIONS + slot + 1, jnp.int32)[:, None]
                noise = sampling.noise(rows, at, jnp.asarray(TARGET_IDS, jnp.uint32))
                ranked = ranked / temperature + np.asarray(noise[row, 0], np.float64)
            scores = log_softmax(ranked)
            slots.append({int(TARGET_IDS[i]): float(scores[i]) for i in np.argsort(-scores)[:TOP_K]})
        expected = sorted(_best(slots, num_nodes).items())
        assert [path for path, _ in found] == [path for path, _ in expected]
        assert_same(np.array([score for _, score in found]), np.array([score for _, score in expected]), off[row])
    shapes = {tuple(sorted(len(path) for path, _ in row)) for row in listed}
    assert len(shapes) > 1, "all rows grow alike, so little was tested"
