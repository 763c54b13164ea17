"""The trees of heads whose slots depend on each other, against plain Python over one path at a time."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_case import MARKOV, SELECTOR
from rounding import assert_same, tolerance
from scipy.special import log_softmax

from specserve.drafters.dflash.config import DFlashConfig
from specserve.drafters.dflash.joint import (
    Domino,
    Heads,
    JointSlots,
    Markov,
    domino_spec,
    markov_spec,
    selector_spec,
)
from specserve.drafters.grow import grow_tree
from specserve.models.config import ModelConfig
from specserve.models.params import init_params
from specserve.speculative import sampling
from specserve.speculative.sampling import SamplerRows
from specserve.speculative.tree import DynamicTree, Proposal
from specserve.speculative.vocab import DraftVocab

VOCAB, WIDTH, BATCH, DEPTH, TOP_K, HEAT = 12, 8, 3, 3, 2, 0.8
SIZES = (6, 9)  # of trees; all paths are 2 + 4 + 8
BACKBONE = ModelConfig("qwen3", VOCAB, WIDTH, 1, 2, 1, 4, 8, 64)
ROOTS = np.array([1, 5, 5], np.int32)
KINDS: dict[str, dict[str, Any]] = {
    "markov": {**MARKOV, "confidence": ""},
    "confidence": MARKOV,
    "gated": {**MARKOV, "markov_type": "gated"},
    "rnn": {**MARKOV, "markov_type": "rnn"},
    "selector": SELECTOR,
    "domino": {"gru_width": 6, "correction_rank": 4, "num_uncorrected": 1},
}
EMBEDDING = (3 * np.random.default_rng(6).standard_normal((VOCAB, WIDTH))).astype(np.float32)


SEEDS = np.array([[row, 7] for row in range(BATCH)], np.uint32)


def _rows(temperature: float) -> SamplerRows:
    heat = jnp.full(BATCH, temperature, jnp.float32)
    return dataclasses.replace(SamplerRows.greedy(BATCH), temperature=heat, seed=jnp.asarray(SEEDS))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _grown(
    num_nodes: int,
    config: DFlashConfig,
    heads: Heads,
    logits: jax.Array,
    states: jax.Array,
    rows: SamplerRows,
) -> tuple[Proposal, jax.Array | None]:
    vocab, seq_lens = DraftVocab(jnp.arange(VOCAB)), jnp.zeros(BATCH, jnp.int32)
    slots = JointSlots(heads, config, rows, vocab, seq_lens, logits, states, jnp.asarray(EMBEDDING))
    roots = jnp.asarray(ROOTS)
    return grow_tree(slots, DynamicTree(DEPTH, TOP_K, num_nodes), roots, slots.root(roots)), slots.confidence


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _markov(heads: Markov, tokens: list[int], states: np.ndarray) -> np.ndarray:
    """What DeepSpec's three heads add to the logits of the slot after these tokens."""
    table, bias = (np.asarray(leaf, np.float64) for leaf in (heads.previous, heads.bias))
    if heads.step is None:
        return table[tokens[-1]] @ bias
    weight, offset = (np.asarray(leaf, np.float64) for leaf in (heads.step.weight, heads.step.bias))
    rank = table.shape[1]
    if weight.shape[1] == rank:
        gate = _sigmoid(np.concatenate([states[len(tokens) - 1], table[tokens[-1]]]) @ weight + offset)
        return (gate * table[tokens[-1]]) @ bias
    memory, output = np.zeros(rank), np.zeros(rank)
    for token, state in zip(tokens, states, strict=False):
        gate, new, output = np.split(np.concatenate([memory, table[token], state]) @ weight + offset, 3)
        memory = _sigmoid(gate) * memory + (1 - _sigmoid(gate)) * np.tanh(new)
    return np.tanh(output) @ bias


def _domino(heads: Domino, tokens: list[int], states: np.ndarray) -> np.ndarray:
    """The same of SpecForge's, whose GRU is torch's."""
    of_token, of_memory, down, up = (np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(heads))
    memory = np.zeros(len(of_memory))
    for token in tokens:
        x, h = np.split(EMBEDDING[token] @ of_token, 3), np.split(memory @ of_memory, 3)
        reset, update = _sigmoid(x[0] + h[0]), _sigmoid(x[1] + h[1])
        memory = (1 - update) * np.tanh(x[2] + reset * h[2]) + update * memory
    inner = np.concatenate([states[len(tokens) - 1], memory]) @ down
    return (inner * _sigmoid(inner)) @ up


def _logits_after(
    config: DFlashConfig, heads: Heads, logits: np.ndarray, states: np.ndarray, tokens: list[int]
) -> np.ndarray:
    """The logits of the slot after a root and a path, by the published formulas."""
    slot = len(tokens) - 1
    if isinstance(heads, Markov):
        return logits[slot] + _markov(heads, tokens, states)
    if isinstance(heads, Domino):
        return logits[slot] + (_domino(heads, tokens, states) if slot >= config.num_uncorrected else 0)
    tables = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(heads)]
    kept = np.argsort(-logits[slot])[: SELECTOR["selector_top_k"]]
    out = np.full(VOCAB, -np.inf)
    out[kept] = logits[slot][kept] + tables[1][kept] @ (tables[0][tokens[-1]] * (states[slot] @ tables[2]))
    return out


def _log_confidence(heads: Heads, state: np.ndarray, previous: int) -> float:
    assert isinstance(heads, Markov)
    sure = heads.confidence
    assert sure is not None
    assert sure.bias is not None
    inputs = np.concatenate([state, heads.previous[previous]])
    return -float(np.log1p(np.exp(-(inputs @ np.asarray(sure.weight)[:, 0] + np.asarray(sure.bias)[0]))))


def _expected(
    config: DFlashConfig,
    heads: Heads,
    logits: np.ndarray,
    states: np.ndarray,
    root: int,
    num_nodes: int,
    noise: np.ndarray | None = None,  # [slot, vocab]
) -> dict[tuple[int, ...], float]:
    """The best of all paths below a root of each node's best few tokens, with their scores. Where it is sampled, the
    target's noise is in every rank."""
    found: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 0.0}
    for slot in range(DEPTH):
        children: dict[tuple[int, ...], float] = {}
        for path, score in level.items():
            previous = path[-1] if path else root
            ranked = _logits_after(config, heads, logits, states, [root, *path])
            log_q = log_softmax(ranked if noise is None else ranked / HEAT + noise[slot])
            if config.confidence:
                score += _log_confidence(heads, states[slot], previous)
            for token in np.argsort(-log_q)[:TOP_K]:
                children[(*path, int(token))] = score + log_q[token]
        level = children
        found |= children
    return dict(sorted(found.items(), key=lambda item: -item[1])[:num_nodes])


@pytest.mark.parametrize("temperature", [0.0, HEAT])
@pytest.mark.parametrize("num_nodes", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_node_has_candidates_of_its_own(kind: str, num_nodes: int, temperature: float) -> None:
    """Rows with the same slots and other roots grow other trees; a head that is less sure of a row's later slots grows
    it wider and less deep."""
    config = dataclasses.replace(DFlashConfig(BACKBONE, (0,), VOCAB, DEPTH + 1, 0, (False,)), **KINDS[kind])
    specs = {"dspark": markov_spec, "dflash2": selector_spec, "domino": domino_spec}
    spec = specs[config.name](config)
    rng = np.random.default_rng(3)
    heads = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32),
        init_params(spec, jax.random.key(0), "float32"),
    )
    logits = rng.standard_normal((BATCH, DEPTH, VOCAB)).astype(np.float32)
    states = rng.standard_normal((BATCH, DEPTH, WIDTH)).astype(np.float32)
    logits[1], states[1] = logits[0], states[0]
    rows = _rows(temperature)
    noise = [None] * BATCH
    if temperature:
        at = jnp.arange(1, DEPTH + 1, dtype=jnp.int32)[None]  # the root stands at position 0
        noise = list(np.asarray(sampling.noise(rows, at, jnp.arange(VOCAB, dtype=jnp.uint32)), np.float64))

    def paths(heads: Heads) -> list[list[tuple[tuple[int, ...], float]]]:
        proposal, _ = jax.device_get(_grown(num_nodes, config, heads, jnp.asarray(logits), jnp.asarray(states), rows))
        out = []
        for row in range(BATCH):
            found: list[tuple[int, ...]] = [()]
            for node in range(1, num_nodes + 1):
                found.append((*found[proposal.parents[row, node]], int(proposal.token_ids[row, node])))
            out.append(sorted(zip(found[1:], proposal.scores[row, 1:].tolist(), strict=True)))
        return out

    for row, listed in enumerate(paths(heads)):
        best = _expected(config, heads, logits[row], states[row], int(ROOTS[row]), num_nodes, noise[row])
        expected = sorted(best.items())
        assert [path for path, _ in listed] == [path for path, _ in expected]
        off = tolerance(lambda heads, row=row: np.sort([score for _, score in paths(heads)[row]]), heads)
        assert_same(np.array([score for _, score in listed]), np.array([score for _, score in expected]), off)
    trees = [[path for path, _ in listed] for listed in paths(heads)]
    assert trees[0] != trees[1], "the same slots after another token"
    if config.confidence and num_nodes == 2 + 4:
        assert isinstance(heads, Markov)
        assert heads.confidence is not None
        unsure = dataclasses.replace(heads.confidence, bias=jnp.full(1, -30.0))  # a factor for every slot
        shallow = paths(dataclasses.replace(heads, confidence=unsure))
        assert max(len(path) for listed in shallow for path, _ in listed) < DEPTH


def test_it_says_how_sure_it_is_of_each_depth() -> None:
    """After the best node above, row by row; a head without such an output says nothing."""
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((BATCH, DEPTH, VOCAB)).astype(np.float32)
    states = rng.standard_normal((BATCH, DEPTH, WIDTH)).astype(np.float32)
    for kind in ("markov", "confidence"):
        config = dataclasses.replace(DFlashConfig(BACKBONE, (0,), VOCAB, DEPTH + 1, 0, (False,)), **KINDS[kind])
        spec = init_params(markov_spec(config), jax.random.key(0), "float32")
        heads = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), spec)

        def said(heads: Markov, config: DFlashConfig = config) -> np.ndarray | None:
            _, confidence = jax.device_get(
                _grown(SIZES[0], config, heads, jnp.asarray(logits), jnp.asarray(states), _rows(0.0))
            )
            return confidence

        found = said(heads)
        if kind == "markov":
            assert found is None
            continue
        assert found is not None
        expected = np.zeros((BATCH, DEPTH))
        for row, root in enumerate(ROOTS.tolist()):
            paths = _expected(config, heads, logits[row], states[row], root, 2 + 4 + 8)
            for depth in range(DEPTH):
                level = {path: score for path, score in paths.items() if len(path) == depth}
                best = max(level, key=level.__getitem__) if level else ()
                expected[row, depth] = np.exp(_log_confidence(heads, states[row, depth], best[-1] if best else root))
        assert_same(found, expected, tolerance(said, heads))
