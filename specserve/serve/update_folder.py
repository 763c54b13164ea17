"""The folder in which a server whose weights change keeps the last whole version: one that was killed, at whatever
moment, begins with it again. `version.json` is written whole once a version serves, and names it and its weights;
files of weights that clients have sent lie beside it."""

import dataclasses
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from specserve.checkpoints.tensors import read_json
from specserve.errors import CheckpointError, ConfigError
from specserve.host import whole_file

VERSION_FILE = "version.json"
_SENT = "sent-{}.safetensors"


@dataclass(frozen=True)
class KeptVersion:
    """A version by its name, and the folders or files of its weights; empty: those that the command names."""

    name: str
    target: str = ""
    draft: str = ""


class UpdateFolder:
    """The folder of one server. No two may share it, so `specserve serve` holds it."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError where nothing can be kept in it, CheckpointError where it is damaged."""
        self.folder = Path(os.path.realpath(folder))
        self._file = self.folder / VERSION_FILE
        self._serves: KeptVersion | None = None  # also where it could not be written
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._forget_others()  # the file that a client was sending to a server that was killed
        except OSError as error:
            raise ConfigError(f"--update-folder {folder}: {error}") from error

    def read(self) -> KeptVersion | None:
        """Return the version that is kept. Raises CheckpointError where the file is damaged."""
        if not self._file.exists():
            return None
        stated = read_json(self._file)
        names = {field.name for field in dataclasses.fields(KeptVersion)}
        if stated.keys() != names or not all(isinstance(each, str) for each in stated.values()) or not stated["name"]:
            raise CheckpointError(
                f"{self._file}: expected the texts {', '.join(sorted(names))}; remove it to begin afresh"
            )
        kept = KeptVersion(**{name: str(stated[name]) for name in names})
        here = {path.name: str(path) for path in self._all_sent()}  # also where the folder is somewhere else by now
        target, draft = (here.get(Path(given).name, given) for given in (kept.target, kept.draft))
        return dataclasses.replace(kept, target=target, draft=draft)

    def keep(self, name: str, target: str | None, draft: str | None) -> None:
        """Keep this version, whose target or draft is that of the one before where it has none. Raises OSError."""
        before = self._serves or self.read() or KeptVersion("")
        self._serves = KeptVersion(
            name,
            os.path.realpath(target) if target else before.target,
            os.path.realpath(draft) if draft else before.draft,
        )
        with whole_file(self._file) as partial, partial.open("w") as stream:
            json.dump(dataclasses.asdict(self._serves), stream)
        self._forget_others()

    def new_file(self) -> Path:
        """Return the path of a file of weights that a client sends. It stays once a version of it is kept."""
        return self.folder / _SENT.format(uuid.uuid4().hex)

    def _forget_others(self) -> None:
        """Remove the files that clients have sent and that no version needs."""
        kept = self.read()
        for path in self._all_sent():
            if kept is None or str(path) not in (kept.target, kept.draft):
                path.unlink(missing_ok=True)

    def _all_sent(self) -> list[Path]:
        return list(self.folder.glob(_SENT.format("*")))
