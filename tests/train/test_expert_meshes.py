"""Batches are cut over data x expert: what is learned over such a mesh is what one device learns."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import Mesh
from rounding import assert_same, tolerance
from spread import head_of, mesh_of, spread_target, target_of

from specserve.checkpoints.load import Target
from specserve.drafters.door import Head, Rollout, Rows
from specserve.mesh import on_mesh, whole
from specserve.models.target import TargetParams
from specserve.speculative.vocab import DraftVocab
from specserve.train.step import LossConfig, loss_and_gradient, place_rows, teach

BATCH, SEQ = 16, 12  # so that each of two parts has a row for each of eight devices


def _batch(rng: np.random.Generator) -> Rows:
    """Two documents in each row, of other lengths in every row."""
    token_ids = jnp.asarray(rng.integers(0, 64, (BATCH, SEQ)), jnp.int32)
    document_ids = jnp.asarray(np.sort(rng.integers(1, 3, (BATCH, SEQ)), axis=1), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(SEQ, dtype=jnp.int32), (BATCH, SEQ))
    return Rows(token_ids, jnp.asarray(rng.random((BATCH, SEQ)) < 0.7), document_ids, positions)


def _gradient(
    target: Target, head: Head, rows: Rows, mesh: Mesh | None, accumulate: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The program of a loss, its sums and its gradient, and what it takes."""
    config = LossConfig(target.config, head.drafter, Rollout(2, remat=True), 0.8, accumulate=accumulate)
    params = head.params if mesh is None else jax.device_put(head.params, head.drafter.place(mesh))

    @jax.jit
    def gradient(params: Any, target: TargetParams, vocab: DraftVocab, rows: Rows) -> tuple[Any, ...]:
        run = on_mesh(mesh, loss_and_gradient)
        return run(params, config, target, vocab, rows, lambda part: teach(target, config, part))

    vocab = jax.device_put(DraftVocab(jnp.asarray(head.target_ids)), whole(mesh))
    return gradient, (params, target.params, vocab, jax.device_put(rows, place_rows(mesh, (BATCH, SEQ))))


@pytest.mark.parametrize(
    ("model", "text", "is_layer"),
    [
        ("experts", "expert=4", False),
        pytest.param("latents", "data=2,tensor=2,expert=2", True, marks=pytest.mark.slow),
        pytest.param("experts", "data=2,sequence=2,expert=2", False, marks=pytest.mark.slow),
        pytest.param("latents", "data=2,expert=4", True, marks=pytest.mark.slow),
        pytest.param("delta nets", "data=2,tensor=2,expert=2", False, marks=pytest.mark.slow),
    ],
)
def test_a_loss_and_its_gradient_are_those_of_one_device(
    model: str, text: str, is_layer: bool, rng: np.random.Generator
) -> None:
    """Of an EAGLE-3 head beside a target with experts, and of a layer that has experts itself, in two parts."""
    mesh, alone = mesh_of(text), target_of(model)
    head = tiny.random_carried_layer(alone.config, seed=1) if is_layer else head_of(model)
    rows, accumulate = _batch(rng), 1 + is_layer
    expected, args = _gradient(alone, head, rows, None, accumulate)
    spread, spread_args = _gradient(spread_target(model, mesh), head, rows, mesh, accumulate)
    assert_same(spread(*spread_args), expected(*args), tolerance(expected, *args))
