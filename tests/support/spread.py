"""Tiny models whose sizes eight devices divide, on one device and over a mesh."""

import functools
from pathlib import Path
from typing import Any

import jax
import tiny
from dflash_case import MARKOV, SELECTOR
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.mesh import parse_mesh
from specserve.models.families.table import model_config
from specserve.models.params import init_params
from specserve.models.sharding import place_target
from specserve.models.target import target_spec

DENSE: dict[str, Any] = tiny.TARGET | {"num_attention_heads": 8, "num_hidden_layers": 2}  # of two KV heads
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
LATENTS: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
DELTA_NETS: dict[str, Any] = {
    "model_type": "qwen3_next",
    "num_experts": 4,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "full_attention_interval": 2,
}
SHARED_KEYS: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_act": None,
    "global_head_dim": 12,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6,
    "rope_theta": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "experts": DENSE | EXPERTS | {"model_type": "qwen3_moe", "num_experts": 8},
    "latents": DENSE | EXPERTS | LATENTS,
    "delta nets": DENSE | EXPERTS | DELTA_NETS,
    "keys shared": DENSE | SHARED_KEYS | {"num_hidden_layers": 4, "num_kv_shared_layers": 2},
}
WINDOWED: dict[str, Any] = {"sliding_window": 11}
WINDOWS: dict[str, Any] = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}
OF_ONE_CASE: dict[str, dict[str, Any]] = {  # other layers, over one mesh
    "windows": DENSE | WINDOWED | WINDOWS,
    "an indexer": DENSE
    | EXPERTS
    | LATENTS
    | {"model_type": "glm_moe_dsa", "index_n_heads": 4, "index_head_dim": 8, "index_topk": 6}
    | {"indexer_types": ["full", "shared"]},
    "blocks that an indexer chooses": DENSE
    | EXPERTS
    | {
        "model_type": "minimax_m3_vl_text",
        "num_local_experts": 4,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_n_heads": 2,
        "index_head_dim": 9,
        "index_block_size": 3,
        "index_topk_blocks": 2,
        "partial_rotary_factor": 0.5,
    },
    "several streams": DENSE
    | EXPERTS
    | DELTA_NETS
    | {
        "model_type": "qwen4_exp_text",
        "head_dim": 8,
        "output_gate_type": "sigmoid",
        "hc_lowrank": 8,
        "indexer_n_heads": 6,
        "indexer_head_dim": 9,
        "indexer_budget": 6,
        "indexer_compress_ratio": 3,
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "eos_token_id": 5,
    },
    "pools in streams": DENSE
    | EXPERTS
    | LATENTS
    | {
        "model_type": "glm5_next",
        "layer_types": ["linear_attention", "indexed_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "hc_sinkhorn_iters": 3,
        "index_n_heads": 4,
        "index_head_dim": 8,
        "index_topk": 6,
        "index_kpool": 3,
        "qk_rope_head_dim": 0,
    },
    "compressed keys": DENSE
    | EXPERTS
    | {
        "model_type": "deepseek_v4",
        "num_key_value_heads": 1,
        "head_dim": 8,
        "q_lora_rank": 12,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5},
        "mlp_layer_types": ["hash_moe", "moe"],
        "partial_rotary_factor": 0.5,
        "sliding_window": 7,
        "o_groups": 2,
        "o_lora_rank": 6,
        "index_n_heads": 4,
        "index_head_dim": 8,
        "index_topk": 3,
        "hc_sinkhorn_iters": 3,
        "n_routed_experts": 8,
    },
    "Mamba": DENSE
    | EXPERTS
    | {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M*E-",
        "num_hidden_layers": 4,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
    },
    "short convolutions": DENSE
    | EXPERTS
    | {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention"],
        "num_experts": 4,
        "num_dense_layers": 1,
    },
    "delta nets by channel": DENSE
    | EXPERTS
    | LATENTS
    | {
        "model_type": "kimi_linear",
        "linear_attn_config": {"full_attn_layers": [2], "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 3},
        "qk_rope_head_dim": 4,
        "q_lora_rank": None,
    },
    "gated delta nets beside gated latents": DENSE
    | EXPERTS
    | LATENTS
    | {
        "model_type": "bailing_hybrid",
        "layer_group_size": 2,
        "short_conv_kernel_size": 3,
        "kda_lower_bound": -5.0,
    },
    "lightning": DENSE
    | EXPERTS
    | {
        "model_type": "bailing_moe_linear",
        "num_experts": 8,
        "num_shared_experts": 1,
        "layer_group_size": 2,
        "group_norm_size": 2,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
    "KV heads by layer, values of their own width": DENSE
    | EXPERTS
    | WINDOWED
    | {
        "model_type": "mimo_v2_flash",
        "num_key_value_heads": 2,
        "v_head_dim": 6,
        "partial_rotary_factor": 0.5,
        "hybrid_layer_pattern": [0, 1],
        "n_routed_experts": 4,
    },
    "values of keys": DENSE
    | EXPERTS
    | WINDOWED
    | {
        "model_type": "gemma4_text",
        "hidden_act": None,
        "rope_theta": None,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 12,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
    },
    "growing queries, scaled inputs": DENSE
    | {
        "model_type": "llama4_text",
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "no_rope_layer_interval": 2,
        "floor_scale": 8,
    },
    "blocks side by side": DENSE
    | WINDOWED
    | {"model_type": "cohere2", "sliding_window_pattern": 2, "tie_word_embeddings": True},
    "norms after, of all heads": DENSE | WINDOWED | {"model_type": "olmo3"},
    "softcaps": DENSE | WINDOWED | {"model_type": "gemma2", "query_pre_attn_scalar": 8, "hidden_activation": None},
    "norms of turned heads": DENSE | {"model_type": "hunyuan_v1_dense", "attention_bias": True},
}
ANY_MODEL = ("data=2", "tensor=2", "tensor=4", "tensor=8")
WITH_EXPERTS = ("expert=2", "expert=4", "data=2,tensor=2,expert=2")
CASES = [
    (model, mesh)
    for model in MODELS
    for mesh in (*ANY_MODEL, *(WITH_EXPERTS if model not in ("dense", "keys shared") else ()))
    if (model, mesh) != ("delta nets", "tensor=8")  # of four key heads
] + [(model, "tensor=2") for model in OF_ONE_CASE]


def mesh_of(text: str) -> Mesh:
    mesh = parse_mesh(text)
    assert mesh is not None
    return mesh


@functools.cache
def target_of(model: str) -> Target:
    """On one device."""
    config = model_config((MODELS | OF_ONE_CASE)[model], dtype="float32")
    return Target(config, init_params(target_spec(config), jax.random.key(0), "float32"), (2,), Path(model))


@functools.cache
def head_of(model: str, kind: str = "eagle3") -> Head:
    """Beside that target, of whatever kind, with sizes of its own unless it is a layer like the target's."""
    target = target_of(model).config
    sizes: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 8}
    blocks: dict[str, Any] = {"num_layers": 2, "block_size": 4, "aux_layers": (0, 1), "num_heads": 4, "num_kv_heads": 2}
    if kind == "mtp":
        return tiny.random_carried_layer(target, seed=1)
    if kind == "p-eagle":
        return tiny.random_masked_head(target, seed=1, rope=tiny.PLAIN_ROPE, **sizes)
    if kind == "dflash":
        return tiny.random_block_head(target, seed=1, **blocks)
    if kind == "dspark":
        return tiny.random_joint_head(target, 1, MARKOV | {"foresees_anchor": True}, **blocks)
    if kind == "dflash2":
        return tiny.random_joint_head(target, 1, SELECTOR, vocab_size=target.vocab_size, **blocks)
    if kind == "language-model":  # three heads, which no mesh divides, beside layers that it does
        return tiny.random_language_model(target, seed=1, num_attention_heads=3, num_key_value_heads=1)
    assert kind == "eagle3", kind
    return tiny.random_head(target, seed=1, rope=tiny.PLAIN_ROPE, **sizes)


def spread_target(model: str, mesh: Mesh) -> Target:
    target = target_of(model)
    params = jax.device_put(target.params, place_target(target.config, target_spec(target.config), mesh))
    return Target(target.config, params, target.eos_ids, target.folder)


def spread_head(model: str, mesh: Mesh, kind: str = "eagle3") -> Head:
    head = head_of(model, kind)
    params = jax.device_put(head.params, head.drafter.place(mesh))
    return Head(head.drafter, params, head.target_ids)
