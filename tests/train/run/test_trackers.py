"""What the trackers have written is read back: TensorBoard's event files, and wandb's log of an offline run."""

import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specserve.errors import ConfigError
from specserve.train.run.trackers import close, open_trackers, scalars

ROWS: list[dict[str, Any]] = [
    {"step": 3, "seconds": 1.5, "loss": 3.5, "tau": None, "rollout_loss": [3.5, 4.0], "is_last": True},
    {"step": 3, "tau": 1.75, "arms": {"chain:3 T=0": {"accept_rate": [0.5, 0.25]}}},
    {"step": 5, "loss": 2.25},
]
SETTINGS = {"target": "pydoc", "train": {"lr": 0.5, "seed": 7}, "trackers": ["wandb"]}


def test_numbers_are_named_by_where_they_stand() -> None:
    assert [dict(scalars(row)) for row in ROWS] == [
        {"seconds": 1.5, "loss": 3.5, "rollout_loss/0": 3.5, "rollout_loss/1": 4.0},
        {"tau": 1.75, "arms/chain_3_T_0/accept_rate/0": 0.5, "arms/chain_3_T_0/accept_rate/1": 0.25},
        {"loss": 2.25},
    ]


def _logged(names: list[str], folder: Path, rows: list[dict[str, Any]]) -> None:
    trackers = open_trackers(names, folder, SETTINGS)
    for row in rows:
        for tracker in trackers:
            tracker.log(row)
    close(trackers)


def _event_records(path: Path) -> Iterator[bytes]:
    """TFRecord: length, its checksum, the record, its checksum."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield data[12 : 12 + length]
        data = data[16 + length :]


def test_tensorboard_event_files(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    _logged(["tensorboard"], tmp_path, ROWS)
    [file] = (tmp_path / "tensorboard").iterdir()
    events = [Event.FromString(record) for record in _event_records(file)]
    found = [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]
    assert [entry for entry in found if not entry[1].startswith("settings")] == [
        (row["step"], name, value) for row in ROWS for name, value in scalars(row)
    ]
    assert any(b"train/lr: 0.5" in record for record in _event_records(file))

    # a run that goes on logs step 5 again: a reader drops what the first session logged of it
    time.sleep(1.1)  # files are named by the second
    _logged(["tensorboard"], tmp_path, ROWS[2:])
    [resumed] = [other for other in (tmp_path / "tensorboard").iterdir() if other != file]
    events = [Event.FromString(record) for record in _event_records(resumed)]
    assert [event.step for event in events if event.session_log.status == SessionLog.START] == [5]


def _wandb_records(path: Path) -> Iterator[bytes]:
    """LevelDB's log format behind a header of 7 bytes: blocks of 32 KiB, records in parts of a block."""
    data, start, partial = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while start + 7 <= len(data):
        if (room := 32768 - start % 32768) < 7:
            start += room
            continue
        length, kind = struct.unpack("<HB", data[start + 4 : start + 7])
        partial += data[start + 7 : start + 7 + length]
        start += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield partial
            partial = b""


def _wandb_run(file: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The settings and the history of an offline run, as JSON texts."""
    from wandb.proto.wandb_internal_pb2 import Record

    settings, history = {}, []
    for raw in _wandb_records(file):
        record = Record.FromString(raw)
        if record.HasField("run"):
            settings = {item.key: item.value_json for item in record.run.config.update}
        if record.HasField("history"):
            history.append({"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item})
    return settings, history


def test_wandb_offline_keeps_its_id_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    _logged(["wandb"], tmp_path, ROWS)
    time.sleep(1.1)  # wandb names folders by the second
    _logged(["wandb"], tmp_path, ROWS[2:])
    wandb.teardown()  # its own process has written everything then
    run_id = (tmp_path / "wandb-id.txt").read_text()
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert {path.name for path in files} == {f"run-{run_id}.wandb"}
    (settings, history), (_, resumed) = sorted((_wandb_run(path) for path in files), key=lambda run: -len(run[1]))
    assert settings["train"] == '{"lr":0.5,"seed":7}'
    assert [row["_step"] for row in history] == ["3", "5"]
    assert (history[0]["loss"], history[0]["rollout_loss/1"], history[0]["tau"]) == ("3.5", "4", "1.75")
    assert history[0]["arms/chain_3_T_0/accept_rate/1"] == "0.25"
    assert [(row["_step"], row["loss"]) for row in resumed] == [("5", "2.25")]


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("tensorboard", "tensorboardX")])
def test_a_missing_extra_is_named(name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"needs {module}.*pip install 'specserve\[{name}\]'"):
        open_trackers([name], tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_wandb_that_cannot_log_in_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuse(**_settings: object) -> None:
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.\nand more")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match=r"No API key configured.*WANDB_MODE=offline"):
        open_trackers(["wandb"], tmp_path, {})


def test_nothing_is_imported_that_nobody_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert open_trackers([], tmp_path, {}) == []
