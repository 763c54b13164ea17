"""The kind of layers of multi-token prediction: how they are made, and their files."""

from collections.abc import Mapping
from typing import Any

from specserve.drafters.mtp import files, layouts, start
from specserve.drafters.mtp.config import MtpConfig
from specserve.drafters.mtp.drafter import Mtp
from specserve.drafters.settings import ALL_TOKENS, DraftSettings
from specserve.drafters.words import Dialect
from specserve.interop.kind import FileKind
from specserve.interop.mtp import doctor
from specserve.interop.mtp.repairs import list_repairs
from specserve.models.config import ModelConfig


class MtpKind(FileKind[Mtp]):
    """The kind of layers of multi-token prediction. See `door.Kind` for its methods."""

    understands = frozenset({"d_model"})

    def __init__(self) -> None:
        super().__init__(Mtp, files, doctor.examine, list_repairs, _unknown_to)

    def suits(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        del given
        return {"draft.vocab_size": ALL_TOKENS, "train.rollout": 3, "train.rollout_decay": 0.6}

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        return layouts.is_named(raw)

    def new(self, settings: DraftSettings, target: ModelConfig, draft_vocab_size: int) -> Mtp:
        return Mtp(start.new_config(settings, target, draft_vocab_size))


def _unknown_to(dialect: Dialect, config: MtpConfig) -> list[str]:
    del dialect  # no engine computes any of these
    found = {
        "an embedding of its own": config.has_embedding,
        "a head of its own": config.has_own_head,
        f"a draft vocabulary of {config.draft_vocab_size:,} tokens (d2t)": config.is_partial,
    }
    return [what for what, is_there in found.items() if is_there]
