"""The config.json of families with Mamba-2 layers or short convolutions beside attention."""

import dataclasses

from specserve.errors import ConfigError
from specserve.models.config import Experts, LayerKind, MambaSizes, Names
from specserve.models.families.keys import Flags, Keys
from specserve.models.families.latent import routed

_BLOCKS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
_KINDS = {
    "linear_attention": LayerKind("mamba", has_mlp=False),
    "full_attention": LayerKind(has_rope=False, has_mlp=False),
    "moe": LayerKind("none", has_experts=True),
    "mlp": LayerKind("none"),
}
_FORMER = {"mamba": "linear_attention", "attention": "full_attention"}  # names of the blocks
_NO_LIMIT = ([0.0, float("inf")], [0.0, "Infinity"], [0.0, {"__float__": "Infinity"}])


def nemotron_h(keys: Keys) -> Flags:
    """The flags of Nemotron-H and Nemotron 3: Mamba-2, attention without positions, MLPs that are not gated, and
    experts. Time steps have no lower limit, as in the published code."""
    keys.must_be("mlp_hidden_act", "relu2")
    keys.must_be("mamba_hidden_act", "silu")
    for key in ("use_bias", "mamba_proj_bias", "attention_bias", "mlp_bias", "residual_in_fp32"):
        keys.must_be(key, False)
    keys.must_be("sliding_window")
    keys.must_be("time_step_limit", *_NO_LIMIT)
    blocks = _blocks(keys)
    flags: Flags = {
        "num_layers": len(blocks),
        "head_dim": keys.head_dim,
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "activation": "relu2",
        "layers": tuple(_KINDS[block] for block in blocks),
        "mamba": MambaSizes(
            num_heads=keys.integer("mamba_num_heads"),
            head_dim=keys.integer("mamba_head_dim"),
            num_groups=keys.integer("mamba_n_groups", keys.integer("n_groups")),
            state_dim=keys.integer("ssm_state_size"),
            conv_width=keys.integer("mamba_d_conv", keys.integer("conv_kernel", 4)),
            has_conv_bias=keys.flag("mamba_conv_bias", keys.flag("use_conv_bias", True)),
        ),
        "names": Names(
            embedding="backbone.embeddings.weight",
            norm="backbone.norm_f.weight",
            layer="backbone.layers.{i}",
            attention_norm="norm",
            mlp_norm="norm",
            **dict.fromkeys(("attention", "linear_attention", "mlp", "experts"), "mixer"),
            expert_up="experts.{e}.up_proj",
        ),
    }
    if "moe" in blocks:
        experts = routed(keys, scoring="sigmoid", group_score="top2")
        flags["carried"] = LayerKind(has_rope=False, has_experts=True)  # two blocks
        flags["experts"] = dataclasses.replace(
            experts,
            shared_d_ff=keys.integer("moe_shared_expert_intermediate_size", 7688),
            latent_dim=keys.integer("moe_latent_size", 0, least=0),
        )
    return flags


def _blocks(keys: Keys) -> list[str]:
    """Return the kind of each layer: a list, or published as one letter each."""
    stated = keys.raw.get("layers_block_type") or keys.raw.get("layer_types")
    if stated is None:
        stated = [_BLOCKS.get(letter, letter) for letter in keys.raw.get("hybrid_override_pattern") or ""]
    blocks = [_FORMER.get(str(block), str(block)) for block in stated]
    unknown = set(blocks) - _KINDS.keys()
    if unknown or not blocks:
        raise ConfigError(
            f"{keys.where}: hybrid_override_pattern or layers_block_type must name {', '.join(_KINDS)} for each layer"
            + (f", got {', '.join(sorted(unknown))}" if blocks else "")
        )
    return blocks


def lfm2(keys: Keys) -> Flags:
    """The flags of LFM2: short convolutions, and attention in some layers. The width of the MLP is a share of the
    stated one, rounded up."""
    d_ff = keys.integer("block_ff_dim", keys.integer("intermediate_size"))
    if keys.flag("block_auto_adjust_ff_dim", True):
        d_ff, whole = int(keys.positive("block_ffn_dim_multiplier", 1.0) * int(2 * d_ff / 3)), "block_multiple_of"
        d_ff = -(-d_ff // keys.integer(whole, 256)) * keys.integer(whole, 256)
    return _lfm2(keys) | {"d_ff": d_ff}


def lfm2_moe(keys: Keys) -> Flags:
    """The flags of LFM2 with experts, in all layers but the first few."""
    flags, dense = _lfm2(keys), keys.integer("num_dense_layers", 2, least=0)
    layers = (dataclasses.replace(kind, has_experts=i >= dense) for i, kind in enumerate(flags["layers"]))
    experts = Experts(
        num_experts=keys.integer("num_experts"),
        top_k=keys.integer("num_experts_per_tok"),
        d_ff=keys.integer("moe_intermediate_size"),
        scoring="sigmoid",
        renormalize=keys.flag("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", 1.0),
        has_correction=keys.flag("use_expert_bias", True),
    )
    return flags | {"layers": tuple(layers), "experts": experts}


def _lfm2(keys: Keys) -> Flags:
    keys.must_be("conv_bias", False)
    n, attends = keys.num_layers, keys.raw.get("full_attn_idxs")
    kinds = keys.kinds(["full_attention" if attends is None or i in attends else "conv" for i in range(n)])
    if unknown := set(kinds) - {"full_attention", "conv"}:
        raise ConfigError(f"{keys.where}: layer_types must be full_attention or conv, got {', '.join(sorted(unknown))}")
    return {
        "norm_eps": keys.number("norm_eps", 1e-5),
        "qk_norm": "head",
        "tie_embeddings": keys.flag("tie_embedding", keys.flag("tie_word_embeddings", True)),
        "conv_width": keys.integer("conv_L_cache", 3, least=2),
        "layers": tuple(LayerKind("conv" if kind == "conv" else "attention") for kind in kinds),
        "names": Names(
            norm="model.embedding_norm.weight",
            attention_norm="operator_norm",
            mlp_norm="ffn_norm",
            linear_attention="conv",
            o="out_proj",
            q_norm="q_layernorm",
            k_norm="k_layernorm",
            mlp="feed_forward",
            mlp_gate="w1",
            mlp_up="w3",
            mlp_down="w2",
            experts="feed_forward",
            correction="expert_bias",
            expert_gate="experts.{e}.w1",
            expert_up="experts.{e}.w3",
            expert_down="experts.{e}.w2",
        ),
    }
