"""A layer of multi-token prediction as the package `speculators` saves it, and the draft logits that it computed
(tools/compare_speculators.py). Neither torch nor the package is needed here."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import rounding
from mtp_case import SEQ, TARGETS, Case, our_logits
from safetensors.numpy import load_file
from same_head import assert_same_head

from specserve.interop import doctor
from specserve.interop.convert import describe_target, export_head, import_head
from specserve.interop.head import load_head

GOLDENS = Path(__file__).parent.parent / "goldens" / "mtp"


@pytest.mark.parametrize("name", TARGETS)
def test_draft_logits_are_those_of_speculators(tmp_path: Path, name: str) -> None:
    """Of every position that it has drafts for. The layer is read as it lies there, by `import`, and as our own export
    writes it: all the same."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TARGETS[name]))
    target = describe_target(tmp_path / "tiny")
    golden = GOLDENS / name
    case, expected = Case.load(golden / "case.npz")
    head, number = load_head(golden, target, dtype="float32"), len(expected)
    assert number > SEQ // 2
    assert np.abs(expected).max() > 1, "logits that say something"
    off = rounding.tolerance(lambda params: our_logits(dataclasses.replace(head, params=params), case), head.params)
    rounding.assert_same(our_logits(head, case)[:number], expected, off[:number])
    assert doctor.examine(golden, target).errors == []
    import_head(golden, tmp_path / "ours", target, target_name="tiny")
    assert_same_head(head, load_head(tmp_path / "ours", target, dtype="float32"))
    export_head(tmp_path / "ours", tmp_path / "back", target, target_name="tiny", dialect="speculators")
    exported, saved = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", golden))
    assert exported.keys() == saved.keys()
    for tensor, value in saved.items():
        np.testing.assert_array_equal(exported[tensor], value, tensor)
