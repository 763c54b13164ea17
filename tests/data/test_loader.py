"""Laws of loading: a resumed stream is the same stream, shards add up to it, and weights are counted exactly."""

from collections import Counter
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.data.documents import Document
from specserve.data.loader import Loader
from specserve.data.packing import PackedRows, pack, stack
from specserve.errors import ConfigError, DataError

SEQ_LEN = 4


def make_rows(sizes: list[int], weights: list[float] | None = None) -> PackedRows:
    """Sources of so many rows; the first token of a row is its number."""
    parts, begin = [], 1
    for size in sizes:
        ids = [np.arange(row, row + SEQ_LEN, dtype=np.int32) for row in range(begin, begin + size)]
        parts.append(pack([Document(row, np.ones(SEQ_LEN, bool)) for row in ids], SEQ_LEN))
        begin += size
    return stack(parts, weights or [1.0] * len(sizes))


def firsts(loader: Loader, num_batches: int) -> list[int]:
    return [int(i) for _ in range(num_batches) for i in loader.next_batch().token_ids[:, 0]]


WEIGHTS = st.sampled_from([0.1, 0.3, 0.5, 1.0, 1.5, 2.0])
MIXTURES = st.lists(st.tuples(st.integers(1, 9), WEIGHTS), min_size=1, max_size=3)


@settings(max_examples=60)
@given(MIXTURES, st.integers(1, 7), st.integers(0, 3), st.integers(0, 12), st.integers(1, 3))
def test_a_restored_loader_yields_the_same_batches(mixture, batch_size, seed, num_before, count):
    rows = make_rows(*map(list, zip(*mixture, strict=True)))
    loader = Loader(rows, batch_size * count, seed)
    firsts(loader, num_before)
    resumed = [Loader(rows, batch_size * count, seed, (index, count)) for index in range(count)]
    for shard in resumed:
        shard.restore(loader.state())
    for _ in range(5):
        whole = astuple(loader.next_batch())
        shares = zip(*(astuple(shard.next_batch()) for shard in resumed), strict=True)
        for one, parts in zip(whole, shares, strict=True):
            assert np.array_equal(one, np.concatenate(parts))
    assert [shard.state() for shard in resumed] == [loader.state()] * count


@settings(max_examples=60)
@given(MIXTURES, st.integers(0, 3))
def test_weights_are_counted_exactly(mixture, seed):
    sizes, weights = map(list, zip(*mixture, strict=True))
    rows = make_rows(sizes, weights)
    num_rows = round(10 * sum(size * weight for size, weight in mixture))  # of 10 epochs, a whole number for each row
    counted = Counter(firsts(Loader(rows, 1, seed), num_rows))
    stops = np.cumsum(sizes)
    expected = {
        row: round(10 * weight)
        for stop, (size, weight) in zip(stops, mixture, strict=True)
        for row in range(stop - size + 1, stop + 1)
    }
    assert counted == expected


def test_half_a_source_is_another_half_in_the_next_epoch():
    loader = Loader(make_rows([10], [0.5]), 5, seed=0)
    first, second = set(firsts(loader, 1)), set(firsts(loader, 1))
    assert len(first) == len(second) == 5
    assert not first & second


def test_every_epoch_has_every_row_once_in_a_new_order():
    loader = Loader(make_rows([6, 4]), 4, seed=1)
    seen = np.reshape(firsts(loader, 5), (2, 10))
    assert np.array_equal(np.sort(seen, axis=1), [np.arange(1, 11)] * 2)
    assert not np.array_equal(seen[0], seen[1])


def test_a_loader_refuses_the_state_of_other_data_and_uneven_shards():
    loader = Loader(make_rows([4]), 2, seed=0)
    others = [make_rows([5]), make_rows([4], [2.0]), make_rows([2, 2])]
    for other in (*(Loader(rows, 2, seed=0) for rows in others), Loader(make_rows([4]), 2, seed=1)):
        with pytest.raises(DataError, match="cannot resume"):
            loader.restore(other.state())
    with pytest.raises(DataError, match=r"no rows.*--source"):
        Loader(pack([], SEQ_LEN), 2, seed=0)
    with pytest.raises(ConfigError, match="batch_size is 4, which 3 processes"):
        Loader(make_rows([4]), 4, seed=0, shard=(0, 3))
