"""The checks of the files of a DFlash head, beside those that loaders make too (`dialects`)."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import CONFIG
from specserve.drafters.dflash.config import DFlashConfig
from specserve.drafters.dflash.model import head_spec
from specserve.drafters.dflash.start import default_taps
from specserve.drafters.layers import windows_of
from specserve.errors import ConfigError
from specserve.interop import examined
from specserve.interop.dflash import dialects
from specserve.interop.dflash.dialects import CHECKS, COUNTED_FROM, INPUT_TAPS, KEYS, OWN, TAPS
from specserve.interop.examined import ExaminedFiles, given
from specserve.interop.findings import LAYERS, Finding, both, put
from specserve.interop.key_checks import check_rotary
from specserve.interop.keys import FULL, SLIDING, Stated
from specserve.interop.layers import stated_taps
from specserve.interop.published import count_layers
from specserve.models.params import specs
from specserve.models.rope import plain_rope

_HARMLESS = re.compile("|".join([*dialects.SKIPPED, r"(.*\.)?rotary_emb\.inv_freq"]))
_SINKS = re.compile(r".*\.attention_sink_bias")


class BlockFiles(ExaminedFiles):
    """The files of a block drafter."""

    renamer = staticmethod(dialects.renamer)

    def __init__(self, folder: Path, target: Target | None) -> None:
        super().__init__(folder, target)
        self.stated = KEYS.read(self.raw, CONFIG)
        self.sizes = None if dialects.bad_sizes(self.stated) else self.stated  # None: the shape is not stated
        self.has_sinks = any(map(_SINKS.fullmatch, self.names))

    @property
    def dialect(self) -> str:
        return "speculators" if self.stated.is_nested else "z-lab"

    def make(self) -> DFlashConfig:
        config = dialects.config_from_hf(self.stated, self.target_config, self.names, dtype="float32")
        return replace(config, backbone=replace(config.backbone, has_sinks=self.has_sinks))

    @property
    def num_target_layers(self) -> int | None:
        return self.target.config.num_layers if self.target else self.stated.get("num_target_layers")

    def facts(self) -> dict[str, str]:
        layouts = {"speculators": "speculators", "z-lab": "z-lab (vLLM, SGLang)"}
        facts = {"kind": dialects.kind_of(self.stated), "layout": layouts[self.dialect]}
        if self.config is None:
            return facts
        config, backbone = self.config, self.config.backbone
        windows = windows_of(backbone)
        masks = zip(windows, config.is_causal, strict=True)
        kinds = [f"{window or 'no'} window, {'causal' if causal else 'both ways'}" for window, causal in masks]
        return facts | {
            "layers": f"{backbone.num_layers}: {'; '.join(dict.fromkeys(kinds))}",
            "block": f"{config.block_size} slots, {config.num_slots} tokens ahead, mask token {config.mask_token_id}",
            "vocabulary": f"{config.draft_vocab_size:,} of {backbone.vocab_size:,}",
            "taps": f"outputs of layers {config.aux_layers}",
            "rope": f"{backbone.rope.kind}, theta {backbone.rope.theta:g}, up to {backbone.max_len:,} positions",
            "slots": self._slots(config),
            **examined.describe_layers(backbone, embedding=config.has_embedding, output_head=config.has_head),
        }

    def _slots(self, config: DFlashConfig) -> str:
        """Describe how the slots of a block depend on each other."""
        sure = f", and confidence by {config.confidence}" if config.confidence else ""
        return {
            "dflash": "independent",
            "dspark": f"a {config.markov_type} bias of rank {config.markov_rank} by what stands before{sure}",
            "domino": f"a correction of rank {config.correction_rank} by a state of {config.gru_width}",
            "dflash2": f"convolutions, and a choice of rank {config.selector_rank} among {config.selector_top_k}",
        }[config.name]


def check_keys(files: BlockFiles) -> Iterator[Finding]:
    """Check that every key is known, stated once, and computed here."""
    stated = files.stated
    for check in dialects.OF_KEYS:
        yield from check(stated)
    if files.sizes:
        count = stated.get("num_hidden_layers")
        yield from examined.check_num_layers(count, count_layers(files.names))


@given("sizes")
def check_masks(files: BlockFiles, stated: Stated) -> Iterator[Finding]:
    """Check that every engine reads the same windows and causality from the config."""
    if any(finding.refusal for finding in dialects.check_masks(stated)):
        return
    windows = dialects.read_windows(stated)
    causal = dialects.read_causal(stated, windows)
    if stated.get("use_swa", False) and SLIDING not in stated.get("layer_types", ()):
        kinds = {"layer_types": [SLIDING if window else FULL for window in windows], "sliding_window": max(windows)}
        fix = both(put(LAYERS, **kinds, use_sliding_window=True, max_window_layers=0), put(is_causal=causal[0]))
        yield CHECKS["use-swa"].found(f"{CONFIG}: layer_types", "layers that slide", "nothing", fix)
    key = "sliding_window_non_causal"
    if stated.is_nested and stated.get(key) is False and not all(windows):
        fix = None if any(windows) else put(**{key: True})
        yield CHECKS["all-causal"].found(f"{CONFIG}: {key}", "true", "False", fix)
    if files.has_sinks and not stated.fields("has_sinks")["has_sinks"]:
        fix = put(OWN, attention_sink_bias=True)
        yield CHECKS["sinks"].found(f"{CONFIG}: {OWN}.attention_sink_bias", "true", "nothing", fix)


@given("sizes", "target")
def check_target(_files: BlockFiles, stated: Stated, target: Target) -> Iterator[Finding]:
    """Check that the head's sizes are those of its target, and that it can follow sequences as long."""
    sizes = dialects.sizes_of_target(stated, target.config)
    required = (target.config.vocab_size, target.config.d_model, target.config.num_layers)
    for key, got, size in zip(("vocab_size", "hidden_size", "num_target_layers"), sizes, required, strict=True):
        yield from examined.check_of_target(key, got, size, target)
    yield from examined.check_length(stated, target)


@given("sizes")
def check_rope(files: BlockFiles, stated: Stated) -> Iterator[Finding]:
    """Check that rotary settings are stated, once, and can be read."""
    rope = plain_rope(files.target.config.rope) if files.target else None
    yield from check_rotary(stated, rope)
    yield from examined.check_rope_stated(stated, rope)


@given("sizes")
def check_taps(files: BlockFiles, stated: Stated) -> Iterator[Finding]:
    """Check that the taps are stated, are layers of the target, and are counted as their key counts them."""
    num_layers = files.num_target_layers
    try:
        found = stated_taps(stated, COUNTED_FROM)
        taps = dialects.read_taps(stated, files.target_config)
    except ConfigError as error:
        yield CHECKS["block-taps"].found(CONFIG, "layers of the target, the same in all keys", str(error))
        return
    if num_layers is None:
        return
    if not found:
        fix = put(OWN, **{TAPS: list(taps)})
        if stated.is_nested:
            fix = put(**{INPUT_TAPS[0]: [i + 1 for i in taps]})
        yield CHECKS["taps-unstated"].found(CONFIG, f"outputs of layers {list(taps)}", "nothing", fix)
        return
    key = next(iter(found))
    where = f"{CONFIG}: {key}"
    if max(taps) == num_layers - 1:
        yield CHECKS["last-tap"].found(where, f"layers before {num_layers - 1}", f"outputs of {taps}")
    try:
        usual = default_taps(num_layers, len(taps))
    except ConfigError:
        return
    slip = 1 if key == TAPS else -1
    if taps == tuple(i + slip for i in usual):
        got = f"outputs of {list(taps)} as {key} counts"
        yield CHECKS["taps-slipped"].found(where, f"{list(usual)} are the usual ones", got)


@given("config")
def check_tensors(files: BlockFiles, config: DFlashConfig) -> Iterator[Finding]:
    """Check that the tensors are those that config.json asks for."""
    yield from examined.check_specs(files, specs(head_spec(config)), _HARMLESS.fullmatch)


@given("config")
def check_vocabulary(files: BlockFiles, config: DFlashConfig) -> Iterator[Finding]:
    """Check that d2t and t2d say which tokens the rows are for."""
    if config.is_partial:
        yield from examined.check_tables(files, config.draft_vocab_size, config.backbone.vocab_size)


OF_BLOCKS = (
    check_keys,
    check_masks,
    check_target,
    check_rope,
    check_taps,
    check_tensors,
    examined.check_values,
    check_vocabulary,
)
