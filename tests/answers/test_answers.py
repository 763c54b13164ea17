"""Laws of the target's own answers: whenever the stage is killed, whatever was answered before and in whatever order, a
run trains on the same rows; nothing is asked twice; what is held out stays so."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import Scripted, echo, is_users
from tiny_folder import FAMILY, write_folder, write_mixture
from tiny_run import tiny_run
from typer.testing import CliRunner

from specserve import cluster
from specserve.answers import cache as answers
from specserve.answers.cache import AnswerProgress, Watch
from specserve.answers.openings import OPENINGS
from specserve.answers.pace import Pace
from specserve.answers.ray_engines import CALLS, batch_size
from specserve.answers.settings import RegenerateRun
from specserve.checkpoints import load, update
from specserve.checkpoints.configs import find_config
from specserve.checkpoints.load import Target
from specserve.checkpoints.source import TargetSource
from specserve.checkpoints.tensors import write_json, write_tensors
from specserve.cli import data as data_command
from specserve.cli.main import app
from specserve.data.conversations import Conversation
from specserve.errors import DataError
from specserve.mesh import made_for, num_parts, parse_mesh
from specserve.serve import engines, launch
from specserve.serve.engines import BUSY_SLOTS
from specserve.serve.launch import Models
from specserve.serve.programs.placement import bytes_per_token
from specserve.serve.settings import ServeRun
from specserve.train.run import budget as budgets
from specserve.train.run.budget import Budget
from specserve.train.run.prepare import Mixture, load_mixture
from specserve.train.run.recipe import usual_answer_slots
from specserve.train.settings import DataSettings, TrainRun


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("made") / "target")


@pytest.fixture
def run(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> TrainRun:
    """A run over two sources, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = [str(write_mixture(tmp_path / name, number)) for name, number in (("a.jsonl", 60), ("b.jsonl", 80))]
    data = DataSettings(source=(sources[0], f"{sources[1]}=2"), regenerate=True, answer_tokens=40, max_conversations=30)
    return tiny_run(tmp_path / "run", target=str(folder), data=data)


Answer = Callable[..., Mixture]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Run the stage with an engine of our own; `most` is how many answers it gives before the process is killed."""

    def answer(run: TrainRun, most: int = 10**9, budget: Budget | None = None, reply: Any = echo) -> Mixture:
        asked.append(0)

        @contextmanager
        def engine(run: TrainRun, watch: Watch) -> Iterator[Scripted]:
            made = Scripted(FAMILY, reply)
            yield made
            asked[-1] = len(made.prompts)

        def kill(so_far: AnswerProgress) -> None:
            if so_far.account.num_answers >= most:
                raise KeyboardInterrupt

        monkeypatch.setattr(answers, "_engine", engine)
        source = TargetSource(run.target, Path(run.target))
        mixture = load_mixture(run.target, run.data, 512, needs_answers=False)
        return answers.answer(run, source, mixture, budget, Watch(on_answer=kill))[0]

    asked: list[int] = []
    answer.asked = asked  # type: ignore[attr-defined]  # of each call
    return answer


def texts(mixture: Mixture) -> list[str]:
    """All that is said in the rows, source by source."""
    rows = [row for source in mixture for row in source.train if isinstance(row, Conversation)]
    return [message.content for row in rows for message in row.messages]


def test_a_killed_stage_goes_on_to_the_same_rows(run: TrainRun, answer: Answer, tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(run, output=str(tmp_path / "other"))
    for most in (1, 9):
        with pytest.raises(KeyboardInterrupt):
            answer(run, most)
    [file] = (tmp_path / "cache" / "specserve" / "answers").glob("*/a.jsonl-*.jsonl")
    with file.open("ab") as half:
        half.write(b'{"id": "00')
    found = answer(run)
    assert [source.weight for source in found] == [1, 2]
    assert sum(len(source.train) for source in found) == 30
    assert "old" not in texts(found)
    assert not {row.key for s in found for row in s.train} & {row.key for s in found for row in s.held_out}
    assert any(source.held_out for source in found)

    again = answer(elsewhere)  # another run with the same questions
    assert texts(again) == texts(found)
    assert answer.asked[-1] == 0  # type: ignore[attr-defined]
    fewer = dataclasses.replace(run, data=dataclasses.replace(run.data, max_conversations=10))
    assert {*texts(answer(fewer))} < {*texts(found)}
    assert answer.asked[-1] == 0  # type: ignore[attr-defined]
    for file in (tmp_path / "cache" / "specserve" / "answers").glob("*/*"):
        file.unlink()
    assert texts(answer(run)) == texts(found), "in whatever order the answers came"


def test_what_has_no_answer_is_not_asked_again(run: TrainRun, answer: Answer) -> None:
    def reply(prompt: str, seed: int) -> str:
        return " " if "1" in prompt.rpartition("user")[2] else echo(prompt, seed)

    found = answer(run, reply=reply)
    assert 0 < sum(len(source.train) for source in found) < 30 == answer.asked[-1]  # type: ignore[attr-defined]
    assert texts(answer(run)) == texts(found)
    assert answer.asked[-1] == 0  # type: ignore[attr-defined]


def test_another_manner_of_answering_is_asked_anew(run: TrainRun, answer: Answer) -> None:
    answer(run)
    for changed in ({"answer_tokens": 30}, {"answer_temperature": 0.5}, {"template_kwargs": ()}):
        answer(dataclasses.replace(run, data=dataclasses.replace(run.data, **changed)))
        assert bool(answer.asked[-1]) == ("template_kwargs" not in changed), changed  # type: ignore[attr-defined]


def test_own_questions_are_asked_once_and_join_a_mixture(run: TrainRun, answer: Answer) -> None:
    def reply(prompt: str, seed: int) -> str:
        if is_users(prompt):
            return f"why is {seed % 9973} not larger than {seed % 9967}?"
        return echo(prompt, seed)

    data = dataclasses.replace(
        run.data,
        source=(run.data.source[0], "self=2"),
        self_questions=60,
        self_openings="none",
        max_conversations=0,
        answer_tokens=100,
    )
    own = dataclasses.replace(run, data=data)
    with pytest.raises(KeyboardInterrupt):
        answer(own, 5, reply=reply)
    found = answer(own, reply=reply)
    [source] = [source for source in found if source.name == "self"]
    assert (source.weight, len(source.train) + len(source.held_out)) == (2, 60)
    assert source.held_out
    assert not {row.key for row in source.train} & {row.key for row in source.held_out}
    spoken = [[message.role for message in row.messages] for row in source.train if isinstance(row, Conversation)]
    assert spoken == [["user", "assistant"] * 2] * len(spoken), "the user goes on once"
    assert texts(answer(own, reply=reply)) == texts(found)
    assert answer.asked[-1] == 0  # type: ignore[attr-defined]

    alone = dataclasses.replace(own, data=dataclasses.replace(data, source=("self",)), data_only=True)
    [written] = answer(alone, reply=reply)
    assert (len(written.train), len(written.held_out)) == (60, 0), "a file holds what its readers hold out"
    fresh = dataclasses.replace(own, train=dataclasses.replace(own.train, seed=1))
    assert not {*texts(answer(fresh, reply=reply))} & {text for text in texts(found) if text.startswith("why")}


def test_a_budget_decides_once(run: TrainRun, answer: Answer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As many are answered as there is time for, the first of the draw. A resumed run reads the same rows in the same
    order, also when another run has answered all meanwhile; one that suffices is like none."""
    timed = dataclasses.replace(run, budget="2s")
    Path(run.output).mkdir()
    monkeypatch.setattr(Pace, "_seconds_open", lambda pace: 1e9 * (pace._num_begun > 11))
    found = answer(timed, budget=Budget(2.0))
    budget = budgets.begin("2s", Path(run.output), is_resumed=True)
    assert budget
    assert budget.spent > 0
    assert [1 <= number <= 12 for number in budget.conversations.values()] == [True, True]
    assert sum(budget.conversations.values()) == sum(len(source.train) for source in found) < 30
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    everything = answer(run)
    assert texts(answer(timed, budget=budget)) == texts(found)
    assert answer.asked[-1] == 0  # type: ignore[attr-defined]
    assert {*texts(found)} < {*texts(everything)}
    assert texts(answer(timed, budget=Budget(1e9))) == texts(everything)


def test_a_budget_bounds_own_questions_once(run: TrainRun, answer: Answer) -> None:
    def reply(prompt: str, seed: int) -> str:
        if is_users(prompt):
            return f"why is {seed % 9973} not larger than {seed % 9967}?"
        return echo(prompt, seed)

    Path(run.output).mkdir()
    data = dataclasses.replace(run.data, source=("self",), self_questions=10**6, max_conversations=0)
    own = dataclasses.replace(run, data=data, budget="2s")
    found = answer(own, budget=Budget(4.0), reply=reply)
    decided = budgets.begin("2s", Path(run.output), is_resumed=True)
    assert decided
    assert 1 <= decided.questions < 10**6
    assert sum(len(source.train) for source in found) <= decided.conversations["self"] <= decided.questions
    assert texts(answer(own, budget=decided, reply=reply)) == texts(found)
    assert answer.asked[-1] == 0  # type: ignore[attr-defined]
    more = dataclasses.replace(own, data=dataclasses.replace(data, self_questions=decided.questions + 40))
    answer(more, reply=reply)
    assert texts(answer(own, budget=decided, reply=reply)) == texts(found), "whatever others have asked since"


def test_what_was_spent_before_a_kill_is_spent(run: TrainRun, answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "RECORD_SECONDS", 0.0)
    Path(run.output).mkdir()
    with pytest.raises(KeyboardInterrupt):
        answer(run, 9, budget=Budget(1e4, spent=1e3))
    left = budgets.begin("2s", Path(run.output), is_resumed=True)
    assert left
    assert left.spent > 1e3
    assert not left.conversations
    found = answer(run, budget=left.after(1e4))  # none of the answers' share is left: one more of each source
    assert answer.asked[-1] <= 2  # type: ignore[attr-defined]
    assert 1 <= sum(len(source.train) for source in found) < 30


def test_a_target_that_says_nothing_of_use_is_an_error(run: TrainRun, answer: Answer) -> None:
    with pytest.raises(DataError, match=r"no answer that can be trained on to 30 questions.*--no-regenerate"):
        answer(run, reply=lambda _prompt, _seed: " ")


@pytest.mark.parametrize(
    ("free", "mesh", "expected"), [(1e12, "", 16), (1e12, "data=3", 18), (0, "", 1), (0, "data=2,expert=2", 4)]
)
def test_as_many_at_once_as_there_is_room_for(
    run: TrainRun, tiny_target: Target, monkeypatch: pytest.MonkeyPatch, free: float, mesh: str, expected: int
) -> None:
    monkeypatch.setattr(answers, "free_memory", lambda _mesh: free)
    spread = Models("tiny", tiny_target, None, None, mesh=parse_mesh(mesh))
    assert answers.answer_slots(spread, run.data.answer_slots, run.train.seq_len) == expected
    for platform, usual in (("gpu", 64), ("cpu", 16)):
        assert usual_answer_slots(platform) == usual
        with made_for(platform):
            ranks = num_parts(spread.mesh, "batch")
            assert answers.answer_slots(spread, 0, run.train.seq_len) == (usual * ranks if free else expected)
    each = bytes_per_token(tiny_target.config, None) * run.train.seq_len
    monkeypatch.setattr(answers, "free_memory", lambda _mesh: 5 * each / answers.CACHE_SHARE)
    assert answers.answer_slots(Models("tiny", tiny_target, None, None), run.data.answer_slots, run.train.seq_len) == 5


@given(
    *(st.integers(1, 2000), st.integers(1, 9), st.integers(0, 200), st.integers(1, 3)),
    st.sampled_from(("CPU", "GPU", "TPU")),
)
def test_engines_on_ray_have_as_many_questions_as_one_alone(
    num_jobs: int, workers: int, slots: int, ranks: int, kind: str
) -> None:
    """Or all of their share; in batches no larger than that takes, or than gives each worker several of them."""
    run = RegenerateRun(num_workers=workers, max_slots=slots, mesh=f"data={ranks},expert=2,tensor=2")
    platform = cluster.platform_of({"CPU": 12.0} if kind == "CPU" else {"CPU": 1.0, kind: 12.0})
    assert platform == kind.lower()
    size, share = batch_size(run, num_jobs, platform), -(-num_jobs // workers)
    num_slots = slots or usual_answer_slots(platform) * 2 * ranks
    assert 1 <= size <= num_slots
    assert CALLS * size >= min(num_slots, share)
    assert CALLS * (size - 1) < min(num_slots, share) or 2 * CALLS * (size - 1) < share


def test_a_target_with_an_adapter_is_loaded_once(
    run: TrainRun, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one target, whose matrices are merged as they are read: there is no second one in memory meanwhile."""
    loaded: list[Target] = []

    def count(*given: Any, **options: Any) -> Target:
        loaded.append(load.load_target(*given, **options))
        return loaded[-1]

    def stop(models: Models, *_: Any, **__: Any) -> None:
        assert [models.target.params] == [target.params for target in loaded]
        raise KeyboardInterrupt

    for module in (launch, update):
        monkeypatch.setattr(module, "load_target", count)
    monkeypatch.setattr(answers, "answering_engine", stop)
    config, _ = find_config(str(folder))
    shapes = {"A": (1, config.d_model), "B": (config.d_ff, 1)}
    module = "base_model.model.model.layers.0.mlp.up_proj"
    (tmp_path / "adapter").mkdir()
    write_json(tmp_path / "adapter" / "adapter_config.json", {"r": 1, "lora_alpha": 2})
    pairs = {f"{module}.lora_{side}.weight": np.full(shape, 0.5, np.float32) for side, shape in shapes.items()}
    write_tensors(tmp_path / "adapter" / "adapter_model.safetensors", pairs)
    of_run = dataclasses.replace(run, lora=str(tmp_path / "adapter"))
    with pytest.raises(KeyboardInterrupt), answers._engine(of_run, Watch()):
        pass
    [merged] = loaded
    monkeypatch.undo()
    plain = load.load_target(folder, dtype=merged.config.dtype, is_served=True, is_arranged=True)
    expected = update.other_target(plain, of_run.lora, quantization="none", mesh=None)
    jax.tree.map(np.testing.assert_array_equal, merged.params, expected.params)


@pytest.mark.parametrize(
    ("has_head", "num_slots", "platform", "asked", "expected"),
    [
        (True, BUSY_SLOTS - 1, "cpu", "", "auto"),
        (True, BUSY_SLOTS, "cpu", "", "off"),
        (True, BUSY_SLOTS, "tpu", "", "auto"),
        (True, BUSY_SLOTS, "cpu", "chain:2", "chain:2"),
        (False, 1, "tpu", "", "off"),
    ],
)
def test_answers_are_made_with_the_head_where_it_may_pay(
    monkeypatch: pytest.MonkeyPatch, has_head: bool, num_slots: int, platform: str, asked: str, expected: str
) -> None:
    runs: list[ServeRun] = []
    monkeypatch.setattr(engines, "program_platform", lambda: platform)
    monkeypatch.setattr(engines, "make_engine", lambda _models, run, *_given, **_options: runs.append(run))
    models: Any = SimpleNamespace(head=object() if has_head else None)
    engines.answering_engine(models, asked, num_slots=num_slots, max_model_len=64, on_warmup=lambda *_: None)
    assert [(run.speculation, run.max_slots) for run in runs] == [(expected, num_slots)]


def test_the_command_asks_and_answers_its_own_questions(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`data regenerate --source self` writes as many rows as are counted, which train without answering again; without
    a number it says what to give."""

    class Entered(Scripted):
        def __enter__(self) -> "Entered":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def reply(prompt: str, seed: int) -> str:
        if is_users(prompt):
            return f"why is {seed % 9973} not larger than {seed % 9967}?"
        return echo(prompt, seed)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        data_command, "load", lambda *_given: SimpleNamespace(fingerprint="0", target=SimpleNamespace(config=None))
    )
    monkeypatch.setattr(data_command, "answer_slots", lambda *_given: 4)
    monkeypatch.setattr(data_command, "answering_engine", lambda *_given, **_sizes: Entered(FAMILY, reply))
    line = ["data", "regenerate", "--target", str(folder), "--source", "self", "--output", str(tmp_path / "own.jsonl")]
    result = CliRunner().invoke(app, [*line, "--count", "12", "--max-tokens", "120", "--self-turns", "1"])
    assert result.exit_code == 0, (result.output, result.exception)
    rows = [json.loads(row)["messages"] for row in (tmp_path / "own.jsonl").read_text().splitlines()]
    assert len({row[0]["content"] for row in rows}) == 12
    beginnings = [row[0]["content"].partition("why is")[0] for row in rows]
    assert sorted(filter(None, beginnings)) == sorted(OPENINGS[:6]), "half of them, in turns"
    assert all(row[-1]["role"] == "assistant" and row[-2]["content"] in row[-1]["content"] for row in rows)
    [source] = load_mixture(str(folder), DataSettings(source=(str(tmp_path / "own.jsonl"),)), 512)
    assert len(source.train) + len(source.held_out) == 12
    refused = CliRunner().invoke(app, [*line, "--count", "0"])
    assert refused.exit_code
    assert "--count" in str(refused.exception) + refused.output
    before = (tmp_path / "own.jsonl").read_bytes()
    monkeypatch.setattr(data_command, "OwnQuestions", None)  # nothing is asked for a file that cannot be gone on with
    other = CliRunner().invoke(app, [*line, "--count", "12", "--max-tokens", "90"])
    assert "made with max_tokens 120, now 90" in str(other.exception) + other.output
    assert (tmp_path / "own.jsonl").read_bytes() == before
