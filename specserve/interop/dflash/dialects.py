"""The files of DFlash heads: their config.json and the names of their tensors.

There are two layouts. That of z-lab's own heads (`DFlashDraftModel`, keys of a Qwen3 with some more in `dflash_config`
or beside it) is ours too, and what SGLang, vLLM and sglang-jax read. That of speculators keeps the layers' settings in
`transformer_layer_config` and counts taps by the inputs of layers, one more than z-lab's for the same states. A key
that nobody here knows is an error: an engine that did not know of windows accepted a quarter of what it could.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from specserve.checkpoints.load import Target
from specserve.drafters.dflash.config import DFlashConfig, short_windows
from specserve.drafters.dflash.start import NAMES, default_taps
from specserve.drafters.layers import windows_of
from specserve.errors import ConfigError
from specserve.interop import gemma, key_checks, layers
from specserve.interop.findings import FAULTS, Finding
from specserve.interop.keys import (
    FULL,
    HARMLESS,
    OF_NOTHING,
    SELECTOR,
    SLIDING,
    Key,
    KeyTable,
    Stated,
    architectures,
    counts,
    flag,
    is_count,
    number,
    only,
)
from specserve.interop.layers import LAYER_KEYS, layer_to_hf, layers_from_hf, nested_config, sized_windows
from specserve.interop.layers import layer_kinds as stated_kinds
from specserve.interop.published import D2T, EMBEDDING, OUTPUT, present
from specserve.models.config import ModelConfig

OWN = "dflash_config"
TAPS, INPUT_TAPS = "target_layer_ids", ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
COUNTED_FROM = {TAPS: 0, **dict.fromkeys(INPUT_TAPS, 1)}  # of layer 0's output
CORRECTION: Mapping[str, str] = {  # of Domino's heads
    "gru_hidden_dim": "gru_width",
    "emb_dim": "correction_rank",
    "pure_draft_prefix_len": "num_uncorrected",
}
ARCHITECTURES: Mapping[str, tuple[str, ...]] = {  # the first is written; for speculators the second, if there is one
    "dflash": ("DFlashDraftModel", "DFlashSpeculator"),
    "dspark": ("Qwen3DSparkModel", "DSparkSpeculator", "DSparkDraftModel", gemma.CLASSES["dspark"]),
    "dflash2": ("DFlash2DraftModel",),
    "domino": ("DominoDraftModel",),
}
# Any key may stand in `dflash_config`, beside it, or where speculators keeps the layers' settings.
KEYS = KeyTable(
    [
        *LAYER_KEYS,
        *counts("num_hidden_layers", "block_size", is_required=True),
        *counts("num_target_layers"),
        flag("attention_sink_bias", "add_swa_attention_sink_bias", sets="has_sinks"),
        number("input_embedding_scale", 1.0, sets="embedding_scale"),
        number("output_multiplier", 1.0, sets="output_scale"),
        number("logit_scale", 1.0, sets="logit_scale"),
        number("final_logit_softcapping", 0.0, sets="logit_softcap"),
        only("attention_value_scale", 1),
        only("attention_mode", "gqa", "mha"),  # the numbers of heads say it too
        only("markov_head_type", "vanilla", "gated", "rnn", aliases=("dspark_markov_head_type",)),
        # `dialects` reads these
        *map(flag, ("is_causal", "causal", "sliding_window_non_causal", "use_swa", "sample_from_anchor")),
        *map(flag, ("shift_label", "dspark_bonus_anchor", "enable_confidence_head", "confidence_head_with_markov")),
        *map(Key, ("mask_token_id", TAPS, *INPUT_TAPS, "max_window_layers", "projector_type")),
        Key("markov_rank", ("dspark_markov_rank",)),
        *map(Key, (*SELECTOR, *CORRECTION)),
    ],
    classes=frozenset(name for names in ARCHITECTURES.values() for name in names),
    model_types=frozenset(ARCHITECTURES),
    places=frozenset({OWN}),
    harmless=HARMLESS | OF_NOTHING["blocks"],
    translate=gemma.plain,
)

CHECKS = FAULTS["blocks"]

Layout = Literal["z-lab", "speculators"]
_FIRST_TO_SLIDE = 28  # `max_window_layers` of a Qwen3 that does not state it
OF_TARGET = "the target's own, which it was trained beside"
SKIPPED = {r"verifier_(norm|lm_head)\.weight": OF_TARGET}  # tensors that are not read
_DIALECTS = (("layers.0.", "midlayer."), ("fc.", "encoder.fc."), ("hidden_norm.", "encoder.output_norm_enc."))
_OF_GEMMA = ("embedding_scale", "logit_softcap")  # the class says the one, and Gemma's own key the other
_UNUSUAL = [key for key in KEYS.keys if key.sets in ("has_sinks", "embedding_scale", "output_scale", "logit_softcap")]


def kind_named(raw: Mapping[str, Any]) -> str | None:
    """Return the kind of DFlash drafter that a config.json is of, or None where it is of none of them."""
    if "speculators_model_type" in raw:
        return next((kind for kind in ARCHITECTURES if kind == raw["speculators_model_type"]), None)
    names = architectures(raw)
    return next((kind for kind, known in ARCHITECTURES.items() if not names.isdisjoint(known)), None)


def kind_of(stated: Stated) -> str:
    """Return the kind of DFlash drafter that a config.json is read as."""
    return kind_named(stated.raw) or "dflash"


def config_from_hf(stated: Stated, target: ModelConfig | None, names: frozenset[str], *, dtype: str) -> DFlashConfig:
    """Read a head's config.json; `names` are those of its tensors. Without a target the number of its layers is not
    known, and where no taps are stated, only their number is right. Raises ConfigError."""
    key_checks.refuse_keys(stated, OF_KEYS)
    windows, scales = read_windows(stated), stated.fields("embedding_scale", "output_scale", "logit_scale")
    own = gemma.fields(stated.raw, stated.where, NAMES)
    scales |= {key: own.pop(key) for key in ("embedding_scale",) if key in own}
    sizes = layers_from_hf(stated, target, windows, dtype=dtype) | stated.fields("logit_softcap", "has_sinks")
    backbone = ModelConfig(family="qwen3", **(sizes | {"qk_norm": "head", "names": NAMES} | own))
    rename = renamer(names)
    draft_vocab_size = stated.get("draft_vocab_size", backbone.vocab_size)
    if draft_vocab_size > backbone.vocab_size:
        raise ConfigError(
            f"{stated.where}: draft_vocab_size is {draft_vocab_size} of a vocabulary {backbone.vocab_size}"
        )
    return DFlashConfig(
        backbone=backbone,
        aux_layers=read_taps(stated, target),
        draft_vocab_size=draft_vocab_size,
        block_size=stated.get("block_size"),
        mask_token_id=stated.get("mask_token_id"),
        is_causal=read_causal(stated, windows),
        has_embedding=rename(EMBEDDING) in names,
        has_own_head=rename(OUTPUT) in names and draft_vocab_size == backbone.vocab_size,
        embedding_scale=scales["embedding_scale"],
        output_scale=scales["output_scale"] * scales["logit_scale"],
        foresees_anchor=read_foresees_anchor(stated),
        **_joint(stated, rename("confidence_head.proj.bias") in names),
    )


def check_shape(stated: Stated) -> Iterator[Finding]:
    """Check that the head's shape is stated."""
    return key_checks.check_sizes(bad_sizes(stated), "positive whole numbers, block_size at least 2")


def check_kind(stated: Stated) -> Iterator[Finding]:
    """Check that the projector and the model class, where they are named, are those of the kind."""
    kind = kind_of(stated)
    for path, value in stated.found.get("projector_type", {}).items():
        if value != kind:
            yield key_checks.uncomputed(path, value, repr(kind))
    if kind != "domino" and stated.get("shift_label", False):
        yield key_checks.uncomputed(stated.path("shift_label"), True, f"false in a {kind} head")
    for other in sorted(KEYS.classes & architectures(stated.raw) - {*ARCHITECTURES[kind]}):
        yield key_checks.uncomputed("architectures", other, " or ".join(ARCHITECTURES[kind]))


def check_masks(stated: Stated) -> Iterator[Finding]:
    """Check that every layer that slides has a window, and one that is computed."""
    if not bad_sizes(stated):
        yield from key_checks.check_windows(stated, read_windows)


def check_anchor(stated: Stated) -> Iterator[Finding]:
    """Check that the two keys about the anchor's own slot, each of which is what the other is not, agree."""
    values = {key: stated.get(key) for key in ("sample_from_anchor", "dspark_bonus_anchor")}
    if None not in values.values() and len(set(values.values())) == 1:
        yield key_checks.stated_twice(" and ".join(values), values)


OF_KEYS = (*key_checks.OF_ALL, check_kind, check_shape, key_checks.check_mask_token, check_masks, check_anchor)


def read_foresees_anchor(stated: Stated) -> bool:
    """Return whether the anchor's own slot predicts a token: as stated, or else as the kind has it."""
    bonus, kind = stated.get("dspark_bonus_anchor"), kind_of(stated)
    default = kind == "dspark" if bonus is None else not bonus
    if kind == "domino":
        default = stated.get("shift_label", False)
    return bool(stated.get("sample_from_anchor", default))


def _joint(stated: Stated, has_confidence_bias: bool) -> dict[str, Any]:
    """Read the settings of the heads that make slots depend on each other. Raises ConfigError."""
    kind, where = kind_of(stated), stated.where
    required = {"dspark": ("markov_rank",), "dflash2": tuple(SELECTOR), "domino": tuple(CORRECTION)[:2]}.get(kind, ())
    given = {key: stated.get(key) for key in required}
    if wrong := [f"{key} is {value!r}" for key, value in given.items() if not is_count(value)]:
        raise ConfigError(f"{where}: {', '.join(wrong)}; expected positive whole numbers in a {kind} head")
    if kind == "dspark":
        inputs = "state"
        if stated.get("confidence_head_with_markov", stated.is_nested):
            inputs = "state and token"
        has_confidence = stated.get("enable_confidence_head", stated.is_nested)
        markov = stated.get("markov_head_type", "vanilla")
        if markov == "rnn" and not read_foresees_anchor(stated):
            raise ConfigError(
                f"{where}: markov_head_type is 'rnn' in a block whose anchor's slot foresees nothing; whether it reads "
                "that slot too is not agreed on"
            )
        return {
            "markov_type": markov,
            "markov_rank": given["markov_rank"],
            "confidence": inputs if has_confidence else "",
            "has_confidence_bias": has_confidence_bias,
        }
    if kind == "dflash":
        return {}
    vocab_size, width, block_size = (stated.get(key) for key in ("vocab_size", "hidden_size", "block_size"))
    if (rows := stated.get("draft_vocab_size", vocab_size)) != vocab_size:
        raise ConfigError(f"{where}: draft_vocab_size is {rows}; a {kind} head proposes all {vocab_size} tokens")
    if kind == "domino":
        count = stated.get("pure_draft_prefix_len", 0)
        if type(count) is not int or count < 0:
            raise ConfigError(f"{where}: pure_draft_prefix_len is {count!r}; expected the number of slots")
        return {CORRECTION[key]: value for key, value in given.items()} | {"num_uncorrected": count}
    taps, group, _, top_k = given.values()
    if width % group or taps > block_size or top_k > vocab_size:
        raise ConfigError(
            f"{where}: conv_group_size {group} must divide the width {width}, conv_kernel_size {taps} be no "
            f"more than the block's {block_size} slots, and selector_top_k {top_k} no more than the {vocab_size} tokens"
        )
    return {field: given[key] for key, field in SELECTOR.items()}


def bad_sizes(stated: Stated) -> dict[str, Any]:
    """Return the keys that the shapes follow from, and that are wrong or missing."""
    wrong, block = stated.bad_counts(), stated.get("block_size")
    fewest = 1 if read_foresees_anchor(stated) else 2
    return wrong or ({"block_size": block} if block < fewest else {})


def layer_kinds(stated: Stated) -> list[str]:
    """Return the kind of each layer, whether it slides: as `layer_types` states, or else by `use_sliding_window` from
    layer `max_window_layers` on, as Qwen3's config has it. Raises ConfigError."""
    num_layers = stated.get("num_hidden_layers")
    if (kinds := stated_kinds(stated, num_layers)) is not None:
        return kinds
    slides = stated.get("use_sliding_window", False) and stated.get("sliding_window") is not None
    first = stated.get("max_window_layers", _FIRST_TO_SLIDE) if slides else num_layers
    if type(first) is not int:
        raise ConfigError(f"{stated.where}: max_window_layers is {first!r}; expected the number of a layer")
    return [SLIDING if i >= first else FULL for i in range(num_layers)]


def read_windows(stated: Stated) -> tuple[int, ...]:
    """Read the window of each layer (`layers.sized_windows`). With `use_swa` every layer has one where the layers'
    kinds give none to any. Raises ConfigError."""
    kinds, block = layer_kinds(stated), stated.get("block_size")
    if stated.get("use_swa", False) and SLIDING not in kinds:
        kinds = [SLIDING] * len(kinds)
    windows = sized_windows(stated, kinds)
    if short := short_windows(windows, read_causal(stated, windows), block):
        raise ConfigError(
            f"{stated.where}: a window of {short[0]}, shorter than the block of {block}, where positions see what "
            "follows them"
        )
    return windows


def read_causal(stated: Stated, windows: Sequence[int]) -> tuple[bool, ...]:
    """Return whether a slot of each layer sees only those before it: as stated for all layers, or else where the layer
    slides by its kind. The words `is_causal`, `causal` and `sliding_window_non_causal` go in that order."""
    if (value := stated.get("is_causal", stated.get("causal"))) is not None:
        return (value,) * len(windows)
    if stated.get("sliding_window_non_causal", stated.is_nested and kind_of(stated) == "dflash2"):
        return (False,) * len(windows)
    return tuple(kind == SLIDING for kind in layer_kinds(stated))


def read_taps(stated: Stated, target: ModelConfig | None) -> tuple[int, ...]:
    """Return the layers whose outputs are tapped. Raises ConfigError as `layers.read_taps` does."""
    num_layers = target.num_layers if target else stated.get("num_target_layers", 64)
    usual = functools.partial(default_taps, num_layers, stated.get("num_hidden_layers"))
    return layers.read_taps(stated, COUNTED_FROM, usual, num_layers)


def sizes_of_target(stated: Stated, target: ModelConfig) -> tuple[int, int, int]:
    """Return the vocabulary, the width and the number of layers of the target that a head is for. What it does not
    state is that of the target at hand."""
    width = stated.get("target_hidden_size", stated.get("hidden_size"))
    return stated.get("vocab_size"), width, stated.get("num_target_layers", target.num_layers)


def renamer(names: frozenset[str]) -> Callable[[str], str]:
    """A function from our tensor names, which are z-lab's, to the folder's."""

    def rename(name: str) -> str:
        spelled = [name, f"logit_head.{name}"]
        spelled += [name.replace(ours, other, 1) for ours, other in _DIALECTS if name.startswith(ours)]
        spelled += ["draft_id_to_target_id"] * (name == D2T) + [f"{name}.weight"] * name.endswith("_codebook")
        return next((p + each for each in spelled for p in ("", "model.") if p + each in names), name)

    return rename


def config_to_hf(
    config: DFlashConfig, target: Target, *, dtype: str, layout: Layout, target_name: str
) -> dict[str, Any]:
    """Write the config.json of a head. Only speculators names the target."""
    backbone, windows = config.backbone, windows_of(config.backbone)
    layer = layer_to_hf(backbone, target, model_type="qwen3", dtype=dtype)
    if layout == "speculators":
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
            **nested_config(layer, config.name, config.num_slots, target, target_name),
        }
    own: dict[str, Any] = {"mask_token_id": config.mask_token_id, TAPS: list(config.aux_layers)}
    is_gemma = gemma.has_gemma_layers(backbone)
    name = gemma.CLASSES[config.name] if is_gemma else ARCHITECTURES[config.name][0]
    out = {"architectures": [name], **layer, "block_size": config.block_size}
    if config.name == "dspark":  # readers of such heads look for everything at the top
        out |= {**own, **_joint_to_hf(config)}
    else:
        own |= _joint_to_hf(config)
    if (config.foresees_anchor and config.name != "domino") or config.name == "dspark":
        out |= {"sample_from_anchor": config.foresees_anchor, "dspark_bonus_anchor": not config.foresees_anchor}
    out |= {"num_target_layers": target.config.num_layers, OWN: own}
    if config.is_causal != tuple(window > 0 for window in windows):  # else the layers' kinds say it
        own["causal"] = out["is_causal"] = config.is_causal[0]
    fields = vars(backbone) | vars(config)
    unusual = [key for key in _UNUSUAL if fields[key.sets] != key.default and not (is_gemma and key.sets in _OF_GEMMA)]
    own |= {key.name: fields[key.sets] for key in unusual}
    if config.is_partial:
        out["draft_vocab_size"] = config.draft_vocab_size
    return out


def _joint_to_hf(config: DFlashConfig) -> dict[str, Any]:
    """Write the settings of the heads that make slots depend on each other, as keys of config.json."""
    if config.name == "dspark":
        return {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_type,
            "enable_confidence_head": bool(config.confidence),
            "confidence_head_with_markov": config.confidence == "state and token",
        }
    own: Mapping[str, str] = {"dflash2": SELECTOR, "domino": CORRECTION}.get(config.name, {})
    keys = {key: getattr(config, field) for key, field in own.items()}
    if config.name == "domino":
        return {"projector_type": "domino", **keys, "shift_label": config.foresees_anchor}
    return keys


def unsaid_in(layout: Layout, config: DFlashConfig) -> list[str]:
    """List the properties of a head that a layout has no words for."""
    windows, causal = windows_of(config.backbone), list(config.is_causal)
    if layout == "z-lab":  # one word for all layers, or the kinds of layers
        is_mixed = len({*causal}) > 1 and causal != [window > 0 for window in windows]
        return present({"causal layers among others": is_mixed})
    unsaid = {
        "a recurrent correction of its logits": config.gru_width,
        "causal layers without windows": any(c and not w for c, w in zip(causal, windows, strict=True)),
        "windows of which some are causal": len({c for c, w in zip(causal, windows, strict=True) if w}) > 1,
        gemma.LAYERS: gemma.has_gemma_layers(config.backbone),
        "attention sinks": config.backbone.has_sinks,
        "a scale of its embedding": config.embedding_scale != 1,
        "a scale of its logits": config.output_scale != 1,
        "a cap on its logits": config.backbone.logit_softcap,
        "an output head of its own for every token": config.has_own_head and not config.is_partial,
    }
    return present(unsaid)
