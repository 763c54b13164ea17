"""The config.json of Gemma 4: layers with and without a window that differ in their heads, layers that see the keys and
values of earlier ones, an input for each layer, and experts beside an MLP."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from specserve.errors import ConfigError
from specserve.models.config import Experts, LayerKind, Names
from specserve.models.families.keys import Flags, Keys

NAMES = Names(mlp_norm="pre_feedforward_layernorm")
FULL, SLIDING = "full_attention", "sliding_attention"
ROPES: Mapping[str, Mapping[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}

DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
}


def unified(keys: Keys) -> Flags:
    """The flags of the text model of Gemma 4 12B, which has neither experts nor inputs for each layer, whatever its
    config states of them."""
    return _dense(keys) | {"names": NAMES}


def gemma4(keys: Keys) -> Flags:
    """The flags of Gemma 4's text model."""
    flags, dim = _dense(keys), keys.integer("hidden_size_per_layer_input", 0, least=0)
    if dim:
        flags |= {"layer_input_dim": dim, "layer_input_vocab": _layer_input_vocab(keys)}
    if not keys.flag("enable_moe_block"):
        return flags | {"names": NAMES}
    experts = Experts(
        num_experts=keys.integer("num_experts"),
        top_k=keys.integer("top_k_experts"),
        d_ff=keys.integer("moe_intermediate_size"),
        renormalize=True,
        shared_d_ff=keys.integer("intermediate_size"),
        has_norms=True,
    )
    keys.must_be("use_double_wide_mlp", False)
    # a head is as wide as what a token passes
    return flags | {
        "d_ff": experts.top_k * experts.d_ff + experts.shared_d_ff,
        "layers": tuple(dataclasses.replace(kind, has_experts=True) for kind in flags["layers"]),
        "experts": experts,
        "names": dataclasses.replace(
            NAMES, experts="", router="router.proj", shared="mlp", stacked_experts="outputs first"
        ),
    }


def _dense(keys: Keys) -> Flags:
    keys.must_be("hidden_activation", "gelu_pytorch_tanh")
    keys.must_be("use_bidirectional_attention", "vision")  # of which text knows nothing
    head_dim, kinds = keys.integer("head_dim", 256), _kinds(keys)
    full = _full_heads(keys, kinds)
    rope, local_rope = _ropes(keys, full.get("head_dim", head_dim), head_dim)
    return {
        "head_dim": head_dim,
        "tie_embeddings": keys.flag("tie_word_embeddings", True),
        **keys.bias(),
        "rope": rope,
        "local_rope": local_rope,
        "qk_norm": "head",
        "has_value_norm": True,
        "activation": "gelu_tanh",
        "out_norms": True,
        "embedding_scale": keys.integer("hidden_size") ** 0.5,
        "attention_scale": 1.0,
        "logit_softcap": keys.number("final_logit_softcapping", 0.0),
        "has_layer_scale": True,
        "layers": _layers(keys, kinds, full, keys.integer("intermediate_size")),
    }


def _kinds(keys: Keys) -> list[str]:
    """Return each layer's kind of attention: each sixth and the last one see all tokens unless `layer_types` is there.
    Raises ConfigError where that has another last layer, which transformers would silently change, or other kinds."""
    kinds = keys.kinds_in_groups(SLIDING, 6)
    if keys.raw.get("layer_types") is None:
        kinds[-1] = FULL
    if kinds[-1] != FULL or {*kinds} - {FULL, SLIDING}:
        raise ConfigError(
            f"{keys.where}: layer_types must be {SLIDING} or {FULL}, the last one {FULL}, got {', '.join(kinds)}"
        )
    return kinds


def _full_heads(keys: Keys, kinds: Sequence[str]) -> dict[str, int]:
    """Return the sizes of heads in layers that see all tokens, where they are not those of the others: as published, or
    layer by layer, as transformers saves them."""
    by_layer = keys.raw.get("per_layer_config")
    if by_layer is None:
        found = {"head_dim": keys.integer("global_head_dim", 512)}
        if keys.flag("attention_k_eq_v") and keys.raw.get("num_global_key_value_heads") is not None:
            found["num_key_value_heads"] = keys.integer("num_global_key_value_heads")
    else:
        full = [str(i) for i, kind in enumerate(kinds) if kind == FULL]
        if not isinstance(by_layer, Mapping) or {*map(str, by_layer)} - {*full}:
            raise ConfigError(f"{keys.where}: per_layer_config must be of layers with {FULL} alone, got {by_layer!r}")
        each = [dict({str(i): own for i, own in by_layer.items()}.get(i, {})) for i in full]
        found = each[0]
        if any(own != found for own in each) or {*found} - {"head_dim", "num_key_value_heads"}:
            raise ConfigError(
                f"{keys.where}: per_layer_config must give all layers with {FULL} one head_dim and one "
                f"num_key_value_heads, and nothing else, got {by_layer!r}"
            )
        own = Keys(found, f"{keys.where}: per_layer_config")
        found = {name: own.integer(name) for name in found}
    if (heads := keys.integer("num_attention_heads")) % found.get("num_key_value_heads", 1):
        raise ConfigError(
            f"{keys.where}: {heads} attention heads cannot share {found['num_key_value_heads']} KV heads in layers "
            f"with {FULL}"
        )
    return found


def _ropes(keys: Keys, full_dim: int, head_dim: int) -> tuple[Any, Any]:
    """Return the rotary embeddings of layers that see all tokens, of which all channels have an angle, and of the
    others."""
    stated = keys.raw.get("rope_parameters") or ROPES
    found = []
    for kind, dim in ((FULL, full_dim), (SLIDING, head_dim)):
        own = stated.get(kind) or {}
        if "rope_theta" not in own or own.get("rope_type") not in ("default", "proportional"):
            raise ConfigError(
                f"{keys.where}: rope_parameters.{kind} must have a rope_theta and a rope_type of default or "
                f"proportional, got {own!r}"
            )
        if own["rope_type"] == "default":  # all of it turns, also where a part is stated
            own = {**own, "partial_rotary_factor": 1.0}
        found.append(dataclasses.replace(keys.rope(dim, {"rope_parameters": own, "rotary_dim": None}), rotary_dim=dim))
    return found[0], found[1]


def _layer_input_vocab(keys: Keys) -> int:
    vocab_size, own = keys.integer("vocab_size"), keys.integer("vocab_size_per_layer_input", 262_144)
    if own < vocab_size:
        raise ConfigError(f"{keys.where}: vocab_size_per_layer_input is {own}, less than the {vocab_size} tokens")
    return own


def _layers(keys: Keys, kinds: Sequence[str], full: Mapping[str, int], d_ff: int) -> tuple[LayerKind, ...]:
    """Make the layers. The last `num_kv_shared_layers` see the keys and values of the last one before them of their own
    kind. Raises ConfigError where there is none."""
    window, n = keys.integer("sliding_window"), keys.num_layers
    num_own = n - keys.integer("num_kv_shared_layers", 0, least=0)
    of = {kind: max((i for i in range(num_own) if kinds[i] == kind), default=None) for kind in {*kinds}}
    if num_own <= 0 or None in of.values():
        raise ConfigError(
            f"{keys.where}: num_kv_shared_layers {n - num_own} of {n} layers leaves a kind of layer without keys and "
            "values"
        )
    twice, k_eq_v = keys.flag("use_double_wide_mlp"), keys.flag("attention_k_eq_v")
    of_full = LayerKind(
        head_dim=full.get("head_dim", 0), num_kv_heads=full.get("num_key_value_heads", 0), values_are_keys=k_eq_v
    )
    by_kind = {FULL: of_full, SLIDING: LayerKind(window=window, is_local=True)}
    return tuple(
        by_kind[kind]
        if i < num_own
        else dataclasses.replace(by_kind[kind], values_are_keys=False, kv_from=of[kind], d_ff=2 * d_ff if twice else 0)
        for i, kind in enumerate(kinds)
    )
