"""P-EAGLE heads as others write them: EAGLE-3's layouts (`eagle3.dialects`) with a mask; the keys of config.json, and
the faults of the mask. The only file that knows how the mask's token and the number of slots are spelled.

speculators nests the network's settings and states the slots as the tokens that it proposes to vLLM. The flat layout is
SpecForge's, and vLLM's, which reads another name of the mask's token. In all of them the layers are `layers.{i}.*` and
layer ids name the INPUT of layer i + 1. Nobody wrote such heads for SGLang.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from specserve.checkpoints.tensors import CONFIG
from specserve.drafters.eagle3.config import Eagle3Config
from specserve.drafters.peagle.config import NUM_SLOTS, PEagleConfig
from specserve.errors import ConfigError
from specserve.interop.eagle3.catalogue import HEAD_KEYS, NETWORK_KEYS
from specserve.interop.eagle3.catalogue import KEYS as EAGLE3_KEYS
from specserve.interop.eagle3.dialects import KNOWN, MASK_KEYS, mask_ids, unsupported
from specserve.interop.findings import Dialect, Finding, read_checks, refuse
from specserve.interop.keys import LAYER, KeyTable, Stated, architectures, is_count, known, within

SLOTS = "num_depths"  # in the flat layout
_NETWORK = frozenset(key.name for key in NETWORK_KEYS)
_OTHERS = ("dflash_config", "parallel_drafting", "down_sample_ratio", "down_sample_ratio_min")
_KEYS = [*NETWORK_KEYS, *HEAD_KEYS, *known(*MASK_KEYS, SLOTS, *_OTHERS)]
KEYS = KeyTable(
    _KEYS,
    over=EAGLE3_KEYS.over,
    strict={"": frozenset(key.name for key in _KEYS), LAYER: _NETWORK, "dflash_config": frozenset({MASK_KEYS[0]})},
)


CHECKS = read_checks("""
[masked slots (P-EAGLE)]
unknown-keys error: keys that nothing is known of
  what they ask for is left out: the head is computed otherwise than it was trained
  by hand: remove them, if the head was trained without
  refused: {got}: keys that nothing is known of, so that the head might be computed otherwise than it was trained;
    remove them if the head was trained without
unsupported-switch error: a switch of the layers that is not computed
  we refuse the head, and engines that do not know the switch compute another one
  by hand: export the head again without, if it was trained without
  refused: {got}: no P-EAGLE head is computed so here; export it without
mask-token error: the token of masked slots is not stated, or stated twice, or no token of the target
  engines refuse the head, or fill its slots with a token that it never saw there
  by hand: write the id that the head was trained with
mask-spelling warning: the token of masked slots has no name that vLLM reads
  vLLM refuses the head
  fix: write it under that name too
slots warning: how many tokens one pass foresees is not stated
  slots beyond those that were trained foresee nothing: what they propose is verified in vain
  by hand: write the number of depths that the head was trained with
""")

ARCHITECTURE, MODEL_TYPE = "PEagleDraftModel", "peagle"
OWN = frozenset((ARCHITECTURE, "PEagleSpeculator", "LlamaForCausalLMPeagle"))
WRITTEN_MASK_KEYS = ("mask_token_id", "ptd_token_id")  # in the flat layout: SpecForge's name, and one that vLLM reads


def is_named(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a P-EAGLE head. Engines also know them as EAGLE-3 heads that have a mask."""
    names = architectures(raw)
    is_masked = bool(names & KNOWN) and bool(mask_ids(raw))
    return raw.get("speculators_model_type") == MODEL_TYPE or bool(names & OWN) or is_masked


def check_keys(stated: Stated) -> Iterator[Finding]:
    """Check that every key of config.json is known, and every switch computed."""
    if unknown := sorted(stated.unknown()):
        yield CHECKS["unknown-keys"].found(CONFIG, "keys of a P-EAGLE head", ", ".join(unknown))
    if wrong := unsupported(stated):
        yield CHECKS["unsupported-switch"].found(CONFIG, "layers that see everything, without biases", ", ".join(wrong))


def num_slots(raw: Mapping[str, Any]) -> Any:
    """Return how many tokens the head says that it predicts, or None where it says nothing."""
    if raw.get(SLOTS) is not None:
        return raw[SLOTS]
    return within(raw, "speculators_config", "proposal_methods", 0, "speculative_tokens")


def config_from_hf(stated: Stated, network: Eagle3Config) -> PEagleConfig:
    """Read what a config.json says beside the network. Raises ConfigError."""
    refuse(check_keys(stated), stated.where)
    raw, where = stated.raw, stated.where
    ids = mask_ids(raw)
    named = ", ".join(f"{key} {value!r}" for key, value in ids.items())
    if not ids:
        raise ConfigError(
            f"{where}: the token of masked slots is not stated; write the id that the head was trained with as "
            f"{MASK_KEYS[0]}"
        )
    if len(set(map(str, ids.values()))) > 1:
        raise ConfigError(f"{where}: {named} are to be one token; keep the id that the head was trained with")
    mask_token_id = next(iter(ids.values()))
    if type(mask_token_id) is not int or not 0 <= mask_token_id < network.vocab_size:
        raise ConfigError(f"{where}: {named}; expected a token of the target's, 0..{network.vocab_size - 1}")
    slots = num_slots(raw)
    if slots is None:
        slots = NUM_SLOTS
    if not is_count(slots):
        raise ConfigError(f"{where}: {SLOTS} {slots!r}; expected the number of tokens that one pass foresees")
    return PEagleConfig(network, mask_token_id, slots)


def config_to_hf(config: PEagleConfig, raw: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """The config.json of a head, from that of its network as EAGLE-3 has it."""
    out = {**raw, "architectures": [ARCHITECTURE]}
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
