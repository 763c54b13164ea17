"""The kinds of DFlash heads: how they are made, and their files."""

import math
from collections.abc import Mapping
from typing import Any

from specserve.drafters.dflash import start
from specserve.drafters.dflash.drafter import DFlash
from specserve.drafters.settings import ALL_TOKENS, DraftSettings
from specserve.drafters.words import KindName
from specserve.interop.dflash import dialects, doctor, files
from specserve.interop.dflash.repairs import list_repairs
from specserve.interop.kind import FileKind
from specserve.models.config import ModelConfig


class DFlashKind(FileKind[DFlash]):
    """A kind of DFlash head. See `door.Kind` for its methods."""

    understands = frozenset({"block_size", "window", "window_layers", "causal", "sinks", "mask_token"})

    def __init__(self, name: KindName) -> None:
        super().__init__(DFlash, files, doctor.examine, list_repairs, dialects.unknown_to)
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


def slot_decay(num_slots: int) -> float:
    """Return the weight of a slot in the loss, relative to the one before it: exp(-1 / gamma), with the gammas of
    published heads, 4 for 7 slots and 7 for 15 (DFlash, arXiv 2602.06036), and on the line through both for other
    numbers."""
    return round(math.exp(-1 / (4 + 3 / 8 * (num_slots - 7))), 2)
