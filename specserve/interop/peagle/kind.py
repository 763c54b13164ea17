"""The kind of P-EAGLE heads: how they are made, and their files."""

from collections.abc import Mapping
from typing import Any

from specserve.drafters.peagle import learn, start
from specserve.drafters.peagle.drafter import PEagle
from specserve.drafters.settings import DraftSettings
from specserve.interop.kind import FileKind
from specserve.interop.peagle import dialects, doctor, files
from specserve.interop.peagle.repairs import list_repairs
from specserve.models.config import ModelConfig


class PEagleKind(FileKind[PEagle]):
    """The kind of P-EAGLE heads. See `door.Kind` for its methods."""

    understands = frozenset({"d_model", "fc_norm", "block_size", "mask_token"})

    def __init__(self) -> None:
        super().__init__(PEagle, files, doctor.examine, list_repairs, dialects.unknown_to)

    def suits(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        del given
        # slot d has r^d of the elements, and each element counts as much as any other
        return {"train.rollout_decay": learn.SHARE}

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        return dialects.is_named(raw)

    def new(self, settings: DraftSettings, target: ModelConfig, draft_vocab_size: int) -> PEagle:
        return PEagle(start.new_config(settings, target, draft_vocab_size))
