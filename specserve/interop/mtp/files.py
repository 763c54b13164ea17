"""Layers of multi-token prediction as folders: within the target's own checkpoint, or alone in one of their own, in the
checkpoint's names or in those of speculators; their checks and their repairs (other readings of the files, for slips of
conversions that no shape shows, whose help is measured by running the layer, `eval.trial`)."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from specserve.checkpoints.load import Target, to_numpy
from specserve.checkpoints.packed import is_stored
from specserve.checkpoints.tensors import CONFIG, ExpertByExpert, TensorFolder, fuse_experts, listed, read_json
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.drafters.mtp.carried import (
    is_whole,
    names_in,
    num_carried,
    own_names,
    own_tables,
    read_layer,
    shared_tables,
)
from specserve.drafters.mtp.config import LAYOUTS, OTHERS, Layout, MtpConfig, config_of, of_its_own
from specserve.drafters.mtp.drafter import Mtp
from specserve.drafters.mtp.model import MtpParams, draft_spec
from specserve.errors import CheckpointError, ConfigError
from specserve.interop.examined import ExaminedFiles, check_specs, check_tables, check_values, given
from specserve.interop.findings import Dialect, Finding, Repair
from specserve.interop.format import HeadFormat, SharedTable
from specserve.interop.key_checks import is_read
from specserve.interop.keys import HARMLESS, LAYER, QUANTIZATIONS, architectures, without
from specserve.interop.notes import read_notes
from specserve.interop.published import present, speculators_config, vocab_to_tensors
from specserve.interop.repairs import change, exchanged, of_products
from specserve.models.config import ModelConfig
from specserve.models.families.table import model_config
from specserve.models.params import specs

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
    if not is_stored(names, name_of(f"{config.layout.fc}.weight")):
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
    if (kind := raw.get("speculators_model_type", "mtp")) != "mtp":
        raise ConfigError(f"{where}: speculators_model_type is {kind!r} of a layer of multi-token prediction")
    theirs, part, place = read_json(target.folder / CONFIG), of_target(raw), f"{LAYER}." if LAYER in raw else ""
    unread = {place + key: value for key, value in part.items() if key not in _BESIDE and not is_read(part, key)}
    if place:
        unread |= {key: value for key, value in raw.items() if key not in _BESIDE}
    for path, value in unread.items():
        key = path.removeprefix(place)
        if value is not None and key not in HARMLESS and theirs.get(key) != value:
            raise ConfigError(
                f"{where}: {path} is {value!r}, which is not known to us and not so in the target's config.json; take "
                "it out if it says nothing of how the layer is computed"
            )


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


class MtpFiles(ExaminedFiles):
    """The files of a layer. Without a target, the layer's own config.json stands for it."""

    open = staticmethod(opened)

    @property
    def dialect(self) -> str:
        return "speculators" if LAYER in self.raw else "checkpoint"

    def make(self) -> MtpConfig:
        target = self.target.config if self.target else self.of_target
        name = str(self.target.folder) if self.target else "its target"
        config = read_config(self.folder, target, name, dtype="float32")
        if self.target:
            check_keys(self.folder, self.target)
        self.rename = name_in(self.names, config.layout)
        return config

    @cached_property
    def of_target(self) -> ModelConfig:
        """The shape of the target that the layer is of, as its config.json states it. Raises ConfigError."""
        return model_config(of_target(self.raw), dtype="float32", where=str(self.folder / CONFIG))

    @property
    def own_names(self) -> frozenset[str]:
        """The names of the layer's tensors, in a folder that may hold a whole target."""
        return own_names(self.names, self.config, self.rename) if self.config else self.names

    def facts(self) -> dict[str, str]:
        facts, config = {"kind": "a layer of multi-token prediction"}, self.config
        if config is None:
            return facts
        return facts | {
            "target": f"{self.of_target.family}, {self.of_target.num_layers} layers of {self.of_target.d_model}",
            "names": config.layout.fc,
            "vocabulary": f"{config.draft_vocab_size:,} of {self.of_target.vocab_size:,}",
        }


@given("config")
def check_layer(files: MtpFiles, config: MtpConfig) -> Iterator[Finding]:
    """Check that all of the layer is there, and which tokens it proposes."""
    shared = {files.rename(name) for name in shared_tables(config.layer, config.layout)}
    yield from check_specs(
        files, specs(draft_spec(config)), lambda name: name in shared or "scale" in name.rsplit(".", 1)[-1]
    )
    if config.is_partial:
        yield from check_tables(files, config.draft_vocab_size, config.layer.vocab_size)


def list_repairs(files: MtpFiles) -> Iterator[Repair]:
    """List all repairs that are worth a try. There are none where the folder cannot be read as a layer of this target,
    nor where it is a whole checkpoint, whose layer was not converted, nor for a layer with several streams."""
    config = files.config
    if config is not None and not config.layout.mixture and not is_whole(files.names, config.layer):
        yield from _all(config, files.names)


def _all(config: MtpConfig, names: frozenset[str]) -> Iterator[Repair]:
    layout, width = config.layout, config.layer.d_model
    rename = functools.partial(name_in, layout=layout)
    stored = rename(names)
    norms = [f"{name}.weight" for name in (layout.token_norm, layout.hidden_norm, layout.norm)]
    yield from exchanged(rename, norms, stored)
    parts = ["the token's embedding", "the hidden state"]
    first, second = parts if layout.hidden_first else reversed(parts)
    fc = f"{layout.fc}.weight"
    yield Repair(
        f"{stored(fc)} takes {first} first and {second} second",
        change(rename, lambda weight: np.roll(weight, width, axis=1), fc),
    )
    by = np.float32(-1 if config.layer.norm_offset else 1)
    yield Repair(
        f"its norms are stored {'whole' if config.layer.norm_offset else 'as differences from one'}",
        change(rename, lambda weight: (weight.astype(np.float32) + by).astype(weight.dtype), *norms),
    )
    yield from of_products(
        rename, layout.layer, names, is_square=config.layer.num_heads * config.layer.head_dim == width
    )


class MtpFormat(HeadFormat):
    """The layouts of a layer of multi-token prediction."""

    examined = MtpFiles
    checks = (check_layer, check_values)
    readings = (list_repairs,)

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        """Return whether a config.json is of such a layer, or of a target whose checkpoint carries one."""
        return (
            bool(ARCHITECTURES & architectures(raw))
            or raw.get("speculators_model_type") == "mtp"
            or num_carried(raw) > 0
        )

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> TrainedDrafter:
        return Mtp(read_config(folder, target, target_name, dtype=dtype))

    def load(self, folder: Path, target: Target, **how: Any) -> Head:
        head = super().load(folder, target, **how)
        check_keys(folder, target)
        return head

    def renamer(self, names: frozenset[str], drafter: TrainedDrafter) -> Callable[[str], str]:
        return name_in(names, drafter.config.layout)

    def params(self, drafter: TrainedDrafter, tensors: TensorFolder, dtype: str, how: dict[str, Any]) -> MtpParams:
        return read_layer(tensors, drafter.config, dtype, how)

    def files(
        self, head: Head, target: Target, *, dtype: str, dialect: Dialect, target_name: str
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return the tensors in the names of the target's checkpoint, beside which they replace what it carries; and a
        config.json that is the target's, under the name of such a layer. One that proposes a part of the tokens names
        these as an EAGLE-3 head does. For speculators, both as it has them. Raises CheckpointError where it has none
        like this."""
        config = head.drafter.config
        tensors = to_numpy(head.params, head.drafter.spec(), dtype)
        raw = without(read_json(target.folder / CONFIG), QUANTIZATIONS)
        stated: dict[str, Any] = {"torch_dtype": dtype}
        if config.is_partial:
            tensors |= vocab_to_tensors(head.target_ids, config.layer.vocab_size)
            stated["draft_vocab_size"] = config.draft_vocab_size
        if dialect != "speculators":
            count = {} if num_carried(raw) else {"num_nextn_predict_layers": 1}
            if raw.get("architectures"):
                stated[OF_TARGET] = raw["architectures"]
            return tensors, raw | count | stated | {"architectures": [config.layout.architecture], "dtype": dtype}
        if config.layer.family not in ("qwen3", "qwen3_next"):
            raise CheckpointError(
                f"speculators has no layer of multi-token prediction for {config.layer.family} targets like this one, "
                "only for qwen3 and qwen3_next; export it for vllm or sglang, in the names of the target's checkpoint"
            )
        rename = as_speculators(config.layout)
        return fuse_experts({rename(name): value for name, value in tensors.items()}), stated | {
            "architectures": [SPECULATORS.architecture],
            "speculators_model_type": "mtp",
            "num_nextn_predict_layers": 1,
            LAYER: raw,
            "speculators_config": speculators_config("mtp", 3, target_name, raw),
        }

    def unknown_to(self, dialect: Dialect, drafter: TrainedDrafter) -> list[str]:
        """List what no engine computes of such a layer."""
        config = drafter.config
        found = {
            "an embedding of its own": config.has_embedding,
            "a head of its own": config.has_own_head,
            f"a draft vocabulary of {config.draft_vocab_size:,} tokens (d2t)": config.is_partial,
        }
        return present(found)

    def has_own_embedding(self, folder: Path) -> bool:
        """Return whether the layer's folder holds an embedding or an output head."""
        names, raw = opened(folder).names(), read_json(folder / CONFIG)
        config = config_of(model_config(of_target(raw), dtype="float32", where=str(folder / CONFIG)), dtype="float32")
        name_of = name_in(names, config.layout)
        return any(name_of(name) in names for name in shared_tables(config.layer, config.layout))

    def shared_tables(self, head: Head, target: Target) -> Sequence[SharedTable]:
        layout = head.drafter.config.layout
        places = {
            f"{layout.embedding}.weight": ("has_embedding", "embedding"),
            f"{layout.head}.weight": ("has_own_head", "head"),
        }
        return [
            SharedTable(name, shared, shared, *places[name])
            for name, shared in shared_tables(target.config, layout).items()
        ]
