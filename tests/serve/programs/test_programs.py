"""Programs are compiled once, ahead and side by side; one that is missing is compiled when it is asked for."""

import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specserve import host
from specserve.serve.programs import compile_queue
from specserve.serve.programs.calls import Call
from specserve.serve.programs.compile_queue import CompiledPrograms, Compiler, ProgressLog, compile_all
from specserve.serve.programs.program_cache import ProgramCache
from specserve.speculative.program import StepProgram

SCALE = StepProgram(7)


class _Function:
    """Like a jitted one; says when it is lowered, and may wait or fail there."""

    def __init__(self, gate: threading.Event | None = None, error: Exception | None = None) -> None:
        self.gate, self.error, self.num_lowered = gate, error, 0

    def lower(self, *_shapes: Any, **_static: Any) -> "_Function":
        self.num_lowered += 1
        if self.gate is not None:
            assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        return self

    def compile(self, _options: Any = None) -> Any:
        return lambda x: x + 1


def _compile_all(compiled: CompiledPrograms, functions: Sequence[_Function], **options: Any) -> None:
    """Program i has the i-th function and the batch size i."""
    compile_all(*_queue(compiled, functions), **options)


def _queue(compiled: CompiledPrograms, functions: Sequence[_Function]) -> tuple[Any, list[StepProgram]]:
    def compile_one(program: StepProgram) -> None:
        compiled.compile(Call(program, functions[program.batch], (jnp.zeros(2),)))

    return compile_one, [StepProgram(i) for i in range(len(functions))]


def test_a_call_never_compiles_what_is_there() -> None:
    """Also where its arrays were given away: only their shapes are read before."""
    compiled, donating = CompiledPrograms(), jax.jit(lambda x, y: x * y, donate_argnums=0)
    gone = jnp.ones(3)
    donating(gone, 2.0).block_until_ready()
    call = Call(SCALE, donating, (gone, jnp.float32(3)))
    compiled.compile(call)
    assert SCALE in compiled
    out = compiled.run(Call(SCALE, donating, (jnp.ones(3), jnp.float32(3))))
    assert out.tolist() == [3, 3, 3]
    assert (len(compiled), compiled.num_missed) == (1, 0)
    with pytest.raises(TypeError):  # another shape under the same key is a mistake, and no reason to compile
        compiled.run(Call(SCALE, donating, (jnp.ones(4), jnp.float32(3))))


def test_what_is_missing_is_compiled_when_it_is_asked_for_and_counted() -> None:
    compiled, function = CompiledPrograms(), _Function()
    call = Call(StepProgram(), function, (np.int32(1),))
    assert [compiled.run(call) for _ in range(2)] == [2, 2]
    assert (function.num_lowered, compiled.num_missed) == (1, 1)


def test_who_asks_for_what_is_on_its_way_waits_for_it() -> None:
    gate = threading.Event()
    compiled, function = CompiledPrograms(), _Function(gate)
    compiler = Compiler(*_queue(compiled, [function])).start()
    results: list[Any] = []
    asking = threading.Thread(
        target=lambda: results.append(compiled.run(Call(StepProgram(), function, (np.int32(1),))))
    )
    asking.start()
    gate.set()
    asking.join(60)
    assert compiler.join(60)
    assert results == [2]
    assert function.num_lowered == 1


def test_compiling_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many at once as there are cores."""
    monkeypatch.setattr(host, "num_cores", lambda: 3)
    barrier = threading.Barrier(3, timeout=60)

    class Together(_Function):
        def compile(self, _options: Any = None) -> Any:
            barrier.wait()
            return super().compile(_options)

    compiled = CompiledPrograms()
    _compile_all(compiled, [Together() for _ in range(6)])
    assert len(compiled) == 6


def test_the_first_failure_is_raised_and_nothing_more_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "num_cores", lambda: 1)
    compiled, last = CompiledPrograms(), _Function()
    with pytest.raises(RuntimeError, match="no room"):
        _compile_all(compiled, [_Function(), _Function(error=RuntimeError("no room")), last])
    assert (len(compiled), last.num_lowered) == (1, 0)
    compiled.compile(Call(StepProgram(1), _Function(), (jnp.zeros(2),)))
    assert len(compiled) == 2, "and what failed may be tried again"


def test_in_the_background_one_failure_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "num_cores", lambda: 1)
    compiled, ended = CompiledPrograms(), list[Any]()
    compiler = Compiler(
        *_queue(compiled, [_Function(error=RuntimeError("no room")), _Function()]),
        on_compiled=lambda program, error: ended.append((program.batch, error is not None)),
        on_end=lambda: ended.append("end"),
    )
    assert compiler.start().join(60)
    assert ended == [(0, True), (1, False), "end"]
    assert list(compiled._compiled) == [StepProgram(1)]


def test_what_steps_would_use_now_is_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was asked for by the time that a thread is free, and then the others in their order."""
    monkeypatch.setattr(host, "num_cores", lambda: 1)
    compiled, order, clock = CompiledPrograms(), list[int](), [0.0]
    monkeypatch.setattr(compile_queue.time, "monotonic", lambda: clock[0])
    programs = [StepProgram(batch) for batch in range(1, 8)]

    def compile_one(program: StepProgram) -> None:
        order.append(program.batch)
        if program.batch == 5:  # meanwhile a step of 4 and one of 7 would be made, if they were compiled
            assert compiled.first(iter([StepProgram(7), StepProgram(8)])) == StepProgram(7)
            compiled.require([StepProgram(4)])
        clock[0] += 2.0

    compiled.require([StepProgram(2)])
    clock[0] += 100.0
    compiled.require([StepProgram(5)])
    assert Compiler(compile_one, programs, is_urgent=compiled.is_required).start().join(60)
    assert order == [5, 4, 7, 1, 2, 3, 6], "what was asked for long ago is not"


def test_what_is_in_files_is_here_while_steps_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read again, which is no compile while serving; what is not set aside stays."""
    clock = [0.0]
    monkeypatch.setattr(compile_queue.time, "monotonic", lambda: clock[0])
    compiled = CompiledPrograms(ProgramCache(tmp_path, (), jax.devices()[:1]))
    stays, used, unused = (Call(StepProgram(i), jax.jit(lambda x: x + 1), (jnp.zeros(2 + i),)) for i in range(3))
    for call in (stays, used, unused):
        compiled.compile(call)
    for call in (used, unused):
        compiled.set_aside(call.program)
    clock[0] = 9.0
    compiled.run(used)
    clock[0] = 11.0
    assert compiled.let_go(10.0) == 1
    assert [call.program in compiled for call in (stays, used, unused)] == [True, True, False]
    assert [compiled.is_away(call.program) for call in (stays, used, unused)] == [False, False, True]
    assert not compiled.to_read(), "no step has asked for it"
    assert compiled.first(iter([unused.program, used.program])) == used.program
    assert compiled.to_read() == [unused.program]
    compiled.compile(unused)
    assert not compiled.to_read()
    clock[0] = 22.0
    assert compiled.let_go(10.0) == 1, "what has come back is kept twice as long"
    assert unused.program in compiled
    clock[0] = 40.0
    assert compiled.let_go(10.0) == 1
    assert compiled.run(unused).tolist() == [1.0] * 4
    assert compiled.num_missed == 0
    compiled.require([used.program])
    compiled.drop(used.program)  # its file could not be read, nor made
    assert not compiled.to_read()


def test_a_compiler_that_is_stopped_ends_after_what_it_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "num_cores", lambda: 1)
    gate, last = threading.Event(), _Function()
    compiler = Compiler(*_queue(CompiledPrograms(), [_Function(gate), last])).start()
    assert host.is_compiling()
    compiler.stop()
    assert not compiler.join(0.05)
    gate.set()
    compile_queue.end_all()
    assert not host.is_compiling()
    assert last.num_lowered == 0


def test_progress_reaches_the_log_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    log = ProgressLog(5, "while serving", lambda: clock[0])
    with caplog.at_level(logging.INFO):
        for i in range(5):
            clock[0] += 6
            log(f"program {i}")
    assert [record.getMessage() for record in caplog.records] == [
        "while serving: 2 of 5 programs are compiled, 3 are left; the last one was program 1",
        "while serving: 4 of 5 programs are compiled, 1 are left; the last one was program 3",
    ]


def test_a_thread_of_low_priority_lets_others_go_first() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(host.lower_priority()))
    thread.start()
    thread.join()
    assert found == [sys.platform.startswith("linux")]


def test_something_else_is_done_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """And if that fails nobody waits for programs."""
    monkeypatch.setattr(host, "num_cores", lambda: 1)
    gate, last = threading.Event(), _Function()
    _compile_all(CompiledPrograms(), [_Function(gate)], meanwhile=gate.set)
    gate.clear()

    def fail() -> None:
        raise ValueError("no tokenizer")

    with pytest.raises(ValueError, match="no tokenizer"):
        _compile_all(CompiledPrograms(), [_Function(gate), last], meanwhile=fail)
    gate.set()
    compile_queue.end_all()
    assert last.num_lowered == 0
