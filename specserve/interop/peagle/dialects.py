"""P-EAGLE heads as others write them: EAGLE-3's layouts (`eagle.dialects`) with a mask. The only file that knows how
the mask's token and the number of slots are spelled.

speculators nests the network's settings and states the slots as the tokens that it proposes to vLLM. The flat layout is
SpecForge's, and vLLM's, which reads another name of the mask's token. In all of them the layers are `layers.{i}.*` and
layer ids name the INPUT of layer i + 1. Nobody wrote such heads for SGLang.
"""

from collections.abc import Mapping
from typing import Any

from specserve.drafters.eagle3.config import Eagle3Config
from specserve.drafters.peagle.config import NUM_SLOTS, PEagleConfig
from specserve.errors import ConfigError
from specserve.interop.eagle3.dialects import FLAGS, KNOWN, MASK_KEYS, TAP_IDS, mask_ids, unsupported
from specserve.interop.findings import Dialect
from specserve.interop.published import TRANSFORMERS_KEYS, architectures

ARCHITECTURE, MODEL_TYPE = "PEagleDraftModel", "peagle"
OWN = frozenset((ARCHITECTURE, "PEagleSpeculator", "LlamaForCausalLMPeagle"))
SLOTS = "num_depths"  # in the flat layout
WRITTEN_MASK_KEYS = ("mask_token_id", "ptd_token_id")  # in the flat layout: SpecForge's name, and one that vLLM reads
# Keys that say something, and those that a config class of Hugging Face writes of its own accord.
_NETWORK_KEYS = {
    *(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *("hidden_act", "rms_norm_eps", "vocab_size", "max_position_embeddings", "rope_theta", "rope_scaling"),
    *("rope_parameters", "attention_bias", "mlp_bias", "use_sliding_window", "sliding_window", "max_window_layers"),
    *("layer_types", *TRANSFORMERS_KEYS),
}
_HEAD_KEYS = {
    *("target_hidden_size", "draft_vocab_size", "truncated_vocab_size", "num_aux_hidden_states", "eagle_config"),
    *("embed_requires_grad", "speculators_config", "speculators_model_type", "speculators_version", "auto_map"),
    *("transformer_layer_config", "dflash_config", "parallel_drafting", "down_sample_ratio", "down_sample_ratio_min"),
    *(*FLAGS, *MASK_KEYS, TAP_IDS, SLOTS),
}


def is_named(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a P-EAGLE head. Engines also know them as EAGLE-3 heads that have a mask."""
    names = architectures(raw)
    is_masked = bool(names & KNOWN) and bool(mask_ids(raw))
    return raw.get("speculators_model_type") == MODEL_TYPE or bool(names & OWN) or is_masked


def unknown_keys(raw: Mapping[str, Any]) -> list[str]:
    """List the keys that nothing is known of, so that what they ask for would be left out."""
    layer, nested = raw.get("transformer_layer_config"), raw.get("dflash_config")
    found = [key for key in raw if key not in _NETWORK_KEYS | _HEAD_KEYS]
    for name, inner, known in (
        ("transformer_layer_config", layer, _NETWORK_KEYS),
        ("dflash_config", nested, {"mask_token_id"}),
    ):
        found += [f"{name}.{key}" for key in inner if key not in known] if isinstance(inner, Mapping) else []
    return sorted(found)


def num_slots(raw: Mapping[str, Any]) -> Any:
    """Return how many tokens the head says that it predicts, or None where it says nothing."""
    speculators = raw.get("speculators_config")
    methods = speculators.get("proposal_methods") if isinstance(speculators, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    nested = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return raw.get(SLOTS) if raw.get(SLOTS) is not None else nested


def config_from_hf(raw: Mapping[str, Any], network: Eagle3Config, where: str) -> PEagleConfig:
    """Read what a config.json says beside the network. Raises ConfigError."""
    if unknown := unknown_keys(raw):
        raise ConfigError(
            f"{where}: {', '.join(unknown)}: keys that nothing is known of, so that the head might be computed "
            "otherwise than it was trained; remove them if the head was trained without"
        )
    if wrong := unsupported(raw):
        raise ConfigError(f"{where}: {', '.join(wrong)}: no P-EAGLE head is computed so here; export it without")
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
    slots = NUM_SLOTS if num_slots(raw) is None else num_slots(raw)
    if type(slots) is not int or slots < 1:
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
