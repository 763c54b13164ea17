"""One server over several hosts of a Ray cluster, as a Ray job:

    ray job submit -- python deploy/ray_group.py --hosts 2 --each GPU=8 -- \
      --target qwen3-235b-a22b --mesh tensor=16 --host 0.0.0.0

Ray finds hosts with that much free and keeps it. On each runs `specserve serve` with what follows the two dashes, and
with the flags that make one server of these processes. Where one ends in an error all do, and all are started again, on
other hosts where one of them is lost; but a wrong setting ends the job. SIGTERM or Ctrl-C lets the server drain.
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from specserve import cluster, launcher, log
from specserve.errors import ConfigError, SpecServeError
from specserve.launcher import DiedError, GroupProcess, ProcessGroup
from specserve.processes import ProcessError

SETTING_IS_WRONG, OTHERS_ENDED = 2, 3  # statuses of a process (`processes.exit_status`)


class ServerProcess(GroupProcess):
    """An actor of Ray beside one process of the server, with the devices that Ray keeps for it."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._process: subprocess.Popen[bytes] | None = None
        self._lock, self._is_stopped = threading.Lock(), False

    def run(self, address: str, number: int, count: int, attempt: int) -> None:
        del attempt
        joined = ["--coordinator", address, "--num-processes", str(count), "--process-id", str(number)]
        with self._lock:
            if self._is_stopped:
                return
            command = [sys.executable, "-m", "specserve.cli.main", "serve", *self._words, *joined]
            self._process = subprocess.Popen(command)
        check_status(self._process.wait())

    def stop(self, signal_number: int) -> bool:
        """Stop the process as SIGTERM does, whichever signal came. None is started any more."""
        del signal_number
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.send_signal(signal.SIGTERM)
        return True


def check_status(status: int) -> None:
    """Raise the error that a process of the server has ended with, by its status."""
    if status == SETTING_IS_WRONG:
        raise ConfigError("a process says in this log what is wrong with its settings, which would come again")
    if status == OTHERS_ENDED:
        raise ProcessError("it ended because another process did")
    if status:
        raise DiedError(f"it has ended with status {status}")


def _resources(text: str) -> dict[str, float]:
    pairs = (pair.partition("=") for pair in text.split(",") if pair)
    return {name: float(number) for name, _, number in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, required=True, help="processes of the server")
    parser.add_argument("--each", type=_resources, default={}, help="what Ray keeps for each, such as GPU=8 or TPU=4")
    parser.add_argument("--restarts", type=int, default=20, help="after errors and lost hosts")
    parser.add_argument("--join-seconds", type=int, default=300, help="in which Ray finds room for all hosts")
    parser.add_argument("--ray-address", default="auto", help="empty: a cluster of its own on this machine")
    parser.add_argument("words", nargs="+", help="flags of specserve serve, after --")
    given = parser.parse_args()
    log.setup()
    ray = cluster.connect(given.ray_address)
    group = ProcessGroup(
        ServerProcess,
        (given.words,),
        count=given.hosts,
        each={"CPU": 1.0, **given.each},
        fewer="--hosts or --each",
        join_seconds=given.join_seconds,
        restarts=given.restarts,
        strategy="SPREAD",
    )
    cluster.check_room(ray, group.each, group.count, group.fewer)
    launcher.launch(ray, group)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        try:
            main()
        except SpecServeError as error:
            sys.exit(f"error: {error}")
