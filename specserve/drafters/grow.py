"""The growth of a tree below a root, for any drafter that can rank candidates.

Candidates are ranked by `log softmax(log q / T + gumbel(seed, position))`: with T = 0 that is the draft's own
log-probability, above it the draft looks at the same noise that the target's draw will use (`speculative.sampling`).
A path's score is the sum over its nodes, so a child never scores above its parent. Which nodes of a level are gone on
from is the drafter's choice (`Expander.width`), since it pays for them. Where each of them is a run of a network, it is
the best `top_k`: these are the candidates of EAGLE-2 (Li et al. 2024, arXiv 2406.16858). Where a level costs next to
nothing it is all that could bring one of the tree's nodes (`every_width`), so that the tree is the best of all paths of
each node's best `top_k` tokens, as in DDTree (arXiv 2604.12989).
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specserve.kernels.gather import take_each
from specserve.kernels.rowwise import argmax, largest
from specserve.models.context import join
from specserve.pytree import pytree
from specserve.speculative import sampling
from specserve.speculative.drafter import HEAD, SlotView
from specserve.speculative.sampling import SamplerRows
from specserve.speculative.tree import DynamicTree, Proposal, StaticTree, Tree, chain_proposal
from specserve.speculative.vocab import DraftVocab


class Expander(Protocol):
    """The two operations that growing a tree is made of. It lives during one trace. What it keeps of a level, the nodes
    whose children are drawn next, is its own affair."""

    def candidates(self, level: Any, depth: int, top_k: int) -> tuple[jax.Array, jax.Array]:
        """The best children, at `depth`, of each of a level's k nodes: their scores, the best first, and their target
        ids, both [batch, k, top_k]. See `best_tokens`."""
        ...

    def descend(self, level: Any, parents: jax.Array, token_ids: jax.Array, depth: int) -> Any:
        """The level of some of these children, at `depth`: their tokens [batch, m], and where their parents stand in
        the level above [batch, m]."""
        ...

    def width(self, tree: DynamicTree, depth: int) -> int:
        """The most nodes of a depth that are gone on from."""
        ...


def every_width(tree: DynamicTree, depth: int) -> int:
    """Return as many nodes of a depth as it takes that no other could bring one of the best `num_nodes`: a child comes
    after its parent, the parent's ancestors and all nodes of the parent's depth that are better than it."""
    return max(1, tree.num_nodes - depth)


def best_tokens(
    rows: SamplerRows,
    target_ids: jax.Array,  # [draft_vocab] int32, or of each row's own tokens [batch, draft_vocab]
    logits: jax.Array,  # [batch, k, draft_vocab] float32
    position_ids: jax.Array,  # [batch] int32, of the token before the one that is drawn
    top_k: int,
) -> tuple[jax.Array, jax.Array]:
    """The best tokens by the draft's logits and the target's noise: scores and target ids, both [batch, k, top_k]."""
    own_ids = target_ids if target_ids.ndim == 1 else target_ids[:, None]

    def noisy() -> jax.Array:
        scaled = sampling.scale(rows, logits)
        return scaled + sampling.noise(rows, position_ids[:, None], own_ids.astype(jnp.uint32))

    def best(ranked: jax.Array) -> tuple[jax.Array, jax.Array]:  # scores and places among the draft's tokens
        if top_k > 1:
            found, index = largest(ranked, top_k)
        else:
            found, index = jnp.max(ranked, axis=-1, keepdims=True), argmax(ranked)[..., None]
        return found - jax.nn.logsumexp(ranked, axis=-1, keepdims=True), index

    # nothing of the logits' size leaves the choice, which would be written, and over a mesh be sent
    scores, index = jax.lax.cond(jnp.any(rows.temperature > 0), lambda: best(noisy()), lambda: best(logits))
    if target_ids.ndim == 1:
        return scores, target_ids[index]
    return scores, take_each(target_ids, index.reshape(len(index), -1)).reshape(index.shape)


def grow_tree(expand: Expander, tree: Tree, root_ids: jax.Array, root: Any) -> Proposal:
    """The tree below each root, [batch] int32, whose level is `root`."""
    if isinstance(tree, StaticTree):
        return _grow_static(expand, tree, root_ids, root)
    return _grow_dynamic(expand, tree, root_ids, root)


class Marginals:
    """See `Expander`. Of a drafter whose slots are independent of each other: all nodes of a depth have the same
    candidates, and a level is its tokens [batch, k]."""

    def __init__(
        self,
        rows: SamplerRows,
        vocab: DraftVocab,
        root_positions: jax.Array,  # [batch] int32
        logits: jax.Array,  # [batch, slot, draft_vocab] float32; slot d - 1 foresees the token at depth d
    ) -> None:
        self.rows, self.vocab, self.root_positions, self.logits = rows, vocab, root_positions, logits

    def candidates(self, level: jax.Array, depth: int, top_k: int) -> tuple[jax.Array, jax.Array]:
        of_slot = self.logits[:, depth - 1 : depth]
        found = best_tokens(self.rows, self.vocab.target_ids, of_slot, self.root_positions + depth, top_k)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*level.shape, top_k)), found)

    def descend(self, level: jax.Array, parents: jax.Array, token_ids: jax.Array, depth: int) -> jax.Array:
        return token_ids

    def width(self, tree: DynamicTree, depth: int) -> int:
        return every_width(tree, depth)


@pytree
class Level:
    """The nodes of a tree whose children are drawn next, and the entries of all nodes that have run so far."""

    states: jax.Array  # [batch, k, d_model]
    sees: jax.Array  # [batch, k, seen] bool, which of those entries each node's children see: its own, its ancestors'
    depths: jax.Array  # [batch, seen] int32, of the entries
    entries: Any  # [batch, seen, ...] each, of the network's kind; None: none has run

    @classmethod
    def of_root(cls, states: jax.Array) -> "Level":
        """Return the level that is the root alone, [batch, 1, d_model], whose own entry is in the pages."""
        batch = states.shape[0]
        return cls(states, jnp.zeros((batch, 1, 0), bool), jnp.zeros((batch, 0), jnp.int32), None)


class NodeByNode:
    """See `Expander`. Of a drafter that runs once for each node: every level is a `Level`, and one pass of its
    network. A kind has `logits` and `run`."""

    def __init__(self, view: SlotView, target_ids: jax.Array) -> None:
        self.view, self.target_ids = view, target_ids

    def logits(self, states: jax.Array) -> jax.Array:
        """Compute the logits [batch, k, draft_vocab] float32 of the nodes' states [batch, k, d_model]."""
        raise NotImplementedError

    def run(
        self,
        before: jax.Array,  # [batch, k, d_model], the states of the nodes' parents
        token_ids: jax.Array,  # [batch, k] int32, of the nodes
        position_ids: jax.Array,  # [batch, seen] int32, of all that they may see, and of themselves at the end
        sees: jax.Array,  # [batch, k, seen] bool
        entries: Any,  # of the nodes that have run before
    ) -> tuple[jax.Array, Any]:
        """Run the network for nodes. Returns their states [batch, k, d_model], and the entries that they leave."""
        raise NotImplementedError

    def candidates(self, level: Level, depth: int, top_k: int) -> tuple[jax.Array, jax.Array]:
        logits = self.logits(level.states)
        return best_tokens(self.view.rows, self.target_ids, logits, self.view.seq_lens + depth, top_k)

    def descend(self, level: Level, parents: jax.Array, token_ids: jax.Array, depth: int) -> Level:
        batch, k = token_ids.shape
        own = jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))
        sees = jnp.concatenate([take_each(level.sees, parents), own], axis=2)
        depths = jnp.concatenate([level.depths, jnp.full((batch, k), depth, jnp.int32)], axis=1)
        position_ids = self.view.seq_lens[:, None] + depths
        states, left = self.run(take_each(level.states, parents), token_ids, position_ids, sees, level.entries)
        return Level(states, sees, depths, join(level.entries, left))

    def width(self, tree: DynamicTree, depth: int) -> int:
        return tree.top_k


def _grow_dynamic(expand: Expander, tree: DynamicTree, root_ids: jax.Array, root: Any) -> Proposal:
    """Grow a dynamic tree. Its pool lists candidates level by level, so a parent always stands before its children."""
    batch, top_k = root_ids.shape[0], tree.top_k
    score, token = (x[:, 0] for x in expand.candidates(root, 1, top_k))
    scores, tokens, sizes = [score], [token], [top_k]
    parents = [jnp.full((batch, top_k), -1, jnp.int32)]  # in the pool; -1 is the root
    level, base = root, 0  # and where the candidates of the last depth begin in the pool
    for depth in range(2, tree.depth + 1):
        # the root's candidates are in order already
        width = min(expand.width(tree, depth - 1), sizes[-1])
        level_score, picked = (score[:, :width], _first(batch, width)) if depth == 2 else _top_k(score, width)
        level = expand.descend(level, picked // sizes[0], take_each(token, picked), depth - 1)
        score, token = expand.candidates(level, depth, top_k)  # [batch, width, top_k]
        score = (score + level_score[..., None]).reshape(batch, -1)
        token = token.reshape(batch, -1)
        scores.append(score)
        tokens.append(token)
        parents.append(jnp.repeat(base + picked, top_k, axis=1))
        base += sizes[-1]
        sizes.append(width * top_k)
    if top_k == 1:
        source = jnp.full(batch, HEAD, jnp.int32)
        return chain_proposal(root_ids, jnp.concatenate(tokens, axis=1)[:, : tree.num_nodes], source)
    pool = [jnp.concatenate(of_depths, axis=1) for of_depths in (scores, tokens, parents)]
    return _rerank(tree, root_ids, np.repeat(np.arange(1, tree.depth + 1), sizes), *pool)


def _rerank(
    tree: DynamicTree,
    root_ids: jax.Array,
    depths: np.ndarray,  # [pool]
    scores: jax.Array,  # [batch, pool], as the next two
    token_ids: jax.Array,
    parents: jax.Array,
) -> Proposal:
    """Keep the best `num_nodes` of the pool. A child never scores above its parent and
    stands after it, and `top_k` prefers the earlier of equals, so with a node all its ancestors are kept."""
    batch, pool = scores.shape
    kept = _first(batch, pool)
    if tree.num_nodes < pool:
        kept = jnp.sort(jax.lax.top_k(scores, tree.num_nodes)[1], axis=1)
    parent = take_each(parents, kept)
    # where each kept node's parent stands among the kept (the root is node 0, hence + 1)
    is_parent = parent[..., None] == kept[:, None]
    parent_node = jnp.where(parent < 0, 0, 1 + argmax(is_parent.astype(jnp.float32)))
    zeros = jnp.zeros((batch, 1), jnp.int32)
    return Proposal(
        token_ids=jnp.concatenate([root_ids[:, None], take_each(token_ids, kept)], axis=1),
        parents=jnp.concatenate([zeros, parent_node.astype(jnp.int32)], axis=1),
        depths=jnp.concatenate([zeros, jnp.asarray(depths, jnp.int32)[kept]], axis=1),
        source=jnp.full(batch, HEAD, jnp.int32),
        scores=jnp.concatenate([jnp.zeros_like(scores, shape=(batch, 1)), take_each(scores, kept)], axis=1),
    )


def _first(batch: int, n: int) -> jax.Array:  # [batch, n]
    return jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, n))


def _top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    return (scores, jnp.zeros_like(scores, jnp.int32)) if scores.shape[1] == k == 1 else jax.lax.top_k(scores, k)


def _grow_static(expand: Expander, tree: StaticTree, root_ids: jax.Array, root: Any) -> Proposal:
    batch = root_ids.shape[0]
    depths = (0, *tree.depths)
    ranks, parents = (0, *tree.ranks), (0, *tree.parents)
    tokens: list[jax.Array] = [root_ids]
    level, nodes = root, [0]  # the nodes whose children are drawn next
    for depth in range(1, tree.depth + 1):
        children = [node for node in range(1, len(depths)) if depths[node] == depth]
        _, token = expand.candidates(level, depth, 1 + max(ranks[child] for child in children))
        tokens += [token[:, nodes.index(parents[child]), ranks[child]] for child in children]
        expanded = [child for child in children if child in parents[1:]]
        if not expanded:
            break
        above = jnp.array([nodes.index(parents[child]) for child in expanded], jnp.int32)
        chosen = jnp.stack([tokens[_order(depths, child)] for child in expanded], axis=1)
        level = expand.descend(level, jnp.broadcast_to(above, chosen.shape), chosen, depth)
        nodes = expanded
    order = [_order(depths, node) for node in range(len(depths))]
    return Proposal(
        token_ids=jnp.stack([tokens[i] for i in order], axis=1),
        parents=jnp.broadcast_to(jnp.array(parents, jnp.int32), (batch, len(parents))),
        depths=jnp.broadcast_to(jnp.array(depths, jnp.int32), (batch, len(depths))),
        source=jnp.full(batch, HEAD, jnp.int32),
    )


def _order(depths: tuple[int, ...], node: int) -> int:
    """Return where a node's token stands when tokens are listed depth by depth."""
    return sum(1 for i, depth in enumerate(depths) if (depth, i) < (depths[node], node))
