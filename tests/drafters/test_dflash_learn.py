"""Where anchors stand, what their blocks see and learn, and the law that training fills blocks as serving does."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from dflash_case import GEMMA, MARKOV
from rounding import UNIT, assert_same, assert_within, tolerance

from specserve.checkpoints.load import Target, load_target
from specserve.drafters.dflash import rollout as training
from specserve.drafters.dflash.config import DFlashConfig
from specserve.drafters.dflash.drafter import DFlash, run_block
from specserve.drafters.dflash.model import DFlashParams, block_logits, head_spec
from specserve.drafters.interface import Head
from specserve.drafters.learning import DraftTargets, Rollout, Rows
from specserve.kernels import rows as row_kernel
from specserve.mesh import make_mesh, on_mesh, whole
from specserve.models.params import init_params
from specserve.models.target import TargetParams, forward
from specserve.models.target import logits as target_logits
from specserve.speculative import slot_state, step
from specserve.speculative.drafter import SlotView, Weights
from specserve.speculative.sampling import SamplerRows
from specserve.speculative.slot_state import StepConfig
from specserve.speculative.vocab import DraftVocab
from specserve.train import chunked_loss
from specserve.train.chunked_loss import Sums
from specserve.train.losses import acceptance, expected_length, soft_cross_entropy
from specserve.train.step import LossConfig, loss_and_gradient, place_rows, rollout_loss, teach

BLOCK, TAPS = 4, (0, 1)
SLOTS = BLOCK - 1


def _head(target: Target, **settings: Any) -> Head:
    switches = dict(settings.pop("switches", {}))
    head = tiny.random_block_head(target.config, seed=3, block_size=BLOCK, aux_layers=TAPS, **settings)
    config = _config(head)
    backbone = dataclasses.replace(config.backbone, **switches.pop("backbone", {}))
    config = dataclasses.replace(config, backbone=backbone, **switches)
    return Head(DFlash(config), init_params(head_spec(config), jax.random.key(3), "float32"), head.target_ids)


def _config(head: Head) -> DFlashConfig:
    assert isinstance(head.drafter, DFlash)
    return head.drafter.config


def _rows(rng: np.random.Generator, lengths: tuple[tuple[int, ...], ...], seq: int, share: float = 0.8) -> Rows:
    """Rows of documents of these lengths, filled up with padding. So many tokens bear loss."""
    shape = len(lengths), seq
    token_ids, mask = rng.integers(0, 64, shape).astype(np.int32), rng.random(shape) < share
    document_ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, of_row in enumerate(lengths):
        at = 0
        for i, length in enumerate(of_row, start=1):
            document_ids[row, at : at + length], positions[row, at : at + length] = i, range(length)
            at += length
    seeds = rng.integers(0, 1 << 32, len(lengths), dtype=np.uint32)
    return Rows(
        *map(jnp.asarray, (token_ids, mask & (document_ids > 0), document_ids, positions)), seeds=jnp.asarray(seeds)
    )


def _places(rows: Rows, row: int) -> list[int]:
    """Where anchors may stand: behind a token of the document, before one that bears loss."""
    ids, mask = np.asarray(rows.document_ids)[row], np.asarray(rows.loss_mask)[row]
    inner = range(1, len(ids) - 1)
    return [i for i in inner if ids[i] and ids[i - 1] == ids[i] == ids[i + 1] and mask[i + 1]]


def test_anchors_and_their_weights_are_those_of_a_loop(shallow_target: Target, rng: np.random.Generator) -> None:
    """A row whose documents are all long, one with short ones and padding, one with a single place, one of padding."""
    config, rollout = _config(_head(shallow_target)), Rollout(SLOTS, remat=False, anchors=9)
    rows = _rows(rng, ((9, 15), (2, 1, 7, 3), (3,), ()), 24)
    rows = dataclasses.replace(rows, loss_mask=rows.loss_mask.at[2, 2].set(True))

    @jax.jit
    def choose(rows: Rows) -> tuple[training.TrainingBlocks, DraftTargets]:
        return training.choose_blocks(config, rows, rollout), training.targets_of_blocks(config, rows, rollout)

    blocks, targets = jax.tree.map(np.asarray, choose(rows))
    ids, mask = np.asarray(rows.document_ids), np.asarray(rows.loss_mask)
    for row in range(4):
        index, places = blocks.index[row], _places(rows, row)
        real = index[blocks.is_real[row]].tolist()
        assert len(set(real)) == len(real) == min(9, len(places))
        assert set(real) <= set(places)
        for column, anchor in enumerate(index):
            is_learned = bool(blocks.is_real[row, column])
            for slot in range(SLOTS):
                token = anchor + slot + 1
                is_learned &= token < 24 and bool(mask[row, token]) and ids[row, token] == ids[row, anchor]
                assert targets.weights[slot, row, column] == is_learned, (row, anchor, slot)
                if is_learned:
                    assert targets.positions[slot, row, column] == token - 1
    assert np.any(targets.weights[2]), "nothing was tested"


def test_anchors_are_uniform_and_others_at_each_seed(shallow_target: Target, rng: np.random.Generator) -> None:
    """Of 3 in each of 400 draws, each place has its share within five deviations of a binomial count."""
    config, draws = _config(_head(shallow_target)), 400
    one = _rows(rng, ((9, 12),), 24)
    many = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), draws, axis=0), one)
    many = dataclasses.replace(many, seeds=jnp.arange(draws, dtype=jnp.uint32))
    index = np.asarray(training.choose_blocks(config, many, Rollout(SLOTS, False, anchors=3)).index)
    places, counts = _places(one, 0), np.bincount(index.ravel(), minlength=24)
    share = 3 / len(places)
    off = np.abs(counts[places] - draws * share)
    assert counts.sum() == counts[places].sum()
    assert np.max(off) < 5 * (draws * share * (1 - share)) ** 0.5
    assert len(np.unique(index, axis=0)) > draws // 2
    assert training.num_anchors(config, Rollout(SLOTS, False), 24) == 8  # its slots are as many as the tokens


def _states(head: Head, target: Target, rows: Rows, rollout: Rollout) -> tuple[Any, tuple[Any, ...]]:
    """The program that makes logits [slot, anchor, vocab] of a row's blocks, and what it takes."""
    config = _config(head)

    @jax.jit
    def train(target_params: TargetParams, params: DFlashParams) -> jax.Array:
        draft_targets = teach(target_params, LossConfig(target.config, head.drafter, rollout, 0.8), rows)
        states = head.drafter.learn(params, target_params, rows, draft_targets.aux_hidden_states, rollout)
        return block_logits(params.output, config, target_params, jnp.stack(states)[:, 0])

    return train, (target.params, head.params)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"causal": "all", "num_layers": 2, "vocab_size": 64}, id="causal", marks=pytest.mark.slow),
        pytest.param({"window": 3, "num_layers": 2}, id="window"),  # less than a block
        pytest.param(
            {"window": 5, "window_layers": (1,), "causal": "none", "sinks": True, "num_layers": 2}, id="sinks"
        ),
        pytest.param(
            {"switches": {"foresees_anchor": True, "conv_taps": 2, "conv_group": 16}},
            id="slot 0 counts, and slots are convolved",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"num_layers": 2, "switches": {key: value for key, value in GEMMA[1].items() if key not in MARKOV}},
            id="layers of Gemma 4",
        ),
    ],
)
def test_training_slot_k_equals_servings(
    shallow_target: Target, rng: np.random.Generator, settings: dict[str, Any]
) -> None:
    """Law 4, for the second document of a row. Serving: prefill up to the anchor, and a block below it as the root."""
    head = _head(shallow_target, **settings)
    config, first, n = _config(head), 7, 17
    rows = _rows(rng, ((first, n),), 28, share=1.0)
    rollout = Rollout(config.num_slots, remat=False, anchors=28)
    train, args = _states(head, shallow_target, rows, rollout)
    trained, off = train(*args), tolerance(train, *args)
    blocks = training.choose_blocks(config, rows, rollout)
    index = np.where(blocks.is_real[0], blocks.index[0], -1).tolist()
    text = np.asarray(rows.token_ids)[0, first : first + n]

    weights = Weights(shallow_target.params, head.weights())
    step_config, slots = StepConfig(shallow_target.config, head.drafter, config.num_slots), jnp.zeros(1, jnp.int32)

    @jax.jit
    def serve(prompt: jax.Array, length: jax.Array, root: jax.Array) -> jax.Array:  # [slot, vocab]
        state = slot_state.init_state(step_config, num_slots=1, num_pages=8, page_size=4, max_pages=8)
        table = jnp.arange(8, dtype=jnp.int32)[None]
        state = dataclasses.replace(state, page_table=table, history=state.history.at[0, :n].set(prompt))
        chunks = slot_state.PromptChunks(slots, length[None], jnp.ones(1, bool))
        state, _ = step.prefill(step_config, weights, state, chunks, chunk=n, width=8)
        view = SlotView(slots, table, table, length[None], root[None], state.history, SamplerRows.greedy(1))
        states = run_block(weights.draft, weights.target, config, state.draft, view, config.num_slots)  # type: ignore[arg-type]
        return block_logits(head.params.output, config, weights.target, states)[0]

    for at in (1, 2, 5, 8, n - 2):  # the anchor: the prompt ends before it
        prompt = np.where(np.arange(n) < at, text, 0)
        served, column = serve(jnp.asarray(prompt), jnp.int32(at), jnp.asarray(text[at])), index.index(first + at)
        assert_same(trained[:, column], served, off[:, column], f"anchor {at}")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="whole"),
        pytest.param({"window": 3, "num_layers": 2, "sinks": True}, id="windows"),
        pytest.param({"switches": {"conv_taps": 2, "conv_group": 16}}, id="convolved"),
    ],
)
def test_packed_documents_do_not_leak(
    shallow_target: Target, rng: np.random.Generator, settings: dict[str, Any]
) -> None:
    """The loss of a row is the sum of its documents' losses, each in a row of its own, where all places are anchors."""
    head, lengths, seq = _head(shallow_target, **settings), (9, 17, 11), 40
    config = LossConfig(shallow_target.config, head.drafter, Rollout(SLOTS, False, anchors=seq), 0.8)
    vocab, packed = DraftVocab(jnp.asarray(head.target_ids)), _rows(rng, (lengths,), seq)

    def alone(first: int, length: int) -> Rows:
        def own(x: jax.Array) -> jax.Array:
            return jnp.pad(x[:, first : first + length], ((0, 0), (0, seq - length)))

        fields = packed.token_ids, packed.loss_mask, packed.document_ids, packed.position_ids
        return Rows(*map(own, fields), seeds=packed.seeds)

    @jax.jit
    def losses(params: DFlashParams, target: TargetParams, rows: Rows) -> tuple[jax.Array, Sums]:
        return rollout_loss(params, config, target, vocab, rows, teach(target, config, rows), jnp.ones(SLOTS))

    args = head.params, shallow_target.params
    (loss, sums), off = losses(*args, packed), tolerance(losses, *args, packed)
    each = [losses(*args, alone(sum(lengths[:i]), length)) for i, length in enumerate(lengths)]
    assert sums.n_known.min() > 0
    assert_same((loss, sums), jax.tree.map(lambda *parts: sum(map(np.asarray, parts)), *each), off)


def test_expected_length_weights_are_those_of_a_loop(rng: np.random.Generator) -> None:
    """D-PACE, equations 7 and 8, for blocks of which some end early, and the derivative that they stand for: what a
    nat less at one state adds to the logarithm of each product behind it."""
    accepted = rng.random((5, 6)).astype(np.float32)
    lengths = np.array([5, 5, 3, 1, 0, 4])
    weights = (np.arange(5)[:, None] < lengths).astype(np.float32)
    found = np.asarray(expected_length(jnp.asarray(accepted), jnp.asarray(weights)))
    for column, length in enumerate(lengths):
        products = [np.prod((1 + accepted[: m + 1, column].astype(np.float64)) / 2) for m in range(length)]
        expected = np.array([sum(products[k:]) for k in range(5)])
        # nothing is negative, so roundings add up: of 5 sums with one, 4 products and 4 sums at most
        assert_within(found[:, column], expected, 13 * UNIT / (1 - 13 * UNIT) * expected)


@dataclasses.dataclass(frozen=True)
class _Case:
    teacher: Any = "soft"
    weighting: Any = "decay"
    accumulate: int = 1
    axes: Any = ()
    settings: Any = ()


def _naive(config: LossConfig, target: Target, vocab: DraftVocab, rows: Rows) -> Any:
    """All logits of the target, all logits of every slot, and JAX's own gradient."""
    targets: DraftTargets = config.drafter.draft_targets(rows, config.rollout)
    assert targets.positions is not None
    known = np.full(64, -1, np.int32)
    known[np.asarray(vocab.target_ids)] = range(len(vocab.target_ids))

    def loss(params: DFlashParams, target_params: TargetParams) -> tuple[jax.Array, Any]:
        draft_targets = teach(target_params, config, rows)
        out = forward(
            target_params, config.target, rows.token_ids, rows.position_ids, row_kernel.Documents(rows.document_ids)
        )
        logits = target_logits(target_params, config.target, out.hidden_states)
        best = jnp.asarray(known)[jnp.argmax(logits, axis=-1)]
        if config.teacher == "data":
            best = jnp.asarray(known)[jnp.roll(rows.token_ids, -1, axis=1)]
        p = jax.nn.softmax(logits, axis=-1)[..., vocab.target_ids]
        if config.teacher != "soft":
            p = jax.nn.one_hot(best, len(vocab.target_ids), dtype=jnp.float32)
        batch = jnp.arange(len(best))[None, :, None]
        p, best = p[batch, targets.positions], best[batch, targets.positions]
        states = config.drafter.learn(params, target_params, rows, draft_targets.aux_hidden_states, config.rollout)
        own = config.drafter.logits(config.drafter.output(params), target_params, jnp.stack(states))
        counts, number = jnp.where(best >= 0, targets.weights, 0.0), jnp.sum(targets.weights, axis=(1, 2))
        decay = 0.8 ** jnp.arange(SLOTS, dtype=jnp.float32) / number
        scale = jnp.broadcast_to(decay[:, None, None], counts.shape)
        if config.weighting == "d-pace":
            alpha = jax.lax.stop_gradient(acceptance(p, own)) * 0.5 + 0.5
            reached = jnp.cumprod(alpha * targets.weights, axis=0)
            scale = jnp.stack([jnp.sum(reached[k:], axis=0) for k in range(SLOTS)]) / number[0]
        return jnp.sum(soft_cross_entropy(p, own) * counts * scale), number

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(_Case(), id="soft", marks=pytest.mark.slow),
        pytest.param(
            _Case("soft", "d-pace", accumulate=2, settings={"vocab_size": 64}),
            id="the target's head",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            _Case("greedy", "d-pace", accumulate=2, axes={"data": 2, "tensor": 2, "sequence": 2}), id="devices"
        ),
        pytest.param(
            _Case("data", axes={"data": 2, "sequence": 4}, settings={"causal": "all", "window": 5}),
            id="window, devices",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_chunked_loss_and_its_gradient_equal_the_naive_ones(
    shallow_target: Target, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, case: _Case
) -> None:
    """In chunks of anchors and of columns, in parts of the batch, over devices. Nine anchors fill none of them."""
    head = _head(shallow_target, **dict(case.settings))
    monkeypatch.setitem(chunked_loss.LOGITS_AT_ONCE, "cpu", SLOTS * (len(head.target_ids) + 64) * 5)
    monkeypatch.setattr(training, "SLOTS_AT_ONCE", 4 * BLOCK * 4)
    monkeypatch.setattr(row_kernel, "SCORES_AT_ONCE", 2 * 4 * BLOCK * 32 * 2)
    mesh = make_mesh(**dict(case.axes)) if case.axes else None
    rows = _rows(rng, ((9, 15, 8), (2, 1, 7, 3), (30,), (12, 20)), 32)
    vocab = DraftVocab(jnp.asarray(head.target_ids))
    rollout, options = Rollout(SLOTS, True, anchors=9), {"teacher": case.teacher, "weighting": case.weighting}
    config = LossConfig(shallow_target.config, head.drafter, rollout, 0.8, accumulate=case.accumulate, **options)
    plain = dataclasses.replace(config, rollout=dataclasses.replace(rollout, remat=False))
    naive, args = _naive(plain, shallow_target, vocab, rows), (head.params, shallow_target.params)
    (value, number), gradient = naive(*args)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient)), "nothing was tested"

    @jax.jit
    def chunked(params: DFlashParams, target: TargetParams, vocab: DraftVocab, rows: Rows) -> tuple[Any, ...]:
        run = on_mesh(mesh, loss_and_gradient)
        return run(params, config, target, vocab, rows, lambda part: teach(target, config, part))

    target = load_target(shallow_target.folder, dtype="float32", mesh=mesh)
    params: Any = head.params if mesh is None else jax.device_put(head.params, config.drafter.place(mesh))
    spread = {
        field.name: jax.device_put(getattr(rows, field.name), place_rows(mesh, rows.token_ids.shape))
        for field in dataclasses.fields(rows)
        if field.name not in ("features", "seeds")
    }
    rows = dataclasses.replace(rows, **spread, seeds=jax.device_put(rows.seeds, whole(mesh)))
    found, sums, own = chunked(params, target.params, jax.device_put(vocab, whole(mesh)), rows)
    np.testing.assert_array_equal(sums.n_positions, number)
    assert_same(((found, sums.n_positions), own), ((value, number), gradient), tolerance(naive, *args))
