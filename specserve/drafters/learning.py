"""The learning of a drafter: the rows that it learns from, the rollout, the tokens that its states predict, and what
that costs. `Learning` has the defaults, which are those of a drafter that is trained on its own outputs, as it serves
(training-time test, EAGLE-3, section 3.2, arXiv 2503.01840).

Serving drafts several tokens ahead. Only the first draft token is predicted from the target's hidden states; every
later one is predicted from the drafter's own hidden state of the draft token before. Training repeats that: step 0 runs
the drafter over all positions of a row with the target's hidden states, and step k runs it again with its own hidden
states of step k - 1. At position t of step k the drafter reads token t + 1 + k and predicts the token after it,
t + 2 + k. So with every step the tokens that are read, the distributions that are predicted and the loss mask move by
one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from specserve.kernels.rows import Documents
from specserve.models.params import is_matrix, num_params, specs
from specserve.models.target import TargetParams
from specserve.pytree import pytree

Result = TypeVar("Result")


@pytree
class Rows:
    """A batch of packed rows to learn from."""

    token_ids: jax.Array  # [batch, seq] int32
    loss_mask: jax.Array  # [batch, seq] bool, True where the token is the assistant's
    document_ids: jax.Array  # [batch, seq] int32, 0 is padding
    position_ids: jax.Array  # [batch, seq] int32, restarting with each document
    features: Any = None  # the target's outputs about them, where these were captured (`train.features`)
    seeds: jax.Array | None = None  # [batch] uint32, other ones at every training step, for what is drawn at random


@dataclass(frozen=True)
class Rollout:
    """The settings of a rollout: how many tokens ahead a drafter learns to look, and what of it is kept for the
    backward pass."""

    length: int  # from `Learning.num_steps`
    remat: bool  # each step is computed again in the backward pass
    anchors: int = 0  # of a drafter that learns at some positions of a row: at how many; 0: as many as suit it

    @property
    def num_repeats(self) -> int:
        """The number of times that each step is computed again."""
        return int(self.remat)


@pytree
class DraftTargets:
    """The tokens that the hidden states of a rollout predict, and the weights of these predictions. Column j of step k
    is one state."""

    weights: jax.Array  # [rollout, batch, n] float32, what a state counts in the loss of its step; 0: nothing
    # [rollout, batch, n] int32, the position of the row whose next token a state foresees; None: column j is about
    # position j in every step. Where there are positions, a column holds the guesses of one moment, in order
    positions: jax.Array | None = None


@dataclass(frozen=True)
class Flops:
    """Floating point operations: those that any implementation must do, and those of this one."""

    useful: float
    executed: float

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.useful + other.useful, self.executed + other.executed)

    def __mul__(self, factor: float) -> "Flops":
        return Flops(self.useful * factor, self.executed * factor)


@dataclass(frozen=True)
class Costs:
    """The costs of learning from one position of a row, without the output head."""

    flops: Flops  # forward and backward
    kept: int  # numbers that stay until the backward pass
    workspace: int  # numbers that one layer needs at once, attention's scores left out
    num_heads: int  # of attention
    num_kv_heads: int
    states: float = 1.0  # of each step of the rollout, for a position
    shares_output: bool = False  # its logits are made by the target's output head, which does not learn
    kv: float = 0.0  # numbers of the keys and values that queries of other positions see
    summed: float = 0.0  # numbers that devices with parts of the matrices add up, forward and backward
    routed: float = 0.0  # numbers that go to experts and come back, forward and backward
    has_one_teacher: bool = True  # the states of all steps about a position are compared with one distribution


class Learning:
    """The part of `interface.TrainedDrafter` that training calls. A kind overrides `learn`, and what else differs."""

    def num_steps(self, rollout: int) -> int:
        """Return how many tokens ahead it learns to look, where the settings ask for `rollout`."""
        return rollout

    def draft_targets(self, rows: Rows, rollout: Rollout) -> DraftTargets:
        """Return which tokens the states of `learn` predict, and which of these bear loss."""
        return DraftTargets(all_weights(rows, rollout.length))

    def learn(
        self,
        params: Any,  # in the drafter's dtype
        target: TargetParams,
        rows: Rows,
        aux_hidden_states: jax.Array,  # [batch, seq, taps * target_d_model], in the drafter's dtype
        rollout: Rollout,
    ) -> list[jax.Array]:  # rollout x [batch, n, d_model], what `logits` takes
        """The hidden states of every step of a rollout, as `draft_targets` places them. A step may have states for the
        first columns alone, and later steps for fewer of them."""
        raise NotImplementedError

    def auxiliary_loss(
        self,
        output: Any,
        target: TargetParams,
        hidden_states: jax.Array,  # [rollout, n, d_model]
        logits: jax.Array,  # [rollout, n, draft_vocab] float32, of them
        p: jax.Array,  # [rollout or 1, n, draft_vocab] float32, the target's distribution
    ) -> jax.Array | None:  # [rollout, n] float32, nats
        """Compute a loss of states beside that of their distribution, which counts where theirs does. None means that
        there is none."""
        return None


def computed_again(step: Callable[..., Result]) -> Callable[..., Result]:
    """Return the step as a function of which nothing is kept for the backward pass but its arguments.

    `jax.checkpoint` does the same, by barriers that XLA's CPU compiler drops before it schedules: there all steps were
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


def unroll(
    step: Callable[..., tuple[jax.Array, Any]],
    hidden: jax.Array,  # [batch, seq, d_model], what the first step begins with
    params: tuple[Any, Any],
    rows: Rows,
    rollout: Rollout,
    hand_on: Callable[[jax.Array], jax.Array] = lambda state: state,
) -> list[jax.Array]:  # length x [batch, seq, d_model]
    """Run a drafter again over its own states, and return those of every step. The state at position t of step k
    predicts the token after token t + 1 + k.

    A step is given (hidden, the entries of the steps before, *params, token_ids, position_ids, documents) and returns
    its states and its entries. `hand_on` makes of its states what the next one begins with. All that a step learns by
    is among its arguments, so that it can be computed again in the backward pass."""
    if rollout.remat:
        step = computed_again(step)
    documents, states, entries = Documents(rows.document_ids), list[jax.Array](), list[Any]()
    for k in range(rollout.length):
        token_ids, position_ids = shift(rows.token_ids, 1 + k), rows.position_ids + 1 + k
        state, own = step(hidden, entries, *params, token_ids, position_ids, documents)
        hidden = hand_on(state)
        states.append(state)
        entries = [*entries, own]
    return states


def by_position(states: list[jax.Array]) -> list[jax.Array]:
    """The states moved to the token whose successor they predict: that of position t in step k to position t + 1 + k.
    The predictions of all steps about one token then lie at one position."""
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


def kept_by_layer(d_model: int, num_queries: int, d_ff: int) -> int:
    """Return how many numbers of a transformer layer stay until the backward pass where nothing is computed again, for
    each position, keys and values left out. `num_queries` of them are a position's queries, all heads together."""
    return 4 * d_model + 2 * num_queries + 6 * d_ff


def workspace_of_layer(d_model: int, num_queries: int, d_ff: int) -> int:
    """Return how many numbers the layer needs at once, keys, values and attention's scores left out."""
    return 6 * d_model + 2 * num_queries + 6 * d_ff


def attention_flops(width: int, seen: float, computed: float, *, remat: bool) -> Flops:
    """The operations of attention's products, forward and backward, of a position that sees `seen` keys where the
    kernel computes `computed`. `width` are the numbers of its queries and of what the values bring, all layers
    together. A block is computed again from queries and keys, and its backward pass has four products."""
    times = 2 + 2 + int(remat)
    return Flops(3 * 2 * width * seen, times * 2 * width * computed)


def costs_of_matrices(spec: Any, output: Any, rollout: Rollout) -> Costs:
    """Return the costs of a drafter that multiplies each state by every matrix of its `spec` tree but those of its
    `output`, once in every step of a rollout, and that does not attend."""
    used = [leaf for leaf in specs(spec) if is_matrix(leaf) and leaf.name not in {each.name for each in specs(output)}]
    numbers, widest = num_params(used), max((sum(leaf.shape) for leaf in used), default=1)
    flops = Flops(6 * numbers, (6 + 2 * rollout.num_repeats) * numbers) * rollout.length
    return Costs(flops, kept=3 * rollout.length * widest, workspace=3 * widest, num_heads=1, num_kv_heads=1)


def shift(x: jax.Array, by: int) -> jax.Array:
    """Return x[t + by] at t along axis 1, zero past the ends."""
    ahead, behind = max(by, 0), max(-by, 0)
    return jnp.pad(x[:, ahead : x.shape[1] - behind], [(0, 0), (behind, ahead)] + [(0, 0)] * (x.ndim - 2))
