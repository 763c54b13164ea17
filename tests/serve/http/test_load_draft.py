"""Another head for a server that goes on serving: no request ends, no token changes, and the new head accepts as much
as if it had been there from the beginning."""

import dataclasses
import gc
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest
import tiny
from engines import (
    PATIENCE,
    Ask,
    Dice,
    Fixed,
    Inbox,
    Reference,
    check_idle,
    compile_programs,
    greedy,
    make_engine,
    run,
    serving,
    submit,
)
from fakes import FakeEngine, assert_refused

from specserve.checkpoints.load import Target, in_few_bits
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.errors import CapacityError, CheckpointError, ConfigError
from specserve.interop.head import save_head
from specserve.serve import launch, startup
from specserve.serve.engine.interface import DraftInfo
from specserve.serve.engine.swap import LoadedHead, ServedWeights
from specserve.serve.engines import with_draft
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.launch import Models
from specserve.serve.programs.calls import Call
from specserve.serve.programs.compile_queue import CompiledPrograms
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import SamplingParams
from specserve.serve.settings import ServeRun

PROMPT = tuple(int(i) for i in np.random.default_rng(2).integers(3, 64, 40))
TREE = parse_speculation("tree:3x3x8")


@pytest.fixture
def models(tiny_target: Target, tiny_head: Head) -> Models:
    return Models("tiny", tiny_target, tiny_head, None)


def _asks() -> list[Ask]:
    own = SamplingParams(max_tokens=40, temperature=0.8, seed=5, ignore_eos=True)
    return [Ask(PROMPT[: 30 + i], own if i % 2 else greedy(40, ignore_eos=True)) for i in range(7)]


def _accepted(runner: Runner, asks: list[Ask]) -> list[object]:
    with serving(make_engine(runner, Fixed(TREE))) as engine:
        return _acceptances(run(engine, asks))


def _acceptances(inboxes: list[Inbox]) -> list[object]:
    return [inbox.wait().stats.accepted_per_depth for inbox in inboxes]  # type: ignore[union-attr]


@pytest.mark.parametrize("bits", ["as many", "fewer"])
def test_a_head_is_replaced_under_load(runner: Runner, reference: Reference, tiny_target: Target, bits: str) -> None:
    """Also by one of the same shape in other bits, for which other programs are compiled."""
    new = tiny.random_head(tiny_target.config, seed=77)
    if bits == "fewer":
        new = dataclasses.replace(new, params=in_few_bits(new.params, "int8"))
    fresh = runner.with_head(new)
    assert (fresh.compiled is runner.compiled) == (bits == "as many")
    compile_programs(fresh)
    expected = _accepted(fresh, _asks())
    assert _accepted(runner, _asks()) != expected, "the heads do not differ, so nothing is tested"
    engine = make_engine(runner, Fixed(TREE))
    engine._swaps.weights = ServedWeights(load_head=lambda folder: LoadedHead(new, (0.5,), DraftInfo(folder, 2.0)))
    with serving(engine):
        asked = [submit(engine, ask)[1] for ask in _asks()]
        asked[0].wait_for_first()
        assert engine.load_draft("another") == DraftInfo("another", 2.0) == engine.draft
        after = run(engine, _asks())
        assert _acceptances(after) == expected
    for ask, inbox in zip(_asks() * 2, asked + after, strict=True):
        reference.check(ask, inbox)


def _others(target: Target) -> dict[str, tuple[Head, str]]:
    """Heads of other sizes and kinds, and how to speculate with each."""
    return {
        "wide": (tiny.random_head(target.config, seed=3, d_ff=40), "chain:3"),
        "blocks": (tiny.random_block_head(target.config, seed=4, block_size=4), "chain:2"),
        "carried": (tiny.random_carried_layer(target.config, seed=5), "chain:3"),
    }


@pytest.mark.parametrize(
    "names", [("blocks",), pytest.param(("wide", "carried", "blocks"), marks=pytest.mark.slow)], ids=" ".join
)
def test_heads_of_other_shapes_and_kinds_are_put_in_place_under_load(
    runner: Runner, reference: Reference, tiny_target: Target, names: tuple[str, ...]
) -> None:
    """One after another, between two steps, beside grammars: no request and no token is lost, what is asked afterwards
    is accepted as by a server that began with that head, nothing compiles in a step, and nothing of the head before is
    kept in memory."""
    others = {name: _others(tiny_target)[name] for name in names}
    constrained = [dataclasses.replace(ask, is_constrained=True) for ask in _asks()[:2]]
    asks = [*reference.firm(constrained), *_asks()[2:]]
    expected: dict[str, list[object]] = {}
    for name, (head, way) in others.items():
        fresh = runner.with_head(head, (parse_speculation(way), None))
        compile_programs(fresh)
        with serving(make_engine(fresh)) as engine:
            expected[name] = _acceptances(run(engine, asks))
    engine = make_engine(runner)
    engine._swaps.weights = ServedWeights(
        load_head=lambda name: LoadedHead(
            others[name][0], (0.5,), DraftInfo(name, 2.0), (parse_speculation(others[name][1]), None)
        )
    )
    with engine:
        run(engine, asks)
        for name, (_, way) in others.items():
            before = weakref.ref(engine.runner.compiled)
            asked = [submit(engine, ask)[1] for ask in asks]
            asked[0].wait_for_first()
            engine.load_draft(name)
            assert engine.speculation == way
            assert engine.draft == DraftInfo(name, 2.0)
            after = run(engine, asks)
            assert _acceptances(after) == expected[name]
            for ask, inbox in zip(asks * 2, asked + after, strict=True):
                reference.check(ask, inbox)
            gc.collect()
            assert before() is (runner.compiled if name == names[0] else None), "the fixture holds the first"
        check_idle(engine)
        assert engine.stats().num_late_compiles == engine.stats().num_rebuilds == 0


def test_a_head_that_cannot_be_compiled_or_run_leaves_the_old_one(
    runner: Runner, reference: Reference, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails and whenever, requests that run go on with the old head, and a later attempt succeeds."""
    head, way = _others(tiny_target)["blocks"]
    engine = make_engine(runner)
    engine._swaps.weights = ServedWeights(
        load_head=lambda name: LoadedHead(head, (), DraftInfo(name), (parse_speculation(way), None))
    )
    reset, make, asks = Runner.reset, CompiledPrograms._make, _asks()

    def cannot_compile(programs: CompiledPrograms, call: Call) -> object:
        if call.static.get("tree") is not None:
            raise jax.errors.JaxRuntimeError("INTERNAL: no such instruction")
        return make(programs, call)

    def cannot_begin(other: Runner) -> None:
        if other is not runner:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        reset(other)

    with serving(engine):
        engine.set_speculation("off")
        for name, owner, attribute, fault, message in (
            ("compiling", CompiledPrograms, "_make", cannot_compile, "cannot be compiled: .*no such instruction"),
            ("beginning", Runner, "reset", cannot_begin, "cannot run the new weights.*out of memory"),
            ("memory", startup, "free_memory", lambda _mesh: -(10**9), "-1.00 GB are free"),
        ):
            asked = [submit(engine, ask)[1] for ask in asks]
            asked[0].wait_for_first()
            with monkeypatch.context() as patch:
                patch.setattr(owner, attribute, fault)
                with pytest.raises(ConfigError, match=message):
                    engine.load_draft(name)
            assert engine.draft is None
            assert engine.runner is engine.rounds.runner is runner
            for ask, inbox in zip(asks, asked, strict=True):
                reference.check(ask, inbox)
        assert engine.stats().num_rebuilds == 0
        engine.sleep(["kv_cache"])
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "reset", cannot_begin)
            with pytest.raises(ConfigError, match="cannot run the new weights"):
                engine.load_draft("asleep")
        assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(runner.state))
        engine.flush_cache()
        engine.wake()
        for ask, inbox in zip(asks, run(engine, asks), strict=True):
            reference.check(ask, inbox)
    with make_engine(runner) as again:
        again._swaps.weights = engine._swaps.weights
        again.load_draft("now")
        for ask, inbox in zip(asks, run(again, asks), strict=True):
            reference.check(ask, inbox)


def test_a_server_that_stops_gives_up_loading(
    runner: Runner, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, way = _others(tiny_target)["blocks"]
    engine, is_compiling, released = make_engine(runner), threading.Event(), threading.Event()
    engine._swaps.weights = ServedWeights(
        load_head=lambda name: LoadedHead(head, (), DraftInfo(name), (parse_speculation(way), None))
    )

    def wait(_programs: CompiledPrograms, _call: Call) -> object:
        is_compiling.set()
        assert released.wait(PATIENCE)
        return None

    monkeypatch.setattr(CompiledPrograms, "_make", wait)
    with ThreadPoolExecutor(1) as pool:
        try:
            with engine:
                loading = pool.submit(engine.load_draft, "late")
                assert is_compiling.wait(PATIENCE)
            with pytest.raises(CapacityError, match="has changed nothing"):
                loading.result(PATIENCE)
        finally:
            released.set()


def test_the_way_to_speculate_is_changed_under_load(runner: Runner, reference: Reference) -> None:
    """Each way makes all steps that follow, and none changes a token."""
    with serving(make_engine(runner, Dice(4), most_steps=1)) as engine:
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
    with pytest.raises(ConfigError, match="looks 2 tokens ahead"):
        runner.with_head(tiny.random_block_head(tiny_target.config, seed=4, block_size=3))
    with pytest.raises(ConfigError, match="without a head"):
        lookup_runner.with_head(tiny.random_head(tiny_target.config, seed=3))
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


@pytest.mark.parametrize("draft", ["x" * 300, "~nosuchuser/x", "x/" * 3000, "missing"], ids=lambda name: name[:9])
def test_a_head_that_cannot_be_looked_up_is_refused(models: Models, draft: str) -> None:
    """However it is named: at the start, in an evaluation, or in another head's place."""
    for load in (
        launch._head_loader(models, ServeRun()),
        lambda draft: with_draft(models, draft),
        lambda draft: launch.find_names("", draft),
    ):
        with pytest.raises(ConfigError, match=r"cannot be looked up|no such folder|no folder here"):
            load(draft)


@pytest.mark.parametrize("reader", ["read_notes", "load_head", "fingerprint"])
def test_a_head_that_may_not_be_read_is_refused(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    assert models.head is not None
    save_head(tmp_path / "head", models.head, models.target, dtype="float32", notes={})

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(launch, reader, refuse)
    with pytest.raises(CheckpointError, match=r"the head cannot be read .*Permission denied"):
        launch._head_loader(models, ServeRun())(str(tmp_path / "head"))
