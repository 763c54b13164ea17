"""The family table: what a config.json's `model_type` means. A family is a row: the flags that its name implies and the
keys that it reads. There is no second forward.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from specserve.errors import ConfigError
from specserve.models.config import ModelConfig
from specserve.models.families import (
    compressed,
    dense,
    gemma4,
    indexed,
    latent,
    recurrent,
    sparse,
)
from specserve.models.families.keys import Flags, Keys


def model_config(raw: Mapping[str, Any], *, dtype: str, where: str = "config.json") -> ModelConfig:
    """Read a Hugging Face config.json. Raises ConfigError for an unknown family or an unsupported feature."""
    known = FAMILIES.keys() | ALIASES.keys()
    text = raw.get("text_config")
    if isinstance(text, Mapping) and (raw.get("model_type") not in known or text.get("model_type") in known):
        # some text models do not say what they are
        outer = {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}
        raw = {"model_type": f"{raw.get('model_type')}_text", **text, **outer}
    family = str(raw.get("model_type"))
    if family not in known:
        near = difflib.get_close_matches(family, known, n=1)
        hint = "".join(f"; the nearest is {name!r}" for name in near)
        raise ConfigError(f"{where}: model_type {family!r} is not one of {', '.join((*FAMILIES, *ALIASES))}{hint}")
    row = ALIASES.get(family, family)
    keys = Keys(DEFAULTS.get(row, {}) | dict(raw), where)
    flags = FAMILIES[row](keys)
    num_layers = flags.pop("num_layers", None) or keys.num_layers
    num_heads = keys.integer("num_attention_heads")
    head_dim = flags.get("head_dim") or keys.head_dim
    if "activation" not in flags:
        keys.must_be("hidden_act", "silu")
    base: Flags = {
        "num_kv_heads": keys.integer("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "d_ff": flags.get("d_ff") or keys.integer("intermediate_size"),
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
        num_layers=num_layers,
        num_heads=num_heads,
        **(base | flags),
    )
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(f"{where}: {config.num_heads} attention heads cannot share {config.num_kv_heads} KV heads")
    return config


# The published config.jsons leave these values to transformers' defaults, and nobody else would assume them. A null is
# not a default: it switches a window or a softcap off.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "qwen2": {"sliding_window": 4096},
    "qwen3": {"sliding_window": 4096, "head_dim": 128},
    "qwen2_5_vl_text": {"sliding_window": 4096, "max_window_layers": 80, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "qwen3_vl_text": {"rope_theta": 500_000.0, "head_dim": 128},
    "qwen3_vl_moe_text": {"rope_theta": 500_000.0, "tie_word_embeddings": True},
    "phi3": {"rms_norm_eps": 1e-5},
    "smollm3": {"rope_theta": 2e6, "tie_word_embeddings": True},
    "seed_oss": {"head_dim": 128},
    "ernie4_5": {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    "olmo3": {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    "cohere2": {"tie_word_embeddings": True, "sliding_window": 4096},
    "exaone4": {"rms_norm_eps": 1e-5, "sliding_window": 4096},
    "hunyuan_v1_dense": {"rms_norm_eps": 1e-5},
    "ministral3": {
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "gemma2": {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "gemma4_text": gemma4.DEFAULTS,
    "gemma4_unified_text": gemma4.DEFAULTS | {"max_position_embeddings": 262_144, "sliding_window": 1024},
    "glm": {"rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5},
    "glm4": {"rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5},
    "mixtral": {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "qwen2_moe": {"sliding_window": 4096},
    "qwen3_moe": {"sliding_window": 4096},
    "llama4_text": {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "head_dim": 128, "attention_chunk_size": 8192},
    "gpt_oss": {"sliding_window": 128, "rope_theta": 150_000.0, "rms_norm_eps": 1e-5},
    "glm4_moe": {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": {"rms_norm_eps": 1e-5},
    "mimo_v2_flash": {"head_dim": 192, "v_head_dim": 128, "sliding_window": 129, "attention_value_scale": 0.707},
    "deepseek_v32": {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "n_shared_experts": 1},
    "glm_moe_dsa": {
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "n_shared_experts": 1,
        "rms_norm_eps": 1e-5,
    },
    "glm5_next_text": {
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "n_shared_experts": 1,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
    },
    "kimi_linear": {"rms_norm_eps": 1e-5, "num_shared_experts": 1, "routed_scaling_factor": 2.446},
    "mistral4": {
        "n_shared_experts": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "minimax_m2": {"rope_theta": 5e6, "head_dim": 128},
    "minimax_m3_vl_text": {
        "rope_theta": 5e6,
        "head_dim": 128,
        "index_n_heads": 4,
        "num_key_value_heads": 4,
    },
    "nemotron_h": {
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 8,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "n_shared_experts": 1,
    },
    "lfm2": {"rope_theta": 1e6, "max_position_embeddings": 128_000},
    "lfm2_moe": {"rope_theta": 1e6, "max_position_embeddings": 128_000},
    "qwen3_next": {"partial_rotary_factor": 0.25},
    "qwen3_5_text": {"partial_rotary_factor": 0.25},
    "qwen3_5_moe_text": {"partial_rotary_factor": 0.25},
    "bailing_hybrid": {"rope_theta": 6e6, "first_k_dense_replace": 2, "layer_group_size": 6},
}

# checkpoints whose model is another family's; what more they hold goes by their own name
ALIASES = {
    "mimo": "qwen2",
    "minimax_m3": "minimax_m3_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "glm5_next": "glm5_next_text",
}
FAMILIES: dict[str, Callable[[Keys], Flags]] = {
    "llama": dense.llama,
    "mistral": dense.mistral,
    "qwen2": dense.qwen2,
    "qwen3": dense.qwen3,
    "qwen2_5_vl_text": dense.qwen2,
    "qwen3_vl_text": dense.qwen3_vl,
    "phi3": dense.phi3,
    "smollm3": dense.smollm3,
    "seed_oss": dense.seed_oss,
    "ernie4_5": dense.ernie4_5,
    "granite": dense.granite,
    "olmo3": dense.olmo3,
    "cohere2": dense.cohere2,
    "exaone4": dense.exaone4,
    "hunyuan_v1_dense": dense.hunyuan,
    "ministral3": dense.ministral3,
    "gemma2": dense.gemma2,
    "gemma3_text": dense.gemma3,
    "gemma4_text": gemma4.gemma4,
    "gemma4_unified_text": gemma4.unified,
    "glm": dense.glm,
    "glm4": dense.glm4,
    "mixtral": sparse.mixtral,
    "qwen2_moe": sparse.qwen2_moe,
    "qwen3_moe": sparse.qwen3_moe,
    "qwen3_vl_moe_text": sparse.qwen3_vl_moe,
    "llama4_text": sparse.llama4,
    "gpt_oss": sparse.gpt_oss,
    "deepseek_v2": latent.deepseek_v2,
    "deepseek_v3": latent.deepseek_v3,
    "kimi_k2": latent.deepseek_v3,
    "deepseek_v32": indexed.deepseek_v32,
    "glm_moe_dsa": indexed.glm_moe_dsa,
    "glm5_next_text": indexed.glm5_next,
    "deepseek_v4": compressed.deepseek_v4,
    "mistral4": latent.mistral4,
    "kimi_linear": latent.kimi_linear,
    "glm4_moe": sparse.glm4_moe,
    "glm4_moe_lite": latent.glm4_moe_lite,
    "minimax_m2": sparse.minimax_m2,
    "minimax_m3_vl_text": sparse.minimax_m3,
    "mimo_v2_flash": sparse.mimo_v2_flash,
    "qwen3_next": sparse.qwen3_next,
    "qwen3_5_text": sparse.qwen3_5,
    "qwen3_5_moe_text": sparse.qwen3_5_moe,
    "qwen4_exp_text": sparse.qwen4_exp,
    "nemotron_h": recurrent.nemotron_h,
    "lfm2": recurrent.lfm2,
    "lfm2_moe": recurrent.lfm2_moe,
    "bailing_moe": latent.bailing_moe,
    "bailing_moe_v2": latent.bailing_moe_v2,
    "bailing_moe_linear": latent.bailing_moe_linear,
    "bailing_hybrid": latent.bailing_hybrid,
}
