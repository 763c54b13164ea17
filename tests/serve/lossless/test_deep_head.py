"""A head of two layers, one with a window, and of its own width, served: no token changes, a prefix hit accepts what a
miss does, and the acceptance that a training run measures is the one that is served."""

import random
from pathlib import Path

import pytest
import tiny
from engines import (
    SEEDS,
    VOCAB,
    Ask,
    Fixed,
    Reference,
    compile_programs,
    make_engine,
    make_runner,
    moved_weights,
    run,
    serving,
)

from specserve.checkpoints.load import Target
from specserve.data.dataset import Prompt
from specserve.drafters.interface import Head
from specserve.drafters.layers import windowed
from specserve.drafters.speculation import parse_speculation
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.acceptance import Acceptance
from specserve.train.acceptance import AcceptanceMeter, arms

TREE = "tree:3x2x6"
PROMPT = tuple(random.Random(8).choices(range(3, VOCAB), k=41))
# sampled hot, where the shared noise decides: there even a random head is accepted
PARAMS = [SamplingParams(max_tokens=30, seed=seed, temperature=2.0, ignore_eos=True) for seed in range(4)]


@pytest.fixture(scope="module", params=[{}, pytest.param(tiny.LATENTS, marks=pytest.mark.slow)], ids=["", "latents"])
def deep_head(request: pytest.FixtureRequest, tiny_target: Target) -> Head:
    shape = {"num_layers": 2, "d_model": 24, "has_embedding": True, "layers": windowed((0, 11))}
    return tiny.random_head(tiny_target.config, seed=1, **shape, **request.param)


@pytest.fixture(scope="module")
def deep_runner(tiny_target: Target, deep_head: Head, kept: Path | None) -> Runner:
    runner = make_runner(tiny_target, deep_head, TREE, has_constrained=False, folder=kept)
    compile_programs(runner)
    return runner


def test_speculation_changes_no_token_and_a_hit_no_acceptance(
    tiny_target: Target, deep_head: Head, deep_runner: Runner, reference: Reference
) -> None:
    """Prompts of one chunk and of three, asked twice: the second time all but a rest is in the cache."""
    asks = [Ask(PROMPT[: 41 - 13 * i], params) for i, params in enumerate(PARAMS)]
    with serving(make_engine(deep_runner, Fixed(parse_speculation(TREE)))) as engine:
        for ask in asks:
            expected = reference.answer(ask)
            engine.flush_cache()
            found = [run(engine, [ask])[0] for _ in range(2)]
            stats = [inbox.wait().stats for inbox in found]
            assert found[0].token_ids == found[1].token_ids == expected.token_ids
            assert stats[0] is not None
            assert stats[1] is not None
            assert (stats[0].num_cached_tokens, stats[1].num_cached_tokens) == (0, (len(ask.prompt) - 1) // 8 * 8)
            assert stats[0].num_steps == stats[1].num_steps
            assert stats[0].accepted_per_depth == stats[1].accepted_per_depth
            assert stats[0].num_accepted > 0, "nothing was accepted, so nothing was tested"
            for seed in SEEDS:
                engine.flush_cache()
                with moved_weights(deep_runner, tiny_target, deep_head, seed):
                    again = run(engine, [ask])[0]
                said = again.token_ids, again.wait().stats.accepted_per_depth  # type: ignore[union-attr]
                assert said == (expected.token_ids, stats[0].accepted_per_depth), f"{ask}: a near-tie, another seed"


def test_served_acceptance_is_what_training_measures(tiny_target: Target, deep_head: Head, deep_runner: Runner) -> None:
    [arm] = arms((TREE,), (2.0,))
    prompts = [Prompt("a", list(PROMPT[: 41 - 13 * i])) for i in range(4)]
    meter = AcceptanceMeter(tiny_target, deep_head.drafter, [arm], prompts, max_new_tokens=30)
    replayed = meter.measure(deep_head.params, deep_head.target_ids, arm)
    params = [SamplingParams(max_tokens=30, temperature=2.0, seed=i) for i in range(len(prompts))]
    with make_engine(deep_runner, Fixed(arm.tree)) as engine:
        stats = [done.stats for done in engine.generate([prompt.token_ids for prompt in prompts], params)]
    assert replayed.total == sum(stats, Acceptance())
    assert replayed.total.num_accepted > 2
