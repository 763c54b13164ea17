"""Trees of proposed tokens: their static shapes, their traced content, and the mask that follows from it.

Node 0 is the root: the last emitted token, whose keys and values the target has not computed yet. Parents come before
their children. A chain is a tree whose top_k is 1.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specserve.kernels.gather import take_each
from specserve.pytree import pytree


class _Proposed:
    """A tree's `source` names its proposer: `head`, the name of a lookup, or `head+` that name."""

    source: str

    @property
    def uses_head(self) -> bool:
        return self.source.startswith("head")

    @property
    def lookup(self) -> str:
        """The name of the lookup; empty where the head proposes alone."""
        return self.source.removeprefix("head").removeprefix("+")


@dataclass(frozen=True)
class DynamicTree(_Proposed):
    """A tree that grows where the draft is sure: a node's candidates are its best `top_k` tokens, and of all paths of
    candidates that are computed the best `num_nodes` are kept, by path probability. See `drafters.grow` for how many
    are. Its shape is decided on the device; its size is static."""

    depth: int
    top_k: int
    num_nodes: int  # proposed tokens; the root is not counted
    source: str = "head"

    @property
    def pool_size(self) -> int:
        """The number of candidates where the best `top_k` nodes of a level are gone on from, the fewest there are."""
        return self.top_k + (self.depth - 1) * self.top_k**2


@dataclass(frozen=True)
class StaticTree(_Proposed):
    """A tree of fixed topology: node i + 1 is the `ranks[i]`-th best child of node `parents[i]` (0 is the root). For
    example parents (0, 0, 1) and ranks (0, 1, 0) are the root's two best children, and the best child of the first."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    source: str = "head"

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        """The depths of the proposed nodes; a child of the root has depth 1."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths[1:])

    @functools.cached_property
    def depth(self) -> int:
        return max(self.depths)

    @property
    def top_k(self) -> int:
        return max(self.ranks) + 1


Tree = DynamicTree | StaticTree


def depth_of(tree: Tree | None) -> int:
    """The draft tokens that a step over this tree may accept; none of plain decoding."""
    return tree.depth if tree else 0


def chain(length: int, source: str = "head") -> DynamicTree:
    return DynamicTree(depth=length, top_k=1, num_nodes=length, source=source)


def static_tree(widths: tuple[int, ...], source: str = "head") -> StaticTree:
    """The tree in which every node of depth d has its best `widths[d]` children."""
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
    return StaticTree(tuple(parents), tuple(ranks), source)


@pytree
class Proposal:
    """The tree of draft tokens that is proposed for each sequence; node 0 is the root."""

    token_ids: jax.Array  # [batch, node] int32
    parents: jax.Array  # [batch, node] int32; the root's is itself
    depths: jax.Array  # [batch, node] int32; the root's is 0
    source: jax.Array  # [batch] int32, the proposer, see `drafter`
    # [batch, node] float32, the draft's log-probability of the path to each node of a dynamic tree, by which its
    # nodes were chosen; None of other trees
    scores: jax.Array | None = None
    # [batch, depth] float32, how likely the draft thinks it that a token of each depth is accepted after the best node
    # above it; None where it has no such estimate
    confidence: jax.Array | None = None


def chain_proposal(
    root_ids: jax.Array,  # [batch] int32
    token_ids: jax.Array,  # [batch, depth] int32
    source: jax.Array,  # [batch] int32
) -> Proposal:
    """Make a proposal that is a chain: one token after the other below the root."""
    batch, depth = token_ids.shape
    nodes = jnp.broadcast_to(jnp.arange(depth + 1, dtype=jnp.int32), (batch, depth + 1))
    return Proposal(
        token_ids=jnp.concatenate([root_ids[:, None], token_ids], axis=1),
        parents=jnp.maximum(nodes - 1, 0),
        depths=nodes,
        source=source,
    )


def pad_chain(proposal: Proposal, depth: int) -> Proposal:
    """Lengthen a proposed chain with padding nodes until it has `depth`."""
    missing = depth + 1 - proposal.token_ids.shape[1]
    token_ids = jnp.pad(proposal.token_ids[:, 1:], ((0, 0), (0, missing)))
    padded = chain_proposal(proposal.token_ids[:, 0], token_ids, proposal.source)
    return dataclasses.replace(padded, confidence=proposal.confidence)


def ancestor_mask(parents: jax.Array, depth: int) -> jax.Array:  # [batch, node] -> [batch, node, node] bool
    """Return the mask that is True where the second node is the first one or an ancestor of it."""
    node = jnp.arange(parents.shape[1])
    current = jnp.broadcast_to(node, parents.shape)
    mask = current[..., None] == node
    for _ in range(depth):
        current = take_each(parents, current)
        mask |= current[..., None] == node
    return mask
