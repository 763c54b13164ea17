"""deploy/ray_group.py over a Ray that is made up: which ends of processes start all again, and what is waited for."""

import argparse
import importlib.util
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specserve import log, processes
from specserve.errors import CapacityError, ConfigError

_SPEC = importlib.util.spec_from_file_location("ray_group", Path(__file__).parents[2] / "deploy" / "ray_group.py")
assert _SPEC is not None
assert _SPEC.loader is not None
ray_group = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(ray_group)


class Gone(Exception):
    """What Ray raises of an actor that has died."""


class Host:
    """An actor. Its process ends with this status, or with 0 when it is told to stop (None), or dies with its host."""

    def __init__(self, end: int | Exception | None, has_room: bool = True) -> None:
        self.told: list[str] = []
        self.address = SimpleNamespace(remote=lambda: lambda: "10.0.0.1:8476" if has_room else None)
        self.serve = SimpleNamespace(remote=lambda words: lambda: 0 if end is None and self.told else end)
        self.stop = SimpleNamespace(remote=lambda: self.told.append("stop"))


class Ray:
    """What a call gives is there as soon as it is not None."""

    exceptions = SimpleNamespace(RayError=Gone)

    def wait(self, calls: list[Any], num_returns: int, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        ready = [call for call in calls if call() is not None][:num_returns]
        assert ready or timeout is not None, "nobody ends any more"
        return ready, [call for call in calls if call not in ready]

    def get(self, call: Any) -> Any:
        if isinstance(call(), Exception):
            raise call()
        return call()

    def available_resources(self) -> dict[str, float]:
        return {"GPU": 3.0, "CPU": 9.0}

    def kill(self, host: Host) -> None:
        host.told.append("kill")


def _run(*hosts: Host) -> list[int]:
    left = iter(hosts)
    asked = argparse.Namespace(hosts=len(hosts), words=["--port", "1"], join_seconds=0)
    return ray_group.run(Ray(), SimpleNamespace(remote=lambda: next(left)), {"GPU": 8.0}, asked)


def test_a_lost_host_stops_the_others_and_all_are_made_anew() -> None:
    """Their processes may serve on where only Ray's actor has died."""
    hosts = [Host(None), Host(Gone("its node has died")), Host(None)]
    statuses = _run(*hosts)
    assert sorted(statuses) == [ray_group.LOST, 0, 0]
    assert not ray_group.is_mistake(statuses)
    for host in hosts:
        assert host.told == ["stop", "kill"]
    unfound = [Host(0), Host(0)]
    unfound[0].address.remote = lambda: lambda: Gone("its node has died")
    assert _run(*unfound) == [ray_group.LOST]


@pytest.mark.parametrize(
    ("statuses", "is_mistake"),
    [
        ((2, 2), True),
        ((2, 3), True),
        ((0, 2), True),
        ((3, 3), False),
        ((-9, 2), False),
        ((-1, 2), False),
        ((1, 2), False),
    ],
    ids=str,
)
def test_a_wrong_setting_alone_is_not_tried_again(statuses: tuple[int, ...], is_mistake: bool) -> None:
    """Where another process was killed, the mistake may be to have waited for it."""
    assert ray_group.is_mistake(statuses) == is_mistake
    told = processes.exit_status(ConfigError("")), processes.exit_status(processes.ProcessError(""))
    assert told == (ray_group.MISTAKE, ray_group.OTHERS_ENDED)


def test_hosts_without_room_are_waited_for_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = [Host(0), Host(0, has_room=False)]
    with pytest.raises(CapacityError, match=r"1 of 2 hosts with 8 GPU each within 0 seconds \(3 GPU is free\); lower"):
        _run(*hosts)
    assert [host.told for host in hosts] == [["kill"]] * 2
    moments = iter([0.0, 0.0, 1.0])
    monkeypatch.setattr(ray_group.time, "monotonic", lambda: next(moments))
    monkeypatch.setattr(logging.getLogger("specserve"), "propagate", True)
    caplog.set_level(logging.INFO, "specserve")
    asked = argparse.Namespace(join_seconds=1)
    with pytest.raises(CapacityError):
        ray_group._place(Ray(), hosts, {"GPU": 8.0}, asked)
    assert log.still_waiting("1 of 2 hosts with 8 GPU each (3 GPU is free)", 1) in caplog.messages
