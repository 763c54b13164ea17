"""A server's head that learns: which version serves, whatever the rounds bring and whenever it is killed."""

import contextlib
import dataclasses
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
import pytest
import served
from engines import PATIENCE
from fakes import wait_for
from prometheus_client import CollectorRegistry, generate_latest

from specserve import host
from specserve.checkpoints.load import Target
from specserve.cli.serve import serve
from specserve.drafters.interface import Head
from specserve.errors import CheckpointError, ConfigError
from specserve.interop.head import save_head
from specserve.learn import learning, versions
from specserve.learn.learner import attend
from specserve.learn.learning import LearningHead, check_settings
from specserve.learn.live import FEWEST_ANSWERS, MOST_ANSWERS, LiveTaus
from specserve.learn.task import HEAD, ROUND, TRAFFIC, Contender, RoundResult
from specserve.learn.traffic import newest_segment, read_traffic
from specserve.learn.versions import MOST_KEPT, STATIC, HeadVersions, LearnState
from specserve.serve.engine.engine import Engine
from specserve.serve.http.page import routes
from specserve.serve.launch import Models
from specserve.serve.requests.request import Delta, FinishReason, Request, SamplingParams, SpeculationStats
from specserve.serve.settings import ServeRun
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.sampling import DrawOptions

GOOD, BAD = Acceptance(10, 30, (9, 8, 7)), Acceptance(10, 30, (2, 1, 0))


class Recorder:
    """An engine that notes which version it is to serve."""

    model_name = "model"

    def __init__(self) -> None:
        self.served = [STATIC]
        self.folders: list[str] = []
        self.error: Exception | None = None

    def update_weights(self, *, draft: object, version: str, mode: str) -> None:
        assert mode == "continue"
        if self.error:
            raise self.error
        self.served.append(version)
        self.folders.append(str(draft))


@pytest.fixture(scope="module")
def models(tiny_target: Target, tiny_head: Head, tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    save_head(folder / "head", tiny_head, tiny_target, dtype="float32", notes={"target": str(tiny_target.folder)})
    return Models(str(folder / "head"), tiny_target, tiny_head, None, "fingerprint")


def _run(models: Models, folder: Path, **options: Any) -> ServeRun:
    return ServeRun(target=str(models.target.folder), draft=models.name, learn=str(folder), **options)


@contextlib.contextmanager
def _learning(models: Models, folder: Path, **options: Any) -> Iterator[tuple[LearningHead, Recorder, Engine]]:
    learning, recorder = LearningHead(_run(models, folder, **options), models), Recorder()
    engine = cast(Engine, recorder)
    with learning.beside(engine):
        yield learning, recorder, engine


def _candidate(folder: Path, models: Models) -> None:
    """What a round leaves behind."""
    assert models.head is not None
    save_head(folder / ROUND / HEAD, models.head, models.target, dtype="float32", notes={})


def _result(choice: Contender, static: float = 2.0) -> RoundResult:
    return RoundResult(choice, {"static": static, "served": 2.0, "candidate": 2.5}, (0.1, 0.9), 0.25, 100, 20, 1.0)


def _adopt(folder: Path, models: Models, learning: LearningHead, engine: Engine) -> str:
    _candidate(folder, models)
    learning.act(engine, _result("candidate"), learning.versions.state.version)
    return learning.versions.state.version


def _options(i: int) -> DrawOptions:
    return DrawOptions(i / 40, i, 1 - i / 900, i / 900, i / 300, -i / 300, 1 + i / 900, i % 9)


def _answer(learning: LearningHead, version: str, found: Acceptance, number: int, may_learn: bool = True) -> None:
    for i in range(number):
        params = SamplingParams(**dataclasses.asdict(_options(i)))
        request = Request("id", (1, 2, i), params, 9, 0, lambda _delta: None, client="someone")
        options: Any = type("Options", (), {"may_learn": may_learn})
        hear = learning.listen(request, options)
        assert (hear is not None) == may_learn
        if hear is None:
            continue
        hear(Delta((5, 6)))
        drafts = ((3, found.num_accepted // found.num_steps),) * found.num_steps
        counts = dataclasses.asdict(found) | {"versions": ((0, version),), "drafts": drafts}
        hear(Delta((7,), finish_reason=FinishReason.STOP, stats=SpeculationStats(**counts)))


def test_the_chosen_head_serves_and_serves_again_after_a_restart(models: Models, tmp_path: Path) -> None:
    """A candidate becomes a version; a result about a version that serves no more changes nothing; the static head
    returns by a round's choice; a version that the engine refuses serves nowhere."""
    with _learning(models, tmp_path) as (learning, recorder, engine):
        assert _adopt(tmp_path, models, learning, engine) == "001"
        learning.act(engine, _result("static"), STATIC)
        learning.act(engine, _result("served"), "001")
        assert recorder.served == [STATIC, "001"]
        assert recorder.folders == [str(tmp_path / "versions" / "001")]
    with _learning(models, tmp_path) as (learning, recorder, engine):
        assert learning.take_models().version == "001"
        assert learning.versions.state.num_rounds == 2
        recorder.error = ConfigError("not this one")
        assert _adopt(tmp_path, models, learning, engine) == "001"
        recorder.error = None
        assert _adopt(tmp_path, models, learning, engine) == "003"
        learning.act(engine, _result("static", 1.5), "003")
        assert recorder.served == [STATIC, "003", STATIC]
        assert recorder.folders[-1] == models.name
        registry = CollectorRegistry()
        registry.register(learning)
        text = generate_latest(registry).decode()
        for line in ('version{model_name="model",version="0"} 1.0', 'drift{model_name="model"} 0.5'):
            assert f"specserve:learn_{line}" in text
        for series in re.findall(r'"(specserve:learn_\w+)"', (Path(routes.__file__).parent / "api.js").read_text()):
            assert f"# TYPE {series} " in text, "the page draws a series that is not there"
    with _learning(models, tmp_path) as (learning, _, _):
        assert learning.take_models().version == STATIC


def test_a_full_disk_does_not_part_what_serves_from_what_is_said_to(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version that serves is watched, and given up, as if it were kept; a restart begins with the one before."""

    def full(_path: Path) -> Any:
        raise OSError(28, "No space left on device")

    with _learning(models, tmp_path) as (learning, recorder, engine):
        _answer(learning, STATIC, GOOD, FEWEST_ANSWERS)
        monkeypatch.setattr(versions, "whole_file", full)
        assert _adopt(tmp_path, models, learning, engine) == recorder.served[-1] == "001"
        _answer(learning, "001", BAD, FEWEST_ANSWERS)
        learning.look_back(engine)
        assert recorder.served == [STATIC, "001", STATIC]
    monkeypatch.undo()
    with _learning(models, tmp_path) as (learning, _, _):
        assert learning.take_models().version == STATIC


def test_a_version_whose_tau_falls_while_it_serves_is_given_up(models: Models, tmp_path: Path) -> None:
    """Once its 95% interval lies below that of the version before, with enough answers of both, soon after it began;
    and the answers of both are traffic, by digests of their clients, but those that opted out. What the engine refuses,
    a candidate or the return, leaves the watch as it was."""
    with _learning(models, tmp_path) as (learning, recorder, engine):
        _answer(learning, STATIC, GOOD, FEWEST_ANSWERS)
        _adopt(tmp_path, models, learning, engine)
        _answer(learning, "001", BAD, FEWEST_ANSWERS - 1)
        _answer(learning, "001", BAD, 9, may_learn=False)
        learning.look_back(engine)
        assert recorder.served == [STATIC, "001"]
        recorder.error = ConfigError("not now")
        assert _adopt(tmp_path, models, learning, engine) == "001"
        _answer(learning, "001", BAD, 1)
        learning.look_back(engine)
        assert recorder.served == [STATIC, "001"]
        recorder.error = None
        learning.look_back(engine)
        learning.look_back(engine)
        assert recorder.served == [STATIC, "001", STATIC]
        assert recorder.folders[-1] == models.name
    kept = read_traffic(tmp_path / TRAFFIC, 10**9)
    assert [(len(kept), answer.prompt_ids, answer.answer_ids) for answer in kept[:1]] == [(128, (1, 2, 0), (5, 6, 7))]
    assert [answer.options for answer in kept[:9]] == [_options(i) for i in range(9)]
    assert len({answer.client for answer in kept}) == 1
    assert "someone" not in kept[0].client


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_share_of_the_answers_is_kept(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Drawn for each; what is not kept is watched all the same."""
    monkeypatch.setattr(learning, "random", random.Random(1))
    with _learning(models, tmp_path, learn_share=share) as (own, _, _):
        _answer(own, STATIC, GOOD, 100)
        assert [number for _, _, number in own.live.taus()] == [100]
    number = len(read_traffic(tmp_path / TRAFFIC, 10**9))
    assert number == 100 if share == 1.0 else 30 < number < 70


def test_a_version_that_was_given_up_is_judged_once_more(models: Models, tmp_path: Path) -> None:
    """By the next round, also one of a later server, which has its folder until then, however many versions come; and
    it serves again where the round chooses it, watched like a new one."""

    def give_up(learning: LearningHead, engine: Engine) -> None:
        _answer(learning, STATIC, GOOD, FEWEST_ANSWERS)
        _answer(learning, "001", BAD, FEWEST_ANSWERS)
        learning.look_back(engine)

    with _learning(models, tmp_path) as (learning, recorder, engine):
        _adopt(tmp_path, models, learning, engine)
        give_up(learning, engine)
        assert recorder.served == [STATIC, "001", STATIC]
        recorder.error = ConfigError("not now")
        learning.act(engine, _result("returned"), STATIC)
    with _learning(models, tmp_path) as (learning, recorder, engine):
        for _ in range(MOST_KEPT + 1):
            (tmp_path / "new").mkdir()
            learning.versions.add(tmp_path / "new")
        learning.versions.keep(learning.versions.state)
        learning.act(engine, _result("returned"), STATIC)
        assert recorder.folders == [str(tmp_path / "versions" / "001")]
        assert (learning.versions.state.version, learning.versions.state.returned) == ("001", "")
        give_up(learning, engine)
        assert learning.versions.state.returned == "001"
        learning.act(engine, _result("served"), STATIC)
        assert learning.versions.state.returned == ""
        assert recorder.served == [STATIC, "001", STATIC]


def test_answers_wait_for_a_round_over_a_restart(models: Models, tmp_path: Path) -> None:
    """Those of the traffic that no judged round has read. One that failed, or that the server's end broke off, has read
    none."""
    with _learning(models, tmp_path) as (learning, _, _):
        _answer(learning, STATIC, GOOD, 5)
    with _learning(models, tmp_path) as (learning, _, engine):
        assert learning.num_waiting == 5
        _answer(learning, STATIC, GOOD, 2)
        learning.act(engine, _result("served"), STATIC, newest_segment(tmp_path / "traffic"))
    with _learning(models, tmp_path) as (learning, _, _):
        assert learning.num_waiting == 2


def test_drift_is_of_one_way_to_draft_and_known_once_a_round_has_ended(models: Models, tmp_path: Path) -> None:
    def drift(learning: LearningHead) -> list[str]:
        registry = CollectorRegistry()
        registry.register(learning)
        return re.findall(r"^specserve:learn_drift\S* (\S+)$", generate_latest(registry).decode(), re.M)

    for ways, static, expected in (("chain:2", 2.0, "0.0"), ("chain:2", 1.75, "0.25"), ("chain:1", 1.5, "0.0")):
        with _learning(models, tmp_path, speculation=ways) as (learning, _, engine):
            assert drift(learning) == []
            learning.act(engine, _result("served", static), STATIC)
            assert drift(learning) == [expected]


@pytest.mark.parametrize("num_restarts", [1, 3])
def test_the_watch_goes_on_after_a_restart(models: Models, tmp_path: Path, num_restarts: int) -> None:
    """Each server hears a part of the answers, and the last one gives the version up, which no restart brings back; not
    where the way of speculation or the bits are others, whose tau says nothing of the head."""
    with _learning(models, tmp_path) as (learning, _, engine):
        _answer(learning, STATIC, GOOD, MOST_ANSWERS + 9)
        _adopt(tmp_path, models, learning, engine)
    for _ in range(num_restarts):
        with _learning(models, tmp_path) as (learning, recorder, engine):
            learning.look_back(engine)
            _answer(learning, "001", BAD, FEWEST_ANSWERS // num_restarts)
            assert recorder.served == [STATIC]
            learning.remember()
            state = (tmp_path / versions.STATE_FILE).read_bytes()
    others = {"speculation": "chain:1", "quantization": "int8", "draft_quantization": "int8", "kv_cache_dtype": "int8"}
    for name, value in others.items():
        with _learning(models, tmp_path, **{name: value}) as (learning, recorder, engine):
            learning.look_back(engine)
            assert recorder.served == [STATIC]
            assert not [*learning.live.taus()]
    assert (tmp_path / versions.STATE_FILE).read_bytes() == state
    assert len(state) < 200 * MOST_ANSWERS
    with _learning(models, tmp_path) as (learning, recorder, engine):
        _answer(learning, "001", BAD, num_restarts)
        learning.look_back(engine)
        assert recorder.served == [STATIC, STATIC]
        _answer(learning, "001", GOOD, 1)  # it was under way
    with _learning(models, tmp_path) as (learning, _, _):
        assert learning.take_models().version == STATIC
        assert not [*learning.live.taus()]


def test_the_first_answers_of_a_version_are_compared_alone() -> None:
    """Whenever that is looked at; later answers are of traffic that has moved. Of other versions nothing is kept."""
    live = LiveTaus()
    for version, found, number in (("0", GOOD, 99), ("1", BAD, MOST_ANSWERS - 1)):
        for _ in range(number):
            live.observe(version, found)
    live.observe("1", Acceptance())
    assert live.has_fallen("1", "0")
    assert not live.has_fallen("0", "1")
    assert not live.has_fallen("1", "1")
    for _ in range(MOST_ANSWERS):
        live.observe("1", GOOD)
    assert live.has_fallen("1", "0")
    live.begin("9", "1")
    live.observe("10", GOOD)  # as it came to serve
    live.begin("10", "1")
    assert [version for version, *_ in live.taus()] == ["1", "10"]
    live.begin("9", "1")
    assert [version for version, *_ in live.taus()] == ["1"]
    for found in (GOOD, BAD):
        for _ in range(MOST_ANSWERS):
            live.observe("9", found)
    assert not live.has_fallen("9", "1")
    for i in range(100):  # a little worse, as chance may have it
        live.observe("2", GOOD if i % 2 else BAD)
        live.observe("3", GOOD if i % 5 in (1, 3) else BAD)
    assert not live.has_fallen("3", "2")


class Killed(BaseException):
    """Stands for kill -9."""


@pytest.mark.parametrize("number", range(6))
def test_a_server_that_is_killed_begins_with_a_whole_version(
    number: int, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whatever moment of a change it was killed; and it goes on from there."""
    with _learning(models, tmp_path) as (learning, recorder, engine):
        _adopt(tmp_path, models, learning, engine)
        left = [number]

        def killing(call: Any) -> Any:
            def either(*args: Any, **named: Any) -> Any:
                for step in (lambda: None, lambda: call(*args, **named)):
                    step()
                    left[0] -= 1
                    if left[0] < 0:
                        raise Killed

            return either

        _candidate(tmp_path, models)
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            for name in ("rename", "replace"):
                patch.setattr(os, name, killing(getattr(os, name)))
            patch.setattr(recorder, "update_weights", killing(recorder.update_weights))
            learning.act(engine, _result("candidate"), "001")
    with _learning(models, tmp_path) as (learning, recorder, engine):
        version = learning.versions.state.version
        assert version == ("002" if number >= 5 else "001")
        assert learning.take_models().version == version
        assert _adopt(tmp_path, models, learning, engine) > version


def test_versions_are_few_and_of_one_head(tmp_path: Path) -> None:
    own = HeadVersions(tmp_path, "target", "static")
    for _ in range(MOST_KEPT + 5):
        (tmp_path / "new").mkdir()
        own.keep(LearnState("target", "static", own.add(tmp_path / "new"), "001"))
    names = sorted(path.name for path in (tmp_path / versions.VERSIONS).iterdir())
    assert names == ["001", *(f"{i:03d}" for i in range(5, MOST_KEPT + 6))]
    with pytest.raises(ConfigError, match="another target or from another head"):
        HeadVersions(tmp_path, "target", "other")
    (tmp_path / versions.VERSIONS / names[-1]).rmdir()
    with pytest.raises(CheckpointError, match=r"version 013 is missing; remove state\.json"):
        HeadVersions(tmp_path, "target", "static")
    whole = '{"target": "target", "static": "static", "answers": %s}'
    for text in (
        '{"version": "0"}',
        *(
            whole % answers
            for answers in ('{"0": [[[1]], []]}', '{"0": [[]]}', "[1]", '{"0": [[["a", 3, [1], 0]], []]}')
        ),
    ):
        (tmp_path / versions.STATE_FILE).write_text(text)
        with pytest.raises(CheckpointError, match=r"state\.json: .*; remove it"):
            HeadVersions(tmp_path, "target", "static")


def test_what_cannot_learn_is_refused(models: Models, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    others = {"ray": True, "coordinator": "a:1", "allow_update_weights": True, "allow_load_draft": True}
    for name, value in others.items():
        with pytest.raises(ConfigError, match=f"--learn: not with --{name.replace('_', '-')}"):
            check_settings(_run(models, tmp_path, **{name: value}))
    with pytest.raises(ConfigError, match=r"--learn-data: .*'pydoc=0'"):
        check_settings(_run(models, tmp_path, learn_data=("pydoc=0",)))
    with pytest.raises(ConfigError, match="--learn-steps is of a head that learns: give --learn too"):
        serve(ServeRun(learn_steps=5))
    for speculation in ("off", "suffix:3"):
        with pytest.raises(ConfigError, match=f"--speculation {speculation} uses no head"):
            LearningHead(_run(models, tmp_path, speculation=speculation), models)
    with pytest.raises(ConfigError, match="no draft head with a folder of its own"):
        LearningHead(_run(models, tmp_path), dataclasses.replace(models, head=None))
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    other = shutil.copytree(models.name, elsewhere / "head")
    (other / "specserve.json").write_text('{"target_fingerprint": "another"}')
    with pytest.raises(ConfigError, match="was trained for other weights of the target"):
        LearningHead(dataclasses.replace(_run(models, tmp_path), draft=str(other)), models)
    (other / "specserve.json").write_text('{"lora": "here/sql"}')
    with pytest.raises(ConfigError, match=r"the LoRA adapter here/sql .*; expected .* train one without --lora"):
        LearningHead(dataclasses.replace(_run(models, tmp_path), draft=str(other)), models)
    assert not any(tmp_path.iterdir()), "something was made for what was refused"


def _ask(http: httpx.Client, number: int) -> list[list[int]]:
    found = []
    for i in range(number):
        body = {"prompt": [3 + i % 61, 3 + i // 61, 9], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        reply = http.post("/v1/completions", json=body | {"return_token_ids": True})
        assert reply.status_code == 200, reply.text
        found.append(reply.json()["choices"][0]["token_ids"])
    return found


def test_a_learner_stands_still_while_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for its least share, by which it comes to an end beside requests that never cease."""
    code = "import time\nwhile time.process_time() < 3600: pass"
    requests = [True]
    monkeypatch.setattr(host, "granted_cores", lambda: 2)
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        process = psutil.Process(child.pid)
        thread = threading.Thread(target=attend, args=(process, lambda: bool(requests)))
        thread.start()
        try:
            for more in (0.1, 0.2):  # seconds of a processor, beside requests
                wait_for(lambda: process.status() == psutil.STATUS_STOPPED)
                wait_for(lambda more=more: sum(process.cpu_times()[:2]) > more)
            requests.clear()
            wait_for(lambda: sum(process.cpu_times()[:2]) > 1.0)
            assert process.status() != psutil.STATUS_STOPPED
            requests.append(True)
            wait_for(lambda: process.status() == psutil.STATUS_STOPPED)
        finally:
            child.kill()
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.slow
def test_a_learner_that_is_killed_harms_no_request(models: Models, tmp_path: Path) -> None:
    """The server counts the round as failed and answers as before; killed itself, it leaves nothing that computes, and
    begins again. Without flags nothing of theirs is imported, and nothing is written."""
    target = served.write_folder(models.target, tmp_path / "model")
    common = ["serve", "--target", str(target), "--draft", models.name, "--speculation", "chain:2", "--port", "0"]
    common += ["--max-model-len", "64", "--max-slots", "1"]
    learn = ["--learn", str(tmp_path / "learn"), "--learn-answers", "64"]
    environment = served.environment(tmp_path / "cache")

    def server(*flags: str) -> Any:
        command = [(served.LEARNING if flags else "") + served.SCRIPT, *common, *flags]
        return served.started(command, environment, seconds=PATIENCE, timeout=PATIENCE)

    with server(*learn) as (process, http):
        before = _ask(http, 120)
        wait_for(lambda: bool(served.learners(process)))
        served.learners(process)[0].send_signal(signal.SIGKILL)
        assert _ask(http, 120) == before
        with pytest.raises(BlockingIOError):
            host.hold(tmp_path / "learn")
        failed = 'specserve:learn_rounds_total{model_name="model",result="failed"} 1.0'
        wait_for(lambda: failed in http.get("/metrics").text)
    with server(*learn) as (process, http):
        assert _ask(http, 120) == before
        wait_for(lambda: bool(served.learners(process)))
        [orphan] = served.learners(process)
        wait_for(lambda: bool(_ask(http, 120)) and orphan.status() == psutil.STATUS_STOPPED)
        orphan.suspend()  # as the server may let it go on before it is killed
        process.kill()
        orphan.wait(PATIENCE)
    code = f"""
import re, sys
from specserve.cli import serve
from specserve.serve.http.transport.server import HttpServer
HttpServer.run = lambda self: print([name for name in sys.modules if re.match({served.OF_FLAGS!r}, name)])
from specserve.cli.main import main
sys.argv[1:] = {common!r}
main()
"""
    (nowhere := tmp_path / "nowhere").mkdir()
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=nowhere, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr
    assert not list(nowhere.iterdir())
