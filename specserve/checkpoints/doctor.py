"""The draft doctor: what is wrong with a head's files, what it would cost, and how to mend it.

Engines load a faulty head without a word, and then accept less than they could: this looks at everything that they do
not. It reads files only, never runs the head, and mends nothing that it would have to guess.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specserve.checkpoints import checks_files, checks_meaning
from specserve.checkpoints.dialects import Dialect
from specserve.checkpoints.load import Target
from specserve.checkpoints.patient import CONFIG, FLOATS, Copy, Finding, Patient
from specserve.checkpoints.tensors import TensorFolder, read_json

_CHECKS: tuple[Callable[[Patient], Iterator[Finding]], ...] = (
    checks_files.check_names,  # first: what follows writes the right names
    checks_files.check_keys,
    checks_files.check_identity,
    checks_meaning.check_speculators,
    checks_meaning.check_fit,
    checks_files.check_tensors,
    checks_files.check_dtypes,
    checks_files.check_values,
    checks_meaning.check_vocabulary,
    checks_meaning.check_taps,
    checks_meaning.check_rope,
    checks_meaning.check_positions,
)


@dataclass(frozen=True)
class Report:
    """What was found in a folder."""

    folder: Path
    dialect: Dialect
    facts: dict[str, str]  # the head in a few lines
    tensors: list[tuple[str, tuple[int, ...], str]]  # name, shape, dtype
    findings: list[Finding]

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def changes(self) -> list[str]:
        """What mending changes, one line each."""
        return [f"{each.where}: {each.what}; now {each.expected}" for each in self.findings if each.fix]

    def mended(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The tensors and the config.json with everything mended that can be without guessing."""
        tensors = TensorFolder(self.folder)
        mended = Copy(
            copy.deepcopy(read_json(self.folder / CONFIG)), {name: tensors.read(name) for name in tensors.names()}
        )
        for finding in self.findings:
            if finding.fix:
                finding.fix(mended)
        return mended.tensors, mended.raw

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "dialect": self.dialect,
            "facts": self.facts,
            "tensors": [{"name": name, "shape": list(shape), "dtype": dtype} for name, shape, dtype in self.tensors],
            "findings": [finding.to_json() for finding in self.findings],
        }


def stored_dtype(tensors: TensorFolder) -> str:
    """The dtype of the weights; float32, which holds both of the others, where they are of several."""
    found = {tensors.dtype(name).name for name in tensors.names()} & set(FLOATS)
    return found.pop() if len(found) == 1 else "float32"


def examine(folder: Path, target: Target | None) -> Report:
    """Look at everything. Without a target, what only it can say is left out. Raises CheckpointError where there is
    nothing to look at: no config.json, no whole safetensors file."""
    patient = Patient(folder, target)
    findings = [finding for check in _CHECKS for finding in check(patient)]
    tensors = patient.tensors
    rows = [(name, tensors.shape(name), tensors.dtype(name).name) for name in sorted(tensors.names())]
    return Report(folder, patient.dialect, patient.facts(), rows, findings)
