"""How DFlash heads are made, and their files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.drafters.dflash import dialects, doctor, files, start
from specserve.drafters.dflash.drafter import DFlash
from specserve.drafters.door import Dialect, Head, TrainedDrafter
from specserve.drafters.findings import Repair, Report
from specserve.drafters.settings import ALL_TOKENS, DraftSettings
from specserve.drafters.words import KindName
from specserve.models.config import ModelConfig


class DFlashKind:
    """See `door.Kind`, which says what each of these is for."""

    understands = frozenset({"block_size", "window", "causal", "mask_token"})

    def __init__(self, name: KindName) -> None:
        self.name: KindName = name
        # as the published heads of blocks of 8 were trained: exp(-1/4), and the rate whatever the target's width
        self.suits: Mapping[str, Any] = {"train.rollout_decay": 0.78, "train.lr": 6e-4, "train.clip": 1.0}
        if name != "dflash":
            self.understands |= {"rank"}
        if name == "dflash2":  # whose candidates are the target's tokens
            self.suits = {**self.suits, "draft.vocab_size": ALL_TOKENS}

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        return dialects.kind_named(raw) == self.name

    def new(self, settings: DraftSettings, target: ModelConfig, draft_vocab_size: int) -> DFlash:
        return DFlash(start.new_config(self.name, settings, target, draft_vocab_size))

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> DFlash:
        return DFlash(files.read_config(folder, target, target_name, dtype=dtype))

    def load(self, folder: Path, target: Target, *, dtype: str, mesh: Mesh | None) -> Head:
        config, params, target_ids = files.load(folder, target, dtype=dtype, mesh=mesh)
        return Head(DFlash(config), params, target_ids)

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
        return Head(DFlash(config), params, head.target_ids), changes

    def repairs(self, folder: Path, target: Target) -> list[Repair]:
        del folder, target
        return []

    def examine(self, folder: Path, target: Target | None) -> Report:
        return doctor.examine(folder, target)


def _own(drafter: TrainedDrafter) -> DFlash:
    assert isinstance(drafter, DFlash), f"a head of another kind: {drafter.name}"
    return drafter
