"""The files of a kind of head: `HeadFormat` has a plain format for kinds that no other engine knows, and what is alike
in the others."""

import dataclasses
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jax.sharding import Mesh
from pydantic import TypeAdapter, ValidationError

from specserve.checkpoints.load import Quantization, Target, load_params, to_numpy
from specserve.checkpoints.quantized import PLAIN, Storing
from specserve.checkpoints.tensors import CONFIG, TensorFolder, read_json
from specserve.checkpoints.unused import AS_VOCABULARY
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.drafters.registry import load_kind
from specserve.errors import ConfigError
from specserve.interop import published
from specserve.interop.examined import ExaminedFiles, check_read, check_scales, check_values
from specserve.interop.findings import Dialect, DoctorReport, Finding, Repair
from specserve.interop.keys import HARMLESS, QUANTIZATIONS
from specserve.interop.notes import other_target
from specserve.interop.published import D2T, EMBEDDING, OUTPUT, T2D, target_table
from specserve.models.config import ModelConfig

ARCHITECTURE, KIND, SHAPE = "SpecServeDrafter", "drafter", "drafter_config"  # of the plain format


@dataclasses.dataclass(frozen=True)
class SharedTable:
    """A table that a head may bring along although it is the target's own."""

    name: str  # of the tensor
    what: str
    own: str  # the name of the target's own
    flag: str  # of the head's config: it brings the table along
    part: str  # of the head's parameters


EMBEDDING_TABLE = SharedTable(EMBEDDING, "embedding", EMBEDDING, "has_embedding", "embedding")
OUTPUT_TABLE = SharedTable(OUTPUT, "output head", OUTPUT, "has_own_head", "head")


class HeadFormat:
    """The files of one kind of head. The plain format is a config.json with the fields of the drafter's config, and
    tensors by the names of its `ParamSpec`s."""

    skipped: ClassVar[Mapping[str, str]] = {}  # patterns of tensors that are not read, each with the reason
    tables: ClassVar[Sequence[SharedTable]] = ()
    examined: ClassVar[type[ExaminedFiles]] = ExaminedFiles  # its files as the draft doctor reads them
    checks: ClassVar[Sequence[Callable[[Any], Iterable[Finding]]]] = (check_values,)
    readings: ClassVar[Sequence[Callable[[Any], Iterable[Repair]]]] = ()  # list the repairs of its files

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        """Return whether a config.json is of a head of this kind."""
        return raw.get(KIND) == self.kind

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> TrainedDrafter:
        """Read the shape of a head from its files, without its weights. Raises ConfigError or CheckpointError, also
        where it belongs to another target."""
        make, where, raw = load_kind(self.kind).drafter, folder / CONFIG, read_json(folder / CONFIG)
        try:
            config = TypeAdapter(typing.get_type_hints(make)["config"]).validate_python(raw.get(SHAPE))
        except ValidationError as error:
            wrong = ", ".join(f"{'.'.join([SHAPE, *map(str, each['loc'])])}: {each['msg']}" for each in error.errors())
            raise ConfigError(f"{where}: {wrong}; is this the config.json of a {self.kind} drafter?") from None
        read = {key: raw[key] for key in raw.keys() & {*HARMLESS, *QUANTIZATIONS, KIND}}
        if other := _unlike(raw, read | {SHAPE: json.loads(json.dumps(dataclasses.asdict(config)))}):
            raise ConfigError(f"{where}: {', '.join(other)}: not known to a {self.kind} drafter, or of another type")
        drafter: TrainedDrafter = make(config)
        if drafter.vocab_size != target.vocab_size:
            raise other_target(folder, f"vocabulary {drafter.vocab_size}", target_name, str(target.vocab_size))
        return drafter.with_dtype(dtype)

    def load(self, folder: Path, target: Target, *, dtype: str, mesh: Mesh | None, quantization: Quantization) -> Head:
        """Load a head in any dialect. Raises as `read` does."""
        drafter = self.read(folder, target.config, str(target.folder), dtype=dtype)
        tensors = self.examined.open(folder)
        storing = published.stored_scales(read_json(folder / CONFIG), tensors, str(folder / CONFIG))
        return self.of_tensors(drafter, tensors, str(folder), mesh=mesh, quantization=quantization, storing=storing)

    def of_tensors(
        self,
        drafter: TrainedDrafter,
        tensors: TensorFolder,
        where: str,
        *,
        mesh: Mesh | None,
        quantization: Quantization = "none",
        storing: Storing = PLAIN,
    ) -> Head:
        """Load a head of a known shape in any dialect. Raises CheckpointError."""
        names, rename = tensors.names(), self.renamer(tensors.names(), drafter)
        tables = rename(D2T), rename(T2D)
        d2t, t2d = (tensors.read(stored) if stored in names else None for stored in tables)
        target_ids = published.vocab_from_tensors(d2t, t2d, drafter.draft_vocab_size, drafter.vocab_size, where)
        skipped = {re.escape(stored): AS_VOCABULARY for stored in tables} | dict(self.skipped)
        how = {"shardings": drafter.place(mesh) if mesh is not None else None, "skipped": skipped, "storing": storing}
        how |= {"rename": rename, "quantization": quantization, "option": "--draft-quantization"}
        return Head(drafter, self.params(drafter, tensors, drafter.dtype, how), target_ids)

    def renamer(self, names: frozenset[str], drafter: TrainedDrafter) -> Callable[[str], str]:
        """Return a function from our names of tensors to those of a folder."""
        return self.examined.renamer(names)

    def params(self, drafter: TrainedDrafter, tensors: TensorFolder, dtype: str, how: dict[str, Any]) -> Any:
        """Load the parameters; `how` has the options of `load_params`. Raises CheckpointError."""
        return load_params(drafter.spec(), tensors, dtype, **how)

    def files(
        self, head: Head, target: Target, *, dtype: str, dialect: Dialect, target_name: str
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return the tensors and the config.json of a head in a dialect. Raises CheckpointError."""
        tensors = to_numpy(head.params, head.drafter.spec(), dtype)
        tensors |= published.vocab_to_tensors(head.target_ids, head.drafter.vocab_size)
        config = dataclasses.asdict(head.drafter.config)
        return tensors, {"architectures": [ARCHITECTURE], KIND: self.kind, "torch_dtype": dtype, SHAPE: config}

    def unknown_to(self, dialect: Dialect, drafter: TrainedDrafter) -> list[str]:
        """List what of a head the engine that a dialect is for does not compute, as its public code reads today."""
        return [f"a drafter of the kind {self.kind}, so it runs no such head"]

    def has_own_embedding(self, folder: Path) -> bool:
        """Return whether a head brings tables along that may be copies of the target's."""
        names = TensorFolder(folder).names()
        rename = self.examined.renamer(names)
        return any(rename(table.name) in names for table in self.tables)

    def shared_tables(self, head: Head, target: Target) -> Sequence[SharedTable]:
        """Return the tables of a head that may be copies of the target's."""
        return self.tables

    def without_copies(self, head: Head, target: Target, dtype: str) -> tuple[Head, list[str]]:
        """Return the head without the tables that are the target's own, and a line for each of these."""
        make: Any = type(head.drafter)
        config, params, changes = head.drafter.config, head.params, []
        stored = to_numpy(params, head.drafter.spec(), dtype)
        for table in self.shared_tables(head, target):
            own = target_table(target, dtype, table.own)
            if table.name in stored and own is not None and np.array_equal(stored[table.name], own):
                config = dataclasses.replace(config, **{table.flag: False})
                params = dataclasses.replace(params, **{table.part: None})
                changes.append(f"{table.name} is the target's own {table.what}, so it is shared instead of stored")
        return Head(make(config), params, head.target_ids), changes

    def repairs(self, folder: Path, target: Target) -> list[Repair]:
        """List other readings of a head's files, which are tried by running the head."""
        files = self.examined(folder, target)
        return [repair for listed in self.readings for repair in listed(files)]

    def examine(self, folder: Path, target: Target | None) -> DoctorReport:
        """Make all checks of a head's files. Without a target, those that need one are left out. Raises CheckpointError
        where there is nothing to look at: no config.json, no whole safetensors file."""
        files = self.examined(folder, target)
        findings = [finding for check in (*self.checks, check_scales) for finding in check(files)]
        if not any(finding.level == "error" for finding in findings):
            findings += check_read(files)
        return DoctorReport(folder, files.dialect, files.facts(), files.rows(), findings)


def _unlike(stated: Mapping[str, Any], read: Mapping[str, Any], place: str = "") -> list[str]:
    """List the keys of a config.json that were not read as they are stated, by their paths."""
    found = []
    for key, value in stated.items():
        if isinstance(value, Mapping) and isinstance(read.get(key), Mapping):
            found += _unlike(value, read[key], f"{place}{key}.")
        elif key not in read or read[key] != value:
            found.append(place + key)
    return found
