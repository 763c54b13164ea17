"""Hugging Face folders written as GGUF files by the `gguf` package's writer, with what llama.cpp's converter changes:
written here from the format's definition, the other way round than it is read."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from specserve.models.families import model_config
from specserve.models.rope import frequencies

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "granite": "granite",
    "smollm3": "smollm3",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
_IN_TURNS = ("llama", "granite", "smollm3")
_KEYS = {  # of config.json -> of GGUF, after the architecture's name
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
VOCABULARY: dict[str, Any] = {  # hardly any
    "model": "gpt2",
    "pre": "qwen2",
    "tokens": ["a", "b", "ab", *(f"<{i}>" for i in range(3, 96))],
    "merges": ["a b"],
    "token_type": [1] * 96,
}


def write(
    folder: Path,
    path: Path,
    *,
    values: Mapping[str, Any] | None = None,  # other keys, whole names
    vocabulary: Mapping[str, Any] | None = None,  # keys after tokenizer.ggml
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,  # of matrices
    shards: int = 0,  # tensors in a file
) -> Path:
    """Write a folder's config and weights, and give the path."""
    raw = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[raw["model_type"]]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=shards)
    for name, value in (_facts(raw, arch) | dict(values or {})).items():
        _add(writer, name, value)
    for name, value in (VOCABULARY if vocabulary is None else vocabulary).items():
        _add(writer, f"tokenizer.ggml.{name}", value)
    for name, tensor in _tensors(raw, arch, load_file(folder / "model.safetensors")).items():
        used = kind if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(tensor, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adds.get(type(value), writer.add_array)(name, value)


def _facts(raw: Mapping[str, Any], arch: str) -> dict[str, Any]:
    facts = {own: raw[key] for key, own in _KEYS.items() if raw.get(key) is not None}
    if "head_dim" in raw:
        facts |= {"attention.key_length": raw["head_dim"], "attention.value_length": raw["head_dim"]}
    width = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    facts["rope.dimension_count"] = int(width * raw.get("partial_rotary_factor", 1.0))
    scaling = raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        facts |= {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}
    if original := scaling.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings"):
        facts["rope.scaling.original_context_length"] = original
    if kind == "longrope":
        facts["rope.scaling.attn_factor"] = model_config(raw, dtype="float32").rope.magnitude
    return {f"{arch}.{name}": value for name, value in facts.items()}


def _tensors(raw: Mapping[str, Any], arch: str, stored: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names, out, experts = gguf.get_tensor_name_map(number, raw["num_hidden_layers"]), {}, {}
    for name, tensor in stored.items():
        value = tensor
        if arch in _IN_TURNS and (match := re.search(r"\.([qk])_proj\.", name)):
            heads = raw["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
            value = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            value = tensor + 1
        if match := re.fullmatch(r"(.+\.experts)\.(\d+)(\..+)", name):
            experts.setdefault(match[1] + match[3], {})[int(match[2])] = value
            continue
        out[names.get_name(name, (".weight", ".bias"))] = value
    for name, own in experts.items():
        out[names.get_name(name, (".weight",))] = np.stack([own[i] for i in range(len(own))])
    scaling = raw.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        config = model_config(raw, dtype="float32")
        plain = model_config(dict(raw, rope_scaling=None), dtype="float32")
        out["rope_freqs.weight"] = frequencies(plain.rope, config.head_dim) / frequencies(config.rope, config.head_dim)
    for which in ("long", "short"):
        if f"{which}_factor" in scaling:
            out[f"rope_factors_{which}.weight"] = np.asarray(scaling[f"{which}_factor"], np.float32)
    return out
