"""The checks of the files of a DFlash head."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import CONFIG, SINGLE_FILE, TensorFolder, read_json
from specserve.drafters.dflash.config import DFlashConfig, short_windows
from specserve.drafters.dflash.model import head_spec
from specserve.drafters.dflash.start import default_taps
from specserve.errors import ConfigError
from specserve.interop.dflash import catalogue, dialects
from specserve.interop.findings import Copy, DoctorReport, Finding, describe, put
from specserve.interop.published import D2T, T2D, read_vocab, rope_keys, vocab_to_tensors
from specserve.interop.values import check_values
from specserve.models.params import specs
from specserve.models.rope import plain_rope

_SINKS = re.compile(r".*\.attention_sink_bias")


class BlockFiles:
    """The files of a head under examination, and what can be read from them."""

    def __init__(self, folder: Path, target: Target | None) -> None:
        self.target = target
        self.tensors = TensorFolder(folder)
        self.names = self.tensors.names()
        self.raw = read_json(folder / CONFIG)
        self.stated = dialects.read_stated(self.raw, CONFIG)
        self.rename = dialects.renamer(self.names)
        self.unread = ""  # why there is no config
        self.has_sizes = not dialects.bad_sizes(self.stated)

    @cached_property
    def num_layers(self) -> int:
        """The number of layers that there are tensors of."""
        return dialects.count_layers(self.names)

    @cached_property
    def config(self) -> DFlashConfig | None:
        """The head's shape; None where config.json does not state it in a way that we compute."""
        target = self.target.config if self.target else None
        try:
            config = dialects.config_from_hf(self.raw, target, self.names, dtype="float32", where=CONFIG)
        except ConfigError as error:
            self.unread = str(error)
            return None
        return replace(config, backbone=replace(config.backbone, has_sinks=any(map(_SINKS.fullmatch, self.names))))

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
        windows = [backbone.kind(i).window for i in range(backbone.num_layers)]
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
        yield catalogue.SIZES.found(CONFIG, "positive whole numbers, block_size at least 2", got)
    for key in stated.unknown:
        yield catalogue.UNKNOWN_KEY.found(f"{CONFIG}: {key}", "a key of the layout", repr(_value(files.raw, key)))
    for key in sorted({*stated.own} & {*stated.top}):
        if (one := stated.own[key]) != (other := stated.top[key]) and None not in (one, other):
            got = f"{one!r} in {dialects.OWN}, {other!r} beside it"
            yield catalogue.STATED_TWICE.found(f"{CONFIG}: {key}", "the same", got, key=key)
    if dialects.disagrees_about_anchor(stated):
        got = f"{stated.get('sample_from_anchor')!r} and {stated.get('dspark_bonus_anchor')!r}"
        keys = "sample_from_anchor, dspark_bonus_anchor"
        yield catalogue.STATED_TWICE.found(f"{CONFIG}: {keys}", "one true and one false", got, key=keys)
    for key, harmless in dialects.UNCOMPUTED.items():
        if (value := stated.get(key)) not in harmless:
            yield catalogue.UNCOMPUTED.found(f"{CONFIG}: {key}", repr(harmless[-1]), repr(value), key=key)
    told = stated.get("num_hidden_layers")
    if files.has_sizes and told != files.num_layers:
        is_cut = type(told) is int and told > files.num_layers  # or the config is of another head
        fix = None if is_cut else put("num_hidden_layers", files.num_layers, in_layer=True)
        yield catalogue.BLOCK_LAYERS.found(f"{CONFIG}: num_hidden_layers", str(files.num_layers), repr(told), fix)
    mask, vocab_size = stated.get("mask_token_id"), stated.get("vocab_size")
    if files.has_sizes and (type(mask) is not int or not 0 <= mask < vocab_size):
        yield catalogue.MASK_TOKEN.found(f"{CONFIG}: mask_token_id", f"0..{vocab_size - 1}", repr(mask))


def _value(raw: dict[str, Any], key: str) -> Any:
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
        yield catalogue.WINDOWS.found(CONFIG, "a window for every layer that slides", str(error))
        return
    if short := short_windows(windows, causal, stated.get("block_size")):
        yield catalogue.WINDOWS.found(CONFIG, f"{stated.get('block_size')} or more", str(short[0]))
    kinds = stated.get("layer_types") or []
    if dialects.SLIDING in kinds and not stated.get("use_sliding_window", False):
        got = repr(stated.get("use_sliding_window"))
        fix = put("use_sliding_window", True, in_layer=True)
        yield catalogue.FORGOTTEN_WINDOW.found(f"{CONFIG}: use_sliding_window", "true", got, fix)
    if any(windows) and dialects.SLIDING not in kinds:

        def spell(repaired: Copy) -> None:
            repaired.layer["layer_types"] = [dialects.SLIDING] * len(windows)
            repaired.layer.update(sliding_window=windows[0], use_sliding_window=True, max_window_layers=0)
            repaired.raw["is_causal"] = causal[0]

        yield catalogue.USE_SWA.found(f"{CONFIG}: layer_types", "layers that slide", "nothing", spell)
    key = "sliding_window_non_causal"
    if stated.layout == "speculators" and stated.get(key) is False and not all(windows):
        fix = None if any(windows) else put(key, True)
        yield catalogue.ALL_CAUSAL.found(f"{CONFIG}: {key}", "true", "False", fix)
    has_flag = stated.get("attention_sink_bias", stated.get("add_swa_attention_sink_bias", False))
    if any(map(_SINKS.fullmatch, files.names)) and not has_flag:

        def say(repaired: Copy) -> None:
            repaired.raw.setdefault(dialects.OWN, {})["attention_sink_bias"] = True

        yield catalogue.SINKS.found(f"{CONFIG}: {dialects.OWN}.attention_sink_bias", "true", "nothing", say)


def check_target(files: BlockFiles) -> Iterator[Finding]:
    """Check that the head's sizes are those of its target, and that it can follow sequences as long."""
    stated = files.stated
    if files.target is None or not files.has_sizes:
        return
    target = files.target.config
    width = stated.get("target_hidden_size", stated.get("hidden_size"))
    for key, got, wanted in (
        ("vocab_size", stated.get("vocab_size"), target.vocab_size),
        ("hidden_size", width, target.d_model),
        ("num_target_layers", stated.get("num_target_layers", target.num_layers), target.num_layers),
    ):
        if got != wanted:
            expected = f"{wanted:,}, as in {files.target.folder}"
            yield catalogue.OTHER_TARGET.found(f"{CONFIG}: {key}", expected, f"{got:,}")
    length = stated.get("max_position_embeddings")
    if length is None or length < target.max_len:
        where, expected = f"{CONFIG}: max_position_embeddings", f"at least {target.max_len:,}, the target's"
        fix = put("max_position_embeddings", target.max_len, in_layer=True)
        yield catalogue.BLOCK_POSITIONS.found(where, expected, "nothing" if length is None else f"{length:,}", fix)


def check_rope(files: BlockFiles) -> Iterator[Finding]:
    """Check that rotary settings are stated."""
    if any(files.stated.get(key) is not None for key in ("rope_theta", "rope_scaling", "rope_parameters")):
        return
    rope = plain_rope(files.target.config.rope) if files.target else None

    def fix(repaired: Copy) -> None:
        assert rope is not None, "the target's"
        repaired.layer.update(rope_keys(rope))

    expected = f"{rope.kind}, theta {rope.theta:g}" if rope else "rope_theta or rope_parameters"
    yield catalogue.BLOCK_ROPE.found(f"{CONFIG}: rope_parameters", expected, "nothing", fix if rope else None)


def check_taps(files: BlockFiles) -> Iterator[Finding]:
    """Check that the taps are stated, are layers of the target, and are counted as their key counts them."""
    stated, num_layers = files.stated, files.num_target_layers
    if not files.has_sizes:
        return
    try:
        found = dialects.stated_taps(stated)
        taps = dialects.read_taps(stated, files.target.config if files.target else None)
    except ConfigError as error:
        yield catalogue.TAPS.found(CONFIG, "layers of the target, the same in all keys", str(error))
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
            yield catalogue.TAPS_UNSTATED.found(CONFIG, f"outputs of layers {list(taps)}", "nothing", fix)
        return
    key = next(iter(found))
    if num_layers is None:
        return
    if max(taps) == num_layers - 1:
        yield catalogue.LAST_TAP.found(f"{CONFIG}: {key}", f"layers before {num_layers - 1}", f"outputs of {taps}")
    try:
        usual = default_taps(num_layers, len(taps))
    except ConfigError:
        return
    slipped = tuple(i + (1 if key == dialects.TAPS else -1) for i in usual)
    if taps == slipped:
        got = f"outputs of {list(taps)} as {key} counts"
        yield catalogue.TAPS_SLIPPED.found(f"{CONFIG}: {key}", f"{list(usual)} are the usual ones", got)


def check_tensors(files: BlockFiles) -> Iterator[Finding]:
    """Check that the tensors are those that config.json asks for, and hold weights."""
    used = {files.rename(name) for name in (D2T, T2D)}
    if files.config is not None:
        for spec in specs(head_spec(files.config)):
            stored, expected = files.rename(spec.name), f"{list(spec.stored_shape)}"
            used.add(stored)
            if stored not in files.names:
                yield catalogue.MISSING.found(SINGLE_FILE, expected, "nothing", name=stored)
            elif (shape := files.tensors.shape(stored)) != spec.stored_shape:
                where = f"{files.tensors.file(stored).name}: {stored}"
                yield catalogue.SHAPE.found(where, expected, f"{list(shape)}", name=stored)
        harmless = [*dialects.SKIPPED, r"(.*\.)?rotary_emb\.inv_freq"]
        for name in sorted(files.names - used):
            if not any(re.fullmatch(pattern, name) for pattern in harmless):
                where, got = files.tensors.file(name).name, f"{list(files.tensors.shape(name))}"
                yield catalogue.UNKNOWN.found(where, "nothing", got, name=name)
    tables = {files.rename(name) for name in (D2T, T2D)}
    yield from check_values(files.tensors, files.names - tables)


def check_vocabulary(files: BlockFiles) -> Iterator[Finding]:
    """Check that d2t and t2d say which tokens the rows are for."""
    config = files.config
    if config is None or not dialects.is_partial(config):
        return
    stored = [files.rename(name) for name in (D2T, T2D)]
    d2t, t2d = (files.tensors.read(name) if name in files.names else None for name in stored)
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
    yield catalogue.DRAFT_VOCABULARY.found(SINGLE_FILE, expected, got, fix if target_ids is not None else None)


_CHECKS: tuple[Callable[[BlockFiles], Iterator[Finding]], ...] = (
    check_keys,
    check_masks,
    check_target,
    check_rope,
    check_taps,
    check_tensors,
    check_vocabulary,
)


def examine(folder: Path, target: Target | None) -> DoctorReport:
    """Make all checks. Without a target, those that need one are left out. Raises CheckpointError where there is
    nothing to look at: no config.json, no whole safetensors file."""
    files = BlockFiles(folder, target)
    findings = [finding for check in _CHECKS for finding in check(files)]
    if files.unread and not any(finding.level == "error" for finding in findings):
        findings.append(catalogue.SIZES.found(CONFIG, "a head that can be made", files.unread))
    tensors = files.tensors
    rows = [(name, tensors.shape(name), tensors.dtype(name).name) for name in sorted(tensors.names())]
    return DoctorReport(folder, files.stated.layout, files.facts(), rows, findings)
