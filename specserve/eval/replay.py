"""Acceptance of any tree without running it: what it would have accepted follows from what the head proposes at every
token of recorded answers.

Speculation changes no token, and what a head proposes depends on the tokens so far and not on the steps in which they
came. So the target answers plainly, and at each of its tokens the head proposes a few covering trees, each of which
contains what many smaller ones would have proposed: the longest chain all shorter ones; the candidates of dynamic trees
of one `top_k` all of these, since scores say which nodes a tree keeps; the union of static trees each of them. Steps
are then walked on the host. A test holds the counts equal to those of a live run.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specserve.errors import DataError
from specserve.eval.bench.step_times import prefill
from specserve.serve.engine.options import sampler_rows
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.tree import CandidatePool, DynamicTree, StaticTree, Tree


@dataclass(frozen=True)
class Proposed:
    """The covering trees that were proposed with each token of an answer as the root, which is node 0."""

    token_ids: np.ndarray  # [step, node] int32
    parents: np.ndarray  # [step, node] int32
    scores: np.ndarray | None  # [step, node] float32, see `tree.Proposal`; None of chains and static trees


@dataclass(frozen=True)
class Recording:
    """A plain answer, with the head's proposals at each of its tokens."""

    token_ids: np.ndarray  # [length + tail] int32: the answer, then what the target would have said after its end
    length: int  # tokens of the answer; its end-of-text token counts
    proposed: Mapping[Tree, Proposed]  # by covering tree

    def accepted(self, tree: Tree) -> np.ndarray:  # [step] int
        """Return how many draft tokens a step over this tree accepts with each token of the answer as its root."""
        cover = next(cover for cover in self.proposed if covers(cover, tree))
        found = self.proposed[cover]
        is_kept = _kept(cover, tree, found)
        num_roots = self.length - 1  # the last token is never a root
        current, n_accepted = np.zeros(num_roots, int), np.zeros(num_roots, int)
        is_walking = np.ones(num_roots, bool)
        for depth in range(1, tree.depth + 1):
            wanted = self.token_ids[depth : depth + num_roots, None]
            matches = is_kept[:num_roots] & (found.parents[:num_roots] == current[:, None])
            matches &= found.token_ids[:num_roots] == wanted
            is_walking &= matches.any(axis=1)
            current = np.where(is_walking, matches.argmax(axis=1), current)
            n_accepted += is_walking
        return n_accepted

    def replay(self, tree: Tree) -> Acceptance:
        """Return the acceptance of an answer that is made by steps over this tree alone."""
        found, at = Acceptance(accepted_per_depth=(0,) * tree.depth), 0
        n_accepted = self.accepted(tree)
        while at < self.length - 1:
            found = found.after_step(int(n_accepted[at]), depth=tree.depth, num_draft_tokens=tree.num_nodes)
            at += 1 + int(n_accepted[at])
        return found


@dataclass(frozen=True)
class Replayed:
    """The acceptance that a tree would have had over all recorded answers."""

    tree: Tree
    acceptance: Acceptance
    num_tokens: int  # after the first of each answer, those that prefill did not make

    @property
    def tokens_per_step(self) -> float:
        """The number of the answers' tokens per step. It is at most tau, which counts accepted tokens past an answer's
        end too."""
        return self.num_tokens / max(1, self.acceptance.num_steps)


def replay(recordings: Sequence[Recording], tree: Tree) -> Replayed:
    """Replay all answers with a tree."""
    found = sum((recording.replay(tree) for recording in recordings), Acceptance())
    return Replayed(tree, found, sum(recording.length - 1 for recording in recordings))


def record(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    trees: Sequence[Tree],
    *,
    max_tokens: int,
    eos_ids: Sequence[int],
    temperature: float = 0.0,
    seed: int = 0,  # prompt i is sampled with seed + i, as a request that says so would be
    on_answer: Callable[[int], None] = lambda _done: None,  # hears how many prompts are answered
) -> list[Recording]:
    """Answer the prompts plainly, in groups of as many as the runner has slots, and note what a head proposes. No
    engine may run over the runner, which forgets all sequences. Raises DataError where no prompt fits."""
    covering, depth = covering_trees(trees), max(tree.depth for tree in trees)
    room = runner.shapes.max_model_len - max_tokens - depth - 1
    fitting = [i for i, prompt in enumerate(prompts) if 0 < len(prompt) <= room]
    if not fitting:
        raise DataError(
            f"none of {len(prompts)} prompts leaves room for an answer of {max_tokens} tokens in a context of "
            f"{runner.shapes.max_model_len}; raise --max-model-len, or lower --max-tokens"
        )
    fitting.sort(key=lambda i: len(prompts[i]))  # alike ones together; no answer depends on it
    found: dict[int, Recording] = {}
    for start in range(0, len(fitting), runner.shapes.num_slots):
        group = fitting[start : start + runner.shapes.num_slots]
        params = [SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + i) for i in group]
        asked = [prompts[i] for i in group]
        recordings = _record_group(runner, asked, params, covering, depth=depth, eos_ids=eos_ids)
        found.update(zip(group, recordings, strict=True))
        on_answer(len(found))
    return [found[i] for i in sorted(found)]


def _record_group(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    covering: Sequence[Tree],
    *,
    depth: int,  # of the deepest tree
    eos_ids: Sequence[int],
) -> list[Recording]:
    max_tokens = params[0].max_tokens
    assert max_tokens is not None
    runner.reset()
    num_pages = [-(-(len(prompt) + max_tokens + depth + 1) // runner.shapes.page_size) for prompt in prompts]
    slots, pool = runner.shapes.spread(len(prompts)), runner.shapes.page_pool()
    drawn = []
    for slot, number, prompt, own in zip(slots, num_pages, prompts, params, strict=True):
        assert own.seed is not None
        pages = pool.allocate(number, rank=runner.shapes.rank_of(slot))
        drawn.append(prefill(runner, slot, prompt, pages, sampler_rows(own, own.seed, len(prompt))))
    tokens = [np.array(drawn)]
    lengths = np.where(np.isin(tokens[0], eos_ids), 1, max_tokens)  # as far as is known
    steps: list[list[Any]] = []
    while len(tokens) < lengths.max() + depth:
        if len(tokens) < lengths.max():
            steps.append([_propose(runner, slots, cover) for cover in covering])
        tokens.append(runner.step(slots, None).read().token_ids[: len(slots), 0])
        is_end = np.isin(tokens[-1], eos_ids) & (len(tokens) < lengths)
        lengths[is_end] = len(tokens)
    runner.reset()
    every = np.stack(tokens, axis=1).astype(np.int32)
    return [
        Recording(every[row, : length + depth], int(length), _of_row(covering, steps, row, int(length)))
        for row, length in enumerate(lengths)
    ]


def _propose(runner: Runner, slots: Sequence[int], cover: Tree) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    token_ids, parents, proposal = runner.propose(slots, cover, has_scores=True)
    return (
        token_ids,
        parents,
        None
        if proposal.scores is None
        else np.asarray(proposal.scores)[runner.shapes.rows_of(slots, len(proposal.token_ids))],
    )


def _of_row(covering: Sequence[Tree], steps: Sequence[Sequence[Any]], row: int, length: int) -> dict[Tree, Proposed]:
    found = {}
    for number, cover in enumerate(covering):
        own = [step[number] for step in steps[: length - 1]]
        nodes = own[0][0].shape[1] if own else 1
        token_ids = np.array([ids[row] for ids, _, _ in own], np.int32).reshape(-1, nodes)
        parents = np.array([above[row] for _, above, _ in own], np.int32).reshape(-1, nodes)
        has_scores = bool(own) and own[0][2] is not None
        scores = np.array([each[row] for _, _, each in own], np.float32) if has_scores else None
        found[cover] = Proposed(token_ids, parents, scores)
    return found


def covering_trees(trees: Sequence[Tree]) -> list[Tree]:
    """The trees that must be proposed so that every one of `trees` can be replayed."""
    chains = [tree for tree in trees if isinstance(tree, DynamicTree) and tree.top_k == 1]
    grown = [tree for tree in trees if isinstance(tree, DynamicTree) and tree.top_k > 1]
    fixed = [tree for tree in trees if isinstance(tree, StaticTree)]
    found: list[Tree] = [max(chains, key=lambda tree: tree.depth)] if chains else []
    for top_k in sorted({tree.top_k for tree in grown}):
        alike = [tree for tree in grown if tree.top_k == top_k]
        depth, num_nodes = max(tree.depth for tree in alike), max(tree.num_nodes for tree in alike)
        found.append(CandidatePool(depth, top_k, num_nodes, alike[0].source))
    if fixed:
        paths = sorted(set().union(*map(rank_paths, fixed)), key=lambda path: (len(path), path))
        parents = tuple(0 if len(path) == 1 else 1 + paths.index(path[:-1]) for path in paths)
        found.append(StaticTree(parents, tuple(path[-1] for path in paths), fixed[0].source))
    return found


def covers(cover: Tree, tree: Tree) -> bool:
    """Return whether the proposals of a tree can be read from those of `cover`."""
    if isinstance(tree, StaticTree) or isinstance(cover, StaticTree):
        both = isinstance(tree, StaticTree) and isinstance(cover, StaticTree)
        return both and set(rank_paths(tree)) <= set(rank_paths(cover))
    if isinstance(cover, CandidatePool):
        return cover.top_k == tree.top_k > 1 and cover.depth >= tree.depth and cover.num_nodes >= tree.num_nodes
    return cover.top_k == tree.top_k == 1 and cover.depth >= tree.depth


@functools.cache
def rank_paths(tree: StaticTree) -> tuple[tuple[int, ...], ...]:
    """Return for each proposed node the ranks of the children from the root down to it, such as (0, 1): the second
    best child of the best one."""
    paths: list[tuple[int, ...]] = [()]
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        paths.append((*paths[parent], rank))
    return tuple(paths[1:])


def _kept(cover: Tree, tree: Tree, found: Proposed) -> np.ndarray:  # [step, node] bool, without the root
    """Return which nodes of a covering proposal the tree would have proposed."""
    num_steps, num_nodes = found.parents.shape
    is_kept = np.zeros((num_steps, num_nodes), bool)
    if isinstance(cover, StaticTree):
        assert isinstance(tree, StaticTree)
        is_kept[:, 1:] = [path in rank_paths(tree) for path in rank_paths(cover)]
    elif not isinstance(cover, CandidatePool):  # a chain
        is_kept[:, 1 : 1 + tree.num_nodes] = True
    elif num_steps:
        assert found.scores is not None
        depths = np.zeros(num_nodes, int)  # the same in every step: levels stand one after another
        for node in range(1, num_nodes):
            depths[node] = 1 + depths[found.parents[0, node]]
        reached = 1 + np.flatnonzero(depths[1:] <= tree.depth)
        best = np.argsort(-found.scores[:, reached], axis=1, kind="stable")[:, : tree.num_nodes]  # earlier of equals
        np.put_along_axis(is_kept, reached[best], True, axis=1)
    return is_kept
