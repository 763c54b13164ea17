"""Layers of multi-token prediction as folders: within the target's own checkpoint, or alone in one of their own, in the
checkpoint's names or in those of speculators."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import AS_VOCABULARY, Target, load_params, renamer, to_numpy
from specserve.checkpoints.quantized import stored_block
from specserve.checkpoints.tensors import CONFIG, ExpertByExpert, TensorFolder, fuse_experts, listed, read_json
from specserve.drafters.mtp.config import MtpConfig, config_of
from specserve.drafters.mtp.layouts import SPECULATORS, Layout, num_carried
from specserve.drafters.mtp.model import MtpParams, draft_spec, place
from specserve.drafters.notes import read_notes
from specserve.drafters.published import D2T, T2D, vocab_from_tensors, vocab_to_tensors
from specserve.drafters.words import Dialect
from specserve.errors import CheckpointError, ConfigError
from specserve.models.config import ModelConfig
from specserve.models.families import model_config

logger = logging.getLogger(__name__)

LAYER_CONFIG = "transformer_layer_config"  # where speculators keeps the target's config.json
OF_TARGET = "target_architectures"  # the target's own, beside the name that engines have for such a layer
_SHAPE = ("family", "vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff", "layers")
_SHAPE += ("latent", "experts", "qk_norm", "qkv_bias", "norm_offset", "out_norms", "has_sinks", "has_attention_gate")


def is_carried(folder: Path, config: MtpConfig) -> bool:
    """Return whether the checkpoint of a target carries the layer. Raises CheckpointError where there is no
    checkpoint."""
    names = opened(folder).names()
    return name_in(names, config.layout)(f"{config.layout.fc}.weight") in names


def opened(folder: Path) -> TensorFolder:
    """Open a folder, by the names of checkpoints wherever speculators has others for the experts. Raises
    CheckpointError."""
    tensors = TensorFolder(folder)
    return ExpertByExpert(folder) if any(map(_is_speculators, tensors.names())) else tensors


def _is_speculators(name: str) -> bool:
    return name.startswith(f"{SPECULATORS.layer}.")


def load_carried(target: Target, config: MtpConfig) -> MtpParams:
    """The layer of a target's own checkpoint, to train. Raises CheckpointError."""
    found, params, _ = load(target.folder, target, dtype=config.layer.dtype, mesh=None)
    if found != config:
        raise CheckpointError(
            f"{target.folder}: its layer of multi-token prediction has an embedding or an output head of its own; "
            f"train that with --init-from {target.folder}"
        )
    return params


def read_config(folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> MtpConfig:
    """Read the config of the layer in a folder. Raises ConfigError or CheckpointError, also where it belongs to
    another target."""
    where, names = folder / CONFIG, opened(folder).names()
    raw = read_json(where)
    own = model_config(of_target(raw), dtype=dtype, where=str(where))
    if other := [told for key in _SHAPE for told in _differences(key, getattr(own, key), getattr(target, key))]:
        trained_for = read_notes(folder).get("target", "the one that it comes from")
        raise CheckpointError(
            f"{folder}: a layer of multi-token prediction of another target than {target_name} ({listed(other, 3)}); "
            f"give its own (--target), {trained_for}"
        )
    config = config_of(target, dtype=dtype)
    name_of = name_in(names, config.layout)
    if name_of(f"{config.layout.fc}.weight") not in names:
        said = f"{num_carried(raw)} in its config.json" if num_carried(raw) else "none in its config.json either"
        raise CheckpointError(
            f"{folder}: no layer of multi-token prediction: {config.layout.fc}.weight is missing ({said}). Take a "
            "checkpoint that carries one, or train one (specserve train --drafter mtp)"
        )
    has = {
        own: name_of(own) in names and not _is_copy(folder, name_of(own), shared)
        for own, shared in shared_tables(target, config.layout).items()
    }
    return replace(
        config,
        draft_vocab_size=_stated_vocab(raw, target, str(where)),
        has_embedding=has.get(f"{config.layout.embedding}.weight", False),
        has_own_head=has.get(f"{config.layout.head}.weight", False),
    )


def load(folder: Path, target: Target, *, dtype: str, mesh: Mesh | None) -> tuple[MtpConfig, MtpParams, np.ndarray]:
    """Load the layer in a folder: its shape, its parameters and its draft vocabulary [draft_vocab] int32. Raises as
    `read_config` does."""
    config = read_config(folder, target.config, str(target.folder), dtype=dtype)
    tensors = opened(folder)
    names, where = tensors.names(), folder / CONFIG
    name_of, spec = name_in(names, config.layout), draft_spec(config)
    skipped = {re.escape(name): AS_VOCABULARY for name in (D2T, T2D)}
    if is_whole(names, config.layer):
        if (count := num_carried(read_json(where))) > 1:
            logger.warning(
                "%s: the first of its %d layers of multi-token prediction runs at every depth", folder, count
            )
        skipped |= dict.fromkeys(map(re.escape, names - own_names(names, config)), "the target's own")
    for name in shared_tables(config.layer, config.layout):
        if name_of(name) in names:
            skipped[re.escape(name_of(name))] = "a copy of the target's own"
    params = load_params(
        spec,
        tensors,
        dtype,
        shardings=place(config, mesh) if mesh is not None else None,
        skipped=skipped,
        rename=name_of,
        block=stored_block(read_json(where), str(where)),
    )
    return config, params, read_target_ids(tensors, config, str(folder))


def head_files(
    config: MtpConfig,
    params: MtpParams,
    target_ids: np.ndarray,  # [draft_vocab] int32
    target: Target,
    *,
    dtype: str,
    dialect: Dialect,
    target_name: str,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors in the names of the target's checkpoint, beside which they replace what it carries; and a config.json
    that is the target's, under the name of such a layer. One that proposes a part of the tokens says which as an
    EAGLE-3 head does. For speculators, both as it has them. Raises CheckpointError where it has none like this."""
    tensors = to_numpy(params, draft_spec(config), dtype)
    raw = {key: value for key, value in read_json(target.folder / CONFIG).items() if key != "quantization_config"}
    stated: dict[str, Any] = {"torch_dtype": dtype}
    if config.is_partial:
        tensors |= vocab_to_tensors(target_ids, config.layer.vocab_size)
        stated["draft_vocab_size"] = config.draft_vocab_size
    if dialect != "speculators":
        count = {} if num_carried(raw) else {"num_nextn_predict_layers": 1}
        if raw.get("architectures"):
            stated[OF_TARGET] = raw["architectures"]
        return tensors, raw | count | stated | {"architectures": [config.layout.architecture], "dtype": dtype}
    if config.layer.family not in ("qwen3", "qwen3_next"):
        raise CheckpointError(
            f"speculators has no layer of multi-token prediction for {config.layer.family} targets like this one, only "
            "for qwen3 and qwen3_next; export it for vllm or sglang, in the names of the target's checkpoint"
        )
    rename = _as_speculators(config.layout)
    return fuse_experts({rename(name): value for name, value in tensors.items()}), stated | {
        "architectures": [SPECULATORS.architecture],
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
        LAYER_CONFIG: raw,
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": target_name, "architectures": raw.get("architectures") or []},
        },
    }


def has_own_embedding(folder: Path) -> bool:
    """Return whether the layer's folder holds an embedding or an output head, which may be copies of the target's."""
    names, raw = opened(folder).names(), read_json(folder / CONFIG)
    config = config_of(model_config(of_target(raw), dtype="float32", where=str(folder / CONFIG)), dtype="float32")
    name_of = name_in(names, config.layout)
    return any(name_of(name) in names for name in shared_tables(config.layer, config.layout))


def without_copies(
    config: MtpConfig, params: MtpParams, target: Target, dtype: str
) -> tuple[MtpConfig, MtpParams, list[str]]:
    """Drop an embedding and an output head that are the target's own. Also returns what was changed."""
    changes = []
    own = to_numpy(params, draft_spec(config), dtype)
    for name, shared in shared_tables(target.config, config.layout).items():
        table = _read(target.folder, shared) if name in own else None
        if table is not None and np.array_equal(own[name], table.astype(dtype)):
            changes.append(f"{name} is the target's own {shared}, so it is shared instead of stored")
            if name == f"{config.layout.embedding}.weight":
                config, params = replace(config, has_embedding=False), replace(params, embedding=None)
            else:
                config, params = replace(config, has_own_head=False), replace(params, head=None)
    return config, params, changes


def read_target_ids(tensors: TensorFolder, config: MtpConfig, where: str) -> np.ndarray:  # [draft_vocab] int32
    """Read which tokens the layer proposes: all, or those that its tables name. Raises CheckpointError."""
    found = {name: tensors.read(name) for name in (D2T, T2D) if name in tensors.names()}
    return vocab_from_tensors(found.get(D2T), found.get(T2D), config.draft_vocab_size, config.layer.vocab_size, where)


def _stated_vocab(raw: Mapping[str, Any], target: ModelConfig, where: str) -> int:
    """Read how many tokens a layer says that it proposes: all of the target's where it says nothing."""
    size = raw.get("draft_vocab_size", target.vocab_size)
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= target.vocab_size:
        raise ConfigError(f"{where}: draft_vocab_size is {size!r}; expected 1 to {target.vocab_size}, or nothing")
    return size


def _differences(name: str, own: Any, other: Any) -> list[str]:
    """List the differences of two configs, field by field where both have fields."""
    if is_dataclass(own) and is_dataclass(other):
        names = [f"{name}.{field.name}" for field in fields(own)]
        pairs = [(getattr(own, field.name), getattr(other, field.name)) for field in fields(own)]
        return [told for each, pair in zip(names, pairs, strict=True) for told in _differences(each, *pair)]
    if own == other:
        return []
    return [f"{name} {own!r}, not {other!r}" if not isinstance(own, tuple) else f"other {name}"]


def of_target(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The target's config.json within that of a layer. Its architectures may say how it is to be read."""
    nested = raw.get(LAYER_CONFIG)
    own = nested if isinstance(nested, Mapping) else raw
    return {**own, "architectures": own[OF_TARGET]} if OF_TARGET in own else own


def shared_tables(target: ModelConfig, layout: Layout) -> dict[str, str]:
    """Return the names under which a layer may have tables of its own, each with the name of the target's table."""
    head = target.names.embedding if target.tie_embeddings else "lm_head.weight"
    pairs = {layout.embedding: target.names.embedding, layout.head: head}
    return {f"{own}.weight": shared for own, shared in pairs.items() if own}


def own_names(names: frozenset[str], config: MtpConfig) -> frozenset[str]:
    """Return the tensors of a folder that are the layer's: all of them, unless it holds a whole target."""
    if not is_whole(names, config.layer):
        return names
    name_of = name_in(names, config.layout)
    prefixes = tuple(f"{name_of(prefix)}." for prefix in config.layout.prefixes)
    return frozenset(name for name in names if name.startswith(prefixes))


def is_whole(names: frozenset[str], target: ModelConfig) -> bool:
    """Return whether the tensors are those of a whole target."""
    return renamer(names)(target.names.norm) in names


def _is_copy(folder: Path, own: str, shared: str) -> bool:
    """Return whether a table of the layer is the one that stands in the same folder for the target."""
    table = _read(folder, shared)
    return table is not None and np.array_equal(opened(folder).read(own), table)


def _read(folder: Path, name: str) -> np.ndarray | None:
    """Read a tensor of a target, or return None where its weights are not there."""
    try:
        tensors = opened(folder)
    except CheckpointError:
        return None
    name = renamer(tensors.names())(name)
    return tensors.read(name) if name in tensors.names() else None


def name_in(names: frozenset[str], layout: Layout) -> Callable[[str], str]:
    """Return a function from our names, the target checkpoint's, to those of a folder."""
    if any(map(_is_speculators, names)):
        return _as_speculators(layout)
    within = renamer(names)

    def stored(name: str) -> str:
        return within(name) if name.startswith("model.") else name

    return stored


def _as_speculators(layout: Layout) -> Callable[[str], str]:
    parts = ("token_norm", "hidden_norm", "fc", "norm", "layer")  # the last: the others' names may begin with it
    pairs = [(getattr(layout, part), getattr(SPECULATORS, part)) for part in parts]

    def rename(name: str) -> str:
        return next((theirs + name[len(ours) :] for ours, theirs in pairs if name.startswith(f"{ours}.")), name)

    return rename
