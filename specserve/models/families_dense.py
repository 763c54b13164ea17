"""The config.json of dense families: every layer attends and has one MLP."""

import dataclasses

from specserve.models.config import LayerKind, Names
from specserve.models.family_keys import Flags, Keys


def llama(keys: Keys) -> Flags:
    """The flags of Llama."""
    return {**keys.bias(), "mlp_bias": keys.flag("mlp_bias")}


def mistral(keys: Keys) -> Flags:
    """The flags of Mistral."""
    return {"layers": (LayerKind(window=keys.integer("sliding_window", 0, least=0)),) * keys.num_layers}


def qwen_windows(keys: Keys, *, alternate: bool = False) -> list[int]:
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


def qwen2(keys: Keys) -> Flags:
    """The flags of Qwen2 and Qwen2.5."""
    return {"qkv_bias": True, "layers": tuple(LayerKind(window=window) for window in qwen_windows(keys))}


def qwen3(keys: Keys) -> Flags:
    """The flags of Qwen3."""
    layers = tuple(LayerKind(window=window) for window in qwen_windows(keys))
    return {"qk_norm": "head", **keys.bias(), "layers": layers}


def qwen3_vl(keys: Keys) -> Flags:
    """The flags of the text model of Qwen3-VL, which has no windows."""
    return {"qk_norm": "head", **keys.bias()}


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


def alternating(keys: Keys, pattern: int) -> list[int]:
    """Return each layer's window: 0 (all tokens) for every `pattern`-th, unless `layer_types` states others."""
    window = keys.integer("sliding_window", 0, least=0)
    kinds = keys.kinds_in_groups("sliding_attention", pattern)
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def gemma2(keys: Keys) -> Flags:
    """The flags of Gemma 2."""
    return _gemma(keys) | {"layers": tuple(LayerKind(window=w) for w in alternating(keys, 2))}


def gemma3(keys: Keys) -> Flags:
    """The flags of Gemma 3's text model."""
    flags = _gemma(keys)
    raw, head_dim = keys.raw, flags["head_dim"]
    nested = raw.get("rope_parameters") or {}
    if "full_attention" in nested or "sliding_attention" in nested:
        full, local = nested.get("full_attention") or {}, nested.get("sliding_attention") or {}
    else:
        full, local = raw.get("rope_scaling") or nested, {}
    full = {"rope_theta": raw.get("rope_theta", 1e6)} | full
    local = {"rope_theta": raw.get("rope_local_base_freq", 1e4)} | local
    windows = alternating(keys, keys.integer("sliding_window_pattern", 6))
    return flags | {
        "qk_norm": "head",
        "rope": keys.rope(head_dim, {"rope_parameters": full}),
        "local_rope": keys.rope(head_dim, {"rope_parameters": local}),
        "layers": tuple(LayerKind(window=window, is_local=window > 0) for window in windows),
    }


def glm(keys: Keys) -> Flags:
    """The flags of GLM-4."""
    head_dim = keys.integer("head_dim", 128)
    return {
        "head_dim": head_dim,
        "qkv_bias": keys.flag("attention_bias", True),
        "rope": dataclasses.replace(keys.rope(head_dim), is_interleaved=True),
        "names": Names(gate_up="gate_up_proj"),
    }


def glm4(keys: Keys) -> Flags:
    """The flags of GLM-4-0414."""
    names = Names(
        gate_up="gate_up_proj", attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm"
    )
    return glm(keys) | {"out_norms": True, "names": names}
