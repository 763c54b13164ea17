"""Files that are written whole, also where the machine stops."""

import os
from pathlib import Path
from typing import Any

import pytest

from specserve.host import whole_file


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_file_is_on_the_disk_before_its_name_is_and_that_before_anything_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """Its content first, then its place, then the name in the folder; by nothing that a caller has to do."""
    calls: list[tuple[str, Any]] = []
    sync, replace = os.fsync, os.replace

    def fsync(file: int) -> None:
        calls.append(("fsync", os.fstat(file).st_ino))
        sync(file)

    def take_place(source: Path, place: Path) -> None:
        calls.append(("replace", os.stat(source).st_ino))
        replace(source, place)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", take_place)
    with whole_file(tmp_path / "a", is_shared=is_shared) as partial:
        partial.write_text("all of it")
    file, folder = (os.stat(path).st_ino for path in (tmp_path / "a", tmp_path))
    assert calls == [("fsync", file), ("replace", file), ("fsync", folder)]
