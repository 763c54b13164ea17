"""The evaluation's laws: both arms say the same, the pooled numbers add up, and nothing asked is lost."""

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from specserve.answers.regenerate import AnswerSettings, regenerate
from specserve.checkpoints.load import Target
from specserve.data.conversations import Conversation, Message
from specserve.drafters.interface import Head
from specserve.eval.acceptance import SpeculationReport, converse, reader
from specserve.eval.bench.comparison import ArmResult, EngineArm
from specserve.eval.bench.step_times import measure_steps
from specserve.eval.prompts import Question
from specserve.eval.report import summary_table
from specserve.serve.engine.engine import Engine
from specserve.serve.engines import measured_engine
from specserve.serve.launch import Models
from specserve.speculative.acceptance import Acceptance
from specserve.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def pair(
    pydoc_target: Target, pydoc_head: Head, pydoc_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Engine, Engine]:
    models = Models("pydoc", pydoc_target, pydoc_head, lambda: pydoc_tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("programs")))
        plain, speculative = (
            measured_engine(models, way, num_slots=2, max_model_len=128)  # one width of page tables
            for way in ("off", "chain:2")
        )
    times = measure_steps(plain.runner, speculative.runner, context=40, repeats=3)
    assert min(dataclasses.astuple(times)) > 0
    return plain, speculative


QUESTIONS = [
    Question("1", "source", ("Write the function `os.path.join`.", "Now document it.")),
    Question("2", "docs", ("What does `json.dumps` do?",)),
    Question("3", "docs", ("What does `json.loads` do? " * 60,)),  # does not fit the context
]


@pytest.mark.slow
def test_arms_agree_and_the_books_balance(pair: tuple[Engine, Engine], tmp_path: Path) -> None:
    """One test for one pair of engines: an engine starts once."""
    plain, speculative = pair
    with plain, speculative:
        report, sampled = SpeculationReport("x", "chain:2", 0.0, 2), SpeculationReport("x", "chain:2", 1.0, 1)
        for found in (report, sampled):
            arms = {"off": EngineArm(plain), "chain:2": EngineArm(speculative)}
            converse(arms, QUESTIONS, [found], reader(plain, 24))
        _regeneration_is_the_same_with_speculation(plain, speculative, tmp_path)
    for found in (report, sampled):
        assert found.speculative.num_answers == found.speculative.num_identical == 3
        assert found.num_skipped == 1
        assert found.plain.num_tokens == found.speculative.num_tokens
        total = found.speculative.acceptance
        assert total == sum(found.by_category.values(), Acceptance())
        assert total.num_emitted == found.speculative.num_tokens - 3, "but each answer's first, which prefill emits"
        assert json.loads(json.dumps(found.to_json()))["identical_answers"] == 3


def _regeneration_is_the_same_with_speculation(plain: Engine, speculative: Engine, folder: Path) -> None:
    """Also where a run without it was killed in the middle of a row, and one with it goes on."""
    questions = ["What does `f0` do?", "What does `f1` do?", "Write the function `os.path.join`."]
    asked = [Conversation((Message("user", question),), "docs", "x") for question in questions]
    asked.append(Conversation((*asked[2].messages, Message("assistant", "old"), *asked[0].messages), "source", "y"))
    for temperature in (0.0, 1.0):
        manner = AnswerSettings(max_tokens=8, temperature=temperature)
        whole, repaired = folder / f"whole{temperature}.jsonl", folder / f"repaired{temperature}.jsonl"
        account = regenerate(plain, asked, whole, manner)
        assert account.num_rows == 4
        first, *_, last = whole.read_text().splitlines(keepends=True)
        repaired.write_text(first + last[:20])
        whole.with_name(f"{whole.name}.settings.json").rename(folder / f"{repaired.name}.settings.json")
        account = regenerate(speculative, asked, repaired, manner)
        assert (account.num_there, account.num_rows) == (1, 3)
        assert sorted(repaired.read_text().splitlines()) == sorted(whole.read_text().splitlines())


def test_no_number_of_a_table_is_cut_off_in_a_narrow_terminal() -> None:
    """Names of folders may be folded there."""
    total = Acceptance(1000, 7000, (612, 401, 233, 187, 151, 109, 71))
    plain = ArmResult(num_tokens=6_000, seconds=[60.0])
    speculative = ArmResult(
        ratios=[1.23], acceptance=total, num_tokens=6_000, seconds=[48.0], num_answers=24, num_identical=24
    )
    report = SpeculationReport("pydoc", "chain:7", 0.0, 1, plain, speculative)
    console = Console(width=80)
    folder = "/home/someone/experiments/heads/pydoc-muon-1.5e-3-rollout-3"
    with console.capture() as capture:
        console.print(summary_table([(folder, report)], "pydoc, chain:7"))
    words = capture.get().split()
    rates = [f"{rate:.2f}" for rate in total.accept_rate]
    for word in ("2.76", "100", "125", "1.23x", "24/24", *rates):
        assert word in words
    assert "…" not in capture.get()
