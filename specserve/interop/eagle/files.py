"""EAGLE-3 heads as folders: config.json and tensors, in any dialect."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import AS_VOCABULARY, Target, load_params, to_numpy
from specserve.checkpoints.tensors import CONFIG, TensorFolder, read_json
from specserve.drafters.eagle.config import Eagle3Config
from specserve.drafters.eagle.model import Eagle3Params, draft_spec, place
from specserve.drafters.notes import read_notes
from specserve.drafters.published import D2T, EMBEDDING, T2D, target_embedding, vocab_from_tensors, vocab_to_tensors
from specserve.drafters.words import Dialect
from specserve.errors import CheckpointError
from specserve.interop.eagle import dialects
from specserve.models.config import ModelConfig

Tree = TypeVar("Tree")


def head_files(
    config: Eagle3Config,
    params: Eagle3Params,
    target_ids: np.ndarray,  # [draft_vocab] int32
    target: Target,
    *,
    dtype: str,
    dialect: Dialect,
    target_name: str,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Make the tensors and the config.json of a head in a dialect. Heads in the layout of speculators bring an
    embedding along; where one is shared that is the target's. Raises CheckpointError where it cannot be read."""
    tensors = to_numpy(params, draft_spec(config), dtype)
    tensors |= vocab_to_tensors(target_ids, config.vocab_size)
    if dialect == "speculators" and params.embedding is None:
        embedding = target_embedding(target, dtype)
        if embedding is None:
            raise CheckpointError(
                f"{target.folder}: no token embedding, which a head for speculators brings along; "
                "give a target folder with its weights (--target)"
            )
        tensors[EMBEDDING] = embedding
    raw_target = read_json(target.folder / CONFIG)
    bos, architectures = raw_target.get("bos_token_id"), raw_target.get("architectures")
    raw = dialects.draft_config_to_hf(
        config,
        target.config,
        dtype=dtype,
        bos_id=bos if isinstance(bos, int) else None,
        eos_id=target.eos_ids[0] if target.eos_ids else None,
        dialect=dialect,
        target_name=target_name,
        target_architectures=architectures if isinstance(architectures, list) else (),
    )
    return dialects.name_tensors(tensors, dialect), raw


def load(
    folder: Path, target: Target, *, dtype: str, mesh: Mesh | None
) -> tuple[Eagle3Config, Eagle3Params, np.ndarray]:
    """Load the head in a folder: its shape, its parameters and its draft vocabulary [draft_vocab] int32. Raises as
    `read_config` does."""
    config = read_config(folder, target.config, str(target.folder), dtype=dtype)
    places = place(config, mesh) if mesh is not None else None
    params, target_ids = load_weights(folder, config, draft_spec(config), places, dtype=dtype)
    return config, params, target_ids


def load_weights(
    folder: Path, config: Eagle3Config, spec: Tree, places: Tree | None, *, dtype: str
) -> tuple[Tree, np.ndarray]:
    """Load the parameters that a spec tree asks for, and the draft vocabulary [draft_vocab] int32. Raises
    CheckpointError."""
    tensors = TensorFolder(folder)
    names = tensors.names()
    rename = dialects.renamer(names)
    tables = {name: rename(name) for name in (D2T, T2D)}
    maps = {name: tensors.read(stored) for name, stored in tables.items() if stored in names}
    target_ids = vocab_from_tensors(
        maps.get(D2T), maps.get(T2D), config.draft_vocab_size, config.vocab_size, str(folder)
    )
    skipped = {re.escape(stored): AS_VOCABULARY for stored in tables.values()}
    return load_params(spec, tensors, dtype, shardings=places, skipped=skipped, rename=rename), target_ids


def read_config(folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> Eagle3Config:
    """Read what the head's config.json and the names of its tensors say of its shape. Raises ConfigError or
    CheckpointError, also where it belongs to another target."""
    where, names = folder / CONFIG, TensorFolder(folder).names()
    config = dialects.draft_config_from_hf(read_json(where), target, names, dtype=dtype, where=str(where))
    if (config.vocab_size, config.target_d_model) != (target.vocab_size, target.d_model):
        trained_for = read_notes(folder).get("target", "the one that it was trained for")
        raise CheckpointError(
            f"{folder}: a head for a target with vocabulary {config.vocab_size} and width {config.target_d_model}; "
            f"{target_name} has {target.vocab_size} and {target.d_model}. Give its own target (--target), {trained_for}"
        )
    if config.d_model != config.target_d_model and not config.has_embedding:
        raise CheckpointError(
            f"{folder}: a head of width {config.d_model} without {EMBEDDING}, beside a target of width "
            f"{config.target_d_model}, whose embedding it cannot share; export it again with its own"
        )
    return config


def has_own_embedding(folder: Path) -> bool:
    """Return whether the head brings a token embedding along."""
    names = TensorFolder(folder).names()
    return dialects.renamer(names)(EMBEDDING) in names


def without_copies(
    config: Eagle3Config, params: Eagle3Params, target: Target, dtype: str
) -> tuple[Eagle3Config, Eagle3Params, list[str]]:
    """Drop an embedding that is the target's own from the head. Also returns what was changed."""
    shared = target_embedding(target, dtype) if params.embedding is not None else None
    if shared is None or not np.array_equal(np.asarray(params.embedding), shared):
        return config, params, []
    change = f"{EMBEDDING} is the target's own embedding, so it is shared instead of stored"
    return replace(config, has_embedding=False), replace(params, embedding=None), [change]
