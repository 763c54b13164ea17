"""The draft doctor: what is wrong with a head's files, what it would cost, and how to mend it.

Engines load a faulty head without an error, and then accept less than they could. The doctor looks at everything that
they do not. It reads files only, and mends nothing that it would have to guess. `eval.trial` runs the head as well,
and reports the entries of `RUNNING`.
"""

from functools import partial
from pathlib import Path

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import CONFIG, read_json
from specserve.interop.findings import Check, DoctorReport
from specserve.interop.formats import format_of

_running = partial(Check, "the head as it runs (`--prompts`)")
MISREAD = _running(
    "misread",
    "error",
    "it accepts far more if {how}",
    why="every engine computes another head than the one that was trained",
    repaired="write it so: {how}",
    by_hand="compare with how it was exported; just as much is accepted if {others}",
)
KNOWS_NOTHING = _running(
    "knows-nothing",
    "error",
    "its first draft is no better than the commonest token",
    why="every draft is wasted work",
    by_hand="find out what it was trained for, or with: none of the slips that are known to us explains it",
)
BELOW_NOTES = _running(
    "below-notes",
    "warning",
    "it accepts less than its notes say, and no slip that is known to us explains it",
    why="it was measured on other prompts, or trained against other weights, or is damaged",
    by_hand="compare on the prompts that it was measured with, against the target that it was trained for",
)
RUNNING = (MISREAD, KNOWS_NOTHING, BELOW_NOTES)


def examine(folder: Path, target: Target | None) -> DoctorReport:
    """Make all checks. Without a target, those that need one are left out. Raises CheckpointError where there is
    nothing to look at: no config.json, no whole safetensors file."""
    return format_of(read_json(folder / CONFIG)).examine(folder, target)
