"""What is decided about workers before Ray is asked for anything."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from specserve import cluster
from specserve.errors import ConfigError


def test_a_ray_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is asked of it; one that fits, and is attached already, stays where it is."""
    ray = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr(cluster, "load", lambda _module: ray)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # `connect` sets variables that Ray reads
    for version in ("2.59.1", "3.0.0", "3.1"):
        ray.__version__ = version
        with pytest.raises(ConfigError, match=rf"Ray {version} is installed, needed is 2\.60 to before 3: pip install"):
            cluster.connect()
    for version in ("2.60.0", "2.99"):
        ray.__version__ = version
        assert cluster.connect() is ray


def test_workers_get_the_devices_of_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of the kind that JAX_PLATFORMS names, else of the best that there is; too few are refused."""
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
