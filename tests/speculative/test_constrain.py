"""What options do to the logits, against vLLM's order of them for one node at a time; and the reported logprobs.

The twin below follows `Sampler.forward` of vLLM 0.11 (v1/sample/sampler.py): the grammar's bitmask, allowed ids, bad
words, min_tokens, logit bias, then repetition, frequency and presence penalties. It knows the text before a node and
nothing of trees.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import UNIT, assert_same, assert_within, tolerance
from scipy.special import log_softmax

from specserve.serve.engine.options import sampler_rows, token_rows
from specserve.serve.requests.request import Request, SamplingParams
from specserve.speculative import sampling
from specserve.speculative.sampling import MAX_BAD_TOKENS, MAX_LOGPROBS, Nodes, SamplerRows, TokenRows
from specserve.speculative.tree import ancestor_mask

VOCAB, NODES, BATCH = 11, 6, 4  # a vocabulary that is no multiple of 8: bits are padded
PLAIN_ROW = 1  # a greedy sequence without options


@dataclasses.dataclass(frozen=True)
class Asked:
    """One sequence of a batch, as a client would describe it, and the tree below its last token."""

    prompt: list[int]
    output: list[int]
    params: SamplingParams
    stop_ids: list[int]
    bad: list[tuple[int, ...]]
    parents: list[int]
    node_ids: list[int]  # of the proposed nodes; node 0 is the last token of the text

    def path(self, node: int) -> list[int]:
        """The proposed tokens down to a node."""
        return [*self.path(self.parents[node]), self.node_ids[node - 1]] if node else []


def vllm_logits(
    logits: np.ndarray,  # [vocab]
    sequence: Asked,
    output: list[int],  # the answer before the drawn token
    grammar: np.ndarray,  # [vocab] bool
) -> np.ndarray:
    params, logits = sequence.params, logits.astype(np.float64)
    logits[~grammar] = -np.inf
    if params.allowed_token_ids is not None:
        logits[[t for t in range(VOCAB) if t not in params.allowed_token_ids]] = -np.inf
    for word in sequence.bad:
        if len(word) - 1 <= len(output) and [*word[:-1]] == output[len(output) - len(word) + 1 :]:
            logits[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        logits[sequence.stop_ids] = -np.inf
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in {*sequence.prompt, *output}:
        repetition = params.repetition_penalty
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in output:
        logits[token] -= params.frequency_penalty
    for token in {*output}:
        logits[token] -= params.presence_penalty
    return logits


def _sequence(rng: np.random.Generator, *, has_options: bool) -> Asked:
    """Few tokens, so that words match, and options each of which is there half of the time."""

    def tokens(low: int, high: int) -> list[int]:
        return rng.integers(0, 5, rng.integers(low, high)).tolist()

    prompt, output, node_ids = tokens(1, 6), tokens(0, 20), tokens(NODES - 1, NODES)
    parents = [0] + [int(rng.integers(0, node)) for node in range(1, NODES)]
    tree = Asked(prompt, output, SamplingParams(temperature=0.0), [], [], parents, node_ids)
    if not has_options:
        return tree

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.5 else otherwise

    def word() -> tuple[int, ...]:
        """What stands before some node, in the answer or the prompt as well, and a token that would complete it."""
        text = [*prompt, *output, *tree.path(int(rng.integers(0, NODES)))]
        length = int(rng.integers(0, min(MAX_BAD_TOKENS, len(text) + 1)))
        return *text[len(text) - length :], int(rng.integers(0, VOCAB))

    params = SamplingParams(
        temperature=maybe(0.0, 1.0),
        min_tokens=maybe(len(output) + int(rng.integers(0, 4)), 0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        logit_bias=maybe({int(t): float(rng.uniform(-9, 9)) for t in rng.choice(VOCAB, 3, replace=False)}, {}),
        allowed_token_ids=maybe(rng.choice(VOCAB, 6, replace=False).tolist(), None),
        bad_words=maybe(["?"], []),
    )
    bad = [word() for _ in range(6)] if params.bad_words else []
    return dataclasses.replace(tree, params=params, stop_ids=maybe([1, 7], [2]), bad=bad)


def _stack(rows: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *x: jnp.concatenate([jnp.asarray(one) for one in x]), *rows)


def _arrays(sequences: Sequence[Asked]) -> tuple[SamplerRows, TokenRows, Nodes, jax.Array]:
    """What the engine and the step make of them."""
    rows, tokens, recent, positions = [], [], [], []
    parents = jnp.asarray([sequence.parents for sequence in sequences], jnp.int32)
    depths = np.array([[len(sequence.path(node)) for node in range(NODES)] for sequence in sequences])
    for sequence, own in zip(sequences, depths, strict=True):
        request = Request("x", tuple(sequence.prompt), sequence.params, 99, 0, lambda _delta: None)
        own_tokens = token_rows(request, sequence.output, sequence.stop_ids, sequence.bad, VOCAB)
        rows.append(sampler_rows(sequence.params, 0, len(sequence.prompt)))
        tokens.append(own_tokens or TokenRows.zeros(1, VOCAB))
        last = [*sequence.output[::-1], *[-1] * MAX_BAD_TOKENS]
        recent.append(last[: MAX_BAD_TOKENS - 1])
        positions.append(len(sequence.prompt) + len(sequence.output) + own)
    node_ids = [[[*s.prompt, *s.output][-1], *s.node_ids] for s in sequences]
    nodes = Nodes(
        token_ids=jnp.asarray(node_ids, jnp.int32),
        parents=parents,
        depths=jnp.asarray(depths, jnp.int32),
        ancestors=ancestor_mask(parents, NODES),
        recent=jnp.asarray(recent, jnp.int32),
    )
    return _stack(rows), _stack(tokens), nodes, jnp.asarray(np.array(positions), jnp.int32)


_constrain = jax.jit(sampling.constrain)


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32 - 1), has_grammar=st.booleans())
def test_options_act_in_vllms_order_at_every_node(seed: int, has_grammar: bool) -> None:
    rng = np.random.default_rng(seed)
    sequences = [_sequence(rng, has_options=row != PLAIN_ROW) for row in range(BATCH)]
    logits = rng.standard_normal((BATCH, NODES, VOCAB)).astype(np.float32) * 3
    grammar = rng.random((BATCH, NODES, VOCAB)) < (0.7 if has_grammar else 1.1)
    grammar[PLAIN_ROW] = True
    allowed = jnp.asarray(np.packbits(grammar, axis=-1, bitorder="little")) if has_grammar else None
    rows, tokens, nodes, positions = _arrays(sequences)
    got = np.asarray(_constrain(rows, tokens, nodes, jnp.asarray(logits), positions, allowed))
    for row, sequence in enumerate(sequences):
        for node in range(NODES):
            output = [*sequence.output, *sequence.path(node)]
            expected = vllm_logits(logits[row, node], sequence, output, grammar[row, node])
            # options are rounded, multiplied and added in three sums, of which none is larger than all of it
            size = 2 * np.abs(logits).max() + 9 + 2 * len(output) + 2
            assert_within(got[row, node], expected, 5 * UNIT * size, f"row {row}, node {node}")
    np.testing.assert_array_equal(got[PLAIN_ROW], logits[PLAIN_ROW], "a row without options is left as it is")


@pytest.mark.parametrize("vocab", [7, 50])
def test_logprobs_are_the_targets_own(rng: np.random.Generator, vocab: int) -> None:
    """Of the chosen token and of the most likely ones, before any option; nothing where nobody asks."""
    logits = rng.standard_normal((3, 2, vocab)).astype(np.float32) * 4
    token_ids = rng.integers(0, vocab, (3, 2))
    asked = dataclasses.replace(SamplerRows.greedy(3), has_logprobs=jnp.asarray([False, True, False]))

    def measured(logits: jax.Array) -> sampling.Logprobs:
        return sampling.logprobs(asked, logits, jnp.asarray(token_ids, jnp.int32))

    found = measured(jnp.asarray(logits))
    expected = log_softmax(logits.astype(np.float64), axis=-1)
    order = np.argsort(-expected, axis=-1)[..., :MAX_LOGPROBS]
    chosen = np.take_along_axis(expected, token_ids[..., None], -1)[..., 0]
    all_expected = sampling.Logprobs(chosen, np.take_along_axis(expected, order, -1), order)  # type: ignore[arg-type]
    assert_same(found, all_expected, tolerance(measured, jnp.asarray(logits)))
    none = sampling.logprobs(SamplerRows.greedy(3), jnp.asarray(logits), jnp.asarray(token_ids, jnp.int32))
    assert none.top.shape == found.top.shape
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(none))
