"""Walking down a tree, against a walk written as a loop; the masks of trees, against ancestors written as a loop."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specserve.speculative.tree import (
    Proposal,
    ancestor_mask,
    chain_proposal,
    pad_chain,
)
from specserve.speculative.verify import verify, verify_chain

NODES, DEPTH = 9, 4

_verify_on_device = jax.jit(verify, static_argnums=2)
_verify_chain_on_device = jax.jit(verify_chain)
_ancestor_mask = jax.jit(ancestor_mask, static_argnums=1)


def _verify(*args: Any) -> Any:  # NumPy arrays, of which rows are read without a program for each
    return jax.device_get(_verify_on_device(*args))


def _verify_chain(*args: Any) -> Any:
    return jax.device_get(_verify_chain_on_device(*args))


@st.composite
def _trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Parents, tokens (no two children of a node alike) and the target's draws, over few tokens so that many match."""
    parents, tokens, depths = [0], [0], [0]
    for node in range(1, NODES):
        parent = draw(st.sampled_from([i for i in range(node) if depths[i] < DEPTH]))
        taken = {tokens[i] for i in range(1, node) if parents[i] == parent}
        parents.append(parent)
        depths.append(depths[parent] + 1)
        tokens.append(draw(st.sampled_from([i for i in range(NODES) if i not in taken])))
    children = [[tokens[i] for i in range(1, NODES) if parents[i] == node] for node in range(NODES)]
    drawn = [draw(st.sampled_from([*own, *own, *own, 99])) for own in children]
    return parents, tokens, drawn


_max_depths = st.sampled_from([0, 1, 2, DEPTH, 2**31 - 1])


@given(st.tuples(_trees(), _trees()), st.tuples(_max_depths, _max_depths))
def test_verify_walks_while_a_child_carries_the_targets_token(
    trees: tuple[tuple[list[int], list[int], list[int]], ...], max_depths: tuple[int, int]
) -> None:
    """And no further than each sequence may go."""
    parents, tokens, drawn = (np.array(x, np.int32) for x in zip(*trees, strict=True))
    proposal = Proposal(tokens, parents, np.zeros_like(parents), np.zeros(2, np.int32))
    verdict = _verify(proposal, drawn, DEPTH, np.array(max_depths, np.int32))
    for row, (parent, token, draws) in enumerate(trees):
        node, path, emitted = 0, [0], [draws[0]]
        while found := [i for i in range(1, NODES) if parent[i] == node and token[i] == draws[node]]:
            if len(path) > max_depths[row]:
                break
            [node] = found
            path.append(node)
            emitted.append(draws[node])
        assert verdict.n_accepted[row] == len(path) - 1
        assert verdict.path[row, : len(path)].tolist() == path
        assert verdict.token_ids[row, : len(path)].tolist() == emitted
        assert set(verdict.path[row, len(path) :].tolist()) <= {node}


@given(_trees())
def test_ancestor_mask_is_the_node_and_its_ancestors(tree: tuple[list[int], list[int], list[int]]) -> None:
    parents = tree[0]
    expected = np.zeros((NODES, NODES), bool)
    for node in range(NODES):
        at = node
        while True:
            expected[node, at] = True
            if at == 0:
                break
            at = parents[at]
    np.testing.assert_array_equal(np.asarray(_ancestor_mask(np.array([parents], np.int32), DEPTH))[0], expected)


def test_a_padded_chain_is_the_chain_and_more_nodes() -> None:
    source = jnp.asarray([0, 3], jnp.int32)
    short = chain_proposal(jnp.asarray([5, 6], jnp.int32), jnp.asarray([[7, 8], [9, 1]], jnp.int32), source)
    assert short.token_ids.tolist() == [[5, 7, 8], [6, 9, 1]]
    padded = pad_chain(short, DEPTH)
    assert padded.token_ids[:, :3].tolist() == short.token_ids.tolist()
    assert padded.parents.tolist() == [[0, 0, 1, 2, 3]] * 2
    assert padded.depths.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert padded.source.tolist() == [0, 3]
    np.testing.assert_array_equal(_ancestor_mask(padded.parents, DEPTH), np.tril(np.ones((2, 5, 5), bool)))
    assert pad_chain(short, 2).token_ids.tolist() == short.token_ids.tolist(), "it is long enough already"


@given(
    st.lists(st.integers(0, 1), min_size=2 * DEPTH, max_size=2 * DEPTH),
    st.lists(st.integers(0, 1), min_size=2 * DEPTH + 2, max_size=2 * DEPTH + 2),
    st.tuples(_max_depths, _max_depths),
)
def test_a_chain_needs_no_walk(tokens: list[int], drawn: list[int], max_depths: tuple[int, int]) -> None:
    draft_ids = jnp.asarray(np.array(tokens, np.int32).reshape(2, DEPTH))
    proposal = chain_proposal(jnp.zeros(2, jnp.int32), draft_ids, jnp.zeros(2, jnp.int32))
    target_ids, max_depth = np.array(drawn, np.int32).reshape(2, DEPTH + 1), np.array(max_depths, np.int32)
    walked, verdict = _verify(proposal, target_ids, DEPTH, max_depth), _verify_chain(proposal, target_ids, max_depth)
    assert verdict.n_accepted.tolist() == walked.n_accepted.tolist()
    for row, last in enumerate(walked.n_accepted.tolist()):
        assert walked.path[row, : last + 1].tolist() == list(range(last + 1))
        assert verdict.token_ids[row, : last + 1].tolist() == walked.token_ids[row, : last + 1].tolist()
