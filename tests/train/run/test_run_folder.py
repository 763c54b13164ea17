"""A run's folder: one writer, settings that stay, and errors before anything is loaded."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import resolved, tiny_run

from specserve import config
from specserve.errors import CheckpointError, ConfigError
from specserve.train.run.folder import MAY_CHANGE, MetricsFile, RunFolder
from specserve.train.run.report import commands
from specserve.train.settings import DataSettings, TrainRun

STEPS = [{"step": 1, "tau": None}, {"step": 2, "tau": None}, {"step": 2, "tau": 1.5}, {"step": 3, "tau": None}]


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    """Also against a process that is killed, whose lock goes with it."""
    with RunFolder(tiny_run(tmp_path)), pytest.raises(ConfigError, match="another process is training there"):
        RunFolder(tiny_run(tmp_path))
    code = f"""
import time
from pathlib import Path
from tiny_run import tiny_run
from specserve.train.run.folder import RunFolder
folder = RunFolder(tiny_run(Path({str(tmp_path)!r})))
print("locked", flush=True)
time.sleep(600)
"""
    paths = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(ConfigError, match="another process is training there"):
        RunFolder(tiny_run(tmp_path))
    process.kill()
    process.communicate()
    RunFolder(tiny_run(tmp_path)).close()


def test_only_the_first_process_locks_and_writes(tmp_path: Path) -> None:
    with RunFolder(tiny_run(tmp_path)), RunFolder(tiny_run(tmp_path), is_first=False) as other:
        metrics = MetricsFile(other)
        metrics.open(0, is_measured=False)
        metrics.write({"step": 1})
        metrics.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "run.yaml"]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "model.safetensors").write_text("")
    for output, changes, message in (
        ("file", {}, r"is a file; give another --output"),
        ("file/below", {}, r"cannot be written \(Not a directory\)"),
        ("head", {}, r"holds weights that no run here has written"),
        ("none", {"resume": True}, r"no run was started here, so there is nothing to --resume"),
    ):
        with pytest.raises((ConfigError, CheckpointError), match=message):
            RunFolder(tiny_run(tmp_path / output, **changes))
    assert not (tmp_path / "none").exists()


def test_a_run_that_was_killed_before_its_first_state_may_begin_again(tmp_path: Path) -> None:
    for resume in (False, True, False):
        RunFolder(tiny_run(tmp_path, resume=resume)).close()


def test_what_the_report_says_to_type_can_be_typed(tmp_path: Path) -> None:
    """After a resumed run too, whose folder keeps no wish to go on with it, to try it or to be another process."""
    run = tiny_run(tmp_path / "a b")
    RunFolder(run).close()
    RunFolder(tiny_run(tmp_path / "a b", resume=True, process_id=1, dry_run=True)).close()
    further = resolved(dict(commands(run.output))["Train it further"])
    assert further == dataclasses.replace(run, init_from=run.output, output=f"{run.output}-2")
    again = resolved(dict(commands(run.output, is_stopped=True))["Go on"])
    assert again == tiny_run(tmp_path / "a b", resume=True)
    for each in (further, again):
        RunFolder(each).close()


def test_settings_may_change_or_are_refused(tmp_path: Path) -> None:
    assert {leaf.name for leaf in config.leaves(TrainRun)} >= MAY_CHANGE
    RunFolder(tiny_run(tmp_path)).close()
    before = (tmp_path / "run.yaml").read_text()
    for changes, names in (
        ({"lr": 0.1, "log_every": 7}, ["train.lr was 0.005, now it is 0.1"]),
        ({"loss": "lk", "seed": 1}, ["train.loss was ce, now it is lk", "train.seed was 0, now it is 1"]),
        ({"batch_size": 8}, ["train.batch_size was 4, now it is 8"]),
        ({"quantization": "int8"}, ["quantization was none, now it is int8"]),
        (
            {"data": DataSettings(template_kwargs=("enable_thinking=false",))},
            ["data.template_kwargs was (), now it is ('enable_thinking=false',)"],
        ),
        ({"data": DataSettings(source=("gsm8k",))}, ["data.source was ('pydoc',), now it is ('gsm8k',)"]),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"another one: {'; '.join(names)}. Go on with")):
            RunFolder(tiny_run(tmp_path, resume=True, **changes))
        assert (tmp_path / "run.yaml").read_text() == before
    RunFolder(tiny_run(tmp_path, resume=True, max_steps=20, mesh="data=2", save_every=1, accumulate=2)).close()
    assert "max_steps: 20" in (tmp_path / "run.yaml").read_text()


def test_a_folder_that_has_a_run_names_the_ways_on(tmp_path: Path) -> None:
    """That is no way on for a run of another target, whose settings are not written in the place of those there."""
    run = tiny_run(tmp_path)
    RunFolder(run).close()
    (tmp_path / "state" / "3").mkdir(parents=True)
    before = (tmp_path / "run.yaml").read_text()
    with pytest.raises(
        ConfigError, match=r"holds the state of a run; go on with it \(--resume\), give another --output"
    ):
        RunFolder(run)
    other = dataclasses.replace(run, target="qwen3-8b")
    with pytest.raises(ConfigError, match=rf"another --output.*only a run of its target, {re.escape(run.target)}, can"):
        RunFolder(other)
    with RunFolder(dataclasses.replace(other, train=dataclasses.replace(other.train, resume=True))) as folder:
        assert (tmp_path / "run.yaml").read_text() == before
        folder.keep_settings()  # as a trainer does that finds the state to be its target's
    assert (tmp_path / "run.yaml").read_text() != before


def test_metrics_go_on_after_the_state(tmp_path: Path) -> None:
    """Whatever is behind it, a line that was cut off by death, and an ending that is none."""
    with RunFolder(tiny_run(tmp_path)) as folder:
        metrics = MetricsFile(folder)
        metrics.open(0, is_measured=False)
        for row in STEPS:
            metrics.write(row)
        metrics.write({"step": 2, "tau": 1.7, "is_last": True})
        metrics.close()
        path = tmp_path / "metrics.jsonl"
        whole = path.read_text()
        for step, is_measured, count in ((3, True, 4), (2, True, 3), (2, False, 2), (1, False, 1), (0, False, 0)):
            path.write_text(whole + '{"step": 1, "tau"')
            metrics.open(step, is_measured=is_measured)
            metrics.write({"step": 9, "tau": None})
            metrics.close()
            lines = whole.splitlines(keepends=True)[:count]
            assert path.read_text() == "".join([*lines, '{"step": 9, "tau": null}\n'])
        metrics.open(0, is_measured=False)
        with pytest.raises(ValueError, match="not JSON compliant"):
            metrics.write({"step": 1, "loss": float("nan")})
        metrics.close()


def test_metrics_on_a_full_disk_are_said(tmp_path: Path) -> None:
    with RunFolder(tiny_run(tmp_path)) as folder, Path("/dev/full").open("w") as full:
        metrics = MetricsFile(folder)
        metrics.open(0, is_measured=False)
        metrics.close()
        metrics._file = full
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl: cannot be written \(No space left on device\)"):
            metrics.write({"step": 1})
        full.buffer.raw.close()  # the rest that is still to be written is given up
