"""Without native kernels XLA's products get the layout that is fastest on this machine, and no layout changes one."""

import contextlib
import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounding
import tiny

from specserve.checkpoints.load import Target, in_few_bits
from specserve.kernels import native
from specserve.kernels.matmul import BlockedMatrix, PackedMatrix, Rounded, dequantize, matmul
from specserve.models.params import is_product
from specserve.serve.programs import layouts
from specserve.serve.programs.layouts import BLOCK_COLUMNS, FEW_ROWS, make_layouts

WHOLE, HALVES = 0, -1
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="layouts are chosen on CPU")


class Clock:
    """Runs of a cut take what this says, by the rows; they come in turns. In the last the fastest is disturbed."""

    def __init__(self, fastest: dict[int, int]) -> None:
        self._fastest, self._now, self._runs = fastest, 0.0, {rows: itertools.count() for rows in fastest}

    def perf_counter(self) -> float:
        return self._now

    def run(self, results: list[jax.Array]) -> list[jax.Array]:
        num_rows, count = len(results[0]), len(layouts._CANDIDATES)
        turn, place = divmod(next(self._runs[num_rows]), count)
        is_fastest = layouts._CANDIDATES[place] == self._fastest[num_rows]
        self._now += (100.0 if turn == layouts.TIMED_ROUNDS else 1.0) if is_fastest else 2.0 + place
        return results


@pytest.mark.parametrize(("one", "few"), [(WHOLE, HALVES), (HALVES, BLOCK_COLUMNS), (BLOCK_COLUMNS, WHOLE)])
def test_the_fastest_cut_is_chosen_and_changes_no_product(
    shallow_target: Target, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, one: int, few: int
) -> None:
    clock = Clock({1: one, FEW_ROWS // 2: few})
    with monkeypatch.context() as patch, native.left_out():
        patch.setattr(layouts, "time", SimpleNamespace(perf_counter=clock.perf_counter))
        patch.setattr(jax, "block_until_ready", clock.run)
        made = make_layouts(shallow_target, None)
    for num_rows, columns in ((1, one), (FEW_ROWS, few), (FEW_ROWS + 1, WHOLE)):
        weights = made.for_rows(num_rows)
        assert (weights is made.many) == (columns == WHOLE)
        cut = 0
        for path, plain in jax.tree_util.tree_leaves_with_path(made.many.target):
            if is_product(path):
                weight: Any = _at(weights.target, path)
                x = rng.standard_normal((num_rows, plain.shape[0])).astype(np.float32)
                with native.left_out():
                    product = matmul(jnp.asarray(x), weight)
                exact = x.astype(np.float64) @ np.asarray(plain, np.float64)
                rounding.assert_within(product, exact, rounding.of_product(x, np.asarray(plain)))
                if isinstance(weight, BlockedMatrix):
                    cut += 1
                    assert weight.blocks.shape[2] == (plain.shape[1] // 2 if columns == HALVES else columns)
        assert bool(cut) == (columns != WHOLE)


@pytest.mark.parametrize("to", ["int8", "int4"])
@pytest.mark.parametrize("way", ["as it is", "no quick bytes", "no kernels"])
def test_a_heads_few_bits_stay_where_they_are_quick(
    shallow_target: Target, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, way: str, to: Rounded
) -> None:
    """Elsewhere the same values lie in wider numbers, which is exact."""
    head = tiny.random_head(shallow_target.config, seed=1)
    head = dataclasses.replace(head, params=in_few_bits(head.params, to))
    if way != "as it is" and not native.is_available():
        pytest.skip("there are no kernels to begin with")
    if way == "no quick bytes":
        monkeypatch.setattr(native, "is_quick_with_bytes", lambda: False)
    with native.left_out() if way == "no kernels" else contextlib.nullcontext():
        made = make_layouts(shallow_target, head).many.draft
        assert made is not None
        matrix, before = made.params.fc, head.params.fc
        x = rng.standard_normal((3, before.shape[0])).astype(np.float32)
        product = matmul(jnp.asarray(x), matrix)
    if way != "no kernels" and (to == "int4" or (way == "as it is" and native.is_quick_with_bytes())):
        assert matrix.format == {"int8": "int8", "int4": "uint4"}[to]
    else:
        assert (
            (matrix.panels.dtype == jnp.bfloat16) if isinstance(matrix, PackedMatrix) else isinstance(matrix, jax.Array)
        )
    plain = np.asarray(dequantize(before, jnp.dtype("float32")), np.float64)
    parts = plain if before.offset is None else rounding.magnitudes(before)
    rounding.assert_within(product, x.astype(np.float64) @ plain, rounding.of_product(x, parts, before.block))


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = getattr(tree, key.name) if hasattr(key, "name") else tree[key.idx]
    return tree
