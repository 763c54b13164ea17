"""Speculation settings: how a tree is spelled, and which drafter proposes it."""

import itertools
import re
from collections.abc import Sequence
from typing import TypeVar

from specserve.drafters.lookup.drafter import Lookup, Mixed
from specserve.drafters.words import ALL_TEXT, OWN_TEXT, SPECULATIONS
from specserve.errors import ConfigError
from specserve.speculative.drafter import Drafter
from specserve.speculative.tree import DynamicTree, StaticTree, Tree, chain, static_tree

T = TypeVar("T", Tree, Tree | None)

MAX_NODES = 256
LOOKUPS = {OWN_TEXT: Lookup(searches_answers=False), ALL_TEXT: Lookup(searches_answers=True)}


def with_head(lookup: str) -> str:
    """The source of trees that a head proposes, or a lookup where that promises more."""
    return f"head+{lookup}"


def drafter_for(trees: Sequence[Tree | None], head: Drafter | None) -> Drafter | None:
    """Return the drafter that can propose all of these trees: a head, a lookup, both, or None. Raises ConfigError
    where a tree is deeper than the head can look ahead."""
    names = {tree.lookup for tree in trees if tree is not None and tree.lookup}
    lookup = LOOKUPS[ALL_TEXT if ALL_TEXT in names else OWN_TEXT] if names else None
    if not any(tree is not None and tree.uses_head for tree in trees):
        return lookup
    assert head is not None, "a tree that asks for a head needs one"
    if too_deep := [tree for tree in trees if tree not in within_reach(trees, head)]:
        raise ConfigError(
            f"speculation {describe(too_deep[0])}: this head looks {head.max_tree_depth} tokens ahead; give a chain or "
            "a tree of that depth at most"
        )
    return Mixed(head, lookup) if lookup else head


def within_reach(trees: Sequence[T], head: Drafter) -> list[T]:
    """Return the trees that are no deeper than a head can look ahead. None stands for plain decoding and is kept."""
    limit = head.max_tree_depth
    return [tree for tree in trees if tree is None or limit is None or not tree.uses_head or tree.depth <= limit]


def parse_speculation(text: str) -> Tree | None:
    """Read a speculation setting: `off`; `chain:K`, `tree:DEPTHxTOPKxNODES` or `static:WIDTHxWIDTHx...` by a head;
    `ngram:K` or `suffix:K` by lookup; `head+suffix:` before a shape by whichever promises more for each sequence, K
    alone being a chain. Raises ConfigError."""
    if text == "off":
        return None
    source, _, shape = text.partition(":")
    if source in LOOKUPS or source in map(with_head, LOOKUPS):
        if shape.isdecimal():
            shape = f"chain:{shape}"
    else:
        source, shape = "head", text
    if match := re.fullmatch(r"chain:(\d+)", shape):
        tree: Tree = chain(int(match[1]), source)
        is_sound = int(match[1]) >= 1
    elif source in LOOKUPS:
        raise ConfigError(f"speculation {text!r}: a lookup alone proposes chains; expected {source}:K")
    elif match := re.fullmatch(r"tree:(\d+)x(\d+)x(\d+)", shape):
        depth, top_k, num_nodes = (int(group) for group in match.groups())
        tree = DynamicTree(depth, top_k, num_nodes, source)
        is_sound = depth >= 1 and top_k >= 1 and depth <= num_nodes <= tree.pool_size
    elif match := re.fullmatch(r"static:(\d+(?:x\d+)*)", shape):
        widths = tuple(int(width) for width in match[1].split("x"))
        is_sound = all(1 <= width <= MAX_NODES for width in widths) and _num_static_nodes(widths) <= MAX_NODES
        tree = static_tree(widths, source) if is_sound else chain(1)
    else:
        raise ConfigError(f"speculation {text!r} is not understood; expected {SPECULATIONS}")
    if not is_sound or tree.num_nodes > MAX_NODES:
        raise ConfigError(
            f"speculation {text!r} describes no tree: every number must be at least 1, a tree has at most {MAX_NODES} "
            "nodes, and tree:DxKxN needs D <= N <= K + (D-1)*K*K"
        )
    return tree


def _num_static_nodes(widths: tuple[int, ...]) -> int:
    total, level = 0, 1
    for width in widths:
        level *= width
        total += level
    return total


def describe(tree: Tree | None) -> str:
    """Return the shortest text that `parse_speculation` reads back, or a plain one for an irregular static tree."""
    if tree is None:
        return "off"
    shape = _shape(tree)
    if tree.source == "head":
        return shape
    return f"{tree.source}:{shape.removeprefix('chain:')}"


def _shape(tree: Tree) -> str:
    if isinstance(tree, StaticTree):
        counts = [1, *[tree.depths.count(depth) for depth in range(1, tree.depth + 1)]]
        widths = tuple(below // above for above, below in itertools.pairwise(counts))
        if static_tree(widths, tree.source) == tree:
            return "static:" + "x".join(map(str, widths))
        return f"static tree of {tree.num_nodes} nodes, depth {tree.depth}"
    if tree.top_k == 1:
        return f"chain:{tree.depth}"
    return f"tree:{tree.depth}x{tree.top_k}x{tree.num_nodes}"
