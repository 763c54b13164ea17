"""P-EAGLE heads as folders: config.json and tensors, in any dialect."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import CONFIG, read_json
from specserve.drafters.eagle3.drafter import Eagle3
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.drafters.peagle.drafter import PEagle
from specserve.drafters.peagle.model import mask_spec
from specserve.interop.eagle3.checks import OF_NETWORK
from specserve.interop.eagle3.dialects import mask_ids
from specserve.interop.eagle3.files import Eagle3Format
from specserve.interop.eagle3.repairs import list_repairs
from specserve.interop.findings import Dialect, Repair
from specserve.interop.keys import LAYER
from specserve.interop.peagle import dialects
from specserve.interop.peagle.catalogue import KEYS
from specserve.interop.peagle.checks import PEagleFiles, check_keys, check_mask
from specserve.interop.repairs import masks, put_everywhere
from specserve.models.config import ModelConfig


def list_masks(files: PEagleFiles) -> Iterator[Repair]:
    """List every other token that may be the mask."""
    if files.target is None:
        return
    spelled = [name.rpartition(".")[2] for name in mask_ids(files.raw)]
    stated = next((i for i in mask_ids(files.raw).values() if type(i) is int), -1)
    for token in masks(files.target, stated):
        fix = put_everywhere("dflash_config", LAYER)(**dict.fromkeys(spelled, token))
        yield Repair(f"masked slots hold token {token}", fix)


class PEagleFormat(Eagle3Format):
    """The layouts of an EAGLE-3 network's files, with a mask (`dialects`)."""

    examined = PEagleFiles
    checks = (*OF_NETWORK, check_keys, check_mask)
    readings = (list_repairs, list_masks)

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        return dialects.is_named(raw)

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> TrainedDrafter:
        network = super().read(folder, target, target_name, dtype=dtype).config
        stated = KEYS.read(read_json(folder / CONFIG), str(folder / CONFIG))
        return PEagle(dialects.config_from_hf(stated, network))

    def files(
        self, head: Head, target: Target, *, dtype: str, dialect: Dialect, target_name: str
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return the tensors and the config.json of a head in a dialect. The flat layout is one for all engines, and
        ours."""
        written: Dialect = "speculators" if dialect == "speculators" else "vllm"
        tensors, raw = super().files(_network(head), target, dtype=dtype, dialect=written, target_name=target_name)
        config = head.drafter.config
        tensors[mask_spec(config).name] = np.asarray(head.params.mask_hidden).astype(dtype)
        return tensors, dialects.config_to_hf(config, raw, dialect)

    def unknown_to(self, dialect: Dialect, drafter: TrainedDrafter) -> list[str]:
        """List what the engine of a dialect does not compute, as its public code reads today."""
        return ["masked slots, so it runs no P-EAGLE head"] if dialect in ("sglang", "sglang-jax") else []

    def without_copies(self, head: Head, target: Target, dtype: str) -> tuple[Head, list[str]]:
        network, changes = super().without_copies(_network(head), target, dtype)
        drafter = PEagle(replace(head.drafter.config, network=network.drafter.config))
        return Head(drafter, replace(head.params, network=network.params), head.target_ids), changes


def _network(head: Head) -> Head:
    """Return the head's network as a head of its own."""
    return Head(Eagle3(head.drafter.shape), head.params.network, head.target_ids)
