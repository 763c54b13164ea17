"""The words for ways to speculate: they are read back, mean what they say, and ask for the right drafter."""

import re

import pytest
import tiny

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.lookup.drafter import Lookup, Mixed
from specserve.drafters.speculation import MAX_NODES, describe, drafter_for, parse_speculation
from specserve.errors import ConfigError
from specserve.speculative.tree import DynamicTree, StaticTree, chain, static_tree


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


def test_the_drafter_is_who_the_trees_ask_for(tiny_head: Head) -> None:
    head = tiny_head.drafter

    def asked(*texts: str) -> object:
        return drafter_for([parse_speculation(text) for text in texts], head)

    assert asked("off") is None
    assert asked("off", "chain:3", "tree:3x2x6") is head
    assert asked("off", "ngram:3") == Lookup(searches_answers=False)
    assert asked("ngram:3", "suffix:3") == Lookup(searches_answers=True)
    assert asked("chain:3", "head+ngram:3") == Mixed(head, Lookup(searches_answers=False))
    assert asked("off", "head+suffix:tree:3x2x6") == Mixed(head, Lookup(searches_answers=True))
    with pytest.raises(AssertionError, match="needs one"):
        drafter_for([chain(3)], None)


def test_a_tree_that_is_deeper_than_a_head_can_look_is_refused(tiny_target: Target) -> None:
    drafter = tiny.random_block_head(tiny_target.config, seed=0, block_size=4).drafter
    for text in ("chain:3", "static:2x1x1", "tree:3x2x6", "head+suffix:3"):
        assert drafter_for([None, parse_speculation(text)], drafter) is not None
    assert drafter_for([parse_speculation("suffix:7")], drafter) == Lookup(searches_answers=True), "which asks no head"
    for text in ("chain:4", "head+suffix:tree:4x2x7"):
        with pytest.raises(ConfigError, match=re.escape(f"speculation {text}: this head looks 3 tokens ahead")):
            drafter_for([None, parse_speculation(text)], drafter)
