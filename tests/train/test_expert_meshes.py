"""Batches are cut over data x expert: what is learned over such a mesh is what one device learns."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from rounding import assert_same, tolerance
from spread import head_of, mesh_of, spread_target, target_of

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.learning import Rollout, Rows
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
    seeds = jnp.arange(BATCH, dtype=jnp.uint32)
    return Rows(token_ids, jnp.asarray(rng.random((BATCH, SEQ)) < 0.7), document_ids, positions, seeds=seeds)


def _gradient(
    target: Target, head: Head, rows: Rows, mesh: Mesh | None, accumulate: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The program of a loss, its sums and its gradient, and what it takes."""
    rollout = Rollout(head.drafter.num_steps(2), remat=True)
    config = LossConfig(target.config, head.drafter, rollout, 0.8, accumulate=accumulate)
    params = head.params if mesh is None else jax.device_put(head.params, head.drafter.place(mesh))

    @jax.jit
    def gradient(params: Any, target: TargetParams, vocab: DraftVocab, rows: Rows) -> tuple[Any, ...]:
        run = on_mesh(mesh, loss_and_gradient)
        return run(params, config, target, vocab, rows, lambda part: teach(target, config, part))

    vocab = jax.device_put(DraftVocab(jnp.asarray(head.target_ids)), whole(mesh))
    assert rows.seeds is not None
    of_rows, seeds = dataclasses.replace(rows, seeds=None), jax.device_put(rows.seeds, whole(mesh))
    spread = jax.device_put(of_rows, place_rows(mesh, (BATCH, SEQ)))
    return gradient, (params, target.params, vocab, dataclasses.replace(spread, seeds=seeds))


@pytest.mark.parametrize(
    ("model", "text", "kind"),
    [
        ("experts", "expert=4", "eagle3"),
        pytest.param("latents", "data=2,tensor=2,expert=2", "mtp", marks=pytest.mark.slow),
        pytest.param("experts", "data=2,sequence=2,expert=2", "eagle3", marks=pytest.mark.slow),
        pytest.param("latents", "data=2,expert=4", "mtp", marks=pytest.mark.slow),
        pytest.param("delta nets", "data=2,tensor=2,expert=2", "eagle3", marks=pytest.mark.slow),
        pytest.param("dense", "data=2,tensor=2,sequence=2", "p-eagle", marks=pytest.mark.slow),
        pytest.param("experts", "data=2,sequence=2,expert=2", "p-eagle", marks=pytest.mark.slow),
        pytest.param("dense", "data=2,tensor=2,sequence=2", "dspark", marks=pytest.mark.slow),
        pytest.param("dense", "data=2,tensor=2,sequence=2", "dflash2", marks=pytest.mark.slow),
        pytest.param("experts", "data=2,tensor=2,expert=2", "dspark", marks=pytest.mark.slow),
    ],
)
def test_a_loss_and_its_gradient_are_those_of_one_device(
    model: str, text: str, kind: str, rng: np.random.Generator
) -> None:
    """Of heads of every kind that a target with experts or without may have; of a layer that has experts itself, in two
    parts."""
    mesh, alone, head = mesh_of(text), target_of(model), head_of(model, kind)
    rows, accumulate = _batch(rng), 1 + (kind == "mtp")
    expected, args = _gradient(alone, head, rows, None, accumulate)
    spread, spread_args = _gradient(spread_target(model, mesh), head, rows, mesh, accumulate)
    assert_same(spread(*spread_args), expected(*args), tolerance(expected, *args))
