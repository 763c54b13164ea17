"""The draft doctor of an EAGLE-3 head's files: the list of its checks."""

from collections.abc import Callable, Iterator
from pathlib import Path

from specserve.checkpoints.load import Target
from specserve.interop.eagle3 import checks_files, checks_meaning
from specserve.interop.eagle3.head_files import EagleFiles
from specserve.interop.findings import DoctorReport, Finding

CHECKS: tuple[Callable[[EagleFiles], Iterator[Finding]], ...] = (
    checks_files.check_names,  # first: what follows writes the right names
    checks_files.check_keys,
    checks_files.check_identity,
    checks_meaning.check_speculators,
    checks_meaning.check_fit,
    checks_files.check_tensors,
    checks_files.check_dtypes,
    checks_files.check_values,
    checks_files.check_layer,
    checks_meaning.check_vocabulary,
    checks_meaning.check_taps,
    checks_meaning.check_rope,
    checks_meaning.check_positions,
)


def examine(folder: Path, target: Target | None) -> DoctorReport:
    """Make all checks. Without a target, those that need one are left out. Raises CheckpointError where there is
    nothing to look at: no config.json, no whole safetensors file."""
    files = EagleFiles(folder, target)
    checks = (*CHECKS, checks_meaning.check_switches)
    return report(files, [finding for check in checks for finding in check(files)], files.facts())


def report(files: EagleFiles, findings: list[Finding], facts: dict[str, str]) -> DoctorReport:
    """Make the report of the findings, and of what the head is."""
    tensors = files.tensors
    rows = [(name, tensors.shape(name), tensors.dtype(name).name) for name in sorted(tensors.names())]
    return DoctorReport(tensors.folder, files.dialect, facts, rows, findings)
