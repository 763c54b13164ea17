"""EAGLE-3 heads as others write them. The only file that knows their names and the spellings of layer ids.

SGLang (our own layout) and sglang-jax: tensors `midlayer.*`, layer ids name the OUTPUT of layer i. vLLM and
speculators: tensors `layers.0.*`, layer ids name the INPUT of layer i + 1. The same taps, one apart. Further layers of
a head are `layers.1.*` and so on everywhere, but what norms the stream before their attention is `hidden_norm` in
SGLang and `input_layernorm` in vLLM and speculators, none of which miss the one that they want.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from specserve.checkpoints.load import Target
from specserve.drafters.eagle3.config import Eagle3Config, default_taps
from specserve.drafters.layers import windows_of
from specserve.errors import ConfigError
from specserve.interop import gemma, key_checks, layers
from specserve.interop.findings import FAULTS, Dialect, Finding
from specserve.interop.keys import (
    HARMLESS,
    LAYER,
    OF_NOTHING,
    OLD_ROPE,
    ROPE,
    SLIDING,
    Key,
    KeyTable,
    Stated,
    architectures,
    counts,
    find,
    flag,
    inner,
    only,
)
from specserve.interop.layers import LAYER_KEYS, layer_kinds, layer_to_hf, layers_from_hf, nested_config, sized_windows
from specserve.interop.published import D2T, EMBEDDING, OUTPUT, rope_keys
from specserve.models.config import Latent, ModelConfig, Names
from specserve.models.families.latent import scale_of

EAGLE, TAP_IDS = "eagle_config", "eagle_aux_hidden_state_layer_ids"
OUTPUT_TAPS = "target_layer_ids"  # DeepSpec's, of outputs in every layout
FLAGS = ("norm_before_residual", "fc_norm", "norm_before_fc", "norm_output")

NORMED_CLASSES = frozenset(  # with norms of queries and keys: vLLM's, and DeepSpec's
    ("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM", "Qwen3Eagle3Model")
)
LATENT_CLASSES = frozenset(("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"))  # with latent attention
LATENT_KEYS: Mapping[str, str] = {  # and our names
    "kv_lora_rank": "kv_rank",
    "qk_nope_head_dim": "nope_dim",
    "qk_rope_head_dim": "rope_dim",
    "v_head_dim": "v_dim",
    "q_lora_rank": "q_rank",
}
KEYS = KeyTable(
    [
        *LAYER_KEYS,
        *counts("num_hidden_layers", "num_aux_hidden_states"),
        *(flag(name, sets=name) for name in FLAGS),
        *map(Key, (TAP_IDS, OUTPUT_TAPS)),
        *counts(*LATENT_KEYS),
        Key("rope_interleave", fits=lambda value: isinstance(value, bool), expected="true or false"),
        only("use_swa", False),
        # Model-Optimizer's and AngelSlim's
        only("use_input_layernorm_in_first_layer", True),
        only("use_last_layernorm", True),
        only("use_mtp_layernorm", False),
        only("next_layer_regular", True),
        only("parallel_draft_step", 1, 0),
        Key("parallel_draft_heads_num_layers"),  # of the further steps
        only("use_qk_norm", False),
        only("use_cla", False),
        only("norm_type", "rms"),
        only("use_rotary_pos_emb", True),
        only("logit_scale", 1),
    ],
    classes=frozenset(
        (
            *("Eagle3DraftModel", "Eagle3Speculator"),  # speculators', now and in its early days
            *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
            *("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"),  # vLLM's, of the same head
            *("Eagle3Qwen3ForCausalLM", "Qwen3Eagle3Model"),
            gemma.CLASSES["eagle3"],
            *LATENT_CLASSES,
        )
    ),
    model_types=frozenset({"eagle3"}),
    places=frozenset({EAGLE}),
    harmless=HARMLESS | OF_NOTHING["eagle3"],
    translate=gemma.plain,
)

CHECKS = FAULTS["eagle3"]

_FLAT, _NESTED = "LlamaForCausalLMEagle3", "Eagle3DraftModel"
ARCHITECTURES: dict[Dialect, str] = {"sglang": _FLAT, "vllm": _FLAT, "speculators": _NESTED, "sglang-jax": _FLAT}
NORMED: Mapping[Dialect, str] = {"vllm": "Eagle3Qwen3ForCausalLM"}  # with norms of queries and keys
_QWEN3 = "qwen3"  # in the names of classes whose layers have those norms
SPECULATIVE_TOKENS = 3  # a speculators config suggests so many to vLLM; a flag of the server overrides it
COUNTED_FROM: Mapping[Dialect, int] = {"sglang": 0, "sglang-jax": 0, "vllm": 1, "speculators": 1}  # of layer 0's output
_D2T_NAMES = (D2T, "draft_id_to_target_id")
_NO_TAPS = (0, 1, 2)  # three of a target that nobody named
_FURTHER_NORM = re.compile(r"^(layers\.[1-9]\d*\.)hidden_norm\.")

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # the names of the mask's token in heads with masked slots


def mask_ids(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The token in masked slots by every path at which it stands; none of a head that has no such slots."""
    return dict(find(raw, MASK_KEYS))


def is_input_named(names: frozenset[str]) -> bool:
    """Return whether the layer's tensors are named as vLLM and speculators name them."""
    return any(name.removeprefix("model.").startswith("layers.0.") for name in names)


def dialect_of(raw: Mapping[str, Any], names: frozenset[str]) -> Dialect:
    """Return the dialect that a head is written in. SGLang's and sglang-jax's are one."""
    if LAYER in raw or "speculators_model_type" in raw:
        return "speculators"
    return "vllm" if is_input_named(names) else "sglang"


def renamer(names: frozenset[str]) -> Callable[[str], str]:
    """Return a function from our tensor names to the folder's, which may put `model.` before all but the head."""

    def rename(name: str) -> str:
        spelled = [name, _as_vllm(name)]
        if is_input_named(names):
            spelled.reverse()
        spellings = [prefix + each for each in spelled for prefix in ("", "model.")]
        return next((each for each in (*spellings, *(_D2T_NAMES if name == D2T else ())) if each in names), spelled[0])

    return rename


def _as_vllm(name: str) -> str:
    return _FURTHER_NORM.sub(r"\1input_layernorm.", name.replace("midlayer.", "layers.0.", 1))


def read_windows(stated: Stated) -> tuple[int, ...]:
    """Read the window of each layer (`layers.sized_windows`). Engines go by `layer_types` alone: a window that is
    stated otherwise may have been trained with or not. Raises ConfigError."""
    num_layers, slides = stated.get("num_hidden_layers", 1), stated.get("use_sliding_window")
    if (kinds := layer_kinds(stated, num_layers)) is not None:
        if SLIDING in kinds and slides is False:
            raise ConfigError(f"{stated.where}: {stated.path('use_sliding_window')} is False, and layer_types {kinds}")
        return sized_windows(stated, kinds)
    for name in ("use_sliding_window", "sliding_window"):
        if slides is not False and (value := stated.get(name)) is not None:
            raise ConfigError(
                f"{stated.where}: {stated.path(name)} is {value!r}, and no layer_types state of which layers; expected "
                "them, or use_sliding_window false"
            )
    return (0,) * num_layers


def check_masks(stated: Stated) -> Iterator[Finding]:
    """Check that every layer that slides has a window."""
    if not stated.bad_counts():
        yield from key_checks.check_windows(stated, read_windows)


def is_normed(stated: Stated) -> bool:
    """Return whether the model class that a head names norms queries and keys, as layers of Qwen3 and of Gemma 4 do.
    In a flat layout trainers leave the target's own `model_type`, which says nothing."""
    kind = inner(stated.raw, LAYER).get("model_type")
    is_named = any(_QWEN3 in name.lower() for name in architectures(stated.raw) & NORMED_CLASSES)
    return kind == _QWEN3 or is_named or gemma.is_gemma(stated.raw)


def latent_from_hf(stated: Stated) -> dict[str, Any]:
    """Read the fields of a head with latent attention; none of another one. Raises ConfigError."""
    is_latent, stated_sizes = bool(architectures(stated.raw) & LATENT_CLASSES), [*map(stated.get, LATENT_KEYS)]
    required = stated_sizes[:-1]  # queries may be projected in one matrix
    if None in required if is_latent else any(stated_sizes):
        given = ", ".join(f"{key} {stated.get(key)}" for key in LATENT_KEYS)
        classes = " or ".join(sorted(LATENT_CLASSES))
        raise ConfigError(
            f"{stated.where}: {given}; expected all but q_lora_rank in a head of {classes}, and none in others"
        )
    if not is_latent:
        return {}
    latent = Latent(**{ours: stated.get(key, 0) for key, ours in LATENT_KEYS.items()})
    rope = replace(stated.rope(), is_interleaved=stated.get("rope_interleave", True))
    scales = stated.get("mscale", 0.0), stated.get("mscale_all_dim", 0.0)
    return {
        "latent": latent,
        "head_dim": latent.rope_dim,
        "num_kv_heads": 1,
        "rope": rope,
        "yarn_scales": scales,
        "attention_scale": scale_of(latent, rope, scales[1]),
    }


def latent_to_hf(config: Eagle3Config) -> dict[str, Any]:
    """Write what `latent_from_hf` reads; nothing of a head with plain attention."""
    if config.latent is None:
        return {}
    rope = rope_keys(config.rope, config.head_dim)
    scales = {key: value for key, value in zip(("mscale", "mscale_all_dim"), config.yarn_scales, strict=True) if value}
    for spelling in (OLD_ROPE, ROPE):
        rope[spelling] = rope[spelling] and {**rope[spelling], **scales}
    sizes = {key: getattr(config.latent, ours) or None for key, ours in LATENT_KEYS.items()}
    of_heads = {"num_key_value_heads": config.num_heads, "head_dim": None}
    return {**rope, **sizes, **of_heads, "rope_interleave": config.rope.is_interleaved}


def read_taps(
    stated: Stated, names: frozenset[str], usual: tuple[int, ...] = (), num_layers: int | None = None
) -> tuple[int, ...]:
    """Return the layers whose outputs are tapped. Raises ConfigError as `layers.read_taps` does."""
    keys = {TAP_IDS: COUNTED_FROM[dialect_of(stated.raw, names)], OUTPUT_TAPS: 0}
    return layers.read_taps(stated, keys, lambda: usual, num_layers)


def check_shape(stated: Stated) -> Iterator[Finding]:
    """Check that the head's shape is stated."""
    yield from key_checks.check_sizes(stated.bad_counts())


def check_output(stated: Stated, names: frozenset[str]) -> Iterator[Finding]:
    """Check that a head without output rows says which it shares: the target's, unless it ties them to an embedding."""
    if renamer(names)(OUTPUT) not in names:
        for path, value in find(stated.raw, ("tie_word_embeddings",)):
            if value is True:
                yield key_checks.uncomputed(path, value, f"false in a head without {OUTPUT}")


def check_layers(stated: Stated) -> Iterator[Finding]:
    """Check that the layers are of a model, and turned in a way, that is computed."""
    kind, turned = inner(stated.raw, LAYER).get("model_type"), stated.get("rope_interleave")
    if kind not in (None, "llama", _QWEN3):
        yield key_checks.uncomputed(f"{LAYER}.model_type", kind, f"'llama' or {_QWEN3!r}")
    if turned is True and architectures(stated.raw).isdisjoint(LATENT_CLASSES):
        yield key_checks.uncomputed(stated.path("rope_interleave"), turned, "false in a head without latent attention")


OF_KEYS = (*key_checks.OF_ALL, check_masks, check_shape, check_layers)  # loaders make them too


def draft_config_from_hf(
    stated: Stated, target: ModelConfig | None, names: frozenset[str], *, dtype: str
) -> Eagle3Config:
    """Read a head's config.json against its target. Without one the taps are only as many as they should be. Raises
    ConfigError."""
    key_checks.refuse_keys(stated, OF_KEYS)
    usual = _NO_TAPS if target is None or stated.get(TAP_IDS) or stated.get(OUTPUT_TAPS) else default_taps(target)
    aux_layers = read_taps(stated, names, usual, target.num_layers if target else None)
    if (count := stated.get("num_aux_hidden_states", len(aux_layers))) != len(aux_layers):
        raise ConfigError(f"{stated.where}: num_aux_hidden_states is {count}, the taps are layers {aux_layers}")
    target_width = target.d_model if target else stated.get("hidden_size")
    sizes = layers_from_hf(stated, target, read_windows(stated), dtype=dtype) | latent_from_hf(stated)
    rename = renamer(names)
    draft_vocab_size = stated.get("draft_vocab_size", sizes["vocab_size"])
    has_norms = rename("midlayer.self_attn.q_norm.weight") in names or is_normed(stated)
    sizes |= {"qk_norm": "head" if has_norms else ""} | gemma.fields(stated.raw, stated.where, Names())
    return Eagle3Config(
        **sizes,
        target_d_model=stated.get("target_hidden_size", target_width),
        draft_vocab_size=draft_vocab_size,
        aux_layers=aux_layers,
        has_embedding=rename(EMBEDDING) in names,
        has_own_head=rename(OUTPUT) in names or draft_vocab_size != sizes["vocab_size"],
        **stated.fields(*FLAGS),
    )


def draft_config_to_hf(
    config: Eagle3Config, target: Target, *, dtype: str, dialect: Dialect, target_name: str
) -> dict[str, Any]:
    """Write the config.json of a head, with both spellings of the rotary settings. Only speculators names the
    target."""
    layer = layer_to_hf(
        config,
        target,
        model_type="deepseek_v3" if config.latent else _QWEN3 if config.qk_norm else "llama",
        dtype=dtype,
        has_windows=any(windows_of(config)),
    )
    layer |= latent_to_hf(config)
    name = NORMED.get(dialect, ARCHITECTURES[dialect]) if config.qk_norm else ARCHITECTURES[dialect]
    if config.latent:
        name = min(LATENT_CLASSES)
    if gemma.has_gemma_layers(config):
        name = gemma.CLASSES["eagle3"]
    head: dict[str, Any] = {"architectures": [name], "target_hidden_size": config.target_d_model}
    if config.has_own_head or dialect == "speculators":  # SGLang shares the target's head where there is no such key
        head["draft_vocab_size"] = config.draft_vocab_size
    flags = {flag: getattr(config, flag) for flag in FLAGS}
    output_ids = list(config.aux_layers)
    input_ids = [i + 1 for i in output_ids]
    if dialect == "speculators":  # its readers assume other flags than plain EAGLE-3's where one is left out
        return {
            **head,
            "speculators_model_type": "eagle3",
            **flags,
            TAP_IDS: input_ids,
            "embed_requires_grad": False,
            **nested_config(layer, "eagle3", SPECULATIVE_TOKENS, target, target_name),
        }
    out = {**head, **layer} | {flag: True for flag, value in flags.items() if value}
    if gemma.has_gemma_layers(config):
        return out | {OUTPUT_TAPS: output_ids}
    if target.config.num_layers >= 5 and config.aux_layers == default_taps(target.config):
        return out  # without taps, because readers count them differently
    if dialect == "vllm":
        return out | {TAP_IDS: input_ids, "num_aux_hidden_states": len(input_ids)}
    return out | {EAGLE: {"use_aux_hidden_state": True, TAP_IDS: output_ids}}


def name_tensors(tensors: Mapping[str, np.ndarray], dialect: Dialect) -> dict[str, np.ndarray]:
    """Put tensors with our names under those of a flavour."""
    if dialect in ("sglang", "sglang-jax"):
        return dict(tensors)
    return {_as_vllm(name): value for name, value in tensors.items()}
