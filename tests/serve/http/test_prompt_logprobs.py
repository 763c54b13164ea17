"""Log-probabilities of a prompt are those of one forward over it: whatever chunks it is run in, whatever is cached,
whatever runs beside it, and with speculation."""

import numpy as np
import pytest
import tiny
from engines import Ask, Dice, Reference, compile_programs, greedy, make_engine, make_runner, run, serving
from rounding import assert_within
from spread import mesh_of, spread_target, target_of

from specserve.serve.programs.runner import Runner

PROMPT = tuple(int(i) for i in np.random.default_rng(8).integers(3, 64, 61))


def test_a_prompt_is_scored_as_by_one_forward(runner: Runner, reference: Reference) -> None:
    _check_scores(runner, reference)


@pytest.mark.slow
def test_prompts_of_data_ranks_are_scored_side_by_side() -> None:
    mesh = mesh_of("data=2")
    runner = make_runner(spread_target("dense", mesh), None, "off", has_constrained=False, mesh=mesh)
    compile_programs(runner)
    _check_scores(runner, Reference(target_of("dense")))


def _check_scores(runner: Runner, reference: Reference) -> None:
    lengths = (1, 2, 15, 16, 17, 33, 61)
    asks = [Ask(PROMPT[:n], greedy(4, prompt_logprobs=k)) for n, k in zip(lengths, (0, 3, 20, 1, 2, 0, 5), strict=True)]
    plain = [Ask(PROMPT[:n], greedy(4)) for n in lengths]
    with serving(make_engine(runner, Dice(5))) as engine:
        run(engine, plain)  # now most of it is cached
        inboxes = run(engine, [*asks, *plain])
    for ask, inbox, other in zip(asks, inboxes, inboxes[len(asks) :], strict=False):
        assert inbox.token_ids == other.token_ids
        reported = [delta.prompt for delta in inbox.deltas if delta.prompt]
        assert len(reported) == 1
        assert reported[0] == inbox.deltas[0].prompt or not inbox.deltas[0].token_ids
        assert [token.token_id for token in reported[0]] == list(ask.prompt)
        assert (reported[0][0].logprobs, reported[0][0].rank) == (None, 0)
        logits = tiny.target_logits(reference.target, ask.prompt)[:-1]
        expected = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
        for row, scores, token in zip(expected, logits, reported[0][1:], strict=True):
            assert token.logprobs is not None
            bound = 2 * reference.off
            assert_within(token.logprobs.logprob, row[token.token_id], bound)
            best = np.sort(row)[::-1][: ask.params.prompt_logprobs]
            assert_within(np.array([value for _, value in token.logprobs.top]), best, bound)
            own = scores[token.token_id]
            assert 1 + np.sum(scores > own + bound) <= token.rank <= 1 + np.sum(scores > own - bound)
    assert not any(delta.prompt for inbox in inboxes[len(asks) :] for delta in inbox.deltas)


def test_a_preempted_prompt_is_reported_once(runner: Runner) -> None:
    """Room for one of two long answers: the younger gives its pages back, and is prefilled again."""
    asks = [Ask(PROMPT[i : i + 30], greedy(60, prompt_logprobs=1, ignore_eos=True)) for i in (0, 9)]
    with serving(make_engine(runner, Dice(2), num_pages=14)) as engine:
        inboxes = run(engine, asks)
        assert engine.stats().num_preemptions
    for ask, inbox in zip(asks, inboxes, strict=True):
        assert [len(delta.prompt) for delta in inbox.deltas if delta.prompt] == [len(ask.prompt)]
