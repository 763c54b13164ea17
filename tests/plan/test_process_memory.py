"""The memory that a plan states for a run on a CPU is what the run's process comes to hold. As a program it is such a
run, which prints both."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specserve.cli.train import train
from specserve.host import processor
from specserve.plan.training import make_plan
from specserve.train.settings import DataSettings, DraftSettings, TrainRun, TrainSettings

ROW = " ".join(f"word {number} of many" for number in range(400))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle3", "mtp"])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the high-water mark is read from /proc")
def test_a_run_on_a_cpu_holds_what_its_plan_states(tmp_path: Path, drafter: str) -> None:
    """Within 15%, compiled anew, with what compiling took."""
    messages = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": ROW}]
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * 16)
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    ended = subprocess.run(
        [sys.executable, __file__, drafter], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    stated, held = json.loads(ended.stdout.splitlines()[-1])
    assert stated == pytest.approx(held, rel=0.15), processor()


def main(drafter: str) -> None:
    run = TrainRun(
        target="pydoc",
        drafter=drafter,  # type: ignore[arg-type]
        output="run",
        data=DataSettings(source=("rows.jsonl",), eval_prompts=0),
        draft=DraftSettings(vocab_size=2048),
        train=TrainSettings(batch_size=8, seq_len=512, rollout=4, max_steps=2, max_minutes=0.0),
    )
    stated = make_plan(run, "cpu").device_bytes
    train(run)
    # the high-water mark of getrusage holds what the parent had when it forked, too
    [held] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(json.dumps([stated, 1024 * int(held)]))


if __name__ == "__main__":
    main(sys.argv[1])
