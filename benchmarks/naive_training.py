"""Training as it is first written, to measure against: the formulation of SpecJAX's and SpecForge's trainers in this
package's models.

Every conversation is a row of its own, padded to the power of two above the longest of its batch; attention scores,
the target's probabilities and every rollout step's logits exist in full, and KV heads are repeated; only the gradient
is compiled, the optimiser runs operation by operation; every step waits for its metrics.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specserve.data.documents import Document
from specserve.drafters.eagle3.drafter import Eagle3
from specserve.drafters.eagle3.model import (
    Eagle3Params,
    draft_forward,
    draft_inputs,
    fuse_features,
    token_embedding,
)
from specserve.drafters.learning import Rows, loss_positions, shift
from specserve.kernels.block import NEG_INF
from specserve.kernels.rows import Documents
from specserve.models import target as target_model
from specserve.models.mixers.attention import KV
from specserve.models.target import TargetParams
from specserve.speculative.vocab import DraftVocab
from specserve.train.chunked_loss import RolloutMetrics
from specserve.train.losses import acceptance, make_loss
from specserve.train.step import LossConfig

MIN_BUCKET = 64  # of tokens in a row


def padded_batches(documents: Sequence[Document], batch_size: int, max_len: int, seed: int) -> Iterator[Rows]:
    """Yield shuffled batches without end, one document to a row, cut to `max_len`."""
    rng = np.random.default_rng(seed)
    order: list[int] = []
    while True:
        while len(order) < batch_size:
            order += rng.permutation(len(documents)).tolist()
        chosen, order = [documents[i] for i in order[:batch_size]], order[batch_size:]
        yield _padded(chosen, max_len)


def batches_of_every_length(documents: Sequence[Document], batch_size: int, max_len: int) -> list[Rows]:
    """Make one batch for each length that `padded_batches` can come to."""
    by_length = {_length(document, max_len): document for document in documents}
    return [_padded([document] * batch_size, max_len) for document in by_length.values()]


def _length(longest: Document, max_len: int) -> int:
    return min(max_len, max(MIN_BUCKET, 1 << (len(longest) - 1).bit_length()))


def _padded(documents: Sequence[Document], max_len: int) -> Rows:
    seq = _length(max(documents, key=len), max_len)
    token_ids, loss_mask = np.zeros((len(documents), seq), np.int32), np.zeros((len(documents), seq), bool)
    document_ids = np.zeros((len(documents), seq), np.int32)
    for row, document in enumerate(documents):
        length = min(len(document), seq)
        token_ids[row, :length], loss_mask[row, :length] = document.token_ids[:length], document.loss_mask[:length]
        document_ids[row, :length] = 1
    positions = np.broadcast_to(np.arange(seq, dtype=np.int32), token_ids.shape)
    arrays: Any = jax.device_put((token_ids, loss_mask, document_ids, positions))
    return Rows(*arrays)


def naive_loss(
    params: Eagle3Params, config: LossConfig, target: TargetParams, vocab: DraftVocab, rows: Rows
) -> tuple[jax.Array, RolloutMetrics]:
    """Compute what `train.step.rollout_loss` of a whole batch gives, with everything in full."""
    draft = config.drafter
    mask = Documents(rows.document_ids).dense()
    taught = target_model.forward(
        target, config.target, rows.token_ids, rows.position_ids, mask, aux_layers=draft.aux_layers
    )
    logits = target_model.logits(target, config.target, taught.hidden_states)
    p, best = jax.nn.softmax(logits, axis=-1)[..., vocab.target_ids], jnp.argmax(logits, axis=-1)
    assert taught.aux_hidden_states is not None
    p, best, aux = jax.lax.stop_gradient((p, best, taught.aux_hidden_states))
    each_loss, total, metrics = make_loss(config.loss, config.kl_decay), jnp.zeros(()), []
    for k, state in enumerate(_states(params, config, target, rows, aux.astype(draft.dtype), mask)):
        own = draft.logits(draft.output(params), target, state)
        weights, said, said_p = loss_positions(rows, k), shift(best, 1 + k), shift(p, 1 + k)
        is_known = jnp.where(jnp.isin(said, vocab.target_ids), weights, 0.0)
        foreseen = vocab.target_ids[jnp.argmax(own, axis=-1)]
        loss, n_positions = jnp.sum(each_loss(said_p, own) * is_known), jnp.maximum(jnp.sum(weights), 1.0)
        total += config.rollout_decay**k * loss / n_positions
        hits = jnp.sum(jnp.where(foreseen == said, weights, 0.0))
        accepted = jnp.sum(acceptance(said_p, own) * weights)
        metrics.append((loss / jnp.maximum(jnp.sum(is_known), 1.0), hits / n_positions, accepted / n_positions))
    return total, RolloutMetrics(*map(jnp.stack, zip(*metrics, strict=True)))


def _states(
    params: Eagle3Params, config: LossConfig, target: TargetParams, rows: Rows, aux: jax.Array, mask: jax.Array
) -> list[jax.Array]:
    assert isinstance(config.drafter, Eagle3)
    draft, embedding = config.drafter.config, token_embedding(params, target.embedding)
    hidden = fuse_features(params, draft, aux)
    states: list[jax.Array] = []
    kv: list[tuple[KV, ...]] = []
    for step in range(config.rollout.length):
        token_ids, position_ids = shift(rows.token_ids, 1 + step), rows.position_ids + 1 + step
        inputs = draft_inputs(params, draft, embedding, token_ids, hidden, position_ids)

        def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array, kv: Any = tuple(kv)) -> jax.Array:
            return _attend_all(q, [*(entries[layer] for entries in kv), (k, v)], mask)

        hidden, entries = draft_forward(params, draft, inputs, attend)
        kv.append(entries)
        states.append(hidden)
    return states


def _attend_all(q: jax.Array, kv: Sequence[KV], mask: jax.Array) -> jax.Array:
    """Attend with one softmax over the scores of step 0 and each later step's own."""
    group = q.shape[2] // kv[0][0].shape[2]
    (k, v), *later = [(jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)) for k, v in kv]
    q = q * q.shape[3] ** -0.5
    scores = jnp.where(mask[:, None], jnp.einsum("bnhd,bmhd->bhnm", q, k), NEG_INF)
    own = [jnp.einsum("bnhd,bnhd->bhn", q, step_k)[..., None] for step_k, _ in later]
    probs = jax.nn.softmax(jnp.concatenate([scores, *own], axis=-1), axis=-1)
    seq = k.shape[1]
    out = jnp.einsum("bhnm,bmhd->bnhd", probs[..., :seq], v)
    for i, (_, step_v) in enumerate(later):
        out += jnp.einsum("bhn,bnhd->bnhd", probs[..., seq + i], step_v)
    return out


def naive_gradient(config: LossConfig) -> Any:
    """The jitted gradient of `naive_loss` by the parameters, called with (params, target, vocab, rows)."""

    def gradient(params: Eagle3Params, target: TargetParams, vocab: DraftVocab, rows: Rows) -> Any:
        return jax.value_and_grad(naive_loss, has_aux=True)(params, config, target, vocab, rows)

    return jax.jit(gradient)


class NaiveTrainer:
    """A head that is trained in the naive way, step by step."""

    def __init__(
        self,
        config: LossConfig,
        optimizer: optax.GradientTransformation,
        params: Eagle3Params,
        target: TargetParams,
        vocab: DraftVocab,
    ) -> None:
        self.gradient = naive_gradient(config)
        self._optimizer, self._target, self._vocab = optimizer, target, vocab
        tree: Any = params
        self.params, self._state = tree, optimizer.init(tree)

    def step(self, rows: Rows) -> float:
        """Take one step, and return its loss."""
        (loss, metrics), gradient = self.gradient(self.params, self._target, self._vocab, rows)
        updates, self._state = self._optimizer.update(gradient, self._state, self.params)
        self.params = optax.apply_updates(self.params, updates)
        for values in (metrics.loss, metrics.accuracy):
            [float(value) for value in values]
        return float(loss)
