"""The config.json that a GGUF file's keys stand for, by its architecture. What a key leaves out is as llama.cpp has it,
since that is what such files are made for."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specserve.checkpoints.gguf.container import GgufFile
from specserve.errors import CheckpointError

logger = logging.getLogger(__name__)

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_UNUSED = ("vocab_size",)  # stated by the embedding too


@dataclass
class Facts:
    """The keys of a file's architecture, without its name before them. Errors name the file and the key."""

    file: GgufFile
    architecture: str
    read: set[str] = field(default_factory=set)

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.file.values

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; of a list with one for each layer, the one that all of them have. Raises CheckpointError for
        a missing one without a default."""
        name = f"{self.architecture}.{key}"
        self.read.add(name)
        value = self.file.values.get(name, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if value is None or isinstance(value, list):
            got = "is missing" if value is None else "differs between layers"
            raise CheckpointError(f"{self.file.path}: {name} {got}; this model cannot be read from a GGUF file")
        return value

    def unread(self, *unused: str) -> list[str]:
        """Return the keys that were not read, but for those that nothing follows from."""
        known = self.read | {f"{self.architecture}.{key}" for key in unused}
        return sorted(
            name for name in self.file.values if name.startswith(f"{self.architecture}.") and name not in known
        )

    def listed(self, key: str) -> list[Any]:
        """Return a list. Raises CheckpointError where it is missing."""
        name = f"{self.architecture}.{key}"
        self.read.add(name)
        value = self.file.values.get(name)
        if not isinstance(value, list) or not value:
            raise CheckpointError(f"{self.file.path}: {name} is {value!r}, expected a list")
        return value

    def factors(self, name: str) -> list[float]:
        """Return the numbers of one of `ROPE_TENSORS`."""
        tensor = self.file.tensors[name]
        if tensor.kind.name != "F32" or len(tensor.shape) != 1:
            raise CheckpointError(f"{self.file.path}: {name} is {tensor.kind.name} {list(tensor.shape)}, expected F32")
        return np.memmap(tensor.file, np.float32, "r", tensor.offset, tensor.shape).tolist()


@dataclass(frozen=True)
class Architecture:
    """The meaning of a `general.architecture`."""

    name: str
    family: str  # our `model_type`
    more: Callable[[Facts], dict[str, Any]] = lambda _facts: {}
    in_turns: bool = False  # the channels of queries and keys that turn against each other are neighbours


def _llama(facts: Facts) -> dict[str, Any]:
    if not facts.get("expert_count", 0):
        return {}
    return {
        "model_type": "mixtral",
        "num_local_experts": facts.get("expert_count"),
        "num_experts_per_tok": facts.get("expert_used_count"),
    }


def _qwen_moe(facts: Facts) -> dict[str, Any]:
    return {
        "num_experts": facts.get("expert_count"),
        "num_experts_per_tok": facts.get("expert_used_count"),
        "moe_intermediate_size": facts.get("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _qwen2_moe(facts: Facts) -> dict[str, Any]:
    shared = facts.get("expert_shared_feed_forward_length")
    return _qwen_moe(facts) | {"norm_topk_prob": False, "shared_expert_intermediate_size": shared}


def _phi3(facts: Facts) -> dict[str, Any]:
    return {"sliding_window": facts.get("attention.sliding_window", 0)}


def _seed_oss(facts: Facts) -> dict[str, Any]:
    return {"attention_out_bias": "blk.0.attn_output.bias" in facts.file.tensors}


def _ernie(facts: Facts) -> dict[str, Any]:
    return {"use_bias": "blk.0.attn_q.bias" in facts.file.tensors}


def _granite(facts: Facts) -> dict[str, Any]:
    heads = facts.get("attention.head_count")
    return {
        "attention_multiplier": facts.get("attention.scale", (facts.get("embedding_length") / heads) ** -0.5),
        "embedding_multiplier": facts.get("embedding_scale", 1.0),
        "residual_multiplier": facts.get("residual_scale", 1.0),
        "logits_scaling": facts.get("logit_scale", 1.0),
    }


def _gemma(facts: Facts, layers_of_largest: int) -> dict[str, Any]:
    """The largest model of each generation scales its queries by the width of a head that its d_model would have."""
    scale = facts.get("attention.key_length")
    if facts.get("block_count") == layers_of_largest:
        scale = facts.get("embedding_length") // facts.get("attention.head_count")
    return {"query_pre_attn_scalar": scale, "final_logit_softcapping": facts.get("final_logit_softcapping", 0.0)}


def _gemma2(facts: Facts) -> dict[str, Any]:
    return _gemma(facts, 46) | {
        "sliding_window": facts.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": facts.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.get("final_logit_softcapping", 30.0),
    }


def _gemma3(facts: Facts) -> dict[str, Any]:
    return _gemma(facts, 62) | {
        "sliding_window": facts.get("attention.sliding_window", 0),
        "sliding_window_pattern": facts.get("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": facts.get("rope.freq_base_swa", 10_000.0),
    }


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("llama", "llama", _llama, in_turns=True),
        Architecture("qwen2", "qwen2"),
        Architecture("qwen2moe", "qwen2_moe", _qwen2_moe),
        Architecture("qwen3", "qwen3"),
        Architecture("qwen3moe", "qwen3_moe", _qwen_moe),
        Architecture("phi3", "phi3", _phi3),
        Architecture("granite", "granite", _granite, in_turns=True),
        Architecture("smollm3", "smollm3", in_turns=True),
        Architecture("seed_oss", "seed_oss", _seed_oss),
        Architecture("ernie4_5", "ernie4_5", _ernie),
        Architecture("gemma2", "gemma2", _gemma2),
        Architecture("gemma3", "gemma3_text", _gemma3),
    )
}


def architecture_of(file: GgufFile) -> Architecture:
    """Raises CheckpointError for a file of anything but a language model that is known here."""
    name = file.values.get("general.architecture")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: general.architecture is {name!r}; of GGUF files {', '.join(ARCHITECTURES)} can be read. "
            "Take the model's Hugging Face folder"
        )
    return ARCHITECTURES[name]


def read_config(file: GgufFile, *, warns: bool = False) -> dict[str, Any]:
    """Return the config.json that a file stands for, perhaps with a warning of the keys that are not read. Raises
    CheckpointError for an unknown architecture, and for keys that are missing."""
    architecture = architecture_of(file)
    facts = Facts(file, architecture.name)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: token_embd.weight is missing; is it the file of a whole language model?")
    config = layer_sizes(facts) | {
        "model_type": architecture.family,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": architecture.family != "phi3" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        **architecture.more(facts),
    }
    if (unread := facts.unread(*_UNUSED)) and warns:
        logger.warning("%s: keys that are not read: %s", file.path, ", ".join(unread))
    return config


def layer_sizes(facts: Facts) -> dict[str, Any]:
    """Return the sizes of a model's layers and its rotary settings, as keys of config.json. Raises CheckpointError."""
    width, heads = facts.get("embedding_length"), facts.get("attention.head_count")
    # llama.cpp lets the part that turns stand for the width of a head where that is not stated
    head_dim = facts.get("attention.key_length", width // heads)
    if facts.get("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{facts.file.path}: {facts.architecture}.attention.value_length must equal key_length")
    experts = facts.get("expert_feed_forward_length", 0)
    return {
        "hidden_size": width,
        "num_hidden_layers": facts.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": facts.get("feed_forward_length", experts or None),
        "max_position_embeddings": facts.get("context_length"),
        "rms_norm_eps": facts.get("attention.layer_norm_rms_epsilon"),
        **_rope(facts, head_dim),
    }


def _rope(facts: Facts, head_dim: int) -> Mapping[str, Any]:
    """The rotary settings. Where a tensor has a divisor for each frequency, which stands for Llama 3's stretch, it is
    written as longrope of one set."""
    kind, factor = facts.get("rope.scaling.type", "none"), facts.get("rope.scaling.factor", 1.0)
    stated: dict[str, Any] = {
        "rope_theta": facts.get("rope.freq_base", 10_000.0),
        "partial_rotary_factor": facts.get("rope.dimension_count", head_dim) / head_dim,
    }
    original = facts.get("rope.scaling.original_context_length", 0)
    has_sets = "rope_factors_long.weight" in facts.file.tensors
    if has_sets or "rope_freqs.weight" in facts.file.tensors:
        names = ("rope_factors_short.weight", "rope_factors_long.weight") if has_sets else ("rope_freqs.weight",) * 2
        short, long = (facts.factors(name) for name in names)
        scaling = {
            "rope_type": "longrope",
            "factor": 1.0,
            "short_factor": short,
            "long_factor": long,
            "attention_factor": facts.get("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original or facts.get("context_length"),
        }
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if facts.has(f"rope.scaling.{key}"):
                scaling[name] = facts.get(f"rope.scaling.{key}")
    elif kind == "none":
        return stated
    else:
        raise CheckpointError(f"{facts.file.path}: rope.scaling.type {kind!r} is not read; none, linear and yarn are")
    return stated | {"rope_scaling": scaling}
