"""The loss of a rollout over the positions that bear loss, a chunk of them at a time.

Neither the target's logits of all positions nor the draft's of any rollout step ever exist. For a chunk of positions
the target's distribution is computed once, and the predictions of all rollout steps at the same positions are compared
with it. The gradient is computed right there, where the chunk's logits are at hand, and kept in place of them: of the
output head, and of each state. So a position costs three products with the draft's head (logits and two gradients) for
each rollout step and one with the target's. Chunks of the vocabulary, the other way to cut, would cost two more:
softmaxes need the whole vocabulary before the first gradient, and the acceptance another pass.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

from specserve.drafters.interface import TrainedDrafter
from specserve.drafters.learning import DraftTargets
from specserve.kernels.rows import part_length
from specserve.mesh import most_of_parts, num_parts, over_parts, partition, program_platform, sum_parts, traced_mesh
from specserve.models import target as target_model
from specserve.models.config import ModelConfig
from specserve.models.target import TargetParams
from specserve.pytree import pytree
from specserve.speculative.sampling import argmax
from specserve.speculative.vocab import DraftVocab
from specserve.train.losses import Loss, Weigh, acceptance

Tree = TypeVar("Tree")
LOGITS_AT_ONCE = {"cpu": 1 << 21}  # of all rollout steps; elsewhere:
DEFAULT_LOGITS_AT_ONCE = 1 << 27  # 512 MB in float32


class Teacher(Protocol):
    """The frozen target's predictions at positions: a pytree of [batch, seq, ...] arrays. They are cut and flattened
    to [position, ...] as the chunks need it, or to [position, rollout, ...] where each state has a teacher of its own.
    """

    def distribution(
        self, target: TargetParams, config: ModelConfig, vocab: DraftVocab
    ) -> tuple[jax.Array, jax.Array]:  # [position, ..., draft_vocab] float32 and [position, ...] int32
        """The next token's probabilities over the draft vocabulary, whose sum is the mass in it, and the target's best
        token as a draft row, -1 when it is none."""
        ...


@pytree
class HiddenStates:
    """The target's final hidden states, of which its output head makes logits."""

    hidden_states: jax.Array  # [batch, seq, d_model]

    def distribution(self, target: TargetParams, config: ModelConfig, vocab: DraftVocab) -> tuple[jax.Array, jax.Array]:
        drafted, log_total, best = self.compared(target, config, vocab)
        return jnp.exp(drafted - log_total[..., None]), best

    def compared(
        self, target: TargetParams, config: ModelConfig, vocab: DraftVocab
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the logits of the draft vocabulary [position, ..., draft_vocab] float32, the log-sum-exp of those of
        the whole vocabulary, and the best token (see `Teacher`)."""
        logits = target_model.logits(target, config, self.hidden_states)
        if program_platform() == "tpu":
            # Taking columns of the logits would transpose all of them there. A product of its own may round otherwise,
            # so the best token is looked up, and not compared.
            drafted = target_model.logits_of(target, config, self.hidden_states, vocab.target_ids)
            rows = jnp.arange(len(vocab.target_ids), dtype=jnp.int32)
            row_of = jnp.full(logits.shape[-1], -1, jnp.int32).at[vocab.target_ids].set(rows)
            return drafted, jax.nn.logsumexp(logits, axis=-1), row_of[argmax(logits)]
        drafted = logits[..., vocab.target_ids]
        is_drafted = jnp.max(drafted, axis=-1) >= jnp.max(logits, axis=-1)
        return drafted, jax.nn.logsumexp(logits, axis=-1), jnp.where(is_drafted, argmax(drafted), -1)


@pytree
class Sums:
    """Sums over the positions that bear loss, one value for each rollout step."""

    loss: jax.Array  # [rollout] float32, nats, of the positions whose best token the draft has
    n_known: jax.Array  # [rollout] float32, how many those are
    hits: jax.Array  # [rollout] float32, where the draft's best token is the target's
    acceptance: jax.Array  # [rollout] float32, see `losses.acceptance`; tokens out of the draft vocabulary count as 0
    n_positions: jax.Array  # [rollout] float32, all positions that bear loss


@pytree
class RolloutMetrics:
    """The metrics of a rollout, one value for each of its steps."""

    loss: jax.Array  # [rollout] float32, nats, mean over the positions whose best token the draft has
    accuracy: jax.Array  # [rollout] float32: how often the draft's best token is the target's, others counted as misses
    acceptance: jax.Array  # [rollout] float32: how often a token drawn from the draft would be accepted

    @classmethod
    def of(cls, sums: Sums) -> "RolloutMetrics":
        n_positions = jnp.maximum(sums.n_positions, 1.0)
        return cls(sums.loss / jnp.maximum(sums.n_known, 1.0), sums.hits / n_positions, sums.acceptance / n_positions)


@dataclass(frozen=True)
class Objective:
    """The way from states to a loss: the drafter makes logits of them, the target a distribution of what a teacher
    has, both over the draft vocabulary, and a loss compares the two."""

    drafter: TrainedDrafter
    target: TargetParams
    config: ModelConfig  # the target's
    vocab: DraftVocab
    loss: Loss
    weigh: Weigh | None = None  # the weight of a state beside that of its rollout step, by its column


def sum_losses(
    objective: Objective,
    output: tuple[jax.Array, ...],  # the parameters that make logits of states
    states: list[jax.Array],  # rollout x [batch, n, d_model]
    draft_targets: DraftTargets,  # the tokens that the states predict
    coefficients: jax.Array,  # [rollout] float32, the weight of a nat at each rollout step
    teacher: Teacher,
) -> tuple[jax.Array, Sums]:
    """sum_k coefficients[k] * (sum over states of the loss at step k), differentiable in `output` and `states`. Where
    later steps have fewer states, columns that reach as many steps are summed together, and none that has no state."""
    if draft_targets.positions is not None:
        teacher = _teachers(teacher, draft_targets.positions)
    ends = sorted({state.shape[1] for state in states})
    if len(ends) == 1:
        return _sum_columns(objective, output, states, draft_targets, coefficients, teacher)
    found = []
    for first, end in itertools.pairwise((0, *ends)):
        reached = [state[:, first:end] for state in states if state.shape[1] >= end]
        steps = len(reached)
        own = jax.tree.map(lambda x, a=first, b=end, n=steps: x[:n, :, a:b], draft_targets)
        of_columns = jax.tree.map(lambda x, a=first, b=end, n=steps: x[:, a:b, :n], teacher)
        value, sums = _sum_columns(objective, output, reached, own, coefficients[:steps], of_columns)
        found.append((value, jax.tree.map(lambda x, n=steps: jnp.pad(x, (0, len(states) - n)), sums)))
    return functools.reduce(lambda one, other: jax.tree.map(jnp.add, one, other), found)


def _sum_columns(
    objective: Objective,
    output: tuple[jax.Array, ...],
    states: list[jax.Array],  # steps x [batch, n, d_model]
    draft_targets: DraftTargets,
    coefficients: jax.Array,  # [steps] float32
    teacher: Teacher,  # of positions [batch, n], or where states have positions of their own [batch, n, steps]
) -> tuple[jax.Array, Sums]:
    """`sum_losses` of columns that have a state in every step."""
    drafter, config, weights = objective.drafter, objective.config, draft_targets.weights
    is_shared = draft_targets.positions is None  # one teacher for the states of all steps

    def of_chunk(common: Any, head: Any, chunk: Any) -> tuple[Any, ...]:
        (coefficients, target, vocab), (states, weights, teacher) = common, chunk
        p, best = teacher.distribution(target, config, vocab)
        p, best = (p[None], best[None]) if is_shared else (jnp.moveaxis(p, 1, 0), jnp.moveaxis(best, 1, 0))

        def value_of(head: Any, states: list[jax.Array]) -> tuple[jax.Array, Sums]:
            # cast here, so that chunks add up their gradients in the dtype that the parameters are kept in
            cast = jax.tree.map(lambda leaf: leaf.astype(drafter.dtype), head)
            stacked = jnp.stack(states)
            logits = drafter.logits(cast, target, stacked)
            also = drafter.auxiliary_loss(cast, target, stacked, logits, p)
            sums, weighed = _compare(objective, logits, p, best, weights, also)
            return jnp.sum(coefficients * weighed), sums

        (value, sums), gradient = jax.value_and_grad(value_of, (0, 1), has_aux=True)(head, states)
        return value, sums, *gradient

    cut = [axis for axis in ("batch", "sequence") if num_parts(traced_mesh(), axis) > 1]
    num_logits = len(states) * drafter.draft_vocab_size
    if not is_shared:
        num_logits += len(states) * config.vocab_size

    def of_positions(*arguments: Any) -> tuple[Any, ...]:
        positions, common, head = arguments
        *summed, of_states = _in_chunks(functools.partial(of_chunk, common), head, positions, num_logits, cut)
        return *(sum_parts(summed, cut) if cut else summed), of_states

    positions, common = (states, weights, teacher), (coefficients, objective.target, objective.vocab)
    num_columns = weights.shape[2]
    if missing := -num_columns % num_parts(traced_mesh(), "sequence"):  # columns that count nothing
        positions = tuple(_filled_up(part, missing, axis) for part, axis in zip(positions, (1, 2, 1), strict=True))
    run: Any = of_positions
    if cut:
        rows, whole = partition(("batch", "sequence"), cut), partition((), cut)
        of_weights = partition((None, "batch", "sequence"), cut)
        run = over_parts(of_positions, cut, ((rows, of_weights, rows), whole, whole), (whole, whole, whole, rows))
    value, sums, of_head, of_states = run(*jax.lax.stop_gradient((positions, common, output)))
    of_states = [x[:, :num_columns] for x in of_states]
    return _with_gradient(value, (of_head, of_states), (output, states)), sums


def _teachers(teacher: Any, positions: jax.Array) -> Any:  # [batch, seq, ...] leaves -> [batch, n, rollout, ...]
    """Return the target's predictions at the positions [rollout, batch, n] whose tokens the states predict."""
    index = jnp.moveaxis(positions, 0, 2)  # [batch, n, rollout]

    def take(leaf: jax.Array) -> jax.Array:
        found = jax.vmap(lambda row, at: row.at[at].get(mode="clip"))(leaf, index.reshape(len(index), -1))
        return found.reshape(*index.shape, *leaf.shape[2:])

    return jax.tree.map(take, teacher)


def _compare(
    objective: Objective,
    logits: jax.Array,  # [rollout, state, draft_vocab] float32
    p: jax.Array,  # [rollout or 1, state, draft_vocab] float32
    best: jax.Array,  # [rollout or 1, state] int32
    weights: jax.Array,  # [rollout, state] float32
    also: jax.Array | None,  # [rollout, state] float32, nats
) -> tuple[Sums, jax.Array]:
    """Return the sums, and the loss [rollout] float32, in which each state counts by its weight, with what the states
    learn besides."""
    is_known = jnp.where(best >= 0, weights, 0.0)
    of_best = jnp.take_along_axis(logits, jnp.maximum(best, 0)[..., None], axis=-1)[..., 0]
    is_hit = of_best >= jnp.max(logits, axis=-1)
    losses, accepted = objective.loss(p, logits) * is_known, acceptance(p, logits)
    sums = Sums(
        loss=jnp.sum(losses, axis=1),
        n_known=jnp.sum(is_known, axis=1),
        hits=jnp.sum(jnp.where(is_hit, is_known, 0.0), axis=1),
        acceptance=jnp.sum(accepted * weights, axis=1),
        n_positions=jnp.sum(weights, axis=1),
    )
    if objective.weigh is not None:
        counts = objective.weigh(jax.lax.stop_gradient(accepted), weights)
        return sums, jnp.sum((losses if also is None else losses + also) * counts, axis=1)
    return sums, sums.loss if also is None else sums.loss + jnp.sum(also * weights, axis=1)


def _filled_up(tree: Tree, missing: int, axis: int) -> Tree:
    """Return the arrays with so many zeros appended along an axis."""

    def fill(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, missing * (i == axis)) for i in range(x.ndim)])

    return jax.tree.map(fill, tree)


def _in_chunks(
    of_chunk: Any,  # (head, chunk) -> value, sums, gradient of head and of the chunk's states
    head: Any,
    positions: tuple[list[jax.Array], jax.Array, Any],  # states, weights and teacher of [batch, seq] positions
    num_logits: int,  # for each position
    cut: list[str],  # the logical axes along which devices have positions of their own
) -> tuple[jax.Array, Sums, Any, list[jax.Array]]:
    """Return what all chunks give together. Only positions that bear loss are in them, so the number of chunks is known
    when the program runs; devices that wait for each other within a chunk all take the largest of theirs."""
    batch, seq = positions[1].shape[1:]
    number = batch * seq
    length = chunk_length(number, num_logits, program_platform())
    states, teacher = jax.tree.map(lambda x: x.reshape(number, *x.shape[2:]), (positions[0], positions[2]))
    weights = positions[1].reshape(-1, number)
    bears = jnp.any(weights != 0, axis=0)
    places = jnp.nonzero(bears, size=number + -number % length, fill_value=number)[0].astype(jnp.int32)

    def add(i: jax.Array, carry: Any) -> Any:
        summed, of_states = carry
        at = jax.lax.dynamic_slice_in_dim(places, i * length, length)
        # the last chunk is filled up with copies of a position that bears loss, which count nothing
        real = jnp.where(at < number, at, places[0])
        of_positions = weights.at[:, at].get(mode="fill", fill_value=0)
        chunk = [x[real] for x in states], of_positions, jax.tree.map(lambda x: x[real], teacher)
        *found, new = of_chunk(head, chunk)
        of_states = [old.at[at].set(x, mode="drop") for old, x in zip(of_states, new, strict=True)]
        return jax.tree.map(jnp.add, summed, tuple(found)), of_states

    zero = (
        jnp.zeros((), jnp.float32),
        Sums(*[jnp.zeros(len(states), jnp.float32)] * 5),
        jax.tree.map(jnp.zeros_like, head),
    )
    num_chunks = most_of_parts(-(-jnp.sum(bears, dtype=jnp.int32) // length), cut)
    begin = zero, [jnp.zeros_like(x) for x in states]
    (value, sums, of_head), of_states = jax.lax.fori_loop(0, num_chunks, add, begin)
    return value, sums, of_head, [x.reshape(batch, seq, -1) for x in of_states]


def chunk_length(num_positions: int, num_logits: int, backend: str) -> int:
    """Return how many positions a chunk has: those whose logits, so many for each, are in memory at once."""
    budget = LOGITS_AT_ONCE.get(backend, DEFAULT_LOGITS_AT_ONCE)
    return part_length(num_positions, max(1, budget // num_logits))


@jax.custom_vjp
def _with_gradient(value: jax.Array, gradient: Tree, argument: Tree) -> jax.Array:
    """`value`, whose gradient with respect to `argument` is known already."""
    del gradient, argument
    return value


def _forward(value: jax.Array, gradient: Any, argument: Any) -> tuple[jax.Array, Any]:
    del argument
    return value, gradient


def _backward(gradient: Any, cotangent: jax.Array) -> tuple[None, None, Any]:
    return None, None, jax.tree.map(lambda x: (x.astype(jnp.float32) * cotangent).astype(x.dtype), gradient)


_with_gradient.defvjp(_forward, _backward)
