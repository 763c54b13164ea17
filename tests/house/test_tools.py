"""What lies in tools/. `train_target.py`: from nothing to a folder that the package loads, resumable on the way;
`draw_pictures.py`: the pictures of the documents."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

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


def test_a_stage_of_the_first_gpu_that_fails_or_hangs_costs_no_other(tmp_path: Path) -> None:
    first_gpu = _load("first_gpu")

    def command(name: str, code: str, seconds: float = 60, **environment: str) -> object:
        return first_gpu.Command(name, ("-c", code), seconds, environment)

    chosen = {
        "good": [command("says", "import os, specserve; print('first'); print(os.environ['SWITCH'])", SWITCH="on")],
        "bad": [
            command("fails", "raise SystemExit('no such device')"),
            command("hangs", "input(__import__('time').sleep(99))", 1),
        ],
        "late": [command("waits", "print('never')")],
    }
    results = list(first_gpu.run_stages(chosen, tmp_path, limit=60))
    found = [(each.stage, each.state, each.last) for each in results]
    assert found[:3] == [("good", "ok", "on"), ("bad", "failed", "no such device"), ("bad", "out of time", "")]
    assert (tmp_path / "good-says.log").read_text().splitlines() == ["first", "on"]
    (not_begun,) = first_gpu.run_stages({"late": chosen["late"]}, tmp_path, limit=0)
    assert not_begun.state == "not begun"


def test_the_commands_of_the_first_gpu_are_there_with_their_flags(tmp_path: Path) -> None:
    first_gpu = _load("first_gpu")
    every = [command for each in first_gpu.stages("./model", tmp_path).values() for command in each]
    assert len({command.name for command in every}) == len(every)
    for command in every:
        script, *words = command.words
        if script.startswith("-"):
            assert script in ("-c", "-m")
            continue
        source = (ROOT / script).read_text()
        assert all(f'"{word}"' in source for word in words if word.startswith("--"))
