"""When a draft that was left behind reads what the target has run alone: against loads whose best choice is known."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from specserve.speculative.controller import Controller
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import chain

WIDTH, FEW, MANY = 8, 2, 16
TREE = chain(3)
RATES = (0.8, 0.8, 0.8)
TOKENS = 1 + float(np.cumprod(RATES).sum())  # of a step over the chain, for each sequence
# plain steps and chains: the chain makes 1.4 of plain decoding's tokens for few sequences, and 0.6 for many
SECONDS = {
    StepProgram(FEW, WIDTH, is_alone=True): 0.010,
    StepProgram(FEW, WIDTH, TREE): 0.010 * TOKENS / 1.4,
    StepProgram(MANY, WIDTH, is_alone=True): 0.016,
    StepProgram(MANY, WIDTH, TREE): 0.016 * TOKENS / 0.6,
}
PER_TOKEN = 0.001  # seconds of reading, by what a row of the largest plain step takes
LENGTH = 200  # tokens that a sequence has when it comes


class Load:
    """Sequences that are served, so many at a time: what is made of their seconds."""

    def __init__(self) -> None:
        self.controller = Controller(SECONDS, prior=RATES)
        self.num_unread, self.seconds, self.tokens, self.read_seconds = 0, 0.0, 0.0, 0.0
        self.chosen: list[bool] = []  # whether each step is over the tree

    def serve(self, batch: int, num_steps: int) -> None:
        """Serve new sequences. Their prompts are run with the draft or without, as the last choice was."""
        estimates = [self.controller.start(None) for _ in range(batch)]
        self.num_unread = 0 if self.controller.is_following else LENGTH * batch
        choices = [StepProgram(batch, WIDTH, is_alone=True), StepProgram(batch, WIDTH, TREE)]
        for _ in range(num_steps):
            program = self.controller.choose(estimates, choices, self.num_unread)
            if program.tree is not None:
                self.read_seconds += PER_TOKEN * self.num_unread
                self.num_unread = 0
                self.controller.observe(estimates, TREE, np.array([_accepted(each) for each in range(batch)]))
            elif self.num_unread or not self.controller.is_following:
                self.num_unread += batch
            self.controller.observe_seconds(program, SECONDS[program])
            self.seconds += SECONDS[program]
            self.tokens += batch * (TOKENS if program.tree else 1.0)
            self.chosen.append(program.tree is not None)


_UNIFORM = itertools.cycle(np.random.default_rng(0).random((999, 3)).tolist())


def _accepted(_row: int) -> int:
    return int(np.cumprod(np.array(next(_UNIFORM)) < RATES).sum())


def _worth(batch: int, num_steps: int) -> float:
    """The seconds that speculating from the first step on would win, before any reading."""
    return num_steps * SECONDS[StepProgram(batch, WIDTH, is_alone=True)] * (1.4 / 1.05 - 1.0)


def test_nothing_is_read_where_speculation_never_pays() -> None:
    """But for looks, of which reading is a part of the price: they are as rare as their share of the time allows."""
    load = Load()
    load.serve(MANY, 3000)
    assert load.controller.is_following is False
    assert sum(load.chosen) > 0, "a look, before anything is known"
    assert load.read_seconds < 0.02 * load.seconds
    assert sum(load.chosen[500:]) <= 0.005 * 2500


@pytest.mark.parametrize("num_steps", [8, 60, 100, 400])
def test_reading_begins_when_waiting_has_cost_as_much(num_steps: int) -> None:
    """Few sequences after many: a short while of them is not worth it, in a long one it is, and which it will be is
    not known. What is lost is never more than twice the reading, and that of what comes meanwhile."""
    load = Load()
    load.serve(MANY, 300)
    before = load.read_seconds, len(load.chosen)
    load.serve(FEW, num_steps)
    chosen, read_seconds = load.chosen[before[1] :], load.read_seconds - before[0]
    price = PER_TOKEN * FEW * LENGTH
    if _worth(FEW, num_steps) < 0.9 * price:
        assert not any(chosen)
        assert read_seconds == 0
        return
    first = chosen.index(True)
    assert read_seconds == pytest.approx(price + PER_TOKEN * FEW * first), "once, and what has come meanwhile"
    assert 0.9 * price <= _worth(FEW, first) <= 1.2 * price
    assert np.mean(chosen[first:]) > 0.9


def test_loads_that_change_lose_no_more_than_twice_what_must_be_lost() -> None:
    rng, load = np.random.default_rng(3), Load()
    load.serve(MANY, 300)
    best, start = 0.0, load.seconds + load.read_seconds
    before = load.tokens
    phases: Sequence[tuple[int, int]] = [
        (FEW if number % 2 else MANY, int(rng.choice([10, 60, 300]))) for number in range(60)
    ]
    for batch, num_steps in phases:
        tokens = load.tokens
        load.serve(batch, num_steps)
        made = load.tokens - tokens  # an oracle takes so long for as many
        plain = made / batch * SECONDS[StepProgram(batch, WIDTH, is_alone=True)]
        reading = PER_TOKEN * LENGTH * batch
        best += min(plain, plain / 1.4 + reading) if batch == FEW else plain
    took = load.seconds + load.read_seconds - start
    assert before < load.tokens
    reading = PER_TOKEN * LENGTH * FEW
    most = reading * (2 + 0.5 * PER_TOKEN * FEW / _worth(FEW, 1)) * sum(batch == FEW for batch, _ in phases)
    assert took - best < most + 0.02 * took


def test_a_draft_that_keeps_up_never_waits() -> None:
    """Nor where a prompt's beginning was found in the cache, without its entries."""
    load = Load()
    load.serve(FEW, 50)
    assert load.controller.is_following
    estimates = [load.controller.start(None) for _ in range(FEW)]
    choices = [StepProgram(FEW, WIDTH, is_alone=True), StepProgram(FEW, WIDTH, TREE)]
    assert load.controller.choose(estimates, choices, LENGTH).tree == TREE
