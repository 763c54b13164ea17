"""P-EAGLE heads as others write them: EAGLE-3's layouts (`eagle3.dialects`) with a mask; the keys of config.json, and
the faults of the mask. The only file that knows how the mask's token and the number of slots are spelled.

speculators nests the network's settings and states the slots as the tokens that it proposes to vLLM. The flat layout is
SpecForge's, and vLLM's, which reads another name of the mask's token. In all of them the layers are `layers.{i}.*` and
layer ids name the INPUT of layer i + 1. Nobody wrote such heads for SGLang.
"""

from collections.abc import Mapping
from typing import Any

from specserve.drafters.eagle3.config import Eagle3Config
from specserve.drafters.peagle.config import NUM_SLOTS, PEagleConfig
from specserve.errors import ConfigError
from specserve.interop.eagle3.catalogue import KEYS as EAGLE3_KEYS
from specserve.interop.eagle3.dialects import MASK_KEYS, mask_ids
from specserve.interop.findings import FAULTS, Dialect
from specserve.interop.keys import Key, KeyTable, Stated, architectures, counts, is_count, only, within

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


def is_named(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a P-EAGLE head. Engines also know them as EAGLE-3 heads that have a mask."""
    names = architectures(raw)
    is_masked = bool(names & EAGLE3_KEYS.classes) and bool(mask_ids(raw))
    return raw.get("speculators_model_type") == MODEL_TYPE or bool(names & OWN) or is_masked


def num_slots(stated: Stated) -> Any:
    """Return how many tokens the head says that it predicts, or None where it says nothing."""
    return stated.get(SLOTS, within(stated.raw, *PROPOSED))


def config_from_hf(stated: Stated, network: Eagle3Config) -> PEagleConfig:
    """Read what a config.json says beside the network. Raises ConfigError."""
    if network.latent:
        raise ConfigError(f"{stated.where}: latent attention is not computed in a head with masked slots")
    where, mask_token_id, slots = stated.where, stated.get(MASK.name), num_slots(stated)
    if mask_token_id is None:
        raise ConfigError(
            f"{where}: the token of masked slots is not stated; write the id that the head was trained with as "
            f"{MASK.name}"
        )
    if type(mask_token_id) is not int or not 0 <= mask_token_id < network.vocab_size:
        named = ", ".join(f"{path} {value!r}" for path, value in stated.found[MASK.name].items())
        raise ConfigError(f"{where}: {named}; expected a token of the target's, 0..{network.vocab_size - 1}")
    if slots is None:
        slots = NUM_SLOTS
    if not is_count(slots):
        raise ConfigError(f"{where}: {SLOTS} {slots!r}; expected the number of tokens that one pass foresees")
    if (proposed := within(stated.raw, *PROPOSED)) not in (None, slots):
        path = ".".join(map(str, PROPOSED))
        raise ConfigError(f"{where}: {SLOTS} {slots} and {path} {proposed!r}; keep what the head was trained with")
    return PEagleConfig(network, mask_token_id, slots)


def config_to_hf(config: PEagleConfig, raw: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """The config.json of a head, from that of its network as EAGLE-3 has it."""
    out = {**raw, "architectures": [ARCHITECTURE]}
    if dialect != "speculators":
        if config.network.qk_norm:
            out["architectures"] = [NORMED]
        return out | dict.fromkeys(WRITTEN_MASK_KEYS, config.mask_token_id) | {SLOTS: config.num_slots}
    proposals = raw["speculators_config"]
    methods = [method | {"speculative_tokens": config.num_slots} for method in proposals["proposal_methods"]]
    return out | {
        "speculators_model_type": MODEL_TYPE,
        "mask_token_id": config.mask_token_id,
        "embed_requires_grad": True,
        "speculators_config": proposals | {"algorithm": MODEL_TYPE, "proposal_methods": methods},
    }
