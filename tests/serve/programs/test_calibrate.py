"""The costs of steps are measured once, kept in a file, and measured again where that was made on a busy machine."""

import json
import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import describe
from specserve.kernels import native
from specserve.serve.programs import calibrate, program_list
from specserve.serve.programs.calibrate import ROUNDS, describe_costs, finish, step_costs
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import make_shapes
from specserve.speculative.costs import BURST_SECONDS, within_burst
from specserve.speculative.drafter import Weights
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import chain, static_tree


class _FakeRunner(SimpleNamespace):
    """Programs that take as long as they say, on a clock of their own, where they follow their like and nothing
    disturbs them, which is so once."""

    def __init__(self, seconds: dict[StepProgram, float], clock: list[float]) -> None:
        super().__init__(state=jnp.zeros(1), shapes=_Names("shapes"), config="config", place="here")
        self.inputs = _inputs(Weights(jnp.zeros(1), None))
        self.seconds, self.clock, self.ran, self.away = seconds, clock, list[StepProgram](), set[StepProgram]()

    def programs(self) -> list[StepProgram]:
        return [*self.seconds, MISSING]

    def is_there(self, program: StepProgram) -> bool:
        return program != MISSING

    def is_compiled(self, program: StepProgram) -> bool:
        return program not in (MISSING, *self.away)

    def most_steps(self, program: StepProgram) -> int:
        return 3 if program.tree else 8

    def run(self, program: StepProgram, slots: tuple[int, ...] = (), num_steps: int = 1) -> None:
        assert slots == (_Names.num_slots + 1,) * program.batch, "rows that are computed, and written nowhere"
        self.ran.append(program)
        is_disturbed = self.ran.count(program) != 3 * IN_A_ROW or self.ran[-2:] != [program, program]
        self.clock[0] += num_steps * self.seconds[program] * (1 + is_disturbed * len(self.ran))


class _QuickRunner(_FakeRunner):
    """Of short steps, on a machine where nothing disturbs them, and whose host takes as long for each call."""

    def run(self, program: StepProgram, slots: tuple[int, ...] = (), num_steps: int = 1) -> None:
        del slots
        self.ran.append(program)
        self.clock[0] += HOST_SECONDS + num_steps * self.seconds[program]


class _Names(str):
    """In place of shapes."""

    __slots__ = ()
    num_slots = 2

    @staticmethod
    def made(program: StepProgram) -> StepProgram:
        return program

    @staticmethod
    def label(program: StepProgram) -> str:
        return f"{program.kind} {describe(program.tree)} for {program.batch}, {program.width} {program.is_alone}"


def _inputs(weights: Weights) -> SimpleNamespace:
    return SimpleNamespace(layouts=SimpleNamespace(one=weights))


MISSING = StepProgram(2, 32, chain(7))  # could not be compiled
CATCH_UP = StepProgram(2, kind="catch-up")
IN_A_ROW = 2  # runs of a program in its turn
TURNS = ROUNDS + 1  # where the quickest is that of round `ROUNDS`: one more finds nothing quicker
HOST_SECONDS = 0.001
SECONDS = {
    StepProgram(1, 8): 0.010,
    StepProgram(1, 8, chain(3)): 0.014,
    StepProgram(2, 8): 0.011,
    StepProgram(1, 32): 0.012,
}


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> _FakeRunner:
    clock = [0.0]
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(program_list, "timed", _FakeRunner.programs)
    monkeypatch.setattr(program_list, "is_there", _FakeRunner.is_there)
    monkeypatch.setattr(program_list, "is_compiled", _FakeRunner.is_compiled)
    monkeypatch.setattr(program_list, "needed", lambda _runner, program: [CATCH_UP, program])
    return _FakeRunner(SECONDS, clock)


def _in_a_row(shapes: Iterable[Any]) -> list[Any]:
    return [shape for shape in shapes for _ in range(IN_A_ROW)]


def _costs(runner: Any, file: Path | None) -> dict[Any, float]:
    return finish(step_costs(runner, file))


def test_costs_are_measured_and_remembered(runner: Any, tmp_path: Path) -> None:
    file = tmp_path / "costs" / "x.json"
    costs = _costs(runner, file)
    assert costs == pytest.approx(SECONDS), "the least disturbed run tells what a step costs"
    assert runner.ran == _in_a_row(SECONDS) * TURNS, "they take turns, and what is missing is not timed"
    assert [path.name for path in file.parent.iterdir()] == ["x.json"]
    runner.ran.clear()
    assert _costs(runner, file) == pytest.approx(costs)
    ordered = sorted(SECONDS, key=SECONDS.__getitem__)
    assert runner.ran == _in_a_row(ordered) * TURNS, "looked at again, for a moment"
    runner.ran.clear()
    assert _costs(runner, None) == pytest.approx(SECONDS)


def test_a_step_costs_what_it_takes_in_a_burst(runner: Any) -> None:
    """Else what the host does for a call makes short steps seem slower beside long ones than they are served."""
    seconds = {StepProgram(1, 8): 0.002, StepProgram(1, 8, chain(3)): 0.006, StepProgram(1, 32, chain(3)): 0.030}
    costs = _costs(_QuickRunner(seconds, runner.clock), None)
    number = {program: within_burst(cost, 3 if program.tree else 8) for program, cost in costs.items()}
    assert list(number.values()) == [8, 3, 1]
    assert costs == pytest.approx({each: took + HOST_SECONDS / number[each] for each, took in seconds.items()})


@pytest.mark.parametrize(("busy", "rounds"), [(1.0, 3), (2.0, 3), (3.5, 5), (100.0, 3), (8.0, 6)])
def test_a_busy_machine_is_timed_until_nothing_gets_quicker(runner: Any, busy: float, rounds: int) -> None:
    """Others slow it down, in each round by one time less, for a while or as good as for ever."""

    class Busy(_FakeRunner):
        def run(self, program: StepProgram, slots: tuple[int, ...] = (), num_steps: int = 1) -> None:
            del slots
            self.ran.append(program)
            times = max(1.0, busy - len(self.ran) / (IN_A_ROW * len(SECONDS)))
            self.clock[0] += times * num_steps * self.seconds[program]

    busy_runner = Busy(SECONDS, runner.clock)
    costs = _costs(busy_runner, None)
    assert len(busy_runner.ran) == IN_A_ROW * len(SECONDS) * rounds
    assert (costs == pytest.approx(SECONDS)) is (busy < 5)


def test_a_step_of_the_target_alone_costs_no_more_than_one_that_the_draft_follows(runner: Any) -> None:
    """It does less: what it took longer is the machine's doing, and speculation is held against it."""
    alone, followed = StepProgram(1, 8, is_alone=True), StepProgram(1, 8)
    costs = _costs(_QuickRunner({alone: 0.040, followed: 0.030}, runner.clock), None)
    assert costs[alone] == costs[followed] == pytest.approx(0.030 + HOST_SECONDS)
    costs = _costs(_QuickRunner({alone: 0.030, followed: 0.040}, runner.clock), None)
    assert costs[alone] < costs[followed]


def test_looking_again_takes_about_a_second(runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = _costs(runner, tmp_path / "x.json")
    runner.ran.clear()
    monkeypatch.setattr(calibrate, "AGAIN_SECONDS", ROUNDS * (0.010 + 0.011 + 2 * BURST_SECONDS) + 1e-6)
    assert _costs(runner, tmp_path / "x.json") == pytest.approx(costs)
    assert runner.ran == _in_a_row([StepProgram(1, 8), StepProgram(2, 8)]) * TURNS, "the cheapest"


def test_steps_in_files_are_read_only_where_all_are_timed(runner: Any, tmp_path: Path) -> None:
    """What is known of them holds; where nothing is, they are here before they are timed, but for one that fails, and
    so is what they need before them: else a step whose drafter must catch up is never timed, and never chosen."""
    file, [first, *others], asked = tmp_path / "x.json", list(SECONDS), list[Any]()

    def costs() -> dict[Any, float]:
        timing = step_costs(runner, file)
        while True:
            try:
                if (programs := next(timing)) is not None:
                    asked.append(programs)
                    runner.away = {others[-1]}
            except StopIteration as end:
                return end.value

    runner.away = {*others}
    assert costs() == pytest.approx({shape: SECONDS[shape] for shape in SECONDS if shape != others[-1]})
    file.unlink()
    runner.ran.clear()
    runner.away = set()
    _costs(runner, file)
    runner.ran.clear()
    runner.away = {*others}
    assert costs() == pytest.approx(SECONDS)
    needed = [each for shape in SECONDS for each in (CATCH_UP, shape)]
    assert (asked, set(runner.ran)) == ([needed], {first})


def test_costs_of_a_busy_machine_do_not_stay(runner: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And those of a quiet one are not forgotten on a busy one."""
    file = tmp_path / "x.json"
    runner.seconds = {shape: 1.5 * seconds for shape, seconds in SECONDS.items()}
    assert _costs(runner, file)[StepProgram(1, 8)] == pytest.approx(0.015)
    runner.seconds = SECONDS
    runner.ran.clear()
    with caplog.at_level(logging.INFO):
        assert _costs(runner, file) == pytest.approx(SECONDS)
    assert "busy machine" in caplog.text
    assert len(runner.ran) == IN_A_ROW * len(SECONDS) * (TURNS + ROUNDS), "every step is timed again"
    runner.seconds = {shape: 3 * seconds for shape, seconds in SECONDS.items()}
    assert _costs(runner, file) == pytest.approx(SECONDS)


DAMAGE: dict[str, Callable[[str], str]] = {
    "cut off": lambda text: text[:20],
    "empty": lambda _text: "",
    "a list": lambda _text: "[]",
    "null": lambda _text: "null",
    "of other programs": lambda _text: "{}",
    "not numbers": lambda text: json.dumps(dict.fromkeys(json.loads(text), "fast")),
    "nulls": lambda text: json.dumps(dict.fromkeys(json.loads(text))),
    "no numbers": lambda text: json.dumps(dict.fromkeys(json.loads(text), math.nan)),
    "no time at all": lambda text: json.dumps(dict.fromkeys(json.loads(text), 0.0)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_measured_again(
    runner: Any, tmp_path: Path, damage: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "x.json"
    costs = _costs(runner, file)
    file.write_text(damage(file.read_text()))
    runner.ran.clear()
    assert _costs(runner, file) == pytest.approx(costs)
    assert runner.ran
    assert "damaged" in caplog.text
    runner.ran.clear()
    assert _costs(runner, file) == pytest.approx(costs)
    assert len(runner.ran) == IN_A_ROW * len(SECONDS) * TURNS, "and mended"


def test_a_folder_that_cannot_be_written_is_a_warning(
    runner: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert _costs(runner, tmp_path / "file" / "x.json") == pytest.approx(SECONDS)
    assert "cannot be kept" in caplog.text


def test_the_file_depends_on_what_costs_depend_on(runner: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = calibrate.cost_file("target head", runner)
    assert tmp_path in first.parents
    assert calibrate.cost_file("target head", runner) == first
    others = {calibrate.cost_file("another head", runner)}
    for name, value in (
        ("shapes", _Names("others")),
        ("config", "another"),
        ("place", "mesh"),
        ("seconds", {StepProgram(1, 8): 1.0}),
        ("inputs", _inputs(Weights(jnp.ones(1, jnp.int8), None))),  # other bits of the same files
        ("inputs", _inputs(Weights(jnp.ones(1), jnp.ones(1, jnp.int8)))),
    ):
        before = getattr(runner, name)
        setattr(runner, name, value)
        others.add(calibrate.cost_file("target head", runner))
        setattr(runner, name, before)
    assert len(others | {first}) == 8


def test_costs_in_one_line() -> None:
    costs = SECONDS | {StepProgram(1, 8, static_tree((2, 1))): 0.02}
    assert describe_costs(costs) == "batch 1: off 10.0, chain:3 14.0, static:2x1 20.0; batch 2: off 11.0"


@pytest.mark.skipif(not native.is_available(), reason=native.describe())
def test_steps_are_timed_for_more_numbers_of_sequences_than_there_are_programs(
    tiny_target: Target, tiny_head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of two is made by the program for four, of whose rows two are padding, which takes no time."""
    sizes = {"num_slots": 16, "max_model_len": 64, "page_size": 4, "num_pages": 64}
    shapes = make_shapes([None, chain(3)], tiny_target.config, **sizes)
    runner = Runner(tiny_target, tiny_head, shapes, has_constrained=False)
    programs = program_list.list_programs(runner)
    assert sorted({each.batch for each in programs if each.kind == "step"}) == [1, 4, 16]
    timed = program_list.timed(runner)
    assert sorted({each.batch for each in timed if each.kind == "step"}) == [1, 2, 4, 8, 16]
    steps = [step for steps in runner.shapes.step_programs.values() for step in steps]
    assert {*steps} <= {*timed}
    assert {each for step in timed for each in program_list.needed(runner, step)} <= {*programs}
    ran: list[tuple[StepProgram, Any]] = []
    monkeypatch.setattr(runner, "run", lambda program, *values: ran.append((program, *values)))
    width = runner.shapes.max_pages
    calibrate._seconds(runner, StepProgram(2, width, chain(3)), 5)
    assert ran == [(StepProgram(4, width, chain(3)), (17, 17, 16, 16), 5)]
