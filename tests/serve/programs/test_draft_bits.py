"""A head runs in the few bits that its notes or the settings say, where it is served and where training measures it."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from specserve.checkpoints.load import Target, in_few_bits
from specserve.data.dataset import Prompt
from specserve.drafters.settings import DraftQuantization
from specserve.errors import CheckpointError
from specserve.interop.head import save_head
from specserve.kernels.matmul import INT4_BLOCK, QuantizedMatrix
from specserve.models.params import is_product
from specserve.serve.launch import Models, load_beside, load_models
from specserve.train.acceptance import AcceptanceMeter, Arm
from specserve.train.evaluation import HeldOutEvaluator
from specserve.train.settings import EvalSettings


@pytest.fixture
def models(tiny_target: Target) -> Models:
    return Models("tiny", tiny_target, tiny.random_head(tiny_target.config, seed=0), None)


def _bits(leaf: Any) -> str | None:
    """The dtype of a rounded matrix; int4 where its numbers span no more, in blocks that each have a scale."""
    if not isinstance(leaf, QuantizedMatrix):
        return None
    values = np.asarray(leaf.values)
    is_int4 = values.dtype == np.int8 and leaf.block == INT4_BLOCK and int(values.max()) - int(values.min()) < 16
    return "int4" if is_int4 else str(values.dtype)


@pytest.mark.parametrize(
    ("noted", "asked", "expected"),
    [
        ("", "", None),
        ("int8", "", "int8"),
        ("int8", "none", None),
        ("", "stored", None),
        ("", "fp8", "float8_e4m3fn"),
        ("", "int4", "int4"),
        ("int4", "", "int4"),
    ],
)
def test_a_head_runs_in_the_bits_that_were_asked_for_or_noted(
    models: Models, tmp_path: Path, noted: str, asked: Any, expected: str | None
) -> None:
    """Every product of it, and its fingerprint shows it, so that no cost and no profile is taken for another's."""
    assert models.head is not None
    save_head(
        tmp_path, models.head, models.target, dtype="float32", notes={"draft_quantization": noted} if noted else {}
    )
    found = load_beside(dataclasses.replace(models, draft_quantization=asked), "", tmp_path)
    assert found.head is not None
    paths = jax.tree_util.tree_leaves_with_path(found.head.params, is_leaf=lambda x: isinstance(x, QuantizedMatrix))
    assert {_bits(leaf) for path, leaf in paths if is_product(path)} == {expected}
    assert (found.head_fingerprint == load_beside(models, "", tmp_path).head_fingerprint) == (asked == "")


def test_bits_that_nobody_knows_are_refused(models: Models, tmp_path: Path) -> None:
    assert models.head is not None
    save_head(tmp_path, models.head, models.target, dtype="float32", notes={"draft_quantization": "int3"})
    with pytest.raises(CheckpointError, match=r"draft_quantization is 'int3'; expected none, int8, fp8"):
        load_beside(models, "", tmp_path)


def test_bits_of_no_head_are_warned_of(tiny_target: Target, caplog: pytest.LogCaptureFixture) -> None:
    load_models(str(tiny_target.folder), "", has_tokenizer=False, draft_quantization="int8")
    assert "--draft-quantization int8, and there is no draft head yet" in caplog.text


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_run_measures_the_head_as_it_will_be_served(tiny_target: Target, bits: DraftQuantization) -> None:
    head = tiny.random_head(tiny_target.config, seed=0)
    prompts = [Prompt(str(seed), list(range(3 + seed, 40 + seed))) for seed in range(3)]
    settings = EvalSettings(speculation=("chain:2",), temperature=(2.0,), eval_tokens=24)
    arm = Arm("chain:2", 2.0)
    meter = AcceptanceMeter(tiny_target, head.drafter, [arm], prompts, max_new_tokens=24)
    of_bits = meter.measure(in_few_bits(head.params, bits), head.target_ids, arm).total
    evaluator = HeldOutEvaluator(
        tiny_target, head.drafter, head.target_ids, prompts, settings, quantization=bits, seed=0
    )
    assert evaluator.measure(head.params, is_last=True).arms[0].total == of_bits
    assert of_bits.num_accepted > 0, "nothing was accepted, so nothing was tested"
