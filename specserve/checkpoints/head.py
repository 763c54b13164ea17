"""Draft heads on disk: written in the SGLang layout, read from any dialect, with `specserve.json` beside the weights
to remember the target and what was measured."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints import dialects
from specserve.checkpoints.dialects import Dialect
from specserve.checkpoints.load import AS_VOCABULARY, Target, load_params, to_numpy
from specserve.checkpoints.tensors import SINGLE_FILE, TensorFolder, read_json, write_json, write_tensors
from specserve.errors import CheckpointError
from specserve.models.config import DraftConfig, ModelConfig
from specserve.models.draft import DraftParams, draft_spec
from specserve.models.sharding import place_draft

NOTES_FILE = "specserve.json"


@dataclass(frozen=True)
class Head:
    """A draft head as it lies on disk."""

    config: DraftConfig
    params: DraftParams
    target_ids: np.ndarray  # [draft_vocab] int32, sorted


def save_head(folder: Path, head: Head, target: Target, *, dtype: str, notes: dict[str, Any]) -> None:
    """Write config.json, model.safetensors and specserve.json. `dtype` is that of the file; a head saved in its own
    dtype loads back bit for bit. Raises CheckpointError when there is no room or no right to write."""
    tensors, raw = head_files(head, target, dtype=dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / SINGLE_FILE, tensors)
        write_json(folder / "config.json", raw)
        write_json(folder / NOTES_FILE, notes)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the head cannot be written ({error}); make room, and go on with --resume"
        ) from error


def head_files(
    head: Head, target: Target, *, dtype: str, dialect: Dialect = "sglang", target_name: str = ""
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors and the config.json of a head in a dialect."""
    tensors = to_numpy(head.params, draft_spec(head.config), dtype)
    tensors |= dialects.vocab_to_tensors(head.target_ids, head.config.vocab_size)
    raw_target = read_json(target.folder / "config.json")
    bos, architectures = raw_target.get("bos_token_id"), raw_target.get("architectures")
    raw = dialects.draft_config_to_hf(
        head.config,
        target.config,
        dtype=dtype,
        bos_id=bos if isinstance(bos, int) else None,
        eos_id=target.eos_ids[0] if target.eos_ids else None,
        dialect=dialect,
        target_name=target_name,
        target_architectures=architectures if isinstance(architectures, list) else (),
    )
    return dialects.name_tensors(tensors, dialect), raw


def load_head(folder: Path, target: Target, *, dtype: str, mesh: Mesh | None = None) -> Head:
    """Read a head for this target, over whose mesh it is spread too. Raises ConfigError or CheckpointError, also when
    it belongs to another target."""
    tensors = TensorFolder(folder)
    names = tensors.names()
    config = head_config(folder, names, target.config, str(target.folder), dtype=dtype)
    rename = dialects.renamer(names)
    tables = {name: rename(name) for name in (dialects.D2T, dialects.T2D)}
    maps = {name: tensors.read(stored) for name, stored in tables.items() if stored in names}
    target_ids = dialects.vocab_from_tensors(maps.get(dialects.D2T), maps.get(dialects.T2D), config, str(folder))
    skipped = {re.escape(stored): AS_VOCABULARY for stored in tables.values()}
    spec = draft_spec(config)
    places = place_draft(config, spec, mesh) if mesh is not None else None
    params = load_params(spec, tensors, dtype, shardings=places, skipped=skipped, rename=rename)
    return Head(config, params, target_ids)


def head_config(
    folder: Path, names: frozenset[str], target: ModelConfig, target_name: str, *, dtype: str
) -> DraftConfig:
    """What a head with tensors of these names says of its shape. Raises as `load_head` does."""
    where = folder / "config.json"
    config = dialects.draft_config_from_hf(read_json(where), target, names, dtype=dtype, where=str(where))
    if (config.vocab_size, config.target_d_model) != (target.vocab_size, target.d_model):
        trained_for = read_notes(folder).get("target", "the one that it was trained for")
        raise CheckpointError(
            f"{folder}: a head for a target with vocabulary {config.vocab_size} and width {config.target_d_model}; "
            f"{target_name} has {target.vocab_size} and {target.d_model}. Give its own target (--target), {trained_for}"
        )
    if config.d_model != config.target_d_model and not config.has_embedding:
        raise CheckpointError(
            f"{folder}: a head of width {config.d_model} without {dialects.EMBEDDING}, beside a target of width "
            f"{config.target_d_model}, whose embedding it cannot share; export it again with its own"
        )
    return config


def read_notes(folder: Path) -> dict[str, Any]:
    """What `save_head` noted; empty for a head from elsewhere."""
    path = folder / NOTES_FILE
    return dict(read_json(path)) if path.is_file() else {}
