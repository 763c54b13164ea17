"""How P-EAGLE heads are made, and their files."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.drafters.door import Dialect, Head, TrainedDrafter
from specserve.drafters.eagle import files as eagle_files
from specserve.drafters.findings import Repair, Report
from specserve.drafters.peagle import dialects, doctor, files, learn, start
from specserve.drafters.peagle.drafter import PEagle
from specserve.drafters.peagle.repairs import list_repairs
from specserve.drafters.settings import DraftSettings
from specserve.models.config import ModelConfig


class PEagleKind:
    """See `door.Kind`, which says what each of these is for."""

    understands = frozenset({"d_model", "fc_norm", "block_size", "mask_token"})

    def suits(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        del given
        # slot d has r^d of the elements, and each element counts as much as any other
        return {"train.rollout_decay": learn.SHARE}

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        return dialects.is_named(raw)

    def new(self, settings: DraftSettings, target: ModelConfig, draft_vocab_size: int) -> PEagle:
        return PEagle(start.new_config(settings, target, draft_vocab_size))

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> PEagle:
        return PEagle(files.read_config(folder, target, target_name, dtype=dtype))

    def load(self, folder: Path, target: Target, *, dtype: str, mesh: Mesh | None) -> Head:
        config, params, target_ids = files.load(folder, target, dtype=dtype, mesh=mesh)
        return Head(PEagle(config), params, target_ids)

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
        del drafter
        return dialects.unknown_to(dialect)

    def has_own_embedding(self, folder: Path) -> bool:
        return eagle_files.has_own_embedding(folder)

    def without_copies(self, head: Head, target: Target, dtype: str) -> tuple[Head, list[str]]:
        config = _own(head.drafter).config
        network, params, changes = eagle_files.without_copies(config.network, head.params.network, target, dtype)
        slim = PEagle(replace(config, network=network))
        return Head(slim, replace(head.params, network=params), head.target_ids), changes

    def repairs(self, folder: Path, target: Target) -> list[Repair]:
        return list(list_repairs(folder, target))

    def examine(self, folder: Path, target: Target | None) -> Report:
        return doctor.examine(folder, target)


def _own(drafter: TrainedDrafter) -> PEagle:
    assert isinstance(drafter, PEagle), f"a head of another kind: {drafter.name}"
    return drafter
