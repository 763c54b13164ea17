"""Law 2: what speculation emits is distributed as the target says, not as the draft would like."""

import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy import stats

from specserve.checkpoints.load import load_target
from specserve.drafters.speculation import parse_speculation
from specserve.speculative import slot_state, step
from specserve.speculative.drafter import Weights
from specserve.speculative.sampling import SamplerRows
from specserve.speculative.slot_state import SlotState, StepConfig, StepResult

VOCAB, NUM_EMITTED = 8, 3
NUM_SLOTS, NUM_ROUNDS = 4096, 5  # 20,480 draws
PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize(
    ("speculation", "temperature", "top_k"),
    [("tree:2x2x4", 1.0, 0), pytest.param("chain:2", 1.4, 5, marks=pytest.mark.slow)],
)
def test_emitted_tokens_have_the_targets_distribution(
    tmp_path: Path, speculation: str, temperature: float, top_k: int
) -> None:
    """Chi-square of the first three tokens together: the first comes from prefill, the others from speculation."""
    tiny.write_target(tmp_path, tiny.TARGET | {"vocab_size": VOCAB, "num_hidden_layers": 2}, seed=3)
    target = load_target(tmp_path, dtype="float32")
    head = tiny.random_head(target.config, seed=4)  # knows 6 of the 8 tokens
    tree = parse_speculation(speculation)
    assert tree is not None
    config = StepConfig(target.config, head.drafter, tree.depth)
    weights = Weights(target.params, head.weights())
    slots = jnp.arange(NUM_SLOTS, dtype=jnp.int32)

    @jax.jit
    def begin(seeds: jax.Array) -> tuple[SlotState, StepResult]:
        state = slot_state.init_state(config, num_slots=NUM_SLOTS, num_pages=NUM_SLOTS * 2, page_size=8, max_pages=2)
        rows = dataclasses.replace(
            SamplerRows.greedy(NUM_SLOTS),
            temperature=jnp.full(NUM_SLOTS, temperature, jnp.float32),
            top_k=jnp.full(NUM_SLOTS, top_k, jnp.int32),
            seed=jnp.stack([seeds, jnp.zeros_like(seeds)], axis=1),
        )
        table = jnp.arange(NUM_SLOTS * 2, dtype=jnp.int32).reshape(NUM_SLOTS, 2)
        history = state.history.at[:, : len(PROMPT)].set(jnp.asarray(PROMPT, jnp.int32))
        state = dataclasses.replace(state, page_table=table, rows=rows, history=history)
        lens, is_last = jnp.full(NUM_SLOTS, len(PROMPT), jnp.int32), jnp.ones(NUM_SLOTS, bool)
        prompts = slot_state.PromptChunks(slots, lens, is_last)
        return step.prefill(config, weights, state, prompts, chunk=len(PROMPT), width=2)

    @jax.jit
    def speculate(state: SlotState) -> tuple[SlotState, StepResult]:
        return step.speculate(config, weights, state, slots, tree=tree, width=2)

    def run(seeds: jax.Array) -> list[StepResult]:
        state, first = begin(seeds)
        results = [first]
        for _ in range(NUM_EMITTED - 1):
            state, result = speculate(state)
            results.append(result)
        return results

    counts, accepted = np.zeros((VOCAB,) * NUM_EMITTED, np.int64), 0
    for i in range(NUM_ROUNDS):
        results = run(jnp.arange(NUM_SLOTS, dtype=jnp.uint32) + jnp.uint32(i * NUM_SLOTS))
        emitted = np.full((NUM_SLOTS, NUM_EMITTED), -1)
        num = np.zeros(NUM_SLOTS, np.int64)
        for result in jax.device_get(results):
            n_accepted, token_ids = result.counts[:, 0], result.counts[:, 2:]
            accepted += int(n_accepted.sum())
            for depth in range(token_ids.shape[1]):
                here = (depth <= n_accepted) & (num < NUM_EMITTED)
                emitted[here, num[here]] = token_ids[here, depth]
                num[here] += 1
        np.add.at(counts, tuple(emitted.T), 1)
    assert counts.sum() == NUM_SLOTS * NUM_ROUNDS >= 20_000
    assert accepted > NUM_SLOTS, "little was accepted, so little was tested"

    @functools.cache
    def probs(prefix: tuple[int, ...]) -> np.ndarray:
        logits = tiny.target_logits(target, [*PROMPT, *prefix])[-1].astype(np.float64) / temperature
        if top_k:
            logits[logits < np.sort(logits)[-top_k]] = -np.inf
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    expected = np.ones(counts.shape)
    for tokens in itertools.product(range(VOCAB), repeat=NUM_EMITTED):
        for i, token in enumerate(tokens):
            if expected[tokens] == 0:  # a prefix that cannot be has no distribution of its own
                break
            expected[tokens] *= probs(tokens[:i])[token]
    assert not counts[expected == 0].any(), "a token that top-k drops was drawn"
    expected *= counts.sum()
    common = expected >= 5  # the rare ones are one cell together
    observed = np.append(counts[common], counts[~common].sum())
    expected_counts = np.append(expected[common], expected[~common].sum())
    statistic = ((observed - expected_counts) ** 2 / np.maximum(expected_counts, 1e-9)).sum()
    p_value = stats.chi2.sf(statistic, len(observed) - 1)
    # seeds are fixed: this either holds or does not; one seed in a thousand would fail a right sampler
    assert p_value > 1e-3, f"chi-square {statistic:.1f} over {len(observed)} cells, p = {p_value:.2e}"
