"""The head that a run begins with: a new one, or one that was trained before."""

import dataclasses
import logging
from pathlib import Path

from specserve import provenance
from specserve.checkpoints.load import Target
from specserve.checkpoints.lora import adapter_fingerprint
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.drafters.registry import KINDS, DraftSettings, KindName, check_trained, load_kind
from specserve.errors import CheckpointError, ConfigError
from specserve.interop.bundled import resolve_head
from specserve.interop.head import load_head, read_drafter
from specserve.interop.notes import followed, read_notes
from specserve.models.config import ModelConfig

logger = logging.getLogger(__name__)


def new_drafter(kind: KindName, settings: DraftSettings, target: ModelConfig, draft_vocab_size: int) -> TrainedDrafter:
    """Make a drafter of a kind, with the shape that the settings ask for, or the target's where they are 0 or empty.
    Raises ConfigError, also for a setting that this kind has no use for."""
    check_trained(kind, f"--drafter {kind}")
    known, given = KINDS[kind].setting_names, dataclasses.asdict(settings)
    default = dataclasses.asdict(DraftSettings())
    unused = [f"draft.{name} {value}" for name, value in given.items() if name not in known and value != default[name]]
    if unused:
        raise ConfigError(f"--drafter {kind} has no use for {', '.join(unused)}; leave that out, or train another kind")
    return load_kind(kind).new(settings, target, draft_vocab_size)


def adapter_notes(lora: str) -> dict[str, str]:
    """Return the notes of a head that follows the LoRA adapter in a folder; empty where there is none. Raises
    CheckpointError where it cannot be read."""
    return {"lora": lora, "lora_fingerprint": adapter_fingerprint(Path(lora))} if lora else {}


def earlier_head(name: str, settings: DraftSettings, target: Target, lora: str = "") -> Head:
    """The head that `init_from` names, a folder or a hub id in any dialect, as float32 masters, for a run beside the
    LoRA adapter in a folder, or beside none. Its shape, its flags and its draft vocabulary are its own. A head that
    follows another adapter than the run is warned of. Raises ConfigError where the settings ask for others,
    CheckpointError where it cannot be read or was trained for another target."""
    folder = resolve_head(name, "--init-from")
    earlier_drafter(folder, settings, target.config, str(target.folder))
    head = load_head(folder, target, dtype="float32")
    notes = read_notes(folder)
    if notes.get("target_fingerprint", provenance.fingerprint(target.folder)) != provenance.fingerprint(target.folder):
        raise CheckpointError(
            f"--init-from {name}: trained for {notes.get('target', 'another target')}, whose weights are not those in "
            f"{target.folder}; give its own target (--target)"
        )
    own = adapter_notes(lora)
    if ("lora" in notes, notes.get("lora_fingerprint")) != ("lora" in own, own.get("lora_fingerprint")):
        logger.warning(
            "--init-from %s: a head that follows %s, for a run that follows %s: it begins with a lower acceptance, and "
            "the new head follows the run's; for the other give %s",
            *(name, followed(notes), followed(own), f"--lora {notes['lora']}" if "lora" in notes else "no --lora"),
        )
    return head


def earlier_drafter(folder: Path, settings: DraftSettings, target: ModelConfig, target_name: str) -> TrainedDrafter:
    """Read the shape of an earlier head, which needs none of its weights. Raises as `earlier_head` does."""
    drafter = read_drafter(folder, target, target_name, dtype="float32")
    check_trained(drafter.name, f"--init-from {folder}")
    has = drafter.facts()
    fields = dataclasses.fields(settings)
    asked = {field.name: value for field in fields if (value := getattr(settings, field.name)) != field.default}
    # a setting at its default requires nothing, and a head has no dtype of its export
    other = [
        f"draft.{key} {value} (it has {has[key]})"
        for key, value in asked.items()
        if value and has.get(key, value) != value
    ]
    if other:
        raise ConfigError(
            f"--init-from {folder}: the settings ask for {', '.join(other)}; leave them out, or train a new head"
        )
    return drafter
