"""How layers of multi-token prediction are made, and their files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specserve.checkpoints.load import Target
from specserve.drafters.door import Dialect, FileKind, TrainedDrafter
from specserve.drafters.findings import DoctorReport, Repair
from specserve.drafters.mtp import doctor, files, layouts, start
from specserve.drafters.mtp.drafter import Mtp
from specserve.drafters.mtp.repairs import list_repairs
from specserve.drafters.settings import ALL_TOKENS, DraftSettings
from specserve.models.config import ModelConfig


class MtpKind(FileKind[Mtp]):
    """See `door.Kind`, which says what each of these is for."""

    understands = frozenset({"d_model"})

    def __init__(self) -> None:
        super().__init__(Mtp, files)

    def suits(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        del given
        return {"draft.vocab_size": ALL_TOKENS, "train.rollout": 3, "train.rollout_decay": 0.6}

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        return layouts.is_named(raw)

    def new(self, settings: DraftSettings, target: ModelConfig, draft_vocab_size: int) -> Mtp:
        return Mtp(start.new_config(settings, target, draft_vocab_size))

    def unknown_to(self, dialect: Dialect, drafter: TrainedDrafter) -> list[str]:
        del dialect
        config = self.own(drafter).config
        tables = [what for what in ("embedding", "head") if getattr(config, f"has_{what}")]
        return [f"an {what} of its own" if what == "embedding" else f"a {what} of its own" for what in tables]

    def repairs(self, folder: Path, target: Target) -> list[Repair]:
        return list(list_repairs(folder, target))

    def examine(self, folder: Path, target: Target | None) -> DoctorReport:
        return doctor.examine(folder, target)
