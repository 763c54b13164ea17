"""The draft doctor by running: slips of a head's files that no file shows are found, named and undone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file

from specserve.checkpoints.load import Target
from specserve.checkpoints.source import BUNDLED_HEADS
from specserve.data.dataset import Prompt
from specserve.eval.prompts import load_questions
from specserve.eval.trial import DEVIATIONS, Texts, deviations, find_misreading, is_below, noted_rates, run_head
from specserve.interop import doctor
from specserve.interop.convert import write_head
from specserve.interop.findings import Copy
from specserve.interop.formats import format_named
from specserve.interop.head import load_head, save_head
from specserve.speculative.acceptance import Acceptance
from specserve.tokenizer import Tokenizer
from specserve.train.acceptance import AcceptanceMeter, Arm

BUNDLED_EAGLE3 = BUNDLED_HEADS["pydoc-eagle3"]  # every engine's layout can hold it
BITS = np.dtype(ml_dtypes.bfloat16)  # safetensors finds it once it is registered
Plant = Callable[[dict[str, Any], dict[str, np.ndarray]], object]


def change(name: str, how: Callable[[np.ndarray], np.ndarray]) -> Plant:
    return lambda raw, tensors: tensors.update({name: np.ascontiguousarray(how(tensors[name]))})


def swap(one: str, other: str) -> Plant:
    return lambda raw, tensors: tensors.update({one: tensors[other], other: tensors[one]})


def halves(raw: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    for name in "qkv":
        change(f"midlayer.self_attn.{name}_proj.weight", lambda w: np.roll(w, w.shape[1] // 2, axis=1))(raw, tensors)


def blocks(weight: np.ndarray) -> np.ndarray:
    return weight.reshape(len(weight), 3, -1)[:, ::-1].reshape(weight.shape)


def taps(raw: dict[str, Any], _tensors: object) -> None:
    raw["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}


def rotary(raw: dict[str, Any], _tensors: object) -> None:
    raw.update(rope_theta=1e6, rope_parameters={"rope_type": "default", "rope_theta": 1e6})


SLIPS: list[tuple[str, Plant]] = [
    ("o_proj is stored transposed", change("midlayer.self_attn.o_proj.weight", np.transpose)),
    ("norm_output is true", lambda raw, tensors: raw.pop("norm_output")),
    ("8 heads of 64", lambda raw, _: raw.update(num_attention_heads=16, num_key_value_heads=8, head_dim=32)),
    ("gate_proj and up_proj", swap("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight")),
    ("the hidden state first", halves),
    ("post_attention_layernorm and norm", swap("midlayer.post_attention_layernorm.weight", "norm.weight")),
    ("in the order high, middle, low", change("fc.weight", blocks)),
]

# These cost the bundled head at most 0.04 of its 1.39 drafts in a row, which over texts like these is no more than
# chance: no run of the head can find them, and no repair is advised of what costs nothing. Other heads may lose more.
SMALL_SLIPS: list[tuple[str, Plant]] = [
    ("the taps are the outputs of layers [1, 3, 4]", taps),
    ("the rotary settings are the target's", rotary),
    ("rms_norm_eps is the target's", lambda raw, _: raw.update(rms_norm_eps=1e-5)),
    ("norm_before_residual is false", lambda raw, _: raw.update(norm_before_residual=True)),
]

# over a few texts norm_before_residual does nearly as well, and so do taps with their norms or without
AMBIGUOUS = {"norm_output is true", "in the order high, middle, low"}


@pytest.fixture(scope="module")
def prompts(pydoc_tokenizer: Tokenizer) -> list[Prompt]:
    chats = [[{"role": "user", "content": question.turns[0]}] for question in load_questions("pydoc", 12)]
    return [Prompt("pydoc", pydoc_tokenizer.render_chat(chat)) for chat in chats]


@pytest.fixture(scope="module")
def texts(pydoc_target: Target, prompts: list[Prompt]) -> Texts:
    head = load_head(BUNDLED_EAGLE3, pydoc_target, dtype="float32")
    arm = Arm("chain:3")
    meter = AcceptanceMeter(pydoc_target, head.drafter, [arm], prompts, max_new_tokens=80)
    return Texts(pydoc_target, prompts, meter.measure(head.params, head.target_ids, arm).answers)


@pytest.fixture
def slipped(tmp_path: Path, plant: Plant) -> tuple[Path, Copy]:
    """The shipped head with a slip: its folder, and its files to mend."""
    raw = json.loads((BUNDLED_EAGLE3 / "config.json").read_text())
    tensors = load_file(BUNDLED_EAGLE3 / "model.safetensors")
    plant(raw, tensors)
    write_head(tmp_path, tensors, raw, {})
    return tmp_path, Copy(raw, tensors)


@pytest.mark.slow
@pytest.mark.parametrize(("description", "plant"), [*SLIPS, *SMALL_SLIPS])
def test_each_slip_has_a_repair_that_undoes_it(
    slipped: tuple[Path, Copy], pydoc_target: Target, description: str
) -> None:
    folder, copy = slipped
    assert not doctor.examine(folder, pydoc_target).errors, "no file shows it"
    repair = next(each for each in format_named(copy.raw).repairs(folder, pydoc_target) if description in each.what)
    repair.fix(copy)
    write_head(folder, copy.tensors, copy.raw, {})
    repaired, shipped = (load_head(each, pydoc_target, dtype="float32") for each in (folder, BUNDLED_EAGLE3))
    assert repaired.drafter == shipped.drafter
    jax.tree.map(np.testing.assert_array_equal, repaired.params, shipped.params)


@pytest.mark.slow
@pytest.mark.parametrize(("description", "plant"), SLIPS)
def test_running_the_head_finds_the_slip(slipped: tuple[Path, Copy], texts: Texts, description: str) -> None:
    """Among all repairs; and in the head as it shipped, which it is then, nothing further is found."""
    folder, copy = slipped
    found, num_tried = find_misreading(folder, texts, dtype="float32")
    assert found is not None
    assert description in found.what, found
    assert num_tried > 30, "the best reading is tried for further slips"
    if description in AMBIGUOUS and found.fix is None:
        assert "just as much is accepted if" in found.mend, "what would be a guess is not repaired"
        return
    assert found.fix is not None
    found.fix(copy)
    write_head(folder, copy.tensors, copy.raw, {})
    heads = [load_head(each, texts.target, dtype="float32") for each in (folder, BUNDLED_EAGLE3)]
    repaired, shipped = map(texts.accepted, heads)
    np.testing.assert_array_equal(repaired, shipped)


@pytest.mark.slow
@pytest.mark.parametrize(("description", "plant"), SMALL_SLIPS)
def test_a_slip_that_costs_next_to_nothing_is_taken_for_chance(
    slipped: tuple[Path, Copy], texts: Texts, description: str
) -> None:
    del description
    folder, _ = slipped
    found, shipped = (
        texts.accepted(load_head(each, texts.target, dtype="float32")) for each in (folder, BUNDLED_EAGLE3)
    )
    assert abs(deviations(shipped, found)) < DEVIATIONS
    assert shipped.mean() - found.mean() < 0.05


@pytest.mark.slow
def test_a_head_that_knows_nothing_is_reported(tmp_path: Path, tiny_target: Target, rng: np.random.Generator) -> None:
    head = tiny.random_head(tiny_target.config, seed=1, num_heads=2, num_kv_heads=1, head_dim=6)
    save_head(tmp_path, head, tiny_target, dtype="float32", notes={})
    prompts = [Prompt("any", rng.integers(3, 64, 9).tolist()) for _ in range(4)]
    trial = run_head(tmp_path, tiny_target, prompts, max_tokens=16, dtype="float32")
    assert [finding.code for finding in trial.findings] == ["knows-nothing"]
    assert trial.num_tried > 5
    noted = {"acceptance": {"speculation": "chain:3", "accept_rate": list(trial.acceptance.accept_rate)}}
    save_head(tmp_path, head, tiny_target, dtype="float32", notes=noted)
    again = run_head(tmp_path, tiny_target, prompts, max_tokens=16, dtype="float32")
    assert (again.findings, again.num_tried) == ([], 0), "what the notes promise is kept, so nothing is tried"


def test_what_notes_promise_is_compared_by_depth() -> None:
    found = Acceptance(400, 1200, (280, 200, 20))
    assert noted_rates({"acceptance": {"speculation": "chain:3", "accept_rate": [0.7, 0.7]}}) == (0.7, 0.7)
    assert noted_rates({"acceptance": {"speculation": "tree:4x2x7", "accept_rate": [0.9]}}) == ()
    assert not is_below(found, (0.72, 0.74, 0.12))
    assert is_below(found, (0.72, 0.74, 0.3))
    assert is_below(found, (0.85,))
    assert deviations(np.array([1, 1, 1, 1, 0]), np.array([0, 0, 0, 0, 0])) == 2.0
