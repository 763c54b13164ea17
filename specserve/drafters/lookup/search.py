"""The search behind lookup drafts: it finds the last tokens at an earlier place, and returns what followed there.

The end of a sequence is compared with every place at once, on the device, so a step needs nothing from the host.
"""

import jax
import jax.numpy as jnp

from specserve.kernels.gather import take_each
from specserve.kernels.match import longest_match
from specserve.pytree import pytree

MAX_MATCH = 8  # tokens compared: a longer match says no more
MATCH_CLASSES = (3, 5)  # match lengths below 3, below 5, and longer have estimates of their gains apart
RECALL_ROWS, RECALL_LENGTH = 32, 512  # finished answers that are remembered, and the tokens of each


@pytree
class Match:
    """The best earlier place of a sequence's end, and the tokens after it."""

    token_ids: jax.Array  # [batch, depth] int32, what followed there
    length: jax.Array  # [batch] int32, tokens that agree, at most MAX_MATCH; 0: none


def find(
    history: jax.Array,  # [batch, length] int32, the sequences' tokens
    last: jax.Array,  # [batch] int32, index of the last valid one
    depth: int,
    recall: jax.Array | None = None,  # [rows, RECALL_LENGTH] int32, finished answers; -1 where there is nothing
) -> Match:
    """Find the longest match, and of equal ones the most recent. A sequence's own text comes before that of others."""
    back = last[:, None] - jnp.arange(MAX_MATCH)
    suffix = jnp.where(back >= 0, take_each(history, jnp.clip(back, 0)), -2)  # newest first
    length, end = longest_match(history[:, None], suffix, last[:, None])
    # past its own end a match goes on with its beginning: the text repeats with this period
    period = jnp.maximum(last - end, 1)[:, None]
    follow = jnp.arange(depth)
    token_ids = jnp.take_along_axis(history, end[:, None] + 1 + follow % period, axis=1, mode="clip")
    if recall is not None:
        ends = jnp.full((1, recall.shape[0]), recall.shape[1] - depth)
        other, end = longest_match(recall[None], suffix, ends)
        is_better = other > length
        others = jnp.clip(recall.reshape(-1).at[end[:, None] + 1 + follow].get(mode="clip"), 0)
        token_ids = jnp.where(is_better[:, None], others, token_ids)
        length = jnp.maximum(length, other)
    return Match(token_ids, length)


def match_class(length: jax.Array) -> jax.Array:  # [batch] int32 -> [batch] int32, 0 to len(MATCH_CLASSES)
    """Return the class of a match by its length."""
    return jnp.sum(length[:, None] >= jnp.asarray(MATCH_CLASSES), axis=1, dtype=jnp.int32)
