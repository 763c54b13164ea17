"""The one line, without a hub: from a folder and a file of questions to a head that an engine serves; and `kill -9` in
each of its stages changes nothing. As a program it is one such line, which may kill itself (see `start`)."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
import tiny_run
from quick_compile import compile_quickly
from tiny_folder import write_folder, write_mixture
from tiny_run import curve, metrics
from typer.testing import CliRunner

from specserve.answers.row_file import RowFile
from specserve.checkpoints.tensors import TensorFolder, write_json, write_tensors
from specserve.cli.main import app
from specserve.interop.notes import read_notes
from specserve.train.run import budget as budgets

pytestmark = pytest.mark.slow
SMALL = {
    "max-steps": 4,
    "seq-len": 64,
    "rollout": 2,
    "batch-size": 4,
    "eval-prompts": 2,
    "eval-tokens": 4,
    "answer-tokens": 8,
    "answer-slots": 4,
    "speculation": "chain:1",
    "log-every": 1,
}


@pytest.fixture(autouse=True)
def _optax_promotes() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """`specserve train` with a target and data as people have them, and little of all."""
    made = tmp_path_factory.mktemp("made")
    folder, mixture = write_folder(made / "target"), write_mixture(made / "mix.jsonl")
    flags = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    return ["train", "--target", str(folder), "--source", str(mixture), "--regenerate", *flags]


def run(line: list[str], output: Path, cache: Path, *more: str) -> str:
    """The line in this process."""
    environment = {"XDG_CACHE_HOME": str(cache), "COLUMNS": "120"}
    result = CliRunner().invoke(app, [*line, "--output", str(output), *more], env=environment)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def start(line: list[str], output: Path, cache: Path, death: str, *more: str) -> None:
    """The line as a process of its own, which kills itself: `answer 5` within the writing of the fifth answer, `step 2`
    after the second step, `report` before what was measured at the end is written."""
    setting = {"line": [*line, "--output", str(output), *more], "death": death}
    kept = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    environment = {"XDG_CACHE_HOME": str(cache), "JAX_COMPILATION_CACHE_DIR": f"{kept}-runs"}
    process = subprocess.run(
        [sys.executable, __file__, json.dumps(setting)],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == -signal.SIGKILL, process.stdout + process.stderr


def test_a_line_killed_in_each_stage_ends_with_the_same_head(
    line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that nobody disturbs, and that has a budget which suffices."""
    monkeypatch.setattr(budgets, "PROBE_SECONDS", 0.2)
    whole, killed, cache = tmp_path / "whole", tmp_path / "killed", tmp_path / "other-cache"
    question, asked = {"turns": ["what is 99?", "and one more?"]}, tmp_path / "asked.jsonl"
    asked.write_text(json.dumps(question) + "\n")
    output = run(line, whole, tmp_path / "cache", "--budget", "2h", "--bench", str(asked))
    for said in ("The plan", "of the target itself", "expected tau", "fit the budget", "specserve serve --draft"):
        assert said in output
    assert json.loads((whole / "eval-asked.json").read_text())
    assert metrics(whole)[-1]["step"] == json.loads((whole / budgets.FILE).read_text())["steps"] == 4
    notes = read_notes(whole)
    assert notes["answers"] == "of the target"
    assert notes["acceptance"]["tau"] >= 1

    start(line, killed, cache, "answer 5", "--bench", "")
    assert not (killed / "model.safetensors").exists()
    start(line, killed, cache, "step 2", "--resume")
    start(line, killed, cache, "report", "--resume", "--bench", str(asked))
    assert (killed / "model.safetensors").exists()
    assert not (killed / "eval-asked.json").exists()
    run(line, killed, cache, "--resume", "--bench", str(asked))
    assert _taus(killed) == _taus(whole)
    assert curve(killed) == curve(whole)
    heads = [(folder / "model.safetensors").read_bytes() for folder in (killed, whole)]
    assert heads[0] == heads[1]


def test_a_head_that_follows_an_adapter_is_one_of_the_merged_target(line: list[str], tmp_path: Path) -> None:
    """To the last bit, from the target's answers on, where sums are exact. Its notes name the adapter beside the target
    that it is of."""
    target, rng = tmp_path / "target", np.random.default_rng(0)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    shutil.copytree(line[2], target)
    tensors, pairs = TensorFolder(target), {}
    whole = {name: tiny.few_bits(tensors.read(name), 10) for name in tensors.names()}
    write_tensors(target / "model.safetensors", whole)
    shutil.copytree(target, merged)
    line = [*line[:2], str(target), *line[3:]]
    for name in sorted(name for name in whole if "_proj.weight" in name):
        sides = {"A": rng.normal(size=(4, whole[name].shape[1])), "B": rng.normal(size=(whole[name].shape[0], 4))}
        a, b = (tiny.few_bits(sides[side] / 4, 4) for side in "AB")
        module = f"base_model.model.{name.removesuffix('.weight')}"
        pairs |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        whole[name] = whole[name] + np.float32(1.5) * (b @ a)
    write_tensors(merged / "model.safetensors", whole)
    adapter.mkdir()
    write_json(adapter / "adapter_config.json", {"peft_type": "LORA", "r": 4, "lora_alpha": 6})
    write_tensors(adapter / "adapter_model.safetensors", pairs)
    cache, outputs = tmp_path / "cache", {name: tmp_path / name for name in ("plain", "lora", "of-merged")}
    run(line, outputs["plain"], cache, "--bench", "")
    # after the plain target, whose answers are kept
    run(line, outputs["lora"], cache, "--bench", "", "--lora", str(adapter))
    run([*line[:2], str(merged), *line[3:]], outputs["of-merged"], cache, "--bench", "")
    heads = {name: (folder / "model.safetensors").read_bytes() for name, folder in outputs.items()}
    assert heads["lora"] == heads["of-merged"] != heads["plain"]
    assert curve(outputs["lora"]) == curve(outputs["of-merged"])
    plain, follows = read_notes(outputs["plain"]), read_notes(outputs["lora"])
    assert follows["target_fingerprint"] == plain["target_fingerprint"]
    assert (follows["lora"], len(follows["lora_fingerprint"])) == (str(adapter), 16)
    assert not {"lora", "lora_fingerprint"} & plain.keys()
    write_tensors(adapter / "adapter_model.safetensors", {name: 2 * each for name, each in pairs.items()})
    for more, words in (
        (("--resume", "--lora", str(adapter)), "the saved state belongs to another target"),
        (("--lora", str(target)), "expected PEFT's folder of an adapter"),
        (("--lora", str(adapter), "--quantization", "stored"), "leave out --quantization stored"),
    ):
        again = [*line, "--output", str(outputs["lora"]), "--bench", "", *more]
        result = CliRunner().invoke(app, again, env={"COLUMNS": "400"})
        assert words in str(result.exception), (result.output, result.exception)


def _taus(output: Path) -> list[tuple[str, float]]:
    """What was measured at the end, by way."""
    found = json.loads((output / "eval-asked.json").read_text())
    return [(each["speculation"], each["tau"]) for each in found["reports"]]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arrange(death: str) -> None:
    where, _, number = death.partition(" ")
    if where == "answer":
        write, left = RowFile.write, [int(number)]

        def write_half(self: Any, row: dict[str, Any]) -> None:
            left[0] -= 1
            if left[0]:
                return write(self, row)
            self._file.write(json.dumps(row)[:30])
            self._file.flush()
            return _die()

        RowFile.write = write_half  # type: ignore[method-assign]
    elif where == "report":
        for name in ("rename", "replace"):
            setattr(os, name, tiny_run._dying(getattr(os, name), "eval-asked.json"))
    else:
        tiny_run._arrange(death)


def main() -> None:
    compile_quickly()
    jax.config.update("jax_disable_most_optimizations", True)
    setting = json.loads(sys.argv[1])
    _arrange(setting["death"])
    app(setting["line"], standalone_mode=False)


if __name__ == "__main__":
    main()
