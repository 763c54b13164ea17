"""What is decided before Ray is asked for anything, and needs no Ray."""

import logging
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_run import tiny_run

from specserve import cluster, log
from specserve.errors import ConfigError
from specserve.train.remote.workers import Room, fit, scaling
from specserve.train.run.checks import check_settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ray": True, "coordinator": "auto"}, "--ray starts the processes of a run itself"),
        ({"ray": True, "num_processes": 2}, "--ray starts the processes of a run itself"),
        ({"num_workers": 2}, "give --ray too"),
        ({"ray_address": "auto"}, "give --ray too"),
        ({"ray": True, "budget": "1h"}, "--budget and --regenerate are for one process"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(tiny_run(tmp_path, **changes))


def test_devices_are_shared_evenly(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 devices, which 3 workers do not share evenly"):
        fit(tiny_run(tmp_path, ray=True, num_workers=3, mesh="data=2"), lambda _run, _listen: None)


def test_a_ray_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is asked of it; one that fits, and is attached already, stays where it is."""
    ray = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr(cluster, "load", lambda _module: ray)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # which Ray is told by
    for version in ("2.59.1", "3.0.0", "3.1"):
        ray.__version__ = version
        with pytest.raises(ConfigError, match=rf"Ray {version} is installed, needed is 2\.60 to before 3: pip install"):
            cluster.connect()
    for version in ("2.60.0", "2.99"):
        ray.__version__ = version
        assert cluster.connect() is ray


def test_workers_get_the_devices_of_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kind that JAX is told to use, else of the best that there is; too few are refused."""
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 8.0, "GPU": 8.0, "memory": 1e9})
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert cluster.reserve(ray, 4, 2) == {"CPU": 1.0, "GPU": 4.0}
    with pytest.raises(ConfigError, match=r"2 workers need 10 GPU, 5 each, and the Ray cluster has 8"):
        cluster.reserve(ray, 5, 2)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert cluster.reserve(ray, 4, 2) == {"CPU": 4.0}
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    with pytest.raises(ConfigError, match=r"1 workers need 4 TPU, 4 each, and the Ray cluster has 0"):
        cluster.reserve(ray, 4, 1)


def test_what_workers_wait_for_is_said_until_they_begin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "specserve")
    monkeypatch.setattr(log, "SAY_SECONDS", 0.0)
    answers = iter((False, False, True))  # each asked for once
    ray = SimpleNamespace(get=next, available_resources=lambda: {"CPU": 8.0, "GPU": 3.0})
    bell = SimpleNamespace(has_begun=SimpleNamespace(remote=lambda: answers))
    room = Room(ray, bell, {"CPU": 1.0, "GPU": 4.0}, 2, 60)
    for _ in range(5):
        room.look()
    line = r"waiting for 2 workers on Ray of 1 CPU \(8 free\), 4 GPU \(3 free\) each, (60|59) seconds more at most"
    assert [bool(re.fullmatch(line, said)) for said in caplog.messages] == [True, True]


def test_workers_with_tpus_are_those_of_one_slice() -> None:
    def node(kind: str, topology: str, *, alive: bool = True) -> dict[str, Any]:
        labels = {"ray.io/accelerator-type": kind, "ray.io/tpu-topology": topology}
        return {"Alive": alive, "Resources": {"CPU": 4.0, "TPU": 4.0}, "Labels": labels}

    head = {"Alive": True, "Resources": {"CPU": 4.0}, "Labels": {}}
    each, same = {"CPU": 1.0, "TPU": 4.0}, node("TPU-V6E", "4x4")
    assert scaling(4, each, [head, same, same, node("TPU-V4", "2x2x2", alive=False)]) == {
        "num_workers": 4,
        "resources_per_worker": each,
        "use_tpu": True,
        "topology": "4x4",
        "accelerator_type": "TPU-V6E",
    }
    for nodes in ([head], [same, node("TPU-V5P", "2x2x1")], [node("TPU-V6E", "")]):
        with pytest.raises(ConfigError, match="of one slice"):
            scaling(4, each, nodes)


def test_a_worker_that_differs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works in the folder of the command, with the command's versions."""
    monkeypatch.chdir(tmp_path)
    here = cluster.Driver.here()
    monkeypatch.chdir("/")
    here.enter()
    assert Path(os.getcwd()) == tmp_path
    with pytest.raises(ConfigError, match=r"has jax .*, not 0\.0\.1 as the command has"):
        cluster.Driver((("jax", "0.0.1"),), str(tmp_path)).enter()
    with pytest.raises(ConfigError, match="start the command in a folder that all hosts share"):
        cluster.Driver(here.versions, str(tmp_path / "none")).enter()
