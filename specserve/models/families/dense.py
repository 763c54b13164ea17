"""The config.json of dense families: every layer attends and has one MLP."""

import dataclasses

from specserve.errors import ConfigError
from specserve.models.config import LayerKind, Names
from specserve.models.families.keys import Flags, Keys
from specserve.models.rope import Rope


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


def phi3(keys: Keys) -> Flags:
    """The flags of Phi-3 and Phi-4: one matrix for queries, keys and values, one for gate and up."""
    keys.must_be("attention_bias", False)
    stated = dict(keys.raw.get("rope_parameters") or keys.raw.get("rope_scaling") or {})
    kind = stated.pop("type", None)
    stated.setdefault("rope_type", kind or "default")
    if stated["rope_type"] in ("su", "yarn"):  # earlier names of the same
        stated["rope_type"] = "longrope"
    window = keys.integer("sliding_window", 0, least=0)
    return {
        "rope": keys.rope(keys.head_dim, {"rope_parameters": stated}),
        "layers": (LayerKind(window=window),) * keys.num_layers,
        "names": Names(qkv="qkv_proj", gate_up="gate_up_proj"),
    }


def turned_layers(keys: Keys) -> list[bool]:
    """Return which layers know positions: those with a 1 in `no_rope_layers`, or all but each fourth."""
    if keys.raw.get("no_rope_layers"):
        return [flag != 0 for flag in keys.integers("no_rope_layers", keys.num_layers) or []]
    interval = keys.integer("no_rope_layer_interval", 4)
    return [bool((i + 1) % interval) for i in range(keys.num_layers)]


def smollm3(keys: Keys) -> Flags:
    """The flags of SmolLM3: each fourth layer knows no positions."""
    has_rope = turned_layers(keys)
    window = keys.integer("sliding_window", 0, least=0) if keys.flag("use_sliding_window") else 0
    kinds = keys.kinds(["full_attention" if has or not window else "sliding_attention" for has in has_rope])
    layers = (
        LayerKind(window=window if kind == "sliding_attention" else 0, has_rope=has)
        for kind, has in zip(kinds, has_rope, strict=True)
    )
    return llama(keys) | {"layers": tuple(layers)}


def seed_oss(keys: Keys) -> Flags:
    """The flags of Seed-OSS."""
    return {
        "qkv_bias": keys.flag("attention_bias", True),
        "o_bias": keys.flag("attention_out_bias"),
        "mlp_bias": keys.flag("mlp_bias"),
    }


def ernie4_5(keys: Keys) -> Flags:
    """The flags of the dense models of ERNIE 4.5, whose heads turn by neighbours."""
    head_dim, has_bias = keys.integer("head_dim", 128), keys.flag("use_bias")
    return {
        "head_dim": head_dim,
        "rope": dataclasses.replace(keys.rope(head_dim), is_interleaved=True),
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), has_bias),
    }


def granite(keys: Keys) -> Flags:
    """The flags of Granite 3 and 4's dense models: four multipliers."""
    return llama(keys) | {
        "embedding_scale": keys.number("embedding_multiplier", 1.0),
        "attention_scale": keys.number("attention_multiplier", 1.0),
        "residual_scale": keys.number("residual_multiplier", 1.0),
        "logit_scale": 1 / keys.positive("logits_scaling", 1.0),
    }


_AFTER = Names(attention_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm")


def olmo3(keys: Keys) -> Flags:
    """The flags of OLMo 3: norms after attention and MLP alone, windows in three layers of four, which turn by plain
    rotary embeddings."""
    raw, head_dim, windows = keys.raw, keys.head_dim, alternating(keys, 4)
    nested = raw.get("rope_parameters") or {}
    if "full_attention" in nested or "sliding_attention" in nested:
        full, local = nested.get("full_attention") or {}, nested.get("sliding_attention") or {}
    else:
        full, local = raw.get("rope_scaling") or nested, {"rope_theta": nested.get("rope_theta")}
    theta = raw.get("rope_theta")
    full, local = (
        {"rope_theta": theta} | {key: value for key, value in each.items() if value is not None}
        for each in (full, local)
    )
    return {
        **keys.bias(),
        "qk_norm": "all",
        "in_norms": False,
        "out_norms": True,
        "rope": keys.rope(head_dim, {"rope_parameters": full}),
        "local_rope": keys.rope(head_dim, {"rope_parameters": local}),
        "layers": tuple(LayerKind(window=window, is_local=window > 0) for window in windows),
        "names": _AFTER,
    }


def exaone4(keys: Keys) -> Flags:
    """The flags of EXAONE 4: norms after attention and MLP alone. Where there are windows, the layers without one know
    no positions."""
    keys.must_be("attention_bias", False)
    window, n = keys.integer("sliding_window", 0, least=0), keys.num_layers
    pattern = keys.raw.get("sliding_window_pattern", 4)
    keys.must_be("sliding_window_pattern", pattern if isinstance(pattern, int) else "LLLG")
    size = len(pattern) if isinstance(pattern, str) else keys.integer("sliding_window_pattern", 4, least=0)
    kinds = (
        keys.kinds(["full_attention"] * n) if not (window and size) else keys.kinds_in_groups("sliding_attention", size)
    )
    layers = (
        LayerKind(window=window, has_rope=True) if kind == "sliding_attention" else LayerKind(has_rope=not window)
        for kind in kinds
    )
    return {"qk_norm": "head", "in_norms": False, "out_norms": True, "layers": tuple(layers), "names": _AFTER}


def hunyuan(keys: Keys) -> Flags:
    """The flags of the dense models of Hunyuan: the norms of queries and keys come after the turn. A fixed `alpha`
    stretches the rotary embedding's base."""
    keys.must_be("use_qk_norm", True)
    for key in ("use_cla", "mlp_bias"):
        keys.must_be(key, False)
    rope, stated = keys.rope(keys.head_dim), keys.raw.get("rope_parameters") or keys.raw.get("rope_scaling") or {}
    alpha, dim = stated.get("alpha"), keys.head_dim
    if rope.kind == "dynamic" and alpha:
        rope = Rope(rope.theta * float(alpha) ** (dim / (dim - 2)))
    return {
        **keys.bias(),
        "rope": rope,
        "qk_norm": "head",
        "norms_turned": True,
        "names": Names(q_norm="query_layernorm", k_norm="key_layernorm"),
    }


def ministral3(keys: Keys) -> Flags:
    """The flags of Ministral 3: queries grow with the logarithm of their position, as in Llama 4."""
    keys.must_be("attention_bias", False)
    window, growth = keys.integer("sliding_window", 0, least=0), query_growth(keys)
    return growth | {"layers": (LayerKind(window=window, has_growth=bool(growth)),) * keys.num_layers}


def query_growth(keys: Keys) -> Flags:
    """The flags of queries that grow with the logarithm of their position, where the rotary settings say so; else
    none."""
    stated = keys.raw.get("rope_parameters") or {}
    growth, span = stated.get("llama_4_scaling_beta"), stated.get("original_max_position_embeddings")
    if not growth:
        return {}
    if not span:
        raise ConfigError(
            f"{keys.where}: rope_parameters.llama_4_scaling_beta needs original_max_position_embeddings beside it"
        )
    return {"query_growth": float(growth), "query_span": int(span)}


def cohere2(keys: Keys) -> Flags:
    """The flags of Command R7B and A: attention and MLP side by side behind one LayerNorm. Layers with a window turn by
    neighbours, the others know no positions."""
    for key in ("use_parallel_block", "use_gated_activation"):
        keys.must_be(key, True)
    keys.must_be("use_qk_norm", False)
    keys.must_be("position_embedding_type", "rope_gptj")
    windows = alternating(keys, keys.integer("sliding_window_pattern", 4))
    return {
        **keys.bias(),
        "norm_eps": keys.positive("layer_norm_eps", 1e-5),
        "rope": dataclasses.replace(keys.rope(keys.head_dim), is_interleaved=True),
        "centred_norms": True,
        "is_parallel": True,
        "logit_scale": keys.positive("logit_scale", 0.0625),
        "layers": tuple(LayerKind(window=window, has_rope=window > 0) for window in windows),
    }


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
