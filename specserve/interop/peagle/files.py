"""P-EAGLE heads as folders: config.json and tensors, in any dialect."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import CONFIG, read_json
from specserve.drafters.peagle.config import PEagleConfig
from specserve.drafters.peagle.model import PEagleParams, head_spec, mask_spec, place
from specserve.drafters.words import Dialect
from specserve.interop.eagle import files
from specserve.interop.peagle import dialects
from specserve.models.config import ModelConfig


def head_files(
    config: PEagleConfig,
    params: PEagleParams,
    target_ids: np.ndarray,  # [draft_vocab] int32
    target: Target,
    *,
    dtype: str,
    dialect: Dialect,
    target_name: str,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Make the tensors and the config.json of a head in a dialect. The flat layout is one for all engines, and ours."""
    written: Dialect = "speculators" if dialect == "speculators" else "vllm"
    tensors, raw = files.head_files(
        config.network, params.network, target_ids, target, dtype=dtype, dialect=written, target_name=target_name
    )
    tensors[mask_spec(config).name] = np.asarray(params.mask_hidden).astype(dtype)
    return tensors, dialects.config_to_hf(config, raw, dialect)


def load(
    folder: Path, target: Target, *, dtype: str, mesh: Mesh | None
) -> tuple[PEagleConfig, PEagleParams, np.ndarray]:
    """Load the head in a folder: its shape, its parameters and its draft vocabulary [draft_vocab] int32. Raises as
    `read_config` does."""
    config = read_config(folder, target.config, str(target.folder), dtype=dtype)
    places = place(config, mesh) if mesh is not None else None
    params, target_ids = files.load_weights(folder, config.network, head_spec(config), places, dtype=dtype)
    return config, params, target_ids


def read_config(folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> PEagleConfig:
    """Read what the head's config.json and the names of its tensors say of its shape. Raises ConfigError or
    CheckpointError, also where it belongs to another target."""
    network = files.read_config(folder, target, target_name, dtype=dtype)
    return dialects.config_from_hf(read_json(folder / CONFIG), network, str(folder / CONFIG))


def has_own_embedding(folder: Path) -> bool:
    """Return whether the head brings a token embedding along."""
    return files.has_own_embedding(folder)


def without_copies(
    config: PEagleConfig, params: PEagleParams, target: Target, dtype: str
) -> tuple[PEagleConfig, PEagleParams, list[str]]:
    """Drop an embedding that is the target's own from the head. Also returns what was changed."""
    network, kept, changes = files.without_copies(config.network, params.network, target, dtype)
    return replace(config, network=network), replace(params, network=kept), changes
