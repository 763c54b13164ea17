"""One server over several hosts of a Ray cluster, as a Ray job:

    ray job submit -- python deploy/ray_group.py --hosts 2 --each GPU=8 -- \
      --target qwen3-235b-a22b --mesh tensor=16 --host 0.0.0.0

Ray finds hosts with that much free, keeps it, and says where the first one is. On each runs `specserve serve` with what
follows the two dashes, and with the flags that make one server of these processes. Where one ends in an error all do,
and all are started again. SIGTERM or Ctrl-C lets the server drain.
"""

import argparse
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from specserve import cluster, log
from specserve.errors import SpecServeError

COORDINATOR_PORT = 8476


class Host:
    """An actor of Ray beside one process of the server, with the devices that Ray keeps for it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

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
        self._process = subprocess.Popen([sys.executable, "-m", "specserve.cli.main", "serve", *words])
        return self._process.wait()

    def stop(self) -> None:
        """As if the process had been told to stop itself."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)


def run(ray: Any, hosts: Sequence[Any], words: Sequence[str]) -> list[int]:
    """Start a process on each host, and wait until all have ended. Returns their statuses."""
    joined = [*words, "--coordinator", ray.get(hosts[0].address.remote()), "--num-processes", str(len(hosts))]
    ends = [host.serve.remote([*joined, "--process-id", str(number)]) for number, host in enumerate(hosts)]
    try:
        return ray.get(ends)
    except KeyboardInterrupt:
        ray.get(hosts[0].stop.remote())
        ray.get(ends)
        raise


def _resources(text: str) -> dict[str, float]:
    pairs = (pair.partition("=") for pair in text.split(",") if pair)
    return {name: float(number) for name, _, number in pairs}


def _interrupt(*_signal: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, required=True, help="processes of the server")
    parser.add_argument("--each", type=_resources, default={}, help="what Ray keeps for each, such as GPU=8 or TPU=4")
    parser.add_argument("--restarts", type=int, default=20, help="after errors")
    parser.add_argument("--ray-address", default="auto", help="empty: a cluster of its own on this machine")
    parser.add_argument("words", nargs="+", help="flags of specserve serve, after --")
    asked = parser.parse_args()
    log.setup()
    ray = cluster.connect(asked.ray_address)
    signal.signal(signal.SIGTERM, _interrupt)  # after Ray has put its own there
    others = {name: number for name, number in asked.each.items() if name not in ("CPU", "GPU")}
    made = ray.remote(Host).options(
        num_cpus=asked.each.get("CPU", 1.0),
        num_gpus=asked.each.get("GPU", 0.0),
        resources=others,
        max_concurrency=2,  # `stop` beside `serve`
        scheduling_strategy="SPREAD",
        runtime_env=cluster.environment(),
    )
    hosts = [made.remote() for _ in range(asked.hosts)]
    for _ in range(1 + asked.restarts):
        if not any(run(ray, hosts, asked.words)):
            return
    sys.exit(2)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        try:
            main()
        except SpecServeError as error:
            sys.exit(f"error: {error}")
