"""The package `speculators` as an independent forward: heads as it saves them, and the draft logits that it computed
(tools/compare_speculators.py). Neither torch nor the package is needed here."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import rounding
from safetensors.numpy import load_file
from same_head import assert_same_head
from speculators_case import CASES, TARGET, WIDTH, Case, our_logits

from specserve.checkpoints.load import Target
from specserve.interop import doctor
from specserve.interop.convert import describe_target, export_head, import_head
from specserve.interop.eagle3 import dialects
from specserve.interop.head import load_head

GOLDENS = Path(__file__).parent.parent / "goldens" / "speculators"


@pytest.fixture
def target(tmp_path: Path) -> Target:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TARGET))
    return describe_target(tmp_path / "tiny")


@pytest.mark.parametrize("name", [*CASES, "theirs"])
def test_draft_logits_are_those_of_speculators(tmp_path: Path, target: Target, name: str) -> None:
    """Three rollout steps over two packed documents. The head is read as it lies there, by `import`, and as our own
    export writes it: all the same."""
    case, expected = Case.load(GOLDENS / name / "case.npz")
    head = load_head(GOLDENS / name, target, dtype="float32")
    assert (head.drafter.config.d_model, head.drafter.config.has_embedding) == (WIDTH, True)
    assert np.abs(expected).max() > 1, "logits that say something"
    off = rounding.tolerance(lambda params: our_logits(dataclasses.replace(head, params=params), case), head.params)
    rounding.assert_same(our_logits(head, case), expected, off)
    import_head(GOLDENS / name, tmp_path / "ours", target, target_name="tiny")
    assert_same_head(head, load_head(tmp_path / "ours", target, dtype="float32"))
    export_head(tmp_path / "ours", tmp_path / "back", target, target_name="tiny", dialect="speculators")
    assert_same_head(head, load_head(tmp_path / "back", target, dtype="float32"))
    exported, saved = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", GOLDENS / name))
    assert exported.keys() == saved.keys()
    for tensor, value in saved.items():
        np.testing.assert_array_equal(exported[tensor], value, tensor)


@pytest.mark.parametrize("name", [*CASES, "theirs"])
def test_the_doctor_finds_nothing_that_keeps_such_a_head_from_working(target: Target, name: str) -> None:
    assert doctor.examine(GOLDENS / name, target).errors == []


@pytest.mark.parametrize("name", CASES)
def test_what_we_write_is_what_speculators_was_given(target: Target, tmp_path: Path, name: str) -> None:
    """Every key of our config.json that speculators knows comes back from it with the value that we wrote."""
    import_head(GOLDENS / name, tmp_path / "ours", target, target_name="tiny")
    export_head(tmp_path / "ours", tmp_path / "back", target, target_name="tiny", dialect="speculators")
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "back", GOLDENS / name))
    for key in (*dialects.FLAGS, "draft_vocab_size", dialects.TAP_IDS):
        assert ours[key] == theirs[key], key
    for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"):
        layer, saved = ours["transformer_layer_config"], theirs["transformer_layer_config"]
        assert layer[key] == saved.get(key, layer[key]), key
