"""Layers of multi-token prediction as folders: within the target's own checkpoint, or alone in one of their own, in the
checkpoint's names or in those of speculators; their checks and their repairs (other readings of the files, for slips of
conversions that no shape shows, whose help is measured by running the layer, `eval.trial`)."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import AS_VOCABULARY, Quantization, Target, to_numpy
from specserve.checkpoints.tensors import CONFIG, TensorFolder, fuse_experts, read_json
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.drafters.mtp.carried import is_whole, num_carried, own_names, read_layer, shared_tables
from specserve.drafters.mtp.config import MtpConfig, config_of
from specserve.drafters.mtp.drafter import Mtp
from specserve.drafters.mtp.model import draft_spec
from specserve.errors import CheckpointError
from specserve.interop.examined import ExaminedFiles, check_specs, check_tables, check_values, given
from specserve.interop.findings import Dialect, Finding, Repair
from specserve.interop.format import HeadFormat, SharedTable
from specserve.interop.keys import LAYER, QUANTIZATIONS, architectures, without
from specserve.interop.mtp.layouts import (
    ARCHITECTURES,
    OF_TARGET,
    SPECULATORS,
    as_speculators,
    check_keys,
    name_in,
    of_target,
    opened,
    read_config,
    read_table,
    read_target_ids,
)
from specserve.interop.published import D2T, T2D, present, speculators_config, stored_scales, vocab_to_tensors
from specserve.interop.repairs import change, exchanged, short_name
from specserve.models.config import ModelConfig
from specserve.models.families import model_config
from specserve.models.params import specs


class MtpFiles(ExaminedFiles):
    """The files of a layer. Without a target, the layer's own config.json stands for it."""

    def open(self, folder: Path) -> TensorFolder:
        return opened(folder)

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
    nor where it is a whole checkpoint, whose layer was not converted."""
    config = files.config
    if config is not None and not is_whole(files.names, config.layer):
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
    attention, mlp = f"{layout.layer}.self_attn", f"{layout.layer}.mlp"
    output = f"{attention}.o_proj.weight"
    if stored(output) in names and config.layer.num_heads * config.layer.head_dim == width:
        yield Repair(f"{stored(output)} is transposed", change(rename, np.transpose, output))
    gates = f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"
    if {*map(stored, gates)} <= names:
        yield from exchanged(rename, gates, short_name)


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

    def load(self, folder: Path, target: Target, *, dtype: str, mesh: Mesh | None, quantization: Quantization) -> Head:
        drafter, tensors = Mtp(read_config(folder, target.config, str(target.folder), dtype=dtype)), opened(folder)
        check_keys(folder, target)
        stored_scales(read_json(folder / CONFIG), tensors, str(folder / CONFIG))
        places = drafter.place(mesh) if mesh is not None else None
        skipped = {re.escape(name): AS_VOCABULARY for name in (D2T, T2D)}
        name_of = name_in(tensors.names(), drafter.config.layout)
        params = read_layer(
            tensors,
            drafter.config,
            name_of,
            dtype=dtype,
            places=places,
            skipped=skipped,
            quantization=quantization,
        )
        return Head(drafter, params, read_target_ids(tensors, drafter.config, str(folder)))

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
            SharedTable(name, shared, functools.partial(read_table, name=shared), *places[name])
            for name, shared in shared_tables(target.config, layout).items()
        ]
