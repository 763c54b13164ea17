"""P-EAGLE: training's slots are those of serving, what sees what, the draws of a run, and its files."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from rounding import assert_same, tolerance
from safetensors.numpy import load_file, save_file
from same_head import assert_same_head
from tiny_run import metrics, tiny_trainer

from specserve.checkpoints.load import Target
from specserve.drafters.layers import windowed
from specserve.drafters.learning import Rollout, Rows, loss_positions
from specserve.drafters.peagle import rollout as training
from specserve.drafters.peagle.drafter import look_ahead
from specserve.drafters.peagle.model import PEagleParams
from specserve.drafters.registry import DraftSettings
from specserve.drafters.speculation import drafter_for, parse_speculation
from specserve.errors import CheckpointError, ConfigError, SpecServeError
from specserve.interop import doctor
from specserve.interop.convert import export_head, import_head
from specserve.interop.format import Dialect
from specserve.interop.formats import format_for, format_named
from specserve.interop.head import load_head, save_head
from specserve.models.target import TargetParams, forward
from specserve.speculative import slot_state, step
from specserve.speculative.drafter import SlotView, Weights
from specserve.speculative.sampling import SamplerRows
from specserve.speculative.slot_state import StepConfig
from specserve.train.chunked_loss import HiddenStates, Objective, sum_losses
from specserve.train.head import new_drafter
from specserve.train.losses import expected_length, soft_cross_entropy

SLOTS = 3
ROLLOUT = Rollout(SLOTS, remat=True)


def _rows(lengths: tuple[int, ...], seq: int, rng: np.random.Generator) -> Rows:
    """One row with documents of these lengths, all of which bear loss."""
    document_ids = np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, seq - sum(lengths)])[None]
    position_ids = np.concatenate([np.arange(n) for n in (*lengths, seq - sum(lengths))])[None]
    return Rows(
        jnp.asarray(rng.integers(0, 64, (1, seq)), jnp.int32),
        jnp.asarray(document_ids > 0),
        jnp.asarray(document_ids, jnp.int32),
        jnp.asarray(position_ids, jnp.int32),
        seeds=jnp.array([7], jnp.uint32),
    )


def _by_anchor(drafter: Any, rows: Rows, logits: list[jax.Array]) -> dict[tuple[int, int], np.ndarray]:
    """What each slot that there is says, by its anchor and its number."""
    order = np.asarray(training.in_order(rows))[0]
    return {
        (int(anchor), slot): np.asarray(logits[slot])[column]
        for slot, number in enumerate(training.num_anchors(drafter.config, len(order)))
        for column, anchor in enumerate(order[:number])
    }


DEEP = {"num_layers": 2, "d_model": 24, "has_embedding": True, "fc_norm": True}


LATENTS = DEEP | tiny.LATENTS | {"layers": windowed((0, 5))}


@pytest.mark.parametrize(
    "shape", [pytest.param({}, marks=pytest.mark.slow), DEEP, DEEP | {"layers": windowed((2, 5))}, LATENTS]
)
def test_slots_of_training_are_those_of_serving(
    tiny_target: Target, rng: np.random.Generator, shape: dict[str, Any]
) -> None:
    """Prefill, then one pass that catches up with the root and looks ahead, at anchors that have every slot."""
    head, n = tiny.random_masked_head(tiny_target.config, seed=2, num_slots=SLOTS, **shape), 24
    drafter: Any = head.drafter
    rows = _rows((n,), n, rng)
    text = np.asarray(rows.token_ids)[0]
    order = np.asarray(training.in_order(rows))[0]
    numbers = training.num_anchors(drafter.config, n)
    complete = sorted(order[: numbers[-1]].tolist())
    columns = [order.tolist().index(anchor) for anchor in complete]

    @jax.jit
    def train(target: TargetParams, params: PEagleParams) -> jax.Array:  # [slot, anchor, draft_vocab]
        taps = drafter.aux_layers
        out = forward(target, tiny_target.config, rows.token_ids, rows.position_ids, tiny.causal(n), aux_layers=taps)
        states = drafter.learn(params, target, rows, out.aux_hidden_states, ROLLOUT)
        return jnp.stack([drafter.logits(params.output, target, state[0, jnp.array(columns)]) for state in states])

    args = tiny_target.params, head.params
    trained, off = train(*args), tolerance(train, *args)
    weights = Weights(tiny_target.params, head.weights())
    config = StepConfig(tiny_target.config, drafter, SLOTS)

    @jax.jit
    def serve(prompt: jax.Array, length: jax.Array, root: jax.Array) -> jax.Array:  # [slot, draft_vocab]
        state = slot_state.init_state(config, num_slots=1, num_pages=8, page_size=4, max_pages=8)
        table = jnp.arange(8, dtype=jnp.int32)[None]
        state = dataclasses.replace(state, page_table=table, history=state.history.at[0, :n].set(prompt))
        slots = jnp.zeros(1, jnp.int32)
        chunks = slot_state.PromptChunks(slots, length[None], jnp.ones(1, bool))
        state, _ = step.prefill(config, weights, state, chunks, chunk=n, width=8)
        draft: Any = state.draft
        pending = dataclasses.replace(draft.pending, token_ids=draft.pending.token_ids.at[0, 0].set(root))
        draft = dataclasses.replace(draft, pending=pending)
        view = SlotView(slots, table, table, state.seq_lens, root[None], state.history, SamplerRows.greedy(1))
        ready = drafter.ready(weights)
        _, states = look_ahead(ready, head.params, drafter.config, draft, view, SLOTS)
        return drafter.logits(head.params.output, weights.target, states)[0]

    tried = [column for column, anchor in enumerate(complete) if anchor + 1 < n]
    assert len(tried) > 2
    for column in tried:
        anchor = complete[column]
        prompt = np.where(np.arange(n) <= anchor, text, 0).astype(np.int32)
        served = serve(jnp.asarray(prompt), jnp.int32(anchor + 1), jnp.asarray(text[anchor + 1]))
        assert_same(trained[:, column], served, off[:, column], f"anchor {anchor}")


def test_a_slot_sees_its_document_up_to_its_anchor_and_its_own_slots(
    tiny_target: Target, rng: np.random.Generator
) -> None:
    """A twin of loops: each slot by itself, as the end of a sequence with one mask after the other."""
    head, rows = tiny.random_masked_head(tiny_target.config, seed=3, num_slots=SLOTS), _rows((9, 12), 24, rng)
    aux = jnp.asarray(rng.standard_normal((1, 24, 3 * 32)), jnp.float32)
    drafter: Any = head.drafter

    @jax.jit
    def learn_at(params: PEagleParams, target: TargetParams, rows: Rows, aux: jax.Array) -> list[jax.Array]:
        states = drafter.learn(params, target, rows, aux, ROLLOUT)
        return [drafter.logits(params.output, target, state)[0] for state in states]

    def run(params: PEagleParams, rows: Rows, aux: jax.Array) -> dict[tuple[int, int], np.ndarray]:
        return _by_anchor(drafter, rows, learn_at(params, tiny_target.params, rows, aux))

    whole, off = run(head.params, rows, aux), tolerance(lambda params: run(params, rows, aux), head.params)
    foreign = np.asarray(rows.document_ids)[0]
    for anchor in (0, 4, 9, 14, 19):
        # all that is after the anchor's known token, or of another document, is other text
        index = np.arange(24)
        is_seen = (foreign == foreign[anchor]) & (index <= anchor + 1)
        other = np.where(is_seen, rows.token_ids[0], rng.integers(0, 64, 24)).astype(np.int32)
        noise = np.where(is_seen & (index <= anchor), 0, 1)[:, None] * rng.standard_normal((24, aux.shape[2]))
        changed = dataclasses.replace(rows, token_ids=jnp.asarray(other)[None])
        found = run(head.params, changed, aux + jnp.asarray(noise, jnp.float32)[None])
        for slot in range(SLOTS):
            if (anchor, slot) in whole:
                assert_same(found[anchor, slot], whole[anchor, slot], off[anchor, slot], f"{anchor}, slot {slot}")
        # and each of what it should see matters
        for seen in {int(np.flatnonzero(is_seen)[0]), anchor}:
            moved = run(head.params, rows, aux.at[0, seen].add(1.0))
            for slot in range(SLOTS):
                if (anchor, slot) in whole:
                    assert np.abs(moved[anchor, slot] - whole[anchor, slot]).max() > 1e-3


def test_what_is_aimed_at(rng: np.random.Generator, tiny_target: Target) -> None:
    """Shares fall by r, are nested, and are drawn among the positions that have something to learn; weights and
    positions are those of a loop."""
    drafter: Any = tiny.random_masked_head(tiny_target.config, seed=1, num_slots=8).drafter
    rows = _rows((37, 50), 100, rng)
    rows = dataclasses.replace(rows, loss_mask=jnp.asarray(rng.random((1, 100)) < 0.6) & (rows.document_ids > 0))
    rollout = Rollout(8, remat=False)
    assert training.num_anchors(drafter.config, 100) == [100, 70, 49, 34, 24, 20, 20, 20]
    order = np.asarray(training.in_order(rows))[0]
    assert sorted(order.tolist()) == list(range(100))
    possible = np.flatnonzero(loss_positions(rows, 1)[0])
    assert set(order[: len(possible)]) == set(possible)
    targets = jax.device_get(drafter.draft_targets(rows, rollout))
    document_ids, mask = np.asarray(rows.document_ids)[0], np.asarray(rows.loss_mask)[0]
    for slot, number in enumerate(training.num_anchors(drafter.config, 100)):
        for column, anchor in enumerate(order):
            said = anchor + 2 + slot
            learns = column < number and said < 100 and document_ids[said] == document_ids[anchor] and mask[said]
            assert targets.weights[slot, 0, column] == float(learns)
            assert not learns or targets.positions[slot, 0, column] == said - 1
    drawn = training.in_order(dataclasses.replace(rows, seeds=jnp.array([8], jnp.uint32)))
    assert (np.asarray(drawn)[0] != order).any(), "another seed draws others"


def test_the_loss_of_columns_that_reach_fewer_steps(tiny_target: Target, rng: np.random.Generator) -> None:
    """Value, sums and gradients are those of states filled up with zeros that count nothing."""
    head, rows = tiny.random_masked_head(tiny_target.config, seed=1, num_slots=SLOTS), _rows((9, 12), 24, rng)
    drafter: Any = head.drafter
    targets, numbers = drafter.draft_targets(rows, ROLLOUT), training.num_anchors(drafter.config, 24)
    states = [jnp.asarray(rng.standard_normal((1, number, 32)), jnp.float32) for number in numbers]
    teacher = HiddenStates(jnp.asarray(rng.standard_normal((1, 24, 32)), jnp.float32))
    vocab = head.weights().vocab

    @functools.partial(jax.jit, static_argnums=4)
    def run(output: Any, states: list[jax.Array], teacher: Any, target: Any, is_filled: bool) -> Any:
        def loss(output: Any, states: list[jax.Array]) -> Any:
            if is_filled:
                states = [jnp.pad(x, ((0, 0), (0, 24 - x.shape[1]), (0, 0))) for x in states]
            weigh = 0.7 ** jnp.arange(SLOTS, dtype=jnp.float32)
            objective = Objective(drafter, target, tiny_target.config, vocab, soft_cross_entropy, expected_length)
            return sum_losses(objective, output, states, targets, weigh, teacher)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(output, states)

    args = head.params.output, states, teacher, tiny_target.params
    assert_same(run(*args, False), run(*args, True), tolerance(lambda *args: run(*args, True), *args))


@pytest.mark.slow
def test_a_resumed_run_learns_what_a_whole_one_does(tmp_path: Path, tiny_target: Target) -> None:
    """What is drawn follows from the number of the step."""
    draft = DraftSettings(num_heads=2, num_kv_heads=1, d_ff=32, block_size=3, export_dtype="float32")
    changes: dict[str, Any] = {"drafter": "p-eagle", "draft": draft, "accumulate": 2, "max_steps": 6}
    with jax.numpy_dtype_promotion("standard"):
        tiny_trainer(tmp_path, tiny_target, **changes).train()
        whole, params = metrics(tmp_path), load_file(tmp_path / "model.safetensors")
        shutil.rmtree(tmp_path / "state" / "6")
        tiny_trainer(tmp_path, tiny_target, **changes, resume=True).train()
    assert [row["loss"] for row in metrics(tmp_path)] == [row["loss"] for row in whole]
    assert whole[-1]["loss"] < whole[0]["loss"]
    for name, value in load_file(tmp_path / "model.safetensors").items():
        np.testing.assert_array_equal(value, params[name])


@pytest.mark.parametrize("dialect", ["sglang", "vllm", "speculators"])
@pytest.mark.parametrize(
    "shape", [{"layers": windowed((9,))}, DEEP | {"draft_vocab_size": 64, "aux_layers": (0, 3)}, LATENTS]
)
def test_export_then_import_is_bit_exact(
    tmp_path: Path, tiny_target: Target, dialect: Dialect, shape: dict[str, Any]
) -> None:
    head = tiny.random_masked_head(tiny_target.config, seed=3, num_slots=5, dtype="bfloat16", **shape)
    save_head(tmp_path / "own", head, tiny_target, dtype="bfloat16", notes={})
    assert_same_head(head, load_head(tmp_path / "own", tiny_target, dtype="bfloat16"))
    if shape is LATENTS and dialect == "speculators":
        with pytest.raises(CheckpointError, match="latent attention cannot be written for speculators"):
            export_head(tmp_path / "own", tmp_path / "there", tiny_target, target_name="tiny", dialect=dialect)
        return
    export_head(tmp_path / "own", tmp_path / "there", tiny_target, target_name="tiny", dialect=dialect)
    assert doctor.examine(tmp_path / "there", tiny_target).errors == []
    import_head(tmp_path / "there", tmp_path / "back", tiny_target, target_name="tiny")
    assert_same_head(head, load_head(tmp_path / "back", tiny_target, dtype="bfloat16"))
    tensors = load_file(tmp_path / "there" / "model.safetensors")
    assert tensors["mask_hidden"].shape == (1, 1, len(head.drafter.aux_layers) * 32)
    assert {name.split(".")[0] for name in tensors} <= {
        *("layers", "fc", "fc_norm", "norm", "lm_head", "embed_tokens", "mask_hidden", "d2t", "t2d")
    }


@pytest.fixture
def folder(tmp_path: Path, tiny_target: Target) -> Path:
    """A head as it is exported for vLLM."""
    head = tiny.random_masked_head(tiny_target.config, seed=3)
    save_head(tmp_path / "head", head, tiny_target, dtype="float32", notes={})
    return tmp_path / "head"


def _edit(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write keys of config.json; None removes one."""
    raw = json.loads((folder / "config.json").read_text()) | changes
    raw = {key: value for key, value in raw.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    return raw


NO_MASK = {"mask_token_id": None, "ptd_token_id": None}


@pytest.mark.parametrize(
    "changes",
    [
        {"ptd_token_id": None},  # SpecForge's
        {"mask_token_id": None, "architectures": ["LlamaForCausalLMEagle3"]},  # for vLLM's older readers
        NO_MASK | {"pard_token": 63, "architectures": ["Eagle3LlamaForCausalLM"]},
        NO_MASK | {"dflash_config": {"mask_token_id": 63}},
        {"num_depths": None, "use_cache": True, "attention_bias": False, "layer_types": ["full_attention"]},
    ],
)
def test_published_spellings_are_read(folder: Path, tiny_target: Target, changes: dict[str, Any]) -> None:
    expected = load_head(folder, tiny_target, dtype="float32")
    raw = _edit(folder, **changes)
    found: Any = load_head(folder, tiny_target, dtype="float32").drafter
    slots = 8 if "num_depths" in changes else 4
    assert found.config == dataclasses.replace(expected.drafter.config, num_slots=slots)
    assert format_named(raw) is format_for("p-eagle")


@pytest.mark.parametrize(
    ("changes", "code", "listed"),
    [
        ({"selector_rank": 16}, "unknown-key", "selector_rank: not known"),
        ({"dflash_config": {"causal": True}}, "unknown-key", "dflash_config.causal"),
        ({"sliding_window": 2048}, "windows", "sliding_window is 2048"),
        ({"attention_bias": True}, "missing-tensor", "q_proj.bias"),
        (NO_MASK, "mask-token", "token of masked slots is not stated"),
        ({"pard_token": 5}, "stated-twice", "pard_token: 5"),
        ({"mask_token_id": 64, "ptd_token_id": 64}, "mask-token", r"expected a token of the target's, 0\.\.63"),
        ({"vocab_size": 80}, "other-target", "a head for a target with vocabulary 80"),
        ({"num_depths": 0}, "config-keys", "num_depths is 0"),
    ],
)
def test_what_does_not_fit_is_refused_and_found(
    folder: Path, tiny_target: Target, changes: dict[str, Any], code: str, listed: str
) -> None:
    assert doctor.examine(folder, tiny_target).findings == []
    _edit(folder, **changes)
    with pytest.raises(SpecServeError, match=listed):
        load_head(folder, tiny_target, dtype="float32")
    assert not code or code in {finding.code for finding in doctor.examine(folder, tiny_target).errors}


def test_traps_of_the_files(folder: Path, tmp_path: Path, tiny_target: Target) -> None:
    """A name that vLLM does not read is mended; masked states that are missing or were never filled are errors."""
    _edit(folder, ptd_token_id=None, num_depths=None)
    assert [finding.code for finding in doctor.examine(folder, tiny_target).findings] == ["mask-spelling", "slots"]
    import_head(folder, tmp_path / "mended", tiny_target, target_name="tiny")
    assert json.loads((tmp_path / "mended" / "config.json").read_text())["ptd_token_id"] == 63
    tensors = load_file(folder / "model.safetensors")
    for name, code in (("zero", "all-zero"), ("none", "missing-tensor")):
        changed = dict(tensors, mask_hidden=np.zeros_like(tensors["mask_hidden"]))
        if name == "none":
            del changed["mask_hidden"]
        save_file(changed, folder / "model.safetensors")
        assert [finding.code for finding in doctor.examine(folder, tiny_target).errors] == [code]
        with pytest.raises(SpecServeError, match="mask_hidden"):
            load_head(folder, tiny_target, dtype="float32")


def test_a_chain_deeper_than_its_slots_is_refused(tiny_target: Target) -> None:
    drafter = tiny.random_masked_head(tiny_target.config, seed=1, num_slots=3).drafter
    drafter_for([parse_speculation("chain:3")], drafter)
    with pytest.raises(ConfigError, match="looks 3 tokens ahead"):
        drafter_for([parse_speculation("tree:4x2x6")], drafter)


@pytest.mark.parametrize(
    ("settings", "listed"),
    [
        ({"norm_output": True, "rank": 8}, r"no use for draft\.rank 8, draft\.norm_output True"),
        ({"block_size": 1}, "without a masked slot"),
        ({"mask_token": 64}, r"tokens 0\.\.63"),
    ],
)
def test_settings_that_it_cannot_follow_are_refused(tiny_target: Target, settings: dict[str, Any], listed: str) -> None:
    with pytest.raises(ConfigError, match=listed):
        new_drafter("p-eagle", DraftSettings(**settings), tiny_target.config, 48)
