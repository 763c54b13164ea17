"""Ctrl-C ends a process in time: one whose main thread Python cannot reach, and one that ends slowly. As a program it
is such a process."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specserve.cli import interrupts
from specserve.cli.interrupts import GRACE_SECONDS, STATUS, Interrupts

GRACE, SAVING = 0.5, 1.0


def interrupted(what: str, times: int = 1) -> tuple[float, int, str]:
    """Interrupt such a process. Returns how long it took to end, its status, and what it said."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, __file__, what], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert process.stdout
    first = process.stdout.readline()
    assert first.startswith("ready")
    begin = time.monotonic()
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    said, _ = process.communicate(timeout=30)
    return time.monotonic() - begin, process.returncode, first.removeprefix("ready").strip() + said


def test_it_is_a_few_seconds() -> None:
    assert GRACE_SECONDS < 5


@pytest.mark.parametrize("what", ["in C", "slow end"])
def test_a_process_that_does_not_end_is_ended(what: str) -> None:
    seconds, status, said = interrupted(what)
    assert GRACE < seconds < GRACE + 2
    assert (status, said) == (STATUS, "how to go on\n")


def test_what_ends_by_itself_is_left_alone() -> None:
    seconds, status, said = interrupted("quick end")
    assert (status, said) == (3, "saved\n")
    assert seconds < GRACE + 2


def test_a_state_that_is_being_written_has_longer() -> None:
    seconds, status, _ = interrupted("saving")
    assert GRACE + SAVING < seconds < GRACE + SAVING + 2
    assert status == STATUS


def test_a_second_one_ends_at_once() -> None:
    seconds, status, _ = interrupted("saving", times=2)
    assert seconds < GRACE
    assert status == STATUS


def test_children_go_too(tmp_path: Path) -> None:
    _, _, said = interrupted("child")
    child = int(said.removesuffix("how to go on\n"))
    for _ in range(50):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            return
        time.sleep(0.1)
    raise AssertionError("it is still there")


def test_without_a_signal_nothing_is_left() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(lambda: None):
        pass
    assert signal.set_wakeup_fd(-1) == -1
    assert signal.getsignal(signal.SIGINT) == before


def _sleep_in_c(seconds: int) -> None:
    """Sleep as a program does that Python cannot interrupt: the call goes on after a signal."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        ctypes.CDLL(None).usleep(int(left * 1e6))


def main(what: str) -> None:
    interrupts.GRACE_SECONDS, interrupts.SAVING_SECONDS = GRACE, SAVING
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background begins without it
    with Interrupts(lambda: print("how to go on", flush=True), lambda: what == "saving") as armed:
        try:
            if what in ("in C", "saving", "child"):
                signal.signal(signal.SIGINT, lambda *_: None)  # it is never come round to
            sleeper, pid = [sys.executable, "-c", "import time; time.sleep(60)"], ""
            if what == "child":
                pid = f" {subprocess.Popen(sleeper, start_new_session=True).pid} "
            print(f"ready{pid}", flush=True)
            _sleep_in_c(20)
        except KeyboardInterrupt:
            if what == "slow end":
                _sleep_in_c(20)
            armed.is_reported = True
            print("saved", flush=True)
            sys.exit(3)


if __name__ == "__main__":
    main(sys.argv[1])
