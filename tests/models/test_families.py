"""Every family's forward equals another implementation's, however it is called (tests/support/parity.py), in logits and
in the
layers' outputs, but for rounding. Against transformers from goldens, live with `-m oracle`, and against plain NumPy.
What is called over pages has every kind of layer and every flag that a cache or fused parameters can get wrong; all
cases are, live."""

import itertools
from collections.abc import Callable
from pathlib import Path

import bailing
import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import seeded
from parity import CACHED, ONE_OF_EACH, RAWS, Case, Difference
from rounding import SHARE, assert_same, tolerance

from specserve.kernels.matmul import Rounded
from specserve.models.families.table import FAMILIES
from specserve.models.params import specs
from specserve.models.target import TargetParams, target_spec

QUICK = (("mistral4", "int8"), ("minimax-m3", "int8"), ("gpt-oss", "fp8"), ("lfm2-moe", "int4"))


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return parity.golden_case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=bailing.CASES)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return parity.plain_case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=RAWS)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return parity.live_case(request.param, tmp_path_factory.mktemp(request.param))


def _check(*differences: Difference) -> None:
    for each in differences:
        assert each.share <= 1, each


def _check_prompt(case: Case) -> None:
    assert np.abs(case.logits).max() > 1, "logits that say nothing prove nothing"
    assert case.tolerance[0].max() < SHARE, "this model is on an edge"
    _check(parity.prompt(case))


def _check_decode(case: Case) -> None:
    _check(parity.decode(case))


def _check_decode_unpadded(case: Case) -> None:
    _check(parity.decode(case, width=1))


def _check_tree(case: Case) -> None:
    _check(*parity.tree(case))


@pytest.mark.parametrize("golden", RAWS, indirect=True)
def test_a_prompt_equals_transformers(golden: Case) -> None:
    _check_prompt(golden)


@pytest.mark.parametrize("golden", [case for case in CACHED if case in RAWS], indirect=True)
def test_decoding_token_by_token_equals_transformers(golden: Case) -> None:
    _check_decode(golden)


@pytest.mark.parametrize("golden", [case for case in CACHED if case in RAWS], indirect=True)
def test_chunks_and_a_tree_equal_transformers(golden: Case) -> None:
    _check_tree(golden)


@pytest.mark.parametrize("golden", [case for case in CACHED if case in RAWS], indirect=True)
def test_groups_of_tokens_side_by_side_equal_transformers(golden: Case) -> None:
    if golden.config.is_recurrent:
        with pytest.raises(AssertionError, match="one group"):
            parity.side_by_side(golden)
    else:
        _check(parity.side_by_side(golden))


def test_families_that_transformers_lacks_equal_plain_numpy(plain: Case) -> None:
    _check_prompt(plain)


@pytest.mark.parametrize("plain", [case for case in CACHED if case in bailing.CASES], indirect=True)
@pytest.mark.parametrize("check", [_check_decode, _check_tree])
def test_over_pages_they_equal_plain_numpy(plain: Case, check: Callable[[Case], None]) -> None:
    check(plain)


@pytest.mark.parametrize(
    ("case", "to"),
    [
        pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in (*itertools.product(CACHED, ("int8", "int4")), ("gpt-oss", "fp8"))
    ],
)
def test_weights_in_few_bits_are_multiplied_as_the_numbers_that_they_are(
    case: str, to: Rounded, tmp_path: Path
) -> None:
    """Over pages, in chunks and a tree, in the form that serves."""
    _check_tree(parity.rounded_case(case, to, tmp_path))


@pytest.mark.oracle
@pytest.mark.parametrize("check", [_check_prompt, _check_decode, _check_decode_unpadded, _check_tree])
def test_live_transformers(live: Case, check: Callable[[Case], None]) -> None:
    check(live)


@pytest.mark.oracle
@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_what_transformers_keeps_in_float32_stays_so(case: str, tmp_path: Path) -> None:
    target, _, model = parity.build(case, tmp_path)
    kept = model._keep_in_fp32_modules_strict or ()
    for spec in specs(target_spec(target.config)):
        name = spec.name.replace(".expert_bias", ".e_score_correction_bias")
        assert spec.is_float32 or not any(part in name for part in kept), spec.name


@pytest.mark.oracle
@pytest.mark.parametrize("case", ["llama-dynamic", "llama-longrope"])
def test_ropes_that_go_by_the_length_are_not_stretched_within_the_original(case: str, tmp_path: Path) -> None:
    target, run, _ = parity.build(case, tmp_path)
    token_ids = seeded.tokens(target.config.vocab_size, seed=1)

    def ours(params: TargetParams) -> jax.Array:
        return parity.whole(params, target.config.for_length(32), jnp.asarray(token_ids))[0][:32]

    assert_same(ours(target.params), run(token_ids[:32])[0], tolerance(ours, target.params))


def test_every_family_has_a_case() -> None:
    assert {raw["model_type"] for raw in [*RAWS.values(), *bailing.CASES.values()]} == set(FAMILIES)
