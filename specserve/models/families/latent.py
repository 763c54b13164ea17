"""The config.json of DeepSeek and the families that follow it: latent attention and routing by groups of experts
(DeepSeek, Kimi, GLM-4.7-Flash), and beside these linear attention (Ling, Ring)."""

import dataclasses
from typing import Literal

from specserve.errors import ConfigError
from specserve.models.config import DeltaSizes, Experts, Latent, LayerKind, Lightning, Mixer, Names
from specserve.models.families.dense import query_growth
from specserve.models.families.keys import Flags, Keys
from specserve.models.rope import Rope, yarn_magnitude


def _deepseek(keys: Keys) -> Flags:
    """Return the flags that DeepSeek-V2 and its successors share: latent attention, and a dense MLP in the first
    layers."""
    latent = Latent(
        kv_rank=keys.integer("kv_lora_rank"),
        nope_dim=keys.integer("qk_nope_head_dim"),
        rope_dim=keys.integer("qk_rope_head_dim"),
        v_dim=keys.integer("v_head_dim"),
        q_rank=keys.integer("q_lora_rank", 0, least=0),
    )
    n, dense = keys.num_layers, keys.integer("first_k_dense_replace", 0, least=0)
    # all of the part with position turns, whatever the config says of a head
    stated = dict(keys.raw.get("rope_parameters") or keys.raw.get("rope_scaling") or {})
    stated |= {"partial_rotary_factor": 1.0}
    rope = keys.rope(latent.rope_dim, {"rope_parameters": stated, "rotary_dim": None})
    keys.must_be("moe_layer_freq", 1)
    keys.must_be("mlp_bias", False)
    types = keys.strings("mlp_layer_types", n)
    sparse = [i >= dense for i in range(n)]
    if types:
        sparse = [kind == "sparse" for kind in types]
    return {
        "head_dim": latent.rope_dim,
        "num_kv_heads": 1,
        "latent": latent,
        "layers": tuple(LayerKind("latent", has_experts=has_experts) for has_experts in sparse),
        "rope": dataclasses.replace(rope, is_interleaved=keys.flag("rope_interleave", True)),
        "attention_scale": scale_of(latent, rope, float(stated.get("mscale_all_dim") or 0)),
        **keys.bias(),
    }


def scale_of(latent: Latent, rope: Rope, mscale_all_dim: float) -> float:
    """Return the scale of attention's products, which DeepSeek multiplies by the square of a factor of YaRN's."""
    stretch = yarn_magnitude(rope.factor, mscale_all_dim) if rope.kind == "yarn" and mscale_all_dim else 1.0
    return (latent.nope_dim + latent.rope_dim) ** -0.5 * stretch**2


def routed(keys: Keys, *, scoring: Literal["softmax", "sigmoid"], group_score: Literal["max", "top2"]) -> Experts:
    """Experts by the names of DeepSeek's keys, chosen within the best groups."""
    d_ff = keys.integer("moe_intermediate_size")
    return Experts(
        num_experts=keys.integer("n_routed_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        d_ff=d_ff,
        scoring=scoring,
        renormalize=keys.flag("norm_topk_prob", scoring == "sigmoid"),
        scale=keys.number("routed_scaling_factor", 1.0),
        num_groups=keys.integer("n_group", 1),
        top_groups=keys.integer("topk_group", 1),
        group_score=group_score,
        has_correction=scoring == "sigmoid",
        has_float32_router=True,
        shared_d_ff=keys.integer("n_shared_experts", 0, least=0) * d_ff,
    )


def deepseek_v2(keys: Keys) -> Flags:
    """The flags of DeepSeek-V2: a softmax over all experts, of the best groups where there are groups."""
    keys.must_be("topk_method", "greedy", "group_limited_greedy")
    keys.must_be("norm_topk_prob", False)  # transformers ignores it, DeepSeek's own code renormalises
    experts = routed(keys, scoring="softmax", group_score="max")
    if keys.raw.get("topk_method", "greedy") == "greedy":
        experts = dataclasses.replace(experts, num_groups=1, top_groups=1)
    return _deepseek(keys) | {"experts": experts}


def deepseek_v3(keys: Keys) -> Flags:
    """The flags of DeepSeek-V3 and Kimi K2: sigmoid scores with a correction that only chooses."""
    keys.must_be("topk_method", "noaux_tc")
    keys.must_be("scoring_func", "sigmoid")
    return _deepseek(keys) | {"experts": routed(keys, scoring="sigmoid", group_score="top2")}


def mistral4(keys: Keys) -> Flags:
    """The flags of Mistral Small 4: a softmax over experts, whose chosen weights sum to 1, and queries that grow."""
    flags, growth = _deepseek(keys), query_growth(keys)
    experts, renormalize = routed(keys, scoring="softmax", group_score="top2"), keys.flag("norm_topk_prob", True)
    return flags | {
        **growth,
        "layers": tuple(dataclasses.replace(layer, has_growth=bool(growth)) for layer in flags["layers"]),
        "experts": dataclasses.replace(experts, renormalize=renormalize, has_float32_router=False),
        "names": Names(stacked_experts="outputs first"),
    }


def glm4_moe_lite(keys: Keys) -> Flags:
    """The flags of GLM-4.7-Flash, whose first layer is dense where nothing is said of that."""
    flags = deepseek_v3(keys)
    if not keys.raw.get("mlp_layer_types") and keys.raw.get("first_k_dense_replace") is None:
        flags["layers"] = tuple(LayerKind("latent", has_experts=i > 0) for i in range(keys.num_layers))
    return flags


def with_delta(keys: Keys, layers: tuple[LayerKind, ...], interval: int, *, full: Mixer) -> tuple[LayerKind, ...]:
    """The layers with a delta rule as their mixer, but for each `interval`-th, or those that `layer_types` names, which
    keep `full`."""
    mixers: dict[str, Mixer] = {"linear_attention": "delta"}
    kinds = keys.kinds_in_groups("linear_attention", interval)
    return tuple(
        dataclasses.replace(layer, mixer=mixers.get(kind, full)) for layer, kind in zip(layers, kinds, strict=True)
    )


_BAILING = Names(
    embedding="model.word_embeddings.weight",
    attention="attention",
    linear_attention="attention",
    o="dense",
    qkv="query_key_value",
    q_norm="query_layernorm",
    k_norm="key_layernorm",
    correction="gate.expert_bias",
)


def _bailing_experts(keys: Keys, *, has_correction: bool) -> Experts:
    d_ff = keys.integer("moe_intermediate_size")
    scoring: Literal["softmax", "sigmoid"] = "sigmoid" if has_correction else "softmax"
    return Experts(
        num_experts=keys.integer("num_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        d_ff=d_ff,
        scoring=scoring,
        renormalize=keys.flag("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", 1.0),
        num_groups=keys.integer("n_group", 1),
        top_groups=keys.integer("topk_group", 1),
        group_score="top2",
        has_correction=has_correction,
        shared_d_ff=keys.integer("num_shared_experts", 0, least=0)
        * keys.integer("moe_shared_expert_intermediate_size", d_ff),
    )


def _bailing(keys: Keys) -> Flags:
    """Return the flags that all generations of Ling and Ring share."""
    keys.must_be("norm_head", False)
    keys.must_be("use_sliding_window", False)
    n, dense = keys.num_layers, keys.integer("first_k_dense_replace", 0, least=0)
    return {
        "head_dim": keys.head_dim,
        "rope": keys.rope(keys.head_dim),
        "qkv_bias": keys.flag("use_qkv_bias"),
        "o_bias": keys.flag("use_bias"),
        "qk_norm": "head" if keys.flag("use_qk_norm") else "",
        "layers": tuple(LayerKind(has_experts=i >= dense) for i in range(n)),
        "names": _BAILING,
    }


def bailing_moe(keys: Keys) -> Flags:
    """The flags of Ling 1, or of Ling 2, which goes by the same name with another router."""
    if keys.raw.get("score_function") == "sigmoid":
        return bailing_moe_v2(keys)
    return _bailing(keys) | {"experts": _bailing_experts(keys, has_correction=False)}


def bailing_moe_v2(keys: Keys) -> Flags:
    """The flags of Ling 2."""
    keys.must_be("score_function", "sigmoid")
    has_correction = keys.flag("moe_router_enable_expert_bias", True)
    return _bailing(keys) | {"experts": _bailing_experts(keys, has_correction=has_correction)}


def bailing_moe_linear(keys: Keys) -> Flags:
    """The flags of Ring-linear: Ling 2 with lightning attention."""
    return _with_lightning(keys, bailing_moe_v2(keys))


def _with_lightning(keys: Keys, flags: Flags, full: Mixer = "attention") -> Flags:
    """Lightning attention in all layers but the last of each group, and but those after the last whole group."""
    for key in ("linear_silu", "use_linear_silu"):
        keys.must_be(key, False)
    keys.must_be("linear_rope", True)
    n, group, head_dim = keys.num_layers, keys.integer("layer_group_size"), flags["head_dim"]
    lightning = Lightning(
        num_heads=keys.integer("num_attention_heads"),
        head_dim=head_dim,
        rotary_dim=flags["rope"].rotary_dim or head_dim,
        num_norm_groups=keys.integer("group_norm_size", 1),
        has_qk_norm=flags["qk_norm"] == "head",
    )

    def layer(i: int, kind: LayerKind) -> LayerKind:
        if (i + 1) % group == 0 or i >= n // group * group:
            return dataclasses.replace(kind, mixer=full)
        return dataclasses.replace(kind, mixer="lightning", slope_scale=1 - i / max(n - 1, 1) + 1e-5)

    layers = tuple(layer(i, kind) for i, kind in enumerate(flags["layers"]))
    return flags | {"layers": layers, "lightning": lightning}


def bailing_hybrid(keys: Keys) -> Flags:
    """The flags of Ling 2.5 or Ling 3, which share the name."""
    if keys.raw.get("architectures") == ["BailingMoeV2_5ForCausalLM"]:
        return _ling_2_5(keys)
    return _ling_3(keys)


def _ling_2_5(keys: Keys) -> Flags:
    """Lightning attention as in Ring-linear, and latent attention, whose heads turn in another width."""
    keys.must_be("full_attention_type", "mla")
    for key in ("rope_scaling", "rope_parameters"):
        keys.must_be(key)
    for key in ("use_bias", "use_qkv_bias"):
        keys.must_be(key, False)
    if keys.num_layers % keys.integer("layer_group_size"):
        raise ConfigError(
            f"{keys.where}: {keys.num_layers} layers are no whole number of groups of {keys.raw['layer_group_size']} "
            "(layer_group_size)"
        )
    flags, latent = _with_lightning(keys, bailing_moe_v2(keys), "latent"), _deepseek(keys)
    local = dataclasses.replace(flags["rope"], rotary_dim=flags["lightning"].rotary_dim)
    return flags | {**latent, "layers": flags["layers"], "local_rope": local}


def _by_kimi_names(keys: Keys) -> Keys:
    """The keys with DeepSeek's names beside those that Kimi Linear has for the same."""
    raw = dict(keys.raw)
    for ours, theirs in (
        ("n_group", "num_expert_group"),
        ("n_routed_experts", "num_experts"),
        ("num_experts_per_tok", "num_experts_per_token"),
        ("n_shared_experts", "num_shared_experts"),
        ("norm_topk_prob", "moe_renormalize"),
        ("max_position_embeddings", "model_max_length"),
    ):
        if raw.get(ours) is None and raw.get(theirs) is not None:
            raw[ours] = raw[theirs]
    return Keys(raw, keys.where)


def kimi_linear(keys: Keys) -> Flags:
    """The flags of Kimi Linear: Kimi delta attention, and in each fourth layer latent attention, which knows no
    positions."""
    keys = _by_kimi_names(keys)
    n, linear = keys.num_layers, dict(keys.raw.get("linear_attn_config") or {})
    keys.must_be("mla_use_nope", True)
    keys.must_be("moe_router_activation_func", "sigmoid")
    if not keys.raw.get("mlp_layer_types") and keys.raw.get("first_k_dense_replace") is None:
        keys = Keys({**keys.raw, "first_k_dense_replace": 1}, keys.where)
    of_linear = Keys({**keys.raw, **{f"linear_{key}": value for key, value in linear.items()}}, keys.where)
    width, heads = of_linear.integer("linear_head_dim", 128), keys.integer("linear_num_heads", 32)
    heads = of_linear.integer("linear_num_heads", heads)
    full = linear.get("full_attn_layers")  # counted from 1
    kinds = keys.kinds(
        [
            "full_attention" if (i + 1 in full if full is not None else i and i % 4 == 0) else "linear_attention"
            for i in range(n)
        ]
    )
    flags = _deepseek(keys)
    layers = (
        dataclasses.replace(kind, mixer="latent" if named == "full_attention" else "delta", has_rope=False)
        for kind, named in zip(flags["layers"], kinds, strict=True)
    )
    latent = flags["latent"]
    return flags | {
        "max_len": keys.integer("max_position_embeddings", 1_048_576),
        "attention_scale": (latent.nope_dim + latent.rope_dim) ** -0.5,
        "layers": tuple(layers),
        "experts": routed(keys, scoring="sigmoid", group_score="top2"),
        "delta": DeltaSizes(
            heads,
            heads,
            width,
            width,
            of_linear.integer("linear_short_conv_kernel_size", of_linear.integer("linear_conv_kernel_dim", 4)),
            by_channel=True,
            gate_rank=width,
            has_wide_rates=True,
        ),
        "names": Names(
            linear_attention="self_attn",
            experts="block_sparse_moe",
            expert_gate="experts.{e}.w1",
            expert_up="experts.{e}.w3",
            expert_down="experts.{e}.w2",
        ),
    }


def _ling_3(keys: Keys) -> Flags:
    """Kimi's delta attention, and latent attention with a gate."""
    keys = _by_kimi_names(keys)
    keys.must_be("architectures", ["BailingMoeV3ForCausalLM"], ["BailingHybridForCausalLM"])
    keys.must_be("gated_attention_proj_granularity_type", "head_wise")
    keys.must_be("no_kda_lora", True)
    keys.must_be("attention_bias", False)
    for key in ("use_mla_nope", "use_nGPT", "value_norm", "up_proj_norm", "scale_router_input", "use_bias"):
        keys.must_be(key, False)
    for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        keys.must_be(key)
    # transformers writes the width of `qk_rope_head_dim` as `head_dim`, and what that was as `linear_head_dim`
    width = keys.integer("linear_head_dim", keys.integer("head_dim", 128))
    flags = _deepseek(keys)
    num_heads = keys.integer("num_attention_heads")
    return flags | {
        "max_len": keys.integer("max_position_embeddings", 2048),
        "latent": dataclasses.replace(flags["latent"], has_gate=True),
        "experts": routed(keys, scoring="sigmoid", group_score="top2"),
        "delta": DeltaSizes(
            num_heads,
            num_heads,
            width,
            width,
            keys.integer("short_conv_kernel_size", 4),
            by_channel=True,
            decay_bound=keys.number("kda_lower_bound", -5.0) if keys.flag("kda_safe_gate", True) else 0.0,
        ),
        "layers": with_delta(keys, flags["layers"], keys.integer("layer_group_size"), full="latent"),
        "names": dataclasses.replace(_BAILING, qkv=""),
    }
