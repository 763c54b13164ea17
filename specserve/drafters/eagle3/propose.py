"""The head's side of a step: consume what the target accepted, then run ahead and propose a tree.

It knows the head's layers and their pages, and no target forward. Candidates are ranked by
`log softmax(log q / T + gumbel(seed, position))`: with T = 0 that is the draft's log-probability, above it the draft
looks at the same noise that the target's draw will use (see `sampling`).
"""

import jax
import jax.numpy as jnp
import numpy as np

from specserve.drafters.eagle3.config import Eagle3Config
from specserve.drafters.eagle3.model import (
    DraftInputs,
    Eagle3Params,
    draft_entries,
    draft_forward,
    draft_inputs,
    draft_logits,
    draft_states,
    fuse_features,
)
from specserve.kernels.attention import attend
from specserve.kernels.gather import take_each
from specserve.kernels.rowwise import argmax
from specserve.models.attention import KV
from specserve.models.cache import Cache, Prefix
from specserve.pytree import pytree
from specserve.speculative import sampling
from specserve.speculative.drafter import HEAD
from specserve.speculative.sampling import SamplerRows
from specserve.speculative.tree import DynamicTree, Proposal, StaticTree, Tree, chain_proposal
from specserve.speculative.vocab import DraftVocab

FIRST_ENTRY = 1  # entry 0 of the draft has no feature to consume; it is never visible


@pytree
class Pending:
    """Accepted tokens that the draft has not consumed yet, oldest first; the last valid one is the root."""

    token_ids: jax.Array  # [batch, m] int32
    aux_hidden_states: jax.Array  # [batch, m, taps * target_d_model], of the position before each token
    count: jax.Array  # [batch] int32, valid entries


@pytree
class Draft:
    """A head ready to propose."""

    params: Eagle3Params
    vocab: DraftVocab
    embedding: jax.Array  # [vocab, d_model], see `model.token_embedding`


@pytree
class _Level:
    """The nodes that are being expanded, and the draft's own entries above them."""

    token_ids: jax.Array  # [batch, k]
    hidden: jax.Array  # [batch, k, d_model], the recurrent state that each node consumes
    kv: tuple[KV, ...]  # of all nodes expanded so far, layer by layer: [batch, seen, kv_head, head_dim]
    mask: jax.Array  # [batch, k, seen]: which of those each node sees (its ancestors)


def extend(
    draft: Draft,
    config: Eagle3Config,
    pages: Cache,
    page_table: jax.Array,  # [batch, max_pages], for writing
    read_table: jax.Array,  # [batch, pages], the part that attention reads
    token_ids: jax.Array,  # [batch, n]
    aux_hidden_states: jax.Array,  # [batch, n, taps * target_d_model], of the position before each token
    index: jax.Array,  # [batch, n], of the entries, consecutive
    is_valid: jax.Array,  # [batch, n] bool, the first so many
) -> tuple[Cache, DraftInputs, KV]:  # what the entries bring to the last layer, and their keys and values there
    """Write the draft's entries of tokens whose features are known. The layers below the last run for all of them,
    the last for none: a head of one layer attends to nothing here."""
    features = fuse_features(draft.params, config, aux_hidden_states)
    inputs = draft_inputs(draft.params, config, draft.embedding, token_ids, features, index)
    is_entry = index >= FIRST_ENTRY
    offset = jnp.arange(token_ids.shape[1])
    mask = (offset[:, None] >= offset) & is_entry[:, None]
    before = Prefix(read_table, index[:, 0], FIRST_ENTRY)
    top, entries = draft_entries(
        draft.params, config, inputs, lambda i, q, k, v: attend(q, k, v, mask, pages.attended(i, before))
    )
    is_kept = is_valid & is_entry
    if config.num_layers > 1:
        # always true, but known only once the lower layers have run: see `speculative.step._has_run`
        is_kept &= jnp.isfinite(top.residual[..., 0])
    return pages.write(entries, page_table, index, is_kept), top, entries[-1]


def consume(
    draft: Draft,
    config: Eagle3Config,
    pages: Cache,
    page_table: jax.Array,  # [batch, max_pages], for writing
    read_table: jax.Array | None,  # [batch, pages], the part that attention reads; None: do not run the last layer
    seq_lens: jax.Array,  # [batch], the root's position
    pending: Pending,
) -> tuple[Cache, jax.Array | None]:  # and the recurrent state at the root [batch, 1, d_model]
    """Consume the pending tokens: write their draft entries, and run the last layer for the last of them only."""
    offset = jnp.arange(pending.token_ids.shape[1])
    index = seq_lens[:, None] - pending.count[:, None] + 1 + offset
    is_valid = offset < pending.count[:, None]
    # Write first and attend to the written pages: reading the old ones as well would make XLA copy them.
    pages, top, kv = extend(
        draft,
        config,
        pages,
        page_table,
        page_table if read_table is None else read_table,
        pending.token_ids,
        pending.aux_hidden_states,
        index,
        is_valid,
    )
    if read_table is None:
        return pages, None
    last = jnp.maximum(pending.count - 1, 0)[:, None]
    root, (k, v) = jax.tree.map(lambda x: take_each(x, last), (top, kv))
    seen = pages.attended(config.num_layers - 1, Prefix(read_table, seq_lens, FIRST_ENTRY))
    see_self = jnp.ones((1, 1, 1), bool)
    return pages, draft_states(draft.params, config, root, lambda q: attend(q, k, v, see_self, seen))


def propose(
    draft: Draft,
    config: Eagle3Config,
    tree: Tree,
    pages: Cache,
    read_table: jax.Array,  # [batch, pages]
    seq_lens: jax.Array,  # [batch], the root's position
    root_ids: jax.Array,  # [batch]
    hidden: jax.Array,  # [batch, 1, d_model], from `consume`
    rows: SamplerRows,
) -> Proposal:
    """Grow a tree below the root. Nothing is written: the draft's entries of proposed nodes live and die here."""
    expand = _Expander(draft, config, pages, Prefix(read_table, seq_lens + 1, FIRST_ENTRY), rows)
    if isinstance(tree, StaticTree):
        return _propose_static(expand, tree, root_ids, hidden)
    return _propose_dynamic(expand, tree, root_ids, hidden)


class _Expander:
    """The two operations that growing a tree is made of. Lives during one trace."""

    def __init__(self, draft: Draft, config: Eagle3Config, pages: Cache, prefix: Prefix, rows: SamplerRows) -> None:
        self.draft, self.config, self.pages, self.prefix, self.rows = draft, config, pages, prefix, rows

    def candidates(self, hidden: jax.Array, depth: int, top_k: int) -> tuple[jax.Array, jax.Array]:
        """The best children of nodes at `depth - 1`: scores and target ids, both [batch, k, top_k]."""
        logits = draft_logits(self.draft.params.output, self.config, hidden)
        target_ids = self.draft.vocab.target_ids
        position_ids = jnp.broadcast_to((self.prefix.lens + depth - 1)[:, None], logits.shape[:2])

        def noisy() -> jax.Array:
            scaled = sampling.scale(self.rows, logits)
            return scaled + sampling.noise(self.rows, position_ids[:, :1], target_ids.astype(jnp.uint32))

        ranked = jax.lax.cond(jnp.any(self.rows.temperature > 0), noisy, lambda: logits)
        if top_k == 1:
            index = argmax(ranked)[..., None]
            best = jnp.max(ranked, axis=-1, keepdims=True)
        else:
            best, index = jax.lax.top_k(ranked, top_k)
        return best - jax.nn.logsumexp(ranked, axis=-1, keepdims=True), target_ids[index]

    def run(self, level: _Level, depth: int) -> tuple[jax.Array, tuple[KV, ...]]:
        """One draft pass over nodes at `depth`: their recurrent states, and the entries grown by theirs."""
        position_ids = jnp.broadcast_to((self.prefix.lens + depth - 1)[:, None], level.token_ids.shape)
        inputs = draft_inputs(
            self.draft.params, self.config, self.draft.embedding, level.token_ids, level.hidden, position_ids
        )
        mask = _see_self(level.mask)
        grown = list(level.kv)

        def see_ancestors(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            above_k, above_v = level.kv[i]
            grown[i] = jnp.concatenate([above_k, k], axis=1), jnp.concatenate([above_v, v], axis=1)
            return attend(q, *grown[i], mask, self.pages.attended(i, self.prefix))

        hidden, _ = draft_forward(self.draft.params, self.config, inputs, see_ancestors)
        return hidden, tuple(grown)

    def no_entries(self, batch: int) -> tuple[KV, ...]:
        empty = jnp.zeros((batch, 0, self.config.num_kv_heads, self.config.head_dim), self.config.dtype)
        return ((empty, empty),) * self.config.num_layers


def _see_self(mask: jax.Array) -> jax.Array:  # [batch, k, seen] -> [batch, k, seen + k]
    batch, k, _ = mask.shape
    return jnp.concatenate([mask, jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))], axis=2)


def _propose_dynamic(expand: _Expander, tree: DynamicTree, root_ids: jax.Array, hidden: jax.Array) -> Proposal:
    """The pool lists candidates level by level, so a parent always stands before its children."""
    batch, top_k = root_ids.shape[0], tree.top_k
    score, token = expand.candidates(hidden, 1, top_k)
    scores, tokens = [score[:, 0]], [token[:, 0]]
    parents = [jnp.full((batch, top_k), -1, jnp.int32)]  # in the pool; -1 is the root
    frontier = jnp.broadcast_to(jnp.arange(top_k, dtype=jnp.int32), (batch, top_k))
    level = _Level(
        token_ids=tokens[0],
        hidden=jnp.broadcast_to(hidden, (batch, top_k, hidden.shape[-1])),
        kv=expand.no_entries(batch),
        mask=jnp.zeros((batch, top_k, 0), bool),
    )
    level_score, base = scores[0], top_k
    for depth in range(2, tree.depth + 1):
        out, kv = expand.run(level, depth - 1)
        score, token = expand.candidates(out, depth, top_k)  # [batch, k, k]
        score = (score + level_score[..., None]).reshape(batch, -1)
        token = token.reshape(batch, -1)
        scores.append(score)
        tokens.append(token)
        parents.append(jnp.repeat(frontier, top_k, axis=1))
        if depth < tree.depth:
            level_score, picked = _top_k(score, top_k)
            parent = picked // top_k  # in the level just run
            level = _Level(
                token_ids=take_each(token, picked),
                hidden=take_each(out, parent),
                kv=kv,
                mask=take_each(_see_self(level.mask), parent),
            )
            frontier = base + picked
        base += top_k**2
    if top_k == 1:
        source = jnp.full(batch, HEAD, jnp.int32)
        return chain_proposal(root_ids, jnp.concatenate(tokens, axis=1)[:, : tree.num_nodes], source)
    return _rerank(
        tree,
        root_ids,
        jnp.concatenate(scores, axis=1),
        jnp.concatenate(tokens, axis=1),
        jnp.concatenate(parents, axis=1),
    )


def _rerank(
    tree: DynamicTree, root_ids: jax.Array, scores: jax.Array, token_ids: jax.Array, parents: jax.Array
) -> Proposal:
    """Keep the best `num_nodes` of the pool. A child never scores above its parent and stands after it, and `top_k`
    prefers the earlier of equals, so with a node all its ancestors are kept."""
    batch, pool = scores.shape
    depths = np.repeat(np.arange(1, tree.depth + 1), [tree.top_k] + [tree.top_k**2] * (tree.depth - 1))
    kept = jnp.broadcast_to(jnp.arange(pool), (batch, pool))
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


def _top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    return (scores, jnp.zeros_like(scores, jnp.int32)) if scores.shape[1] == k == 1 else jax.lax.top_k(scores, k)


def _propose_static(expand: _Expander, tree: StaticTree, root_ids: jax.Array, hidden: jax.Array) -> Proposal:
    batch = root_ids.shape[0]
    depths = (0, *tree.depths)
    ranks, parents = (0, *tree.ranks), (0, *tree.parents)
    tokens: list[jax.Array] = [root_ids]
    nodes, level = [0], None  # the nodes whose children are drawn next, and their level
    ran: list[int] = []  # nodes whose entries are in level.kv, in that order
    kv = expand.no_entries(batch)
    for depth in range(1, tree.depth + 1):
        children = [node for node in range(1, len(depths)) if depths[node] == depth]
        _, token = expand.candidates(hidden, depth, 1 + max(ranks[child] for child in children))
        tokens += [token[:, nodes.index(parents[child]), ranks[child]] for child in children]
        expanded = [child for child in children if child in parents[1:]]
        if not expanded:
            break
        above = [_ancestors(parents, child) for child in expanded]
        mask = jnp.array([[node in ancestors for node in ran] for ancestors in above], bool).reshape(
            len(above), len(ran)
        )
        level = _Level(
            token_ids=jnp.stack([tokens[_order(depths, child)] for child in expanded], axis=1),
            hidden=hidden[:, jnp.array([nodes.index(parents[child]) for child in expanded])],
            kv=kv,
            mask=jnp.broadcast_to(mask, (batch, *mask.shape)),
        )
        hidden, kv = expand.run(level, depth)
        ran += expanded
        nodes = expanded
    order = [_order(depths, node) for node in range(len(depths))]
    return Proposal(
        token_ids=jnp.stack([tokens[i] for i in order], axis=1),
        parents=jnp.broadcast_to(jnp.array(parents, jnp.int32), (batch, len(parents))),
        depths=jnp.broadcast_to(jnp.array(depths, jnp.int32), (batch, len(depths))),
        source=jnp.full(batch, HEAD, jnp.int32),
    )


def _ancestors(parents: tuple[int, ...], node: int) -> set[int]:
    above = set()
    while node:
        node = parents[node]
        above.add(node)
    return above


def _order(depths: tuple[int, ...], node: int) -> int:
    """Where a node's token stands when tokens are listed depth by depth."""
    return sum(1 for i, depth in enumerate(depths) if (depth, i) < (depths[node], node))
