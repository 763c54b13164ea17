"""Training-time test (EAGLE-3, section 3.2): a drafter that runs ahead is trained on its own outputs, as it serves.

Serving drafts several tokens ahead. Only the first draft token is predicted from the target's hidden states; every
later one is predicted from the drafter's own hidden state of the draft token before. Training repeats that: step 0 runs
the drafter over all positions of a row with the target's hidden states, and step k runs it again with its own hidden
states of step k - 1.

At position t of step k the drafter reads token t + 1 + k and predicts the token after it, t + 2 + k. So with every step
the tokens that are read, the distributions that are predicted and the loss mask move by one.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from specserve.drafters.door import Aims, Rollout, Rows, shift

Result = TypeVar("Result")


class UnrolledDrafter:
    """The part of `door.TrainedDrafter` that is alike in all drafters that are trained on their own outputs."""

    @property
    def max_tree_depth(self) -> int | None:
        return None

    def num_steps(self, rollout: int) -> int:
        return rollout

    def aims(self, rows: Rows, rollout: Rollout) -> Aims:
        return Aims(all_weights(rows, rollout.length))


def computed_again(step: Callable[..., Result]) -> Callable[..., Result]:
    """Return the step as a function of which nothing is kept for the backward pass but its arguments.

    `jax.checkpoint` says the same, by barriers that XLA's CPU compiler drops before it schedules: there all steps were
    computed again at once, and lived side by side. So the state that a step begins with waits for the cotangents of
    its end, by a sum that changes nothing.
    """

    @jax.custom_vjp
    def run(*arguments: Any) -> Any:
        return step(*arguments)

    def forward(*arguments: Any) -> tuple[Any, Any]:
        return step(*arguments), arguments

    def backward(arguments: Any, cotangents: Any) -> Any:
        (hidden, *rest), cotangents = jax.lax.optimization_barrier((arguments, cotangents))
        nothing = sum(0.0 * jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(cotangents))
        hidden += jnp.asarray(nothing, hidden.dtype)
        return jax.vjp(step, hidden, *rest)[1](cotangents)

    run.defvjp(forward, backward)
    return run


def by_position(states: list[jax.Array]) -> list[jax.Array]:
    """The states moved to the token whose successor they predict: that of position t in step k to position t + 1 + k.
    What all steps say about one token then lies at one position."""
    return [shift(state, -1 - k) for k, state in enumerate(states)]


def loss_positions(rows: Rows, step: int) -> jax.Array:  # [batch, seq] float32
    """Return the weight of each position in a rollout step: 1 at position t if the token that is predicted there, t +
    2 + step, belongs to the assistant and to the same document, else 0."""
    ahead = 2 + step
    same = (shift(rows.document_ids, ahead) == rows.document_ids) & (rows.document_ids > 0)
    return (same & shift(rows.loss_mask, ahead)).astype(jnp.float32)


def all_weights(rows: Rows, length: int) -> jax.Array:  # [rollout, batch, seq] float32
    """Return the weights of all steps, moved as `by_position` moves the states."""
    return jnp.stack(by_position([loss_positions(rows, step) for step in range(length)]))
