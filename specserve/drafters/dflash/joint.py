"""Small heads that make the slots of a block depend on each other, when it is served as on its way to a tree.

A block foresees each of its tokens without knowing the ones before it. DSpark (arXiv 2607.05147) adds to a slot's
logits a bias that the token before it gives, of low rank. DFlash2 ranks the best few tokens of a slot again, by a
product of what the token before, the slot's state and the candidate give. DSpark's bias may also be gated by the slot's
state, or come of a recurrent state that has read all tokens before it; and so does Domino's correction
(github.com/sgl-project/SpecForge), by a GRU over their embeddings. All are cheap enough to be asked for every node of a
tree: a node's candidates are then its own, and those of another path differ.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specserve.drafters.dflash.config import DFlashConfig
from specserve.drafters.grow import best_tokens, every_width
from specserve.kernels.gather import embed, take_each
from specserve.kernels.matmul import Weight, matmul_float32
from specserve.kernels.rowwise import largest
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
class Joined:
    """A product of several inputs side by side."""

    weight: Weight  # [d_in, d_out]
    bias: jax.Array  # [d_out]


@pytree
class Markov:
    previous: jax.Array  # [vocab, rank], of the token before
    bias: Weight  # [rank, draft_vocab]
    confidence: Confidence | None
    # gated: [state, previous] to a gate [rank]; rnn: [memory, previous, state] to gate, candidate and output [3 * rank]
    step: Joined | None = None


@pytree
class Domino:
    """A GRU without biases over the embeddings of the tokens before, and what its memory adds to the logits."""

    of_token: Weight  # [d_model, 3 * gru]: reset, update and candidate
    of_memory: Weight  # [gru, 3 * gru]
    down: Weight  # [d_model + gru, rank]
    up: Weight  # [rank, draft_vocab]


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
    name, inputs, outputs = {
        "vanilla": ("", 0, 0),
        "gated": ("gate_proj", width + rank, rank),
        "rnn": ("joint_proj", width + 2 * rank, 3 * rank),
    }[config.markov_type]
    step = Joined(
        weight=matrix(f"markov_head.{name}.weight", inputs, outputs, (None, None)),
        bias=vector(f"markov_head.{name}.bias", outputs, init="zeros"),
    )
    return Markov(
        previous=embedding_table("markov_head.markov_w1.weight", config.backbone.vocab_size, rank),
        bias=matrix("markov_head.markov_w2.weight", rank, config.draft_vocab_size, (None, "vocab")),
        confidence=optional(config.confidence, confidence),
        step=optional(name, step),
    )


def domino_spec(config: DFlashConfig) -> Domino:
    """The parameters of Domino's head as `ParamSpec`s."""
    width, gru, rank = config.backbone.d_model, config.gru_width, config.correction_rank
    return Domino(
        of_token=matrix("prefix_gru.weight_ih_l0", width, 3 * gru, (None, None)),
        of_memory=matrix("prefix_gru.weight_hh_l0", gru, 3 * gru, (None, None)),
        down=matrix("embed_proj.0.weight", width + gru, rank, (None, None)),
        up=matrix("embed_proj.2.weight", rank, config.draft_vocab_size, (None, "vocab")),
    )


def selector_spec(config: DFlashConfig) -> Selector:
    """The parameters of DFlash2's selector as `ParamSpec`s."""
    rank, size = config.selector_rank, config.backbone.vocab_size
    return Selector(
        predecessor=embedding_table("candidate_selector.predecessor_codebook", size, rank),
        successor=embedding_table("candidate_selector.successor_codebook", size, rank),
        hidden=matrix("candidate_selector.hidden_projection.weight", config.backbone.d_model, rank, ("embed", None)),
    )


def of_previous(heads: "Heads | None", embedding: jax.Array) -> jax.Array | None:  # [vocab, rank or d_model]
    """Return the vector that each token gives to the slot after it, or None without joint heads."""
    if isinstance(heads, Selector):
        return heads.predecessor
    return heads.previous if isinstance(heads, Markov) else embedding if heads else None


def memory_width(config: DFlashConfig) -> int:
    """Return the width of a path's recurrent state; 0: it has none."""
    return config.gru_width or (config.markov_rank if config.markov_type == "rnn" else 0)


def read_token(
    heads: "Markov | Domino",
    memory: jax.Array | None,  # [..., memory], of the tokens before the last; None: no head of this kind has any
    given: jax.Array,  # [..., rank or d_model], of the last token
    state: jax.Array,  # [..., d_model], normed, of the slot after it
) -> tuple[jax.Array | None, jax.Array]:
    """Return the memory of a path with its last token, and the features [..., rank or gru] that the next slot's logits
    are corrected by."""
    if isinstance(heads, Domino):
        assert memory is not None
        of_token, of_memory = linear(given, heads.of_token), linear(memory, heads.of_memory)
        reset, update, new = zip(*(jnp.split(each, 3, axis=-1) for each in (of_token, of_memory)), strict=True)
        keep = jax.nn.sigmoid(sum(update))
        candidate = jnp.tanh(new[0] + jax.nn.sigmoid(sum(reset)) * new[1])
        memory = (1 - keep) * candidate + keep * memory
        return memory, memory
    if heads.step is None:
        return None, given
    parts = [state, given] if memory is None else [memory, given, state]
    stepped = linear(jnp.concatenate(parts, axis=-1), heads.step.weight, heads.step.bias)
    if memory is None:
        return None, jax.nn.sigmoid(stepped) * given
    gate, candidate, output = jnp.split(stepped, 3, axis=-1)
    keep = jax.nn.sigmoid(gate)
    return keep * memory + (1 - keep) * jnp.tanh(candidate), jnp.tanh(output)


def corrected(
    bias: Weight,  # [rank, draft_vocab]
    down: Weight | None,  # of Domino [d_model + gru, rank]
    logits: jax.Array,
    features: jax.Array,
    state: jax.Array,
) -> jax.Array:  # [..., draft_vocab] float32
    """Return the logits of a slot after a path, from its own and from what `read_token` returned."""
    if down is not None:
        features = jax.nn.silu(linear(jnp.concatenate([state, features], axis=-1), down))
    return logits + matmul_float32(features, bias)


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
    unary, candidates = largest(logits[:, 0], max(config.selector_top_k, at_least))
    context = selector.predecessor[previous] * linear(states, selector.hidden)  # [batch, k, rank]
    successors = selector.successor[candidates]
    scores = jnp.einsum("bkr,bcr->bkc", context, successors, preferred_element_type=jnp.float32)
    is_choice = jnp.arange(candidates.shape[-1]) < config.selector_top_k
    return jnp.where(is_choice, unary[:, None] + scores, -jnp.inf), candidates


Heads = Markov | Selector | Domino


class JointSlots:
    """See `grow.Expander`. A level is its tokens [batch, k], which the candidates of the next slot depend on, and the
    memory of their paths [batch, k, memory], of heads that have one.

    Where there is a confidence head, the score of a candidate is its probability times the slot's of being accepted
    after the node above. So a tree of the best N paths goes deep in a row whose slots are sure, and wide early in a row
    whose slots are not: each row has its own depth and width within the compiled shape.
    """

    def __init__(
        self,
        heads: Heads,
        config: DFlashConfig,
        rows: SamplerRows,
        vocab: DraftVocab,
        seq_lens: jax.Array,  # [batch] int32, of the root
        logits: jax.Array,  # [batch, slot, draft_vocab] float32
        states: jax.Array,  # [batch, slot, d_model], normed
        embedding: jax.Array,  # [vocab, d_model]
    ) -> None:
        self.heads, self.config, self.rows, self.vocab = heads, config, rows, vocab
        self.seq_lens, self.logits, self.states = seq_lens, logits, states
        self.table = of_previous(heads, embedding)
        self._sure: list[jax.Array] = []  # depth x [batch] float32, log-probabilities
        self._memory: jax.Array | None = None  # of the level whose candidates were asked for last, and its own tokens

    @property
    def confidence(self) -> jax.Array | None:  # [batch, depth] float32
        """The confidence of the depths whose candidates were asked for, as `tree.Proposal` has it. A level's first
        node is its best."""
        if not self._sure:
            return None
        return jnp.exp(jnp.stack(self._sure, axis=1))

    def root(self, root_ids: jax.Array) -> Any:
        """Return the level of the roots [batch]."""
        width = memory_width(self.config)
        nothing = jnp.zeros((*root_ids.shape, 1, width), self.states.dtype) if width else None
        return root_ids[:, None], nothing

    def candidates(self, level: Any, depth: int, top_k: int) -> tuple[jax.Array, jax.Array]:
        heads, at, (tokens, memory) = self.heads, slice(depth - 1, depth), level
        logits, states = self.logits[:, at], self.states[:, at]
        target_ids = self.vocab.target_ids
        if isinstance(heads, Selector):
            scores, index = selected(heads, self.config, logits, states, tokens, top_k)
            return best_tokens(self.rows, target_ids[index], scores, self.seq_lens + depth, top_k)
        assert self.table is not None
        given = embed(self.table, tokens, states.dtype)
        each = jnp.broadcast_to(states, (*tokens.shape, states.shape[-1]))
        self._memory, features = read_token(heads, memory, given, each)
        if isinstance(heads, Domino):
            scores = jnp.broadcast_to(logits, (*tokens.shape, logits.shape[-1]))
            if depth > self.config.num_uncorrected:
                scores = corrected(heads.up, heads.down, logits, features, each)
        else:
            scores = corrected(heads.bias, None, logits, features, each)
        best, token_ids = best_tokens(self.rows, target_ids, scores, self.seq_lens + depth, top_k)
        if isinstance(heads, Markov) and heads.confidence is not None:
            sure = jax.nn.log_sigmoid(confidences(heads.confidence, self.config, each, given))
            self._sure.append(sure[:, 0])
            best += sure[..., None]
        return best, token_ids

    def descend(self, level: Any, parents: jax.Array, token_ids: jax.Array, depth: int) -> Any:
        return token_ids, None if self._memory is None else take_each(self._memory, parents)

    def width(self, tree: DynamicTree, depth: int) -> int:
        return every_width(tree, depth)


@pytree
class JointOutput:
    """The part of joint heads that acts on states, which `with_features` made."""

    bias: Weight | None = None  # [rank, draft_vocab]
    down: Weight | None = None  # [d_model + gru, rank]
    confidence: Confidence | None = None
    successor: jax.Array | None = None  # [vocab, rank]
    hidden: Weight | None = None  # [d_model, rank]

    @classmethod
    def of(cls, heads: "Heads | None") -> "JointOutput":
        if isinstance(heads, Selector):
            return cls(successor=heads.successor, hidden=heads.hidden)
        if isinstance(heads, Domino):
            return cls(bias=heads.up, down=heads.down)
        return cls(bias=heads.bias, confidence=heads.confidence) if heads else cls()


def with_features(
    heads: Heads,
    config: DFlashConfig,
    states: list[jax.Array],  # slot x [batch, anchor, d_model]
    normed: list[jax.Array],
    given: list[jax.Array],  # slot x [batch, anchor, rank or d_model], of the token before each slot
) -> list[jax.Array]:
    """Return the slots' states, each followed by the vector of the token before, and by the features of the path to it
    (`read_token`) where these are others; of Domino by the features, and by whether they count."""
    if isinstance(heads, Selector):
        return [jnp.concatenate(pair, axis=-1) for pair in zip(states, given, strict=True)]
    width = memory_width(config)
    memory = jnp.zeros((*states[0].shape[:-1], width), states[0].dtype) if width else None
    out = []
    for slot, (state, norm, token) in enumerate(zip(states, normed, given, strict=True)):
        memory, features = read_token(heads, memory, token, norm)
        if isinstance(heads, Domino):
            more = [features, jnp.full_like(features[..., :1], slot >= config.num_uncorrected)]
        else:
            more = [token] if heads.step is None else [token, features]
        out.append(jnp.concatenate([state, *more], axis=-1))
    return out


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
