"""LoRA adapters of every family: the pairs beside a target's matrices are what merging adds to them, and what cannot be
adapted is refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import seeded
from parity import ONE_OF_EACH, RAWS
from rounding import UNIT, assert_within, of_product

from specserve.checkpoints.load import Target, load_target
from specserve.checkpoints.lora import LoraPair, Merging
from specserve.errors import CheckpointError
from specserve.models.adapters import Adapter, adaptable, check_adapter, side_by_side
from specserve.models.families.table import model_config
from specserve.models.params import specs
from specserve.models.served import fuse_for_cpu
from specserve.models.target import target_spec

RANK = 4
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8}  # of a merged weight, beside that of float32: once, to 8 bits


def _target(case: str, dtype: str, folder: Path) -> Target:
    raw = RAWS[case]
    (folder / "config.json").write_text(json.dumps(raw))
    of_target = specs(target_spec(model_config(raw, dtype="float32")))
    seeded.write_weights(folder, {name: spec.stored_shape for spec in of_target for name in spec.names}, 0, dtype)
    return load_target(folder, dtype=dtype)


def _adapter(target: Target, rank: int) -> Adapter:
    rng = np.random.default_rng(rank)
    shapes = adaptable(target.config).items()
    pairs = {name: (rng.normal(size=(rank, d_in)), rng.normal(size=(d_out, rank))) for name, (d_out, d_in) in shapes}
    return {name: LoraPair(a.astype(np.float32), b.astype(np.float32), 0.5) for name, (a, b) in pairs.items()}


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float32") for case in ONE_OF_EACH), (ONE_OF_EACH[0], "bfloat16")]
)
def test_pairs_are_what_merging_adds(case: str, dtype: str, tmp_path: Path) -> None:
    """Of every matrix that may be adapted, alone and fused, in the place of the adapter and of the rank that it has;
    and merging changes no other parameter. In bfloat16 what is merged is rounded once."""
    target = _target(case, dtype, tmp_path)
    adapter = _adapter(target, RANK - 1)
    if not adapter:
        with pytest.raises(CheckpointError, match="no matrix of this target can be adapted"):
            check_adapter(target.config, {"model.layers.0.mlp.up_proj.weight": None}, RANK, "x")  # type: ignore[dict-item]
        return
    check_adapter(target.config, adapter, RANK, "x")
    merged = load_target(target.folder, dtype=dtype, merging=Merging(adapter))
    for arrange in (lambda params: params, fuse_for_cpu):
        base, expected = arrange(target.params), arrange(merged.params)
        layers = list[Any](expected.layers)
        for i, name, a, b in side_by_side(base, target.config, [None, adapter], RANK):
            assert not a[0].any(), "the place of no adapter is zeros"
            assert not b[0].any()
            block, matrix = name.split(".")
            found = (getattr(getattr(of.layers[i], block), matrix) for of in (base, expected))
            weight, sum_ = (np.asarray(each, np.float32) for each in found)
            exact = weight + a[1] @ b[1]
            bound = of_product(a[1], b[1]) + 4 * UNIT * (np.abs(weight) + np.abs(sum_))
            assert_within(exact, sum_, bound + ROUNDING[dtype] * np.abs(exact))
            own = dataclasses.replace(
                getattr(layers[i], block), **{matrix: getattr(getattr(base.layers[i], block), matrix)}
            )
            layers[i] = dataclasses.replace(layers[i], **{block: own})
        rest = dataclasses.replace(expected, layers=tuple(layers))
        jax.tree.map(np.testing.assert_array_equal, rest, base)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.0.mlp.up_proj.weight": (3, 32, 48)}, r"rank 3, over --max-lora-rank 2"),
        ({"model.layers.0.mlp.up_proj.weight": (2, 31, 48)}, r"expected \[2, 32\] and \[48, 2\]"),
        ({"model.layers.9.mlp.up_proj.weight": (2, 32, 48)}, r"layers\.9.*down_proj.*layers 0 to 5"),
        ({"model.embed_tokens.weight": (2, 32, 64)}, r"model\.embed_tokens\.weight, which this server cannot"),
        ({"lm_head.weight": (2, 32, 64)}, r"lm_head\.weight, which this server cannot"),
        ({"model.layers.0.mlp.up_proj.weight": (2, 32, 48, np.nan)}, "not numbers"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tiny_target: Target, change: Any, message: str) -> None:
    [(name, (rank, d_in, d_out, *value))] = change.items()
    number = value[0] if value else 1.0
    pair = LoraPair(np.full((rank, d_in), number, np.float32), np.ones((d_out, rank), np.float32), 1.0)
    with pytest.raises(CheckpointError, match=message):
        check_adapter(tiny_target.config, _adapter(tiny_target, 2) | {name: pair}, 2, "folder")
