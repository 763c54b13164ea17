"""The draft's trees, against EAGLE-2's algorithm in plain Python over one-path-at-a-time draft passes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from rounding import assert_same, tolerance
from scipy.special import log_softmax

from specserve.checkpoints.load import Target
from specserve.drafters.eagle3.config import Eagle3Config
from specserve.drafters.eagle3.drafter import Eagle3, _Expander, _Level, consume, propose
from specserve.drafters.eagle3.model import ReadyHead, draft_logits, empty_cache
from specserve.drafters.follow import FIRST_ENTRY, Pending
from specserve.drafters.interface import Head
from specserve.models.cache import Cache, Prefix
from specserve.models.params import is_spec
from specserve.speculative.drafter import Weights
from specserve.speculative.sampling import SamplerRows
from specserve.speculative.tree import DynamicTree, Proposal, Tree, chain, static_tree

PAGE_SIZE, MAX_PAGES = 4, 6
LENGTHS = (7, 10, 4)  # of the sequences; the last token is the root


@dataclasses.dataclass(frozen=True)
class World:
    """A batch of sequences that the draft has caught up with."""

    draft: ReadyHead
    head: Head
    pages: Cache
    table: jax.Array
    seq_lens: jax.Array
    root_ids: jax.Array
    hidden: jax.Array


@functools.cache
def _consume(config: Eagle3Config):
    def run(draft, pages, table, seq_lens, pending):
        return consume(draft, config, pages, (table, table), seq_lens, pending)

    return jax.jit(run)


def _aux_size(config: Eagle3Config) -> int:
    return len(config.aux_layers) * config.target_d_model


@pytest.fixture(scope="module", params=[1, 2])
def world(request: pytest.FixtureRequest, tiny_target: Target) -> World:
    head, rng = tiny.random_head(tiny_target.config, seed=1, num_layers=request.param), np.random.default_rng(0)
    config = head.drafter.config
    draft = head.drafter.ready(Weights(tiny_target.params, head.weights()))
    count = np.array(LENGTHS, np.int32) - 1  # all entries but 0 are pending
    m = max(count)
    pending = Pending(
        token_ids=jnp.asarray(rng.integers(0, config.vocab_size, (3, m)), jnp.int32),
        aux_hidden_states=jnp.asarray(rng.standard_normal((3, m, _aux_size(config))), jnp.float32),
        count=jnp.asarray(count),
    )
    pages = empty_cache(config, num_pages=3 * MAX_PAGES, page_size=PAGE_SIZE)
    table = jnp.asarray(rng.permutation(3 * MAX_PAGES).reshape(3, MAX_PAGES), jnp.int32)
    seq_lens = jnp.asarray(count)
    pages, hidden = _consume(config)(draft, pages, table, seq_lens, pending)
    root_ids = jnp.take_along_axis(pending.token_ids, jnp.asarray(count)[:, None] - 1, axis=1)[:, 0]
    return World(draft, head, pages, table, seq_lens, root_ids, hidden)


def _propose(world: World, tree: Tree, rows: SamplerRows | None = None) -> Proposal:
    run = jax.jit(functools.partial(propose, config=world.head.drafter.config, tree=tree))
    return run(
        world.draft,
        pages=world.pages,
        prefix=Prefix(world.table, world.seq_lens + 1, FIRST_ENTRY),
        root_ids=world.root_ids,
        hidden=world.hidden,
        rows=rows or SamplerRows.greedy(3),
    )


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_without_output_rows_proposes_what_one_with_a_copy_of_the_targets_proposes(
    tiny_target: Target, is_tied: bool
) -> None:
    target, tree = tiny_target.params, DynamicTree(3, 3, 8)
    if is_tied:
        target = dataclasses.replace(target, head=None)
    own = tiny.random_head(tiny_target.config, seed=1, draft_vocab_size=64)
    columns = target.embedding.T if target.head is None else target.head
    own = dataclasses.replace(own, params=dataclasses.replace(own.params, head=columns))
    config = dataclasses.replace(own.drafter.config, has_own_head=False)
    shared = Head(Eagle3(config), dataclasses.replace(own.params, head=None), own.target_ids)
    assert len(jax.tree.leaves(shared.drafter.spec(), is_leaf=is_spec)) == len(jax.tree.leaves(shared.params))
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((3, 1, config.d_model)), jnp.float32)
    lens = jnp.array([5, 3, 1], jnp.int32)
    table = jnp.arange(3 * MAX_PAGES, dtype=jnp.int32).reshape(3, MAX_PAGES)
    pages, found = empty_cache(config, num_pages=3 * MAX_PAGES, page_size=PAGE_SIZE), []
    for head in (own, shared):
        draft = head.drafter.ready(Weights(target, head.weights()))
        world = World(draft, head, pages, table, lens, jnp.array([1, 2, 3], jnp.int32), hidden)
        found.append(_propose(world, tree))
    jax.tree.map(np.testing.assert_array_equal, *found)


def _log_probs(world: World, row: int, paths: dict[tuple[int, ...], np.ndarray], path: tuple[int, ...]) -> np.ndarray:
    """log q over the draft vocabulary after a path of target ids below the root, one pass per token."""
    if path not in paths:
        padded = np.zeros((3, 4), np.int32)
        padded[row, : len(path)] = path
        for depth, logits in enumerate(_forced_chain(world, padded)[: len(path) + 1]):
            paths[path[:depth]] = log_softmax(np.asarray(logits[row], np.float64))
    return paths[path]


def _forced_chain(world: World, token_ids: np.ndarray) -> list[jax.Array]:  # [batch, depth] -> depth x [batch, vocab]
    """Run the draft over given tokens, as a chain would."""
    return _chain_program(world.head.drafter.config)(
        world.draft, world.pages, world.table, world.seq_lens, world.hidden, token_ids
    )


@functools.cache
def _chain_program(config):
    def run(draft, pages, table, seq_lens, hidden, token_ids):
        prefix = Prefix(table, seq_lens + 1, FIRST_ENTRY)
        expand = _Expander(draft, config, pages, prefix, SamplerRows.greedy(len(token_ids)))
        level, only = _Level.of_root(config, hidden), jnp.zeros((len(token_ids), 1), jnp.int32)
        out = [draft_logits(draft.params.output, config, hidden)[:, 0]]
        for depth in range(1, token_ids.shape[1]):
            level = expand.descend(level, only, token_ids[:, depth - 1 : depth], depth)
            out.append(draft_logits(draft.params.output, config, level.hidden)[:, 0])
        return out

    return jax.jit(run)


def _paths(proposal: Proposal, row: int) -> list[tuple[int, ...]]:
    """The tokens from below the root to each node."""
    parents, tokens = proposal.parents[row].tolist(), proposal.token_ids[row].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(parents)):
        assert parents[node] < node, "a parent stands before its children"
        paths.append((*paths[parents[node]], tokens[node]))
    return paths


@pytest.mark.parametrize(
    ("world", "tree"),
    [(2, DynamicTree(3, 3, 8)), (1, DynamicTree(2, 2, 6)), (2, DynamicTree(4, 2, 5)), (1, chain(3))],
    indirect=["world"],
)
def test_dynamic_tree_is_the_best_of_eagle2s_candidates(world: World, tree: DynamicTree) -> None:
    proposal = _propose(world, tree)
    target_ids = world.head.target_ids
    np.testing.assert_array_equal(proposal.token_ids[:, 0], world.root_ids)
    for row in range(3):
        paths = _paths(proposal, row)
        assert len(set(paths)) == tree.num_nodes + 1, "a path is proposed once"
        assert proposal.depths[row].tolist() == [len(path) for path in paths]
        known: dict[tuple[int, ...], np.ndarray] = {}
        scores: dict[tuple[int, ...], float] = {(): 0.0}
        level: list[tuple[int, ...]] = [()]
        for _ in range(tree.depth):
            children = {}
            for path in level:
                log_probs = _log_probs(world, row, known, path)
                for i in np.argsort(-log_probs)[: tree.top_k]:
                    children[(*path, int(target_ids[i]))] = scores[path] + log_probs[i]
            scores |= children
            level = sorted(children, key=lambda path: -children[path])[: tree.top_k]
        best = sorted(scores, key=lambda path: -scores[path])[: tree.num_nodes + 1]
        assert set(paths) == set(best)


def test_static_tree_holds_the_best_children_of_each_node(world: World) -> None:
    tree = static_tree((3, 2, 1))
    proposal = _propose(world, tree)
    assert proposal.parents[0].tolist() == [0, *tree.parents]
    for row in range(3):
        known: dict[tuple[int, ...], np.ndarray] = {}
        paths = _paths(proposal, row)
        for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True), start=1):
            order = np.argsort(-_log_probs(world, row, known, paths[parent]))
            assert paths[node][-1] == world.head.target_ids[order[rank]]


def test_a_sampled_chain_is_drawn_with_the_targets_noise(world: World) -> None:
    """The first proposal is argmax of log q / T + noise, at the position after the root."""
    from specserve.speculative import sampling

    rows = dataclasses.replace(
        SamplerRows.greedy(3),
        temperature=jnp.asarray([0.0, 1.0, 2.0], jnp.float32),
        seed=jnp.asarray([[1, 0], [2, 0], [3, 9]], jnp.uint32),
    )
    logits = _forced_chain(world, np.zeros((3, 1), np.int32))[0][:, None]
    everything = sampling.noise(rows, world.seq_lens[:, None] + 1, jnp.arange(64, dtype=jnp.uint32))
    scores = sampling.scale(rows, logits) + everything[..., world.head.target_ids]
    expected = world.head.target_ids[np.argmax(scores[:, 0], axis=-1)]
    np.testing.assert_array_equal(_propose(world, chain(3), rows).token_ids[:, 1], expected)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_catching_up_in_pieces_equals_catching_up_at_once(tiny_target: Target, num_layers: int) -> None:
    head = tiny.random_head(tiny_target.config, seed=5, norm_output=True, num_layers=num_layers)
    config, rng = head.drafter.config, np.random.default_rng(1)
    draft = head.drafter.ready(Weights(tiny_target.params, head.weights()))
    token_ids = jnp.asarray(rng.integers(0, 64, (1, 9)), jnp.int32)
    aux = jnp.asarray(rng.standard_normal((1, 9, _aux_size(config))), jnp.float32)
    table = jnp.arange(MAX_PAGES, dtype=jnp.int32)[None]

    def run(draft: ReadyHead, cuts: list[int]) -> jax.Array:
        pages = empty_cache(config, num_pages=MAX_PAGES, page_size=PAGE_SIZE)
        hidden = jnp.zeros(())
        for start, stop in zip([0, *cuts], [*cuts, 9], strict=True):
            room = 9 - (stop - start)  # padded, as the state's pending rows are
            pending = Pending(
                jnp.pad(token_ids[:, start:stop], ((0, 0), (0, room))),
                jnp.pad(aux[:, start:stop], ((0, 0), (0, room), (0, 0))),
                jnp.asarray([stop - start], jnp.int32),
            )
            pages, hidden = _consume(config)(draft, pages, table, jnp.asarray([stop], jnp.int32), pending)
        return hidden

    assert_same(run(draft, [3, 4, 8]), run(draft, []), tolerance(lambda draft: run(draft, []), draft))
