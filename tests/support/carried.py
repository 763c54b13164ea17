"""Tiny random checkpoints that carry a layer of multi-token prediction after the target's own, in the names of their
families."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bailing
import numpy as np
import tiny

from specserve.checkpoints.load import Target, load_target
from specserve.checkpoints.tensors import write_json, write_tensors
from specserve.drafters.interface import Head
from specserve.drafters.mtp.config import config_of
from specserve.drafters.mtp.model import MtpParams, draft_spec
from specserve.drafters.registry import CARRIED
from specserve.interop.head import load_head
from specserve.models.config import ModelConfig
from specserve.models.families.table import model_config
from specserve.models.params import specs
from specserve.models.target import target_spec

SMALL: dict[str, Any] = tiny.TARGET | {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
WINDOWED = SMALL | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 1,
}
LATENT: dict[str, Any] = SMALL | {
    "model_type": "deepseek_v3",
    **EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}

INDEXED: dict[str, Any] = LATENT | {
    "model_type": "deepseek_v32",
    "index_n_heads": 8,
    "index_head_dim": 6,
    "index_topk": 32,
}
BLOCKS: dict[str, Any] = SMALL | {  # of a target that comes without such a layer
    "model_type": "minimax_m3_vl_text",
    "mlp_layer_types": ["dense"] * SMALL["num_hidden_layers"],
    "layer_types": ["minimax_m3_sparse"] * SMALL["num_hidden_layers"],
    "dense_intermediate_size": 24,
    "index_n_heads": SMALL["num_key_value_heads"],
    "index_head_dim": 9,
    "index_block_size": 8,
    "index_topk_blocks": 4,
}
GLM = SMALL | EXPERTS | {"model_type": "glm4_moe", "use_qk_norm": True, "attention_bias": True}
NEXT: dict[str, Any] = SMALL | {
    "model_type": "qwen3_next",
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
NEXT_DENSE: dict[str, Any] = NEXT | {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}
NEXT_SPARSE: dict[str, Any] = NEXT_DENSE | {"model_type": "qwen3_5_moe_text"}
LING: dict[str, Any] = bailing.CASES["ling-2"] | {"num_nextn_predict_layers": 1}
LING_2_5: dict[str, Any] = bailing.CASES["ling-2.5"] | {"num_nextn_predict_layers": 1}
MIMO: dict[str, Any] = SMALL | {"model_type": "mimo"}
NEMOTRON_H: dict[str, Any] = SMALL | {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*E",
    "mtp_hybrid_override_pattern": "*E",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "moe_latent_size": 20,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
}
MIMO_V2: dict[str, Any] = SMALL | {
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "v_head_dim": 6,
    "rope_parameters": {
        "full_attention": {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        "sliding_attention": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    },
    "sliding_window": 8,
    "hybrid_layer_pattern": [1, 0],
    "moe_layer_freq": [0, 1],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.5,
}


POOLS: dict[str, Any] = LATENT | {
    "model_type": "glm5_next",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "qk_rope_head_dim": 0,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "hc_sinkhorn_iters": 3,
    "index_n_heads": 8,
    "index_head_dim": 6,
    "index_topk": 32,
    "index_kpool": 4,
}
STREAMS: dict[str, Any] = NEXT | {
    "model_type": "qwen4_exp_text",
    "mtp_num_hidden_layers": 1,
    "layer_types": ["linear_attention", "full_attention"],
    "hc_count": 2,
    "hc_lowrank": 8,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 9,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
}
COMPRESSED: dict[str, Any] = SMALL | {  # the last layer has pools, and the carried one has not
    "model_type": "deepseek_v4",
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "q_lora_rank": 12,
    "layer_types": ["sliding_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5},
    "mlp_layer_types": ["hash_moe", "moe"],
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000.0,
    "sliding_window": 7,
    "o_groups": 2,
    "o_lora_rank": 6,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 3,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def write(folder: Path, raw: dict[str, Any], seed: int) -> None:
    """A target's folder with the layer in it, all of it random."""
    config, rng = model_config(raw, dtype="float32"), np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", raw)
    tensors = {name: value for spec in (target_spec(config), layer_spec(config)) for name, value in _random(spec, rng)}
    tensors[config.names.head] *= 1.5  # so that distributions have peaks
    write_tensors(folder / "model.safetensors", tensors)


def layer_spec(config: ModelConfig) -> MtpParams:
    return draft_spec(config_of(config, dtype="float32"))


def _random(tree: Any, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Norms near one or zero, as they begin; matrices and embeddings as large as `init_params` has them."""
    for spec in specs(tree):
        size = 0.02 if spec.init == "embedding" else 0.2 if len(spec.shape) == 1 else spec.shape[-2] ** -0.5
        for name in spec.names:
            value = rng.normal(0, size, spec.stored_shape) + (spec.init == "ones")
            if name.endswith("tid2eid"):
                vocab, count = spec.stored_shape
                value = rng.permuted(np.tile(np.arange(8), (vocab, 1)), axis=1)[:, :count]
            yield name, value.astype(spec.dtype("float32"))


def models(folder: Path, raw: dict[str, Any], seed: int = 0) -> tuple[Target, Head]:
    write(folder, raw, seed)
    target = load_target(folder, dtype="float32")
    return target, load_head(folder, target, dtype="float32", kind=CARRIED)


def is_of_the_layer(name: str, raw: dict[str, Any]) -> bool:
    return name.startswith((f"model.layers.{raw['num_hidden_layers']}.", "mtp.", "model.mtp.", "model.mtp_layers."))
