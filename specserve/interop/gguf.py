"""Draft heads in GGUF, as llama.cpp keeps them: the config.json that a file's keys stand for, and the published names
of its tensors. Layer ids name the inputs of layers, one more than `target_layer_ids` for the same states."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specserve.checkpoints.gguf.config import ROPE_TENSORS, Facts, layer_sizes
from specserve.checkpoints.gguf.container import GgufFile, read_gguf
from specserve.checkpoints.gguf.folder import show_as_folder
from specserve.checkpoints.gguf.weights import NAMES_FILE
from specserve.checkpoints.tensors import CONFIG
from specserve.errors import CheckpointError
from specserve.interop.keys import FULL, SELECTOR, SLIDING
from specserve.interop.published import D2T

# parts of names before `.weight` or `.bias`, else whole ones; in a layer after `blk.{i}.` and `layers.{i}.`
_LAYER = """
attn_norm input_layernorm, attn_q self_attn.q_proj, attn_k self_attn.k_proj, attn_v self_attn.v_proj,
attn_output self_attn.o_proj, attn_q_norm self_attn.q_norm, attn_k_norm self_attn.k_norm, ffn_gate mlp.gate_proj,
ffn_norm post_attention_layernorm, ffn_up mlp.up_proj, ffn_down mlp.down_proj
"""
_BESIDE = "token_embd embed_tokens, output lm_head, output_norm norm, fc fc, d2t d2t"
_OF_KIND = {
    "eagle3": "attn_norm_2 hidden_norm, enc.output_norm input_norm",
    "dflash": """
attn_sinks.weight self_attn.attention_sink_bias, attn_conv_base attention_conv.base_kernel, enc.output_norm hidden_norm,
attn_conv_proj attention_conv.kernel_projection, ffn_conv_base mlp_conv.base_kernel,
ffn_conv_proj mlp_conv.kernel_projection, selector_predecessor.weight candidate_selector.predecessor_codebook,
selector_successor.weight candidate_selector.successor_codebook, selector_hidden candidate_selector.hidden_projection,
markov_w1 markov_head.markov_w1, markov_w2 markov_head.markov_w2, conf_proj confidence_head.proj
""",
}
_LOOKED_UP = ("token_embd.weight", "markov_w1.weight", "selector_predecessor.weight", "selector_successor.weight")
_CONFIDENCE = "conf_proj.weight"
_UNUSED = ("vocab_size", "rope.dimension_sections", "markov_rank")  # shown by tensors; over text alone the axes are one


def is_head(path: Path) -> bool:
    """Return whether a file holds a draft head, and no language model. Raises CheckpointError where it is no GGUF."""
    return read_gguf(path).values.get("general.architecture") in KINDS


def show_head(path: Path) -> Path:
    """Return the folder that shows the file of a head (`is_head`). Raises CheckpointError for keys that are missing,
    and for those that nobody here knows."""
    return show_as_folder(path, _texts)


def _texts(file: GgufFile) -> Mapping[str, str]:
    name = str(file.values.get("general.architecture"))
    facts = Facts(file, name)
    tokens = file.values.get("tokenizer.ggml.tokens") or ()
    layer = layer_sizes(facts)
    config = layer | {
        "vocab_size": _rows(file, "token_embd.weight") or len(tokens) or facts.get("vocab_size"),
        "draft_vocab_size": _rows(file, D2T) or _rows(file, "output.weight") or None,
        "target_hidden_size": facts.get("target_hidden_size", layer["hidden_size"]),
        "tie_word_embeddings": False,
        **KINDS[name](facts),
    }
    if unread := facts.unread(*_UNUSED):
        raise CheckpointError(f"{file.path}: not known to us, so the head may be another one: {', '.join(unread)}")
    tensors = [(own, tensor.shape) for own, tensor in file.tensors.items() if own not in ROPE_TENSORS]
    entries = {_published(name, own): _entry(own, shape, name, config) for own, shape in tensors}
    return {CONFIG: json.dumps(config, indent=2), NAMES_FILE: json.dumps(entries, indent=2)}


def _entry(stored: str, shape: tuple[int, ...], kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of `NAMES_FILE`. llama.cpp's graph of an EAGLE-3 head turns neighbours."""
    heads = {"blk.0.attn_q.weight": "num_attention_heads", "blk.0.attn_k.weight": "num_key_value_heads"}
    num_heads = config[heads[stored]] if kind == "eagle3" and stored in heads else 0
    shape = (1, *shape) if stored == _CONFIDENCE and len(shape) == 1 else shape  # llama.cpp drops such an axis
    how = {"num_heads": num_heads, "is_product": len(shape) == 2 and stored not in _LOOKED_UP}
    return {"stored": stored, "shape": shape, "holds_ids": stored == D2T, **how}


def _published(kind: str, stored: str) -> str:
    """Return the name that a tensor has in published folders; one that is not known here keeps its own."""
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", stored)
    names = dict(pair.split() for pair in f"{_LAYER if match else _BESIDE}, {_OF_KIND[kind]}".split(","))
    own = match[2] if match else stored
    part = own.removesuffix(".weight").removesuffix(".bias")
    if own not in names and part not in names:
        return stored
    prefix = "" if match is None else "midlayer." if kind == "eagle3" else f"layers.{match[1]}."
    return prefix + (names[own] if own in names else names[part] + own[len(part) :])


def _eagle3(facts: Facts) -> dict[str, Any]:
    if (count := facts.get("block_count")) != 1:
        raise CheckpointError(f"{facts.file.path}: {count} layers; llama.cpp's eagle3 heads have one")
    flags = ("norm_before_residual", "norm_before_fc")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{flag: facts.get(flag, False) for flag in flags},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": _taps(facts)},
    }


def _dflash(facts: Facts) -> dict[str, Any]:
    tensors = facts.file.tensors
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "block_size": facts.get("block_size"),
        "mask_token_id": facts.file.values.get("tokenizer.ggml.mask_token_id"),
        "target_layer_ids": _taps(facts),
        "output_multiplier": facts.get("logit_scale", 0.0) or 1.0,
        "final_logit_softcapping": facts.get("final_logit_softcapping", 0.0),
        "attention_sink_bias": "blk.0.attn_sinks.weight" in tensors,
    }
    if facts.has("attention.causal"):
        config["is_causal"] = facts.get("attention.causal")
    if window := facts.get("attention.sliding_window", 0):
        kinds = [SLIDING if slides else FULL for slides in facts.listed("attention.sliding_window_pattern")]
        config |= {"layer_types": kinds, "sliding_window": window, "use_sliding_window": SLIDING in kinds}
    if "selector_hidden.weight" in tensors:
        return config | {"architectures": ["DFlash2DraftModel"], **{key: facts.get(key) for key in SELECTOR}}
    if "markov_w1.weight" not in tensors:
        return config | {"architectures": ["DFlashDraftModel"]}
    inputs = tensors[_CONFIDENCE].shape[-1] if _CONFIDENCE in tensors else 0
    return config | {
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": tensors["markov_w1.weight"].shape[1],
        "sample_from_anchor": facts.get("sample_from_anchor", True),
        "enable_confidence_head": inputs > 0,
        "confidence_head_with_markov": inputs > facts.get("embedding_length"),
    }


KINDS: Mapping[str, Callable[[Facts], dict[str, Any]]] = {"eagle3": _eagle3, "dflash": _dflash}


def _taps(facts: Facts) -> list[int]:
    """Return the layers whose outputs are tapped."""
    return [i - 1 for i in facts.listed("target_layers" if facts.has("target_layers") else "extract_layers")]


def _rows(file: GgufFile, name: str) -> int:
    return file.tensors[name].shape[0] if name in file.tensors else 0
