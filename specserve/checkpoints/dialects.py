"""EAGLE-3 heads as others write them. The only file that knows `d2t`, `t2d` and the spellings of layer ids.

SGLang (our own layout): tensors `midlayer.*`, layer ids name the OUTPUT of layer i. vLLM and speculators: tensors
`layers.0.*`, layer ids name the INPUT of layer i + 1. The same taps, one apart.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from specserve.errors import CheckpointError, ConfigError
from specserve.models.config import DraftConfig, ModelConfig
from specserve.models.rope import rope_from_hf, rope_to_hf

ARCHITECTURE = "LlamaForCausalLMEagle3"
D2T, T2D = "d2t", "t2d"
_FLAGS = ("norm_before_residual", "fc_norm", "norm_before_fc", "norm_output")


def is_input_named(names: frozenset[str]) -> bool:
    """Whether the tensors are named as vLLM and speculators name them."""
    return any(name.startswith("layers.0.") for name in names)


def renamer(names: frozenset[str]) -> Any:
    """From our tensor names to the folder's."""
    if is_input_named(names):
        return lambda name: name.replace("midlayer.", "layers.0.", 1)
    return lambda name: name


def draft_config_from_hf(
    raw: Mapping[str, Any], target: ModelConfig, names: frozenset[str], *, dtype: str, where: str
) -> DraftConfig:
    """Read a head's config.json against its target. Raises ConfigError."""
    if "transformer_layer_config" in raw:  # speculators nests what the others keep flat
        raw = {**raw["transformer_layer_config"], **raw}
    required = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "draft_vocab_size")
    if missing := [key for key in required if key not in raw]:
        raise ConfigError(f"{where}: {', '.join(missing)} missing; is this the config.json of an EAGLE-3 head?")
    if raw.get("num_hidden_layers", 1) != 1:
        raise ConfigError(f"{where}: num_hidden_layers is {raw['num_hidden_layers']}, an EAGLE-3 head has 1")
    eagle = raw.get("eagle_config") or {}
    ids = eagle.get("eagle_aux_hidden_state_layer_ids") or raw.get("eagle_aux_hidden_state_layer_ids")
    if ids and is_input_named(names):
        ids = [i - 1 for i in ids]
    aux_layers = tuple(ids) if ids else target.default_aux_layers
    if any(not 0 <= i < target.num_layers for i in aux_layers):
        raise ConfigError(f"{where}: taps layers {aux_layers}, the target has layers 0..{target.num_layers - 1}")
    num_heads = raw["num_attention_heads"]
    return DraftConfig(
        d_model=raw["hidden_size"],
        target_d_model=raw.get("target_hidden_size") or target.d_model,
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // num_heads,
        d_ff=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        draft_vocab_size=raw["draft_vocab_size"],
        max_len=raw.get("max_position_embeddings") or target.max_len,
        aux_layers=aux_layers,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=rope_from_hf(raw, where),
        has_embedding="embed_tokens.weight" in names,
        dtype=dtype,
        **{flag: bool(raw.get(flag, False)) for flag in _FLAGS},
    )


def draft_config_to_hf(
    config: DraftConfig, target: ModelConfig, *, dtype: str, bos_id: int | None, eos_id: int | None
) -> dict[str, Any]:
    """config.json of a head in the SGLang layout, with both spellings of the rotary settings."""
    scaling = rope_to_hf(config.rope)
    out: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.d_model,
        "target_hidden_size": config.target_d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": config.max_len,
        "rope_theta": config.rope.theta,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": config.rope.theta},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
    }
    out |= {flag: True for flag in _FLAGS if getattr(config, flag)}
    if target.num_layers < 5 or config.aux_layers != target.default_aux_layers:
        ids = list(config.aux_layers)
        out["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    return out


def vocab_to_tensors(target_ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """`d2t` as offsets (target_id = i + d2t[i]) in int64, which JAX without x64 could not write, and `t2d`."""
    draft_ids = np.arange(len(target_ids), dtype=np.int64)
    is_drafted = np.zeros(vocab_size, bool)
    is_drafted[target_ids] = True
    return {D2T: target_ids.astype(np.int64) - draft_ids, T2D: is_drafted}


def vocab_from_tensors(
    d2t: np.ndarray | None, t2d: np.ndarray | None, config: DraftConfig, where: str
) -> np.ndarray:  # [draft_vocab] int32
    """Target ids of the draft rows. Raises CheckpointError unless they are sorted, unique, in range, and agree."""
    if d2t is None:
        if config.draft_vocab_size != config.vocab_size:
            raise CheckpointError(f"{where}: d2t is missing and the draft vocabulary is not the target's")
        return np.arange(config.vocab_size, dtype=np.int32)
    target_ids = d2t.astype(np.int64) + np.arange(len(d2t))
    is_sound = (
        len(d2t) == config.draft_vocab_size
        and (np.diff(target_ids) > 0).all()
        and target_ids[0] >= 0
        and target_ids[-1] < config.vocab_size
    )
    if not is_sound:
        raise CheckpointError(
            f"{where}: d2t does not hold {config.draft_vocab_size} offsets to sorted, unique target ids below "
            f"{config.vocab_size}; it may hold absolute ids instead of offsets (target_id = i + d2t[i])"
        )
    if t2d is not None and not np.array_equal(np.flatnonzero(t2d), target_ids):
        raise CheckpointError(f"{where}: t2d and d2t name different tokens; nonzero(t2d) must be i + d2t[i]")
    return target_ids.astype(np.int32)
