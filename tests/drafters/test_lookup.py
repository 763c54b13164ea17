"""Drafts without a head, against a search written as loops."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import UNIT

from specserve.drafters.lookup import drafter as lookup
from specserve.drafters.lookup.drafter import GAIN_DECAY
from specserve.drafters.lookup.search import MAX_MATCH, RECALL_LENGTH, RECALL_ROWS, Match, find, match_class
from specserve.kernels import native
from specserve.speculative.drafter import HEAD
from specserve.speculative.tree import Proposal, chain, chain_proposal

LENGTH, DEPTH, ROWS, ROW_LENGTH = 24, 3, 3, 14

# as a served step calls it, with the native kernel where there is one, and as XLA alone runs it
_FINDS = {"served": jax.jit(native.serving(find), static_argnums=2), "XLA": jax.jit(find, static_argnums=2)}


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
    by=st.sampled_from(sorted(_FINDS)),
)
def test_a_match_is_the_longest_and_then_the_most_recent(
    texts: tuple[list[int], ...], recall: list[list[int]], garbage: int, has_recall: bool, by: str
) -> None:
    history = np.full((2, LENGTH), garbage, np.int32)  # the rest of the slot's last sequence is never found
    for row, text in enumerate(texts):
        history[row, : len(text)] = text
    remembered = np.full((ROWS, ROW_LENGTH), -1, np.int32)
    for row, answer in enumerate(recall):
        remembered[row, : len(answer)] = answer
    last = jnp.asarray([len(text) - 1 for text in texts], jnp.int32)
    found = _FINDS[by](jnp.asarray(history), last, DEPTH, jnp.asarray(remembered) if has_recall else None)
    for row, text in enumerate(texts):
        token_ids, length = _search(text, recall if has_recall else [])
        assert found.length[row] == length
        if length:
            assert found.token_ids[row].tolist() == token_ids


def test_a_served_search_finds_what_any_other_finds(rng: np.random.Generator) -> None:
    """In long texts, from every place of them, whether there is a match or not."""
    for length in (1, 63, 64, 65, 200):
        texts = jnp.asarray(rng.integers(0, 12, (length, length)), jnp.int32)
        recall = jnp.asarray(rng.integers(-1, 12, (ROWS, length)), jnp.int32)
        last = jnp.arange(length, dtype=jnp.int32)
        for others in (None, recall):
            served, plain = (find(texts, last, DEPTH, others) for find in _FINDS.values())
            assert (served.length == plain.length).all()
            assert (served.token_ids == plain.token_ids).all()


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


@st.composite
def _trees(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Parents and depths of a tree that lists level by level, and the length of a chain that fits into it."""
    parents, depths = [0], [0]
    for _ in range(draw(st.integers(1, 8))):
        parent = draw(st.integers(0, len(parents) - 1).filter(lambda node: depths[node] >= depths[-1] - 1))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents, depths, draw(st.integers(1, len(parents) - 1))


@jax.jit
def _beside(tokens: Any, parents: Any, depths: Any, chain: Any) -> Proposal:
    """The tree with the chain grafted on, after token 100."""
    own = Proposal(tokens, parents, depths, jnp.asarray([HEAD], jnp.int32))
    return lookup.graft(chain_proposal(jnp.asarray([100], jnp.int32), chain, jnp.asarray([2], jnp.int32)), own)


@given(_trees())
def test_a_match_beside_a_tree_is_a_tree_that_holds_both(tree: tuple[list[int], list[int], int]) -> None:
    """The chain whole, then the first nodes of the tree below the same root, as many as there were."""
    parents, depths, length = tree
    num = len(parents)
    tokens = list(range(100, 100 + num))
    found = _beside(*(np.asarray([x], np.int32) for x in (tokens, parents, depths, range(7, 7 + length))))
    got_tokens, got_parents, got_depths = (x[0].tolist() for x in (found.token_ids, found.parents, found.depths))
    assert len(got_tokens) == len(got_parents) == len(got_depths) == num
    assert found.source.tolist() == [2]

    def paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
        found = [(tokens[0],)]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            found.append((*found[parent], token))  # a parent stands before its children
        return found

    expected = [(100, *range(7, 7 + depth)) for depth in range(length + 1)]
    expected += paths(tokens, parents)[1 : num - length]
    assert paths(got_tokens, got_parents) == expected
    assert got_depths == [len(path) - 1 for path in expected]


def test_what_is_remembered_is_the_end_of_an_answer_until_it_is_forgotten() -> None:
    drafter = lookup.Lookup(searches_answers=True)
    state = drafter.init_state(None, None)  # type: ignore[arg-type]
    history = jnp.arange(2000, dtype=jnp.int32)

    def remember(state: jax.Array, start: int, last: int, number: int) -> jax.Array:
        return drafter.remember(state, history, *(jnp.int32(value) for value in (start, last, number)))

    state = remember(state, 10, 13, 0)
    assert state[0, :5].tolist() == [10, 11, 12, 13, -1]
    state = remember(state, 10, 1500, RECALL_ROWS + 1)  # the rows are used in turns
    assert state[1, [0, -1]].tolist() == [1500 - RECALL_LENGTH, 1499]
    assert (state[2:] == -1).all()
    assert (drafter.forget(state) == -1).all()
    assert lookup.Lookup(searches_answers=False).init_state(None, None) is None  # type: ignore[arg-type]


def test_gains_are_of_steps_in_which_there_was_a_choice() -> None:
    """After a tree of the head alone, a prompt or a plain step nothing is learned of which proposer is better."""
    mixed = lookup.Mixed(SimpleNamespace(observe=lambda *_: None), lookup.Lookup(searches_answers=False))  # type: ignore[arg-type]
    state = lookup.MixedState(None, None, jnp.tile(lookup._first_gains(jnp.float32(1)), (3, 1)))
    view: Any = SimpleNamespace(slots=jnp.asarray([2, 3], jnp.int32))  # the second is padding
    committed: Any = SimpleNamespace(
        source=jnp.asarray([HEAD, HEAD], jnp.int32), n_accepted=jnp.asarray([3, 3], jnp.int32)
    )
    for after in ("prompt", "plain", chain(3)):
        assert (mixed.observe(None, state, view, committed, after).gains == state.gains).all()
    moved = mixed.observe(None, state, view, committed, chain(3, "head+ngram")).gains
    assert (moved != state.gains).tolist() == [[False] * 4, [False] * 4, [True, False, False, False]]
