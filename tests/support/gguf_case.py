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

from specserve.models.families.table import model_config
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


_OF_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
_BESIDE_LAYERS = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "norm": "output_norm",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
    "input_norm": "enc.output_norm",
    "hidden_norm": "enc.output_norm",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection": "selector_hidden",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}


def write_head(
    folder: Path,
    path: Path,
    *,
    values: Mapping[str, Any],  # of the architecture's keys, beside those of the layers' sizes; None takes one out
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,  # of matrices that rows are multiplied by
) -> Path:
    """Write a head as llama.cpp's converter does, from a folder in our own layout, and give the path."""
    raw = json.loads((folder / "config.json").read_text())
    arch = "eagle3" if "Eagle3" in raw["architectures"][0] else "dflash"
    writer = gguf.GGUFWriter(path, arch)
    facts = {own: raw[key] for key, own in _KEYS.items() if raw.get(key) is not None and key != "sliding_window"}
    facts |= {"attention.key_length": raw["head_dim"], "rope.dimension_count": raw["head_dim"], **values}
    for name, value in facts.items():
        if value is not None:
            _add(writer, name if name.startswith("tokenizer.") else f"{arch}.{name}", value)
    _add(writer, "tokenizer.ggml.tokens", [f"<{i}>" for i in range(raw["vocab_size"])])
    for stored, tensor in load_file(folder / "model.safetensors").items():
        name, value, used = _name_of(stored), tensor, gguf.GGMLQuantizationType.F32
        if stored == "t2d":
            continue
        if stored == "d2t":
            writer.add_tensor("d2t", tensor + np.arange(len(tensor)), raw_dtype=gguf.GGMLQuantizationType.I64)
            continue
        if arch == "eagle3" and (match := re.search(r"\.([qk])_proj\.", stored)):
            heads = raw["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
            value = tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        if re.search(r"_proj\.weight|^fc|^lm_head", stored):
            used = kind
        writer.add_tensor(name, gguf.quantize(value, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _name_of(stored: str) -> str:
    for names, prefix in ((_BESIDE_LAYERS, ""), (_OF_LAYERS, "blk.{}.")):
        match = re.match(r"(?:midlayer|layers\.(\d+))\.", stored) if prefix else None
        rest = stored[match.end() :] if match else stored
        part = rest.removesuffix(".weight").removesuffix(".bias")
        if part in names and bool(match) == bool(prefix):
            suffix = rest[len(part) :]
            name = names[part]
            return prefix.format(int(match[1] or 0) if match else 0) + (
                name if name.endswith(".weight") else name + suffix
            )
    return stored
