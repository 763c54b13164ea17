"""Programs that a process of its own compiles: the server reads them, compiles nothing and gives the same tokens, and
goes on by itself where that process fails."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engines import PATIENCE, make_runner, wait_until
from jax.experimental.compilation_cache import compilation_cache
from kept_start import answers

from specserve import host
from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.serve.programs.calls import Call
from specserve.serve.programs.compile_queue import compile_all
from specserve.serve.programs.compiling_process import CompilingProcess
from specserve.serve.programs.program_list import list_programs
from specserve.serve.programs.runner import ADMISSION, PAGE_TABLE, Runner
from specserve.speculative.program import StepProgram

LET_WAIT = host.let_wait


@pytest.fixture(autouse=True)
def _as_in_a_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compilation cache of JAX's; and the process has its share of a machine that is busy with other tests."""
    monkeypatch.setattr(host, "let_wait", lambda _pid: None)
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


def _refuse(call: Call) -> Any:
    pytest.fail(f"{call.program} was traced")


def test_what_the_process_compiles_is_what_this_one_would(
    make: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same tokens and the same state, and not a program is traced here."""
    runner = make()
    programs = list_programs(runner, has_scoring=False)
    with monkeypatch.context() as patch:
        patch.setattr(Call, "lower", _refuse)
        process = CompilingProcess(runner)
        compile_all(process.compile, programs)
        assert all(program in runner.compiled for program in programs)
        ours = answers(runner)
    assert runner.compiled.num_missed == 0
    assert not caplog.records
    child = process._process
    assert child is not None
    assert child.stdin is not None
    child.stdin.close()  # as the system does when this process ends, however it ends
    assert child.wait(PATIENCE) == 0
    jax.config.update("jax_enable_compilation_cache", True)  # quicker
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(answers(make(None)), ours, strict=True))


def test_a_process_that_is_killed_is_survived_and_said_once(
    make: Callable[..., Runner], caplog: pytest.LogCaptureFixture
) -> None:
    runner = make()
    process, programs = CompilingProcess(runner), [ADMISSION, PAGE_TABLE, StepProgram(1, runner.shapes.max_pages)]
    with ThreadPoolExecutor(2) as pool:
        compiled = [pool.submit(process.compile, program) for program in programs]
        wait_until(lambda: process._process is not None)
        assert process._process is not None
        os.kill(process._process.pid, signal.SIGKILL)
        for each in compiled:
            each.result(PATIENCE)
    assert all(program in runner.compiled for program in programs)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "it has ended with status -9" in caplog.text


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


def test_a_process_that_waits_for_others_has_the_lowest_priority() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        LET_WAIT(process.pid)
        if hasattr(os, "SCHED_IDLE"):
            assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
        else:
            assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
