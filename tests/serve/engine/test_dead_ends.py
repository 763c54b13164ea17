"""Options that ban every token: refused where that shows at once, else an end that says so, the same however the
engine speculates."""

import itertools
from typing import Any

import pytest
from engines import EOS, Ask, Dice, Letters, Reference, greedy, make_engine, run, serving, submit

from specserve.errors import RequestError
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import FinishReason, SamplingParams

PROMPT = tuple(range(20, 37))


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [EOS], "min_tokens": 1},
        {"allowed_token_ids": [7, 8], "stop_token_ids": [7, 8, 9], "min_tokens": 3, "ignore_eos": True},
        {"allowed_token_ids": [3, 4], "bad_words": ["d", "e"]},
        {"allowed_token_ids": [3, EOS], "bad_words": ["d"], "min_tokens": 1},
        {"bad_words": list(Letters.alphabet)},
    ],
    ids=str,
)
def test_a_dead_end_at_the_start_is_refused(runner: Runner, options: dict[str, Any]) -> None:
    engine = make_engine(runner)
    with pytest.raises(RequestError, match="ban") as error:
        engine.submit(PROMPT, greedy(9, **options), lambda _delta: None)
    assert error.value.param in ("allowed_token_ids", "bad_words")
    engine.stop()


def _dead_ends() -> list[SamplingParams]:
    """Of two letters no pair may come, so that the second token of the answer is already the last; of three, no triple
    of one and no pair of two."""
    pairs = ["".join(pair) for pair in itertools.product("de", repeat=2)]
    others = ["".join(pair) for pair in itertools.permutations("def", 2)]
    found = []
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"max_tokens": 12, "temperature": temperature, "seed": 4, "ignore_eos": True}
        found.append(SamplingParams(allowed_token_ids=[3, 4], bad_words=pairs, **options))
        found.append(
            SamplingParams(allowed_token_ids=[3, 4, 5], bad_words=["dddd", "eeee", "ffff", *others], **options)
        )
    return found


def test_a_dead_end_later_ends_the_sequence_alike_everywhere(runner: Runner, reference: Reference) -> None:
    """With its tokens before, an error for its own client, and no harm to others, nor to the prompt's cached pages."""
    dead = [Ask(PROMPT, params) for params in _dead_ends()]
    plain = run(reference.engine, dead)
    neighbour = Ask(PROMPT, greedy(30, ignore_eos=True))
    assert reference.is_firm(neighbour)
    for controller in (None, Dice(3)):
        with serving(make_engine(runner, controller)) as engine:
            inboxes = [submit(engine, ask)[1] for ask in [*dead, neighbour, *dead, neighbour]]
            for ask, inbox, own in zip(dead * 2, [*inboxes[:4], *inboxes[5:9]], plain * 2, strict=True):
                last, expected = inbox.wait(), own.wait()
                assert inbox.token_ids == own.token_ids, ask
                assert (last.finish_reason, last.is_refused) == (FinishReason.ERROR, True)
                assert (
                    last.error
                    == expected.error
                    == (f"after {len(own.token_ids)} tokens of the answer, the request's options ban every token")
                )
            reference.check(neighbour, inboxes[4])
            reference.check(neighbour, inboxes[9])
    assert {len(own.token_ids) for own in plain} == {1, 3}
