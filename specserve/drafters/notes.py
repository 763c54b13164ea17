"""The notes that are kept of a head beside its weights: its target, how it was trained, and what was measured."""

from pathlib import Path
from typing import Any

from specserve.checkpoints.tensors import read_json

NOTES_FILE = "specserve.json"


def read_notes(folder: Path) -> dict[str, Any]:
    """Read the notes that were written when the head was saved. They are empty for a head from elsewhere."""
    path = folder / NOTES_FILE
    return dict(read_json(path)) if path.is_file() else {}
