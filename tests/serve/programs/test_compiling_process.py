"""Programs that a process of its own compiles: the server reads them, compiles nothing and gives the same tokens, and
goes on by itself where that process fails."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import psutil
import pytest
from engines import PATIENCE, Ask, greedy, make_runner, run, serving, wait_until
from jax.experimental.compilation_cache import compilation_cache

from specserve import host
from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.serve.engine import late as late_module
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.interface import EngineStats
from specserve.serve.engine.late import LateWork
from specserve.serve.programs import compiling_process
from specserve.serve.programs.calls import Call
from specserve.serve.programs.compile_queue import compile_all
from specserve.serve.programs.compiling_process import CompilingProcess
from specserve.serve.programs.program_list import list_programs
from specserve.serve.programs.runner import ADMISSION, PAGE_TABLE, Runner
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import chain

LET_WAIT = host.let_wait


@pytest.fixture(autouse=True)
def _as_in_a_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compilation cache of JAX's; and the process has its share of a machine that is busy with other tests."""
    monkeypatch.setattr(host, "let_wait", lambda _pid, **_how: None)
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def make(tiny_target: Target, tiny_head: Head, tmp_path: Path) -> Callable[..., Runner]:
    def make(folder: Path | None = tmp_path) -> Runner:
        return make_runner(tiny_target, tiny_head, "chain:3", "off", num_slots=1, has_constrained=False, folder=folder)

    return make


ASKS = [
    Ask((5, 9, 11, 5, 9, 11, 5, 9), greedy(12, ignore_eos=True)),
    Ask((7, 3), SamplingParams(max_tokens=12, seed=1, ignore_eos=True)),
]


def _refuse(call: Call) -> Any:
    raise AssertionError(f"{call.program} was traced")


def _answers(runner: Runner, late: Sequence[StepProgram]) -> tuple[list[list[list[int]]], EngineStats]:
    """Serve once the late programs are in files, once they are read, and once they are let go at every look; it returns
    the answers of each time, and what is counted then."""
    work, counts, num_before = LateWork(late), list[int](), len(runner.compiled)
    engine = Engine(runner, None, model_name="tiny", eos_ids=(2,), late=work)
    with serving(engine) if not late else engine:
        wait_until(lambda: counts.append(engine.stats().num_programs_left) or counts[-1] == 0)
        wait_until(lambda: engine._late.is_complete)
        assert counts == sorted(counts, reverse=True)
        assert len(runner.compiled) == num_before, "nothing has asked for what is in files"
        answers = [[inbox.token_ids for inbox in run(engine, ASKS)]]
        wait_until(lambda: not runner.compiled.to_read())
        before = engine.stats().num_steps_by_speculation
        answers.append([inbox.token_ids for inbox in run(engine, ASKS)])
        assert set(engine.stats().num_steps_by_speculation - before) == {"chain:3"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(late_module, "UNUSED_SECONDS", 0.0)
            patch.setattr(late_module, "LOOK_SECONDS", 0.0)
            engine._late._next_look = 0.0
            answers.append([inbox.token_ids for inbox in run(engine, ASKS)])
            wait_until(lambda: len(runner.compiled) == num_before)
        return answers, engine.stats()


def test_what_the_process_compiles_is_what_this_one_would(
    make: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same tokens by the same steps, and none of the late programs is traced here."""
    runner = make()
    programs = list_programs(runner, has_scoring=False)
    first = [program for program in programs if runner.shapes.is_plain(program)]
    compile_all(runner.compile, first)
    with monkeypatch.context() as patch:
        patch.setattr(Call, "lower", _refuse)
        tokens, stats = _answers(runner, [program for program in programs if program not in first])
    assert (stats.num_late_compiles, stats.num_programs_left) == (0, 0)
    assert not caplog.records
    jax.config.update("jax_enable_compilation_cache", True)  # quicker
    alone = make(None)
    compile_all(alone.compile, programs)
    with serving(Engine(alone, None, model_name="tiny", eos_ids=(2,))) as engine:
        assert tokens == [[inbox.token_ids for inbox in run(engine, ASKS)]] * 3


def test_a_program_that_fails_is_named_and_the_others_are_kept(
    make: Callable[..., Runner], caplog: pytest.LogCaptureFixture
) -> None:
    """One that no compiler takes, in the process: it is named once, what comes behind it is compiled there, and nothing
    here."""
    runner = make()
    fails = StepProgram(1, runner.shapes.max_pages, kind="proposal")  # of no tree
    programs = [PAGE_TABLE, fails, ADMISSION, StepProgram(1, runner.shapes.max_pages, chain(3))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Call, "lower", _refuse)
        engine = Engine(runner, None, model_name="tiny", eos_ids=(2,), late=LateWork(programs))
        with serving(engine):
            wait_until(lambda: engine._late.is_complete)
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "could not be compiled" in record.getMessage()
    assert all(runner.compiled.is_kept(runner.call(program)) for program in programs if program is not fails)


@pytest.mark.parametrize("end", [lambda child: child.kill(), lambda child: child.stdin.close()], ids=["killed", "left"])
def test_a_process_that_ends_is_survived_and_said_once(
    make: Callable[..., Runner], caplog: pytest.LogCaptureFixture, end: Callable[[Any], None]
) -> None:
    """And it ends by itself when its pipe is closed, as the system does when the server has ended, however it has."""
    runner = make()
    process, programs = CompilingProcess(runner), [ADMISSION, PAGE_TABLE, StepProgram(1, runner.shapes.max_pages)]
    with ThreadPoolExecutor(1) as pool:
        compiled = [pool.submit(process.compile, program) for program in programs]
        wait_until(lambda: bool(process._waiting))
        with process._lock:  # it has been asked
            end(process._process)
        for each in compiled:
            each.result(PATIENCE)
    assert all(program in runner.compiled for program in programs)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert process._process is not None
    assert process._process.returncode == (0 if end.__code__.co_names[-1] == "close" else -signal.SIGKILL)


def test_a_process_that_cannot_start_or_keep_is_done_without(
    make: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_command: object, **_options: object) -> None:
        raise OSError("no more processes")

    runner = make()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        CompilingProcess(runner).compile(PAGE_TABLE)
    assert PAGE_TABLE in runner.compiled
    assert "no more processes" in caplog.text
    monkeypatch.setattr(subprocess, "Popen", lambda *_command, **_options: pytest.fail("a process was started"))
    CompilingProcess(runner).compile(PAGE_TABLE)  # it is in its file
    for other in (make(None), make()):  # nothing is kept without a folder, nor beside a cache of JAX's
        jax.config.update("jax_enable_compilation_cache", other.compiled.is_keeping)
        process = CompilingProcess(other)
        process.compile(ADMISSION)
        assert ADMISSION in other.compiled
        jax.config.update("jax_enable_compilation_cache", False)
    assert len(caplog.records) == 1


def test_who_waits_for_a_process_that_is_closed_goes_on_without_compiling(make: Callable[..., Runner]) -> None:
    runner = make()
    process = CompilingProcess(runner)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(process.compile, StepProgram(1, runner.shapes.max_pages))
        wait_until(lambda: process._process is not None)
        process.close()
        asked.result(PATIENCE)
        process.compile(ADMISSION)
    assert len(runner.compiled) == 1, "the empty state alone"
    assert process._process is not None
    assert process._process.wait(PATIENCE) == -signal.SIGKILL


def test_a_process_that_gets_nothing_is_started_anew_with_a_share(
    make: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    how: list[bool] = []
    monkeypatch.setattr(host, "let_wait", lambda _pid, is_idle: how.append(is_idle))
    monkeypatch.setattr(compiling_process, "STARVED_SECONDS", 0.2)
    monkeypatch.setattr(compiling_process, "STARVED_SHARE", 0.0)
    runner = make()
    process, program = CompilingProcess(runner), StepProgram(1, runner.shapes.max_pages)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(process.keep, each) for each in (program, ADMISSION)]
        wait_until(lambda: len(process._waiting) == 2)
        first = process._process
        assert first is not None
        first.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(compiling_process, "STARVED_SHARE", 0.02)
        wait_until(lambda: process._process is not first)
        assert all(each.result(PATIENCE) for each in asked)
        assert first.wait(PATIENCE) == -signal.SIGKILL
        assert how == [True, False]
        assert process.keep(PAGE_TABLE), "it goes on"
    assert all(runner.compiled.is_kept(runner.call(each)) for each in (program, ADMISSION, PAGE_TABLE))
    assert how == [True, False], "a process with a share is never taken for one that has none"
    process.close()
    assert not caplog.records


@pytest.mark.skipif(sys.platform != "linux", reason="a process that stands still would outlive its parent")
def test_a_process_stands_still_now_and_then_while_this_one_serves(make: Callable[..., Runner]) -> None:
    """It goes on in between, and for good once nothing is served; and nothing is begun for what is in files."""
    runner = make()
    with CompilingProcess.begun(runner, [PAGE_TABLE]) as process:
        assert process._process is not None
    child = psutil.Process(process._process.pid)

    def stands_still() -> bool:
        process.give_way()
        return child.status() == psutil.STATUS_STOPPED

    for _ in range(2):
        wait_until(stands_still)
        wait_until(lambda: not stands_still())
    assert process.keep(PAGE_TABLE)
    process.close()
    assert process._process.wait(PATIENCE) == -signal.SIGKILL
    with CompilingProcess.begun(runner, [PAGE_TABLE]) as another:
        assert another._process is None
    with pytest.raises(KeyboardInterrupt), CompilingProcess.begun(runner, [ADMISSION]) as interrupted:
        raise KeyboardInterrupt
    assert interrupted._process is not None
    assert interrupted._process.wait(PATIENCE) == -signal.SIGKILL


WAITS = """
import os, threading
input()
thread = threading.Thread(target=lambda: print(os.sched_getscheduler(0)))
thread.start()
thread.join()
"""


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_process_that_waits_for_others_has_a_low_priority(is_idle: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        LET_WAIT(process.pid, is_idle=is_idle)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 13
        assert int(process.communicate(b"\n")[0]) == (os.SCHED_IDLE if is_idle else os.SCHED_OTHER)
