"""P-EAGLE heads as folders: config.json and tensors, in any dialect, their checks and their repairs."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import CONFIG, read_json
from specserve.drafters.eagle3.config import Eagle3Config
from specserve.drafters.eagle3.drafter import Eagle3
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.drafters.peagle.config import NUM_SLOTS, PEagleConfig
from specserve.drafters.peagle.drafter import PEagle
from specserve.drafters.peagle.model import mask_spec
from specserve.interop.eagle3.checks import OF_NETWORK, EagleFiles
from specserve.interop.eagle3.dialects import MASK_KEYS, mask_ids
from specserve.interop.eagle3.files import Eagle3Format
from specserve.interop.eagle3.repairs import list_repairs
from specserve.interop.findings import Dialect, Finding, Repair, put
from specserve.interop.keys import LAYER, KeyTable
from specserve.interop.peagle import dialects
from specserve.interop.peagle.dialects import CHECKS, KEYS, SLOTS
from specserve.interop.repairs import masks, put_everywhere
from specserve.models.config import ModelConfig
from specserve.models.params import ParamSpec


class PEagleFiles(EagleFiles):
    """The files of a head with masked slots."""

    architectures: ClassVar[Mapping[Dialect, str]] = dict.fromkeys(EagleFiles.architectures, dialects.ARCHITECTURE)
    normed: ClassVar[Mapping[Dialect, str]] = {"vllm": dialects.NORMED}
    keys: ClassVar[KeyTable] = KEYS

    def specs(self, config: Eagle3Config) -> list[ParamSpec]:
        return [*super().specs(config), mask_spec(PEagleConfig(config, mask_token_id=0, num_slots=0))]

    def facts(self) -> dict[str, str]:
        slots = dialects.num_slots(self.stated) or f"{NUM_SLOTS}, as it does not say"
        masks = ", ".join(map(str, dict.fromkeys(mask_ids(self.raw).values()))) or "not stated"
        return super().facts() | {"slots": f"{slots}; masked by token {masks}"}


def check_mask(files: PEagleFiles) -> Iterator[Finding]:
    """Check that the mask's token is stated, where all engines look for it, and that the number of slots is."""
    ids, vocab_size = mask_ids(files.raw), files.stated.get("vocab_size")
    got = ", ".join(f"{key}: {value!r}" for key, value in ids.items()) or "nothing"
    value = next(iter(ids.values()), None)
    is_token = type(value) is int and value >= 0 and (type(vocab_size) is not int or value < vocab_size)
    is_flat = files.dialect != "speculators"
    if not is_token:
        expected = f"one token id below {vocab_size}, under any of {', '.join(MASK_KEYS)}"
        yield CHECKS["mask-token"].found(CONFIG, expected, got)
    elif is_flat and ids.keys() == {"mask_token_id"}:  # in speculators' own layout vLLM reads that
        fix = put(**dict.fromkeys(dialects.WRITTEN_MASK_KEYS, value))
        yield CHECKS["mask-spelling"].found(CONFIG, f"ptd_token_id: {value}", got, fix)
    if dialects.num_slots(files.stated) is None:
        yield CHECKS["slots"].found(f"{CONFIG}: {SLOTS}", f"mostly {NUM_SLOTS}", "nothing")


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
    keys: ClassVar[KeyTable] = KEYS
    checks = (*OF_NETWORK, check_mask)
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
