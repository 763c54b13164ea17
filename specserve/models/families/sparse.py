"""The config.json of families with experts in layers that attend, or keep the state of a delta rule."""

import dataclasses

from specserve.errors import ConfigError
from specserve.models.config import BlockIndex, DeltaSizes, Experts, HashedTokens, LayerKind, Names, Streams
from specserve.models.families import latent
from specserve.models.families.dense import alternating, qwen_windows, turned_layers
from specserve.models.families.keys import Flags, Keys
from specserve.models.rope import Rope


def _sparse_layers(keys: Keys, windows: list[int]) -> tuple[LayerKind, ...]:
    """Make the layers with these windows. By Qwen's rule every `decoder_sparse_step`-th one has experts, but not those
    of `mlp_only_layers`."""
    step, dense = keys.integer("decoder_sparse_step", 1), keys.raw.get("mlp_only_layers") or []
    return tuple(
        LayerKind(window=window, has_experts=i not in dense and (i + 1) % step == 0) for i, window in enumerate(windows)
    )


def _qwen_experts(keys: Keys, *, renormalize: bool, shared: int = 0) -> Experts:
    # published as `num_experts`; transformers writes Qwen3-MoE's as `num_local_experts`
    name = "num_local_experts" if "num_local_experts" in keys.raw else "num_experts"
    return Experts(
        num_experts=keys.integer(name),
        top_k=keys.integer("num_experts_per_tok"),
        d_ff=keys.integer("moe_intermediate_size"),
        renormalize=keys.flag("norm_topk_prob", renormalize),
        shared_d_ff=shared,
        has_shared_gate=shared > 0,
    )


def qwen2_moe(keys: Keys) -> Flags:
    """The flags of Qwen1.5-MoE and Qwen2-MoE."""
    return {
        "qkv_bias": keys.flag("qkv_bias", True),
        "layers": _sparse_layers(keys, qwen_windows(keys, alternate=True)),
        "experts": _qwen_experts(keys, renormalize=False, shared=keys.integer("shared_expert_intermediate_size", 5632)),
        "names": Names(shared="shared_expert"),
    }


def qwen3_moe(keys: Keys) -> Flags:
    """The flags of Qwen3-MoE."""
    window = 0
    if keys.flag("use_sliding_window"):
        window = keys.integer("sliding_window", 0, least=0)
    return {
        "qk_norm": "head",
        **keys.bias(),
        "layers": _sparse_layers(keys, [window] * keys.num_layers),
        "experts": _qwen_experts(keys, renormalize=False),
    }


def qwen3_vl_moe(keys: Keys) -> Flags:
    """The flags of the text model of Qwen3-VL-MoE."""
    return {
        "qk_norm": "head",
        **keys.bias(),
        "layers": _sparse_layers(keys, [0] * keys.num_layers),
        "experts": _qwen_experts(keys, renormalize=True),
        "names": Names(stacked_experts="inputs first"),
    }


_BLOCK_SPARSE = Names(
    experts="block_sparse_moe",
    expert_gate="experts.{e}.w1",
    expert_up="experts.{e}.w3",
    expert_down="experts.{e}.w2",
    correction="e_score_correction_bias",
)


def mixtral(keys: Keys) -> Flags:
    """The flags of Mixtral."""
    window = keys.integer("sliding_window", 0, least=0)
    return {
        "layers": (LayerKind(window=window, has_experts=True),) * keys.num_layers,
        "experts": Experts(
            num_experts=keys.integer("num_local_experts"),
            top_k=keys.integer("num_experts_per_tok"),
            d_ff=keys.integer("intermediate_size"),
            renormalize=True,
        ),
        "names": _BLOCK_SPARSE,
    }


def minimax_m2(keys: Keys) -> Flags:
    """The flags of MiniMax-M2."""
    keys.must_be("qk_norm_type", "per_layer")
    keys.must_be("scoring_func", "sigmoid")
    flags, has_correction = mixtral(keys), keys.flag("use_routing_bias", True)
    return flags | {
        "qk_norm": "all" if keys.flag("use_qk_norm", True) else "",
        "layers": (LayerKind(has_experts=True),) * keys.num_layers,
        "experts": dataclasses.replace(flags["experts"], scoring="sigmoid", has_correction=has_correction),
    }


def minimax_m3(keys: Keys) -> Flags:
    """The flags of the text model of MiniMax-M3. What it is published with, and what transformers writes, differ in the
    names of the keys."""
    n, kv_heads, head_dim = keys.num_layers, keys.integer("num_key_value_heads"), keys.integer("head_dim")
    for key, value in _MINIMAX_M3.items():
        keys.must_be(key, *value)
    published = keys.raw.get("sparse_attention_config") or {}
    if not isinstance(published, dict) or published.keys() - _MSA.keys():
        raise ConfigError(f"{keys.where}: sparse_attention_config must have no other keys than {', '.join(_MSA)}")
    index = Keys({**keys.raw, **{_MSA[key] or key: value for key, value in published.items()}}, keys.where)
    index.must_be("sparse_score_type", "max")
    index.must_be("sparse_init_block", 0)
    index.must_be("use_sparse_attention", True)
    index.must_be("index_n_heads", kv_heads)
    chosen = index.integers("sparse_attention_freq", n) or [0] * n
    if kinds := keys.strings("layer_types", n):
        chosen = [_choice(keys, "layer_types", kind, "full_attention", "minimax_m3_sparse") for kind in kinds]
    lost = index.strings("sparse_disable_index_value", n) or ["1"] * n
    if any(has and drops not in ("1", "True") for has, drops in zip(chosen, lost, strict=True)):
        raise ConfigError(f"{keys.where}: sparse_disable_index_value must be 1 in layers whose attention is sparse")
    sparse = keys.integers("moe_layer_freq", n) or [1] * n
    if types := keys.strings("mlp_layer_types", n):
        sparse = [_choice(keys, "mlp_layer_types", kind, "dense", "sparse") for kind in types]
    blocks = BlockIndex(
        num_heads=kv_heads,
        dim=index.integer("index_head_dim", 128),
        size=index.integer("index_block_size", 128),
        top=index.integer("index_topk_blocks", 16),
        local=index.integer("index_local_blocks", 1, least=0),
    )
    rope = keys.rope(head_dim, {"rotary_dim": None})
    turned = rope.rotary_dim or head_dim
    if blocks.dim < turned or blocks.local > blocks.top:
        raise ConfigError(
            f"{keys.where}: index_head_dim {blocks.dim} must have the {turned} channels that turn, "
            f"and index_topk_blocks {blocks.top} the {blocks.local} index_local_blocks"
        )
    return {
        "rope": rope,
        "qk_norm": "head",
        "norm_offset": True,
        "activation": "clamped_swiglu",
        "d_ff": keys.integer("dense_intermediate_size", 12_288),
        "layers": tuple(
            LayerKind(has_experts=bool(has), has_indexer=bool(picks)) for has, picks in zip(sparse, chosen, strict=True)
        ),
        "block_index": blocks if any(chosen) else None,
        "experts": Experts(
            num_experts=keys.integer("num_local_experts", 128),
            top_k=keys.integer("num_experts_per_tok", 4),
            d_ff=keys.integer("intermediate_size", 3072),
            scoring="sigmoid",
            renormalize=True,
            scale=keys.number("routed_scaling_factor", 2.0),
            has_correction=True,
            shared_d_ff=keys.integer("shared_intermediate_size", 3072),
        ),
        "names": _BLOCK_SPARSE,
    }


_MINIMAX_M3: dict[str, tuple[object, ...]] = {  # the only values that are computed
    "hidden_act": ("silu", "swigluoai"),
    "swiglu_alpha": (1.702,),
    "swiglu_limit": (7.0,),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_head",),
    "use_gemma_norm": (True,),
    "attention_output_gate": (False,),
    "n_shared_experts": (1,),
}
_MSA = {  # the keys of `sparse_attention_config`, and transformers' names of them
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
    **dict.fromkeys(("use_sparse_attention", "sparse_score_type", "sparse_init_block"), ""),
    **dict.fromkeys(("sparse_disable_index_value", "sparse_attention_freq"), ""),
}


def _choice(keys: Keys, key: str, kind: str, no: str, yes: str) -> int:
    if kind not in (no, yes):
        raise ConfigError(f"{keys.where}: {key} must list {no} or {yes}, got {kind}")
    return int(kind == yes)


def llama4(keys: Keys) -> Flags:
    """The flags of the text model of Llama 4, for as many tokens as one of its chunks has: so far all of a chunk see
    each other. Layers that know positions have norms without weights, and in the others queries grow."""
    keys.must_be("num_experts_per_tok", 1)
    n, has_rope, step = keys.num_layers, turned_layers(keys), keys.integer("interleave_moe_layer_step", 1)
    sparse = keys.raw.get("moe_layers")
    if sparse is None:
        sparse = range(step - 1, n, step)
    grows, d_ff = keys.flag("attn_temperature_tuning", True), keys.integer("intermediate_size")
    length = keys.integer("max_position_embeddings", 131_072)
    if "chunked_attention" in keys.kinds(["chunked_attention"]):
        length = min(length, keys.integer("attention_chunk_size", length))
    return {
        **keys.bias(),
        "max_len": length,
        "d_ff": keys.integer("intermediate_size_mlp", 16_384),
        "rope": dataclasses.replace(keys.rope(keys.head_dim), is_interleaved=True),
        "has_unit_norms": keys.flag("use_qk_norm", True),
        "query_growth": keys.number("attn_scale", 0.1) if grows else 0.0,
        "query_span": keys.integer("floor_scale", 8192) if grows else 0,
        "query_shift": int(grows),
        "layers": tuple(
            LayerKind(has_rope=has, has_growth=grows and not has, has_experts=i in sparse)
            for i, has in enumerate(has_rope)
        ),
        "experts": Experts(
            num_experts=keys.integer("num_local_experts", 16),
            top_k=1,
            d_ff=d_ff,
            scoring="sigmoid",
            scales_input=True,
            shared_d_ff=d_ff,
        ),
        "names": Names(
            mlp="feed_forward",
            experts="feed_forward",
            router="router",
            shared="shared_expert",
            stacked_experts="inputs first",
        ),
    }


def gpt_oss(keys: Keys) -> Flags:
    """The flags of GPT-OSS."""
    yarn = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    stated = keys.raw.get("rope_parameters") or keys.raw.get("rope_scaling") or yarn
    head_dim = keys.integer("head_dim", 64)
    keys.must_be("hidden_act", "silu")
    keys.must_be("swiglu_alpha", 1.702)
    keys.must_be("swiglu_limit", 7.0)
    return {
        "head_dim": head_dim,
        **keys.bias(True),
        "rope": keys.rope(head_dim, {"rope_parameters": stated}),
        "has_sinks": True,
        "activation": "clamped_swiglu",
        "layers": tuple(LayerKind(window=window, has_experts=True) for window in alternating(keys, 2)),
        "experts": Experts(
            num_experts=keys.integer("num_local_experts"),
            top_k=keys.integer("num_experts_per_tok", 4),
            d_ff=keys.integer("intermediate_size"),
            scoring="softmax_of_top",
            has_router_bias=True,
            has_bias=True,
        ),
        "names": Names(router="router", gate_up="experts.gate_up_proj", expert_down="experts.down_proj"),
    }


def mimo_v2_flash(keys: Keys) -> Flags:
    """The flags of MiMo-V2-Flash: values of fewer channels than keys, and windows, sinks and more KV heads in the
    layers between the first and each sixth. The layer of multi-token prediction that checkpoints carry is of their
    kind, with an MLP."""
    raw, n, v_dim = keys.raw, keys.num_layers, keys.integer("v_head_dim")
    keys.must_be("topk_method", "noaux_tc")
    keys.must_be("scoring_func", "sigmoid")
    for key in ("head_dim", "v_head_dim", "num_attention_heads"):
        keys.must_be(f"swa_{key}", raw[key])
    keys.must_be("add_swa_attention_sink_bias", True)
    keys.must_be("add_full_attention_sink_bias", False)
    keys.must_be("n_shared_experts", 0)
    window = keys.integer("sliding_window_size", keys.integer("sliding_window") - 1) + 1
    slides = keys.integers("hybrid_layer_pattern", n) or [int(i > 0 and (i + 1) % 6 > 0) for i in range(n)]
    kinds = keys.kinds(["sliding_attention" if slide else "full_attention" for slide in slides])
    sparse = keys.integers("moe_layer_freq", n) or [int(i > 0) for i in range(n)]
    if types := keys.strings("mlp_layer_types", n):
        sparse = [int(kind == "sparse") for kind in types]
    kv_heads = keys.integer("swa_num_key_value_heads", 2 * keys.integer("num_key_value_heads"))
    slid = LayerKind(window=window, is_local=True, num_kv_heads=kv_heads)
    of_kind = {"full_attention": LayerKind(has_sinks=False), "sliding_attention": slid}
    return {
        "v_dim": v_dim,
        "value_scale": keys.number("attention_value_scale", 1.0),
        "norm_eps": keys.number("rms_norm_eps", keys.number("layernorm_epsilon", 1e-5)),
        "qkv_bias": keys.flag("attention_bias"),
        "has_sinks": True,
        "rope": _mimo_rope(keys, "full_attention", "rope_theta", 5e6),
        "local_rope": _mimo_rope(keys, "sliding_attention", "swa_rope_theta", 1e4),
        "layers": tuple(
            dataclasses.replace(of_kind[kind], has_experts=bool(has)) for kind, has in zip(kinds, sparse, strict=True)
        ),
        "carried": slid,
        "experts": latent.routed(keys, scoring="sigmoid", group_score="top2"),
        "names": Names(sinks="attention_sink_bias"),
    }


def _mimo_rope(keys: Keys, kind: str, theta_key: str, theta: float) -> Rope:
    """The rotary settings of layers of a kind: stated for each, or published as two bases and one share of a head."""
    nested = (keys.raw.get("rope_parameters") or {}).get(kind) or {}
    share = nested.get("partial_rotary_factor", keys.number("partial_rotary_factor", 0.334))
    flat = {"rope_theta": keys.number(theta_key, theta), "partial_rotary_factor": share}
    return keys.rope(keys.head_dim, {"rope_parameters": flat | nested})


def glm4_moe(keys: Keys) -> Flags:
    """The flags of GLM-4.5 to 4.7."""
    n, dense = keys.num_layers, keys.integer("first_k_dense_replace", 1, least=0)
    return {
        "qkv_bias": keys.flag("attention_bias"),
        "qk_norm": "head" if keys.flag("use_qk_norm") else "",
        "layers": tuple(LayerKind(has_experts=i >= dense) for i in range(n)),
        "experts": latent.routed(keys, scoring="sigmoid", group_score="top2"),
    }


def _qwen_delta(keys: Keys, layers: tuple[LayerKind, ...], names: Names) -> Flags:
    """Return what Qwen3-Next and Qwen3.5 share: gated delta-nets, and attention behind a gate in each fourth layer."""
    interval = keys.integer("full_attention_interval", 4)
    return {
        "head_dim": keys.integer("head_dim", 256),
        **keys.bias(),
        "qk_norm": "head",
        "norm_offset": True,
        "has_attention_gate": True,
        "layers": latent.with_delta(keys, layers, interval, full="attention"),
        "delta": DeltaSizes(
            num_k_heads=keys.integer("linear_num_key_heads"),
            num_v_heads=keys.integer("linear_num_value_heads"),
            k_dim=keys.integer("linear_key_head_dim"),
            v_dim=keys.integer("linear_value_head_dim"),
            conv_width=keys.integer("linear_conv_kernel_dim", 4),
        ),
        "names": names,
    }


def qwen3_next(keys: Keys) -> Flags:
    """The flags of Qwen3-Next."""
    shared = keys.integer("shared_expert_intermediate_size", 512)
    return _qwen_delta(keys, _sparse_layers(keys, [0] * keys.num_layers), Names(shared="shared_expert")) | {
        "experts": _qwen_experts(keys, renormalize=True, shared=shared)
    }


def qwen3_5(keys: Keys) -> Flags:
    """The flags of the text model of Qwen3.5 to 3.8."""
    keys.must_be("attn_output_gate", True)
    keys.must_be("output_gate_type", "swish")
    return _qwen_delta(keys, (LayerKind(),) * keys.num_layers, Names(delta_qkvz=""))


def qwen3_5_moe(keys: Keys) -> Flags:
    """The flags of the same with experts in every layer. A draft head of the same width as what a token passes is as
    wide as its experts together."""
    keys.must_be("norm_topk_prob", True)
    keys.must_be("decoder_sparse_step", 1)
    keys.must_be("mlp_only_layers", [])
    names = Names(delta_qkvz="", shared="shared_expert", stacked_experts="outputs first")
    experts = _qwen_experts(keys, renormalize=True, shared=keys.integer("shared_expert_intermediate_size", 512))
    return qwen3_5(keys) | {
        "d_ff": experts.top_k * experts.d_ff + experts.shared_d_ff,
        "layers": tuple(dataclasses.replace(kind, has_experts=True) for kind in qwen3_5(keys)["layers"]),
        "experts": experts,
        "names": names,
    }


def qwen4_exp(keys: Keys) -> Flags:
    """The flags of the text model of Qwen3.8-Flash-Next: the layers of Qwen3.5 with experts over several residual
    streams; an indexer in those that attend; embeddings of the last tokens together in some of the others."""
    n, streams = keys.num_layers, keys.integer("hc_count", 4, least=2)
    keys.must_be("norm_topk_prob", True)
    keys.must_be("indexer_kv_heads", 1)
    keys.must_be("output_gate_type", "silu", "sigmoid")
    names = Names(
        norm="model.hyper_connection_mixer.hc_norm.weight",
        delta_qkvz="",
        attention_norm="attn_hyper_connection.hc_norm",
        mlp_norm="mlp_hyper_connection.hc_norm",
        shared="shared_expert",
        stacked_experts="outputs first",
    )
    shared = keys.integer("shared_expert_intermediate_size", 512)
    experts = _qwen_experts(keys, renormalize=True, shared=shared)
    flags = _qwen_delta(keys, (LayerKind(has_experts=True),) * n, names)
    kinds = keys.kinds_in_groups("linear_attention", keys.integer("full_attention_interval", 4))
    if others := {*kinds} - {"linear_attention", "full_attention", "indexed_attention", "qwen_sparse_attention"}:
        raise ConfigError(f"{keys.where}: layer_types must list linear_attention or full_attention, got {min(others)}")
    size, budget = keys.integer("indexer_compress_ratio"), keys.integer("indexer_budget")
    index = BlockIndex(keys.integer("indexer_n_heads"), keys.integer("indexer_head_dim"), size, budget // size)
    turned = keys.rope(flags["head_dim"]).rotary_dim or flags["head_dim"]
    if budget % size or index.dim < turned:
        raise ConfigError(
            f"{keys.where}: indexer_budget {budget} must be a multiple of indexer_compress_ratio {size}, and "
            f"indexer_head_dim {index.dim} no less than the {turned} channels that turn"
        )
    layers, hashing = list(flags["layers"]), sorted({*(keys.raw.get("ple_layer_ids") or [])})
    for place, number in enumerate(hashing):  # counted from 1
        if not isinstance(number, int) or not 0 < number <= n or layers[number - 1].mixer != "delta":
            raise ConfigError(f"{keys.where}: ple_layer_ids must number layers of linear attention, got {number!r}")
        layers[number - 1] = dataclasses.replace(layers[number - 1], hashed=place)
    sigmoid = keys.raw.get("output_gate_type") == "sigmoid"
    return flags | {
        "d_ff": experts.top_k * experts.d_ff + experts.shared_d_ff,
        "layers": tuple(layers),
        "carried": LayerKind(has_experts=True),
        "experts": experts,
        "delta": dataclasses.replace(flags["delta"], has_sigmoid_gate=sigmoid),
        "streams": Streams(streams, rank=keys.integer("hc_lowrank", 320)),
        "block_index": dataclasses.replace(index, pools_keys=True),
        "hashed": _hashed(keys) if hashing else None,
    }


def _hashed(keys: Keys) -> HashedTokens:
    eos = keys.raw.get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if not isinstance(eos, int):
        raise ConfigError(f"{keys.where}: eos_token_id must be a token, or several, as layers that hash tokens need it")
    sizes = HashedTokens(
        size=keys.integer("ngram_size", 3, least=2),
        heads_of_each=keys.integer("heads_per_ngram", 8),
        dim=keys.integer("ple_embed_dim", keys.integer("hidden_size")),
        base=keys.integer("ngram_vocab_size_base", 20_000_000),
        multiple=keys.integer("make_ngram_vocab_size_divisible_by", 128),
        parts=keys.integer("split_ngram_parts", 512),
        seed=keys.integer("seed", 1234, least=0),
        eos=eos,
        conv_width=keys.integer("ple_conv_kernel_size", 4),
    )
    if sizes.dim % sizes.num_heads or sizes.multiple % sizes.parts or sizes.base > 1 << 27:
        raise ConfigError(
            f"{keys.where}: ple_embed_dim {sizes.dim} must be a multiple of {sizes.num_heads} heads, "
            f"make_ngram_vocab_size_divisible_by {sizes.multiple} of split_ngram_parts {sizes.parts}, and "
            f"ngram_vocab_size_base {sizes.base} at most {1 << 27}"
        )
    return sizes
