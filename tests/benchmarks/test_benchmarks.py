"""benchmarks/: the figures that a comparison prints, from measurements that are made up."""

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        return importlib.import_module("side_by_side")


def test_rows_and_table(bench):
    ours, fast, peer = (
        bench.Arm(*names) for names in [("ours", "f32", "off"), ("ours", "f32", "chain:3"), ("peer", "f32", "off")]
    )

    def answer(prompt, pace, num_tokens=21, num_accepted=0, text="yes"):
        return bench.Answer(prompt, text, 5, num_tokens, num_accepted, 0.5, 0.5 + (num_tokens - 1) / pace)

    batches = []
    for number, slower in enumerate((1, 2)):  # in the second round the machine is slower, for all
        for arm, pace, accepted, text in ((ours, 40, 0, "yes"), (fast, 60, 10, "yes"), (peer, 50, 0, "no")):
            pace /= slower
            pair = [answer(0, pace, num_accepted=accepted), answer(1, pace, num_accepted=accepted, text=text)]
            alone = [*pair, answer(2, pace, num_tokens=3)]  # too short to measure a pace
            batches += [bench.Batch(arm, 1, number, 1.0, (one,)) for one in alone]
            batches += [bench.Batch(arm, 2, number, 42 / pace, tuple(pair))]
    peaks = {ours: 3_000_000_000, fast: 4_000_000_000, peer: 500_000_000}
    rows = bench.summarize(batches, {"f32": 60.0}, peaks, ours, "peer")
    one = {row.arm: row for row in rows if row.clients == 1}
    two = {row.arm: row for row in rows if row.clients == 2}
    assert one[ours].tokens_per_second == pytest.approx((40 + 20) / 2)
    assert one[ours].to_peer == pytest.approx((0.8, 0.8, 0.8))  # paired, so a slow round costs nothing
    assert one[fast].to_peer == pytest.approx((1.2, 1.2, 1.2))
    assert one[ours].of_bound == pytest.approx(0.5)
    assert (one[ours].tau, one[fast].tau) == pytest.approx((1.0, 42 / 22))  # of the tokens after the first
    assert (one[fast].num_same, one[peer].num_same, one[peer].num_answers) == (6, 4, 6)
    assert two[fast].tokens_per_second == pytest.approx((60 + 30) / 2)
    assert (two[fast].to_peer, two[fast].of_bound) == (pytest.approx((1.2, 1.2, 1.2)), None)
    lines = bench.table(rows, "peer").splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert "| ours | f32 | chain:3 | 45.0 | 1.20 (1.20-1.20) | 500 ms | 1.91 | 6 of 6 | 75% | 4,000 MB |" in lines

    (summary,) = bench.summarize(
        [bench.Batch(ours, 2, 0, 1.0, (answer(0, 60, 21, 12),), num_forwards=10)], {"f32": 60.0}, peaks, ours, "peer"
    )
    assert summary.tau == pytest.approx(2.0), "the last step accepted two tokens that did not fit"

    no_peer = bench.summarize([batch for batch in batches if batch.arm != peer], {"f32": 60.0}, peaks, ours, "peer")
    assert {row.to_peer for row in no_peer} == {None}
    (short,) = bench.summarize([bench.Batch(ours, 1, 0, 1.0, (answer(0, 40, 3),))], {"f32": 60.0}, peaks, ours, "peer")
    assert math.isnan(short.tokens_per_second)


def test_a_server_that_dies_shows_its_last_lines(bench, tmp_path):
    arm = bench.Arm("ours", "f32", "off")
    command = ["bash", "-c", "echo the port is taken; exit 2"]
    with pytest.raises(bench.BenchmarkError, match=r"ours f32 off ended before it was ready[^$]*the port is taken"):
        bench.Server(arm, 1, command, tmp_path, {}, has_salt=True).__enter__()


CONVERTER = """
import sys
from conversion.base import TextModel
print(sys.argv[1:], TextModel().get_vocab_base_pre("known"), TextModel().get_vocab_base_pre("new"))
"""
TOKENIZERS = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        if tokenizer == "new":
            raise NotImplementedError
        return tokenizer
"""


def test_what_runs_in_an_environment_of_a_peer_finds_all_it_needs_there(tmp_path: Path) -> None:
    """Neither specserve nor what it needs is installed there: without site-packages, nothing is."""

    def run(name: str, *arguments: object) -> str:
        command = [sys.executable, "-S", str(FOLDER / name), *map(str, arguments)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        return done.stdout + done.stderr

    (tmp_path / "conversion").mkdir()
    (tmp_path / "conversion" / "base.py").write_text(TOKENIZERS)
    (tmp_path / "convert_hf_to_gguf.py").write_text(CONVERTER)
    found = run("convert_for_llama_cpp.py", tmp_path, "model", "--outtype", "f32")
    assert found == "['model', '--outtype', 'f32'] known qwen2\n"
    # the first thing missing is what its peer itself needs
    assert run("specjax.py", "_peer", tmp_path, tmp_path, "{}").endswith("No module named 'jax'\n")
