"""P-EAGLE heads as the package `speculators` saves them, and the draft logits that it computed
(tools/compare_speculators.py). Neither torch nor the package is needed here."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import rounding
from peagle_case import SEQ, SLOTS, TARGET, Case, elements, our_logits
from safetensors.numpy import load_file
from same_head import assert_same_head

from specserve.checkpoints.load import Target
from specserve.interop import doctor
from specserve.interop.convert import describe_target, export_head, import_head
from specserve.interop.head import load_head

GOLDENS = Path(__file__).parent.parent / "goldens" / "peagle"


@pytest.fixture
def target(tmp_path: Path) -> Target:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TARGET))
    return describe_target(tmp_path / "tiny")


@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.slow), "flags", "layers", "windows"])
def test_draft_logits_are_those_of_speculators(tmp_path: Path, target: Target, name: str) -> None:
    """Every slot of one row. The head is read as it lies there, by `import`, and as our own export writes it: all the
    same."""
    case, expected = Case.load(GOLDENS / name / "case.npz")
    head = load_head(GOLDENS / name, target, dtype="float32")
    assert head.drafter.max_tree_depth == SLOTS
    assert np.abs(expected).max() > 1, "logits that say something"
    anchors, slots = elements(head.drafter.config, case.rows)
    is_there = anchors + slots < SEQ
    assert (slots[is_there] == SLOTS - 1).any()
    off = rounding.tolerance(lambda params: our_logits(dataclasses.replace(head, params=params), case), head.params)
    rounding.assert_same(our_logits(head, case)[is_there], expected, off[is_there])
    assert doctor.examine(GOLDENS / name, target).errors == []
    import_head(GOLDENS / name, tmp_path / "ours", target, target_name="tiny")
    assert_same_head(head, load_head(tmp_path / "ours", target, dtype="float32"))
    export_head(tmp_path / "ours", tmp_path / "back", target, target_name="tiny", dialect="speculators")
    assert_same_head(head, load_head(tmp_path / "back", target, dtype="float32"))
    exported, saved = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", GOLDENS / name))
    assert exported.keys() == saved.keys()
    for tensor, value in saved.items():
        np.testing.assert_array_equal(exported[tensor], value, tensor)
