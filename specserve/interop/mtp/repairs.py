"""Repairs of the files of a layer of multi-token prediction: other readings of them, for slips of conversions that no
shape shows. Whether one helps is measured by running the layer (`eval.trial`)."""

import functools
from collections.abc import Iterator

import numpy as np

from specserve.checkpoints.load import is_whole
from specserve.drafters.mtp.config import MtpConfig
from specserve.interop.findings import Repair
from specserve.interop.mtp import layouts
from specserve.interop.mtp.checks import MtpFiles
from specserve.interop.repairs import change, exchanged, short_name


def list_repairs(files: MtpFiles) -> Iterator[Repair]:
    """List all repairs that are worth a try. There are none where the folder cannot be read as a layer of this target,
    nor where it is a whole checkpoint, whose layer was not converted."""
    config = files.config
    if config is not None and not is_whole(files.names, config.layer):
        yield from _all(config, files.names)


def _all(config: MtpConfig, names: frozenset[str]) -> Iterator[Repair]:
    layout, width = config.layout, config.layer.d_model
    rename = functools.partial(layouts.name_in, layout=layout)
    stored = rename(names)
    norms = [f"{name}.weight" for name in (layout.token_norm, layout.hidden_norm, layout.norm)]
    yield from exchanged(rename, norms, stored)
    parts = ["the token's embedding", "the hidden state"]
    first, second = parts if layout.hidden_first else reversed(parts)
    fc = f"{layout.fc}.weight"
    yield Repair(
        f"{stored(fc)} takes {first} first and {second} second",
        change(rename, lambda weight: np.roll(weight, width, axis=1), fc),
    )
    by = np.float32(-1 if config.layer.norm_offset else 1)
    yield Repair(
        f"its norms are stored {'whole' if config.layer.norm_offset else 'as differences from one'}",
        change(rename, lambda weight: (weight.astype(np.float32) + by).astype(weight.dtype), *norms),
    )
    attention, mlp = f"{layout.layer}.self_attn", f"{layout.layer}.mlp"
    output = f"{attention}.o_proj.weight"
    if stored(output) in names and config.layer.num_heads * config.layer.head_dim == width:
        yield Repair(f"{stored(output)} is transposed", change(rename, np.transpose, output))
    gates = f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"
    if {*map(stored, gates)} <= names:
        yield from exchanged(rename, gates, short_name)
