"""The draft doctor: what is wrong with a head's files, what it would cost, and how to repair it.

Engines load a faulty head without an error, and then accept less than they could. The doctor looks at everything that
they do not. It reads files only, and repairs nothing that it would have to guess. `eval.trial` runs the head as well,
and reports the entries of `RUNNING`.
"""

from pathlib import Path

from specserve.checkpoints.load import Target
from specserve.interop.findings import FAULTS, DoctorReport
from specserve.interop.formats import format_of

RUNNING = FAULTS["running"]


def examine(folder: Path, target: Target | None) -> DoctorReport:
    """Make all checks. Without a target, those that need one are left out. Raises CheckpointError where there is
    nothing to look at: no config.json, no whole safetensors file."""
    return format_of(folder).examine(folder, target)
