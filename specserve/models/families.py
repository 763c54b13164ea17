"""The family table: what a config.json's `model_type` means. A family is a row: the flags that its name implies and the
keys that it reads. There is no second forward.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

from specserve.errors import ConfigError
from specserve.models import families_latent
from specserve.models.config import DeltaSizes, Experts, LayerKind, ModelConfig, Names
from specserve.models.family_keys import Flags, Keys


def model_config(raw: Mapping[str, Any], *, dtype: str, where: str = "config.json") -> ModelConfig:
    """Read a Hugging Face config.json. Raises ConfigError for an unknown family or an unsupported feature."""
    known = FAMILIES.keys() | ALIASES.keys()
    if isinstance(text := raw.get("text_config"), Mapping) and raw.get("model_type") not in known:
        raw = {**text, **{key: raw[key] for key in ("tie_word_embeddings",) if key in raw}}
    family = str(raw.get("model_type"))
    if family not in known:
        near = difflib.get_close_matches(family, known, n=1)
        hint = "".join(f"; the nearest is {name!r}" for name in near)
        raise ConfigError(f"{where}: model_type {family!r} is not one of {', '.join((*FAMILIES, *ALIASES))}{hint}")
    row = ALIASES.get(family, family)
    keys = Keys(DEFAULTS.get(row, {}) | dict(raw), where)
    flags = FAMILIES[row](keys)
    num_heads = keys.integer("num_attention_heads")
    head_dim = flags.get("head_dim") or keys.head_dim
    if "activation" not in flags:
        keys.must_be("hidden_act", "silu")
    base: Flags = {
        "num_kv_heads": keys.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "d_ff": keys.integer("intermediate_size"),
        "max_len": keys.integer("max_position_embeddings", 2048),
        "norm_eps": keys.number("rms_norm_eps", 1e-6),
        "tie_embeddings": keys.flag("tie_word_embeddings"),
        "dtype": dtype,
    }
    if "rope" not in flags:
        base["rope"] = keys.rope(head_dim)
    config = ModelConfig(
        family=family,
        vocab_size=keys.integer("vocab_size"),
        d_model=keys.integer("hidden_size"),
        num_layers=keys.num_layers,
        num_heads=num_heads,
        **(base | flags),
    )
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(f"{where}: {config.num_heads} attention heads cannot share {config.num_kv_heads} KV heads")
    return config


def _llama(keys: Keys) -> Flags:
    return {**keys.bias(), "mlp_bias": keys.flag("mlp_bias")}


def _mistral(keys: Keys) -> Flags:
    return {"layers": (LayerKind(window=keys.integer("sliding_window", 0, least=0)),) * keys.num_layers}


def _qwen_windows(keys: Keys, *, alternate: bool = False) -> list[int]:
    """Sliding windows of Qwen, where they are switched on: from layer `max_window_layers` on, or in every second layer
    before it."""
    n, first = keys.num_layers, keys.integer("max_window_layers", 28, least=0)
    if not keys.flag("use_sliding_window"):
        return [0] * n
    window = keys.integer("sliding_window", 0, least=0)
    slides = [i >= first for i in range(n)]
    if alternate:
        slides = [i < first and i % 2 == 0 for i in range(n)]
    kinds = keys.kinds(["sliding_attention" if slide else "" for slide in slides])
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def _qwen2(keys: Keys) -> Flags:
    return {"qkv_bias": True, "layers": tuple(LayerKind(window=window) for window in _qwen_windows(keys))}


def _qwen3(keys: Keys) -> Flags:
    layers = tuple(LayerKind(window=window) for window in _qwen_windows(keys))
    return {"qk_norm": "head", **keys.bias(), "layers": layers}


def _gemma(keys: Keys) -> Flags:
    keys.must_be("hidden_activation", "gelu_pytorch_tanh")
    keys.must_be("use_bidirectional_attention", False)
    return {
        "head_dim": keys.integer("head_dim", 256),
        "tie_embeddings": keys.flag("tie_word_embeddings", True),
        **keys.bias(),
        "activation": "gelu_tanh",
        "norm_offset": True,
        "out_norms": True,
        "embedding_scale": keys.integer("hidden_size") ** 0.5,
        "attention_scale": keys.number("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": keys.number("attn_logit_softcapping", 0.0),
        "logit_softcap": keys.number("final_logit_softcapping", 0.0),
        "names": Names(mlp_norm="pre_feedforward_layernorm"),
    }


def _alternating(keys: Keys, pattern: int) -> list[int]:
    """Return each layer's window: 0 (all tokens) for every `pattern`-th, unless `layer_types` states others."""
    window = keys.integer("sliding_window", 0, least=0)
    kinds = keys.kinds_in_groups("sliding_attention", pattern)
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def _gemma2(keys: Keys) -> Flags:
    return _gemma(keys) | {"layers": tuple(LayerKind(window=w) for w in _alternating(keys, 2))}


def _gemma3(keys: Keys) -> Flags:
    flags = _gemma(keys)
    raw, head_dim = keys.raw, flags["head_dim"]
    nested = raw.get("rope_parameters") or {}
    if "full_attention" in nested or "sliding_attention" in nested:
        full, local = nested.get("full_attention") or {}, nested.get("sliding_attention") or {}
    else:
        full, local = raw.get("rope_scaling") or nested, {}
    full = {"rope_theta": raw.get("rope_theta", 1e6)} | full
    local = {"rope_theta": raw.get("rope_local_base_freq", 1e4)} | local
    windows = _alternating(keys, keys.integer("sliding_window_pattern", 6))
    return flags | {
        "qk_norm": "head",
        "rope": keys.rope(head_dim, {"rope_parameters": full}),
        "local_rope": keys.rope(head_dim, {"rope_parameters": local}),
        "layers": tuple(LayerKind(window=window, is_local=window > 0) for window in windows),
    }


def _glm(keys: Keys) -> Flags:
    head_dim = keys.integer("head_dim", 128)
    return {
        "head_dim": head_dim,
        "qkv_bias": keys.flag("attention_bias", True),
        "rope": dataclasses.replace(keys.rope(head_dim), is_interleaved=True),
        "names": Names(gate_up="gate_up_proj"),
    }


def _glm4(keys: Keys) -> Flags:
    names = Names(
        gate_up="gate_up_proj", attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm"
    )
    return _glm(keys) | {"out_norms": True, "names": names}


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


def _qwen2_moe(keys: Keys) -> Flags:
    return {
        "qkv_bias": keys.flag("qkv_bias", True),
        "layers": _sparse_layers(keys, _qwen_windows(keys, alternate=True)),
        "experts": _qwen_experts(keys, renormalize=False, shared=keys.integer("shared_expert_intermediate_size", 5632)),
        "names": Names(shared="shared_expert"),
    }


def _qwen3_moe(keys: Keys) -> Flags:
    window = 0
    if keys.flag("use_sliding_window"):
        window = keys.integer("sliding_window", 0, least=0)
    return {
        "qk_norm": "head",
        **keys.bias(),
        "layers": _sparse_layers(keys, [window] * keys.num_layers),
        "experts": _qwen_experts(keys, renormalize=False),
    }


_BLOCK_SPARSE = Names(
    experts="block_sparse_moe",
    expert_gate="experts.{e}.w1",
    expert_up="experts.{e}.w3",
    expert_down="experts.{e}.w2",
    correction="e_score_correction_bias",
)


def _mixtral(keys: Keys) -> Flags:
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


def _minimax_m2(keys: Keys) -> Flags:
    keys.must_be("qk_norm_type", "per_layer")
    keys.must_be("scoring_func", "sigmoid")
    flags, has_correction = _mixtral(keys), keys.flag("use_routing_bias", True)
    return flags | {
        "qk_norm": "all" if keys.flag("use_qk_norm", True) else "",
        "layers": (LayerKind(has_experts=True),) * keys.num_layers,
        "experts": dataclasses.replace(flags["experts"], scoring="sigmoid", has_correction=has_correction),
    }


def _gpt_oss(keys: Keys) -> Flags:
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
        "layers": tuple(LayerKind(window=window, has_experts=True) for window in _alternating(keys, 2)),
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


def _glm4_moe(keys: Keys) -> Flags:
    n, dense = keys.num_layers, keys.integer("first_k_dense_replace", 1, least=0)
    return {
        "qkv_bias": keys.flag("attention_bias"),
        "qk_norm": "head" if keys.flag("use_qk_norm") else "",
        "layers": tuple(LayerKind(has_experts=i >= dense) for i in range(n)),
        "experts": families_latent.routed(keys, scoring="sigmoid", group_score="top2"),
    }


def _qwen3_next(keys: Keys) -> Flags:
    layers, interval = _sparse_layers(keys, [0] * keys.num_layers), keys.integer("full_attention_interval", 4)
    return {
        "head_dim": keys.integer("head_dim", 256),
        **keys.bias(),
        "qk_norm": "head",
        "norm_offset": True,
        "has_attention_gate": True,
        "layers": families_latent.with_delta(keys, layers, interval, full="attention"),
        "delta": DeltaSizes(
            num_k_heads=keys.integer("linear_num_key_heads"),
            num_v_heads=keys.integer("linear_num_value_heads"),
            k_dim=keys.integer("linear_key_head_dim"),
            v_dim=keys.integer("linear_value_head_dim"),
            conv_width=keys.integer("linear_conv_kernel_dim", 4),
        ),
        "experts": _qwen_experts(keys, renormalize=True, shared=keys.integer("shared_expert_intermediate_size", 512)),
        "names": Names(shared="shared_expert"),
    }


# The published config.jsons leave these values to transformers' defaults, and nobody else would assume them. A null is
# not a default: it switches a window or a softcap off.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "qwen2": {"sliding_window": 4096},
    "qwen3": {"sliding_window": 4096, "head_dim": 128},
    "gemma2": {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "glm": {"rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5},
    "glm4": {"rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5},
    "mixtral": {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "qwen2_moe": {"sliding_window": 4096},
    "qwen3_moe": {"sliding_window": 4096},
    "gpt_oss": {"sliding_window": 128, "rope_theta": 150_000.0, "rms_norm_eps": 1e-5},
    "glm4_moe": {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": {"rms_norm_eps": 1e-5},
    "minimax_m2": {"rope_theta": 5e6, "head_dim": 128},
    "qwen3_next": {"partial_rotary_factor": 0.25},
    "bailing_hybrid": {"rope_theta": 6e6, "first_k_dense_replace": 2, "layer_group_size": 6},
}

# checkpoints whose model is another family's; what more they hold goes by their own name
ALIASES = {"mimo": "qwen2"}
FAMILIES: dict[str, Callable[[Keys], Flags]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm": _glm,
    "glm4": _glm4,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": families_latent.deepseek_v2,
    "deepseek_v3": families_latent.deepseek_v3,
    "kimi_k2": families_latent.deepseek_v3,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": families_latent.glm4_moe_lite,
    "minimax_m2": _minimax_m2,
    "qwen3_next": _qwen3_next,
    "bailing_moe": families_latent.bailing_moe,
    "bailing_moe_v2": families_latent.bailing_moe_v2,
    "bailing_moe_linear": families_latent.bailing_moe_linear,
    "bailing_hybrid": families_latent.bailing_hybrid,
}
