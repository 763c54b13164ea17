"""Repairs of the files of a head on this network: other readings of them, for slips of exports that no shape and no
key shows. Each is a change of the files that undoes a slip. Whether one helps is measured by running the head
(`eval.trial`)."""

import functools
from collections.abc import Iterator

import numpy as np

from specserve.drafters.eagle3.config import Eagle3Config, default_taps
from specserve.drafters.layers import windows_of
from specserve.interop.eagle3 import dialects
from specserve.interop.eagle3.catalogue import EAGLE, FLAGS, TAP_IDS
from specserve.interop.eagle3.checks import EagleFiles
from specserve.interop.findings import Copy, Dialect, Fix, Repair
from specserve.interop.keys import LAYER, find
from specserve.interop.repairs import (
    change,
    exchanged,
    of_products,
    of_target,
    of_windows,
    put_everywhere,
    short_name,
    tap_layers,
    tap_orders,
)

_NORMS = (
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.post_attention_layernorm.weight",
    "norm.weight",
)
_UNWRITTEN_FLAGS = ("norm_output", "norm_before_residual")  # no tensor shows whether they are set
_TAPPED = ("low", "middle", "high")


def list_repairs(files: EagleFiles) -> Iterator[Repair]:
    """List all repairs that are worth a try. There are none where config.json does not state the head's shape."""
    config = files.config
    if config is None or files.target is None:
        return
    yield from _flags(config)
    if config.latent is None:
        yield from _heads(config, files.target.config.head_dim)
        attention = [f"midlayer.self_attn.{name}_proj.weight" for name in "qkv"]
        yield Repair(
            "q, k and v take the hidden state first and the embedding second",
            change(dialects.renamer, lambda weight: np.roll(weight, config.d_model, axis=1), *attention),
        )
        square = config.num_heads * config.head_dim == config.d_model
        yield from of_products(dialects.renamer, "midlayer", is_square=square)
    yield from exchanged(dialects.renamer, _NORMS, short_name)
    target, taps = files.target.config, config.aux_layers
    norms = [f"fc_norm.{i}.weight" for i in range(len(taps))] if config.fc_norm else []
    yield from tap_orders(dialects.renamer, _TAPPED if len(taps) == len(_TAPPED) else [*map(str, taps)], norms)
    choices = [tuple(i + by for i in taps) for by in (1, -1)]  # one layer off, as the other way of counting has them
    if target.num_layers >= 5:
        choices.append(default_taps(target))
    yield from tap_layers(taps, choices, target.num_layers, functools.partial(_set_taps, files.dialect))
    yield from of_windows(windows_of(config), files.stated, EAGLE)
    yield from of_target(config.norm_eps, config.rope, target, _put)


_put = put_everywhere(EAGLE, LAYER, at_top=FLAGS)


def _flags(config: Eagle3Config) -> Iterator[Repair]:
    for flag in _UNWRITTEN_FLAGS:
        value = not getattr(config, flag)
        yield Repair(f"{flag} is {str(value).lower()}", _put(**{flag: value}))


def _heads(config: Eagle3Config, target_head_dim: int) -> Iterator[Repair]:
    """List repairs that read the same matrices as heads of another width."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for size in dict.fromkeys((target_head_dim, 2 * config.head_dim, config.head_dim // 2)):
        if size < 2 or size % 2 or size == config.head_dim or queries % size or keys % size:
            continue
        heads = {"num_attention_heads": queries // size, "num_key_value_heads": keys // size, "head_dim": size}
        yield Repair(f"its {queries} query channels are {queries // size} heads of {size}", _put(**heads))


def _set_taps(dialect: Dialect, layers: tuple[int, ...]) -> Fix:
    ids = [i + dialects.COUNTED_FROM[dialect] for i in layers]

    def fix(repaired: Copy) -> None:
        if dialect == "sglang" and not any(find(repaired.raw, (TAP_IDS,))):
            repaired.raw[EAGLE] = (repaired.raw.get(EAGLE) or {"use_aux_hidden_state": True}) | {TAP_IDS: ids}
        elif any(find(repaired.raw, (TAP_IDS,))):
            _put(**{TAP_IDS: ids})(repaired)
        else:
            repaired.raw[TAP_IDS] = ids

    return fix
