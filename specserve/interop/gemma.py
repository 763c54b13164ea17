"""Draft heads with the layers of Gemma 4 (DeepSpec's): their config.json is that of a Gemma 4 whose layers all see all
tokens, with keys of the kind of head beside it. It is read as the other heads' are, once its keys about full attention
stand where theirs do."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specserve.errors import ConfigError
from specserve.interop.keys import FULL, OLD_ROPE, ROPE, architectures, inner
from specserve.models.config import LayerKind, ModelConfig, Names
from specserve.models.families.gemma4 import NAMES
from specserve.models.families.keys import Keys

CLASSES: Mapping[str, str] = {"eagle3": "Gemma4Eagle3Model", "dspark": "Gemma4DSparkModel"}  # by kind of head
LAYERS = "the layers of a Gemma 4"  # as an option of a head
_ONLY: Mapping[str, Any] = {
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_activation": "gelu_pytorch_tanh",
}
_OF_FULL = ("attention_k_eq_v", "global_head_dim", "num_global_key_value_heads", "final_logit_softcapping")
# of layers with a window, of what `_ONLY` leaves out, and of what text has none of
_UNUSED = (
    *("sliding_window", "vocab_size_per_layer_input", "use_bidirectional_attention"),
    *("num_experts", "top_k_experts", "moe_intermediate_size"),
)


def is_gemma(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a head with such layers."""
    return not architectures(raw).isdisjoint(CLASSES.values())


def plain(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config.json with the keys of other heads in place of Gemma's own, which `fields` reads. Any other one
    stays as it is. Raises ConfigError where it asks for what is not computed."""
    if not is_gemma(raw):
        return raw
    keys = Keys(raw, where)
    for key, value in _ONLY.items():
        keys.must_be(key, value)
    num_layers = keys.integer("num_hidden_layers")
    if {*keys.kinds([FULL] * num_layers)} != {FULL}:
        raise ConfigError(f"{where}: layer_types must all be {FULL} in such a head, got {raw['layer_types']!r}")
    heads = "num_global_key_value_heads" if keys.flag("attention_k_eq_v") else "num_key_value_heads"
    rope = inner(inner(raw, ROPE), FULL)
    if not rope:
        raise ConfigError(f"{where}: {ROPE} has no {FULL}, by which the layers of such a head turn")
    rest = {key: value for key, value in raw.items() if key not in (*_ONLY, *_OF_FULL, *_UNUSED)}
    own = {"head_dim": keys.integer("global_head_dim"), "num_key_value_heads": keys.integer(heads)}
    return {**rest, **own, ROPE: rope, "hidden_act": _ONLY["hidden_activation"]}


def fields(raw: Mapping[str, Any], where: str, names: Names) -> dict[str, Any]:
    """Return the fields of the `ModelConfig` of such a head's layers that others lack or have otherwise; none of other
    heads. `names` are those of other heads' tensors. Raises ConfigError."""
    if not is_gemma(raw):
        return {}
    keys = Keys(raw, where)
    kind = LayerKind(values_are_keys=keys.flag("attention_k_eq_v"))
    return {
        "layers": (kind,) * keys.num_layers if kind != LayerKind() else (),
        "names": replace(names, mlp_norm=NAMES.mlp_norm),
        "qk_norm": "head",
        "has_value_norm": True,
        "out_norms": True,
        "has_layer_scale": True,
        "attention_scale": 1.0,
        "embedding_scale": keys.integer("hidden_size") ** 0.5,
        "logit_softcap": keys.number("final_logit_softcapping", 0.0),
    }


def has_gemma_layers(config: ModelConfig) -> bool:
    """Return whether a head's layers are such."""
    return config.has_value_norm


def to_hf(layer: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Write what `plain` and `fields` read in place of the keys about a plain head's layers."""
    k_eq_v = config.kind(0).values_are_keys
    taken = ("head_dim", "hidden_act", "num_key_value_heads", "rope_theta", "partial_rotary_factor", OLD_ROPE, ROPE)
    unsaid = ("use_sliding_window", "sliding_window", "max_window_layers")
    rest = {key: value for key, value in layer.items() if key not in (*taken, *unsaid)}
    return {
        **rest,
        **_ONLY,
        "model_type": "gemma4_text",
        "layer_types": [FULL] * config.num_layers,
        "head_dim": config.head_dim,
        "global_head_dim": config.head_dim,
        "num_key_value_heads": config.num_kv_heads,
        "num_global_key_value_heads": config.num_kv_heads,
        "attention_k_eq_v": k_eq_v,
        "final_logit_softcapping": config.logit_softcap or None,
        ROPE: {FULL: layer[ROPE]},
    }
