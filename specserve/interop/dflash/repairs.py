"""Repairs of a block drafter's files: other readings of them, for slips of exports that no shape and no key shows.
Whether one helps is measured by running the head (`eval.trial`)."""

from collections.abc import Iterator

from specserve.checkpoints.tensors import CONFIG
from specserve.drafters.dflash.config import DFlashConfig
from specserve.drafters.dflash.start import FEWEST_MORE, default_taps
from specserve.drafters.layers import windows_of
from specserve.errors import ConfigError
from specserve.interop.dflash import dialects
from specserve.interop.dflash.catalogue import KEYS, OWN, TAPS
from specserve.interop.dflash.checks import BlockFiles
from specserve.interop.findings import Copy, Fix, Repair
from specserve.interop.keys import LAYER, Stated, inner
from specserve.interop.repairs import (
    exchanged,
    masks,
    of_products,
    of_target,
    of_windows,
    put_everywhere,
    tap_layers,
    tap_orders,
)

_NORMS = (
    ("hidden_norm.weight", "norm.weight"),
    ("layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"),
)


def list_repairs(files: BlockFiles) -> Iterator[Repair]:
    """List all repairs that are worth a try. There are none where config.json cannot be read."""
    stated, target = files.stated, files.target
    assert target is not None, "repairs are tried beside the target"
    try:
        config = dialects.config_from_hf(stated, target.config, files.names, dtype="float32")
    except ConfigError:
        return
    yield from _taps(config, target.config.num_layers)
    yield from _blocks(config, stated)
    for token in masks(target, config.mask_token_id):
        yield Repair(f"masked slots hold token {token}", _put(mask_token_id=token))
    for pair in _NORMS:
        yield from exchanged(dialects.renamer, pair)
    square = config.backbone.num_heads * config.backbone.head_dim == config.backbone.d_model
    yield from of_products(dialects.renamer, "layers.0", is_square=square)
    yield from of_target(config.backbone.norm_eps, config.backbone.rope, target.config, _put)


_put = put_everywhere(OWN, LAYER)


def _taps(config: DFlashConfig, num_layers: int) -> Iterator[Repair]:
    """List repairs of the taps: all of them one layer off, as the other way of counting has them; the usual ones; and
    fc.weight in another order."""
    choices = [tuple(i + by for i in config.aux_layers) for by in (-1, 1)]
    if num_layers >= len(config.aux_layers) + FEWEST_MORE:
        choices.append(default_taps(num_layers, len(config.aux_layers)))
    yield from tap_layers(config.aux_layers, choices, num_layers, _set_taps)
    yield from tap_orders(dialects.renamer, [*map(str, config.aux_layers)])


def _set_taps(layers: tuple[int, ...]) -> Fix:
    def fix(repaired: Copy) -> None:
        for key in dialects.stated_taps(KEYS.read(repaired.raw, CONFIG)) or (TAPS,):
            _put(**{key: [i + (key != TAPS) for i in layers]})(repaired)

    return fix


def _blocks(config: DFlashConfig, stated: Stated) -> Iterator[Repair]:
    """List repairs of blocks: which slots a slot sees, how far back, and whether the first slot predicts a token."""
    is_causal = not all(config.is_causal)
    causal = {"is_causal": is_causal}
    if any("causal" in place for place in (stated.raw, inner(stated.raw, OWN))):
        causal["causal"] = is_causal
    named = {True: "a slot sees those before it alone", False: "a slot sees its whole block"}
    yield Repair(named[is_causal], _put(**causal))
    yield from of_windows(windows_of(config.backbone), stated, OWN)
    foresees = not config.foresees_anchor
    if "sample_from_anchor" in stated.raw or config.name == "dflash":
        anchor = {"sample_from_anchor": foresees}
        if "dspark_bonus_anchor" in stated.raw:
            anchor["dspark_bonus_anchor"] = not foresees
        what = {True: "a token", False: "nothing"}
        yield Repair(f"the anchor's own slot foresees {what[foresees]}", _put(**anchor))
