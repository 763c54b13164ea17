"""Quickstart's table and its sentence: every way is measured beside plain decoding, and the arithmetic is right."""

import pytest
from fakes import STORY, FakeEngine
from rich.console import Console

from specserve.cli import quickstart
from specserve.eval.acceptance import SpeculationReport
from specserve.eval.bench.comparison import ArmResult
from specserve.eval.bench.step_times import StepTimes
from specserve.eval.prompts import Question
from specserve.eval.report import summary_table
from specserve.speculative.acceptance import Acceptance


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
