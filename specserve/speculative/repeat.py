"""Several steps in one call of a program, one after another on the device."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specserve.kernels.gather import take_rows
from specserve.speculative import sampling
from specserve.speculative.slot_state import SlotState, StepResult


def repeat(
    step: Callable[[SlotState], tuple[SlotState, StepResult]],
    state: SlotState,
    slots: jax.Array,  # [batch] int32, those of the step
    num_steps: jax.Array,
    *,
    most: int,
) -> tuple[SlotState, StepResult]:
    """Run a step `num_steps` times ([] int32, 1 to `most`), each over the state that the one before it has left, and no
    more once all sequences have emitted a token that stops them. Returns the last state and the results, [most, ...];
    `StepResult.counts` is negative in those of steps that were not made. With `most` 1 there is no loop in the program,
    and one step is made. The step is called twice, of which the first call is for the shapes of its results."""
    if most == 1:
        state, result = step(state)
        return state, jax.tree.map(lambda x: x[None], result)
    _, shapes = jax.eval_shape(step, state)
    results = jax.tree.map(lambda shape: jnp.zeros((most, *shape.shape), shape.dtype), shapes)
    results = dataclasses.replace(results, counts=results.counts - 1)

    def goes_on(carry: tuple[jax.Array, SlotState, StepResult]) -> jax.Array:
        number, state, _ = carry
        return (number < num_steps) & ~_have_stopped(state, slots)

    def run(carry: tuple[jax.Array, SlotState, StepResult]) -> tuple[jax.Array, SlotState, StepResult]:
        number, state, results = carry
        state, result = step(state)
        return number + 1, state, jax.tree.map(lambda all, one: all.at[number].set(one), results, result)

    carry = jnp.zeros((), jnp.int32), state, results
    _, state, results = jax.lax.while_loop(goes_on, run, carry)
    return state, results


def _have_stopped(state: SlotState, slots: jax.Array) -> jax.Array:  # [] bool
    """Return whether each of the step's sequences has emitted one of its stop ids. A step over nothing but padding goes
    on, since it is made to be timed."""
    is_padding, seen = slots >= len(state.seq_lens), take_rows(state.tokens.seen, slots)
    has_stopped = jnp.any((seen & sampling.IS_STOP != 0) & (seen >= sampling.EMITTED), axis=-1)
    return jnp.all(has_stopped | is_padding) & ~jnp.all(is_padding)
