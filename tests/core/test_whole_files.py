"""Files that are written whole, also where the machine stops."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specserve.host import whole_file
from specserve.interop.convert import write_folder
from specserve.interop.head import write_head
from specserve.learn.versions import STATE_FILE, HeadVersions, LearnState

Calls = list[tuple[str, int]]  # a call's name, and the inode that it is about


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls by which something comes to the disk, and takes its place there."""
    seen: Calls = []
    sync = os.fsync

    def fsync(file: int) -> None:
        seen.append(("fsync", os.fstat(file).st_ino))
        sync(file)

    def noting(move: Any) -> Any:
        def take_place(source: Path, place: Path) -> None:
            seen.append(("move", os.stat(source).st_ino))
            move(source, place)

        return take_place

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    return seen


def _named(calls: Calls, path: Path) -> tuple[int, int]:
    """Check that what lies at a path was on the disk before it took its place there, and its name afterwards. Return
    the numbers of these two calls."""
    own, folder = (os.stat(each).st_ino for each in (path, path.parent))
    moved = max(i for i, call in enumerate(calls) if call == ("move", own))
    assert ("fsync", own) in calls[:moved]
    assert ("fsync", folder) in calls[moved:]
    return moved, calls.index(("fsync", folder), moved)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_file_is_on_the_disk_before_its_name_is_and_that_before_anything_names_it(
    tmp_path: Path, calls: Calls, is_shared: bool
) -> None:
    """Its content first, then its place, then the name in the folder; by nothing that a caller has to do."""
    with whole_file(tmp_path / "a", is_shared=is_shared) as partial:
        partial.write_text("all of it")
    file, folder = (os.stat(path).st_ino for path in (tmp_path / "a", tmp_path))
    assert calls == [("fsync", file), ("move", file), ("fsync", folder)]


def _write_head(folder: Path) -> None:
    write_head(folder, {"fc.weight": np.ones((2, 2), np.float32)}, {"model_type": "x"}, {"target": "y"})


@pytest.mark.parametrize("other", [(), ("tokenizer.json", "config.json")])
def test_a_head_that_is_converted_is_on_the_disk_at_the_end(
    tmp_path: Path, calls: Calls, other: tuple[str, ...]
) -> None:
    """In a folder of its own, whose files are there before it is, and among the files of others."""
    output = tmp_path / "output"
    for name in other:
        output.mkdir(exist_ok=True)
        (output / name).write_text("old")
    write_folder(output, _write_head)
    names = {"model.safetensors", "config.json", "specserve.json"}
    assert {path.name for path in output.iterdir()} == {*names, *other}
    ends = [_named(calls, output / name)[1] for name in names]
    if not other:
        assert max(ends) < _named(calls, output)[0]


def test_a_version_of_a_head_is_on_the_disk_before_the_state_names_it(tmp_path: Path, calls: Calls) -> None:
    """Its files, then its folder, then the file by which a restart finds it."""
    made = tmp_path / "made"
    made.mkdir()
    _write_head(made)
    own = HeadVersions(tmp_path / "learn", "target", "static")
    own.keep(LearnState("target", "static", own.add(made)))
    version = own.folder_of(own.state.version)
    assert version is not None
    begin, end = _named(calls, version)
    assert max(_named(calls, path)[1] for path in version.iterdir()) < begin
    assert end < _named(calls, own.folder / STATE_FILE)[0]
