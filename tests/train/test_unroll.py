"""Losses, the masks of the rollout, and the law that training unrolls the head as serving does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy.special import log_softmax

from specserve.checkpoints.head import Head
from specserve.checkpoints.load import Target
from specserve.models.cache import Prefix
from specserve.models.draft import draft_logits, token_embedding
from specserve.models.target import forward
from specserve.speculative import step
from specserve.speculative.propose import FIRST_ENTRY, Draft, Pending, _Expander, _Level, catch_up
from specserve.speculative.sampling import SamplerRows
from specserve.speculative.step import StepConfig, Weights
from specserve.speculative.vocab import DraftVocab
from specserve.train.losses import masked_mean, soft_cross_entropy
from specserve.train.step import LossConfig, teach
from specserve.train.unroll import Rows, Teacher, rollout_loss, rollout_states, shift, slot_weights

ROLLOUT = 3


def _rows(documents: list[list[int]], masks: list[list[bool]], seq: int) -> Rows:
    """One row with these documents, one after the other."""
    token_ids, mask = np.zeros((1, seq), np.int32), np.zeros((1, seq), bool)
    document_ids, positions = np.zeros((1, seq), np.int32), np.zeros((1, seq), np.int32)
    at = 0
    for i, (document, own_mask) in enumerate(zip(documents, masks, strict=True), start=1):
        span = slice(at, at + len(document))
        token_ids[0, span], mask[0, span] = document, own_mask
        document_ids[0, span], positions[0, span] = i, range(len(document))
        at += len(document)
    return Rows(*map(jnp.asarray, (token_ids, mask, document_ids, positions)))


def test_losses_equal_numpy(rng: np.random.Generator) -> None:
    logits = rng.standard_normal((4, 9)).astype(np.float32) * 5
    probs = rng.dirichlet(np.ones(9), 4).astype(np.float32)
    expected = -(probs * log_softmax(logits.astype(np.float64), axis=-1)).sum(-1)
    np.testing.assert_allclose(soft_cross_entropy(jnp.asarray(probs), jnp.asarray(logits)), expected, rtol=1e-5)
    weights = np.array([1, 0, 1, 0], np.float32)
    mean = masked_mean(jnp.asarray(expected, jnp.float32), jnp.asarray(weights))
    np.testing.assert_allclose(mean, expected[[0, 2]].mean(), rtol=1e-5)
    assert masked_mean(jnp.ones(3), jnp.zeros(3)) == 0


def test_the_loss_mask_moves_with_the_step(rng: np.random.Generator) -> None:
    """Slot t of step k learns token t + 2 + k, if the assistant says it and it is of the slot's own document."""
    seq = 20
    lengths = (7, 9)
    rows = _rows([[1] * n for n in lengths], [(rng.random(n) < 0.6).tolist() for n in lengths], seq)
    mask, document_ids = np.asarray(rows.loss_mask)[0], np.asarray(rows.document_ids)[0]
    for k in range(4):
        expected = [
            t + 2 + k < seq and document_ids[t] > 0 and document_ids[t + 2 + k] == document_ids[t] and mask[t + 2 + k]
            for t in range(seq)
        ]
        np.testing.assert_array_equal(slot_weights(rows, k)[0], np.array(expected, np.float32))
    np.testing.assert_array_equal(shift(jnp.arange(5)[None], 2)[0], [2, 3, 4, 0, 0])


@pytest.mark.parametrize(
    "flags", [{}, {"norm_output": True, "fc_norm": True, "norm_before_residual": True, "norm_before_fc": True}]
)
def test_rollout_step_k_equals_servings_kth_draft_step(
    tiny_target: Target, rng: np.random.Generator, flags: dict[str, bool]
) -> None:
    """Law 4. Serving: prefill, catch up with the root, then a chain that is forced to follow the text."""
    head = tiny.random_head(tiny_target.config, seed=2, **flags)
    n, config = 24, head.config
    text = rng.integers(0, 64, n).tolist()
    embedding = token_embedding(head.params, tiny_target.params.embedding)
    rows = _rows([text], [[True] * n], n)
    taps = config.aux_layers
    out = forward(
        tiny_target.params, tiny_target.config, rows.token_ids, rows.position_ids, tiny.causal(n), aux_layers=taps
    )
    assert out.aux_hidden_states is not None
    states = rollout_states(head.params, config, embedding, rows, out.aux_hidden_states, ROLLOUT)
    trained = [draft_logits(head.params, config, state)[0] for state in states]

    weights = Weights(tiny_target.params, Draft(head.params, DraftVocab(jnp.asarray(head.target_ids)), embedding))
    step_config = StepConfig(tiny_target.config, config, ROLLOUT)
    greedy = SamplerRows.greedy(1)

    @jax.jit
    def serve(prompt: jax.Array, length: jax.Array, ahead: jax.Array) -> list[jax.Array]:
        """The draft's logits at the root, ahead[0], and after each of ahead[1:]."""
        state = step.init_state(step_config, num_slots=1, num_pages=8, page_size=4, max_pages=8)
        state = dataclasses.replace(
            state, page_table=jnp.arange(8, dtype=jnp.int32)[None], history=state.history.at[0, :n].set(prompt)
        )
        slots, is_last = jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
        state, _ = step.prefill(weights, step_config, state, slots, length[None], is_last, n, 8)
        assert state.pending is not None
        pending = Pending(ahead[None, :1], state.pending.aux_hidden_states[:, :1], state.pending.count)
        assert state.draft_cache is not None
        assert weights.draft is not None
        pages, hidden = catch_up(
            weights.draft, config, state.draft_cache, state.page_table, state.page_table, state.seq_lens, pending
        )
        prefix = Prefix(state.page_table, state.seq_lens + 1, FIRST_ENTRY)
        expand = _Expander(weights.draft, config, pages, prefix, greedy)
        kv, logits = expand.no_entries(1), [draft_logits(head.params, config, hidden)[0, 0]]
        for depth in range(1, ROLLOUT):
            level = _Level(ahead[None, depth : depth + 1], hidden, kv, jnp.ones((1, 1, depth - 1), bool))
            hidden, kv = expand.run(level, depth)
            logits.append(draft_logits(head.params, config, hidden)[0, 0])
        return logits

    for t in (0, 1, 6, 7, 8, 15, n - ROLLOUT - 1):  # the slot: its feature is the prompt's last
        prompt = np.zeros(n, np.int32)
        prompt[: t + 1] = text[: t + 1]
        ahead = jnp.asarray(text[t + 1 : t + 1 + ROLLOUT], jnp.int32)
        for k, logits in enumerate(serve(jnp.asarray(prompt), jnp.int32(t + 1), ahead)):
            np.testing.assert_allclose(trained[k][t], logits, atol=1e-4, err_msg=f"slot {t}, step {k}")


def test_packed_documents_do_not_leak(tiny_target: Target, tiny_head: Head, rng: np.random.Generator) -> None:
    """The loss of a row is the sum of its documents' losses, each in a row of its own."""
    seq, lengths = 40, (9, 17, 11)
    documents = [rng.integers(0, 64, n).tolist() for n in lengths]
    masks = [(rng.random(n) < 0.7).tolist() for n in lengths]
    config = LossConfig(tiny_target.config, tiny_head.config, ROLLOUT, 0.8)
    vocab = DraftVocab(jnp.asarray(tiny_head.target_ids))

    @jax.jit
    def losses(rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Per rollout step: summed loss and number of slots; and the loss that training sees."""
        aux, teacher = teach(tiny_target.params, config, vocab, rows)
        embedding = tiny_target.params.embedding
        loss, metrics = rollout_loss(
            tiny_head.params, tiny_head.config, embedding, rows, aux, teacher, length=ROLLOUT, decay=0.8
        )
        counts = jnp.stack([jnp.sum(_known(rows, teacher, k)) for k in range(ROLLOUT)])
        return metrics.loss * counts, counts, loss

    summed, counts, loss = losses(_rows(documents, masks, seq))
    alone = [losses(_rows([document], [mask], seq)) for document, mask in zip(documents, masks, strict=True)]
    assert counts.min() > 0
    np.testing.assert_array_equal(counts, sum(np.asarray(one[1]) for one in alone))
    np.testing.assert_allclose(summed, sum(np.asarray(one[0]) for one in alone), rtol=1e-5)
    np.testing.assert_allclose(loss, sum(0.8**k * summed[k] / counts[k] for k in range(ROLLOUT)), rtol=1e-5)


def _known(rows: Rows, teacher: Teacher, k: int) -> jax.Array:
    """The slots that bear loss: those whose label, the target's best token, is in the draft vocabulary."""
    in_vocab = shift(teacher.best_draft_id + 1, 1 + k) > 0
    return slot_weights(rows, k) * in_vocab.astype(jnp.float32)


def test_teacher_is_the_targets_distribution_over_the_draft_vocabulary(
    tiny_target: Target, tiny_head: Head, rng: np.random.Generator
) -> None:
    text = rng.integers(0, 64, 12).tolist()
    config = LossConfig(tiny_target.config, tiny_head.config, ROLLOUT, 0.8)
    target_ids = tiny_head.target_ids
    rows = _rows([text], [[True] * 12], 12)
    _, teacher = teach(tiny_target.params, config, DraftVocab(jnp.asarray(target_ids)), rows)
    logits = tiny.target_logits(tiny_target, text)
    best = logits.argmax(-1)
    expected = [int(np.flatnonzero(target_ids == token)[0]) if token in target_ids else -1 for token in best]
    assert teacher.best_draft_id[0].tolist() == expected
    np.testing.assert_allclose(teacher.probs[0], np.exp(log_softmax(logits[:, target_ids], axis=-1)), atol=1e-5)
