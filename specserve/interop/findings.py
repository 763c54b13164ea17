"""The report of the draft doctor on a head's files, and the repair of them."""

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from specserve.checkpoints.tensors import CONFIG, TensorFolder, read_json
from specserve.errors import ConfigError
from specserve.interop.keys import LAYER, QUANTIZATIONS, without
from specserve.interop.published import as_floats

Level = Literal["error", "warning"]
Dialect = Literal["sglang", "vllm", "speculators", "sglang-jax"]  # engines whose layouts heads are written in
Renamer = Callable[[frozenset[str]], Callable[[str], str]]  # from a folder's names: from ours to the folder's
LAYERS = "layers"  # the place of the layers' settings, which speculators nests
FLOATS = ("float32", "bfloat16", "float16")


@dataclass
class Copy:
    """A head's files in memory, while they are repaired."""

    raw: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @classmethod
    def of(cls, folder: Path) -> "Copy":
        """Read a head's files, its weights of few bits as the floats that they stand for. Raises CheckpointError."""
        raw, tensors = copy.deepcopy(read_json(folder / CONFIG)), opened(folder)
        if any(map(tensors.is_widened, tensors.names())):
            raw = without(raw, QUANTIZATIONS)
        return cls(raw, {name: tensors.read(name) for name in tensors.names()})

    @property
    def layer(self) -> dict[str, Any]:
        """The settings of the layer, which speculators nests."""
        return self.raw.get(LAYER) or self.raw


Fix = Callable[[Copy], None]


@dataclass(frozen=True)
class Finding:
    """A fault, or a likely one, of the files that were examined: a row of the table with what was seen."""

    code: str
    level: Level
    what: str
    consequence: str
    mend: str
    where: str
    expected: str
    got: str
    fix: Fix | None = field(default=None, repr=False, compare=False)  # None: it would be a guess
    refusal: str = ""  # the error of a loader; empty: it loads the head all the same

    def to_json(self) -> dict[str, Any]:
        names = ("code", "level", "what", "where", "expected", "got", "consequence", "mend")
        return {name: getattr(self, name) for name in names} | {"is_fixable": self.fix is not None}


@dataclass(frozen=True)
class Check:
    """A row of a table of checks: one fault that a head's files can have. Texts name in braces what `found` fills
    in."""

    area: str  # the part of the files; the documents list rows by it
    code: str
    level: Level  # an error breaks a loader or the acceptance; a warning costs something, or might
    what: str
    why: str  # its consequence
    by_fix: str = ""  # the change that `--fix` makes; empty: nothing, because it would have to guess
    by_hand: str = ""  # the advice where `--fix` would have to guess
    refusal: str = ""  # the error of loaders, which may name what was expected and found; empty: they load such a head

    def found(self, where: str, expected: str, got: str, fix: Fix | None = None, **names: object) -> Finding:
        """Return the fault as it was found at `where`; `fix` repairs a copy of the files, None where that would be a
        guess."""
        mend = self.by_fix if fix else self.by_hand
        assert mend, f"{self.code}: the table does not state how it is repaired {'with' if fix else 'without'} a fix"
        named = {"expected": expected, "got": got, **names}
        what, why, mend, refusal = (text.format(**named) for text in (self.what, self.why, mend, self.refusal))
        return Finding(self.code, self.level, what, why, mend, where, expected, got, fix, refusal)


def refuse(findings: Iterable[Finding], where: str) -> None:
    """Raise ConfigError for the first fault with which loaders refuse a head."""
    for finding in findings:
        if finding.refusal:
            raise ConfigError(f"{where}: {finding.refusal}")


def read_faults(text: str) -> dict[str, dict[str, Check]]:
    """Read the table of faults: the checks of each part, by code. A part begins with `== name`. A row is `code level:
    what is wrong`, and indented below it why that matters, `fix: what --fix does`, `by hand: what a person does`, and
    `refused: the error of loaders`; a further indent continues a line. `[area]` stands before the rows about it. A
    second row of a code is kept under `code level`."""
    parts: dict[str, dict[str, Check]] = {}
    area, found = "", dict[str, Check]()
    for row in re.split(r"\n(?=\S)", text[text.index("\n== ") :].strip()):
        if row.startswith("== "):
            found = parts[row.removeprefix("== ")] = {}
        elif row.startswith("["):
            area = row.strip("[]")
        else:
            first, *lines = re.split(r"\n  (?=\S)", row)
            head, _, what = first.partition(": ")
            code, _, level = head.partition(" ")
            texts = {"why": "", "fix": "", "by hand": "", "refused": ""}
            for line in lines:
                key, _, said = line.partition(": ")
                key, said = (key, said) if key in texts else ("why", line)
                texts[key] = " ".join(said.split())
            check = Check(area, code, cast(Level, level), what, *texts.values())
            found[f"{code} {level}" if code in found else code] = check
    return parts


FAULTS = read_faults((Path(__file__).parent / "faults.txt").read_text("utf-8"))


@dataclass(frozen=True)
class Repair:
    """A change of a head's files that undoes a slip which the files alone do not show."""

    what: str  # the meaning of the files after it, as half a sentence
    fix: Fix


@dataclass(frozen=True)
class DoctorReport:
    """The report of the doctor on a head's folder: what the head is, and what is wrong with it."""

    folder: Path
    dialect: str
    facts: dict[str, str]  # the head in a few lines
    tensors: list[tuple[str, tuple[int, ...], str]]  # name, shape, dtype
    findings: list[Finding]

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def changes(self) -> list[str]:
        """The changes that the repair makes, one line each."""
        return [f"{each.where}: {each.what}; now {each.expected}" for each in self.findings if each.fix]

    def repaired(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return the tensors and the config.json with everything repaired that can be without guessing."""
        repaired = Copy.of(self.folder)
        for finding in self.findings:
            if finding.fix:
                finding.fix(repaired)
        return repaired.tensors, repaired.raw

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "dialect": self.dialect,
            "facts": self.facts,
            "tensors": [{"name": name, "shape": list(shape), "dtype": dtype} for name, shape, dtype in self.tensors],
            "findings": [finding.to_json() for finding in self.findings],
        }


def opened(folder: Path) -> TensorFolder:
    """Open a head's tensors, its weights of few bits as floats. Raises CheckpointError."""
    return as_floats(TensorFolder(folder), read_json(folder / CONFIG), CONFIG)[0]


def stored_dtype(folder: Path) -> str:
    """Return the dtype of the weights, or float32 where they are of several, because it holds both of the others, or
    of few bits. Raises CheckpointError."""
    tensors = opened(folder)
    found = {tensors.dtype(name).name for name in tensors.names()} & set(FLOATS)
    return found.pop() if len(found) == 1 else "float32"


def put(place: str = "", /, **values: Any) -> Fix:
    """A fix that writes keys of config.json: at the top, in the object inside it that `place` names, or for `layers`
    where the layers' settings stand."""

    def fix(repaired: Copy) -> None:
        if place == LAYERS:
            part = repaired.layer
        elif place:
            part = repaired.raw[place] = repaired.raw.get(place) or {}
        else:
            part = repaired.raw
        part.update(values)

    return fix


def both(*fixes: Fix) -> Fix:
    """A fix that makes several, one after the other."""

    def fix(repaired: Copy) -> None:
        for each in fixes:
            each(repaired)

    return fix


def describe(table: np.ndarray | None) -> str:
    """Describe a table of the vocabulary by its size and a few of its entries."""
    if table is None:
        return "nothing"
    shown = ", ".join(str(value) for value in table.ravel()[:3].tolist())
    last = f", .. {table.ravel()[-1]}" if table.size > 3 else ""
    if table.dtype == np.bool_:
        return f"{table.size:,} bools, {int(table.sum()):,} set"
    return f"{table.size:,} from {shown}{last}"
