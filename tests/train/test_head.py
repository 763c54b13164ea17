"""What a run begins with: a new head, as near to the target as its width allows, or an earlier one as it was."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from rounding import UNIT, assert_within
from tiny_run import tiny_trainer

from specserve import provenance
from specserve.checkpoints.load import Target
from specserve.checkpoints.lora import adapter_fingerprint
from specserve.drafters.interface import Head
from specserve.drafters.layers import windowed
from specserve.errors import CheckpointError, ConfigError, SpecServeError
from specserve.interop.convert import export_head
from specserve.interop.findings import Dialect
from specserve.interop.head import load_head, save_head
from specserve.models.target import head_columns
from specserve.plan.training import make_plan
from specserve.train.head import adapter_notes, earlier_head, new_drafter
from specserve.train.settings import DraftSettings, TrainRun, TrainSettings
from specserve.train.step import rollout_of

TARGET_IDS = np.arange(8, 56, dtype=np.int32)
LEAN = DraftSettings(
    num_layers=2,
    d_model=24,
    num_heads=2,
    num_kv_heads=1,
    d_ff=32,
    window=12,
    window_layers=(1,),
    qk_norm=True,
    export_dtype="float32",
)
SHAPE: dict[str, Any] = {"num_layers": 2, "d_model": 24, "has_embedding": True, "norm_output": True}


@pytest.fixture(scope="module", autouse=True)
def _optax_promotes() -> Iterator[None]:
    """Strict promotion is for our own code; optax raises a Python float to an int32 power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@dataclass(frozen=True)
class Learned:
    output: Path
    before: Any  # the parameters before the first step


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Learned:
    """A run with a head of two layers, one of which has a window, and a width of its own."""
    output = tmp_path_factory.mktemp("learned")
    trainer = tiny_trainer(output, tiny_target, draft=LEAN)
    before = jax.tree.map(np.array, trainer.learner.state.params)
    trainer.train()
    return Learned(output, before)


@pytest.mark.parametrize("width", [8, 32, 40])
def test_a_new_head_of_any_width_begins_at_the_target(tiny_target: Target, width: int) -> None:
    """Its embedding is as near to the target's as a matrix of that rank comes (Eckart and Young), up to a rotation,
    which no product between rows sees; so are its output rows. In the target's own width it shares and copies them."""
    drafter = new_drafter("eagle3", DraftSettings(d_model=width, num_layers=2), tiny_target.config, len(TARGET_IDS))
    params = drafter.init_params(tiny_target, TARGET_IDS, seed=0)
    columns = np.asarray(head_columns(tiny_target.params, jnp.asarray(TARGET_IDS)))
    assert (drafter.config.num_layers, len(params.layers), drafter.config.has_embedding) == (2, 2, width != 32)
    assert params.fc.shape == (3 * 32, width)  # type: ignore[union-attr]
    if width == 32:
        assert params.embedding is None
        np.testing.assert_array_equal(params.head, columns)  # type: ignore[arg-type]
        return
    assert params.embedding is not None
    for ours, theirs in ((params.embedding, tiny_target.params.embedding), (params.head.T, columns.T)):  # type: ignore[union-attr]
        left, sizes, right = np.linalg.svd(np.asarray(theirs, np.float64), full_matrices=False)
        nearest = left[:, :width] * sizes[:width] @ right[:width]
        assert ours.shape == (len(theirs), width)
        # by so much singular values are off (`np.linalg.matrix_rank`)
        off = sizes[0] * max(theirs.shape) * 2 * UNIT
        assert_within(ours @ ours.T, nearest @ nearest.T, 2 * sizes[0] * off)


def test_a_head_of_several_layers_and_its_own_width_learns(learned: Learned, tiny_target: Target) -> None:
    """Every parameter moves, the embedding too, and what is exported loads."""
    losses = _losses(learned.output)
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.05
    head = load_head(learned.output, tiny_target, dtype="float32")
    config = head.drafter.config
    assert (config.num_layers, config.d_model, config.has_embedding, config.qk_norm) == (2, 24, True, "head")
    assert config.layers == windowed((0, 12))
    for old, new in zip(jax.tree.leaves(learned.before), jax.tree.leaves(head.params), strict=True):
        assert not np.array_equal(old, new)


def _losses(output: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def _save(folder: Path, target: Target, **changes: Any) -> Head:
    head = tiny.random_head(target.config, seed=4, **changes)
    head = replace(head, params=jax.tree.map(lambda x: x + 0.25, head.params))  # no bias is nothing
    save_head(folder, head, target, dtype="float32", notes={"target": "tiny"})
    return head


@pytest.mark.parametrize("dialect", get_args(Dialect))
def test_an_earlier_head_begins_as_it_was(tmp_path: Path, tiny_target: Target, dialect: Dialect) -> None:
    """With every option of its layers."""
    options = {"qk_norm": "head", "layers": windowed((0, 16)), "activation": "gelu_tanh"}
    biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), True)
    head = _save(tmp_path / "ours", tiny_target, **SHAPE, **options, **biases)
    export_head(tmp_path / "ours", tmp_path / "theirs", tiny_target, target_name="tiny", dialect=dialect)
    settings = DraftSettings(
        num_layers=2, vocab_size=48, window=16, qk_norm=True, export_dtype="float32"
    )  # it has all that is asked for
    found = earlier_head(str(tmp_path / "theirs"), settings, tiny_target)
    assert found.drafter == head.drafter
    np.testing.assert_array_equal(found.target_ids, head.target_ids)
    for ours, theirs in zip(jax.tree.leaves(found.params), jax.tree.leaves(head.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "asked",
    [
        {"num_layers": 1},
        {"d_model": 32},
        {"vocab_size": 40},
        {"aux_layers": (0, 1, 2)},
        {"fc_norm": True},
        {"window": 8},
    ],
)
def test_a_head_of_another_shape_is_not_what_was_asked_for(
    tmp_path: Path, tiny_target: Target, asked: dict[str, Any]
) -> None:
    _save(tmp_path, tiny_target, **SHAPE)
    key = next(iter(asked))
    with pytest.raises(ConfigError, match=rf"--init-from .*draft\.{key}"):
        earlier_head(str(tmp_path), DraftSettings(**asked), tiny_target)


def test_a_head_for_another_target_is_refused(tmp_path: Path, tiny_target: Target) -> None:
    _save(tmp_path / "wide", tiny_target, target_d_model=48, d_model=48, has_embedding=True)
    with pytest.raises(CheckpointError, match="width 48"):
        earlier_head(str(tmp_path / "wide"), DraftSettings(), tiny_target)
    _save(tmp_path / "other", tiny_target)
    notes = {"target": "org/other", "target_fingerprint": "0" * 16}
    (tmp_path / "other" / "specserve.json").write_text(json.dumps(notes))
    with pytest.raises(CheckpointError, match="trained for org/other"):
        earlier_head(str(tmp_path / "other"), DraftSettings(), tiny_target)
    notes["target_fingerprint"] = provenance.fingerprint(tiny_target.folder)
    (tmp_path / "other" / "specserve.json").write_text(json.dumps(notes))
    assert earlier_head(str(tmp_path / "other"), DraftSettings(), tiny_target).drafter.facts()["num_layers"] == 1
    for nobody in (str(tmp_path / "none"), "no head"):
        with pytest.raises(ConfigError, match=r"--init-from .*no folder here"):
            earlier_head(nobody, DraftSettings(), tiny_target)
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(SpecServeError, match="pickle"):
        earlier_head(str(tmp_path / "pickle"), DraftSettings(), tiny_target)


def test_a_head_that_follows_another_adapter_than_the_run_is_warned_of(
    tmp_path: Path, tiny_target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """By the adapter's files, whatever their folder is called; no adapter is another one too."""
    adapters = {"": "no LoRA adapter"}
    for name, rank in (("a", 1), ("b", 2), ("copy", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
        (tmp_path / name / "adapter_model.safetensors").write_bytes(b"")
        adapters[name] = f"the LoRA adapter {tmp_path / name} ({adapter_fingerprint(tmp_path / name)})"
    for of_head in ("", "a"):
        head = tmp_path / f"head{of_head}"
        _save(head, tiny_target)
        (head / "specserve.json").write_text(json.dumps(adapter_notes(of_head and str(tmp_path / of_head))))
        for of_run, named in adapters.items():
            caplog.clear()
            earlier_head(str(head), DraftSettings(), tiny_target, of_run and str(tmp_path / of_run))
            is_same = of_head == of_run or (of_head, of_run) == ("a", "copy")
            assert caplog.text.count(f"follows {adapters[of_head]}, for a run that follows {named}:") == (not is_same)
    (tmp_path / "heada" / "specserve.json").write_text('{"lora": "elsewhere"}')  # of unknown files
    for of_run in adapters:
        caplog.clear()
        earlier_head(str(tmp_path / "heada"), DraftSettings(), tiny_target, of_run and str(tmp_path / of_run))
        assert "follows the LoRA adapter elsewhere (unknown files)" in caplog.text


def test_a_run_goes_on_from_an_earlier_head(learned: Learned, tmp_path: Path, tiny_target: Target) -> None:
    """It begins with its weights, and where its loss has been brought to; what it exports says where it began."""
    settings = DraftSettings(vocab_size=48, export_dtype="float32")
    head = earlier_head(str(learned.output), settings, tiny_target)
    begun = jax.tree.map(np.array, head.params)
    trainer = tiny_trainer(tmp_path, tiny_target, head=head, draft=settings, lr=1e-4)
    assert trainer.learner.drafter == head.drafter
    for ours, theirs in zip(jax.tree.leaves(trainer.learner.state.params), jax.tree.leaves(begun), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    trainer.train()
    for ours, theirs in zip(jax.tree.leaves(head.params), jax.tree.leaves(begun), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    first, second = _losses(learned.output), _losses(tmp_path)
    assert abs(second[0] - first[-1]) < 0.2 * (first[0] - first[-1])
    assert np.mean(second) < np.mean(first[-3:])
    assert load_head(tmp_path, tiny_target, dtype="float32").drafter == head.drafter


def test_a_dry_run_shows_the_earlier_heads_shape(tmp_path: Path, tiny_target: Target) -> None:
    head = _save(tmp_path, tiny_target, **SHAPE)
    plan = make_plan(TrainRun(target=str(tiny_target.folder), init_from=str(tmp_path)))
    assert plan.drafter.with_dtype("float32") == head.drafter
    with pytest.raises(ConfigError, match=r"draft\.d_ff 40 \(it has 48\)"):
        make_plan(TrainRun(target=str(tiny_target.folder), init_from=str(tmp_path), draft=DraftSettings(d_ff=40)))


def test_what_a_kind_has_no_use_for_is_refused(tiny_target: Target) -> None:
    for kind, settings, unused in (
        ("eagle3", {"block_size": 16, "num_layers": 2}, "draft.block_size 16"),
        ("mtp", {"window": 8, "qk_norm": True}, "draft.window 8, draft.qk_norm True"),
        ("dflash", {"d_model": 24, "fc_norm": True, "window": 8}, "draft.d_model 24, draft.fc_norm True"),
    ):
        with pytest.raises(ConfigError, match=f"--drafter {kind} has no use for {unused};"):
            new_drafter(kind, DraftSettings(**settings), tiny_target.config, len(TARGET_IDS))


@pytest.mark.parametrize(
    ("settings", "listed"),
    [
        ({"window_layers": (0,)}, "draft.window_layers \\(0,\\) have no window"),
        ({"window": 8, "window_layers": (1,)}, "the head has layers 0..0"),
        ({"window": 3}, "a rollout of 4 steps leaves the window of 3 tokens; give a longer draft.window"),
    ],
)
def test_windows_that_make_no_sense_are_refused(tiny_target: Target, settings: dict[str, Any], listed: str) -> None:
    with pytest.raises(ConfigError, match=listed):
        rollout_of(TrainSettings(rollout=4), new_drafter("eagle3", DraftSettings(**settings), tiny_target.config, 48))
