"""The layer of multi-token prediction in the target's own checkpoint: whether it is there, and its parameters."""

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specserve.checkpoints.load import Target, is_whole, load_params, renamer
from specserve.checkpoints.packed import is_stored
from specserve.checkpoints.quantized import read_storing
from specserve.checkpoints.tensors import CONFIG, TensorFolder, read_json
from specserve.drafters.mtp.config import Layout, MtpConfig
from specserve.drafters.mtp.model import MtpParams, draft_spec
from specserve.errors import CheckpointError
from specserve.models.config import ModelConfig

logger = logging.getLogger(__name__)
_WITH_ONE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "mimo")


def is_carried(folder: Path, config: MtpConfig) -> bool:
    """Return whether the checkpoint of a target carries the layer. Raises CheckpointError where there is no
    checkpoint."""
    names = TensorFolder(folder).names()
    return is_stored(names, names_in(names)(f"{config.layout.fc}.weight"))


def load_carried(target: Target, config: MtpConfig) -> MtpParams:
    """Load the layer of a target's own checkpoint, to train. Raises CheckpointError."""
    tensors = TensorFolder(target.folder)
    name_of = names_in(tensors.names())
    if any(own_tables(tensors, config, name_of).values()):
        raise CheckpointError(
            f"{target.folder}: its layer of multi-token prediction has an embedding or an output head of its own; "
            f"train that with --init-from {target.folder}"
        )
    return read_layer(tensors, config, config.layer.dtype, {"rename": name_of})


def read_layer(
    tensors: TensorFolder,
    config: MtpConfig,
    dtype: str,
    how: Mapping[str, Any],  # options of `load_params`; `rename` is from our names, the target checkpoint's
) -> MtpParams:
    """Read the layer's parameters from a folder, which may hold a whole target. Raises CheckpointError."""
    name_of = how["rename"]
    names, where = tensors.names(), tensors.folder / CONFIG
    raw = read_json(where) if where.exists() else {}  # beside a file that was sent to a server there is none
    left_out = dict(how.get("skipped", {}))
    if _text_of(raw).get("mtp_use_dedicated_embeddings"):
        raise CheckpointError(
            f"{where}: mtp_use_dedicated_embeddings is true; its layer of multi-token prediction has tables of its "
            "own, which are not read. Serve the target without it, or with another head (--draft)"
        )
    if found := sorted(key for key in _text_of(raw) if key.startswith("dspark_")):
        raise CheckpointError(
            f"{where}: {found[0]} says that the layers behind the target's own draft blocks (DSpark), which are not "
            "read out of a whole checkpoint. Serve the target without them, or with another head (--draft)"
        )
    if (blocks := raw.get("mtp_hybrid_override_pattern")) not in (None, "*E"):
        raise CheckpointError(
            f"{where}: mtp_hybrid_override_pattern is {blocks!r}; only a layer of multi-token prediction of attention "
            "and experts (*E) is read. Serve the target without it, or with another head (--draft)"
        )
    if is_whole(names, config.layer):
        if (count := num_carried(raw)) > 1:
            logger.warning(
                "%s: the first of its %d layers of multi-token prediction runs at every depth", tensors.folder, count
            )
        left_out |= dict.fromkeys(map(re.escape, names - own_names(names, config, name_of)), "the target's own")
    for name in map(name_of, shared_tables(config.layer, config.layout)):
        if name in names:
            left_out[re.escape(name)] = "a copy of the target's own"
    storing = read_storing(raw, str(where))
    return load_params(draft_spec(config), tensors, dtype, **{**how, "skipped": left_out, "storing": storing})


def num_carried(raw: Mapping[str, Any]) -> int:
    """Return how many layers of multi-token prediction a target's config.json counts. Where it counts none, Qwen3-Next,
    Qwen3.5 and MiMo have one."""
    raw = _text_of(raw)
    count = raw.get(
        "num_nextn_predict_layers", raw.get("mtp_num_hidden_layers", int(raw.get("model_type") in _WITH_ONE))
    )
    return count if isinstance(count, int) else 0


def _text_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that is of the model of text."""
    text = raw.get("text_config")
    return text if isinstance(text, Mapping) else raw


def shared_tables(target: ModelConfig, layout: Layout) -> dict[str, str]:
    """Return the names under which a layer may have tables of its own, each with the name of the target's table."""
    head = target.names.embedding if target.tie_embeddings else target.names.head
    pairs = {layout.embedding: target.names.embedding, layout.head: head}
    return {f"{own}.weight": shared for own, shared in pairs.items() if own}


def own_tables(tensors: TensorFolder, config: MtpConfig, name_of: Callable[[str], str]) -> dict[str, bool]:
    """Return, by our names of the tables that a layer may share with the target, whether the folder has one of the
    layer's own, which is no copy of the target's in the same folder."""
    names, tables = tensors.names(), shared_tables(config.layer, config.layout)
    return {own: name_of(own) in names and not _is_copy(tensors, name_of(own), tables[own]) for own in tables}


def own_names(names: frozenset[str], config: MtpConfig, name_of: Callable[[str], str]) -> frozenset[str]:
    """Return the tensors of a folder that are the layer's: all of them, unless it holds a whole target."""
    if not is_whole(names, config.layer):
        return names
    prefixes = tuple(f"{name_of(prefix)}." for prefix in config.layout.prefixes)
    return frozenset(name for name in names if name.startswith(prefixes))


def _is_copy(tensors: TensorFolder, own: str, shared: str) -> bool:
    """Return whether a table of the layer is the one that stands in the same folder for the target."""
    table = read_shared(tensors, shared)
    return table is not None and np.array_equal(tensors.read(own), table)


def read_shared(tensors: TensorFolder, name: str) -> np.ndarray | None:
    """Read a tensor of a target by its own name, or return None where the folder does not have it."""
    stored = renamer(tensors.names())(name)
    return tensors.read(stored) if stored in tensors.names() else None


def names_in(names: frozenset[str]) -> Callable[[str], str]:
    """Return a function from our names, the target checkpoint's, to those of a folder, which may have a prefix."""
    within = renamer(names)
    return lambda name: within(name) if name.startswith("model.") else name
