"""What can go wrong and what it may harm: devices that fail or hang, listeners that raise, engines that stop."""

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import cast

import pytest
from engines import (
    PATIENCE,
    VOCAB,
    Ask,
    Dice,
    Fixed,
    Reference,
    greedy,
    make_engine,
    run,
    serving,
    submit,
    wait_until,
)

from specserve.drafters.speculation import parse_speculation
from specserve.errors import CapacityError
from specserve.serve.engine import engine as engine_module
from specserve.serve.engine import late as late_module
from specserve.serve.engine.changes import CHECK_SECONDS
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.late import LOOK_SECONDS, TIMING_SHARE, LatePrograms, LateWork
from specserve.serve.engine.rounds import Rounds
from specserve.serve.programs.calibrate import finish, first_costs
from specserve.serve.programs.calls import Call
from specserve.serve.programs.compile_queue import CompiledPrograms, compile_all
from specserve.serve.programs.program_list import first_programs, list_programs
from specserve.serve.programs.results import StepHandle
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import Delta, FinishReason, SamplingParams
from specserve.speculative.controller import Controller
from specserve.speculative.program import StepProgram

CHAIN = parse_speculation("chain:3")
PROMPTS = [tuple((7 * i + 3 * j) % VOCAB for j in range(10 + 5 * i)) for i in range(8)]
ASKS = [
    Ask(prompt, greedy(30, ignore_eos=True) if i % 2 else SamplingParams(max_tokens=30, seed=i, ignore_eos=True))
    for i, prompt in enumerate(PROMPTS)
]


def _fail_at(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, is_time: Callable[[int], bool], runner: Runner
) -> None:
    """The device is lost, with all that was donated to it, in one call."""
    original = getattr(owner, name)
    num_calls = 0

    def call(*args, **options):  # type: ignore[no-untyped-def]
        nonlocal num_calls
        num_calls += 1
        if is_time(num_calls):
            runner.state = None  # type: ignore[assignment]
            raise RuntimeError("out of memory on the device")
        return original(*args, **options)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("step", 1),
        ("step", 7),
        ("prefill", 1),
        ("prefill", 4),
        ("admit", 2),
        ("extend", 3),
        ("read_each", 1),
        ("read_each", 6),
    ],
)
def test_a_device_error_ends_the_running_and_spares_the_waiting(
    runner: Runner, reference: Reference, monkeypatch: pytest.MonkeyPatch, place: str, call: int
) -> None:
    engine = make_engine(runner, Fixed(CHAIN))
    owner = StepHandle if place == "read_each" else runner
    _fail_at(monkeypatch, owner, place, lambda num_calls: num_calls == call, runner)
    inboxes = [submit(engine, ask)[1] for ask in ASKS]
    with serving(engine):
        last = [inbox.wait() for inbox in inboxes]
        failed = [delta.finish_reason == FinishReason.ERROR for delta in last]
        assert 1 <= sum(failed) <= 4, "those that ran, and only those"
        for ask, inbox, delta in zip(ASKS, inboxes, last, strict=True):
            if delta.finish_reason == FinishReason.ERROR:
                assert delta.error == "the device failed: out of memory on the device"
                assert inbox.token_ids == reference.answer(ask).token_ids[: len(inbox.token_ids)]
            else:
                reference.check(ask, inbox)
        assert engine.stats().num_rebuilds == 1
        for ask, inbox in zip(ASKS, run(engine, ASKS), strict=True):  # the rebuilt cache serves as before
            reference.check(ask, inbox)


def test_a_device_error_spares_those_who_were_preempted(
    runner: Runner, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had begun to answer; they go on where they were."""
    engine = make_engine(runner, Fixed(CHAIN), num_pages=14)
    begun: set[int] = set()

    def someone_was_preempted(_num_calls: int) -> bool:
        if not begun:
            begun.update(s.order for s in engine.rounds.scheduler.waiting if s.output_ids)
            return bool(begun)
        return False

    _fail_at(monkeypatch, runner, "step", someone_was_preempted, runner)
    inboxes = [submit(engine, ask)[1] for ask in ASKS]
    with serving(engine):
        last = [inbox.wait() for inbox in inboxes]
    for i, (ask, inbox) in enumerate(zip(ASKS, inboxes, strict=True)):
        assert i not in begun or last[i].finish_reason == FinishReason.LENGTH
        if last[i].finish_reason != FinishReason.ERROR:
            reference.check(ask, inbox)
    assert begun
    assert engine.stats().num_rebuilds == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_device_that_does_not_come_back_ends_the_engine(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(runner, Fixed(CHAIN))
    reset = runner.reset

    def gone() -> None:
        raise RuntimeError("no device")

    _fail_at(monkeypatch, runner, "step", lambda num_calls: num_calls == 3, runner)
    monkeypatch.setattr(runner, "reset", gone)
    inboxes = [submit(engine, ask)[1] for ask in ASKS]
    with engine:
        reasons = [inbox.wait().finish_reason for inbox in inboxes]
        wait_until(lambda: not engine.is_healthy)
        assert not engine.is_ready
        with pytest.raises(CapacityError):
            submit(engine, ASKS[0])
        engine.drain(60)
    assert set(reasons) == {FinishReason.ERROR, FinishReason.CANCELLED}
    reset()


@pytest.mark.parametrize("nth", [1, 2, -1])
def test_a_failing_listener_harms_its_request_alone(runner: Runner, reference: Reference, nth: int) -> None:
    heard: list[Delta] = []

    def fail(delta: Delta) -> None:
        heard.append(delta)
        if len(heard) == nth or (nth < 0 and delta.finish_reason):
            raise ValueError("a listener's own fault")

    with serving(make_engine(runner, Dice(0))) as engine:
        engine.submit(PROMPTS[1], greedy(30, ignore_eos=True), fail)
        for ask, inbox in zip(ASKS, run(engine, ASKS), strict=True):
            reference.check(ask, inbox)
    assert len(heard) == nth or nth < 0, "it is not called again"


def test_a_listener_may_fail_while_it_waits(runner: Runner) -> None:
    def fail(delta: Delta) -> None:
        raise ValueError("a listener's own fault")

    engine = make_engine(runner, Fixed(CHAIN))
    engine.submit(PROMPTS[1], greedy(30), fail).cancel()
    with serving(engine):
        assert run(engine, ASKS[:1])[0].wait().finish_reason == FinishReason.LENGTH


def test_draining_lets_all_that_was_taken_end(runner: Runner, reference: Reference) -> None:
    with serving(make_engine(runner, Fixed(CHAIN))) as engine:
        inboxes = [submit(engine, ask)[1] for ask in ASKS]  # more than there are slots
        engine.drain(60)
        assert all(inbox.is_done for inbox in inboxes)
        assert not engine.is_ready
        with pytest.raises(CapacityError, match="stopping"):
            submit(engine, ASKS[0])
    for ask, inbox in zip(ASKS, inboxes, strict=True):
        reference.check(ask, inbox)


def test_draining_waits_for_a_listener_that_is_being_called(runner: Runner) -> None:
    """A sequence gives its place back before its listener hears of the end."""
    heard = threading.Event()

    def slow(delta: Delta) -> None:
        if delta.finish_reason is not None:
            time.sleep(0.2)
            heard.set()

    with serving(make_engine(runner, Fixed(CHAIN))) as engine:
        engine.submit(PROMPTS[1], greedy(4, ignore_eos=True), slow)
        engine.drain(60)
        assert heard.is_set()


class _Stuck:
    """A device that answers nothing until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release, read_each = threading.Event(), StepHandle.read_each

        def wait(handle: StepHandle):  # type: ignore[no-untyped-def]
            assert self.release.wait(60)
            return read_each(handle)

        monkeypatch.setattr(StepHandle, "read_each", wait)


def test_draining_takes_no_longer_than_it_may(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = _Stuck(monkeypatch)
    with make_engine(runner, Fixed(CHAIN)) as engine:
        _, inbox = submit(engine, ASKS[0])
        start = time.monotonic()
        engine.drain(0.1)
        assert 0.1 <= time.monotonic() - start < 10
        assert not inbox.is_done
        stuck.release.set()
    assert inbox.wait().finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)


def test_a_stuck_step_is_reported_once(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = _Stuck(monkeypatch)
    with serving(make_engine(runner, Fixed(CHAIN), watchdog_seconds=0.05)) as engine, caplog.at_level(logging.ERROR):
        _, inbox = submit(engine, ASKS[0])
        wait_until(lambda: "is the device stuck?" in caplog.text)
        time.sleep(0.1)
        assert caplog.text.count("is the device stuck?") == 1
        assert engine.stats().seconds_in_step > 0.05
        stuck.release.set()
        assert inbox.wait().finish_reason == FinishReason.LENGTH
        wait_until(lambda: engine.stats().seconds_in_step == 0)  # the answer is out before its step is over


def test_stopping_does_not_wait_for_a_stuck_device_for_ever(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = _Stuck(monkeypatch)
    monkeypatch.setattr(engine_module, "STOP_SECONDS", 0.1)
    engine = make_engine(runner, Fixed(CHAIN)).start()
    _, inbox = submit(engine, ASKS[0])
    wait_until(lambda: engine.stats().seconds_in_step > 0)
    engine.stop()
    assert "its device is stuck" in caplog.text
    assert not inbox.is_done
    stuck.release.set()
    assert inbox.wait().finish_reason == FinishReason.CANCELLED
    monkeypatch.setattr(engine_module, "STOP_SECONDS", 60)
    engine.stop()


def _compile_late(
    compile_one: Callable[[StepProgram], None],
    released: threading.Event,
    masks_released: threading.Event,
    program: StepProgram,
) -> None:
    assert (masks_released if program.is_for_masks else released).wait(60)
    compile_one(program)


def _compiled_anew(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> CompiledPrograms:
    """Have a runner begin without programs. What it had is given to it again when it is compiled."""
    whole, partial = runner.compiled, CompiledPrograms()

    def compile_again(call: Call) -> object:
        return partial._compiled.setdefault(call.program, whole.compile(call))

    monkeypatch.setattr(partial, "compile", compile_again)
    monkeypatch.setattr(runner, "compiled", partial)
    runner.reset()
    return partial


def test_plain_decoding_serves_while_the_rest_compiles(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the largest plain programs alone, for every batch; the others follow, and then what is chosen."""
    released, masks_released, seen = threading.Event(), threading.Event(), []
    partial = _compiled_anew(runner, monkeypatch)

    def on_compiled(_runner: Runner) -> Iterator[object]:
        seen.append(engine.rounds.choice.is_partial)
        if len(seen) == 1:  # so all is timed once more
            raise RuntimeError("of a step that was in flight while others were timed")
        yield
        return Fixed(parse_speculation("static:2x1"))

    programs = list_programs(runner)
    plain = [program for program in programs if runner.shapes.is_plain(program)]
    compile_all(runner.compile, plain)
    for_masks = [program for program in programs if program.is_for_masks]
    late = [program for program in programs if program not in (*plain, *for_masks)]
    monkeypatch.setattr(runner, "compile", functools.partial(_compile_late, runner.compile, released, masks_released))
    constrained = [dataclasses.replace(ask, is_constrained=True) for ask in ASKS[:3]]
    engine = Engine(
        runner,
        None,
        model_name="tiny",
        eos_ids=(2,),
        controller=Controller({}),
        late=LateWork(late, for_masks, on_compiled),
    )
    with engine:
        assert engine.is_ready
        first = run(engine, ASKS[:3])
        assert set(engine.stats().num_steps_by_speculation) == {"off"}
        assert engine.stats().num_programs_left == len(late)
        released.set()
        wait_until(lambda: not engine.rounds.choice.is_partial)
        assert engine.stats().num_programs_left == 0
        again = run(engine, ASKS[:3])
        assert set(engine.stats().num_steps_by_speculation) == {"off", "static:2x1"}
        assert len(partial) == len(programs) - len(for_masks), "nobody has asked for them"
        engine.rounds.choice.controller = Fixed(CHAIN)
        plainly = run(engine, constrained)
        assert set(engine.stats().num_steps_by_speculation) == {"off", "static:2x1"}
        masks_released.set()
        wait_until(lambda: len(partial) == len(programs))
        speculating = run(engine, constrained)
        assert set(engine.stats().num_steps_by_speculation) == {"off", "static:2x1", "chain:3"}
    assert seen == [True, True]
    assert [inbox.token_ids for inbox in first] == [inbox.token_ids for inbox in again]
    assert [inbox.token_ids for inbox in plainly] == [inbox.token_ids for inbox in speculating]
    assert engine.stats().num_late_compiles == 0
    assert len(partial) == len(programs)


def test_one_client_speculates_while_the_rest_compiles(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is compiled first, once its costs are known; several clients are served plainly, and all get the same
    tokens."""
    partial, released = _compiled_anew(runner, monkeypatch), threading.Event()
    programs = list_programs(runner)
    first = first_programs(runner, programs)
    compile_all(runner.compile, first)
    late = [program for program in programs if program not in first and not program.is_for_masks]
    monkeypatch.setattr(runner, "compile", functools.partial(_compile_late, runner.compile, released, released))
    [alike] = [program for program in first if program.tree == CHAIN]
    plain = runner.shapes.step(alike.batch, alike.width, None)
    assert {alike, plain} <= finish(first_costs(runner)).keys() <= {*first}, "what is timed is what is there"

    def on_begin(_runner: Runner) -> Iterator[object]:
        yield
        return Controller({alike: 1.0, plain: 9.0}, (0.9,))

    work = LateWork(late, first=first, on_begin=on_begin)
    settings = {"model_name": "tiny", "eos_ids": (2,), "controller": Controller({}), "late": work}
    with Engine(runner, None, **settings) as engine:
        wait_until(lambda: not engine._late.is_finishing)
        alone = [run(engine, [ask])[0] for ask in ASKS[:3]]
        assert engine.stats().num_steps_by_speculation["chain:3"] >= 3 * 30 // 4
        together = run(engine, ASKS[:3])
        assert engine.rounds.choice.is_partial
        assert alike in engine.rounds.choice.controller.costs
        assert len(partial) == len(first), "none that is late"
        released.set()
    assert [inbox.token_ids for inbox in alone] == [inbox.token_ids for inbox in together]
    assert engine.stats().num_late_compiles == 0


@pytest.mark.parametrize("is_asked", [False, True])
def test_steps_are_timed_in_a_small_share_of_the_time_in_which_others_are_made(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, *, is_asked: bool
) -> None:
    """At once where nobody asks. No program is let go meanwhile: each is needed in the next round."""
    clock, spent = [0.0], list[float]()
    monkeypatch.setattr(late_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(runner.compiled, "let_go", lambda _seconds: pytest.fail("it is timed once more"))

    def timing(_runner: Runner) -> Iterator[None]:
        for seconds in (0.03, 0.2, 0.01, 0.03) * 5:
            clock[0] += seconds
            spent.append(seconds)
            yield

    ends = list[float]()
    choice = SimpleNamespace(complete=lambda *_each, **_keys: ends.append(clock[0]))
    rounds = cast(Rounds, SimpleNamespace(running=[None] * is_asked, runner=runner, asleep=None, choice=choice))
    programs = LatePrograms(runner, LateWork(), lambda: None)
    programs.use(runner, timing, has_others=True)
    begin, num_rounds = clock[0], 0
    while not programs.is_complete:
        before = sum(spent)
        clock[0] += 0.005 * is_asked  # a round
        programs.go_on(rounds)
        num_rounds += 1
        assert sum(spent) - before <= 0.2, "one run at a time"
        if is_asked and len(spent) > 1:
            assert sum(spent[:-1]) <= TIMING_SHARE * (clock[0] - begin)
    assert len(spent) == 20
    assert (num_rounds == 21) == (not is_asked)
    assert ends == [clock[0]]
    assert clock[0] - begin < 1.1 * sum(spent) / (TIMING_SHARE if is_asked else 1)
    assert clock[0] > LOOK_SECONDS or not is_asked


def test_a_program_that_cannot_be_compiled_is_never_used(
    runner: Runner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_program: StepProgram) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(runner, "compile", fail)
    runner.reset()
    engine = Engine(
        runner,
        None,
        model_name="tiny",
        eos_ids=(2,),
        controller=Fixed(CHAIN),
        late=LateWork([StepProgram(1, 1, CHAIN)]),
    )
    with caplog.at_level(logging.INFO), serving(engine):
        wait_until(lambda: "all programs are compiled" in caplog.text)
        assert f"{runner.shapes.label(StepProgram(1, 1, CHAIN))} could not be compiled" in caplog.text
        assert engine.rounds.choice.is_partial, "steps are made of those that are there"
        run(engine, ASKS[:1])
        assert set(engine.stats().num_steps_by_speculation) == {"chain:3"}


def test_the_end_of_a_change_is_reported_once_all_of_it_is_done(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that fails on the device: once the engine is whole again. And one that is being made when the engine is
    stopped has its own end: no error states that nothing has changed."""

    def fail() -> None:
        raise RuntimeError("out of memory on the device")

    begun, may_end = threading.Event(), threading.Event()

    def be_long() -> None:
        begun.set()
        may_end.wait(PATIENCE)

    engine = make_engine(runner, Fixed(CHAIN))
    rebuild = engine.rounds.rebuild

    def rebuild_late(error: Exception) -> None:
        time.sleep(0.3)
        rebuild(error)

    monkeypatch.setattr(engine.rounds, "rebuild", rebuild_late)
    with serving(engine), ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError, match="out of memory"):
            engine._changes.ask(fail)
        assert engine.stats().num_rebuilds == 1
        changing = pool.submit(engine._changes.ask, be_long)
        assert begun.wait(PATIENCE)
        engine._queue.close()  # as stopping does first
        with pytest.raises(TimeoutError):
            changing.result(3 * CHECK_SECONDS)
        may_end.set()
        assert changing.result(PATIENCE) is None
