"""A group of processes over a Ray that is made up: which ends start all of them again, and what is waited for."""

import importlib.util
import logging
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specserve import launcher, log, processes
from specserve.errors import CapacityError, ConfigError
from specserve.launcher import DiedError, GroupProcess, ProcessGroup, lasting_error, tpu_slice, wait, wait_for_room
from specserve.processes import ProcessError

SCRIPT = Path(__file__).parents[2] / "deploy" / "ray_group.py"


class GoneError(Exception):
    """What Ray raises of an actor that has died."""


class TaskError(Exception):
    """What Ray raises of an error in an actor."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Ray:
    """A call is its own end: an error or None, or "never" before its actor is stopped."""

    exceptions = SimpleNamespace(RayError=GoneError, RayTaskError=TaskError)

    def __init__(self, *ends: Any) -> None:
        self.ends, self.stopped = dict(enumerate(ends)), set[int]()
        self.actors = [
            SimpleNamespace(stop=SimpleNamespace(remote=lambda _signal, n=n: self._stop(n))) for n in self.ends
        ]

    def _stop(self, number: int) -> None:
        self.stopped.add(number)
        if self.ends[number] == "until it is stopped":
            self.ends[number] = None

    def wait(self, calls: list[int], num_returns: int = 1, timeout: float | None = None) -> tuple[list[int], list[int]]:
        ready = [call for call in calls if not isinstance(self.ends[call], str)][:num_returns]
        assert ready or timeout is not None, "nothing ends any more"
        return ready, [call for call in calls if call not in ready]

    def get(self, call: int) -> None:
        if isinstance(self.ends[call], Exception):
            raise self.ends[call]

    def available_resources(self) -> dict[str, float]:
        return {"GPU": 3.0, "CPU": 9.0}


def _group(count: int, **changes: Any) -> ProcessGroup:
    settings: dict[str, Any] = {"count": count, "each": {"GPU": 8.0}, "fewer": "--hosts", "join_seconds": 0}
    return ProcessGroup(GroupProcess, (), **settings | {"restarts": 1} | changes)


def _errors(ray: Ray, **changes: Any) -> dict[int, Exception]:
    return dict(wait(ray, _group(len(ray.ends), **changes), ray.actors, {number: number for number in ray.ends}))


def test_where_a_process_died_the_others_are_stopped_and_all_start_again() -> None:
    """They may go on where only Ray's actor has died."""
    ray = Ray("until it is stopped", GoneError("its node has died"), "until it is stopped")
    errors = _errors(ray)
    assert ray.stopped == {0, 1, 2}
    assert list(errors) == [1]
    assert isinstance(errors[1], DiedError)
    assert lasting_error(errors) is None  # type: ignore[arg-type]


def test_an_error_is_that_of_the_process_and_those_that_wait_for_it_are_not_waited_for() -> None:
    ray = Ray("never", TaskError(ConfigError("wrong")), TaskError(ProcessError("others")))
    errors = _errors(ray, end_seconds=0.0)
    assert {number: str(error) for number, error in errors.items()} == {1: "wrong", 2: "others"}
    assert lasting_error(errors) is errors[1]  # type: ignore[arg-type]
    assert not ray.stopped
    [bug] = _errors(Ray(TaskError(ValueError("a bug")))).values()
    assert str(bug) == "ValueError: a bug"
    assert lasting_error({0: bug}) is bug  # type: ignore[dict-item]


def test_which_errors_would_come_again() -> None:
    died, ended, wrong = DiedError("died"), ProcessError("ended"), ConfigError("wrong")
    assert lasting_error({0: ended, 1: died}) is None
    assert lasting_error({0: wrong, 1: died}) is None  # it may have followed from that
    assert lasting_error({0: ended}) is None
    assert lasting_error({0: ended, 1: wrong}) is wrong


@pytest.mark.parametrize(
    ("statuses", "is_tried_again"),
    [((2, 2), False), ((2, 3), False), ((0, 2), False), ((3, 3), True), ((-9, 2), True), ((1, 2), True)],
    ids=str,
)
def test_a_server_with_a_wrong_setting_is_not_tried_again(statuses: tuple[int, ...], is_tried_again: bool) -> None:
    """Where another process was killed, the wrong setting may be to have waited for it."""
    spec = importlib.util.spec_from_file_location("ray_group", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    ray_group = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ray_group)
    errors: dict[int, Any] = {}
    for number, status in enumerate(statuses):
        try:
            ray_group.check_status(status)
        except (ConfigError, ProcessError) as error:
            errors[number] = error
    assert (lasting_error(errors) is None) == is_tried_again
    found = processes.exit_status(ConfigError("")), processes.exit_status(ProcessError(""))
    assert found == (ray_group.SETTING_IS_WRONG, ray_group.OTHERS_ENDED)


def test_room_is_waited_for_with_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wait_for_room(Ray(None), _group(2), 0)
    what = r"room on Ray for 2 workers with 8 GPU \(3 free\) each"
    with pytest.raises(CapacityError, match=f"there was no {what} within 0 seconds; lower --hosts, add nodes"):
        wait_for_room(Ray("never"), _group(2), 0)
    moments = iter([0.0, 0.0, 1.0])
    monkeypatch.setattr(launcher.time, "monotonic", lambda: next(moments))
    monkeypatch.setattr(logging.getLogger("specserve"), "propagate", True)
    caplog.set_level(logging.INFO, "specserve")
    with pytest.raises(CapacityError):
        wait_for_room(Ray("never"), _group(2, join_seconds=1), 0)
    assert log.still_waiting(what.replace("\\", ""), 1) in caplog.messages


def test_workers_with_tpus_are_those_of_one_slice() -> None:
    def node(kind: str, topology: str, *, alive: bool = True) -> dict[str, Any]:
        labels = {"ray.io/accelerator-type": kind, "ray.io/tpu-topology": topology}
        return {"Alive": alive, "Resources": {"CPU": 4.0, "TPU": 4.0}, "Labels": labels}

    head = {"Alive": True, "Resources": {"CPU": 4.0}, "Labels": {}}
    same = node("TPU-V6E", "4x4")
    assert tpu_slice([head, same, same, node("TPU-V4", "2x2x2", alive=False)]) == ("4x4", "TPU-V6E")
    for nodes in ([head], [same, node("TPU-V5P", "2x2x1")], [node("TPU-V6E", "")]):
        with pytest.raises(ConfigError, match="of one slice"):
            tpu_slice(nodes)


def test_signals_interrupt_and_are_listed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with launcher._interrupts() as signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
    assert signals == [signal.SIGTERM, signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before
