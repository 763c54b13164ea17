"""benchmarks/over_http.py on a target of one's own: served, asked in its template and compared, as the bundled one."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import over_http as bench
import pytest
from tiny_folder import write_folder

from specserve.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
QUESTIONS = [{"turns": [f"what is {number}?", "and one more?"]} for number in range(8)]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return write_folder(tmp_path / "target")


def parse(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["compare", *words])
    return bench.parse({"f32": 4.0, "bf16": 2.0}, "")


def test_a_target_of_ones_own_is_asked_what_is_said(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody's questions are those of the bundled target, and each is rendered by the template of the one at hand."""
    with pytest.raises(SystemExit):
        parse(monkeypatch, "--target", str(target))
    assert "say what it is asked, such as --bench" in capsys.readouterr().err
    options = parse(monkeypatch, "--target", str(target), "--bench", str(target.parent / "asked.jsonl"))
    tokenizer = Tokenizer.load(target)
    texts = [tokenizer.decode(ids) for ids in bench.questions(target, options.bench, 4, 200)]
    assert len(set(texts)) == 4
    assert all("user\nwhat is" in text and text.endswith("assistant\n") for text in texts)
    with pytest.raises(bench.BenchmarkError, match="only 0 questions of 4"):
        bench.questions(target, options.bench, 4, 5)


@pytest.mark.slow
def test_a_target_of_ones_own_is_compared(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other engine is a second server of ours, which gives the same answers."""

    class Twin:
        name, weight_bytes = "twin", {"f32": 4.0, "bf16": 2.0}

        def __init__(self, folder: Path) -> None:
            self.folder = folder
            folder.mkdir(parents=True)

        def describe(self) -> str:
            return "the same once more"

        def servers(self, options: Any, folder: Path) -> Iterator[Any]:
            port = bench.free_port()
            command = [
                sys.executable,
                "-m",
                "specserve.cli.main",
                "serve",
                "--target",
                str(folder),
                "--port",
                str(port),
            ]
            command += ["--speculation", "off", "--max-model-len", str(bench.CONTEXT), "--no-constrained"]
            environment = {"PYTHONPATH": str(ROOT)}
            yield bench.Server(bench.Arm("twin", "f32", "off"), port, command, self.folder, environment, has_salt=True)

    monkeypatch.setattr(bench, "CONTEXT", 256)  # the tiny target has no more than 512
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = "--rounds 1 --prompts 2 --clients 1,2 --max-tokens 20 --speculation off,ngram:2 --threads 1 --serve f32="
    asked = ["--target", str(target), "--bench", str(tmp_path / "asked.jsonl"), "--cache", str(tmp_path / "peer")]
    found = bench.compare(parse(monkeypatch, *words.split(), *asked), Twin, "twin")
    rows = {(row["arm"]["engine"], row["arm"]["speculation"], row["clients"]): row for row in found["rows"]}
    ways = [("specserve", "off"), ("specserve", "ngram:2"), ("twin", "off")]
    assert set(rows) == {(*way, clients) for way in ways for clients in (1, 2)}
    assert all(row["num_same"] == row["num_answers"] == 2 for row in rows.values())
    assert "specserve | f32 | ngram:2" in capsys.readouterr().out
