"""The files of DFlash heads: their config.json and the names of their tensors.

There are two layouts. That of z-lab's own heads (`DFlashDraftModel`, keys of a Qwen3 with some more in `dflash_config`
or beside it) is ours too, and what SGLang, vLLM and sglang-jax read. That of speculators keeps the layers' settings in
`transformer_layer_config` and counts taps by the inputs of layers, one more than z-lab's for the same states. A key
that nobody here knows is an error: an engine that did not know of windows accepted a quarter of what it could.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import CONFIG, read_json
from specserve.drafters.dflash.config import DFlashConfig, short_windows
from specserve.drafters.dflash.start import NAMES, default_taps
from specserve.errors import ConfigError
from specserve.interop.published import (
    ACTIVATION,
    D2T,
    EMBEDDING,
    OUTPUT,
    TRANSFORMERS_KEYS,
    architectures,
    inner,
    is_eps,
    layer_to_hf,
    sizes_from_hf,
    speculators_config,
)
from specserve.models.config import LayerKind, ModelConfig
from specserve.models.rope import rope_from_hf

Layout = Literal["z-lab", "speculators"]
ARCHITECTURES: Mapping[str, tuple[str, ...]] = {  # the first is written; for speculators the second, if there is one
    "dflash": ("DFlashDraftModel", "DFlashSpeculator"),
    "dspark": ("Qwen3DSparkModel", "DSparkSpeculator", "DSparkDraftModel"),
    "dflash2": ("DFlash2DraftModel",),
}
_SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
OWN, LAYER = "dflash_config", "transformer_layer_config"
TAPS, INPUT_TAPS = "target_layer_ids", ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_MORE_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings", "draft_vocab_size", "target_hidden_size")
# keys that decide how a head is computed, beyond its sizes; in `dflash_config`, which comes first, or beside it
_MEANING = {
    *("block_size", "mask_token_id", TAPS, *INPUT_TAPS, "causal", "use_swa", "swa_window_size", "attention_sink_bias"),
    *("add_swa_attention_sink_bias", "use_aux_hidden_state", "input_embedding_scale", "output_multiplier"),
    *("logit_scale", "final_logit_softcapping", "attention_value_scale", "sample_from_anchor"),
    *("is_causal", "sliding_window_non_causal", "is_neox_style", "num_target_layers", "layer_types", "sliding_window"),
    *("use_sliding_window", "max_window_layers", "rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias"),
    *("rope_theta", "rope_scaling", "rope_parameters", "has_own_lm_head", "dspark_bonus_anchor"),
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov", *_SELECTOR),
}
# keys that change nothing here: names, dtypes, token ids, training, and all that transformers writes of itself
HARMLESS = {
    *(*TRANSFORMERS_KEYS, "auto_map", "sep_token_id", "decoder_start_token_id", "tokenizer_class"),
    *("embed_requires_grad", "speculators_model_type", "speculators_version", "speculators_config"),
    *("_attn_implementation_autoset", "num_anchors", "loss_decay_gamma", "base_model_ep_plan"),
    *("has_no_defaults_at_init", "initial_context_length", "max_anchors", "auf", "ce_loss_alpha", "l1_loss_alpha"),
    *("confidence_head_alpha", "lambda_base_start", "lambda_base_decay_ratio"),
    *("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len"),  # of a projector that is none of ours, see UNCOMPUTED
}
UNCOMPUTED: Mapping[str, tuple[object, ...]] = {  # with the values that change nothing
    "attention_value_scale": (None, 1, 1.0),
    "use_aux_hidden_state": (None, True),
    "mlp_bias": (None, False),
    "hidden_act": (None, ACTIVATION),
    "markov_head_type": (None, "vanilla"),
    "projector_type": (None, "dflash"),
    "shift_label": (None, False),
}
OF_TARGET = "the target's own, which it was trained beside"
SKIPPED = {r"verifier_(norm|lm_head)\.weight": OF_TARGET}  # tensors that are not read
_DIALECTS = (("layers.0.", "midlayer."), ("fc.", "encoder.fc."), ("hidden_norm.", "encoder.output_norm_enc."))


@dataclass(frozen=True)
class Stated:
    """A config.json without its nesting."""

    layout: Layout
    top: Mapping[str, Any]  # of the layers, and what stands beside them
    own: Mapping[str, Any]  # dflash_config
    where: str
    kind: str

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value from wherever it stands."""
        value = self.own.get(name)
        value = self.top.get(name) if value is None else value
        return default if value is None else value

    @property
    def unknown(self) -> list[str]:
        """List the keys that this file does not know."""
        known = {*SIZES, *_MORE_SIZES, *_MEANING, *HARMLESS, *UNCOMPUTED}
        return [*sorted({*self.top} - known - {OWN, LAYER}), *(f"{OWN}.{key}" for key in sorted({*self.own} - known))]


def read_stated(raw: Mapping[str, Any], where: str) -> Stated:
    """Take the nesting out. Raises ConfigError where a part is no object."""
    layer = inner(raw, LAYER)
    layout: Layout = "speculators" if LAYER in raw or "speculators_model_type" in raw else "z-lab"
    return Stated(layout, {**layer, **raw}, inner(raw, OWN), where, kind_named(raw) or "dflash")


def kind_named(raw: Mapping[str, Any]) -> str | None:
    """Return the kind of DFlash drafter that a config.json is of, or None where it is of none of them."""
    if "speculators_model_type" in raw:
        return next((kind for kind in ARCHITECTURES if kind == raw["speculators_model_type"]), None)
    names = architectures(raw)
    return next((kind for kind, known in ARCHITECTURES.items() if not names.isdisjoint(known)), None)


def config_from_hf(
    raw: Mapping[str, Any], target: ModelConfig | None, names: frozenset[str], *, dtype: str, where: str
) -> DFlashConfig:
    """Read a head's config.json; `names` are those of its tensors. Without a target the number of its layers is not
    known, and where no taps are stated, only their number is right. Raises ConfigError."""
    stated = read_stated(raw, where)
    _check_keys(stated)
    has_bias = bool(stated.get("attention_bias", False))
    windows = read_windows(stated)
    backbone = ModelConfig(
        family="qwen3",
        **sizes_from_hf(stated.get, target),
        rope=rope_from_hf(stated.top, where),
        layers=tuple(LayerKind(window=window) for window in windows),
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm="head",
        logit_softcap=float(stated.get("final_logit_softcapping", 0.0)),
        has_sinks=bool(stated.get("attention_sink_bias", stated.get("add_swa_attention_sink_bias", False))),
        names=NAMES,
        dtype=dtype,
    )
    rename = renamer(names)
    draft_vocab_size = stated.get("draft_vocab_size", backbone.vocab_size)
    return DFlashConfig(
        backbone=backbone,
        aux_layers=read_taps(stated, target),
        draft_vocab_size=draft_vocab_size,
        block_size=stated.get("block_size"),
        mask_token_id=stated.get("mask_token_id"),
        is_causal=read_causal(stated, windows),
        has_embedding=rename(EMBEDDING) in names,
        has_own_head=rename(OUTPUT) in names and draft_vocab_size == backbone.vocab_size,
        embedding_scale=float(stated.get("input_embedding_scale", 1.0)),
        output_scale=float(stated.get("output_multiplier", 1.0)) * float(stated.get("logit_scale", 1.0)),
        foresees_anchor=read_foresees_anchor(stated),
        **_joint(stated, rename("confidence_head.proj.bias") in names),
    )


def _check_keys(stated: Stated) -> None:
    """Raises ConfigError unless every key is known, and the shape can be made of them."""
    where = stated.where
    if wrong := bad_sizes(stated):
        named = ", ".join(f"{key} is {stated.get(key)!r}" for key in wrong)
        raise ConfigError(f"{where}: {named}; expected positive whole numbers. Is it the config.json of a DFlash head?")
    if stated.unknown:
        raise ConfigError(
            f"{where}: {', '.join(stated.unknown)}: not known to us, so the head might be computed as another one than "
            "was trained. Take them out if they say nothing of how it is computed"
        )
    for key, harmless in UNCOMPUTED.items():
        if (value := stated.get(key)) not in harmless:
            raise ConfigError(f"{where}: {key} is {value!r}, which is not computed here; expected {harmless[-1]!r}")
    if not stated.get("is_neox_style", True):
        raise ConfigError(f"{where}: is_neox_style is False: a head that turns neighbours is not computed here")
    if not is_eps(eps := stated.get("rms_norm_eps", 1e-6)):
        raise ConfigError(f"{where}: rms_norm_eps is {eps!r}; expected a number above 0 and at most 0.01")
    mask, vocab_size = stated.get("mask_token_id"), stated.get("vocab_size")
    if type(mask) is not int or not 0 <= mask < vocab_size:
        raise ConfigError(
            f"{where}: mask_token_id is {mask!r}; expected a token of the target's embedding, 0..{vocab_size - 1}"
        )
    block, windows = stated.get("block_size"), read_windows(stated)
    if short := short_windows(windows, read_causal(stated, windows), block):
        raise ConfigError(
            f"{where}: a window of {short[0]}, shorter than the block of {block}, is not computed here where positions "
            "see what follows them"
        )
    if disagrees_about_anchor(stated):
        raise ConfigError(
            f"{where}: sample_from_anchor and dspark_bonus_anchor are both {stated.get('sample_from_anchor')!r}, but "
            "each is what the other is not; keep the one that the head was trained with"
        )
    if stated.get("draft_vocab_size", vocab_size) > vocab_size:
        raise ConfigError(f"{where}: draft_vocab_size is {stated.get('draft_vocab_size')} of a vocabulary {vocab_size}")


def read_foresees_anchor(stated: Stated) -> bool:
    """Return whether the anchor's own slot predicts a token: as stated, or else as the kind has it."""
    bonus = stated.get("dspark_bonus_anchor")
    default = stated.kind == "dspark" if bonus is None else not bonus
    return bool(stated.get("sample_from_anchor", default))


def disagrees_about_anchor(stated: Stated) -> bool:
    """Return whether the two keys about the anchor's own slot disagree on whether it predicts a token."""
    foresees, bonus = stated.get("sample_from_anchor"), stated.get("dspark_bonus_anchor")
    return None not in (foresees, bonus) and bool(foresees) == bool(bonus)


def _joint(stated: Stated, has_confidence_bias: bool) -> dict[str, Any]:
    """Read the settings of the heads that make slots depend on each other. Raises ConfigError."""
    required = {"dspark": ("markov_rank",), "dflash2": _SELECTOR}.get(stated.kind, ())
    given = {key: stated.get(key) for key in required}
    if wrong := [f"{key} is {value!r}" for key, value in given.items() if type(value) is not int or value <= 0]:
        named = ", ".join(wrong)
        raise ConfigError(f"{stated.where}: {named}; expected positive whole numbers in a {stated.kind} head")
    if stated.kind == "dspark":
        is_default = stated.layout == "speculators"
        sees_token = stated.get("confidence_head_with_markov", is_default)
        has_confidence = stated.get("enable_confidence_head", is_default)
        return {
            "markov_rank": given["markov_rank"],
            "confidence": ("state and token" if sees_token else "state") if has_confidence else "",
            "has_confidence_bias": has_confidence_bias,
        }
    if stated.kind == "dflash":
        return {}
    taps, group, rank, top_k = (stated.get(key) for key in _SELECTOR)
    vocab_size, width, block_size = (stated.get(key) for key in ("vocab_size", "hidden_size", "block_size"))
    if width % group or taps > block_size or top_k > vocab_size:
        raise ConfigError(
            f"{stated.where}: conv_group_size {group} must divide the width {width}, conv_kernel_size {taps} be no "
            f"more than the block's {block_size} slots, and selector_top_k {top_k} no more than the {vocab_size} tokens"
        )
    if (rows := stated.get("draft_vocab_size", vocab_size)) != vocab_size:
        raise ConfigError(
            f"{stated.where}: draft_vocab_size is {rows}; a dflash2 head proposes all {vocab_size} tokens"
        )
    return {"conv_taps": taps, "conv_group": group, "selector_rank": rank, "selector_top_k": top_k}


def bad_sizes(stated: Stated) -> list[str]:
    """List the keys that must be counts and are not, or that are missing where nothing else states them."""
    given = {key: stated.get(key) for key in (*SIZES, "block_size", *_MORE_SIZES, "num_target_layers")}
    wrong = [
        key
        for key, value in given.items()
        if (type(value) is not int or value <= 0) and (value is not None or key in (*SIZES, "block_size"))
    ]
    fewest = 1 if read_foresees_anchor(stated) else 2
    return wrong or (["block_size"] if given["block_size"] < fewest else [])


def read_windows(stated: Stated) -> tuple[int, ...]:
    """Read the window of each layer, in tokens, the slot's own among them; 0 means none. With `use_swa` every layer
    has a window where `layer_types` gives none to any. Raises ConfigError."""
    num_layers, kinds = stated.get("num_hidden_layers"), stated.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or not {*kinds} <= {SLIDING, FULL}):
        raise ConfigError(f"{stated.where}: layer_types is {kinds!r}; expected a list of {SLIDING} and {FULL}")
    if kinds is not None and len(kinds) != num_layers:
        raise ConfigError(f"{stated.where}: layer_types has {len(kinds)} entries for {num_layers} layers")
    kinds = kinds or [FULL] * num_layers
    if stated.get("use_swa", False) and SLIDING not in kinds:
        kinds = [SLIDING] * num_layers
    window = stated.get("swa_window_size", stated.get("sliding_window"))
    if SLIDING in kinds and (type(window) is not int or window <= 0):
        raise ConfigError(f"{stated.where}: windows without a size: sliding_window is {window!r}")
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def read_causal(stated: Stated, windows: Sequence[int]) -> tuple[bool, ...]:
    """Return whether a slot of each layer sees only those before it: as stated for all layers, or else where
    `layer_types` says that the layer slides. The words `is_causal`, `causal` and `sliding_window_non_causal` go in
    that order."""
    for key in ("is_causal", "causal"):
        if (value := stated.get(key)) is not None:
            return (bool(value),) * len(windows)
    if stated.get("sliding_window_non_causal", stated.layout == "speculators" and stated.kind == "dflash2"):
        return (False,) * len(windows)
    kinds = stated.get("layer_types") or [FULL] * len(windows)
    return tuple(kind == SLIDING for kind in kinds)


def stated_taps(stated: Stated) -> dict[str, list[int]]:
    """Return the layers whose outputs each key names. Raises ConfigError."""
    found = {}
    for key in (TAPS, *INPUT_TAPS):
        if (ids := stated.get(key)) is None:
            continue
        if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
            raise ConfigError(f"{stated.where}: {key} must list layers, got {ids!r}")
        found[key] = [i - (key != TAPS) for i in ids]
    return found


def read_taps(stated: Stated, target: ModelConfig | None) -> tuple[int, ...]:
    """The layers whose outputs are tapped. Raises ConfigError where keys disagree, or the target has no such layers."""
    found = stated_taps(stated)
    if any(taps != next(iter(found.values())) for taps in found.values()):
        named = "; ".join(f"{key}: outputs of {taps}" for key, taps in found.items())
        raise ConfigError(f"{stated.where}: the taps are stated in two ways that disagree: {named}")
    num_layers = target.num_layers if target else stated.get("num_target_layers", 64)
    taps = tuple(next(iter(found.values()))) if found else default_taps(num_layers, stated.get("num_hidden_layers"))
    if any(not 0 <= i < num_layers for i in taps):
        raise ConfigError(f"{stated.where}: taps layers {taps}, the target has layers 0..{num_layers - 1}")
    return taps


def renamer(names: frozenset[str]) -> Callable[[str], str]:
    """A function from our tensor names, which are z-lab's, to the folder's."""

    def rename(name: str) -> str:
        spelled = [name, *(name.replace(ours, other, 1) for ours, other in _DIALECTS if name.startswith(ours))]
        if name == D2T:
            spelled.append("draft_id_to_target_id")
        if name.endswith("_codebook"):
            spelled.append(f"{name}.weight")
        return next((p + each for each in spelled for p in ("", "model.") if p + each in names), name)

    return rename


def count_layers(names: frozenset[str]) -> int:
    """The number of layers that there are tensors of."""
    found = [re.match(r"(?:model\.)?(?:layers\.(\d+)|midlayer)\.", name) for name in names]
    return max((1 + int(match[1] or 0) for match in found if match), default=0)


def config_to_hf(
    config: DFlashConfig, target: Target, *, dtype: str, layout: Layout, target_name: str
) -> dict[str, Any]:
    """Write the config.json of a head. Only speculators names the target."""
    backbone, windows = config.backbone, list_windows(config)
    layer = layer_to_hf(
        backbone,
        target,
        model_type="qwen3",
        dtype=dtype,
        has_bias=backbone.qkv_bias,
        layer_types=[SLIDING if window else FULL for window in windows],
        use_sliding_window=any(windows),  # without it transformers forgets the window
        sliding_window=max(windows) or None,
        max_window_layers=next((i for i, window in enumerate(windows) if window), backbone.num_layers),
    )
    if layout == "speculators":
        layer["dtype"] = layer.pop("torch_dtype")
        raw_target = read_json(target.folder / CONFIG)
        return {
            "architectures": [ARCHITECTURES[config.name][:2][-1]],
            "speculators_model_type": config.name,
            "draft_vocab_size": config.draft_vocab_size,
            "block_size": config.block_size,
            INPUT_TAPS[0]: [i + 1 for i in config.aux_layers],
            "mask_token_id": config.mask_token_id,
            "sliding_window_non_causal": not any(config.is_causal),
            "sample_from_anchor": config.foresees_anchor,
            **_joint_to_hf(config),
            "tie_word_embeddings": False,
            "dtype": dtype,
            LAYER: layer,
            "speculators_config": speculators_config(
                config.name, config.num_slots, target_name, raw_target, verifier_accept_k=1, accept_tolerance=0.0
            ),
        }
    own: dict[str, Any] = {"mask_token_id": config.mask_token_id, TAPS: list(config.aux_layers)}
    out = {"architectures": [ARCHITECTURES[config.name][0]], **layer, "block_size": config.block_size}
    if config.name == "dspark":  # readers of such heads look for everything at the top
        out |= {**own, **_joint_to_hf(config)}
    else:
        own |= _joint_to_hf(config)
    if config.foresees_anchor or config.name == "dspark":
        out |= {"sample_from_anchor": config.foresees_anchor, "dspark_bonus_anchor": not config.foresees_anchor}
    out |= {"num_target_layers": target.config.num_layers, OWN: own}
    if config.is_causal != tuple(window > 0 for window in windows):  # else the layers' kinds say it
        own["causal"] = out["is_causal"] = config.is_causal[0]
    for key, value, usual in (
        ("attention_sink_bias", backbone.has_sinks, False),
        ("input_embedding_scale", config.embedding_scale, 1),
        ("output_multiplier", config.output_scale, 1),
        ("final_logit_softcapping", backbone.logit_softcap, 0),
    ):
        if value != usual:
            own[key] = value
    if is_partial(config):
        out["draft_vocab_size"] = config.draft_vocab_size
    return out


def _joint_to_hf(config: DFlashConfig) -> dict[str, Any]:
    """Write the settings of the heads that make slots depend on each other, as keys of config.json."""
    if config.name == "dspark":
        return {
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": bool(config.confidence),
            "confidence_head_with_markov": config.confidence == "state and token",
        }
    sizes = (config.conv_taps, config.conv_group, config.selector_rank, config.selector_top_k)
    return dict(zip(_SELECTOR, sizes, strict=True)) if config.name == "dflash2" else {}


def unsaid_in(layout: Layout, config: DFlashConfig) -> list[str]:
    """List the properties of a head that a layout has no words for."""
    windows, causal = list_windows(config), list(config.is_causal)
    if layout == "z-lab":  # one word for all layers, or the kinds of layers
        return [] if len({*causal}) == 1 or causal == [w > 0 for w in windows] else ["causal layers among others"]
    unsaid = {
        "causal layers without windows": any(c and not w for c, w in zip(causal, windows, strict=True)),
        "windows of which some are causal": len({c for c, w in zip(causal, windows, strict=True) if w}) > 1,
        "attention sinks": config.backbone.has_sinks,
        "a scale of its embedding": config.embedding_scale != 1,
        "a scale of its logits": config.output_scale != 1,
        "a cap on its logits": config.backbone.logit_softcap,
        "an output head of its own for every token": config.has_own_head and not is_partial(config),
    }
    return [what for what, is_there in unsaid.items() if is_there]


def list_windows(config: DFlashConfig) -> list[int]:
    """Return the window of each layer, in tokens; 0 means none."""
    return [config.backbone.kind(i).window for i in range(config.backbone.num_layers)]


def is_partial(config: DFlashConfig) -> bool:
    """Return whether the head can propose a part of the vocabulary only."""
    return config.draft_vocab_size < config.backbone.vocab_size
