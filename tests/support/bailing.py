"""Ling and Ring up to 2.5, which transformers lacks, as plain NumPy: loops over heads, tokens and experts, in float64.

Written from the published modelling files (inclusionAI/Ling, Ling-V2, Ring-V2) and arXiv 2510.19338. In one thing those
files are not followed: lightning attention's rates fall by layer as 1 - i / (L - 1), i counted from 0, as in training,
vLLM and SGLang; the released file has i - 1 there, with i counted from 0 too. Ling 2.5 is written from what vLLM and
SGLang say of it alike.
"""

from typing import Any

import numpy as np

Weights = dict[str, np.ndarray]

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "rope_theta": 1000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "norm_head": False,
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "num_shared_experts": 2,
    "norm_topk_prob": True,
    "eos_token_id": 2,
}
_LING_2: dict[str, Any] = _COMMON | {
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_bias": False,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "num_shared_experts": 1,
}
CASES: dict[str, dict[str, Any]] = {
    "ling-1": _COMMON | {"model_type": "bailing_moe", "use_qkv_bias": True, "use_bias": True},
    "ling-2": _LING_2 | {"model_type": "bailing_moe_v2"},
    "ring-linear": _LING_2
    | {"model_type": "bailing_moe_linear", "layer_group_size": 2, "group_norm_size": 2, "linear_silu": False},
    "ling-2.5": _LING_2
    | {
        "model_type": "bailing_hybrid",
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layer_group_size": 2,
        "group_norm_size": 2,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
    },
}


def is_linear(raw: dict[str, Any], i: int) -> bool:
    """Whether a layer has lightning attention: all but the last of each group, and of none after the last group."""
    group = raw.get("layer_group_size", 1)
    return (i + 1) % group != 0 and i < raw["num_hidden_layers"] // group * group


def has_latents(raw: dict[str, Any], i: int) -> bool:
    return "kv_lora_rank" in raw and not is_linear(raw, i)


def shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint."""
    d_model, heads, dim = raw["hidden_size"], raw["num_attention_heads"], raw["head_dim"]
    out: dict[str, tuple[int, ...]] = {
        "model.word_embeddings.weight": (raw["vocab_size"], d_model),
        "model.norm.weight": (d_model,),
        "lm_head.weight": (raw["vocab_size"], d_model),
    }

    def mlp(prefix: str, d_ff: int) -> None:
        out.update({f"{prefix}.{name}_proj.weight": (d_ff, d_model) for name in ("gate", "up")})
        out[f"{prefix}.down_proj.weight"] = (d_model, d_ff)

    def block(layer: str, i: int) -> None:
        if i < raw["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", raw["intermediate_size"])
            return
        out[f"{layer}.mlp.gate.weight"] = (raw["num_experts"], d_model)
        if raw.get("score_function") == "sigmoid":
            out[f"{layer}.mlp.gate.expert_bias"] = (raw["num_experts"],)
        for e in range(raw["num_experts"]):
            mlp(f"{layer}.mlp.experts.{e}", raw["moe_intermediate_size"])
        mlp(f"{layer}.mlp.shared_experts", raw["num_shared_experts"] * raw["moe_intermediate_size"])

    for i in range(raw["num_hidden_layers"]):
        layer, attention = f"model.layers.{i}", f"model.layers.{i}.attention"
        kv_heads = heads if is_linear(raw, i) else raw["num_key_value_heads"]
        qkv = (heads + 2 * kv_heads) * dim
        out[f"{layer}.input_layernorm.weight"] = out[f"{layer}.post_attention_layernorm.weight"] = (d_model,)
        block(layer, i)
        if has_latents(raw, i):
            out |= {f"{attention}.{name}.weight": shape for name, shape in _latent_shapes(raw).items()}
            continue
        out[f"{attention}.query_key_value.weight"] = (qkv, d_model)
        out[f"{attention}.dense.weight"] = (d_model, heads * dim)
        if raw["use_qkv_bias"]:
            out[f"{attention}.query_key_value.bias"] = (qkv,)
        if raw["use_bias"]:
            out[f"{attention}.dense.bias"] = (d_model,)
        if raw.get("use_qk_norm"):
            out[f"{attention}.query_layernorm.weight"] = out[f"{attention}.key_layernorm.weight"] = (dim,)
        if is_linear(raw, i):
            out[f"{attention}.g_proj.weight"] = (heads * dim, d_model)
            out[f"{attention}.g_norm.weight"] = (heads * dim,)
    return out


def _latent_shapes(raw: dict[str, Any]) -> dict[str, tuple[int, int] | tuple[int]]:
    d_model, heads, q_rank, kv_rank = (
        raw[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, v_dim = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"], raw["v_head_dim"]
    return {
        "q_a_proj": (q_rank, d_model),
        "q_a_layernorm": (q_rank,),
        "q_b_proj": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, d_model),
        "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (heads * (nope + v_dim), kv_rank),
        "dense": (d_model, heads * v_dim),
    }


def forward(
    raw: dict[str, Any],
    weights: Weights,
    token_ids: np.ndarray,  # [n]
) -> tuple[np.ndarray, np.ndarray]:  # logits [n, vocab], the outputs of all layers but the last [layer, n, d_model]
    weights = {name: value.astype(np.float64) for name, value in weights.items()}
    eps, layers = raw["rms_norm_eps"], []
    x = weights["model.word_embeddings.weight"][token_ids]
    for i in range(raw["num_hidden_layers"]):
        x = _layer(raw, weights, i, x)
        layers.append(x)
    logits = _norm(x, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T
    return logits, np.stack(layers[:-1])


def predicted(
    raw: dict[str, Any],
    weights: Weights,
    token_ids: np.ndarray,  # [n]
    hidden: np.ndarray,  # [n, d_model], of the target after its final norm
) -> np.ndarray:  # [n - 1, vocab], the logits that position t has of the token after t + 1
    """The layer of multi-token prediction behind the target's own, as SGLang has it. It attends by distances alone, so
    that its positions may begin at 0."""
    weights, eps = {name: value.astype(np.float64) for name, value in weights.items()}, raw["rms_norm_eps"]
    own = _Part(weights, f"model.layers.{raw['num_hidden_layers']}")
    token = _norm(weights["model.word_embeddings.weight"][token_ids[1:]], own["enorm.weight"], eps)
    state = _norm(hidden[:-1].astype(np.float64), own["hnorm.weight"], eps)
    x = np.concatenate([token, state], axis=-1) @ own["eh_proj.weight"].T
    x = _layer(raw, weights, raw["num_hidden_layers"], x)
    return _norm(x, own["final_layernorm.weight"], eps) @ weights["lm_head.weight"].T


def _layer(raw: dict[str, Any], weights: Weights, i: int, x: np.ndarray) -> np.ndarray:
    part, eps = _Part(weights, f"model.layers.{i}"), raw["rms_norm_eps"]
    normed = _norm(x, part["input_layernorm.weight"], eps)
    x = x + _attention(raw, i, _Part(weights, f"{part.prefix}.attention"), normed)
    normed = _norm(x, part["post_attention_layernorm.weight"], eps)
    block = _Part(weights, f"{part.prefix}.mlp")
    return x + (_mlp(block, normed) if i < raw["first_k_dense_replace"] else _experts(raw, block, normed))


class _Part:
    """The tensors under a prefix."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self.weights, self.prefix = weights, prefix

    def __getitem__(self, name: str) -> np.ndarray:
        return self.weights[f"{self.prefix}.{name}"]

    def bias(self, name: str) -> np.ndarray | float:
        return self.weights.get(f"{self.prefix}.{name}", 0.0)


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


def _turn(raw: dict[str, Any], x: np.ndarray) -> np.ndarray:  # [n, head_dim]
    """Rotary embedding of the first channels, the first half of them against the second."""
    half = int(raw["head_dim"] * raw.get("partial_rotary_factor", 1.0)) // 2
    angles = np.arange(len(x))[:, None] * raw["rope_theta"] ** (-np.arange(half) / half)
    a, b, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=1)


def _attention(raw: dict[str, Any], i: int, part: _Part, x: np.ndarray) -> np.ndarray:
    if has_latents(raw, i):
        return _latent_attention(raw, part, x)
    heads, dim, n = raw["num_attention_heads"], raw["head_dim"], len(x)
    kv_heads = heads if is_linear(raw, i) else raw["num_key_value_heads"]
    qkv = (x @ part["query_key_value.weight"].T + part.bias("query_key_value.bias")).reshape(n, -1, dim)
    out = np.zeros((n, heads, dim))
    for head in range(heads):
        kv_head = head * kv_heads // heads
        q, k, v = qkv[:, head], qkv[:, heads + kv_head], qkv[:, heads + kv_heads + kv_head]
        if raw.get("use_qk_norm"):
            q = _norm(q, part["query_layernorm.weight"], raw["rms_norm_eps"])
            k = _norm(k, part["key_layernorm.weight"], raw["rms_norm_eps"])
        q, k = _turn(raw, q) * dim**-0.5, _turn(raw, k)
        state = np.zeros((dim, dim))
        rate = 2.0 ** (-8 * (head + 1) / heads) * (1 - i / (raw["num_hidden_layers"] - 1) + 1e-5)
        for t in range(n):
            if is_linear(raw, i):
                state = np.exp(-rate) * state + np.outer(k[t], v[t])
                out[t, head] = q[t] @ state
            else:
                out[t, head] = _softmax(k[: t + 1] @ q[t]) @ v[: t + 1]
    out = out.reshape(n, -1)
    if is_linear(raw, i):
        groups = raw["group_norm_size"]
        weight = part["g_norm.weight"].reshape(groups, -1)
        out = _norm(out.reshape(n, groups, -1), weight, raw["rms_norm_eps"]).reshape(n, -1)
        out = out * _sigmoid(x @ part["g_proj.weight"].T)
    return out @ part["dense.weight"].T + part.bias("dense.bias")


def _latent_attention(raw: dict[str, Any], part: _Part, x: np.ndarray) -> np.ndarray:
    """DeepSeek's (arXiv 2405.04434, section 2.1), keys and values of every head written out."""
    n, heads, rank = len(x), raw["num_attention_heads"], raw["kv_lora_rank"]
    nope, rope, v_dim = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"], raw["v_head_dim"]
    q = _norm(x @ part["q_a_proj.weight"].T, part["q_a_layernorm.weight"], 1e-6) @ part["q_b_proj.weight"].T
    down = x @ part["kv_a_proj_with_mqa.weight"].T
    up = _norm(down[:, :rank], part["kv_a_layernorm.weight"], 1e-6) @ part["kv_b_proj.weight"].T
    q, up, out = q.reshape(n, heads, -1), up.reshape(n, heads, -1), np.zeros((n, heads, v_dim))
    turn = np.exp(1j * np.arange(n)[:, None] * raw["rope_theta"] ** (-np.arange(rope // 2) / (rope // 2)))

    def turned(y: np.ndarray) -> np.ndarray:  # channels turn in pairs of neighbours
        pairs = (y[:, ::2] + 1j * y[:, 1::2]) * turn
        return np.concatenate([pairs.real, pairs.imag], axis=1)

    k_rope = turned(down[:, rank:])
    for head in range(heads):
        q_rope = turned(q[:, head, nope:])
        scores = (q[:, head, :nope] @ up[:, head, :nope].T + q_rope @ k_rope.T) * (nope + rope) ** -0.5
        for t in range(n):
            out[t, head] = _softmax(scores[t, : t + 1]) @ up[: t + 1, head, nope:]
    return out.reshape(n, -1) @ part["dense.weight"].T


def _mlp(part: _Part, x: np.ndarray, name: str = "") -> np.ndarray:
    gate, up = x @ part[f"{name}gate_proj.weight"].T, x @ part[f"{name}up_proj.weight"].T
    return (gate * _sigmoid(gate) * up) @ part[f"{name}down_proj.weight"].T


def _experts(raw: dict[str, Any], part: _Part, x: np.ndarray) -> np.ndarray:
    out, top_k, num_groups = _mlp(part, x, "shared_experts."), raw["num_experts_per_tok"], raw.get("n_group", 1)
    for t, row in enumerate(x):
        logits = part["gate.weight"] @ row
        scores = _sigmoid(logits) if raw.get("score_function") == "sigmoid" else _softmax(logits)
        choice = (scores + part.bias("gate.expert_bias")).reshape(num_groups, -1)
        if num_groups > 1:
            worst = np.argsort(np.sort(choice)[:, -2:].sum(1))[: num_groups - raw["topk_group"]]
            choice[worst] = -np.inf
        chosen = np.argsort(-choice.reshape(-1))[:top_k]
        share = scores[chosen] / scores[chosen].sum() * raw.get("routed_scaling_factor", 1.0)
        for e, weight in zip(chosen, share, strict=True):
            out[t] += weight * _mlp(part, row, f"experts.{e}.")
    return out
