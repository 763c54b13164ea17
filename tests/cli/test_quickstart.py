"""Quickstart's table and its sentence: every way is measured beside plain decoding, and the arithmetic is right."""

from pathlib import Path
from typing import Any

import jax
import pytest
from fakes import STORY, FakeEngine
from rich.console import Console
from tiny_folder import write_folder
from typer.testing import CliRunner

from specserve.checkpoints.source import BUNDLED, resolve_target
from specserve.cli import quickstart
from specserve.cli.main import app
from specserve.eval.acceptance import SpeculationReport
from specserve.eval.bench.comparison import ArmResult
from specserve.eval.bench.step_times import StepTimes
from specserve.eval.prompts import Question
from specserve.eval.report import summary_table
from specserve.speculative.acceptance import Acceptance
from specserve.train.settings import TrainRun


@pytest.mark.parametrize(
    ("accepted", "gain", "ending"), [((60, 40), 1.33, "larger target"), ((10, 0), 0.73, "above tau")]
)
def test_a_gain_is_explained_by_tau_and_the_costs_of_steps(accepted: tuple[int, ...], gain: float, ending: str) -> None:
    report = SpeculationReport("pydoc", "chain:2", 0.0, 1)
    report.speculative = ArmResult(ratios=[1.2], acceptance=Acceptance(100, 200, accepted))
    said = quickstart.explain(report, StepTimes(bound=4.0, step=12.0, draft=3.0, plain=8.0))
    tau = report.speculative.acceptance.tau
    assert said.startswith("Why 1.20x:")
    assert f"{tau:.2f} x 8.0 / 12.0 = {tau * 8 / 12:.2f}x" in said
    assert tau * 8 / 12 == pytest.approx(gain, abs=0.01)
    assert ending in said
    assert "3.0 are the draft's" in said


def _question(text: str) -> Question:
    return Question(text, "x", (text,))


def test_every_way_is_asked_the_same_beside_plain_decoding() -> None:
    """Nobody knows a question before it is asked: caches are forgotten in between."""
    with FakeEngine() as plain, FakeEngine() as chain, FakeEngine() as auto:
        heard: list[str] = []
        engines = {"off": plain, "chain:3": chain, "auto": auto}
        found = quickstart.compare(engines, [_question("one"), _question("two")], heard.append)  # type: ignore[arg-type]
        asked = [[request.prompt_ids for request in engine.requests] for engine in (plain, chain, auto)]
        assert asked[0] == asked[1] == asked[2]
        assert {request.params.temperature for request in chain.requests} == {0.0}
        assert not any(cached for engine in engines.values() for cached in engine._num_cached.values())
    assert list(found) == ["chain:3", "auto"]
    assert len(heard) == 2
    assert "chain:3 tau" in heard[-1]
    for report in found.values():
        assert report.speculative.num_identical == report.speculative.num_answers == report.plain.num_answers == 2
        assert report.plain.num_tokens == 2 * len(STORY)
        assert report.speculative.acceptance.num_accepted == 8
    console = Console(width=120, record=True)
    console.print(summary_table([*found.items()], "title"))
    assert "auto" in console.export_text()


class StartedEngine(FakeEngine):
    """An engine that is started, as a real one is."""

    def start(self) -> "StartedEngine":
        return self


@pytest.mark.parametrize("is_shipped", [True, False])
def test_a_chat_model_is_asked_what_anybody_can_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shipped: bool
) -> None:
    """It trains on its own questions, from the head that ships with it where one does, which is then measured beside
    the new one. Training and engines are stand-ins."""
    target, output, shipped = write_folder(tmp_path / "a target"), tmp_path / "new", tmp_path / "shipped"
    trained: list[TrainRun] = []
    loaded: list[tuple[str, str]] = []
    asked: list[StartedEngine] = []

    def make_engine(*_given: Any) -> StartedEngine:
        asked.append(StartedEngine())
        return asked[-1]

    monkeypatch.setattr(quickstart, "bundled_head", lambda name: shipped if is_shipped else None)
    monkeypatch.setattr(quickstart, "train", trained.append)
    monkeypatch.setattr(quickstart, "load_models", lambda *names: loaded.append(names))
    monkeypatch.setattr(quickstart, "_engine", make_engine)
    monkeypatch.setattr(quickstart, "_time_steps", lambda *_given: StepTimes(4.0, 12.0, 3.0, 8.0))
    result = CliRunner().invoke(app, ["quickstart", "--target", str(target), "--output", str(output)])
    for engine in asked:
        engine.stop()
    assert result.exit_code == 0, (result.output, result.exception)
    (run,) = trained
    assert (run.target, run.output, run.data.source) == (str(target), str(output), ("self",))
    assert run.init_from == (str(shipped) if is_shipped else "")
    assert run.budget
    assert loaded == [(str(target), str(folder)) for folder in ([output, shipped] if is_shipped else [output])]
    questions = [request.prompt_ids for request in asked[0].requests]
    assert all(any(text.encode() in bytes(ids) for ids in questions) for text in quickstart.QUESTIONS)
    text = " ".join(result.output.split())
    assert f"> {quickstart.QUESTIONS[0]} {STORY}" in text
    assert f"specserve chat --target '{target}' --draft {output}" in text
    assert ("shipped, auto" in text) == is_shipped


def test_each_run_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is asked for is not written over."""
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart-head", "quickstart-head-2", "quickstart-head-3"):
        assert quickstart._free_folder(None) == Path(name)
        Path(name).mkdir()
    assert quickstart._free_folder(Path("quickstart-head")) == Path("quickstart-head"), "it is empty"
    Path("quickstart-head", "state").mkdir()
    result = CliRunner().invoke(app, ["quickstart", "--output", "quickstart-head"])
    assert "--output quickstart-head: a head is there already; give another folder" in str(result.exception)


@pytest.mark.slow
def test_the_whole_loop_runs_on_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stands in for anything: the bundled target, as a folder like any other, asks itself and answers; a head
    is trained, measured and served."""
    target, output = resolve_target(BUNDLED).folder, tmp_path / "ckpt"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with jax.numpy_dtype_promotion("standard"):  # optax adds numbers of several types, which other tests must not
        result = CliRunner().invoke(
            app, ["quickstart", "--target", str(target), "--output", str(output), "--minutes", "0.5"]
        )
    assert result.exit_code == 0, (result.output, result.exception)
    assert (output / "model.safetensors").is_file()
    text = " ".join(result.output.split())
    assert f"> {quickstart.QUESTIONS[0]}" in text
    assert text.count("5/5") >= len(quickstart.SPECULATIONS), "speculation changes no answer"
