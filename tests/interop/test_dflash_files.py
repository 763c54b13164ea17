"""The files of DFlash heads: both layouts, their spellings, and what is refused."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import tiny
from dflash_case import assert_same, config_of
from safetensors.numpy import load_file, save_file

from specserve.checkpoints.load import Target
from specserve.drafters.dflash.drafter import DFlash
from specserve.drafters.dflash.model import head_spec
from specserve.drafters.interface import Head
from specserve.errors import CheckpointError, ConfigError, SpecServeError
from specserve.interop.convert import export_head, import_head
from specserve.interop.format import Dialect
from specserve.interop.head import head_files, load_head, save_head
from specserve.models.params import init_params

Raw = dict[str, Any]


def made(target: Target, *, vocab_size: int = 48, settings: Raw | None = None, **changes: Any) -> Head:
    """A random head; `changes` are of its config, and of its backbone where that has them."""
    head = tiny.random_block_head(target.config, seed=3, vocab_size=vocab_size, num_layers=2, **(settings or {}))
    config = config_of(head)
    inside = {name: changes.pop(name) for name in [*changes] if not hasattr(config, name)}
    config = dataclasses.replace(config, backbone=dataclasses.replace(config.backbone, **inside), **changes)
    params = init_params(head_spec(config), jax.random.key(3), "float32")
    return Head(DFlash(config), jax.tree.map(lambda x: x + 0.25, params), head.target_ids)


DOMINO: Raw = {"gru_width": 8, "correction_rank": 4, "num_uncorrected": 1}
HEADS: dict[str, Raw] = {
    "plain": {},
    "whole vocabulary": {"vocab_size": 64},
    "causal windows": {"settings": {"window": 16}},
    "causal": {"settings": {"causal": "all"}},
    "own": {"vocab_size": 64, "has_embedding": True, "has_own_head": True},
    "sinks": {"has_sinks": True, "qkv_bias": True, "o_bias": True},
    "scaled": {"embedding_scale": 2.0, "output_scale": 0.5, "logit_softcap": 30.0},
    "gated": {"foresees_anchor": True, "markov_rank": 4, "markov_type": "gated"},
    "rnn": {"foresees_anchor": True, "markov_rank": 4, "markov_type": "rnn", "confidence": "state"},
    "domino": {"vocab_size": 64, "foresees_anchor": True, **DOMINO},
    "unshifted domino": {"vocab_size": 64, **DOMINO, "num_uncorrected": 0},
}
BEYOND_SPECULATORS = {"causal", "own", "sinks", "scaled", "domino", "unshifted domino"}


@pytest.mark.parametrize("name", HEADS)
def test_export_then_import_is_bit_exact(tmp_path: Path, tiny_target: Target, name: str) -> None:
    head = made(tiny_target, **HEADS[name])
    save_head(tmp_path / "ours", head, tiny_target, dtype="float32", notes={"target": "tiny"})
    assert_same(head, load_head(tmp_path / "ours", tiny_target, dtype="float32"))
    dialects: tuple[Dialect, ...] = ("vllm", "speculators")
    for dialect in dialects:
        away, back = tmp_path / dialect, tmp_path / f"{dialect}-back"
        if dialect == "speculators" and name in BEYOND_SPECULATORS:
            with pytest.raises(CheckpointError, match="cannot be written for speculators"):
                head_files(head, tiny_target, dtype="float32", dialect=dialect)
            continue
        export_head(tmp_path / "ours", away, tiny_target, target_name="tiny", dialect=dialect)
        assert_same(head, import_head(away, back, tiny_target, target_name="tiny").head)
        assert_same(head, load_head(back, tiny_target, dtype="float32"))


SETTABLE = {
    "block_size": (1, 2, 8),
    "window": (0, 4, 16),
    "window_layers": ((), (1,)),
    "causal": ("", "all", "none"),
    "sinks": (False, True),
}


def test_every_head_that_can_be_trained_can_be_loaded(tmp_path: Path, tiny_target: Target) -> None:
    """What cannot be is refused before anything is trained."""
    num_made = 0
    for number, values in enumerate(itertools.product(*SETTABLE.values())):
        settings = dict(zip(SETTABLE, values, strict=True))
        is_short = settings["causal"] == "none" and 0 < settings["window"] < settings["block_size"]
        if settings["block_size"] == 1 or is_short or (settings["window_layers"] and not settings["window"]):
            with pytest.raises(ConfigError, match=r"draft\.(block_size|window|window_layers) "):
                made(tiny_target, settings=settings)
            continue
        head = made(tiny_target, settings=settings)
        folder, num_made = tmp_path / str(number), num_made + 1
        save_head(folder, head, tiny_target, dtype="float32", notes={})
        assert_same(head, load_head(folder, tiny_target, dtype="float32"))
        given = {name: value for name, value in settings.items() if value}
        assert given.items() <= head.drafter.facts().items(), "what was asked for"
    assert num_made > 20


@pytest.fixture
def folder(tmp_path: Path, tiny_target: Target) -> Path:
    save_head(tmp_path, made(tiny_target, vocab_size=64), tiny_target, dtype="float32", notes={})
    return tmp_path


def change(folder: Path, **changes: Any) -> None:
    """Keys of config.json; None takes one out."""
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def rename(folder: Path, how: Callable[[str], str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({how(name): value for name, value in tensors.items()}, folder / "model.safetensors")


def test_every_spelling_says_the_same(folder: Path, tiny_target: Target) -> None:
    head = load_head(folder, tiny_target, dtype="float32")
    rename(folder, lambda name: name.replace("layers.0.", "midlayer."))
    rename(folder, lambda name: name.replace("hidden_norm.", "encoder.output_norm_enc.").replace("fc.", "encoder.fc."))
    own = json.loads((folder / "config.json").read_text())["dflash_config"]
    change(folder, dflash_config={"block_size": 8}, block_size=None, **own)
    assert_same(head, load_head(folder, tiny_target, dtype="float32"))
    taps = own["target_layer_ids"]
    change(folder, target_layer_ids=None, aux_hidden_state_layer_ids=[i + 1 for i in taps])
    assert_same(head, load_head(folder, tiny_target, dtype="float32"))


def test_what_the_training_of_others_writes_changes_nothing(folder: Path, tiny_target: Target) -> None:
    """The keys of speculators' config classes and of published heads that say nothing of how a head is computed."""
    head = load_head(folder, tiny_target, dtype="float32")
    of_training = {"max_anchors": 3072, "auf": True, "ce_loss_alpha": 0.1, "l1_loss_alpha": 0.9, "num_anchors": 512}
    of_domino = {"projector_type": "dflash", "shift_label": False, "emb_dim": 256, "gru_hidden_dim": 1024}
    change(folder, **of_training, **of_domino, pure_draft_prefix_len=1, initial_context_length=4096)
    assert_same(head, load_head(folder, tiny_target, dtype="float32"))


@pytest.mark.parametrize(
    ("changes", "windows", "causal"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32}, (0, 32), (False, True)),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 32}, (32, 32), (True, True)),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 16}}, (16, 16), (False, False)),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 16, "causal": True}}, (16, 16), (True, True)),
        ({"is_causal": True}, (0, 0), (True, True)),
        ({"dflash_config": {"causal": True}, "is_causal": False}, (0, 0), (False, False)),
    ],
)
def test_windows_and_causality_are_read_as_published(
    folder: Path, tiny_target: Target, changes: Raw, windows: tuple[int, ...], causal: tuple[bool, ...]
) -> None:
    own = json.loads((folder / "config.json").read_text())["dflash_config"]
    change(folder, **changes | {"dflash_config": own | changes.get("dflash_config", {})})
    config = config_of(load_head(folder, tiny_target, dtype="float32"))
    assert tuple(config.backbone.kind(i).window for i in range(2)) == windows
    assert config.is_causal == causal


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"dflash_config": {"shift_label": True, "mask_token_id": 3}},
            "shift_label is True, .* in a dflash head",
        ),
        ({"window_size": 64}, "window_size: not known"),
        ({"dflash_config": {"temperature": 2, "mask_token_id": 3, "target_layer_ids": [1]}}, "dflash_config.temp"),
        ({"vocab_size": 65}, "vocabulary 65, width 32 and 6 layers"),
        ({"num_target_layers": 7}, "7 layers; .* has 64, 32 and 6"),
        ({"block_size": 1}, "block_size is 1"),
        ({"dflash_config": {"mask_token_id": 64, "target_layer_ids": [1]}}, "mask_token_id: 64; expected .* 0..63"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [6]}}, r"taps layers \(6,\)"),
        ({"aux_hidden_state_layer_ids": [1, 3, 4]}, "disagree"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "is_causal": False},
            "a window of 4, shorter than the block",
        ),
        ({"layer_types": ["sliding_attention"] * 2}, "windows without a size"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"projector_type": "domino"}, "projector_type is 'domino'"),
        (
            {"sample_from_anchor": False, "dspark_bonus_anchor": False},
            "sample_from_anchor: False; dspark_bonus_anchor: False",
        ),
        ({"shift_label": True}, "shift_label is True"),
        ({"num_hidden_layers": 3}, r"layers\.2\.\S* is missing|3 layers"),
        ({"draft_vocab_size": 48}, "d2t is missing"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    folder: Path, tiny_target: Target, changes: Raw, words: str
) -> None:
    change(folder, **changes)
    with pytest.raises((CheckpointError, ConfigError), match=words) as error:
        load_head(folder, tiny_target, dtype="float32")
    assert isinstance(error.value, SpecServeError)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "rnn",
            {"sample_from_anchor": False, "dspark_bonus_anchor": True},
            "whether it reads that slot too",
        ),
        ("gated", {"markov_head_type": "fir"}, "markov_head_type is 'fir', .* 'vanilla' or 'gated' or 'rnn'"),
        ("domino", {"draft_vocab_size": 48}, "a domino head proposes all 64 tokens"),
    ],
)
def test_a_joint_head_that_is_not_computed_is_refused(
    tmp_path: Path, tiny_target: Target, name: str, changes: Raw, words: str
) -> None:
    save_head(tmp_path, made(tiny_target, **HEADS[name]), tiny_target, dtype="float32", notes={})
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ConfigError, match=words):
        load_head(tmp_path, tiny_target, dtype="float32")
