"""The layouts of layers of multi-token prediction in folders: the names of their tensors, in the checkpoint's layout
and in that of speculators, and the shape that a folder states."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specserve.checkpoints.load import Target, is_whole
from specserve.checkpoints.tensors import CONFIG, ExpertByExpert, TensorFolder, listed, read_json
from specserve.drafters.mtp.carried import names_in, num_carried, own_tables, read_shared
from specserve.drafters.mtp.config import LAYOUTS, OTHERS, Layout, MtpConfig, config_of, of_its_own
from specserve.errors import CheckpointError, ConfigError
from specserve.interop.keys import HARMLESS, LAYER, QUANTIZATIONS, ROPE, SLIDING, within
from specserve.interop.notes import read_notes
from specserve.interop.published import D2T, T2D, vocab_from_tensors
from specserve.models.config import ModelConfig
from specserve.models.families import model_config

OF_TARGET = "target_architectures"  # the target's own, beside the name that engines have for such a layer
SPECULATORS = of_its_own("MTPDraftModel", "mtp_layers.0")
ARCHITECTURES = frozenset(layout.architecture for layout in (*LAYOUTS.values(), OTHERS, SPECULATORS))
_FREE = ("dtype", "cache_dtype", "max_len", "names")  # of a target's config: in these a layer may differ
_BESIDE = frozenset((OF_TARGET, LAYER, "draft_vocab_size", "num_nextn_predict_layers", *QUANTIZATIONS))


def opened(folder: Path) -> TensorFolder:
    """Open a folder, by the names of checkpoints wherever speculators has others for the experts. Raises
    CheckpointError."""
    tensors = TensorFolder(folder)
    return ExpertByExpert(folder) if any(map(_is_speculators, tensors.names())) else tensors


def _is_speculators(name: str) -> bool:
    return name.startswith(f"{SPECULATORS.layer}.")


def read_config(folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> MtpConfig:
    """Read the config of the layer in a folder. Raises ConfigError or CheckpointError, also where it belongs to
    another target."""
    where, names = folder / CONFIG, opened(folder).names()
    raw = read_json(where)
    own = model_config(of_target(raw), dtype=dtype, where=str(where)).for_length(target.rope.length)
    shape = [field.name for field in fields(target) if field.name not in _FREE]
    if other := [named for key in shape for named in _differences(key, getattr(own, key), getattr(target, key))]:
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
    has = own_tables(opened(folder), config, name_of)
    return replace(
        config,
        draft_vocab_size=_stated_vocab(raw, target, str(where)),
        has_embedding=has.get(f"{config.layout.embedding}.weight", False),
        has_own_head=has.get(f"{config.layout.head}.weight", False),
    )


def check_keys(folder: Path, target: Target) -> None:
    """Raise ConfigError for a key of a layer's own config.json that nothing reads, and that the target's own does not
    state alike. In a whole checkpoint the keys are those of a target."""
    raw, where = read_json(folder / CONFIG), str(folder / CONFIG)
    if is_whole(opened(folder).names(), target.config):
        return
    theirs, part, place = read_json(target.folder / CONFIG), of_target(raw), f"{LAYER}." if LAYER in raw else ""
    unread = {place + key: value for key, value in part.items() if key not in _BESIDE and not _is_read(part, key)}
    if place:
        unread |= {key: value for key, value in raw.items() if key not in _BESIDE}
    for path, value in unread.items():
        key = path.removeprefix(place)
        if value is not None and key not in HARMLESS and theirs.get(key) != value:
            raise ConfigError(
                f"{where}: {path} is {value!r}, which is not known to us and not so in the target's config.json; take "
                "it out if it says nothing of how the layer is computed"
            )


def _is_read(raw: Mapping[str, Any], key: str) -> bool:
    """Return whether the reader of a target's config.json reads a key: it does not take nonsense in its place. Windows
    of which it is said that there are none, and rotary settings that `rope_parameters` repeats, need not be read."""
    if key in ("use_sliding_window", "sliding_window") and raw.get("use_sliding_window") is False:
        return True
    if (key == "layer_types" and SLIDING not in str(raw[key])) or within(raw, ROPE, key) == raw[key]:
        return True
    try:
        return model_config({**raw, key: object()}, dtype="float32") != model_config(raw, dtype="float32")
    except (ConfigError, AttributeError, TypeError, ValueError):
        return True


def read_target_ids(tensors: TensorFolder, config: MtpConfig, where: str) -> np.ndarray:  # [draft_vocab] int32
    """Read which tokens the layer proposes: all, or those that its tables name. Raises CheckpointError."""
    found = {name: tensors.read(name) for name in (D2T, T2D) if name in tensors.names()}
    return vocab_from_tensors(found.get(D2T), found.get(T2D), config.draft_vocab_size, config.layer.vocab_size, where)


def read_table(target: Target, dtype: str, *, name: str) -> np.ndarray | None:
    """Read a tensor of a target, or return None where its weights are not there."""
    try:
        table = read_shared(opened(target.folder), name)
    except CheckpointError:
        return None
    return table if table is None else table.astype(dtype)


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
        return [named for each, pair in zip(names, pairs, strict=True) for named in _differences(each, *pair)]
    if own == other:
        return []
    return [f"{name} {own!r}, not {other!r}" if not isinstance(own, tuple) else f"other {name}"]


def of_target(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The target's config.json within that of a layer. Its architectures may say how it is to be read."""
    nested = raw.get(LAYER)
    own = nested if isinstance(nested, Mapping) else raw
    return {**own, "architectures": own[OF_TARGET]} if OF_TARGET in own else own


def name_in(names: frozenset[str], layout: Layout) -> Callable[[str], str]:
    """Return a function from our names, the target checkpoint's, to those of a folder."""
    return as_speculators(layout) if any(map(_is_speculators, names)) else names_in(names)


def as_speculators(layout: Layout) -> Callable[[str], str]:
    parts = ("token_norm", "hidden_norm", "fc", "norm", "layer")  # the last: the others' names may begin with it
    pairs = [(getattr(layout, part), getattr(SPECULATORS, part)) for part in parts]

    def rename(name: str) -> str:
        return next((theirs + name[len(ours) :] for ours, theirs in pairs if name.startswith(f"{ours}.")), name)

    return rename
