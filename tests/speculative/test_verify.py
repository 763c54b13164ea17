"""Walking down a tree, against a walk written as a loop; the masks of trees, against ancestors written as a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.drafters.speculation import MAX_NODES, describe, parse_speculation
from specserve.errors import ConfigError
from specserve.speculative.tree import (
    DynamicTree,
    Proposal,
    StaticTree,
    ancestor_mask,
    chain,
    chain_proposal,
    pad_chain,
    static_tree,
)
from specserve.speculative.verify import verify

NODES, DEPTH = 9, 4

_verify = jax.jit(verify, static_argnums=2)
_ancestor_mask = jax.jit(ancestor_mask, static_argnums=1)


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
    parents, tokens, drawn = (jnp.asarray(x, jnp.int32) for x in zip(*trees, strict=True))
    proposal = Proposal(tokens, parents, jnp.zeros_like(parents), jnp.zeros(2, jnp.int32))
    verdict = _verify(proposal, drawn, DEPTH, jnp.asarray(max_depths, jnp.int32))
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
    np.testing.assert_array_equal(_ancestor_mask(jnp.asarray([parents], jnp.int32), DEPTH)[0], expected)


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


@pytest.mark.parametrize(
    "text",
    [
        "off",
        "chain:1",
        "chain:7",
        "tree:4x4x12",
        "tree:2x3x12",
        "tree:1x5x5",
        "static:3x2x1",
        "static:1x1x1x1",
        "static:4",
        "ngram:5",
        "suffix:2",
        "head+ngram:1",
        "head+suffix:16",
        "head+suffix:tree:4x4x12",
        "head+ngram:static:3x2x1",
    ],
)
def test_speculation_reads_back(text: str) -> None:
    assert describe(parse_speculation(text)) == text


def test_who_proposes_is_part_of_what_is_asked() -> None:
    found = {}
    sources = ("head", "ngram", "suffix", "head+ngram", "head+suffix")
    for source in sources:
        tree = parse_speculation(f"{'chain' if source == 'head' else source}:4")
        assert tree == chain(4, source)
        assert isinstance(tree, DynamicTree)
        found[source] = (tree.uses_head, tree.lookup)
    assert found == {
        "head": (True, ""),
        "ngram": (False, "ngram"),
        "suffix": (False, "suffix"),
        "head+ngram": (True, "ngram"),
        "head+suffix": (True, "suffix"),
    }
    assert len({chain(4, source) for source in sources}) == 5, "each is compiled and timed on its own"


def test_an_irregular_static_tree_is_described_in_words() -> None:
    tree = StaticTree(parents=(0, 0, 1), ranks=(0, 1, 0))
    assert describe(tree) == "static tree of 3 nodes, depth 2"


def test_speculation_means_what_it_says() -> None:
    assert parse_speculation("chain:3") == chain(3) == DynamicTree(depth=3, top_k=1, num_nodes=3)
    tree = parse_speculation("static:3x2x1")
    assert isinstance(tree, StaticTree)
    assert tree.parents == (0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9)
    assert tree.ranks == (0, 1, 2, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0)
    assert (tree.depth, tree.top_k, tree.num_nodes) == (3, 3, 15)
    assert static_tree((1, 1)).depths == (1, 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "chain",
        "chain:0",
        "chain:-1",
        "chain:999",
        "tree:3x2x2",
        "tree:2x2x7",
        "tree:0x1x1",
        "tree:3x3",
        "static:",
        "static:0",
        "static:2x0x1",
        "static:16x16x16",
        "static:1x" + "9" * 30,
        f"chain:{MAX_NODES + 1}",
        "eagle:3",
        "head:3",
        "ngram:0",
        "suffix:",
        "suffix:1x2",
        "head+:3",
        "head+eagle:3",
        "ngram+suffix:3",
    ],
)
def test_speculation_that_describes_no_tree_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"chain:K|tree:DxKxN|suffix:K"):
        parse_speculation(text)
