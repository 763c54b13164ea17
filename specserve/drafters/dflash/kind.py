"""How DFlash heads are made, and their files."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.drafters.dflash import dialects, doctor, files, start
from specserve.drafters.dflash.drafter import DFlash
from specserve.drafters.dflash.repairs import list_repairs
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
        if name != "dflash":
            self.understands |= {"rank"}

    def suits(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        block_size = given.get("draft.block_size") or start.default_block_size(self.name)
        num_slots = block_size - (self.name != "dspark")  # whose anchor's slot counts too
        # as published heads were trained, the rate whatever the target's width
        suits = {"train.rollout_decay": slot_decay(num_slots), "train.lr": 6e-4, "train.clip": 1.0}
        return suits | ({"draft.vocab_size": ALL_TOKENS} if self.name == "dflash2" else {})

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
        return list(list_repairs(folder, target))

    def examine(self, folder: Path, target: Target | None) -> Report:
        return doctor.examine(folder, target)


def slot_decay(num_slots: int) -> float:
    """What a slot counts in the loss over the one before it: exp(-1 / gamma), with the gammas of published heads, 4 for
    7 slots and 7 for 15 (DFlash, arXiv 2602.06036), and on the line through both for other numbers."""
    return round(math.exp(-1 / (4 + 3 / 8 * (num_slots - 7))), 2)


def _own(drafter: TrainedDrafter) -> DFlash:
    assert isinstance(drafter, DFlash), f"a head of another kind: {drafter.name}"
    return drafter
