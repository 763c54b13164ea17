"""The folder of a server whose head learns: the versions of its head, and which of them serves. A version is there
whole or not at all, and `state.json` is written once it serves, so a server that was killed, at whatever moment, begins
with the last one that did."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specserve.checkpoints.tensors import read_json
from specserve.errors import CheckpointError, ConfigError
from specserve.host import take_place, whole_file
from specserve.learn.live import LiveTaus

STATE_FILE, VERSIONS = "state.json", "versions"
STATIC = "0"  # the version that the server was started with
MOST_KEPT = 8  # versions beside those that serve, or would after a return or by the next round


@dataclass(frozen=True)
class LearnState:
    """The version that serves, and what it belongs to."""

    target: str  # fingerprint
    static: str  # fingerprint of the head that the server was started with
    version: str = STATIC
    before: str = STATIC  # the one that served before it, to which a fall of tau returns
    returned: str = ""  # the one that was given up while it served, until the next round has judged it
    num_rounds: int = 0
    used: str = ""  # the newest segment of traffic when the last round began
    first_static_tau: float = 0.0  # tau of the static head on the traffic of the first round; 0: there was none
    judged_by: str = ""  # and bits, by which that was measured
    speculation: str = ""  # and bits of the server, by which these were drafted
    answers: Mapping[str, Any] = field(default_factory=dict)  # of both versions, see `LiveTaus.kept`


class HeadVersions:
    """The versions of one server's head. No two servers may share the folder, so `specserve serve` holds it."""

    def __init__(self, folder: Path, target: str, static: str) -> None:
        """Open the folder for a target and a static head, by their fingerprints. Raises ConfigError where nothing can
        be kept in it or it belongs to others, CheckpointError where it is damaged."""
        self.folder = folder
        try:
            self._all.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)  # clients' words are in it
        except OSError as error:
            raise ConfigError(f"--learn {folder}: {error}") from error
        self.state = self._read() or LearnState(target, static)
        self._check(target, static)

    def _check(self, target: str, static: str) -> None:
        if (self.state.target, self.state.static) != (target, static):
            raise ConfigError(
                f"--learn {self.folder}: what is there was learnt for another target or from another head; give "
                "another folder, or the --target and --draft of before"
            )
        if self.folder_of(self.state.version) is None and self.state.version != STATIC:
            raise CheckpointError(f"{self.folder}: version {self.state.version} is missing; remove {STATE_FILE}")
        if self.folder_of(self.state.before) is None:
            self.state = replace(self.state, before=STATIC)
        if self.folder_of(self.state.returned) is None:
            self.state = replace(self.state, returned="")

    @property
    def _all(self) -> Path:
        return self.folder / VERSIONS

    def folder_of(self, version: str) -> Path | None:
        """Return the folder of a version; None: there is none, as of the static one and of no version."""
        folder = self._all / version
        return folder if version not in ("", STATIC) and folder.is_dir() else None

    def add(self, head: Path) -> str:
        """Take the head in this folder for a new version, which does not serve yet. Returns its name. Raises
        OSError."""
        name = f"{max(map(_number, self._all.iterdir()), default=0) + 1:03d}"
        take_place(head, self._all / name)
        return name

    def keep(self, state: LearnState) -> None:
        """Take the state, whose version serves now, write it, and forget versions that are old. Raises OSError where it
        cannot be written; it counts all the same until the server ends."""
        self.state = state
        with whole_file(self.folder / STATE_FILE) as partial, partial.open("w", encoding="utf-8") as stream:
            json.dump(vars(state), stream)
        needed = {state.version, state.before, state.returned}
        others = sorted((path for path in self._all.iterdir() if path.name not in needed), key=_number)
        for path in others[:-MOST_KEPT]:
            shutil.rmtree(path, ignore_errors=True)

    def _read(self) -> LearnState | None:
        path = self.folder / STATE_FILE
        if not path.exists():
            return None
        try:
            stated: dict[str, Any] = dict(read_json(path))
            state = LearnState(**stated)
            LiveTaus(state.answers)
            return state
        except CheckpointError as error:
            raise CheckpointError(f"{error}; remove it to begin with the static head") from error
        except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise CheckpointError(f"{path}: {error}; remove it to begin with the static head") from error


def _number(folder: Path) -> int:
    return int(folder.name) if folder.name.isdecimal() else 0
