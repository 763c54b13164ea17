"""The first values of a new head: whatever its target is, its first losses are at most those of a guess.

The states of a new head are not the target's, but have their size. So the target's output rows make confident nonsense
of them, which is worse than the same probability for all tokens, and takes many steps to unlearn. A single scale of the
output, which the final norm takes in, mends that. For given directions of the states the loss is a convex function of
the scale, and at scale 0 it is that of a guess. So halving the scale from 1 on finds its least value, where that lies
on this side. Directions that are as bad as their opposites are good get a negative scale.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specserve.drafters.learning import Rows
from specserve.mesh import on_mesh, whole
from specserve.models.target import TargetParams
from specserve.speculative.vocab import DraftVocab
from specserve.train.chunked_loss import RolloutMetrics
from specserve.train.step import LossConfig, cut_rows, join_rows, loss_and_gradient, seeds_of_step, teach

SMALLEST = 2.0**-10  # scale that is tried on either side

# (parameters, scale, target, vocabulary, rows) -> the parameters fitted to the rows and scaled, and their losses
Begin = Callable[[Any, jax.Array, TargetParams, DraftVocab, Rows], tuple[Any, jax.Array]]


def make_begin(config: LossConfig, place: Any, mesh: Mesh | None = None) -> Begin:
    """Make the jitted program that `first_params` runs for one scale after another. `place` is where the parameters
    live. The losses are cross-entropies, whatever the head is going to learn by."""
    config = replace(config, loss="ce")
    drafter = config.drafter

    def begin(
        params: Any, scale: jax.Array, target: TargetParams, vocab: DraftVocab, rows: Rows
    ) -> tuple[Any, jax.Array]:
        rows = replace(rows, seeds=seeds_of_step(jnp.int32(0), rows.token_ids))
        parts = cut_rows(rows, config.accumulate)
        states = join_rows(jax.lax.map(lambda part: teach(target, config, part).aux_hidden_states, parts))
        params = drafter.fit_states(params, states.astype(jnp.float32), rows.document_ids > 0)
        params = drafter.scale_output(params, scale)
        # XLA leaves the gradient out, which nothing uses
        _, sums, _ = loss_and_gradient(params, config, target, vocab, rows, lambda part: teach(target, config, part))
        return params, RolloutMetrics.of(sums).loss

    return jax.jit(on_mesh(mesh, begin), out_shardings=None if place is None else (place, whole(mesh)))


def first_params(begin: Begin, params: Any, guess: float, *given: Any) -> Any:
    """Return the parameters whose output has the scale with the least loss in the worst step of the rollout. Where no
    scale is better than a guess, whose loss is given, the output is nothing at first, and the head guesses."""
    for sign in (1.0, -1.0):
        best, least, scale = params, np.inf, 1.0
        while scale >= SMALLEST:
            found, losses = begin(params, jnp.float32(sign * scale), *given)
            if (worst := float(np.max(losses))) >= least:
                break
            best, least, scale = found, worst, scale / 2
        if least <= guess:
            return best
    return begin(params, jnp.float32(0.0), *given)[0]
