"""The decoder layers of published heads: the keys of config.json about them, as they are read and written. It knows how
windows, biases and activations are spelled, which are spelled alike in the heads of all kinds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import CONFIG, read_json
from specserve.drafters.layers import windowed, windows_of
from specserve.errors import ConfigError
from specserve.interop import gemma
from specserve.interop.keys import COMMON, FULL, LAYER, SLIDING, Key, Stated, counts, flag, is_count, only
from specserve.interop.published import rope_keys, speculators_config
from specserve.kernels.rowwise import Activation
from specserve.models.config import ModelConfig

SIZES: Mapping[str, str] = {  # keys of a layer's settings, and our names
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
}
ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_erf"}
LAYER_KEYS = (
    *counts("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", is_required=True),
    *counts("num_key_value_heads", "max_position_embeddings", "target_hidden_size"),
    Key("head_dim", ("attention_head_dim",), is_count=True),
    Key("draft_vocab_size", ("truncated_vocab_size",), is_count=True),  # SpecForge's word in its early days
    only("hidden_act", *ACTIVATIONS),
    flag("attention_bias", sets="qkv_bias"),
    flag("mlp_bias", sets="mlp_bias"),
    flag("use_sliding_window"),
    *map(Key, ("layer_types",)),
    Key("sliding_window", ("swa_window_size",)),
    only("use_aux_hidden_state", True),
    *COMMON,
)


def layers_from_hf(
    stated: Stated, target: ModelConfig | None, windows: Sequence[int], *, dtype: str
) -> dict[str, Any]:  # fields of a `ModelConfig`
    """Read what a config.json says of a head's layers, beside their windows. Raises ConfigError."""
    sizes = {ours: stated.get(key) for key, ours in SIZES.items()}
    biases = stated.fields("qkv_bias", "mlp_bias")
    return sizes | {
        "num_layers": sizes["num_layers"] or 1,
        "num_kv_heads": sizes["num_kv_heads"] or sizes["num_heads"],
        "head_dim": stated.head_dim,
        "norm_eps": stated.get("rms_norm_eps", 1e-6),
        "vocab_size": stated.get("vocab_size"),
        "max_len": stated.get("max_position_embeddings") or (target.max_len if target else 2048),
        "rope": stated.rope(),
        "layers": windowed(windows),
        "activation": ACTIVATIONS[stated.get("hidden_act", "silu")],
        **biases,
        "o_bias": biases["qkv_bias"],
        "dtype": dtype,
    }


def layer_kinds(stated: Stated, num_layers: int) -> list[str] | None:
    """Read whether each layer slides, as `layer_types` states; None where it is not stated. Raises ConfigError."""
    kinds, path = stated.get("layer_types"), stated.path("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or any(kind not in (SLIDING, FULL) for kind in kinds):
        raise ConfigError(f"{stated.where}: {path} is {kinds!r}; expected a list of {SLIDING} and {FULL}")
    if len(kinds) != num_layers:
        raise ConfigError(f"{stated.where}: {path} has {len(kinds)} entries for {num_layers} layers")
    return kinds


def sized_windows(stated: Stated, kinds: Sequence[str]) -> tuple[int, ...]:
    """Return the window of each layer, in tokens, the query's own among them; 0 means none. Raises ConfigError where
    one that slides has no size."""
    window = stated.get("sliding_window")
    if SLIDING in kinds and not is_count(window):
        path = stated.path("sliding_window")
        raise ConfigError(f"{stated.where}: windows without a size: {path} is {window!r}")
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def stated_taps(stated: Stated, keys: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the layers whose outputs each of these keys names, which may count from further on. Raises ConfigError."""
    found = {}
    for key, first in keys.items():
        if (ids := stated.get(key)) is None:
            continue
        if not isinstance(ids, list) or any(type(i) is not int for i in ids):
            raise ConfigError(f"{stated.where}: {key} must list layers, got {ids!r}")
        found[key] = [i - first for i in ids]
    return found


def read_taps(
    stated: Stated, keys: Mapping[str, int], usual: Callable[[], tuple[int, ...]], num_layers: int | None
) -> tuple[int, ...]:
    """Return the layers whose outputs are tapped, the usual ones where no key says so. Raises ConfigError where keys
    disagree, or the target has no such layers; None: their number is not known."""
    found = stated_taps(stated, keys)
    if any(taps != next(iter(found.values())) for taps in found.values()):
        named = "; ".join(f"{key}: outputs of {taps}" for key, taps in found.items())
        raise ConfigError(f"{stated.where}: the taps are stated in two ways that disagree: {named}")
    taps = tuple(next(iter(found.values()))) if found else usual()
    if num_layers is not None and any(not 0 <= i < num_layers for i in taps):
        raise ConfigError(f"{stated.where}: taps layers {taps}, the target has layers 0..{num_layers - 1}")
    return taps


def window_keys(config: ModelConfig) -> dict[str, Any]:
    """Write the windows of the layers. All windows of a head are of one size."""
    windows = windows_of(config)
    return {
        "layer_types": [SLIDING if window else FULL for window in windows],
        "use_sliding_window": any(windows),  # without it transformers forgets the window
        "sliding_window": max(windows) or None,
        "max_window_layers": next((i for i, window in enumerate(windows) if window), config.num_layers),
    }


def layer_to_hf(
    config: ModelConfig, target: Target, *, model_type: str, dtype: str, has_windows: bool = True
) -> dict[str, Any]:
    """Write the part of a config.json that describes a head's own layers, in the keys of a Llama or a Qwen3, or of a
    Gemma 4 where the layers are such."""
    bos_id = read_json(target.folder / CONFIG).get("bos_token_id")
    layer = {
        "model_type": model_type,
        **{key: getattr(config, ours) for key, ours in SIZES.items()},
        "hidden_act": next(key for key, activation in ACTIVATIONS.items() if activation == config.activation),
        "rms_norm_eps": config.norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_len,
        **rope_keys(config.rope, config.head_dim),
        **(window_keys(config) if has_windows else {}),
        "attention_bias": config.qkv_bias,
        **({"mlp_bias": True} if config.mlp_bias else {}),
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": bos_id if isinstance(bos_id, int) else None,
        "eos_token_id": next(iter(target.eos_ids), None),
    }
    return gemma.to_hf(layer, config) if gemma.has_gemma_layers(config) else layer


def nested_config(
    layer: dict[str, Any], algorithm: str, num_tokens: int, target: Target, target_name: str
) -> dict[str, Any]:
    """Write the part of a config.json in the layout of speculators that is alike for all kinds: the settings of the
    layers (`layer_to_hf`), and what vLLM reads of the target and of how many tokens a head proposes. Its readers came
    after transformers renamed `torch_dtype`."""
    layer["dtype"] = layer.pop("torch_dtype")
    raw = read_json(target.folder / CONFIG)
    proposal = speculators_config(algorithm, num_tokens, target_name, raw, verifier_accept_k=1, accept_tolerance=0.0)
    return {"tie_word_embeddings": False, "dtype": layer["dtype"], LAYER: layer, "speculators_config": proposal}
