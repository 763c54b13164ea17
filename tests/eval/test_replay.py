"""Law 6: what a tree is said to accept without running it is what it accepts when it runs."""

import random

import numpy as np
import pytest
import tiny

from specserve.checkpoints.load import Target
from specserve.data.dataset import Prompt
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.errors import DataError
from specserve.eval.replay import Proposed, Recording, covering_trees, covers, record, replay
from specserve.serve.launch import Models, make_runner
from specserve.serve.programs.runner import Runner
from specserve.serve.settings import ServeRun
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.tree import Tree
from specserve.train.acceptance import AcceptanceMeter, Arm

WAYS = ("chain:3", "static:3x2x1", "tree:3x3x8")
BESIDE = ("chain:4", "static:2x2", "tree:4x3x12")  # so that what covers them is larger than each
SEED, MAX_NEW = 5, 16


def _tree(text: str) -> Tree:
    tree = parse_speculation(text)
    assert tree is not None
    return tree


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    rng = random.Random(11)
    return [Prompt("x", [rng.randrange(3, 64) for _ in range(n)]) for n in (1, 14, 9, 5, 16, 11)]


@pytest.fixture(scope="module")
def head(shallow_target: Target) -> Head:
    return tiny.random_head(shallow_target.config, seed=1)


@pytest.fixture(scope="module")
def runner(shallow_target: Target, head: Head, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Of three slots, so that the prompts make two groups."""
    trees = [_tree(text) for text in (*WAYS, *BESIDE)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        run = ServeRun(max_slots=3, max_model_len=64)
        return make_runner(Models("tiny", shallow_target, head, None), run, (None, *trees))


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_replay_equals_a_live_run(
    temperature: float, shallow_target: Target, head: Head, runner: Runner, prompts: list[Prompt]
) -> None:
    """Greedy and sampled, over answers that end by themselves and answers that are cut."""
    trees = [_tree(text) for text in (*WAYS, *BESIDE)]
    recordings = record(
        runner,
        [prompt.token_ids for prompt in prompts],
        trees,
        max_tokens=MAX_NEW,
        eos_ids=shallow_target.eos_ids,
        temperature=temperature,
        seed=SEED,
    )
    arms = [Arm(text, temperature) for text in WAYS]
    meter = AcceptanceMeter(shallow_target, head.drafter, arms, prompts, max_new_tokens=MAX_NEW, seed=SEED)
    for arm in arms:
        live = meter.measure(head.params, head.target_ids, arm).total
        found = replay(recordings, arm.tree)
        assert found.acceptance == live, arm.name
        assert live.num_accepted > 0
        assert 1 <= found.tokens_per_step <= live.tau


def test_a_covering_tree_covers_and_no_other_does() -> None:
    trees = [_tree(text) for text in (*WAYS, *BESIDE, "tree:2x4x6")]
    found = covering_trees(trees)
    assert [sum(covers(cover, tree) for cover in found) for tree in trees] == [1] * len(trees)
    assert len(found) == 4, "chains, static trees, and each width of dynamic ones"
    assert not covers(_tree("chain:3"), _tree("chain:4"))
    assert not covers(_tree("tree:3x3x8"), _tree("tree:2x3x8")), "it has not all candidates"
    assert not covers(_tree("static:2x1"), _tree("static:2x2"))


def test_steps_are_walked_and_the_answer_s_end_stops_them() -> None:
    """By hand: the answer is 5 6 7 8, then 9 would follow; the head is right but for what follows 6."""
    wrong = 1
    proposed = {5: (6, wrong), 6: (wrong, wrong), 7: (8, 9)}
    rows = [[root, *ahead] for root, ahead in proposed.items()]
    chain = Proposed(np.array(rows, np.int32), np.array([[0, 0, 1]] * 3, np.int32), None)
    recording = Recording(np.array([5, 6, 7, 8, 9, 1], np.int32), 4, {_tree("chain:2"): chain})
    assert recording.accepted(_tree("chain:2")).tolist() == [1, 0, 2]
    assert recording.accepted(_tree("chain:1")).tolist() == [1, 0, 1]
    assert recording.replay(_tree("chain:2")) == Acceptance(2, 4, (2, 1)), "the token past the end counts, as served"
    found = replay([recording], _tree("chain:2"))
    assert (found.tokens_per_step, found.acceptance.tau) == (1.5, 2.5)


def test_prompts_that_do_not_fit_are_refused(runner: Runner) -> None:
    with pytest.raises(DataError, match=r"none of 1 prompts leaves room.*--max-model-len"):
        record(runner, [[5] * 60], [_tree("chain:3")], max_tokens=MAX_NEW, eos_ids=())
