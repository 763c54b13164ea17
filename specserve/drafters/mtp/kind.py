"""How layers of multi-token prediction are made, and their files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.drafters.door import Dialect, Head, TrainedDrafter
from specserve.drafters.findings import Repair, Report
from specserve.drafters.mtp import doctor, files, layouts, start
from specserve.drafters.mtp.drafter import Mtp
from specserve.drafters.mtp.repairs import list_repairs
from specserve.drafters.settings import ALL_TOKENS, DraftSettings
from specserve.models.config import ModelConfig


class MtpKind:
    """See `door.Kind`, which says what each of these is for."""

    understands = frozenset({"d_model"})

    def suits(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        del given
        return {"draft.vocab_size": ALL_TOKENS, "train.rollout": 3, "train.rollout_decay": 0.6}

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        return layouts.is_named(raw)

    def new(self, settings: DraftSettings, target: ModelConfig, draft_vocab_size: int) -> Mtp:
        return Mtp(start.new_config(settings, target, draft_vocab_size))

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> Mtp:
        return Mtp(files.read_config(folder, target, target_name, dtype=dtype))

    def load(self, folder: Path, target: Target, *, dtype: str, mesh: Mesh | None) -> Head:
        config, params = files.load(folder, target, dtype=dtype, mesh=mesh)
        return Head(Mtp(config), params, np.arange(config.layer.vocab_size, dtype=np.int32))

    def files(
        self, head: Head, target: Target, *, dtype: str, dialect: Dialect, target_name: str
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        config = _own(head.drafter).config
        return files.head_files(config, head.params, target, dtype=dtype, dialect=dialect, target_name=target_name)

    def unknown_to(self, dialect: Dialect, drafter: TrainedDrafter) -> list[str]:
        del dialect
        config = _own(drafter).config
        tables = [what for what in ("embedding", "head") if getattr(config, f"has_{what}")]
        return [f"an {what} of its own" if what == "embedding" else f"a {what} of its own" for what in tables]

    def has_own_embedding(self, folder: Path) -> bool:
        return files.has_own_tables(folder)

    def without_copies(self, head: Head, target: Target, dtype: str) -> tuple[Head, list[str]]:
        config, params, changes = files.without_copies(_own(head.drafter).config, head.params, target, dtype)
        return Head(Mtp(config), params, head.target_ids), changes

    def repairs(self, folder: Path, target: Target) -> list[Repair]:
        return list(list_repairs(folder, target))

    def examine(self, folder: Path, target: Target | None) -> Report:
        return doctor.examine(folder, target)


def _own(drafter: TrainedDrafter) -> Mtp:
    assert isinstance(drafter, Mtp), f"a head of another kind: {drafter.name}"
    return drafter
