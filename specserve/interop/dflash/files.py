"""DFlash heads as folders: config.json and tensors, in either layout."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import AS_VOCABULARY, Target, load_params, to_numpy
from specserve.checkpoints.tensors import CONFIG, TensorFolder, read_json
from specserve.drafters.dflash.config import DFlashConfig
from specserve.drafters.dflash.model import DFlashParams, head_spec, place
from specserve.drafters.notes import read_notes
from specserve.drafters.published import (
    D2T,
    EMBEDDING,
    OUTPUT,
    T2D,
    target_embedding,
    target_output,
    vocab_from_tensors,
    vocab_to_tensors,
)
from specserve.drafters.words import Dialect
from specserve.errors import CheckpointError
from specserve.interop.dflash import dialects
from specserve.models.config import ModelConfig

OF_TARGET = "the target's own, which it was trained beside"
SKIPPED = {r"verifier_(norm|lm_head)\.weight": OF_TARGET}


def head_files(
    config: DFlashConfig,
    params: DFlashParams,
    target_ids: np.ndarray,  # [draft_vocab] int32
    target: Target,
    *,
    dtype: str,
    dialect: Dialect,
    target_name: str,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Make the tensors and the config.json of a head. Raises CheckpointError where the layout cannot say what the head
    computes."""
    layout: dialects.Layout = "speculators" if dialect == "speculators" else "z-lab"
    if unsaid := dialects.unsaid_in(layout, config):
        raise CheckpointError(
            f"a head with {', '.join(unsaid)} cannot be written for {dialect}, which has no key for it"
        )
    tensors = to_numpy(params, head_spec(config), dtype)
    if dialects.is_partial(config):
        tensors |= vocab_to_tensors(target_ids, config.backbone.vocab_size)
    raw_target = read_json(target.folder / CONFIG)
    bos, architectures = raw_target.get("bos_token_id"), raw_target.get("architectures")
    raw = dialects.config_to_hf(
        config,
        target.config.num_layers,
        dtype=dtype,
        bos_id=bos if isinstance(bos, int) else None,
        eos_id=target.eos_ids[0] if target.eos_ids else None,
        layout=layout,
        target_name=target_name,
        target_architectures=architectures if isinstance(architectures, list) else (),
    )
    return tensors, raw


def load(
    folder: Path, target: Target, *, dtype: str, mesh: Mesh | None
) -> tuple[DFlashConfig, DFlashParams, np.ndarray]:
    """Load the head in a folder: its shape, its parameters and its draft vocabulary [draft_vocab] int32. Raises as
    `read_config` does."""
    tensors = TensorFolder(folder)
    names = tensors.names()
    config = read_config(folder, target.config, str(target.folder), dtype=dtype)
    rename = dialects.renamer(names)
    tables = {name: rename(name) for name in (D2T, T2D)}
    maps = {name: tensors.read(stored) for name, stored in tables.items() if stored in names}
    target_ids = vocab_from_tensors(
        maps.get(D2T), maps.get(T2D), config.draft_vocab_size, config.backbone.vocab_size, str(folder)
    )
    skipped = {re.escape(stored): AS_VOCABULARY for stored in tables.values()} | SKIPPED
    places = place(config, mesh) if mesh is not None else None
    params = load_params(head_spec(config), tensors, dtype, shardings=places, skipped=skipped, rename=rename)
    return config, params, target_ids


def read_config(folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> DFlashConfig:
    """Read what the head's config.json and the names of its tensors say of its shape. Raises ConfigError or
    CheckpointError, also where it belongs to another target."""
    where, names = folder / CONFIG, TensorFolder(folder).names()
    raw = read_json(where)
    stated = dialects.read_stated(raw, str(where))
    width = stated.get("target_hidden_size", stated.get("hidden_size"))
    num_layers = stated.get("num_target_layers", target.num_layers)
    got = (stated.get("vocab_size"), width, num_layers)
    if got != (target.vocab_size, target.d_model, target.num_layers) and not dialects.bad_sizes(stated):
        trained_for = read_notes(folder).get("target", "the one that it was trained for")
        raise CheckpointError(
            f"{folder}: a head for a target with vocabulary {got[0]}, width {width} and {num_layers} layers; "
            f"{target_name} has {target.vocab_size}, {target.d_model} and {target.num_layers}. Give its own target "
            f"(--target), {trained_for}"
        )
    config = dialects.config_from_hf(raw, target, names, dtype=dtype, where=str(where))
    if config.backbone.d_model != target.d_model:
        raise CheckpointError(
            f"{folder}: a head of width {config.backbone.d_model} beside a target of width {target.d_model}, whose "
            "hidden states and output head it cannot share; a head of this kind is as wide as its target"
        )
    return config


def has_own_embedding(folder: Path) -> bool:
    """Return whether the head brings a token embedding or output rows along, which may be copies of the target's."""
    names = TensorFolder(folder).names()
    rename = dialects.renamer(names)
    return rename(EMBEDDING) in names or rename(OUTPUT) in names


def without_copies(
    config: DFlashConfig, params: DFlashParams, target: Target, dtype: str
) -> tuple[DFlashConfig, DFlashParams, list[str]]:
    """Drop an embedding and an output head that are the target's own. Also returns what was changed."""
    changes = []
    if params.embedding is not None and _is_same(np.asarray(params.embedding), target_embedding(target, dtype)):
        config, params = replace(config, has_embedding=False), replace(params, embedding=None)
        changes.append(f"{EMBEDDING} is the target's own embedding, so it is shared instead of stored")
    if isinstance(params.head, jax.Array) and _is_same(np.asarray(params.head).T, target_output(target, dtype)):
        config, params = replace(config, has_own_head=False), replace(params, head=None)
        changes.append(f"{OUTPUT} is the target's own output head, so it is shared instead of stored")
    return config, params, changes


def _is_same(own: np.ndarray, targets: np.ndarray | None) -> bool:
    return targets is not None and np.array_equal(own, targets)
