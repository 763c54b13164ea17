"""benchmarks/served_flags.py: the flags that name what is served, and the end of a benchmark whose flags are wrong."""

import argparse
import importlib
from pathlib import Path
from types import ModuleType

import pytest
from tiny_folder import write_folder

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def served() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        return importlib.import_module("served_flags")


def end(served: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[object, list]:
    """Run a benchmark that only notes what it is to measure; returns its exit status, and those notes."""
    parser, found = argparse.ArgumentParser(), []
    served.add_served(parser)
    parser.add_argument("--clients", type=served.numbers, default="1,4")
    parser.add_argument("--rounds", type=served.positive, default=1)
    status: object
    monkeypatch.setattr("sys.argv", ["benchmark", *words])
    try:
        status = served.run(parser, lambda given, folder: found.append((folder, given.bench, given.clients)))
    except SystemExit as stop:
        status = stop.code
    return status, found


def test_the_bundled_target_has_questions_and_another_one_takes_a_bench(served, monkeypatch, tmp_path):
    bundled = end(served, monkeypatch, "--target", "pydoc")
    assert bundled == end(served, monkeypatch)
    assert bundled[0] == 0
    assert bundled[1][0][1:] == ("pydoc", [1, 4])
    target = write_folder(tmp_path / "target")
    words = ["--target", str(target), "--bench", "asked.jsonl", "--clients", "2"]
    assert end(served, monkeypatch, *words) == (0, [(target.resolve(), "asked.jsonl", [2])])


def test_a_wrong_flag_ends_it_with_status_2_and_the_reason(served, monkeypatch, tmp_path, capsys):
    target = str(write_folder(tmp_path / "target"))
    for words, reason in (
        (("--target", target), "--bench mt-bench:FILE"),
        (("--target", "nobody"), "--target 'nobody' is no folder here"),
        (("--draft", "nobody"), "--draft"),
        (("--clients", "1,x"), "expected whole numbers such as 1,4"),
        (("--rounds", "0"), "at least 1"),
    ):
        assert end(served, monkeypatch, *words) == (2, [])
        assert reason in capsys.readouterr().err
