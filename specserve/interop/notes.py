"""The notes that are kept of a head beside its weights: its target, how it was trained, and what was measured."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specserve.checkpoints.source import NOTES_FILE
from specserve.checkpoints.tensors import read_json
from specserve.drafters.settings import DRAFT_QUANTIZATIONS, DraftQuantization
from specserve.errors import CheckpointError

logger = logging.getLogger(__name__)


def read_notes(folder: Path) -> dict[str, Any]:
    """Read the notes that were written when the head was saved. They are empty for a head from elsewhere."""
    path = folder / NOTES_FILE
    return dict(read_json(path)) if path.is_file() else {}


def other_target(folder: Path, trained_for: str, target_name: str, given: str) -> CheckpointError:
    """Return the error of a head beside a target that it was not trained for; both are given by their sizes."""
    name = read_notes(folder).get("target", "the one that it was trained for")
    return CheckpointError(
        f"{folder}: a head for a target with {trained_for}; {target_name} has {given}. Give its own target (--target), "
        f"{name}"
    )


def followed(notes: Mapping[str, Any]) -> str:
    """Name the LoRA adapter that a head with these notes follows, and its fingerprint."""
    if "lora" not in notes:
        return "no LoRA adapter"
    return f"the LoRA adapter {notes['lora']} ({notes.get('lora_fingerprint', 'unknown files')})"


def plain_acceptance(notes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the notes of a head promise beside the plain target: nothing where it was measured beside a LoRA
    adapter, whose acceptance requests without it do not see."""
    return notes.get("acceptance", {}) if "lora" not in notes else {}


def log_training(notes: Mapping[str, Any], folder: Path, target: Path, fingerprint: str, quantization: str) -> None:
    """Log what a head in a folder was trained beside, where that is another target than the one in the folder `target`
    that it is served beside, of this fingerprint and in so many bits, or that target with an adapter."""
    stated, trained_on = notes.get("quantization", "none"), notes.get("target_fingerprint")
    if stated != quantization and {stated, quantization} != {"none", "stored"}:  # these are the same numbers
        logger.warning(
            "%s was trained against a target with quantization %s and is served with %s: its acceptance may be lower",
            *(folder, stated, quantization),
        )
    if trained_on and trained_on != fingerprint:
        logger.warning(
            "%s was trained on other weights than those in %s; its acceptance will be lower, its output is right "
            "all the same",
            *(folder, target),
        )
    if "lora" in notes:
        logger.info(
            "%s follows the LoRA adapter %s: its acceptance is of requests that name this adapter (--lora NAME=%s)",
            *(folder, notes["lora"], notes["lora"]),
        )


def draft_quantization(notes: Mapping[str, Any], folder: Path) -> DraftQuantization:
    """Return how a head's matrices are rounded where it runs, as its notes state. Raises CheckpointError where that is
    unknown."""
    stated = notes.get("draft_quantization", "none")
    if stated not in DRAFT_QUANTIZATIONS:
        raise CheckpointError(
            f"{folder / NOTES_FILE}: draft_quantization is {stated!r}; expected {', '.join(DRAFT_QUANTIZATIONS)}, or "
            "nothing; mend the file, or say it with --draft-quantization"
        )
    return stated
