"""Which target a head ships for: by a preset's name, its hub id, and a folder that holds the same model."""

import json
from pathlib import Path

import jax
import pytest

from specserve.checkpoints.load import Target
from specserve.checkpoints.sound import check_weights
from specserve.checkpoints.source import BUNDLED, BUNDLED_FOLDER, BUNDLED_HEADS
from specserve.interop import bundled
from specserve.interop.bundled import bundled_head
from specserve.interop.head import load_head
from specserve.interop.notes import read_notes
from specserve.models.params import init_params
from specserve.models.presets import PRESETS
from specserve.models.target import target_spec
from specserve.plan.taus import expected
from specserve.serve.launch import find_names

NAME = "smollm2-135m"


def test_a_head_ships_for_the_target_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "BUNDLED_HEADS", BUNDLED_HEADS | {NAME: tmp_path / "head"})
    same, other = tmp_path / "same", tmp_path / "other"
    for folder, changes in ((same, {}), (other, {"num_hidden_layers": 29})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**PRESETS[NAME].facts, **changes}))
    assert bundled_head(NAME) == bundled_head(str(same)) == tmp_path / "head"
    assert bundled_head(PRESETS[NAME].hub_id) == tmp_path / "head"
    assert bundled_head(BUNDLED) == BUNDLED_HEADS["pydoc-mtp"]
    for name in (str(other), "qwen3-8b", "smollm2-360m", "nobody/nothing", "what is this", str(BUNDLED_FOLDER)):
        assert bundled_head(name) is None


def test_the_head_of_a_chat_model_ships() -> None:
    """Whole, small enough for a package, and known by its name alone: its notes say for which target it is."""
    folder = bundled_head(NAME)
    assert folder == BUNDLED_HEADS[NAME]
    assert find_names("", NAME) == (NAME, folder)
    config = PRESETS[NAME].config()
    target = Target(config, init_params(target_spec(config), jax.random.key(0), "bfloat16"), (2,), folder)
    head = load_head(folder, target, dtype="bfloat16")
    assert (head.drafter.name, head.drafter.draft_vocab_size) == ("mtp", 8192)
    check_weights(head.params, head.drafter.spec(), str(folder))
    assert sum(file.stat().st_size for file in folder.iterdir()) < 20e6
    assert read_notes(folder)["acceptance"]["tau"] == expected(NAME, 0).tau
