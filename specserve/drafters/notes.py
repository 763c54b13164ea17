"""What is remembered of a head beside its weights: its target, how it was trained, what was measured."""

from pathlib import Path
from typing import Any

from specserve.checkpoints.tensors import read_json

NOTES_FILE = "specserve.json"


def read_notes(folder: Path) -> dict[str, Any]:
    """What was noted when the head was saved; empty for a head from elsewhere."""
    path = folder / NOTES_FILE
    return dict(read_json(path)) if path.is_file() else {}
