"""Which tokens a draft can say."""

import numpy as np
import pytest

from specserve.errors import DataError
from specserve.speculative.vocab import choose_draft_vocab, coverage


def test_pinned_tokens_come_first_then_the_frequent_ones() -> None:
    counts = np.array([5, 0, 9, 9, 1, 7, 0, 2])
    chosen = choose_draft_vocab(counts, frozenset({1, 6}), 5)
    assert chosen.tolist() == [1, 2, 3, 5, 6]
    assert chosen.dtype == np.int32
    assert coverage(counts, chosen) == 25 / 33
    assert choose_draft_vocab(counts, frozenset(), 100).tolist() == list(range(8))
    with pytest.raises(DataError, match="vocab_size"):
        choose_draft_vocab(counts, frozenset({1, 2, 3}), 2)
