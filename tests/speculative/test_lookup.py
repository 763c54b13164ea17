"""Drafts without a head, against a search written as loops."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import UNIT

from specserve.drafters.lookup import drafter as lookup
from specserve.drafters.lookup.drafter import GAIN_DECAY
from specserve.drafters.lookup.search import MAX_MATCH, Match, find, match_class
from specserve.speculative.drafter import HEAD

LENGTH, DEPTH, ROWS, ROW_LENGTH = 24, 3, 3, 14

_find = jax.jit(find, static_argnums=2)


def _agreeing(text: list[int], end: int, suffix: list[int]) -> int:
    """How many tokens up to `end` are the last ones of `suffix`."""
    count = 0
    while count < min(MAX_MATCH, end + 1, len(suffix)) and text[end - count] == suffix[-1 - count]:
        count += 1
    return count


def _search(text: list[int], recall: list[list[int]]) -> tuple[list[int], int]:
    """What follows the best match, and its length: the longest, the last among equals, one's own before others'."""
    own = [(_agreeing(text, end, text), end) for end in range(len(text) - 1)]
    others = [
        (_agreeing(answer, end, text), row, end)
        for row, answer in enumerate(recall)
        for end in range(min(len(answer) - 1, ROW_LENGTH - DEPTH))
    ]
    length, end = max(own, default=(0, 0))
    other, row, other_end = max(others, default=(0, 0, 0))
    if other > length:
        return [*recall[row][other_end + 1 :], *[0] * DEPTH][:DEPTH], other
    return (text[end + 1 :] * DEPTH)[:DEPTH], length  # the text since the match goes round


def _texts(low: int, high: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 2), min_size=low, max_size=high)  # three tokens: many matches, some of them long


@settings(max_examples=150)
@given(
    texts=st.tuples(_texts(1, LENGTH), _texts(1, LENGTH)),
    recall=st.lists(_texts(0, ROW_LENGTH), min_size=ROWS, max_size=ROWS),
    garbage=st.integers(0, 2),
    has_recall=st.booleans(),
)
def test_a_match_is_the_longest_and_then_the_most_recent(
    texts: tuple[list[int], ...], recall: list[list[int]], garbage: int, has_recall: bool
) -> None:
    history = np.full((2, LENGTH), garbage, np.int32)  # what is left of the slot's last sequence is never found
    for row, text in enumerate(texts):
        history[row, : len(text)] = text
    remembered = np.full((ROWS, ROW_LENGTH), -1, np.int32)
    for row, answer in enumerate(recall):
        remembered[row, : len(answer)] = answer
    last = jnp.asarray([len(text) - 1 for text in texts], jnp.int32)
    found = _find(jnp.asarray(history), last, DEPTH, jnp.asarray(remembered) if has_recall else None)
    for row, text in enumerate(texts):
        token_ids, length = _search(text, recall if has_recall else [])
        assert found.length[row] == length
        if length:
            assert found.token_ids[row].tolist() == token_ids


def test_who_proposes_follows_what_was_accepted() -> None:
    """The head until a class of matches has brought more; only the source of a step learns from it."""
    gains = jnp.tile(lookup._first_gains(jnp.float32(1)), (4, 1))
    lengths = jnp.asarray([0, 2, 4, 8], jnp.int32)
    match = Match(jnp.zeros((4, DEPTH), jnp.int32), lengths)
    assert match_class(jnp.asarray([1, 2, 3, 4, 5, 8], jnp.int32)).tolist() == [0, 0, 1, 1, 2, 2]
    assert lookup.prefers_match(gains, match).tolist() == [False, False, False, True]
    source = jnp.asarray([HEAD, 1, 2, 3], jnp.int32)
    moved = lookup.update_gains(gains, source, jnp.asarray([0, 3, 3, 0], jnp.int32))
    expected = np.array(gains)
    for row, (column, seen) in enumerate(zip(source.tolist(), [0, 3, 3, 0], strict=True)):
        expected[row, column] = GAIN_DECAY * expected[row, column] + (1 - GAIN_DECAY) * seen
    np.testing.assert_allclose(moved, expected, rtol=4 * UNIT)  # two products and a sum of positive numbers
    for _ in range(9):
        moved = lookup.update_gains(moved, source, jnp.asarray([0, 3, 3, 0], jnp.int32))
    assert lookup.prefers_match(moved, match).tolist() == [False, True, True, False]
    assert not lookup.prefers_match(moved, Match(match.token_ids, jnp.zeros_like(lengths))).any()
