"""Grammars over trees: what a mask forbids is never said, what it allows is what plain decoding says, and a mask that
fails ends its own request alone."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engines import Ask, Dice, Grammar, Inbox, Reference, greedy, make_engine, run, serving, submit

from specserve.errors import RequestError
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import FinishReason, GrammarSpec, SamplingParams

PROMPT = tuple(range(3, 44))


def _params(seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=30, seed=seed, ignore_eos=seed % 2 == 0, **options)


def test_a_grammar_speculative_equals_plain(runner: Runner, reference: Reference) -> None:
    """In one batch with requests that have none; whatever else their options say."""
    params = [greedy(30), *[_params(seed) for seed in range(6)], _params(8, top_k=5, presence_penalty=1.0, logprobs=2)]
    asks = [Ask(PROMPT[:n], own, is_constrained=i % 3 != 2) for i, own in enumerate(params) for n in (5, 21, 37)]
    with serving(make_engine(runner, Dice(3))) as engine:
        inboxes = run(engine, asks)
    accepted = 0
    for ask, inbox in zip(asks, inboxes, strict=True):
        reference.check(ask, inbox)
        if ask.is_constrained:
            Grammar().accept(inbox.token_ids)
            accepted += inbox.wait().stats.num_accepted  # type: ignore[union-attr]
    assert accepted > 20, "little was accepted, so little was tested"


MOST_LETTERS = GrammarSpec("regex", "[a-bd-zA-V ]{9,25}[W-Z0-9]")


def test_what_follows_a_grammar_is_the_same_with_speculation(runner: Runner, reference: Reference) -> None:
    """Beside requests that follow none; and the answers do follow it."""
    params = [greedy(40, grammar=MOST_LETTERS), *[_params(seed, grammar=MOST_LETTERS) for seed in (1, 3, 5)], greedy(9)]
    asks = [Ask(PROMPT[:n], own) for own in params for n in (6, 29)]
    accepted = 0
    with serving(make_engine(runner, Dice(7))) as engine:
        inboxes = run(engine, asks)
    for ask, inbox in zip(asks, inboxes, strict=True):
        reference.check(ask, inbox)
        if ask.params.grammar:
            last = inbox.wait()
            assert re.fullmatch(MOST_LETTERS.text, inbox.text) or last.finish_reason != FinishReason.STOP
            accepted += last.stats.num_accepted  # type: ignore[union-attr]
    assert accepted > 5, "little was accepted, so little was tested"


class Listed(Grammar):
    """Has a length, as a list of what was said has one, which is 0 at first."""

    def __len__(self) -> int:
        return self.state


def test_a_mask_that_is_false_in_itself_masks_all_the_same(runner: Runner, reference: Reference) -> None:
    ask, inbox = Ask(PROMPT[:9], greedy(12, ignore_eos=True), is_constrained=True), Inbox()
    with serving(make_engine(runner, Dice(2))) as engine:
        engine.submit(ask.prompt, ask.params, inbox, token_mask=Listed())
        reference.check(ask, inbox)
    assert inbox.wait().finish_reason == FinishReason.LENGTH


class Faulty(Grammar):
    """Fails in its own way when it is called for the third time, or for the first."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.num_calls = fault, 0

    def masks(self, parents: Sequence[int], token_ids: Sequence[int]) -> np.ndarray:
        self.num_calls += 1
        masks = super().masks(parents, token_ids)
        if self.fault == "in its first call" or (self.fault == "in a step" and self.num_calls == 3):
            raise ValueError("no grammar here")
        if self.num_calls < 3:
            return masks
        broken = {
            "by its shape": masks[:, 1:],
            "by its type": masks.astype(np.int16),
            "by allowing nothing": masks * (np.arange(len(masks)) != len(masks) - 1)[:, None].astype(np.uint8),
        }
        return broken.get(self.fault, masks)

    def accept(self, token_ids: Sequence[int]) -> None:
        super().accept(token_ids)
        if self.fault == "in accept" and self.num_calls == 3:
            raise ValueError("no grammar here")


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("in its first call", "ValueError: no grammar here"),
        ("in a step", "ValueError: no grammar here"),
        ("in accept", "ValueError: no grammar here"),
        ("by its shape", r"ValueError: a token mask returned uint8 \(4, 7\); expected uint8 \(4, 8\)"),
        ("by its type", "ValueError: a token mask returned int16"),
        ("by allowing nothing", "the first row with a bit"),
    ],
)
def test_a_failing_mask_ends_its_own_request(runner: Runner, reference: Reference, fault: str, error: str) -> None:
    """And what its prompt left in the prefix cache is sound."""
    engine = make_engine(runner, Dice(5))
    failing = Inbox()
    neighbours = [Ask(PROMPT, greedy(20)), Ask(PROMPT, _params(4), is_constrained=True), Ask(PROMPT[:9], _params(2))]
    engine.submit(PROMPT, greedy(20, ignore_eos=True), failing, token_mask=Faulty(fault))
    inboxes = [submit(engine, ask)[1] for ask in neighbours]
    with serving(engine):
        last = failing.wait()
        for ask, inbox in zip(neighbours * 2, inboxes + run(engine, neighbours), strict=True):
            reference.check(ask, inbox)
        assert inbox.wait().stats.num_cached_tokens == 8  # type: ignore[union-attr]
    assert last.finish_reason == FinishReason.ERROR
    assert re.search(error, str(last.error)), last.error
    Grammar().accept(failing.token_ids)
    assert engine.stats().num_rebuilds == 0


def test_masks_need_constrained_programs(lookup_runner: Runner) -> None:
    with pytest.raises(RequestError, match="constrained=False") as error:
        submit(make_engine(lookup_runner), Ask(PROMPT, greedy(1), is_constrained=True))
    assert error.value.param == "token_mask"


def test_a_grammar_that_need_not_be_is_left_out_where_it_cannot(lookup_runner: Runner, runner: Runner) -> None:
    """The engine has no programs for masks, or the grammar is none."""
    for engine, text in ((make_engine(lookup_runner), "x"), (make_engine(runner), "(")):
        for is_needed in (False, True):
            params = greedy(4, grammar=GrammarSpec("regex", text, is_needed=is_needed))
            if is_needed:
                with pytest.raises(RequestError, match="grammar"):
                    submit(engine, Ask(PROMPT, params))
            else:
                request, _ = submit(engine, Ask(PROMPT, params))
                assert request.token_mask is None
