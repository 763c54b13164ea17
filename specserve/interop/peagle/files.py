"""P-EAGLE heads as folders, as others write them: EAGLE-3's layouts (`eagle3.dialects`) with a mask, their keys, their
checks and their repairs. The only file that knows how the mask's token and the number of slots are spelled.

speculators nests the network's settings and states the slots as the tokens that it proposes to vLLM. The flat layout is
SpecForge's, and vLLM's, which reads another name of the mask's token. In all of them the layers are `layers.{i}.*` and
layer ids name the INPUT of layer i + 1. Nobody wrote such heads for SGLang.
"""

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
from specserve.errors import ConfigError
from specserve.interop import key_checks
from specserve.interop.eagle3.checks import OF_NETWORK, EagleFiles
from specserve.interop.eagle3.dialects import KEYS as EAGLE3_KEYS
from specserve.interop.eagle3.dialects import MASK_KEYS, mask_ids
from specserve.interop.eagle3.files import Eagle3Format, list_repairs
from specserve.interop.findings import FAULTS, Dialect, Finding, Repair, put, refuse
from specserve.interop.keys import LAYER, Key, KeyTable, Stated, architectures, counts, is_count, only, within
from specserve.interop.published import present
from specserve.interop.repairs import masks, put_everywhere
from specserve.models.config import ModelConfig
from specserve.models.params import ParamSpec

SLOTS = "num_depths"  # in the flat layout
PROPOSED = ("speculators_config", "proposal_methods", 0, "speculative_tokens")  # in that of speculators
MASK = Key(MASK_KEYS[0], MASK_KEYS[1:])
ARCHITECTURE, MODEL_TYPE = "PEagleDraftModel", "peagle"
NORMED = "PeagleQwen3ForCausalLM"  # in the flat layout, with norms of queries and keys
OWN = frozenset(
    (ARCHITECTURE, NORMED, "PEagleSpeculator", "LlamaForCausalLMPeagle", "PeagleLlamaForCausalLM")
)  # vLLM's last
KEYS = KeyTable(
    [*EAGLE3_KEYS.keys, *counts(SLOTS), MASK, only("parallel_drafting", True)],
    classes=EAGLE3_KEYS.classes | OWN,
    model_types=EAGLE3_KEYS.model_types | {MODEL_TYPE},
    places=EAGLE3_KEYS.places | {"dflash_config"},
)

CHECKS = FAULTS["p-eagle"]

WRITTEN_MASK_KEYS = ("mask_token_id", "ptd_token_id")  # in the flat layout: SpecForge's name, and one that vLLM reads


def num_slots(stated: Stated) -> Any:
    """Return how many tokens the head says that it predicts, or None where it says nothing."""
    return stated.get(SLOTS, within(stated.raw, *PROPOSED))


def config_from_hf(stated: Stated, network: Eagle3Config) -> PEagleConfig:
    """Read what a config.json says beside the network. Raises ConfigError."""
    refuse(key_checks.check_mask_token(stated), stated.where)
    where, slots = stated.where, num_slots(stated)
    if slots is None:
        slots = NUM_SLOTS
    if not is_count(slots):
        raise ConfigError(f"{where}: {SLOTS} {slots!r}; expected the number of tokens that one pass foresees")
    if (proposed := within(stated.raw, *PROPOSED)) not in (None, slots):
        path = ".".join(map(str, PROPOSED))
        raise ConfigError(f"{where}: {SLOTS} {slots} and {path} {proposed!r}; keep what the head was trained with")
    return PEagleConfig(network, stated.get(MASK.name), slots)


def config_to_hf(config: PEagleConfig, raw: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """The config.json of a head, from that of its network as EAGLE-3 has it."""
    name = NORMED if config.network.qk_norm and dialect != "speculators" else ARCHITECTURE
    out = {**raw, "architectures": raw["architectures"] if config.network.latent else [name]}
    if dialect != "speculators":
        return out | dict.fromkeys(WRITTEN_MASK_KEYS, config.mask_token_id) | {SLOTS: config.num_slots}
    proposals = raw["speculators_config"]
    methods = [method | {"speculative_tokens": config.num_slots} for method in proposals["proposal_methods"]]
    return out | {
        "speculators_model_type": MODEL_TYPE,
        "mask_token_id": config.mask_token_id,
        "embed_requires_grad": True,
        "speculators_config": proposals | {"algorithm": MODEL_TYPE, "proposal_methods": methods},
    }


class PEagleFiles(EagleFiles):
    """The files of a head with masked slots."""

    architectures: ClassVar[Mapping[Dialect, str]] = dict.fromkeys(EagleFiles.architectures, ARCHITECTURE)
    normed: ClassVar[Mapping[Dialect, str]] = {"vllm": NORMED}
    keys: ClassVar[KeyTable] = KEYS

    def specs(self, config: Eagle3Config) -> list[ParamSpec]:
        return [*super().specs(config), mask_spec(PEagleConfig(config, mask_token_id=0, num_slots=0))]

    def facts(self) -> dict[str, str]:
        slots = num_slots(self.stated) or f"{NUM_SLOTS}, as it does not say"
        masks = ", ".join(map(str, dict.fromkeys(mask_ids(self.raw).values()))) or "not stated"
        return super().facts() | {"slots": f"{slots}; masked by token {masks}"}


def check_mask(files: PEagleFiles) -> Iterator[Finding]:
    """Check that the mask's token is stated, where all engines look for it, and that the number of slots is."""
    ids = mask_ids(files.raw)
    if untold := list(key_checks.check_mask_token(files.stated)):
        yield from untold
    elif files.dialect != "speculators" and ids.keys() == {"mask_token_id"}:  # in speculators' layout vLLM reads that
        fix, (value,) = put(**dict.fromkeys(WRITTEN_MASK_KEYS, ids["mask_token_id"])), ids.values()
        yield CHECKS["mask-spelling"].found(CONFIG, f"ptd_token_id: {value}", f"mask_token_id: {value}", fix)
    if num_slots(files.stated) is None:
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
        """Return whether it is of such a head. Engines also know them as EAGLE-3 heads that have a mask."""
        names = architectures(raw)
        is_masked = bool(names & EAGLE3_KEYS.classes) and bool(mask_ids(raw))
        return raw.get("speculators_model_type") == MODEL_TYPE or bool(names & OWN) or is_masked

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> TrainedDrafter:
        network = super().read(folder, target, target_name, dtype=dtype).config
        stated = KEYS.read(read_json(folder / CONFIG), str(folder / CONFIG))
        return PEagle(config_from_hf(stated, network))

    def files(
        self, head: Head, target: Target, *, dtype: str, dialect: Dialect, target_name: str
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return the tensors and the config.json of a head in a dialect. The flat layout is one for all engines, and
        ours."""
        written: Dialect = "speculators" if dialect == "speculators" else "vllm"
        tensors, raw = super().files(_network(head), target, dtype=dtype, dialect=written, target_name=target_name)
        config = head.drafter.config
        tensors[mask_spec(config).name] = np.asarray(head.params.mask_hidden).astype(dtype)
        return tensors, config_to_hf(config, raw, dialect)

    def unknown_to(self, dialect: Dialect, drafter: TrainedDrafter) -> list[str]:
        """List what the engine of a dialect does not compute, as its public code reads today."""
        has_none = dialect in ("sglang", "sglang-jax")
        return present(
            {
                "masked slots, so it runs no P-EAGLE head": has_none,
                "latent attention beside masked slots": drafter.shape.latent and not has_none,
            }
        )

    def without_copies(self, head: Head, target: Target, dtype: str) -> tuple[Head, list[str]]:
        network, changes = super().without_copies(_network(head), target, dtype)
        drafter = PEagle(replace(head.drafter.config, network=network.drafter.config))
        return Head(drafter, replace(head.params, network=network.params), head.target_ids), changes


def _network(head: Head) -> Head:
    """Return the head's network as a head of its own."""
    return Head(Eagle3(head.drafter.shape), head.params.network, head.target_ids)
