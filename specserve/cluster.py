"""Ray, which runs many of our processes over many machines: found, checked and attached to. It schedules, restarts and
moves bytes; what a process computes is ours.
"""

import importlib
import os
from typing import Any

from packaging.version import Version

from specserve.errors import ConfigError

OLDEST, BEYOND = Version("2.60"), Version("3")  # of Ray; what `serve` and `train` ask of it is of 2.60
JOIN_SECONDS = 20  # to reach a cluster that is there


def connect(address: str = "") -> Any:
    """Ray as a module, attached to the cluster at this address: host:port, `auto` for the one on this machine, or ""
    for one of its own on this machine, which ends with this process. A process that Ray itself has started, or that is
    attached already, stays where it is. Raises ConfigError where Ray is missing, of another version, or not there."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
    os.environ.setdefault("RAY_raylet_start_wait_time_s", str(JOIN_SECONDS))
    ray = load("ray")
    if not OLDEST <= (found := Version(ray.__version__)) < BEYOND:
        raise ConfigError(f"Ray {found} is installed, needed is {OLDEST} to before {BEYOND}: {_INSTALL}")
    if ray.is_initialized():
        return ray
    try:
        ray.init(address=address or "local", log_to_driver=True, include_dashboard=None if address else False)
    except (ConnectionError, OSError, RuntimeError, TimeoutError, ValueError) as error:
        raise ConfigError(
            f"ray address {address!r} cannot be reached ({str(error).splitlines()[0]}): is `ray start --head` running "
            "there, of the same Ray and Python versions?"
        ) from error
    return ray


def load(module: str) -> Any:
    """A module of Ray's, such as `ray.serve`. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{module} cannot be imported ({error}): {_INSTALL}") from error


_INSTALL = "pip install 'specserve[scale]'"
