"""Which target a head ships for: by a preset's name, its hub id, and a folder that holds the same model."""

import json
from pathlib import Path

import pytest

from specserve.checkpoints.source import BUNDLED, BUNDLED_FOLDER, BUNDLED_HEADS
from specserve.interop import bundled
from specserve.interop.bundled import bundled_head
from specserve.models.presets import PRESETS

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
