"""The doctor of block drafters: each planted fault is found under its own name, and alone; what can be repaired without
guessing comes back as the head it was."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from dflash_case import assert_same, config_of
from safetensors.numpy import load_file, save_file

from specserve.checkpoints.load import Target
from specserve.drafters.dflash.drafter import DFlash
from specserve.drafters.dflash.model import head_spec
from specserve.drafters.interface import Head
from specserve.interop import doctor
from specserve.interop.convert import export_head, write_head
from specserve.interop.dflash.dialects import CHECKS
from specserve.interop.head import load_head, save_head
from specserve.models.params import init_params

Raw = dict[str, Any]
Tensors = dict[str, np.ndarray]
Plant = Callable[[Raw, Tensors], object]


def put(**changes: Any) -> Plant:
    """Keys of the layers' settings, or beside them; None takes one out."""

    def plant(raw: Raw, _tensors: Tensors) -> None:
        for key, value in changes.items():
            place = raw.get("transformer_layer_config", raw) if key in raw.get("transformer_layer_config", {}) else raw
            place.pop(key, None)
            if value is not None:
                place[key] = value

    return plant


def own(**changes: Any) -> Plant:
    return lambda raw, _tensors: raw["dflash_config"].update(changes)


def tensor(name: str, how: Callable[[np.ndarray], np.ndarray]) -> Plant:
    return lambda _raw, tensors: tensors.update({name: how(tensors[name])})


def absolute(_raw: Raw, tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + np.arange(48)


def forget_taps(raw: Raw, _tensors: Tensors) -> None:
    del raw["dflash_config"]["target_layer_ids"]


def spell_by_use_swa(raw: Raw, _tensors: Tensors) -> None:
    del raw["layer_types"]
    raw["dflash_config"] |= {"use_swa": True, "swa_window_size": 16, "causal": True}


HEADS: dict[str, Raw] = {
    "plain": {},
    "windows": {"window": 16},
    "sinks": {},
    "speculators": {},
    "taps": {"aux_layers": (1, 3)},
}
FOUND: list[tuple[str, str, Plant, bool]] = [  # head, code, fault, and whether it is repaired
    ("plain", "config-keys", put(block_size=0), False),
    ("plain", "unknown-key", put(window_size=3), False),
    ("plain", "unknown-key", own(gamma=3), False),
    ("plain", "stated-twice", own(block_size=16), False),
    ("plain", "stated-twice", put(sample_from_anchor=True, dspark_bonus_anchor=True), False),
    ("plain", "uncomputed", own(attention_value_scale=0.5), False),
    ("plain", "mask-token", own(mask_token_id=64), False),
    ("windows", "windows", put(sliding_window=4, is_causal=False), False),
    ("windows", "windows", put(layer_types=["sliding_attention"]), False),
    ("windows", "forgotten-window", put(use_sliding_window=False), True),
    ("windows", "use-swa", spell_by_use_swa, True),
    ("speculators", "all-causal", put(sliding_window_non_causal=False), True),
    ("plain", "other-target", put(num_target_layers=8), False),
    ("plain", "block-taps", own(target_layer_ids=[1, 9]), False),
    ("taps", "taps-unstated", forget_taps, True),
    ("taps", "taps-slipped", own(target_layer_ids=[2, 4]), False),
    ("taps", "last-tap", own(target_layer_ids=[2, 5]), False),
    ("plain", "max-positions", put(max_position_embeddings=None), True),
    ("plain", "rope-missing", put(rope_parameters=None, rope_theta=None), True),
    ("plain", "missing-tensor", lambda _raw, tensors: tensors.pop("norm.weight"), False),
    ("plain", "shape", tensor("fc.weight", lambda x: x[:-1].copy()), False),
    ("plain", "unknown-tensor", lambda _raw, tensors: tensors.update(more=np.ones(3, np.float32)), False),
    ("plain", "absolute-d2t", absolute, True),
    ("plain", "not-finite", tensor("fc.weight", lambda x: np.where(x == x.max(), np.nan, x)), False),
    ("plain", "all-zero", tensor("fc.weight", np.zeros_like), False),
    ("plain", "layers", put(num_hidden_layers=1, layer_types=None), True),
    ("sinks", "sinks", lambda raw, _tensors: raw["dflash_config"].pop("attention_sink_bias"), True),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "head"


def write(folder: Path, target: Target, name: str) -> None:
    settings = HEADS[name]
    if name == "sinks":
        plain = config_of(tiny.random_block_head(target.config, seed=3, num_layers=2))
        config = dataclasses.replace(plain, backbone=dataclasses.replace(plain.backbone, has_sinks=True))
        params = jax.tree.map(lambda x: x + 0.5, init_params(head_spec(config), jax.random.key(0), "float32"))
        head = Head(DFlash(config), params, np.arange(48, dtype=np.int32))
    else:
        head = tiny.random_block_head(target.config, seed=3, num_layers=2, **settings)
    save_head(folder, head, target, dtype="float32", notes={})
    if name == "speculators":
        save_head(folder.with_name("ours"), head, target, dtype="float32", notes={})
        export_head(folder.with_name("ours"), folder, target, target_name="tiny", dialect="speculators", is_forced=True)


@pytest.mark.parametrize("name", HEADS)
def test_healthy_heads_are_left_in_peace(folder: Path, tiny_target: Target, name: str) -> None:
    write(folder, tiny_target, name)
    assert doctor.examine(folder, tiny_target).findings == []
    assert doctor.examine(folder, None).findings == []


@pytest.mark.parametrize(("name", "code", "plant", "is_repaired"), FOUND, ids=[each[1] for each in FOUND])
def test_each_fault_is_found_under_its_own_name(
    folder: Path, tmp_path: Path, tiny_target: Target, name: str, code: str, plant: Plant, is_repaired: bool
) -> None:
    write(folder, tiny_target, name)
    head = load_head(folder, tiny_target, dtype="float32")
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    plant(raw, tensors)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    doctor.examine(folder, None)  # reports less, and does not stumble
    report = doctor.examine(folder, tiny_target)
    assert {finding.code for finding in report.findings} - {"unknown-tensor"} | {code} == {code}, report.findings
    assert code in {finding.code for finding in report.findings}
    assert is_repaired == all(finding.fix for finding in report.findings if finding.code == code)
    assert "findings" in report.to_json()
    if is_repaired:
        (tmp_path / "repaired").mkdir()
        write_head(tmp_path / "repaired", *report.repaired(), {})
        assert doctor.examine(tmp_path / "repaired", tiny_target).findings == []
        assert_same(head, load_head(tmp_path / "repaired", tiny_target, dtype="float32"))


def test_every_check_is_planted_here() -> None:
    assert {check.code for check in CHECKS.values()} <= {code for _, code, _, _ in FOUND}
