"""An oracle of acceptance: a plain answer, and at each of its tokens what a step over a tree would accept there.

Speculation changes no token, and what a head proposes depends on the tokens so far and not on the steps in which they
came. So the target answers plainly, the head proposes each tree at every token, and the steps are walked on the host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specserve.eval.bench.step_times import prefill
from specserve.serve.engine.options import sampler_rows
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.tree import Tree

Proposed = tuple[np.ndarray, np.ndarray]  # token ids and parents [batch, node] int32; node 0 is the root


@dataclass(frozen=True)
class Recording:
    """A plain answer, with what steps over each tree accept."""

    token_ids: np.ndarray  # [length + tail] int32: the answer, then what the target would have drawn after its end
    length: int  # tokens of the answer; its end-of-text token counts
    accepted: Mapping[Tree, np.ndarray]  # [length - 1] int: draft tokens accepted with each token as the root

    def replay(self, tree: Tree) -> Acceptance:
        """Return the acceptance of an answer that is made by steps over this tree alone."""
        found, at = Acceptance(accepted_per_depth=(0,) * tree.depth), 0
        while at < self.length - 1:
            n_accepted, room = int(self.accepted[tree][at]), self.length - 1 - at
            found = found.after_step(
                n_accepted, depth=tree.depth, num_draft_tokens=tree.num_nodes, num_emitted=min(room, n_accepted + 1)
            )
            at += 1 + n_accepted
        return found


def record(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    trees: Sequence[Tree],
    *,
    max_tokens: int,
    eos_ids: Sequence[int],
    temperature: float,
    seed: int,  # prompt i is sampled with seed + i
) -> list[Recording]:
    """Answer the prompts plainly, in groups of as many as the runner has slots. The runner forgets all sequences."""
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + i) for i in range(len(prompts))
    ]
    size = runner.shapes.num_slots
    groups = [slice(start, start + size) for start in range(0, len(prompts), size)]
    return [
        recording
        for group in groups
        for recording in _record_group(runner, prompts[group], params[group], trees, eos_ids)
    ]


def _record_group(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    trees: Sequence[Tree],
    eos_ids: Sequence[int],
) -> list[Recording]:
    max_tokens, tail = params[0].max_tokens, max(tree.depth for tree in trees)
    assert max_tokens is not None
    runner.reset()
    slots, pool = runner.shapes.batches.spread(len(prompts)), runner.shapes.page_pool()
    drawn = []
    for slot, prompt, own in zip(slots, prompts, params, strict=True):
        assert own.seed is not None
        num_pages = -(-(len(prompt) + max_tokens + tail + 1) // runner.shapes.page_size)
        pages = pool.allocate(num_pages, rank=runner.shapes.batches.rank_of(slot))
        drawn.append(prefill(runner, slot, prompt, pages, sampler_rows(own, own.seed, len(prompt))))
    tokens: list[np.ndarray] = [np.array(drawn)]
    steps: list[dict[Tree, Proposed]] = []
    while len(tokens) < max_tokens + tail:
        steps.append({tree: runner.propose(slots, tree)[:2] for tree in trees})
        tokens.append(runner.step(slots, None).read().token_ids[: len(slots), 0])
    runner.reset()
    recordings = []
    for row, answer in enumerate(np.stack(tokens, axis=1).astype(np.int32)):
        ends = np.flatnonzero(np.isin(answer[:max_tokens], eos_ids))
        length = min([max_tokens, *(ends + 1)])
        accepted = {}
        for tree in trees:
            proposed = [(token_ids[row], parents[row]) for token_ids, parents in (step[tree] for step in steps)]
            rows = [_walk(*proposed[at], answer[at + 1 :]) for at in range(length - 1)]
            accepted[tree] = np.array(rows, int)
        recordings.append(Recording(answer[: length + tail], int(length), accepted))
    return recordings


def _walk(token_ids: np.ndarray, parents: np.ndarray, following: np.ndarray) -> int:
    """Return how many of the tokens that follow the root a path of this tree carries."""
    node = n_accepted = 0
    while True:
        children = np.flatnonzero((parents == node) & (token_ids == following[n_accepted]))
        node = int(min(children[children > 0], default=0))
        if not node:
            return n_accepted
        n_accepted += 1
