"""What an evaluation finds is what the server counts, what a client finds out over HTTP, and what a training run
measures; and an evaluation of several heads, end to end."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import typer
from engines import Fixed, Letters, Reference, make_engine
from fakes import FakeTemplate

from specserve.checkpoints.load import Target
from specserve.cli import evaluate as command
from specserve.data.dataset import Prompt
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.errors import ConfigError
from specserve.eval import evaluation
from specserve.eval.acceptance import SpeculationReport, converse, reader
from specserve.eval.bench.comparison import EngineArm
from specserve.eval.prompts import Question
from specserve.eval.remote import ServerArm, read_chats
from specserve.eval.settings import EvalRun
from specserve.serve.engine.engine import Engine
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.launch import Models
from specserve.serve.programs.runner import Runner
from specserve.speculative.acceptance import Acceptance
from specserve.train.acceptance import AcceptanceMeter, Arm

WAY, MAX_TOKENS = "chain:3", 12
QUESTIONS = [
    Question("1", "one", ("what is json", "why")),
    Question("2", "one", ("open a file",)),
    Question("3", "two", ("sort 3 numbers", "now backwards")),
    Question("4", "two", ("who 8 it",)),
]


class ChatLetters(Letters):
    """Letters with a chat template: every message after a space, and a full stop at the end."""

    has_chat_template = True
    template = FakeTemplate()

    def info(self) -> Mapping[str, Any]:
        return {}

    def token_id(self, token: str) -> int | None:
        return None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **_options: object) -> list[int]:
        return self.encode("".join(f" {message['content']}" for message in messages) + ".")


@pytest.fixture(scope="module")
def served(runner: Runner) -> Iterator[tuple[Engine, HttpServer, Any]]:
    """One engine, asked in process and over HTTP."""
    engine = make_engine(runner, Fixed(parse_speculation(WAY)))
    engine._tokenizer = ChatLetters()  # type: ignore[assignment]
    app = create_app(engine)
    server = HttpServer(app, port=0)
    with engine:
        server.start()
        yield engine, server, app.state.metrics
        server.stop()


@pytest.mark.parametrize("concurrency", [1, 3])
def test_tau_is_the_same_in_process_over_http_on_the_server_and_in_training(
    concurrency: int,
    served: tuple[Engine, HttpServer, Any],
    reference: Reference,
    tiny_target: Target,
    tiny_head: Head,
) -> None:
    engine, server, metrics = served
    inside, outside = (
        SpeculationReport("x", WAY, 0.0, concurrency),
        SpeculationReport("x", "", 0.0, concurrency, draft=server.url),
    )
    prompts: list[Prompt] = []
    read = reader(engine, MAX_TOKENS)

    def noted(messages: list[dict[str, str]]) -> tuple[Any, int] | None:
        prompt, room = read(messages)  # type: ignore[misc]
        prompts.append(Prompt("x", prompt))
        return prompt, room

    converse({"off": EngineArm(reference.engine), WAY: EngineArm(engine)}, QUESTIONS, [inside], noted)
    before = metrics.acceptance
    arm = ServerArm(server.url)
    assert (arm.kind, arm.model) == ("counters", "tiny")
    arm.describe(outside)
    converse({server.url: arm}, QUESTIONS, [outside], read_chats(MAX_TOKENS))
    arm.close()
    assert inside.acceptance.num_accepted > 5 < inside.acceptance.num_steps
    assert outside.acceptance == inside.acceptance
    assert metrics.acceptance.num_steps - before.num_steps == inside.acceptance.num_steps
    assert metrics.acceptance.num_accepted - before.num_accepted == inside.acceptance.num_accepted
    assert outside.tau == pytest.approx(inside.tau, abs=1e-6)
    assert outside.accept_rate == inside.accept_rate
    assert (
        sum(inside.by_unit.values(), Acceptance()) == sum(outside.by_unit.values(), Acceptance()) == inside.acceptance
    )
    assert inside.speculative.num_identical == inside.speculative.num_answers == 6
    assert outside.speculative.num_tokens == inside.speculative.num_tokens
    if concurrency == 1:
        assert outside.by_unit == inside.by_unit
        assert outside.tau_interval == inside.tau_interval
        assert outside.by_category == inside.by_category
        meter = AcceptanceMeter(tiny_target, tiny_head.drafter, [Arm(WAY)], prompts, max_new_tokens=MAX_TOKENS)
        replayed = meter.measure(tiny_head.params, tiny_head.target_ids, Arm(WAY)).total
        assert replayed.tau == pytest.approx(inside.tau, abs=1e-6)


def test_the_command_measures_a_server_and_judges_what_was_published(
    served: tuple[Engine, HttpServer, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "questions.jsonl", tmp_path / "found.json"
    path.write_text("\n".join(json.dumps({"category": q.category, "turns": q.turns}) for q in QUESTIONS))
    url = served[1].url
    run = EvalRun(bench=str(path), server=(f"{url}/v1",), api_key="hush", max_tokens=MAX_TOKENS, output=str(output))
    command.evaluate(run)
    found = json.loads(output.read_text())
    assert "hush" not in output.read_text()
    (report,) = found["reports"]
    low, high = report["tau_interval"]
    assert low <= report["tau"] <= high
    assert (report["answers"], report["gain"], list(report["by_category"])) == (6, None, ["one", "two"])
    assert found["provenance"]["jax"]
    command.evaluate(dataclasses.replace(run, expect=(report["tau"],), output=""))
    assert "is within the interval" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(typer.Exit) as end:
        command.evaluate(dataclasses.replace(run, expect=(high + 0.5,), output=""))
    assert end.value.exit_code == 1
    for wrong, said in (({"draft": ("x",)}, "--draft with --server"), ({"expect": (1.0, 2.0)}, "2 numbers.* 1 rows")):
        with pytest.raises(ConfigError, match=said):
            command.evaluate(dataclasses.replace(run, **wrong))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="/v1/models failed"):
        command.evaluate(dataclasses.replace(run, server=("http://127.0.0.1:9",)))


@pytest.mark.slow
def test_two_heads_are_compared_on_one_target(
    tiny_target: Target, tiny_head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Models("tiny", tiny_target, tiny_head, ChatLetters)  # type: ignore[arg-type]
    other = tiny.random_head(tiny_target.config, seed=5)
    monkeypatch.setattr(evaluation, "load", lambda _run, _draft: models)
    monkeypatch.setattr(evaluation, "with_draft", lambda models, _draft: dataclasses.replace(models, head=other))
    path, output = tmp_path / "questions.jsonl", tmp_path / "found.json"
    path.write_text("\n".join(json.dumps({"turns": q.turns}) for q in QUESTIONS))
    ways = {"draft": ("a", "b"), "speculation": ("chain:2", "ngram:2"), "temperature": (0.0, 1.0)}
    run = EvalRun(bench=str(path), max_tokens=8, max_model_len=256, output=str(output), **ways)  # type: ignore[arg-type]
    command.evaluate(run)
    found = json.loads(output.read_text())
    names = [f"{report['draft']} {report['speculation']}".strip() for report in found["reports"]]
    assert names == ["a chain:2", "ngram:2", "b chain:2"] * 2
    assert all(report["identical_answers"] == report["answers"] == 6 for report in found["reports"])
    by_name = {(r["draft"], r["speculation"], r["temperature"], r["concurrency"]): r for r in found["reports"]}
    assert len(found["differences"]) == 2
    for difference in found["differences"]:
        comparison = difference["temperature"], difference["concurrency"]
        taus = [by_name[name, "chain:2", *comparison]["tau"] for name in ("b", "a")]
        assert difference["difference"] == pytest.approx(taus[0] - taus[1])
        assert difference["interval"][0] <= difference["interval"][1]
