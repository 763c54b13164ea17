"""What lies in tools/. `train_target.py`: from nothing to a folder that the package loads, resumable on the way;
`draw_pictures.py`: the pictures of the documents; `first_gpu.py` and `first_tpu.py`: what waits for a device."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
from test_doc_commands import check_script, check_specserve

from specserve.checkpoints.load import load_target
from specserve.data.chat_masks import encode_chat
from specserve.errors import CheckpointError, ConfigError
from specserve.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
TINY = {
    "vocab_size": 320,
    "layers": 1,
    "d_model": 32,
    "d_ff": 64,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "context": 128,
    "batch_size": 4,
    "seq_len": 32,
    "eval_rows": 4,
}


@pytest.fixture(autouse=True)
def _dtype_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax's Muon raises a float to an integer power
        yield


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and type hints look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return _load("train_target")


def test_the_pictures_are_those_that_the_tool_draws() -> None:
    drawn = _load("draw_pictures")
    for name, draw in drawn.PICTURES.items():
        assert (drawn.FOLDER / name).read_text() == draw().svg(), f"{name}: run `python tools/draw_pictures.py`"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "tiny.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n} and {n}?"},
                {"role": "assistant", "content": f"{n} and {n} is {2 * n}." * (1 + n % 4)},
            ]
        }
        for n in range(120)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_target_is_trained_resumed_and_loadable(tool, corpus, tmp_path):
    def new(folder: str, *, resume: bool = False):
        return tool.Run(tool.TargetRun(output=str(tmp_path / folder), data=str(corpus), steps=4, resume=resume, **TINY))

    whole = new("whole")
    loss = whole.train()
    broken = new("broken")
    broken.train(lambda _text: setattr(broken, "is_stopping", True))  # the first loss is read at step 2
    assert broken.step == 2
    with pytest.raises(CheckpointError, match="--resume"):
        new("broken")
    assert new("broken", resume=True).train() == loss

    target = load_target(tmp_path / "whole", dtype="bfloat16")
    assert target.eos_ids == (2, 0)
    assert target.config.qk_norm
    assert target.config.tie_embeddings
    for saved, trained in zip(jax.tree.leaves(target.params), jax.tree.leaves(whole.state.params), strict=True):
        np.testing.assert_array_equal(np.asarray(saved), np.asarray(trained.astype("bfloat16")))
    tokenizer = Tokenizer.load(tmp_path / "whole")
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert tokenizer.vocab_size <= TINY["vocab_size"]
    text = "7 und 7 ist vierzehn, naïve 🙂\n\tok"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    token_ids, loss_mask = encode_chat(
        tokenizer, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "7."}]
    )
    assert tokenizer.decode([t for t, m in zip(token_ids, loss_mask, strict=True) if m]) == "7."


def test_the_written_config_is_the_bundled_targets_by_default(tool):
    from specserve.checkpoints.source import BUNDLED_FOLDER

    bundled = json.loads((BUNDLED_FOLDER / "config.json").read_text())
    del bundled["transformers_version"]
    assert tool.hf_config(tool.TargetRun(output="unused")) == bundled


def test_bad_settings_are_config_errors(tool, corpus, tmp_path):
    with pytest.raises(ConfigError, match="--steps or --minutes"):
        tool.Run(tool.TargetRun(output=str(tmp_path), data=str(corpus)))
    with pytest.raises(ConfigError, match="--kv-heads"):
        tool.hf_config(tool.TargetRun(output=str(tmp_path), heads=3, kv_heads=2))


@pytest.fixture(scope="module")
def first_device() -> ModuleType:
    return _load("first_device")


def test_a_stage_that_fails_or_hangs_costs_no_other(first_device: ModuleType, tmp_path: Path) -> None:
    def command(name: str, code: str, seconds: float = 60, **environment: str) -> object:
        return first_device.Command(name, ("-c", code), seconds, environment)

    say = "import os, specserve; print('|1|'); print(os.environ['DEVICE'], os.environ['SWITCH'])"
    chosen = {
        "good": [command("says", say, SWITCH="on")],
        "bad": [
            command("fails", "raise SystemExit('no such device')"),
            command("hangs", "input(__import__('time').sleep(99))", 1),
        ],
        "late": [command("waits", "print('never')")],
    }
    results = list(first_device.run_stages(chosen, tmp_path, limit=60, environment={"DEVICE": "tpu", "SWITCH": "off"}))
    found = [(each.stage, each.state, each.last) for each in results]
    assert found[:3] == [("good", "ok", "tpu on"), ("bad", "failed", "no such device"), ("bad", "out of time", "")]
    assert results[0].lines == ["|1|", "tpu on"]
    assert (tmp_path / "good-says.log").read_text().splitlines() == ["|1|", "tpu on"]
    (not_begun,) = first_device.run_stages({"late": chosen["late"]}, tmp_path, limit=0)
    assert not_begun.state == "not begun"


@pytest.mark.parametrize("name", ["first_gpu", "first_tpu"])
def test_the_commands_of_all_stages_are_there_with_their_flags(
    name: str, first_device: ModuleType, tmp_path: Path
) -> None:
    models = first_device.Models("qwen3-8b", 2048, "tensor=4", "./model", tmp_path)
    every = [command for each in _load(name).stages(models).values() for command in each]
    assert len({command.name for command in every}) == len(every)
    for command in every:
        script, *words = command.words
        if script == "-c":
            compile(words[0], command.name, "exec")
        elif words[:1] == ["specserve.cli.main"]:
            check_specserve(words[1:])
        elif script == "-m":
            assert words[0] == "pytest"
        else:
            check_script(script, words)


def test_without_the_device_no_stage_runs_in_its_place(
    first_device: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here there is a CPU, which the laws and figures of a TPU are not for."""
    monkeypatch.setattr(sys, "argv", ["first_tpu.py", "--stages", "versions", "--output", str(tmp_path)])
    assert first_device.main("first_tpu", "", "tpu", _load("first_tpu").stages) == 1
    (found,) = json.loads((tmp_path / "first_tpu.json").read_text())
    assert (found["stage"], found["state"]) == ("versions", "failed")
    assert "tpu" in found["last"]
    assert "| versions | versions | failed |" in capsys.readouterr().out
