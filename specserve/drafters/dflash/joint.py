"""Small heads that make the slots of a block depend on each other, when it is served as on its way to a tree.

A block foresees each of its tokens without knowing the ones before it. DSpark (arXiv 2607.05147) adds to a slot's
logits a bias that the token before it gives, of low rank. DFlash2 ranks the best few tokens of a slot again, by a
product of what the token before, the slot's state and the candidate give. Both are cheap enough to be asked for every
node of a tree: a node's candidates are then its own, and those of another path differ.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specserve.drafters.dflash.config import DFlashConfig
from specserve.drafters.grow import best_tokens, every_width
from specserve.kernels.matmul import Weight, matmul_float32
from specserve.models.layers import linear
from specserve.models.params import embedding_table, matrix, optional, vector
from specserve.pytree import pytree
from specserve.speculative.sampling import SamplerRows
from specserve.speculative.tree import DynamicTree
from specserve.speculative.vocab import DraftVocab

SMALLEST = 1e-9  # of a mass that is divided by


@pytree
class Confidence:
    """The confidence head: the probability that a slot's token is accepted, from the slot's normed state and a vector
    of the token before."""

    weight: Weight  # [d_model or d_model + rank, 1]
    bias: jax.Array | None  # [1]


@pytree
class Markov:
    previous: jax.Array  # [vocab, rank], of the token before
    bias: Weight  # [rank, draft_vocab]
    confidence: Confidence | None


@pytree
class Selector:
    predecessor: jax.Array  # [vocab, rank]
    successor: jax.Array  # [vocab, rank]
    hidden: Weight  # [d_model, rank]


def markov_spec(config: DFlashConfig) -> Markov:
    """The parameters of DSpark's heads as `ParamSpec`s."""
    rank, width = config.markov_rank, config.backbone.d_model
    inputs = width
    if config.confidence == "state and token":
        inputs += rank
    confidence = Confidence(
        weight=matrix("confidence_head.proj.weight", inputs, 1, (None, None)),
        bias=optional(config.has_confidence_bias, vector("confidence_head.proj.bias", 1, init="zeros")),
    )
    return Markov(
        previous=embedding_table("markov_head.markov_w1.weight", config.backbone.vocab_size, rank),
        bias=matrix("markov_head.markov_w2.weight", rank, config.draft_vocab_size, (None, "vocab")),
        confidence=optional(config.confidence, confidence),
    )


def selector_spec(config: DFlashConfig) -> Selector:
    """The parameters of DFlash2's selector as `ParamSpec`s."""
    rank, size = config.selector_rank, config.backbone.vocab_size
    return Selector(
        predecessor=embedding_table("candidate_selector.predecessor_codebook", size, rank),
        successor=embedding_table("candidate_selector.successor_codebook", size, rank),
        hidden=matrix("candidate_selector.hidden_projection.weight", config.backbone.d_model, rank, ("embed", None)),
    )


def of_previous(markov: Markov | None, selector: Selector | None) -> jax.Array | None:  # [vocab, rank]
    """Return the vector that each token gives to the slot after it, or None without joint heads."""
    if markov:
        return markov.previous
    return selector.predecessor if selector else None


def biased(markov: Markov, logits: jax.Array, previous: jax.Array) -> jax.Array:
    """The logits [batch, 1 or k, draft_vocab] float32 of a slot after each of k tokens [batch, k]."""
    return logits + matmul_float32(markov.previous[previous], markov.bias)


def confidences(
    confidence: Confidence,
    config: DFlashConfig,
    states: jax.Array,  # [..., d_model], normed
    given: jax.Array,  # [..., rank], what the tokens before give
) -> jax.Array:  # [...] float32
    """Compute the logits of the probabilities that slots are accepted after these tokens."""
    inputs = states
    if config.confidence == "state and token":
        inputs = jnp.concatenate([states, given.astype(states.dtype)], axis=-1)
    return linear(inputs, confidence.weight, confidence.bias)[..., 0].astype(jnp.float32)


def selected(
    selector: Selector,
    config: DFlashConfig,
    logits: jax.Array,  # [batch, 1, vocab] float32
    states: jax.Array,  # [batch, 1, d_model], normed
    previous: jax.Array,  # [batch, k] int32
    at_least: int,
) -> tuple[jax.Array, jax.Array]:  # [batch, k, candidate] float32, [batch, candidate] int32
    """The scores of a slot's best tokens after each of k tokens, and these tokens. They are `at_least` so many; those
    that the selector does not choose among score -inf."""
    unary, candidates = jax.lax.top_k(logits[:, 0], max(config.selector_top_k, at_least))
    context = selector.predecessor[previous] * linear(states, selector.hidden)  # [batch, k, rank]
    successors = selector.successor[candidates]
    scores = jnp.einsum("bkr,bcr->bkc", context, successors, preferred_element_type=jnp.float32)
    is_choice = jnp.arange(candidates.shape[-1]) < config.selector_top_k
    return jnp.where(is_choice, unary[:, None] + scores, -jnp.inf), candidates


class JointSlots:
    """See `grow.Expander`. A level is its tokens [batch, k], which the candidates of the next slot depend on.

    Where there is a confidence head, the score of a candidate is its probability times the slot's of being accepted
    after the node above. So a tree of the best N paths goes deep in a row whose slots are sure, and wide early in a row
    whose slots are not: each row has its own depth and width within the compiled shape.
    """

    def __init__(
        self,
        heads: Markov | Selector,
        config: DFlashConfig,
        rows: SamplerRows,
        vocab: DraftVocab,
        seq_lens: jax.Array,  # [batch] int32, of the root
        logits: jax.Array,  # [batch, slot, draft_vocab] float32
        states: jax.Array,  # [batch, slot, d_model], normed
    ) -> None:
        self.heads, self.config, self.rows, self.vocab = heads, config, rows, vocab
        self.seq_lens, self.logits, self.states = seq_lens, logits, states
        self._sure: list[jax.Array] = []  # depth x [batch] float32, log-probabilities

    @property
    def confidence(self) -> jax.Array | None:  # [batch, depth] float32
        """The confidence of the depths whose candidates were asked for, as `tree.Proposal` has it. A level's first
        node is its best."""
        if not self._sure:
            return None
        return jnp.exp(jnp.stack(self._sure, axis=1))

    def candidates(self, level: jax.Array, depth: int, top_k: int) -> tuple[jax.Array, jax.Array]:
        heads, at = self.heads, slice(depth - 1, depth)
        logits, states = self.logits[:, at], self.states[:, at]
        target_ids = self.vocab.target_ids
        if isinstance(heads, Selector):
            scores, index = selected(heads, self.config, logits, states, level, top_k)
            target_ids = target_ids[index]
        else:
            scores = biased(heads, logits, level)
        best, token_ids = best_tokens(self.rows, target_ids, scores, self.seq_lens + depth, top_k)
        if isinstance(heads, Markov) and heads.confidence is not None:
            given = heads.previous[level]
            each = jnp.broadcast_to(states, (*level.shape, states.shape[-1]))
            sure = jax.nn.log_sigmoid(confidences(heads.confidence, self.config, each, given))
            self._sure.append(sure[:, 0])
            best += sure[..., None]
        return best, token_ids

    def descend(self, level: jax.Array, parents: jax.Array, token_ids: jax.Array, depth: int) -> jax.Array:
        return token_ids

    def width(self, tree: DynamicTree, depth: int) -> int:
        return every_width(tree, depth)


@pytree
class JointOutput:
    """The part of joint heads that acts on states. The last `rank` channels of a state are the vector of the token
    before."""

    bias: Weight | None = None  # [rank, draft_vocab]
    confidence: Confidence | None = None
    successor: jax.Array | None = None  # [vocab, rank]
    hidden: Weight | None = None  # [d_model, rank]

    @classmethod
    def of(cls, markov: Markov | None, selector: Selector | None) -> "JointOutput":
        parts: dict[str, Any] = {}
        if markov:
            parts |= {"bias": markov.bias, "confidence": markov.confidence}
        if selector:
            parts |= {"successor": selector.successor, "hidden": selector.hidden}
        return cls(**parts)


def joint_loss(
    joint: JointOutput,
    config: DFlashConfig,
    states: jax.Array,  # [..., d_model], normed
    given: jax.Array,  # [..., rank]
    logits: jax.Array,  # [..., draft_vocab] float32
    p: jax.Array,  # the target's distribution, which broadcasts to the logits
) -> jax.Array:  # [...] float32, nats
    """Compute the loss by which joint heads learn beside the distribution of states. The confidence learns how
    often a token drawn from the slot is accepted (DSpark, arXiv 2607.05147: binary cross-entropy against 1 -
    TV). The selector learns the target's distribution over the slot's own candidates: cross-entropy over K
    tokens, with the target's probabilities made to sum to one. Where the target gives the candidates no
    probability, there is nothing to learn."""
    if joint.confidence is not None:
        accepted = jax.lax.stop_gradient(jnp.sum(jnp.minimum(p, jax.nn.softmax(logits, axis=-1)), axis=-1))
        sure = confidences(joint.confidence, config, states, given)
        return -(accepted * jax.nn.log_sigmoid(sure) + (1.0 - accepted) * jax.nn.log_sigmoid(-sure))
    if joint.successor is None or joint.hidden is None:
        return jnp.zeros(logits.shape[:-1], jnp.float32)
    unary, candidates = jax.lax.top_k(logits, config.selector_top_k)
    context = given * linear(states, joint.hidden)
    scores = unary + jnp.einsum(
        "...r,...cr->...c", context, joint.successor[candidates], preferred_element_type=jnp.float32
    )
    chosen = jnp.take_along_axis(jnp.broadcast_to(p, logits.shape), candidates, axis=-1)
    mass = jnp.sum(chosen, axis=-1, keepdims=True)
    chosen = jax.lax.stop_gradient(chosen / jnp.maximum(mass, SMALLEST))
    return jax.nn.logsumexp(scores, axis=-1) * jnp.sum(chosen, axis=-1) - jnp.sum(chosen * scores, axis=-1)
