"""How EAGLE-3 heads are made, and their files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.drafters.door import Dialect, Head, TrainedDrafter
from specserve.drafters.eagle import dialects, doctor, files, start
from specserve.drafters.eagle.patient import EAGLE3, Patient
from specserve.drafters.eagle.repairs import list_repairs
from specserve.drafters.eagle3.drafter import Eagle3
from specserve.drafters.findings import Repair, Report
from specserve.drafters.settings import DraftSettings
from specserve.models.config import ModelConfig


class Eagle3Kind:
    """See `door.Kind`, which says what each of these is for."""

    understands = frozenset({"d_model", "norm_output", "fc_norm"})

    def suits(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        del given
        return {}

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        stated = raw.get("architectures")
        is_known = isinstance(stated, list) and not EAGLE3.known.isdisjoint(map(str, stated))
        return is_known and not dialects.mask_ids(raw)

    def new(self, settings: DraftSettings, target: ModelConfig, draft_vocab_size: int) -> Eagle3:
        return Eagle3(start.new_config(settings, target, draft_vocab_size))

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> Eagle3:
        return Eagle3(files.read_config(folder, target, target_name, dtype=dtype))

    def load(self, folder: Path, target: Target, *, dtype: str, mesh: Mesh | None) -> Head:
        config, params, target_ids = files.load(folder, target, dtype=dtype, mesh=mesh)
        return Head(Eagle3(config), params, target_ids)

    def files(
        self, head: Head, target: Target, *, dtype: str, dialect: Dialect, target_name: str
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        return files.head_files(
            _own(head.drafter).config,
            head.params,
            head.target_ids,
            target,
            dtype=dtype,
            dialect=dialect,
            target_name=target_name,
        )

    def unknown_to(self, dialect: Dialect, drafter: TrainedDrafter) -> list[str]:
        return dialects.unknown_to(dialect, _own(drafter).config)

    def has_own_embedding(self, folder: Path) -> bool:
        return files.has_own_embedding(folder)

    def without_copies(self, head: Head, target: Target, dtype: str) -> tuple[Head, list[str]]:
        config, params, changes = files.without_copies(_own(head.drafter).config, head.params, target, dtype)
        return Head(Eagle3(config), params, head.target_ids), changes

    def repairs(self, folder: Path, target: Target) -> list[Repair]:
        return list(list_repairs(Patient(folder, target)))

    def examine(self, folder: Path, target: Target | None) -> Report:
        return doctor.examine(folder, target)


def _own(drafter: TrainedDrafter) -> Eagle3:
    assert isinstance(drafter, Eagle3), f"a head of another kind: {drafter.name}"
    return drafter
