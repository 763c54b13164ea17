"""Another head for a server that goes on serving: no request ends, no token changes, and the new head accepts as much
as if it had been there from the beginning."""

import dataclasses
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
import tiny
from engines import Ask, Dice, Fixed, Reference, greedy, make_engine, run, serving, submit
from fakes import FakeEngine, assert_refused

from specserve.checkpoints.load import Target
from specserve.drafters.door import Head
from specserve.drafters.speculation import parse_speculation
from specserve.errors import ConfigError
from specserve.serve.engine import LoadedHead
from specserve.serve.http.app import create_app
from specserve.serve.http.server import HttpServer
from specserve.serve.interface import DraftInfo
from specserve.serve.request import SamplingParams
from specserve.serve.runner import Runner
from specserve.serve.settings import ServeRun

PROMPT = tuple(int(i) for i in np.random.default_rng(2).integers(3, 64, 40))
TREE = parse_speculation("tree:3x3x8")


def _asks() -> list[Ask]:
    own = SamplingParams(max_tokens=40, temperature=0.8, seed=5, ignore_eos=True)
    return [Ask(PROMPT[: 30 + i], own if i % 2 else greedy(40, ignore_eos=True)) for i in range(7)]


def _accepted(runner: Runner, asks: list[Ask]) -> list[object]:
    with serving(make_engine(runner, Fixed(TREE))) as engine:
        return [inbox.wait().stats.accepted_per_depth for inbox in run(engine, asks)]  # type: ignore[union-attr]


def test_a_head_is_replaced_under_load(runner: Runner, reference: Reference, tiny_target: Target) -> None:
    old = runner.layouts
    new = tiny.random_head(tiny_target.config, seed=77)
    try:
        runner.layouts = runner.with_head(new)
        expected = _accepted(runner, _asks())
        runner.layouts = old
        assert _accepted(runner, _asks()) != expected, "the heads do not differ, so nothing is tested"
        engine = make_engine(runner, Fixed(TREE))
        engine._load_head = lambda folder: LoadedHead(new, (0.5,), DraftInfo(folder.name, 2.0))
        with serving(engine):
            asked = [submit(engine, ask)[1] for ask in _asks()]
            asked[0].wait_for_first()
            assert engine.load_draft("another") == DraftInfo("another", 2.0) == engine.draft
            after = run(engine, _asks())
            assert [inbox.wait().stats.accepted_per_depth for inbox in after] == expected  # type: ignore[union-attr]
        for ask, inbox in zip(_asks() * 2, asked + after, strict=True):
            reference.check(ask, inbox)
    finally:
        runner.layouts = old


def test_a_tuned_server_judges_its_trees_by_the_new_head(
    runner: Runner, tiny_head: Head, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are all that it has compiled. The profile's choice among them was the old head's, and says nothing now."""
    tuned = ((runner.shapes.num_slots, parse_speculation("chain:3")),)
    for shapes, num_warnings in ((runner.shapes, 0), (dataclasses.replace(runner.shapes, tuned=tuned), 1)):
        monkeypatch.setattr(runner, "shapes", shapes)
        controller = Dice(4)
        engine = make_engine(runner, controller)
        engine._load_head = lambda _folder: LoadedHead(tiny_head, (0.75, 0.5), DraftInfo("new", None))
        with serving(engine):
            engine.load_draft("new")
            assert controller.start(None).accept_rate[:3].tolist() == [0.75, 0.5, 0.5]
            run(engine, _asks()[:3])
            made = set(engine.stats().num_steps_by_speculation)
        assert made == {"chain:3", "off"} if num_warnings else len(made) > 2
        assert sum("found best for the head before" in record.message for record in caplog.records) == num_warnings


def test_the_way_to_speculate_is_changed_under_load(runner: Runner, reference: Reference) -> None:
    """Each way makes all steps that follow, and none changes a token."""
    with serving(make_engine(runner, Dice(4))) as engine:
        for way in ("off", "static:2x1", "tree:3x3x8", "auto"):
            before = engine.stats().num_steps_by_speculation
            asked = [submit(engine, ask)[1] for ask in _asks()]
            asked[0].wait_for_first()
            engine.set_speculation(way)
            assert engine.speculation == way
            for ask, inbox in zip(_asks(), asked, strict=True):
                inbox.wait()
                reference.check(ask, inbox)
            middle = engine.stats().num_steps_by_speculation
            run(engine, _asks()[:3])
            made = Counter(engine.stats().num_steps_by_speculation) - Counter(middle)
            assert before != middle
            assert set(made) == {way} if way != "auto" else len(made) > 2
        with pytest.raises(ConfigError, match=r"'chain:9'; there are: auto, tree:3x3x8, chain:3, static:2x1, .*off"):
            engine.set_speculation("chain:9")


def test_what_does_not_fit_leaves_the_old_head(runner: Runner, lookup_runner: Runner, tiny_target: Target) -> None:
    wide: Head = tiny.random_head(tiny_target.config, seed=3, d_ff=40)
    with pytest.raises(ConfigError, match=r"d_ff=40.*start a server with it"):
        runner.with_head(wide)
    with pytest.raises(ConfigError, match="without a head"):
        lookup_runner.with_head(wide)
    with pytest.raises(ConfigError, match="cannot replace its head"):
        make_engine(runner).load_draft("anything")


def test_the_route_needs_permission(fake_engine: FakeEngine, http: httpx.Client, tmp_path: Path) -> None:
    assert "--allow-load-draft" in assert_refused(http.post("/v1/load_draft", json={"draft": "x"}), 403)["message"]
    server = HttpServer(create_app(fake_engine, run=dataclasses.replace(ServeRun(), allow_load_draft=True)), port=0)
    server.start()
    try:
        with httpx.Client(base_url=server.url) as allowed:
            reply = allowed.post("/v1/load_draft", json={"draft": str(tmp_path)}).json()
            assert reply == {"status": "ok", "draft": {"id": str(tmp_path), "tau": 3.5}}
            assert allowed.get("/v1/models").json()["data"][1]["id"] == str(tmp_path)
            for way in ("off", "chain:3"):
                assert allowed.post("/v1/speculation", json={"speculation": way}).json() == {"speculation": way}
                assert allowed.get("/v1/speculation").json() == {"speculation": way}
            error = assert_refused(allowed.post("/v1/speculation", json={"speculation": "chain:99"}))
            assert error["param"] == "speculation"
            for body in ({"draft": "missing"}, {}, {"draft": 7}, {"draft": ""}):
                assert assert_refused(allowed.post("/v1/load_draft", json=body))["param"] == "draft"
    finally:
        server.stop()
        fake_engine.draft = None
