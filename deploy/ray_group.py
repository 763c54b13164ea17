"""One server over several hosts of a Ray cluster, as a Ray job:

    ray job submit -- python deploy/ray_group.py --hosts 2 --each GPU=8 -- \
      --target qwen3-235b-a22b --mesh tensor=16 --host 0.0.0.0

Ray finds hosts with that much free, keeps it, and says where the first one is. On each runs `specserve serve` with what
follows the two dashes, and with the flags that make one server of these processes. Where one ends in an error all do,
and all are started again, on other hosts where one of them is lost; but a wrong setting ends the job. SIGTERM or Ctrl-C
lets the server drain.
"""

import argparse
import contextlib
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from specserve import cluster, log
from specserve.errors import CapacityError, ConfigError, SpecServeError, first_line
from specserve.processes import ProcessError

logger = logging.getLogger("specserve.ray_group")

COORDINATOR_PORT = 8476
LOG_SECONDS = 1.0  # for the last lines of the processes to come
MISTAKE, OTHERS_ENDED = 2, 3  # statuses of a process (`processes.exit_status`)
LOST = -1  # the status of a process whose host has been lost


class Host:
    """An actor of Ray beside one process of the server, with the devices that Ray keeps for it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock, self._is_stopped = threading.Lock(), False

    def address(self) -> str:
        """Where the others find this host, and a port that is free there: the usual one, if it is."""
        import ray

        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", COORDINATOR_PORT))
            except OSError:
                probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def serve(self, words: Sequence[str]) -> int:
        """Run the process until it ends. Returns its status."""
        with self._lock:
            if self._is_stopped:
                return 0
            self._process = subprocess.Popen([sys.executable, "-m", "specserve.cli.main", "serve", *words])
        return self._process.wait()

    def stop(self) -> None:
        """As if the process had been told to stop itself. None is started any more."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.send_signal(signal.SIGTERM)


def run(ray: Any, made: Any, each: Mapping[str, float], asked: argparse.Namespace) -> list[int]:
    """Start a process on each of the hosts that Ray finds, and wait until all have ended. Returns their statuses, in
    the order of their ends. Raises CapacityError where there is no room for the hosts."""
    hosts = [made.remote() for _ in range(asked.hosts)]
    try:
        joined = [*asked.words, "--coordinator", _place(ray, hosts, each, asked), "--num-processes", str(asked.hosts)]
        left = [host.serve.remote([*joined, "--process-id", str(number)]) for number, host in enumerate(hosts)]
        try:
            return _wait(ray, hosts, left)
        except KeyboardInterrupt:
            hosts[0].stop.remote()
            _wait(ray, hosts, left)
            raise
    except ray.exceptions.RayError as error:  # while the hosts were looked for
        logger.warning("a host is lost: %s", first_line(error))
        return [LOST]
    finally:
        for host in hosts:
            ray.kill(host)


def _place(ray: Any, hosts: Sequence[Any], each: Mapping[str, float], asked: argparse.Namespace) -> str:
    """Wait until Ray has found all hosts, saying that it does. Returns the first one's address."""
    addresses = [host.address.remote() for host in hosts]
    left, end = asked.join_seconds, time.monotonic() + asked.join_seconds
    needed = ", ".join(f"{number:g} {name}" for name, number in each.items())
    while True:
        found, missing = ray.wait(addresses, num_returns=len(hosts), timeout=min(log.SAY_SECONDS, left))
        if not missing:
            return ray.get(addresses[0])
        free = ", ".join(f"{number:g} {name}" for name, number in ray.available_resources().items() if name in each)
        if (left := end - time.monotonic()) <= 0:
            raise CapacityError(
                f"Ray has found {len(found)} of {len(hosts)} hosts with {needed} each within {asked.join_seconds} "
                f"seconds ({free or 'nothing'} is free); lower --hosts or --each, add nodes, or raise --join-seconds"
            )
        what = f"{len(missing)} of {len(hosts)} hosts with {needed} each ({free or 'nothing'} is free)"
        logger.info(log.still_waiting(what, left))


def _wait(ray: Any, hosts: Sequence[Any], left: list[Any]) -> list[int]:
    """Wait for processes. Where a host is lost the others are told to stop, as theirs may go on without knowing."""
    statuses: list[int] = []
    while left:
        [ended], left = ray.wait(left, num_returns=1)
        try:
            statuses.append(ray.get(ended))
        except ray.exceptions.RayError as error:
            logger.warning("a host is lost, so the others stop: %s", first_line(error))
            statuses.append(LOST)
            for host in hosts:
                host.stop.remote()
    return statuses


def is_mistake(statuses: Sequence[int]) -> bool:
    """Return whether processes have ended because of a wrong setting of one, which would come again: the others say
    then that it has ended, and none was killed or lost."""
    return MISTAKE in statuses and {*statuses} <= {0, MISTAKE, OTHERS_ENDED}


def _resources(text: str) -> dict[str, float]:
    pairs = (pair.partition("=") for pair in text.split(",") if pair)
    return {name: float(number) for name, _, number in pairs}


def _interrupt(*_signal: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, required=True, help="processes of the server")
    parser.add_argument("--each", type=_resources, default={}, help="what Ray keeps for each, such as GPU=8 or TPU=4")
    parser.add_argument("--restarts", type=int, default=20, help="after errors and lost hosts")
    parser.add_argument("--join-seconds", type=int, default=300, help="in which Ray finds room for all hosts")
    parser.add_argument("--ray-address", default="auto", help="empty: a cluster of its own on this machine")
    parser.add_argument("words", nargs="+", help="flags of specserve serve, after --")
    asked = parser.parse_args()
    log.setup()
    ray = cluster.connect(asked.ray_address)
    signal.signal(signal.SIGTERM, _interrupt)  # after Ray has put its own there
    each = {"CPU": 1.0, **asked.each}
    cluster.check_room(ray, each, asked.hosts, "--hosts or --each")
    made = ray.remote(Host).options(
        num_cpus=each["CPU"],
        num_gpus=each.get("GPU", 0.0),
        resources={name: number for name, number in each.items() if name not in ("CPU", "GPU")},
        max_concurrency=2,  # `stop` beside `serve`
        scheduling_strategy="SPREAD",
        runtime_env=cluster.environment(),
    )
    for number in range(1 + asked.restarts):
        statuses = run(ray, made, each, asked)
        if not any(statuses):
            return
        if is_mistake(statuses):
            time.sleep(LOG_SECONDS)
            raise ConfigError("a process says in this log what is wrong with its settings, which would come again")
        logger.warning("the processes have ended with %s after %d of %d restarts", statuses, number, asked.restarts)
    raise ProcessError(f"the server has ended in an error {1 + asked.restarts} times; the log says why")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        try:
            main()
        except SpecServeError as error:
            sys.exit(f"error: {error}")
