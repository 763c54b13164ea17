"""The draft doctor: what is wrong with a head's files, what it would cost, and how to mend it.

Engines load a faulty head without a word, and then accept less than they could: this looks at everything that they do
not. It reads files only, never runs the head, and mends nothing that it would have to guess.
"""

from pathlib import Path

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import read_json
from specserve.drafters.findings import CONFIG, Report
from specserve.drafters.registry import kind_of


def examine(folder: Path, target: Target | None) -> Report:
    """Look at everything. Without a target, what only it can say is left out. Raises CheckpointError where there is
    nothing to look at: no config.json, no whole safetensors file."""
    return kind_of(read_json(folder / CONFIG)).examine(folder, target)
