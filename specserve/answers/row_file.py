"""The file of rows that `specserve data regenerate` writes. It holds whole lines only, all made with the same
settings. Rows that are in the file are not made again."""

import contextlib
import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from specserve.errors import DataError
from specserve.host import hold, whole_file

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait until no other process writes rows in the folder, which is made, and keep others out within the context.
    Raises DataError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = hold(folder)
        except BlockingIOError:
            logger.warning("another run has the target write in %s; waiting for it", folder)
            file = hold(folder, waits=True)
    except OSError as error:
        raise DataError(f"{folder}: rows cannot be kept there: {error.strerror}") from error
    with file:
        yield


def check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises DataError where the file at `path` has rows that were made with other settings."""
    if not (path.exists() and path.stat().st_size):
        return
    notes = _notes_of(path)
    try:
        before = json.loads(notes.read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is there, and {notes.name} beside it does not say how its rows were made; give another --output"
        ) from error
    changed = [
        f"{name} {before.get(name)!r}, now {value!r}" for name, value in settings.items() if before.get(name) != value
    ]
    if changed:
        raise DataError(
            f"{path} holds answers made with {'; '.join(changed)}; give another --output, or the settings of before"
        )


def _notes_of(path: Path) -> Path:
    return path.with_name(path.name + ".settings.json")


class RowFile:
    """A file to which rows are appended, each whole at once. `done` are the ids of the rows that it had when it was
    opened."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        self.done: set[str] = set()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size:
                check_settings(path, settings)
                self._read_done()
            else:
                with whole_file(_notes_of(path)) as partial:
                    partial.write_text(json.dumps(settings, indent=2) + "\n")
            self._file: IO[str] = path.open("a", encoding="utf-8")
        except OSError as error:
            raise DataError(f"{path}: cannot write the rows: {error.strerror}") from error

    def __enter__(self) -> "RowFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def write(self, row: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise DataError(
                f"{self._path}: cannot write the rows: {error.strerror}; those that are there stay good"
            ) from error

    def _read_done(self) -> None:
        """Read the ids of the rows in the file. The half-written last line of a killed run is dropped."""
        size = 0
        for key, line in self._lines():
            self.done.add(key)
            size += len(line)
        os.truncate(self._path, size)

    def arrange(self, order: Mapping[str, int]) -> None:
        """Put the rows into this order of their ids, those of other questions first. The file is whole at any time."""
        found: list[tuple[int, int, int]] = []  # place in the order, in the file, and length
        begin = 0
        for key, line in self._lines():
            found.append((order.get(key, -1), begin, len(line)))
            begin += len(line)
        if all(one[0] <= other[0] for one, other in itertools.pairwise(found)):
            return
        try:
            with whole_file(self._path) as partial, self._path.open("rb") as file, partial.open("wb") as arranged:
                for _, begin, length in sorted(found):
                    file.seek(begin)
                    arranged.write(file.read(length))
        except OSError as error:
            raise DataError(f"{self._path}: cannot write the rows in order: {error.strerror}") from error

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        """Yield the id of each whole row, and its line."""
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield json.loads(line)["id"], line
                except (ValueError, TypeError, KeyError) as error:
                    raise DataError(f"{self._path}, line {number}, is no row of `data regenerate`") from error
