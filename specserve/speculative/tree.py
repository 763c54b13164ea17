"""Trees of proposed tokens: their static shapes, their traced content, and the masks that follow from it.

Node 0 is the root: the last emitted token, whose keys and values the target has not computed yet. Parents come before
their children. A chain is a tree whose top_k is 1.
"""

import itertools
import re
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import jax
import jax.numpy as jnp

from specserve.errors import ConfigError
from specserve.pytree import pytree

MAX_NODES = 256
Source = Literal["head", "ngram", "suffix", "head+ngram", "head+suffix"]  # who proposes, see `lookup`


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree (Li et al. 2024, arXiv 2406.16858): expand the best `top_k` nodes of each level, then keep the
    best `num_nodes` of all candidates by path probability. Its shape is decided on the device; its size is static."""

    depth: int
    top_k: int
    num_nodes: int  # proposed tokens; the root is not counted
    source: Source = "head"  # any other is for chains only

    @property
    def uses_head(self) -> bool:
        return self.source.startswith("head")

    @property
    def uses_lookup(self) -> bool:
        return self.source != "head"

    @property
    def uses_recall(self) -> bool:
        return self.source.endswith("suffix")

    @property
    def pool_size(self) -> int:
        return self.top_k + (self.depth - 1) * self.top_k**2


@dataclass(frozen=True)
class StaticTree:
    """A fixed topology: node i + 1 is the `ranks[i]`-th best child of node `parents[i]` (0 is the root)."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    uses_head: ClassVar[bool] = True
    uses_lookup: ClassVar[bool] = False
    uses_recall: ClassVar[bool] = False

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        """Of the proposed nodes; a child of the root has depth 1."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths[1:])

    @property
    def depth(self) -> int:
        return max(self.depths)

    @property
    def top_k(self) -> int:
        return max(self.ranks) + 1


Tree = DynamicTree | StaticTree


def chain(length: int, source: Source = "head") -> DynamicTree:
    return DynamicTree(depth=length, top_k=1, num_nodes=length, source=source)


def static_tree(widths: tuple[int, ...]) -> StaticTree:
    """Every node of depth d has its best `widths[d]` children."""
    parents: list[int] = []
    ranks: list[int] = []
    level = [0]
    for width in widths:
        next_level = []
        for parent in level:
            for rank in range(width):
                parents.append(parent)
                ranks.append(rank)
                next_level.append(len(parents))
        level = next_level
    return StaticTree(tuple(parents), tuple(ranks))


def parse_speculation(text: str) -> Tree | None:
    """`off`, `chain:K`, `tree:DEPTHxTOPKxNODES` or `static:WIDTHxWIDTHx...` by a head; `ngram:K` or `suffix:K` by
    lookup; `head+ngram:K` or `head+suffix:K` by whichever promises more for each sequence. Raises ConfigError."""
    if text == "off":
        return None
    sources: dict[str, Source] = {"chain" if source == "head" else source: source for source in get_args(Source)}
    if (match := re.fullmatch(r"([a-z+]+):(\d+)", text)) and match[1] in sources:
        tree: Tree = chain(int(match[2]), sources[match[1]])
        is_sound = int(match[2]) >= 1
    elif match := re.fullmatch(r"tree:(\d+)x(\d+)x(\d+)", text):
        depth, top_k, num_nodes = (int(group) for group in match.groups())
        tree = DynamicTree(depth, top_k, num_nodes)
        is_sound = depth >= 1 and top_k >= 1 and depth <= num_nodes <= tree.pool_size
    elif match := re.fullmatch(r"static:(\d+(?:x\d+)*)", text):
        widths = tuple(int(width) for width in match[1].split("x"))
        is_sound = all(1 <= width <= MAX_NODES for width in widths) and _num_static_nodes(widths) <= MAX_NODES
        tree = static_tree(widths) if is_sound else chain(1)
    else:
        raise ConfigError(
            f"speculation {text!r} is not understood; expected off, chain:K, tree:DEPTHxTOPKxNODES (tree:4x4x12), "
            "static:WIDTHxWIDTHx... (static:3x2x1), ngram:K, suffix:K, head+ngram:K or head+suffix:K"
        )
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
    """The shortest text that `parse_speculation` reads back, or a plain one for an irregular static tree."""
    if tree is None:
        return "off"
    if isinstance(tree, StaticTree):
        counts = [1, *[tree.depths.count(depth) for depth in range(1, tree.depth + 1)]]
        widths = tuple(below // above for above, below in itertools.pairwise(counts))
        if static_tree(widths) == tree:
            return "static:" + "x".join(map(str, widths))
        return f"static tree of {tree.num_nodes} nodes, depth {tree.depth}"
    if tree.source != "head":
        return f"{tree.source}:{tree.depth}"
    return f"chain:{tree.depth}" if tree.top_k == 1 else f"tree:{tree.depth}x{tree.top_k}x{tree.num_nodes}"


@pytree
class Proposal:
    """What is proposed for each sequence; node 0 is the root."""

    token_ids: jax.Array  # [batch, node] int32
    parents: jax.Array  # [batch, node] int32; the root's is itself
    depths: jax.Array  # [batch, node] int32; the root's is 0
    source: jax.Array  # [batch] int32, who proposed, see `lookup`


def chain_proposal(
    root_ids: jax.Array,  # [batch] int32
    token_ids: jax.Array,  # [batch, depth] int32
    source: jax.Array,  # [batch] int32
) -> Proposal:
    """One token after the other below the root."""
    batch, depth = token_ids.shape
    nodes = jnp.broadcast_to(jnp.arange(depth + 1, dtype=jnp.int32), (batch, depth + 1))
    return Proposal(
        token_ids=jnp.concatenate([root_ids[:, None], token_ids], axis=1),
        parents=jnp.maximum(nodes - 1, 0),
        depths=nodes,
        source=source,
    )


def pad_chain(proposal: Proposal, depth: int) -> Proposal:
    """The same chain with as many further nodes as it takes to reach `depth`."""
    missing = depth + 1 - proposal.token_ids.shape[1]
    token_ids = jnp.pad(proposal.token_ids[:, 1:], ((0, 0), (0, missing)))
    return chain_proposal(proposal.token_ids[:, 0], token_ids, proposal.source)


def ancestor_mask(parents: jax.Array, depth: int) -> jax.Array:  # [batch, node] -> [batch, node, node] bool
    """True where the second node is the first one or an ancestor of it."""
    node = jnp.arange(parents.shape[1])
    current = jnp.broadcast_to(node, parents.shape)
    mask = current[..., None] == node
    for _ in range(depth):
        current = jnp.take_along_axis(parents, current, axis=1)
        mask |= current[..., None] == node
    return mask
