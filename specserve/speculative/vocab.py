"""The draft vocabulary, as a subset of the target's.

Ids inside the package are absolute; the checkpoints of heads store offsets.
"""

import jax
import numpy as np

from specserve.errors import DataError
from specserve.pytree import pytree


@pytree
class DraftVocab:
    """The tokens of a draft in terms of the target's. Those that it can propose are sorted and unique, unless it has
    ids of its own."""

    target_ids: jax.Array  # [draft_vocab] int32; below 0: it can read the token, and does not propose it
    draft_ids: jax.Array | None = None  # [vocab] int32, what it reads for each of the target's tokens; None: the same


def choose_draft_vocab(
    counts: np.ndarray,  # [vocab] int64, how often each token bears loss in the training data
    pinned: frozenset[int],
    size: int,
) -> np.ndarray:  # [size] int32, sorted
    """Choose the pinned ids (special and template tokens, every EOS, single bytes) and then the most frequent ones.
    Ties go to lower ids.

    Raises DataError if the pinned ids alone do not fit.
    """
    vocab_size = len(counts)
    if len(pinned) > size:
        raise DataError(
            f"draft vocabulary of {size} cannot hold the {len(pinned)} special and template tokens; raise "
            "draft.vocab_size"
        )
    size = min(size, vocab_size)
    rank = np.argsort(-counts, kind="stable")
    chosen = np.fromiter(sorted(pinned), np.int64, len(pinned))
    rest = rank[~np.isin(rank, chosen)][: size - len(chosen)]
    return np.sort(np.concatenate([chosen, rest])).astype(np.int32)


def coverage(counts: np.ndarray, target_ids: np.ndarray) -> float:
    """The share of the counted tokens that the draft vocabulary holds."""
    return float(counts[target_ids].sum() / max(1, counts.sum()))
