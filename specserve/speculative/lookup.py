"""Drafts without a head: what followed the last tokens where they stood before, in this sequence or in recent answers.

Prompt lookup (Saxena 2023; `ngram`) searches the sequence itself, suffix matching (after SuffixDecoding, Oliaro et al.
2024, arXiv 2411.04975; `suffix`) the answers of finished sequences as well. Both search on the device, so a step needs
nothing from the host.
"""

import jax
import jax.numpy as jnp

from specserve.pytree import pytree

MAX_MATCH = 8  # tokens compared: a longer match says no more
MATCH_CLASSES = (3, 5)  # match lengths below 3, below 5, and longer are told apart when gains are estimated
RECALL_ROWS, RECALL_LENGTH = 32, 512  # finished answers that are remembered, and the tokens of each
GAIN_DECAY = 0.9
PRIOR_GAINS = (0.3, 0.8, 2.0)  # accepted tokens per step of a match of each class, before anything is known
HEAD = 0  # the head's place in `gains`; the match classes follow


@pytree
class Match:
    """The best earlier place of a sequence's end."""

    token_ids: jax.Array  # [batch, depth] int32, what followed there
    length: jax.Array  # [batch] int32, tokens that agree, at most MAX_MATCH; 0: none


def initial_gains(num_slots: int) -> jax.Array:  # [slot, 1 + classes] float32
    """Accepted tokens per step, by source: nothing is known of any slot."""
    return jnp.tile(jnp.asarray([0.0, *PRIOR_GAINS], jnp.float32), (num_slots, 1))


def find(
    history: jax.Array,  # [batch, length] int32, the sequences' tokens
    last: jax.Array,  # [batch] int32, index of the last valid one
    depth: int,
    recall: jax.Array | None = None,  # [rows, RECALL_LENGTH] int32, finished answers; -1 where there is nothing
) -> Match:
    """The longest match, the most recent among equals; a sequence's own text before that of others."""
    back = last[:, None] - jnp.arange(MAX_MATCH)
    suffix = jnp.where(back >= 0, jnp.take_along_axis(history, jnp.clip(back, 0), axis=1), -2)  # newest first
    is_earlier = jnp.arange(history.shape[1]) < last[:, None]
    length, end = _longest(history[:, None], suffix, is_earlier[:, None])
    # past its own end a match goes on with its beginning: the text repeats with this period
    period = jnp.maximum(last - end, 1)[:, None]
    follow = jnp.arange(depth)
    token_ids = jnp.take_along_axis(history, end[:, None] + 1 + follow % period, axis=1, mode="clip")
    if recall is not None:
        has_next = jnp.pad(recall[:, 1:] >= 0, ((0, 0), (0, 1)))
        can_end = has_next & (jnp.arange(recall.shape[1]) < recall.shape[1] - depth)
        other, end = _longest(recall[None], suffix, can_end[None])
        is_better = other > length
        others = jnp.clip(recall.reshape(-1).at[end[:, None] + 1 + follow].get(mode="clip"), 0)
        token_ids = jnp.where(is_better[:, None], others, token_ids)
        length = jnp.maximum(length, other)
    return Match(token_ids, length)


def _longest(
    text: jax.Array,  # [batch or 1, row, length], of which every row is searched
    suffix: jax.Array,  # [batch, MAX_MATCH], newest first
    can_end: jax.Array,  # [batch or 1, row, length] bool, where a match may end
) -> tuple[jax.Array, jax.Array]:  # length of the best match and the index it ends at, of all rows in turn, [batch]
    suffix = suffix[:, None]
    agree = can_end & (text == suffix[..., :1])
    lengths = agree.astype(jnp.int32)
    for i in range(1, MAX_MATCH):
        shifted = jnp.pad(text, ((0, 0), (0, 0), (i, 0)), constant_values=-1)[..., : text.shape[2]]
        agree &= shifted == suffix[..., i : i + 1]
        lengths += agree.astype(jnp.int32)
    lengths = lengths.reshape(lengths.shape[0], -1)
    best = jnp.max(lengths, axis=1)
    index = jnp.arange(lengths.shape[1])
    return best, jnp.max(jnp.where(lengths == best[:, None], index, 0), axis=1)


def match_class(length: jax.Array) -> jax.Array:  # [batch] -> [batch], index into gains
    """Where the gain of a match of this length stands."""
    return 1 + jnp.sum(length[:, None] >= jnp.asarray(MATCH_CLASSES), axis=1, dtype=jnp.int32)


def prefers_match(gains: jax.Array, match: Match) -> jax.Array:  # [batch, 1 + classes] -> [batch] bool
    """Whether the match promises more accepted tokens than the head."""
    expected = jnp.take_along_axis(gains, match_class(match.length)[:, None], axis=1)[:, 0]
    return (match.length > 0) & (expected > gains[:, HEAD])


def update_gains(gains: jax.Array, source: jax.Array, n_accepted: jax.Array) -> jax.Array:
    """Exponential averages, of the source that proposed in this step only."""
    is_source = jnp.arange(gains.shape[1]) == source[:, None]
    moved = GAIN_DECAY * gains + (1 - GAIN_DECAY) * n_accepted[:, None].astype(jnp.float32)
    return jnp.where(is_source, moved, gains)
