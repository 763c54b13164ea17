"""The kind of EAGLE-3 heads: how they are made, and their files."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specserve.checkpoints.load import Target
from specserve.drafters.eagle import start
from specserve.drafters.eagle3.drafter import Eagle3
from specserve.drafters.settings import DraftSettings
from specserve.interop.eagle import dialects, doctor, files
from specserve.interop.eagle.patient import EAGLE3, Patient
from specserve.interop.eagle.repairs import list_repairs
from specserve.interop.findings import Repair
from specserve.interop.kind import FileKind
from specserve.models.config import ModelConfig


class Eagle3Kind(FileKind[Eagle3]):
    """The kind of EAGLE-3 heads. See `door.Kind` for its methods."""

    understands = frozenset({"d_model", "norm_output", "fc_norm"})

    def __init__(self) -> None:
        super().__init__(Eagle3, files, doctor.examine, _repairs, dialects.unknown_to)

    def suits(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        del given
        return {}

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        stated = raw.get("architectures")
        is_known = isinstance(stated, list) and not EAGLE3.known.isdisjoint(map(str, stated))
        return is_known and not dialects.mask_ids(raw)

    def new(self, settings: DraftSettings, target: ModelConfig, draft_vocab_size: int) -> Eagle3:
        return Eagle3(start.new_config(settings, target, draft_vocab_size))


def _repairs(folder: Path, target: Target) -> Iterable[Repair]:
    return list_repairs(Patient(folder, target))
