"""The exported step runs where this package is not, and says what the engine says."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engines import MAX_LEN, PAGE_SIZE, Reference
from typer.testing import CliRunner

from specserve.checkpoints.load import Target
from specserve.cli.main import app
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.errors import ConfigError
from specserve.serve.launch import Models
from specserve.serve.stablehlo import MANIFEST, RUNNER, WEIGHTS, ExportSizes, export_step

SIZES = ExportSizes(batch=2, max_len=MAX_LEN, page_size=PAGE_SIZE, chunk=16)
ELSEWHERE = """
import json, pathlib, runpy, sys
sys.modules["specserve"] = None  # to import it is an error
names = runpy.run_path(sys.argv[1])
exported = names["Exported"](pathlib.Path(sys.argv[1]).parent)
for prompt, count, is_plain in json.loads(sys.argv[2]):
    print(json.dumps(exported.generate(prompt, count, is_plain=is_plain)))
"""


@pytest.fixture
def models(tiny_target: Target, tiny_head: Head) -> Models:
    return Models("tiny", tiny_target, tiny_head, None)


def run_elsewhere(folder: Path, asks: list[tuple[list[int], int, bool]]) -> list[list[int]]:
    """The tokens that a process says which cannot import specserve."""
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(folder / RUNNER), json.dumps(asks)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_without_this_package_the_step_says_what_the_engine_says(
    models: Models, reference: Reference, tmp_path: Path, rng: np.random.Generator
) -> None:
    """A prompt of one chunk and one of several, plainly and by a tree; on every platform that it is lowered for, which
    JAX refuses for an operation that only a library of ours would know."""
    folder = tmp_path / "exported"
    names = export_step(models, parse_speculation("tree:3x2x6"), SIZES, ("cpu", "cuda", "tpu"), folder)
    assert names == ["begin", "admit", "prefill", "plain", "speculative", "catch_up"]
    assert {path.name for path in folder.iterdir()} == {MANIFEST, RUNNER, WEIGHTS, *(f"{n}.stablehlo" for n in names)}
    asked = [reference.any_ask(rng, length, is_sampled=False) for length in (5, 37)]
    expected = [reference.answer(ask).token_ids for ask in asked]
    asks = [(list(ask.prompt), 24, is_plain) for ask in asked for is_plain in (False, True)]
    ends = set(json.loads((folder / MANIFEST).read_text())["eos_ids"])
    for (_, count, _), said, wanted in zip(
        asks, run_elsewhere(folder, asks), [each for each in expected for _ in range(2)], strict=True
    ):
        end = next((i + 1 for i, token_id in enumerate(wanted) if token_id in ends), count)
        assert said == wanted[: min(end, count)]


def test_what_cannot_be_exported_is_said(models: Models, tmp_path: Path) -> None:
    tree = parse_speculation("chain:2")
    headless = dataclasses.replace(models, head=None)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for given, said in (
        ((models, tree, SIZES, ("cpu", "abacus"), tmp_path / "new"), "abacus"),
        ((models, tree, SIZES, (), tmp_path / "new"), "--platforms"),
        ((models, tree, SIZES, ("cpu",), tmp_path / "full"), "not empty"),
        ((headless, tree, SIZES, ("cpu",), tmp_path / "new"), "no head"),
        ((models, tree, dataclasses.replace(SIZES, max_len=10_000), ("cpu",), tmp_path / "new"), "context"),
        ((models, tree, dataclasses.replace(SIZES, width=99), ("cpu",), tmp_path / "new"), "--width"),
    ):
        with pytest.raises(ConfigError, match=said):
            export_step(*given)
    assert not (tmp_path / "new").exists()
    for arguments in ([], ["--to", "vllm", "--stablehlo", "x"], ["--stablehlo", "x", "--speculation", "auto"]):
        assert isinstance(CliRunner().invoke(app, ["export", *arguments]).exception, ConfigError)
