"""Losses, the masks of the rollout, and the law that training unrolls the head as serving does."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import Mesh
from naive_training import naive_loss
from rounding import assert_same, tolerance
from scipy.special import log_softmax

from specserve.checkpoints.load import Target, load_target
from specserve.drafters.eagle3.drafter import _Expander, _Level, consume
from specserve.drafters.eagle3.model import Eagle3Params, draft_logits, token_embedding
from specserve.drafters.eagle3.rollout import rollout_states
from specserve.drafters.follow import FIRST_ENTRY, Pending
from specserve.drafters.interface import Head
from specserve.drafters.layers import windowed
from specserve.drafters.learning import DraftTargets, Rollout, Rows, all_weights, loss_positions, shift
from specserve.mesh import make_mesh, on_mesh, whole
from specserve.models.cache import Prefix
from specserve.models.target import TargetParams, forward
from specserve.speculative import slot_state, step
from specserve.speculative.drafter import Weights
from specserve.speculative.sampling import SamplerRows
from specserve.speculative.slot_state import StepConfig
from specserve.speculative.vocab import DraftVocab
from specserve.train import chunked_loss
from specserve.train.chunked_loss import RolloutMetrics, Sums
from specserve.train.losses import LossName, make_loss
from specserve.train.step import LossConfig, loss_and_gradient, place_rows, rollout_loss, teach

ROLLOUT = 3
SHORT = 2  # a step after the target's text and one after the head's own: all that gradients distinguish


@pytest.fixture(scope="module")
def head(shallow_target: Target) -> Head:
    return tiny.random_head(shallow_target.config, seed=1)


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


def test_the_loss_mask_moves_with_the_step(rng: np.random.Generator) -> None:
    """Position t of step k learns token t + 2 + k, if the assistant says it and it is of the same document."""
    seq = 20
    lengths = (7, 9)
    rows = _rows([[1] * n for n in lengths], [(rng.random(n) < 0.6).tolist() for n in lengths], seq)
    mask, document_ids = np.asarray(rows.loss_mask)[0], np.asarray(rows.document_ids)[0]
    for k in range(4):
        expected = [
            t + 2 + k < seq and document_ids[t] > 0 and document_ids[t + 2 + k] == document_ids[t] and mask[t + 2 + k]
            for t in range(seq)
        ]
        np.testing.assert_array_equal(loss_positions(rows, k)[0], np.array(expected, np.float32))
    np.testing.assert_array_equal(shift(jnp.arange(5)[None], 2)[0], [2, 3, 4, 0, 0])
    np.testing.assert_array_equal(shift(jnp.arange(5)[None], -2)[0], [0, 0, 0, 1, 2])


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"norm_output": True, "fc_norm": True, "norm_before_residual": True, "norm_before_fc": True},
        {"num_layers": 2, "norm_output": True, "d_model": 24, "has_embedding": True},
        {"num_layers": 2, "layers": windowed((3, 0))},
        {"layers": windowed((5,))},
        {"num_layers": 2, **tiny.LATENTS},
        tiny.GEMMA,
    ],
)
def test_rollout_step_k_equals_servings_kth_draft_step(
    shallow_target: Target, rng: np.random.Generator, flags: dict[str, Any]
) -> None:
    """Law 4. Serving: prefill, catch up with the root, then a chain that is forced to follow the text."""
    head = tiny.random_head(shallow_target.config, seed=2, **flags)
    n, config = 24, head.drafter.config
    text = rng.integers(0, 64, n).tolist()
    embedding = token_embedding(head.params, shallow_target.params.embedding)
    rows = _rows([text], [[True] * n], n)
    taps = config.aux_layers

    @jax.jit
    def train(target: TargetParams, params: Eagle3Params, embedding: jax.Array) -> list[jax.Array]:
        out = forward(target, shallow_target.config, rows.token_ids, rows.position_ids, tiny.causal(n), aux_layers=taps)
        assert out.aux_hidden_states is not None
        states = rollout_states(params, config, embedding, rows, out.aux_hidden_states, Rollout(ROLLOUT, True))
        return [draft_logits(params.output, config, state)[0] for state in states]

    args = shallow_target.params, head.params, embedding
    trained, off = train(*args), tolerance(train, *args)

    weights = Weights(shallow_target.params, head.weights())
    draft = head.drafter.ready(weights)
    step_config = StepConfig(shallow_target.config, head.drafter, ROLLOUT)
    greedy = SamplerRows.greedy(1)

    @jax.jit
    def serve(prompt: jax.Array, length: jax.Array, ahead: jax.Array) -> list[jax.Array]:
        """The draft's logits at the root, ahead[0], and after each of ahead[1:]."""
        state = slot_state.init_state(step_config, num_slots=1, num_pages=8, page_size=4, max_pages=8)
        state = dataclasses.replace(
            state, page_table=jnp.arange(8, dtype=jnp.int32)[None], history=state.history.at[0, :n].set(prompt)
        )
        chunks = slot_state.PromptChunks(jnp.zeros(1, jnp.int32), length[None], jnp.ones(1, bool))
        state, _ = step.prefill(step_config, weights, state, chunks, chunk=n, width=8)
        assert state.draft is not None
        left, table = state.draft.pending, state.page_table
        pending = Pending(ahead[None, :1], left.aux_hidden_states[:, :1], left.count)
        pages, hidden = consume(draft, config, state.draft.cache, (table, table), state.seq_lens, pending)
        prefix = Prefix(state.page_table, state.seq_lens + 1, FIRST_ENTRY)
        expand = _Expander(draft, config, pages, prefix, greedy)
        level, logits = _Level.of_root(config, hidden), [draft_logits(head.params.output, config, hidden)[0, 0]]
        for depth in range(1, ROLLOUT):
            level = expand.descend(level, jnp.zeros((1, 1), jnp.int32), ahead[None, depth : depth + 1], depth)
            logits.append(draft_logits(head.params.output, config, level.hidden)[0, 0])
        return logits

    for t in (0, 1, 6, 7, 8, 15, n - ROLLOUT - 1):  # the position: its feature is the prompt's last
        prompt = np.zeros(n, np.int32)
        prompt[: t + 1] = text[: t + 1]
        ahead = jnp.asarray(text[t + 1 : t + 1 + ROLLOUT], jnp.int32)
        for k, logits in enumerate(serve(jnp.asarray(prompt), jnp.int32(t + 1), ahead)):
            assert_same(trained[k][t], logits, off[k][t], f"position {t}, step {k}")


def _config(target: Target, head: Head, **changes: Any) -> LossConfig:
    return dataclasses.replace(LossConfig(target.config, head.drafter, Rollout(SHORT, True), 0.8), **changes)


def _ragged_rows(rng: np.random.Generator, lengths: tuple[int, ...], seq: int) -> tuple[Rows, list[Rows]]:
    """Documents in one row, and each in a row of its own."""
    documents = [rng.integers(0, 64, n).tolist() for n in lengths]
    masks = [(rng.random(n) < 0.7).tolist() for n in lengths]
    alone = [_rows([document], [mask], seq) for document, mask in zip(documents, masks, strict=True)]
    return _rows(documents, masks, seq), alone


def test_packed_documents_do_not_leak(shallow_target: Target, head: Head, rng: np.random.Generator) -> None:
    """The loss of a row is the sum of its documents' losses, each in a row of its own."""
    config, vocab = (
        _config(shallow_target, head, rollout=Rollout(ROLLOUT, True)),
        DraftVocab(jnp.asarray(head.target_ids)),
    )
    packed, alone = _ragged_rows(rng, (9, 17, 11), 40)

    @jax.jit
    def losses(params: Eagle3Params, target: TargetParams, rows: Rows) -> tuple[jax.Array, Sums]:
        args = params, config, target, vocab, rows, teach(target, config, rows)
        return rollout_loss(*args, jnp.ones(ROLLOUT))

    args = head.params, shallow_target.params
    (loss, sums), off = losses(*args, packed), tolerance(losses, *args, packed)
    each = [losses(*args, rows) for rows in alone]
    assert sums.n_known.min() > 0
    assert_same((loss, sums), jax.tree.map(lambda *parts: sum(map(np.asarray, parts)), *each), off)
    assert_same(loss, sum(0.8**k * sums.loss[k] for k in range(ROLLOUT)), off[0])


@pytest.mark.parametrize(("name", "seq"), [("ce", 40), ("lk-hybrid", 41)])  # a prime: the last chunk is filled up
def test_the_chunked_loss_and_its_gradient_equal_the_naive_ones(
    shallow_target: Target,
    head: Head,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    name: LossName,
    seq: int,
) -> None:
    """The naive one: all logits of the target, all logits of every rollout step, and JAX's own gradient."""
    monkeypatch.setitem(chunked_loss.LOGITS_AT_ONCE, "cpu", SHORT * 48 * 5)
    config, vocab = _config(shallow_target, head, loss=name), DraftVocab(jnp.asarray(head.target_ids))
    rows, _ = _ragged_rows(rng, (9, 17, 11), seq)

    def chunked(params: Eagle3Params, target: TargetParams) -> tuple[jax.Array, RolloutMetrics]:
        n_positions = jnp.sum(all_weights(rows, SHORT), axis=(1, 2))
        loss, sums = rollout_loss(params, config, target, vocab, rows, teach(target, config, rows), n_positions)
        return loss, RolloutMetrics.of(sums)

    def naive(params: Eagle3Params, target: TargetParams) -> tuple[jax.Array, RolloutMetrics]:
        return naive_loss(params, config, target, vocab, rows)

    mine, other = (jax.jit(jax.value_and_grad(form, has_aux=True)) for form in (chunked, naive))
    args = head.params, shallow_target.params
    expected = other(*args)
    assert_same(mine(*args), expected, tolerance(other, *args))  # so no gradient is nothing but noise
    assert all(np.any(leaf) for leaf in jax.tree.leaves(expected[1])), "nothing was tested"


@pytest.mark.parametrize("density", [0.4, 0.0])
def test_positions_that_bear_no_loss_are_not_computed(
    shallow_target: Target, head: Head, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, density: float
) -> None:
    """Whatever stands there, numbers or none, loss and gradient are the same; and of no position at all they are 0."""
    monkeypatch.setitem(chunked_loss.LOGITS_AT_ONCE, "cpu", SHORT * 48 * 5)
    config, vocab = shallow_target.config, DraftVocab(jnp.asarray(head.target_ids))
    weights = jnp.asarray(rng.random((SHORT, 2, 23)) * (rng.random((SHORT, 2, 23)) < density), jnp.float32)
    *states, hidden = jnp.asarray(rng.standard_normal((SHORT + 1, 2, 23, config.d_model)), jnp.float32)
    target, drafter = shallow_target.params, head.drafter

    @jax.jit
    def gradient(output: Any, states: list[jax.Array], hidden: jax.Array) -> Any:
        def loss(output: Any, states: list[jax.Array]) -> tuple[jax.Array, Sums]:
            parts = chunked_loss.Objective(drafter, target, config, vocab, make_loss("ce", 3.0))
            teacher = chunked_loss.HiddenStates(hidden)
            return chunked_loss.sum_losses(parts, output, states, DraftTargets(weights), jnp.ones(SHORT), teacher)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(output, states)

    bears = (weights > 0).any(axis=0)[..., None]
    poisoned = jax.tree.map(lambda x: jnp.where(bears, x, jnp.nan), (states, hidden))
    expected, got = gradient(head.params.output, states, hidden), gradient(head.params.output, *poisoned)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(expected)) == bool(density)


def _gradient(
    config: LossConfig, target: Target, head: Head, rows: Rows, mesh: Mesh | None = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The program, and what it takes."""
    params: Any = head.params
    if mesh is not None:
        params = jax.device_put(params, config.drafter.place(mesh))
    placed = jax.device_put(rows, place_rows(mesh, rows.token_ids.shape))

    @jax.jit
    def gradient(params: Eagle3Params, target: TargetParams, vocab: DraftVocab, rows: Rows) -> tuple[Any, ...]:
        return on_mesh(mesh, loss_and_gradient)(
            params, config, target, vocab, rows, lambda part: teach(target, config, part)
        )

    vocab = DraftVocab(jnp.asarray(head.target_ids))
    return gradient, (params, target.params, jax.device_put(vocab, whole(mesh)), placed)


@dataclasses.dataclass(frozen=True)
class Whole:
    """A batch, its gradient at once on one device, and what rounding explains of that."""

    rows: Rows
    gradient: Any
    off: Any


@pytest.fixture(scope="module")
def at_once(shallow_target: Target, head: Head) -> Iterator[Whole]:
    rng = np.random.default_rng(0)
    token_ids = jnp.asarray(rng.integers(0, 64, (4, 32)), jnp.int32)
    document_ids = jnp.asarray(np.sort(rng.integers(1, 4, (4, 32)), axis=1), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(32, dtype=jnp.int32), (4, 32))
    rows = Rows(token_ids, jnp.asarray(rng.random((4, 32)) < 0.7), document_ids, positions)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(chunked_loss.LOGITS_AT_ONCE, "cpu", SHORT * 48 * 5)
        gradient, args = _gradient(_config(shallow_target, head), shallow_target, head, rows)
        yield Whole(rows, gradient(*args), tolerance(gradient, *args))


@pytest.mark.parametrize(
    ("axes", "accumulate", "remat"), [({}, 2, False), ({"data": 2, "tensor": 2, "sequence": 2}, 2, True)]
)
def test_parts_of_a_batch_and_devices_give_the_same_gradient(
    at_once: Whole, shallow_target: Target, head: Head, axes: dict[str, int], accumulate: int, remat: bool
) -> None:
    config = _config(shallow_target, head, accumulate=accumulate, rollout=Rollout(SHORT, remat))
    mesh = make_mesh(**axes) if axes else None
    target = load_target(shallow_target.folder, dtype="float32", mesh=mesh)
    gradient, args = _gradient(config, target, head, at_once.rows, mesh)
    assert_same(gradient(*args), at_once.gradient, at_once.off)


def test_teacher_is_the_targets_distribution_over_the_draft_vocabulary(
    shallow_target: Target, head: Head, rng: np.random.Generator
) -> None:
    text = rng.integers(0, 64, 12).tolist()
    config, target_ids = _config(shallow_target, head), head.target_ids
    rows, vocab = _rows([text], [[True] * 12], 12), DraftVocab(jnp.asarray(target_ids))

    @jax.jit
    def distribution(params: TargetParams) -> tuple[jax.Array, jax.Array]:
        return teach(params, config, rows).teacher.distribution(params, shallow_target.config, vocab)

    probs, found = distribution(shallow_target.params)
    off, _ = tolerance(distribution, shallow_target.params)
    logits = tiny.target_logits(shallow_target, text)
    best = logits.argmax(-1)
    expected = [int(np.flatnonzero(target_ids == token)[0]) if token in target_ids else -1 for token in best]
    assert found[0].tolist() == expected
    assert_same(probs[0], np.exp(log_softmax(logits, axis=-1))[:, target_ids], off[0])
