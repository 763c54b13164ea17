"""Benchmarks of the server, from their command lines to their tables, on a target of random weights: nothing that they
print is a figure here, but each of them must come to its end on any target."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import tiny
from tiny_folder import write_folder

from specserve.checkpoints.load import load_target
from specserve.interop.head import save_head

CASES = {
    "account": "--ways chain:1 --clients 1,2 --rounds 1 --max-tokens 8",
    "changing_load": "--clients 1 --max-tokens 8",
    "first_minute": "--clients 0,1 --seconds 2 --max-slots 2",
    "grammars": "--clients 1 --rounds 1 --max-tokens 8 --speculation chain:1",
    "http_layer": "--clients 2 --rounds 1 --max-tokens 8 --speculation chain:1",
    "memory": "--minutes 0.1 --clients 4 --speculation chain:1",
    "ways": "--clients 1,2 --rounds 1 --prompts 4 --max-tokens 8",
    "kv_cache": "--prompts 2 --max-tokens 8 --speculation chain:1 --dtypes float32,int8",
}
SHORTER = {
    "changing_load": {"PHASES": (0, 1), "SECONDS": 0.4, "SETTLING": 0.1},
    "memory": {"FILLING": 1, "SAMPLE_SECONDS": 1.0, "SETTLE_SECONDS": 1.0, "IDLE_SECONDS": 1.0},
}
ASKED = 60  # questions
ASKS_NONE = {"memory"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of a target, its head and its questions."""
    folder = tmp_path_factory.mktemp("served")
    config = write_folder(folder / "target") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 4096}))
    target = load_target(config.parent, dtype="float32")
    save_head(folder / "head", tiny.random_head(target.config, 1), target, dtype="float32", notes={})
    questions = [{"turns": [f"what is {number}?"]} for number in range(ASKED)]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    return ["--target", str(folder / "target"), "--draft", str(folder / "head"), "--bench", str(folder / "asked.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_comes_to_its_end(
    name: str,
    served: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    module = importlib.import_module(name)
    for constant, value in SHORTER.get(name, {}).items():
        monkeypatch.setattr(module, constant, value)
    monkeypatch.setattr(sys, "argv", [name, *(served[:4] if name in ASKS_NONE else served), *CASES[name].split()])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert module.main() in (0, None)
    shown = capfd.readouterr().out
    assert re.search(r"\d", shown), shown
    assert not re.search(r"\b(nan|inf)\b", shown), shown
