"""The checks of the files of a DFlash head."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import CONFIG, SINGLE_FILE
from specserve.drafters.dflash.config import DFlashConfig, short_windows
from specserve.drafters.dflash.model import head_spec
from specserve.drafters.dflash.start import default_taps
from specserve.errors import ConfigError
from specserve.interop.dflash import dialects
from specserve.interop.dflash.catalogue import CHECKS
from specserve.interop.examined import ExaminedFiles, check_specs, check_values
from specserve.interop.findings import Copy, Finding, describe, put
from specserve.interop.published import D2T, T2D, read_vocab, rope_keys, vocab_to_tensors
from specserve.models.params import specs
from specserve.models.rope import plain_rope

_HARMLESS = re.compile("|".join([*dialects.SKIPPED, r"(.*\.)?rotary_emb\.inv_freq"]))
_SINKS = re.compile(r".*\.attention_sink_bias")


class BlockFiles(ExaminedFiles):
    """The files of a block drafter."""

    renamer = staticmethod(dialects.renamer)

    def __init__(self, folder: Path, target: Target | None) -> None:
        super().__init__(folder, target)
        self.stated = dialects.read_stated(self.raw, CONFIG)
        self.has_sizes = not dialects.bad_sizes(self.stated)

    @property
    def dialect(self) -> str:
        return self.stated.layout

    @cached_property
    def num_layers(self) -> int:
        """The number of layers that there are tensors of."""
        return dialects.count_layers(self.names)

    @cached_property
    def read(self) -> DFlashConfig | ConfigError:
        """The head's shape, or why config.json does not state it in a way that we compute."""
        target = self.target.config if self.target else None
        try:
            config = dialects.config_from_hf(self.raw, target, self.names, dtype="float32", where=CONFIG)
        except ConfigError as error:
            return error
        return replace(config, backbone=replace(config.backbone, has_sinks=any(map(_SINKS.fullmatch, self.names))))

    @property
    def config(self) -> DFlashConfig | None:
        """The head's shape; None where it cannot be read."""
        return None if isinstance(self.read, ConfigError) else self.read

    @property
    def num_target_layers(self) -> int | None:
        return self.target.config.num_layers if self.target else self.stated.get("num_target_layers")

    def facts(self) -> dict[str, str]:
        layout = self.stated.layout
        readers = "" if layout == "speculators" else " (vLLM, SGLang)"
        facts = {"kind": self.stated.kind, "layout": layout + readers}
        if self.config is None:
            return facts
        config, backbone = self.config, self.config.backbone
        windows = dialects.list_windows(config)
        masks = zip(windows, config.is_causal, strict=True)
        kinds = [f"{window or 'no'} window, {'causal' if causal else 'both ways'}" for window, causal in masks]
        return facts | {
            "layers": f"{backbone.num_layers}: {'; '.join(dict.fromkeys(kinds))}",
            "block": f"{config.block_size} slots, {config.num_slots} tokens ahead, mask token {config.mask_token_id}",
            "width": f"{backbone.d_model}, MLP {backbone.d_ff}, {backbone.num_heads} heads of {backbone.head_dim} "
            f"({backbone.num_kv_heads} KV)",
            "vocabulary": f"{config.draft_vocab_size:,} of {backbone.vocab_size:,}",
            "taps": f"outputs of layers {config.aux_layers}",
            "rope": f"{backbone.rope.kind}, theta {backbone.rope.theta:g}, up to {backbone.max_len:,} positions",
            "slots": self._slots(config),
            "embedding": "its own" if config.has_embedding else "the target's",
            "output head": "its own" if config.has_head else "the target's",
        }

    def _slots(self, config: DFlashConfig) -> str:
        """Describe how the slots of a block depend on each other."""
        if config.markov_rank:
            sure = f", and confidence by {config.confidence}" if config.confidence else ""
            return f"a bias of rank {config.markov_rank} by the token before{sure}"
        if config.selector_rank:
            return f"convolutions, and a choice of rank {config.selector_rank} among {config.selector_top_k}"
        return "independent"


def check_keys(files: BlockFiles) -> Iterator[Finding]:
    """Check that every key is known, stated once, and computed here."""
    stated = files.stated
    if wrong := dialects.bad_sizes(stated):
        got = ", ".join(f"{key}: {stated.get(key)!r}" for key in wrong)
        yield CHECKS["block-sizes"].found(CONFIG, "positive whole numbers, block_size at least 2", got)
    for key in stated.unknown:
        yield CHECKS["unknown-key"].found(f"{CONFIG}: {key}", "a key of the layout", repr(_value(files.raw, key)))
    for key in sorted({*stated.own} & {*stated.top}):
        if (one := stated.own[key]) != (other := stated.top[key]) and None not in (one, other):
            got = f"{one!r} in {dialects.OWN}, {other!r} beside it"
            yield CHECKS["stated-twice"].found(f"{CONFIG}: {key}", "the same", got, key=key)
    if dialects.disagrees_about_anchor(stated):
        got = f"{stated.get('sample_from_anchor')!r} and {stated.get('dspark_bonus_anchor')!r}"
        keys = "sample_from_anchor, dspark_bonus_anchor"
        yield CHECKS["stated-twice"].found(f"{CONFIG}: {keys}", "one true and one false", got, key=keys)
    for key, harmless in dialects.UNCOMPUTED.items():
        if (value := stated.get(key)) not in harmless:
            yield CHECKS["uncomputed"].found(f"{CONFIG}: {key}", repr(harmless[-1]), repr(value), key=key)
    count = stated.get("num_hidden_layers")
    if files.has_sizes and count != files.num_layers:
        is_cut = type(count) is int and count > files.num_layers  # or the config is of another head
        fix = None if is_cut else put("num_hidden_layers", files.num_layers, in_layer=True)
        yield CHECKS["block-layers"].found(f"{CONFIG}: num_hidden_layers", str(files.num_layers), repr(count), fix)
    mask, vocab_size = stated.get("mask_token_id"), stated.get("vocab_size")
    if files.has_sizes and (type(mask) is not int or not 0 <= mask < vocab_size):
        yield CHECKS["mask-token"].found(f"{CONFIG}: mask_token_id", f"0..{vocab_size - 1}", repr(mask))


def _value(raw: Mapping[str, Any], key: str) -> Any:
    own = raw.get(dialects.OWN)
    if isinstance(own, dict) and key.startswith(f"{dialects.OWN}."):
        return own[key.removeprefix(f"{dialects.OWN}.")]
    return raw.get(key, "stated")


def check_masks(files: BlockFiles) -> Iterator[Finding]:
    """Check that every engine reads the same windows and causality from the config."""
    stated = files.stated
    if not files.has_sizes:
        return
    try:
        windows = dialects.read_windows(stated)
        causal = dialects.read_causal(stated, windows)
    except ConfigError as error:
        yield CHECKS["windows"].found(CONFIG, "a window for every layer that slides", str(error))
        return
    if short := short_windows(windows, causal, stated.get("block_size")):
        yield CHECKS["windows"].found(CONFIG, f"{stated.get('block_size')} or more", str(short[0]))
    kinds = stated.get("layer_types") or []
    if dialects.SLIDING in kinds and not stated.get("use_sliding_window", False):
        got = repr(stated.get("use_sliding_window"))
        fix = put("use_sliding_window", True, in_layer=True)
        yield CHECKS["forgotten-window"].found(f"{CONFIG}: use_sliding_window", "true", got, fix)
    if any(windows) and dialects.SLIDING not in kinds:

        def spell(repaired: Copy) -> None:
            repaired.layer["layer_types"] = [dialects.SLIDING] * len(windows)
            repaired.layer.update(sliding_window=windows[0], use_sliding_window=True, max_window_layers=0)
            repaired.raw["is_causal"] = causal[0]

        yield CHECKS["use-swa"].found(f"{CONFIG}: layer_types", "layers that slide", "nothing", spell)
    key = "sliding_window_non_causal"
    if stated.layout == "speculators" and stated.get(key) is False and not all(windows):
        fix = None if any(windows) else put(key, True)
        yield CHECKS["all-causal"].found(f"{CONFIG}: {key}", "true", "False", fix)
    has_flag = stated.get("attention_sink_bias", stated.get("add_swa_attention_sink_bias", False))
    if any(map(_SINKS.fullmatch, files.names)) and not has_flag:

        def write_sinks(repaired: Copy) -> None:
            repaired.raw.setdefault(dialects.OWN, {})["attention_sink_bias"] = True

        yield CHECKS["sinks"].found(f"{CONFIG}: {dialects.OWN}.attention_sink_bias", "true", "nothing", write_sinks)


def check_target(files: BlockFiles) -> Iterator[Finding]:
    """Check that the head's sizes are those of its target, and that it can follow sequences as long."""
    stated = files.stated
    if files.target is None or not files.has_sizes:
        return
    target = files.target.config
    width = stated.get("target_hidden_size", stated.get("hidden_size"))
    for key, got, required in (
        ("vocab_size", stated.get("vocab_size"), target.vocab_size),
        ("hidden_size", width, target.d_model),
        ("num_target_layers", stated.get("num_target_layers", target.num_layers), target.num_layers),
    ):
        if got != required:
            expected = f"{required:,}, as in {files.target.folder}"
            yield CHECKS["other-target"].found(f"{CONFIG}: {key}", expected, f"{got:,}")
    length = stated.get("max_position_embeddings")
    if length is None or length < target.max_len:
        where, expected = f"{CONFIG}: max_position_embeddings", f"at least {target.max_len:,}, the target's"
        fix = put("max_position_embeddings", target.max_len, in_layer=True)
        yield CHECKS["block-positions"].found(where, expected, "nothing" if length is None else f"{length:,}", fix)


def check_rope(files: BlockFiles) -> Iterator[Finding]:
    """Check that rotary settings are stated."""
    if any(files.stated.get(key) is not None for key in ("rope_theta", "rope_scaling", "rope_parameters")):
        return
    rope = plain_rope(files.target.config.rope) if files.target else None

    def fix(repaired: Copy) -> None:
        assert rope is not None, "the target's"
        repaired.layer.update(rope_keys(rope))

    expected = f"{rope.kind}, theta {rope.theta:g}" if rope else "rope_theta or rope_parameters"
    yield CHECKS["block-rope"].found(f"{CONFIG}: rope_parameters", expected, "nothing", fix if rope else None)


def check_taps(files: BlockFiles) -> Iterator[Finding]:
    """Check that the taps are stated, are layers of the target, and are counted as their key counts them."""
    stated, num_layers = files.stated, files.num_target_layers
    if not files.has_sizes:
        return
    try:
        found = dialects.stated_taps(stated)
        taps = dialects.read_taps(stated, files.target.config if files.target else None)
    except ConfigError as error:
        yield CHECKS["block-taps"].found(CONFIG, "layers of the target, the same in all keys", str(error))
        return
    is_nested = stated.layout == "speculators"
    if not found:

        def write(repaired: Copy) -> None:
            if is_nested:
                repaired.raw[dialects.INPUT_TAPS[0]] = [i + 1 for i in taps]
            else:
                repaired.raw.setdefault(dialects.OWN, {})[dialects.TAPS] = list(taps)

        fix = write if num_layers else None
        if fix:
            yield CHECKS["taps-unstated"].found(CONFIG, f"outputs of layers {list(taps)}", "nothing", fix)
        return
    key = next(iter(found))
    if num_layers is None:
        return
    if max(taps) == num_layers - 1:
        yield CHECKS["last-tap"].found(f"{CONFIG}: {key}", f"layers before {num_layers - 1}", f"outputs of {taps}")
    try:
        usual = default_taps(num_layers, len(taps))
    except ConfigError:
        return
    slipped = tuple(i + (1 if key == dialects.TAPS else -1) for i in usual)
    if taps == slipped:
        got = f"outputs of {list(taps)} as {key} counts"
        yield CHECKS["taps-slipped"].found(f"{CONFIG}: {key}", f"{list(usual)} are the usual ones", got)


def check_tensors(files: BlockFiles) -> Iterator[Finding]:
    """Check that the tensors are those that config.json asks for."""
    if files.config is not None:
        checks = CHECKS["block-missing"], CHECKS["block-shape"], CHECKS["block-unknown"]
        yield from check_specs(files, specs(head_spec(files.config)), checks, _HARMLESS.fullmatch)


def check_vocabulary(files: BlockFiles) -> Iterator[Finding]:
    """Check that d2t and t2d say which tokens the rows are for."""
    config = files.config
    if config is None or not dialects.is_partial(config):
        return
    stored = [files.rename(name) for name in (D2T, T2D)]
    d2t, t2d = map(files.table, (D2T, T2D))
    rows, size = config.draft_vocab_size, config.backbone.vocab_size
    vocab = read_vocab(d2t, t2d, rows, size)
    if vocab.reading == "offset" and vocab.is_sorted and (t2d is None or vocab.agrees):
        return
    target_ids = vocab.target_ids if vocab.is_sorted and vocab.reading in ("absolute", "mask") else None

    def fix(repaired: Copy) -> None:
        assert target_ids is not None, "read, or there is no fix"
        for name in stored:
            repaired.tensors.pop(name, None)
        repaired.tensors |= vocab_to_tensors(np.asarray(target_ids), size)

    expected = f"{rows:,} ascending offsets to ids below {size:,}, and a mask that agrees"
    got = f"d2t {describe(d2t)}; t2d {describe(t2d)}"
    yield CHECKS["block-vocabulary"].found(SINGLE_FILE, expected, got, fix if target_ids is not None else None)


OF_BLOCKS = (
    check_keys,
    check_masks,
    check_target,
    check_rope,
    check_taps,
    check_tensors,
    check_values,
    check_vocabulary,
)
