"""The packages `dflash` and `speculators` as independent forwards: block drafters as they save them, and the draft
logits that they computed (tools/compare_dflash.py). Neither torch nor the packages are needed here."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import rounding
from dense_head import DenseHead
from dflash_case import ANCHORS, BLOCK, GEMMA, SPECULATORS, TARGET, Z_LAB, Case, assert_same, our_logits, random_head
from safetensors.numpy import load_file

from specserve.checkpoints.load import Target
from specserve.interop import doctor
from specserve.interop.convert import describe_target, export_head, import_head
from specserve.interop.head import head_files, load_head, save_head

GOLDENS = Path(__file__).parent.parent / "goldens" / "dflash"
NAMES = [*(f"dflash-{name}" for name in Z_LAB), *(f"speculators-{name}" for name in SPECULATORS)]


@pytest.fixture
def target(tmp_path: Path) -> Target:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TARGET))
    return describe_target(tmp_path / "tiny")


# the others have all that these have, and more
_PLAINER = {"dflash-full", "dflash-causal", "speculators-full", "speculators-part", "speculators-dflash2"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in _PLAINER else name for name in NAMES]
)
def test_draft_logits_are_those_of_the_published_packages(tmp_path: Path, target: Target, name: str) -> None:
    """Blocks behind three anchors of a row, served from pages. The head is read as it lies there, by `import`, and as
    our own export writes it: all the same."""
    case, expected = Case.load(GOLDENS / name / "case.npz")
    head = load_head(GOLDENS / name, target, dtype="float32")
    assert np.abs(expected[0]).max() > 1, "logits that say something"
    off = rounding.tolerance(lambda params: our_logits(dataclasses.replace(head, params=params), case), head.params)
    rounding.assert_same(our_logits(head, case), expected, off)
    assert doctor.examine(GOLDENS / name, target).errors == []
    import_head(GOLDENS / name, tmp_path / "ours", target, target_name="tiny")
    assert_same(head, load_head(tmp_path / "ours", target, dtype="float32"))
    dialect = "vllm" if name.startswith("dflash") else "speculators"
    export_head(tmp_path / "ours", tmp_path / "back", target, target_name="tiny", dialect=dialect)
    assert_same(head, load_head(tmp_path / "back", target, dtype="float32"))
    exported, saved = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", GOLDENS / name))
    assert exported.keys() == saved.keys()
    for tensor, value in saved.items():
        np.testing.assert_array_equal(exported[tensor], value, tensor)


def test_a_block_of_gemma_4s_layers_is_that_of_a_plain_numpy_twin(tmp_path: Path, target: Target) -> None:
    """DeepSpec's `Gemma4DSparkModel`, for which there is no package."""
    head, case = random_head(target, GEMMA), Case.random(seed=3)
    save_head(tmp_path / "head", head, target, dtype="float32", notes={})
    assert_same(head, load_head(tmp_path / "head", target, dtype="float32"))
    tensors, raw = head_files(head, target, dtype="float32", dialect="vllm", target_name="tiny")
    assert raw["architectures"] == ["Gemma4DSparkModel"]
    twin = DenseHead(raw, tensors)
    expected = [twin.block(case.aux_hidden_states[:at], case.token_ids[at], BLOCK) for at in ANCHORS]
    off = rounding.tolerance(lambda params: our_logits(dataclasses.replace(head, params=params), case)[0], head.params)
    rounding.assert_same(our_logits(head, case)[0], np.stack(expected), off)
