"""DFlash heads as folders: config.json and tensors, in either layout; and the repairs of their files: other readings,
for slips of exports that no shape and no key shows, whose help is measured by running the head (`eval.trial`)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from specserve.checkpoints.load import Target, to_numpy
from specserve.checkpoints.tensors import CONFIG, TensorFolder, read_json
from specserve.drafters.dflash.config import DFlashConfig
from specserve.drafters.dflash.drafter import DFlash
from specserve.drafters.dflash.start import FEWEST_MORE, default_taps
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.drafters.layers import windows_of
from specserve.errors import CheckpointError
from specserve.interop import gemma, repairs
from specserve.interop.dflash import dialects
from specserve.interop.dflash.checks import OF_BLOCKS, BlockFiles
from specserve.interop.dflash.dialects import COUNTED_FROM, KEYS, OWN, TAPS
from specserve.interop.findings import Dialect, Fix, Repair
from specserve.interop.format import EMBEDDING_TABLE, OUTPUT_TABLE, HeadFormat
from specserve.interop.key_checks import refuse_keys
from specserve.interop.keys import LAYER, Stated, inner
from specserve.interop.notes import other_target
from specserve.interop.published import present, vocab_to_tensors
from specserve.models.config import ModelConfig

_NORMS = (
    ("hidden_norm.weight", "norm.weight"),
    ("layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"),
)


def list_repairs(files: BlockFiles) -> Iterator[Repair]:
    """List all repairs that are worth a try. There are none where config.json cannot be read."""
    config, target = files.config, files.target
    if config is None or target is None:
        return
    yield from _taps(config, target.config.num_layers)
    yield from _blocks(config, files.stated)
    for token in repairs.masks(target, config.mask_token_id):
        yield Repair(f"masked slots hold token {token}", _put(mask_token_id=token))
    for pair in _NORMS:
        yield from repairs.exchanged(dialects.renamer, pair)
    square = config.backbone.num_heads * config.backbone.head_dim == config.backbone.d_model
    yield from repairs.of_products(dialects.renamer, "layers.0", files.names, is_square=square)
    yield from repairs.of_target(config.backbone.norm_eps, config.backbone.rope, target.config, _put)


_put = repairs.put_everywhere(OWN, LAYER)


def _taps(config: DFlashConfig, num_layers: int) -> Iterator[Repair]:
    """List repairs of the taps: other layers, and fc.weight in another order."""
    count = len(config.aux_layers)
    usual = default_taps(num_layers, count) if num_layers >= count + FEWEST_MORE else ()
    yield from repairs.tap_layers(config.aux_layers, usual, num_layers, _set_taps)
    yield from repairs.tap_orders(dialects.renamer, [*map(str, config.aux_layers)])


def _set_taps(layers: tuple[int, ...]) -> Fix:
    return repairs.set_taps(_put, COUNTED_FROM, layers, _put(**{TAPS: list(layers)}))


def _blocks(config: DFlashConfig, stated: Stated) -> Iterator[Repair]:
    """List repairs of blocks: which slots a slot sees, how far back, and whether the first slot predicts a token."""
    is_causal = not all(config.is_causal)
    causal = {"is_causal": is_causal}
    if any("causal" in place for place in (stated.raw, inner(stated.raw, OWN))):
        causal["causal"] = is_causal
    named = {True: "a slot sees those before it alone", False: "a slot sees its whole block"}
    yield Repair(named[is_causal], _put(**causal))
    yield from repairs.of_windows(windows_of(config.backbone), stated, OWN)
    foresees = not config.foresees_anchor
    if "sample_from_anchor" in stated.raw or config.name == "dflash":
        anchor = {"sample_from_anchor": foresees}
        if "dspark_bonus_anchor" in stated.raw:
            anchor["dspark_bonus_anchor"] = not foresees
        what = {True: "a token", False: "nothing"}
        yield Repair(f"the anchor's own slot foresees {what[foresees]}", _put(**anchor))


class DFlashFormat(HeadFormat):
    """The layouts of block drafters (`dialects`)."""

    skipped: ClassVar[Mapping[str, str]] = dialects.SKIPPED
    tables = (EMBEDDING_TABLE, OUTPUT_TABLE)
    examined = BlockFiles
    checks = OF_BLOCKS
    readings = (list_repairs,)

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        return dialects.kind_named(raw) == self.kind

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> TrainedDrafter:
        names, stated = TensorFolder(folder).names(), KEYS.read(read_json(folder / CONFIG), str(folder / CONFIG))
        refuse_keys(stated, dialects.OF_KEYS)
        got = dialects.sizes_of_target(stated, target)
        if got != (target.vocab_size, target.d_model, target.num_layers):
            theirs = "vocabulary {}, width {} and {} layers".format(*got)
            given = f"{target.vocab_size}, {target.d_model} and {target.num_layers}"
            raise other_target(folder, theirs, target_name, given)
        config = dialects.config_from_hf(stated, target, names, dtype=dtype)
        if config.backbone.d_model != target.d_model:
            raise CheckpointError(
                f"{folder}: a head of width {config.backbone.d_model} beside a target of width {target.d_model}, whose "
                "hidden states and output head it cannot share; a head of this kind is as wide as its target"
            )
        return DFlash(config)

    def files(
        self, head: Head, target: Target, *, dtype: str, dialect: Dialect, target_name: str
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return the tensors and the config.json of a head. Raises CheckpointError where the layout has no key for what
        the head computes."""
        config = head.drafter.config
        layout: dialects.Layout = "speculators" if dialect == "speculators" else "z-lab"
        if unsaid := dialects.unsaid_in(layout, config):
            raise CheckpointError(
                f"a head with {', '.join(unsaid)} cannot be written for {dialect}, which has no key for it"
            )
        tensors = to_numpy(head.params, head.drafter.spec(), dtype)
        if config.is_partial:
            tensors |= vocab_to_tensors(head.target_ids, config.backbone.vocab_size)
        return tensors, dialects.config_to_hf(config, target, dtype=dtype, layout=layout, target_name=target_name)

    def unknown_to(self, dialect: Dialect, drafter: TrainedDrafter) -> list[str]:
        """List what of a head the engine that a dialect is for does not compute, as its public code reads today."""
        config = drafter.config
        found: dict[str, object] = {
            "an embedding of its own": config.has_embedding,
            "an output head of its own": config.has_head,
            "attention sinks": config.backbone.has_sinks,
        }
        if dialect == "vllm":
            found = {"scales of its embedding or its logits": (config.embedding_scale, config.output_scale) != (1, 1)}
        elif dialect == "speculators":  # vLLM reads these too, and makes all layers causal where windows are
            is_mixed = len({*config.is_causal}) > 1 and len({*windows_of(config.backbone)}) > 1
            found = {"layers that see all beside causal ones": is_mixed}
        if dialect != "speculators":
            found["a Markov head that is gated or recurrent"] = config.markov_type != "vanilla"
        if dialect != "sglang":
            found["a recurrent correction of its logits"] = config.gru_width
        if dialect == "sglang-jax" and config.name == "dflash2":
            found = {"convolutions and the choice among candidates": True}
        found[gemma.LAYERS] = gemma.has_gemma_layers(config.backbone) and dialect != "vllm"
        return present(found)
