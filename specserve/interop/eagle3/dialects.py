"""EAGLE-3 heads as others write them. The only file that knows their names and the spellings of layer ids.

SGLang (our own layout) and sglang-jax: tensors `midlayer.*`, layer ids name the OUTPUT of layer i. vLLM and
speculators: tensors `layers.0.*`, layer ids name the INPUT of layer i + 1. The same taps, one apart. Further layers of
a head are `layers.1.*` and so on everywhere, but what norms the stream before their attention is `hidden_norm` in
SGLang and `input_layernorm` in vLLM and speculators, none of which miss the one that they want.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import CONFIG, read_json
from specserve.drafters.eagle3.config import Eagle3Config, default_taps
from specserve.errors import ConfigError
from specserve.interop.findings import Dialect
from specserve.interop.published import (
    ACTIVATION,
    D2T,
    EMBEDDING,
    inner,
    is_eps,
    layer_to_hf,
    sizes_from_hf,
    speculators_config,
)
from specserve.models.config import ModelConfig
from specserve.models.rope import rope_from_hf

ARCHITECTURES: dict[Dialect, str] = {
    "sglang": "LlamaForCausalLMEagle3",
    "vllm": "LlamaForCausalLMEagle3",
    "speculators": "Eagle3DraftModel",
    "sglang-jax": "LlamaForCausalLMEagle3",
}
KNOWN = frozenset((*ARCHITECTURES.values(), "Eagle3LlamaForCausalLM", "Eagle3Speculator"))  # the last: old speculators'
TAP_IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "fc_norm", "norm_before_fc", "norm_output")
REQUIRED = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "draft_vocab_size")
_OPTIONAL = ("num_hidden_layers", "target_hidden_size", "num_key_value_heads", "head_dim", "max_position_embeddings")
SPECULATIVE_TOKENS = 3  # a speculators config suggests so many to vLLM; a flag of the server overrides it
_D2T_NAMES = (D2T, "draft_id_to_target_id")
_NO_TAPS = (0, 1, 2)  # three of a target that nobody named
_FURTHER_NORM = re.compile(r"^(layers\.[1-9]\d*\.)hidden_norm\.")

_DEFAULTS = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False}  # no head has anything else
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # the names of the mask's token in heads with masked slots


def mask_ids(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The token in masked slots by every spelling that is there; none of a head that has no such slots."""
    nested = raw.get("dflash_config")
    found = {key: raw[key] for key in MASK_KEYS if raw.get(key) is not None}
    if isinstance(nested, Mapping) and nested.get("mask_token_id") is not None:
        found["dflash_config.mask_token_id"] = nested["mask_token_id"]
    return found


def is_input_named(names: frozenset[str]) -> bool:
    """Return whether the layer's tensors are named as vLLM and speculators name them."""
    return any(name.removeprefix("model.").startswith("layers.0.") for name in names)


def dialect_of(raw: Mapping[str, Any], names: frozenset[str]) -> Dialect:
    """Return the dialect that a head is written in. SGLang's and sglang-jax's are one."""
    if "transformer_layer_config" in raw or "speculators_model_type" in raw:
        return "speculators"
    return "vllm" if is_input_named(names) else "sglang"


def count_layers(names: frozenset[str]) -> int:
    """The number of layers of a head, counted by the names of its tensors."""
    found = [re.match(r"(?:model\.)?layers\.(\d+)\.", name) for name in names]
    return 1 + max((int(match[1]) for match in found if match), default=0)


def renamer(names: frozenset[str]) -> Callable[[str], str]:
    """Return a function from our tensor names to the folder's, which may put `model.` before all but the head."""

    def rename(name: str) -> str:
        spelled = [name, _as_vllm(name)]
        if is_input_named(names):
            spelled.reverse()
        spellings = [prefix + each for each in spelled for prefix in ("", "model.")]
        return next((each for each in (*spellings, *(_D2T_NAMES if name == D2T else ())) if each in names), spelled[0])

    return rename


def _as_vllm(name: str) -> str:
    return _FURTHER_NORM.sub(r"\1input_layernorm.", name.replace("midlayer.", "layers.0.", 1))


def flat_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Take the nesting out of a head's config.json: speculators keeps the layer's settings, NVIDIA some flags, in an
    inner object. Heads of SpecForge's early days call the draft vocabulary truncated. Raises ConfigError."""
    eagle = inner(raw, "eagle_config")
    flat = {**inner(raw, "transformer_layer_config"), **raw}
    flat |= {flag: eagle[flag] for flag in FLAGS if flag in eagle}
    if flat.get("draft_vocab_size") is None and "truncated_vocab_size" in flat:
        flat["draft_vocab_size"] = flat["truncated_vocab_size"]
    return flat


def unsupported(raw: Mapping[str, Any]) -> list[str]:
    """List switches of the network that are not computed, with their values."""
    flat = flat_config(raw)
    found = [f"{key} {flat[key]!r}" for key, value in _DEFAULTS.items() if flat.get(key) not in (None, value)]
    if flat.get("sliding_window") is not None and flat.get("use_sliding_window") is not False:
        found.append(f"sliding_window {flat['sliding_window']!r}")
    if set(flat.get("layer_types") or ()) - {"full_attention"}:
        found.append(f"layer_types {flat['layer_types']!r}")
    return found


def tap_ids(raw: Mapping[str, Any]) -> list[int]:
    """Read the layer ids as they are written; none where the taps are the default. Raises ConfigError."""
    ids = inner(raw, "eagle_config").get(TAP_IDS) or raw.get(TAP_IDS) or []
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise ConfigError(f"config.json: {TAP_IDS} must list layers, got {ids!r}")
    return ids


def bad_keys(flat: Mapping[str, Any]) -> list[str]:
    """Find keys that the shapes follow from, and that are no counts, or missing where nothing else states them."""
    given = {key: flat.get(key) for key in (*REQUIRED, *_OPTIONAL)}
    is_count = {key: type(value) is int and value > 0 for key, value in given.items()}
    return [key for key, value in given.items() if not is_count[key] and (key in REQUIRED or value is not None)]


def draft_config_from_hf(
    raw: Mapping[str, Any], target: ModelConfig | None, names: frozenset[str], *, dtype: str, where: str
) -> Eagle3Config:
    """Read a head's config.json against its target. Without one the taps are only as many as they should be. Raises
    ConfigError."""
    raw = flat_config(raw)
    if missing := [key for key in REQUIRED if raw.get(key) is None]:
        raise ConfigError(f"{where}: {', '.join(missing)} missing; is this the config.json of an EAGLE-3 head?")
    if wrong := bad_keys(raw):
        named = ", ".join(f"{key} is {raw[key]!r}" for key in wrong)
        raise ConfigError(f"{where}: {named}; expected positive whole numbers")
    if (stated := raw.get("hidden_act")) not in (None, ACTIVATION):
        raise ConfigError(f"{where}: hidden_act is {stated!r}; heads are computed with {ACTIVATION!r} alone")
    if not is_eps(eps := raw.get("rms_norm_eps", 1e-6)):
        raise ConfigError(
            f"{where}: rms_norm_eps is {eps!r}; expected a number above 0 and at most 0.01, such as 1e-06"
        )
    shift = 0 if dialect_of(raw, names) == "sglang" else 1
    ids = tuple(i - shift for i in tap_ids(raw))
    aux_layers = ids or (default_taps(target) if target else _NO_TAPS)
    if target and any(not 0 <= i < target.num_layers for i in aux_layers):
        raise ConfigError(f"{where}: taps layers {aux_layers}, the target has layers 0..{target.num_layers - 1}")
    return Eagle3Config(
        **sizes_from_hf(raw.get, target),
        target_d_model=raw.get("target_hidden_size") or (target.d_model if target else raw["hidden_size"]),
        draft_vocab_size=raw["draft_vocab_size"],
        aux_layers=aux_layers,
        rope=rope_from_hf(raw, where),
        has_embedding=renamer(names)(EMBEDDING) in names,
        dtype=dtype,
        **{flag: bool(raw.get(flag, False)) for flag in FLAGS},
    )


def draft_config_to_hf(
    config: Eagle3Config, target: Target, *, dtype: str, dialect: Dialect, target_name: str
) -> dict[str, Any]:
    """Write the config.json of a head, with both spellings of the rotary settings. Only speculators names the
    target."""
    layer = layer_to_hf(config, target, model_type="llama", dtype=dtype)
    head = {
        "architectures": [ARCHITECTURES[dialect]],
        "target_hidden_size": config.target_d_model,
        "draft_vocab_size": config.draft_vocab_size,
    }
    flags = {flag: getattr(config, flag) for flag in FLAGS}
    output_ids = list(config.aux_layers)
    input_ids = [i + 1 for i in output_ids]
    if dialect == "speculators":  # its readers assume other flags than plain EAGLE-3's where one is left out
        layer["dtype"] = layer.pop("torch_dtype")  # they came after transformers renamed it
        raw_target = read_json(target.folder / CONFIG)
        return {
            **head,
            "speculators_model_type": "eagle3",
            **flags,
            TAP_IDS: input_ids,
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            "dtype": dtype,
            "transformer_layer_config": layer,
            "speculators_config": speculators_config(
                "eagle3", SPECULATIVE_TOKENS, target_name, raw_target, verifier_accept_k=1, accept_tolerance=0.0
            ),
        }
    out = {**head, **layer} | {flag: True for flag, value in flags.items() if value}
    if target.config.num_layers >= 5 and config.aux_layers == default_taps(target.config):
        return out  # without taps, because readers count them differently
    if dialect == "vllm":
        return out | {TAP_IDS: input_ids, "num_aux_hidden_states": len(input_ids)}
    return out | {"eagle_config": {"use_aux_hidden_state": True, TAP_IDS: output_ids}}


def name_tensors(tensors: Mapping[str, np.ndarray], dialect: Dialect) -> dict[str, np.ndarray]:
    """Put tensors with our names under those of a flavour."""
    if dialect in ("sglang", "sglang-jax"):
        return dict(tensors)
    return {_as_vllm(name): value for name, value in tensors.items()}
