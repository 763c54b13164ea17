"""The config.json of DeepSeek-V4."""

import dataclasses
from typing import Any

from specserve.errors import ConfigError
from specserve.models.config import Compressed, Experts, LayerKind, Names, Streams
from specserve.models.families.keys import Flags, Keys
from specserve.models.rope import Rope

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATIOS = {0: SLIDING, 4: SPARSE, 128: HEAVY}  # in the spelling of the published config.json


def deepseek_v4(keys: Keys) -> Flags:
    """The flags of DeepSeek-V4: windows, and before them compressed keys; residual streams side by side; in the first
    layers the token alone chooses its experts."""
    for key, value in {"hidden_act": "silu", "swiglu_limit": 10.0, "scoring_func": "sqrtsoftplus"}.items():
        keys.must_be(key, value)
    keys.must_be("norm_topk_prob", True)
    keys.must_be("num_key_value_heads", 1)
    keys.must_be("n_shared_experts", 1)
    for key in ("attention_bias", "mlp_bias"):
        keys.must_be(key, False)
    head_dim, d_ff = keys.integer("head_dim", 512), keys.integer("moe_intermediate_size")
    turning = round(head_dim * keys.number("partial_rotary_factor", 64 / 512))
    if keys.raw.get("partial_rotary_factor") is None:
        turning = keys.integer("qk_rope_head_dim", turning)
    heads, groups, index_dim = (
        keys.integer("num_attention_heads"),
        keys.integer("o_groups", 8),
        keys.integer("index_head_dim", 128),
    )
    if heads % groups or index_dim < turning:
        raise ConfigError(
            f"{keys.where}: o_groups ({groups}) must divide num_attention_heads ({heads}), and index_head_dim "
            f"({index_dim}) have the {turning} channels that turn"
        )
    streams = keys.integer("hc_mult", 4), keys.integer("hc_sinkhorn_iters", 20), keys.number("hc_eps", 1e-6)
    return {
        "head_dim": head_dim,
        "num_kv_heads": 1,
        "d_ff": d_ff,
        **_ropes(keys, turning),
        "layers": _layers(keys),
        "carried": LayerKind(
            "compressed", has_experts=True, has_indexer=False, window=keys.integer("sliding_window", 128), is_local=True
        ),
        "activation": "bounded_swiglu",
        "has_float32_norms": True,
        "compressed": Compressed(
            q_rank=keys.integer("q_lora_rank"),
            rope_dim=turning,
            window=keys.integer("sliding_window", 128),
            num_groups=groups,
            o_rank=keys.integer("o_lora_rank", 1024),
            index_heads=keys.integer("index_n_heads", 64),
            index_dim=index_dim,
            index_topk=keys.integer("index_topk", 512),
        ),
        "experts": Experts(
            num_experts=keys.integer("n_routed_experts"),
            top_k=keys.integer("num_experts_per_tok"),
            d_ff=d_ff,
            scoring="sqrt_softplus",
            renormalize=True,
            scale=keys.number("routed_scaling_factor", 1.5),
            has_correction=True,
            shared_d_ff=d_ff,
        ),
        "streams": Streams(*streams, has_head=True),
        "names": _NAMES,
    }


_NAMES = Names(
    head="head.weight",
    k_norm="norm",
    attention="attn",
    attention_norm="attn_norm",
    mlp_norm="ffn_norm",
    experts="ffn",
    correction="gate.bias",
    expert_gate="experts.{e}.w1",
    expert_up="experts.{e}.w3",
    expert_down="experts.{e}.w2",
    mlp_gate="w1",
    mlp_up="w3",
    mlp_down="w2",
)


_OLDER = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}  # their rates in keys of their own


def _layers(keys: Keys) -> tuple[LayerKind, ...]:
    n, window = keys.num_layers, keys.integer("sliding_window", 128)
    stated = dict(keys.raw.get("compress_rates") or {})
    stated |= {name: keys.raw[key] for name, key in _OLDER.items() if keys.raw.get(key) is not None}
    if foreign := sorted(map(str, stated.keys() - _OLDER.keys())):
        raise ConfigError(f"{keys.where}: compress_rates are of {SPARSE} and {HEAVY}; got {', '.join(foreign)} too")
    own = Keys(stated, keys.where)
    rates = {SPARSE: own.integer(SPARSE, 4), HEAVY: own.integer(HEAVY, 128)}
    ratios = keys.integers("compress_ratios", n)
    default = ([HEAVY] * 2 + [HEAVY, SPARSE] * n)[:n]
    kinds = keys.kinds(default if ratios is None else [_RATIOS.get(ratio, str(ratio)) for ratio in ratios])
    hashed = keys.strings("mlp_layer_types", n)
    if hashed is None:
        count = keys.integer("num_hash_layers", 3, least=0)
        hashed = ["hash_moe" if i < count else "moe" for i in range(n)]
    if not {*kinds} <= {*_RATIOS.values()} or not {*hashed} <= {"hash_moe", "moe"}:
        raise ConfigError(
            f"{keys.where}: layer_types (or compress_ratios) must name {', '.join(_RATIOS.values())}, and "
            f"mlp_layer_types hash_moe or moe; got {kinds} and {hashed}"
        )

    def layer(kind: str, mlp: str) -> LayerKind:
        own = LayerKind("compressed", has_experts=True, is_hashed=mlp == "hash_moe", has_indexer=kind == SPARSE)
        if kind == SLIDING:
            return dataclasses.replace(own, window=window, is_local=True)
        return dataclasses.replace(own, pool=rates[kind])

    return tuple(map(layer, kinds, hashed))


def _ropes(keys: Keys, turning: int) -> dict[str, Rope]:
    """Return the rotary embeddings of compressed layers and of those of windows alone, which a scaling leaves out."""
    stated = dict(keys.raw.get("rope_parameters") or keys.raw.get("rope_scaling") or {})
    compress, main = stated.get("compress"), stated.get("main")
    if compress is None or main is None:
        compress = {**stated, "rope_theta": keys.number("compress_rope_theta", 160_000.0)}
        main = {"rope_theta": keys.number("rope_theta", 10_000.0)}
        if compress.get("rope_type", compress.get("type")) == "yarn":  # it turns and does not stretch
            compress = {"attention_factor": 1.0, **compress}

    def read(given: dict[str, Any]) -> Rope:
        whole = {**given, "partial_rotary_factor": 1.0}
        rope = keys.rope(turning, {"rope_parameters": whole, "rotary_dim": None})
        return dataclasses.replace(rope, rotary_dim=turning, is_interleaved=True)

    return {"rope": read(compress), "local_rope": read(main)}
