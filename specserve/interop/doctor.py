"""The draft doctor: what is wrong with a head's files, what it would cost, and how to repair it.

Engines load a faulty head without an error, and then accept less than they could. The doctor looks at everything that
they do not. It reads files only, and repairs nothing that it would have to guess. `eval.trial` runs the head as well,
and reports the entries of `RUNNING`.
"""

from pathlib import Path

from specserve.checkpoints.load import Target
from specserve.interop.findings import DoctorReport, read_checks
from specserve.interop.formats import format_of

RUNNING = read_checks("""
[the head as it runs (`--prompts`)]
misread error: it accepts far more if {how}
  every engine computes another head than the one that was trained
  fix: write it so: {how}
  by hand: compare with how it was exported; just as much is accepted if {others}
knows-nothing error: its first draft is no better than the commonest token
  every draft is wasted work
  by hand: find out what it was trained for, or with: none of the slips that are known to us explains it
below-notes warning: it accepts less than its notes say, and no slip that is known to us explains it
  it was measured on other prompts, or trained against other weights, or is damaged
  by hand: compare on the prompts that it was measured with, against the target that it was trained for
""")


def examine(folder: Path, target: Target | None) -> DoctorReport:
    """Make all checks. Without a target, those that need one are left out. Raises CheckpointError where there is
    nothing to look at: no config.json, no whole safetensors file."""
    return format_of(folder).examine(folder, target)
