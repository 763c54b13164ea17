"""When a draft that was left behind reads what the target has run alone: against loads whose best choice is known."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from specserve.speculative.controller import Controller
from specserve.speculative.program import StepProgram
from specserve.speculative.reading import FOLLOWING
from specserve.speculative.tree import chain

WIDTH, FEW, MANY = 8, 2, 16
TREE = chain(3)
RATES = (0.8, 0.8, 0.8)
TOKENS = 1 + float(np.cumprod(RATES).sum())  # of a step over the chain, for each sequence
# plain steps and chains: the chain makes 1.4 of plain decoding's tokens for few sequences, and 0.6 for many
ONE = {
    StepProgram(1, WIDTH, is_alone=True): 0.010,
    StepProgram(1, WIDTH): 0.0105,
    StepProgram(1, WIDTH, TREE): 0.010 * TOKENS / 1.4,
    StepProgram(1, WIDTH, kind="reading", chunk=64): 0.064,
}
SECONDS = {
    StepProgram(FEW, WIDTH, is_alone=True): 0.010,
    StepProgram(FEW, WIDTH, TREE): 0.010 * TOKENS / 1.4,
    StepProgram(MANY, WIDTH, is_alone=True): 0.016,
    StepProgram(MANY, WIDTH, TREE): 0.016 * TOKENS / 0.6,
    StepProgram(MANY, WIDTH, chain(1)): 0.016 * 1.8 / 0.7,
    StepProgram(1, WIDTH, kind="reading", chunk=64): 0.064,
}
FOLLOWED = {StepProgram(MANY, WIDTH): 0.016, StepProgram(FEW, WIDTH): 0.0105}  # plain steps that the draft follows
PER_TOKEN = 0.001  # seconds of reading
LENGTH = 200  # tokens that a sequence has when it comes


class Load:
    """Sequences that are served, so many at a time: what is made of their seconds."""

    def __init__(self, costs: Mapping[StepProgram, float] = SECONDS) -> None:
        self.controller, self.costs = Controller(costs, prior=RATES), costs
        self.num_unread, self.seconds, self.tokens, self.read_seconds = 0, 0.0, 0.0, 0.0
        self.chosen: list[bool] = []  # whether each step is over the tree

    def serve(self, batch: int, num_steps: int) -> None:
        """Serve new sequences. Their prompts are run with the draft or without, as the last choice was."""
        estimates = [self.controller.start(None) for _ in range(batch)]
        self.num_unread = 0 if self.controller.is_following else LENGTH * batch
        choices = [program for program in SECONDS if program.batch == batch]
        for _ in range(num_steps):
            program = self.controller.choose(estimates, choices, self.num_unread)
            num_read = 0 if program.tree is None else self.num_unread
            made = StepProgram(batch, WIDTH) if program.tree is None and self.controller.is_following else program
            is_followed = made != program and made in self.costs
            self.controller.stepped(made if is_followed else program, 1, batch, num_read)
            if program.tree is not None:
                self.read_seconds += PER_TOKEN * num_read
                self.num_unread = 0
                accepted = [min(_accepted(each), program.tree.depth) for each in range(batch)]
                self.controller.observe(estimates, program.tree, np.array([accepted]))
            elif self.num_unread or not self.controller.is_following:
                self.num_unread += batch
            self.controller.observe_seconds(program, self.costs[program])
            self.seconds += self.costs[program]
            if is_followed:
                self.seconds += FOLLOWING * self.costs[program]
            self.tokens += batch * (TOKENS if program.tree else 1.0)
            self.chosen.append(program.tree is not None)


_UNIFORM = itertools.cycle(np.random.default_rng(0).random((999, 3)).tolist())


def _accepted(_row: int) -> int:
    return int(np.cumprod(np.array(next(_UNIFORM)) < RATES).sum())


def _worth(batch: int, num_steps: int) -> float:
    """The seconds that speculating from the first step on would win, before any reading."""
    return num_steps * SECONDS[StepProgram(batch, WIDTH, is_alone=True)] * (1.4 / 1.05 - 1.0)


@pytest.mark.parametrize(("share", "has_looks"), [(0.75, True), (0.6, False)])
def test_nothing_is_read_where_speculation_never_pays(share: float, *, has_looks: bool) -> None:
    """But for looks, of which reading is a part of the price: they are as rare as their share of the time allows. What
    a chain takes may be half as much again as what it took when it was measured, and hardly more than that: the draft
    does not follow in order to see it."""
    load = Load(SECONDS | {StepProgram(MANY, WIDTH, chain(1)): 0.016 * 1.8 / share})
    load.serve(MANY, 1)
    assert load.controller.is_following == has_looks
    load.serve(MANY, 3000)
    assert load.controller.is_following is False
    assert (0 < sum(load.chosen) < 20) == has_looks, "looks, before anything is known"
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


class Alone:
    """One client, whose answers come one after another, with a head that accepts so much in each of them. Prompts that
    the draft follows take longer by a tenth of what reading them would take."""

    def __init__(self, chain_costs: float = TOKENS / 1.4) -> None:
        self.costs = ONE | {StepProgram(1, WIDTH, TREE): 0.010 * chain_costs}
        self.controller = Controller(self.costs, prior=RATES)
        self.choices = [StepProgram(1, WIDTH, is_alone=True), StepProgram(1, WIDTH, TREE)]
        self.random = np.random.default_rng(5)

    def answer(self, rate: float, num_tokens: int = 30) -> tuple[float, float]:
        """Return what an answer takes to what plain steps would take, and the share of the steps that speculate."""
        controller = self.controller
        has_read, num_unread = controller.follows_prompts, 0 if controller.follows_prompts else LENGTH
        seconds, estimate, chosen = FOLLOWING * PER_TOKEN * LENGTH * has_read, controller.start(None), []
        left = num_tokens
        while left > 0:
            program = controller.choose([estimate], self.choices, num_unread)
            is_followed = program.tree is None and controller.is_following
            made = StepProgram(1, WIDTH) if is_followed else program
            controller.stepped(made, 1, 1, 0 if program.tree is None else num_unread)
            num_accepted = int(np.cumprod(self.random.random(3) < rate).sum()) if program.tree else 0
            if program.tree is not None:
                seconds += PER_TOKEN * num_unread
                num_unread = 0
                controller.observe([estimate], program.tree, np.array([[num_accepted]]))
            elif not controller.is_following:
                num_unread += 1
            controller.observe_seconds(made, self.costs[made])
            seconds += self.costs[made]
            left -= 1 + num_accepted
            chosen.append(program.tree is not None)
        return seconds / (0.010 * (num_tokens - left)), float(np.mean(chosen))


def test_a_head_left_out_after_a_bad_answer_comes_back_with_a_following_one() -> None:
    """Answers are so short that none of them would pay for reading its prompt, but following the next one costs little.
    A head that never pays loses no more by that than looks may, and is looked at in some of its answers."""
    load = Alone()
    for _ in range(5):
        load.answer(0.1)
    assert not load.controller.is_following
    shares = [load.answer(0.8)[1] for _ in range(40)]
    assert np.mean(shares[20:]) > 0.9, shares
    never = Alone(chain_costs=TOKENS)
    took, chosen = zip(*(never.answer(0.1) for _ in range(400)), strict=True)
    assert np.mean(took[40:]) < 1.01, np.mean(took[40:])
    assert 10 < np.count_nonzero(chosen[40:]) < 60


def test_prompts_of_several_are_not_followed_for_a_look() -> None:
    """Behind the first of them, the others' would have to be read."""
    for batch in (MANY, FEW):
        load = Load()
        load.serve(MANY, 300)
        while _choose(load.controller, batch, batch * LENGTH).tree is None:
            assert not load.controller.follows_prompts


def _choose(controller: Controller, batch: int, num_unread: int, max_depth: int | None = None) -> StepProgram:
    estimates = [controller.start(max_depth) for _ in range(batch)]
    choices = [program for program in SECONDS if program.batch == batch]
    program = controller.choose(estimates, choices, num_unread)
    if program.tree is None:
        controller.stepped(program, 1, batch)
    return program


def test_a_hit_without_entries_has_its_price_too() -> None:
    """A prompt's beginning is found in the cache, and the draft has not read it. The others keep up meanwhile."""
    load = Load()
    load.serve(FEW, 50)
    num_steps = 0
    while _choose(load.controller, FEW, FEW * LENGTH).tree is None:
        assert load.controller.is_following
        num_steps += 1
    assert PER_TOKEN * FEW * LENGTH * 0.45 <= _worth(FEW, num_steps) <= PER_TOKEN * FEW * LENGTH * 1.1


def test_many_short_lulls_add_up() -> None:
    """One step of few sequences at a time, among many others."""
    load = Load()
    load.serve(MANY, 300)
    num_lulls = 0
    while _choose(load.controller, FEW, FEW * LENGTH).tree is None:
        num_lulls += 1
        for _ in range(5):
            assert _choose(load.controller, MANY, MANY * LENGTH).tree is None
    assert _worth(FEW, num_lulls) <= PER_TOKEN * FEW * LENGTH * 1.1


def test_short_lulls_are_not_read_for_again_and_again() -> None:
    """Batches that come one after another, and whose last answers end alone: each lull would pay for a part of what it
    takes to read, and those after it are of other sequences. A long one pays, and then the next is not waited for."""

    def serve(load: Load, *lulls: int) -> float:
        start, plain = load.seconds + load.read_seconds, 0.0
        for num_steps in lulls:
            for batch, number in ((MANY, 100), (FEW, num_steps)):
                tokens = load.tokens
                load.serve(batch, number)
                plain += (load.tokens - tokens) / batch * SECONDS[StepProgram(batch, WIDTH, is_alone=True)]
        return (load.seconds + load.read_seconds - start) / plain

    load = Load(SECONDS | FOLLOWED)
    load.serve(MANY, 300)
    serve(load, *[30] * 60)
    assert serve(load, *[30] * 200) < 1.01
    assert serve(load, 2000, 2000) < 0.85
    before = len(load.chosen)
    load.serve(MANY, 100)
    load.serve(FEW, 200)
    assert 40 < load.chosen[before + 100 :].index(True) < 160, "one reading has to be worth it, as at the beginning"


def test_a_look_that_waited_for_reading_comes_as_soon_as_all_is_read() -> None:
    """Until then nothing is known of the way, and the draft follows for that."""
    costs = SECONDS | FOLLOWED
    controller = Controller(costs, prior=RATES)
    choices = [program for program in SECONDS if program.batch == MANY]
    for _ in range(3):  # of ways that are not known yet one would look after eight steps
        controller.observe_seconds(choices[0], costs[choices[0]], 9)
        assert all(_choose(controller, MANY, MANY * LENGTH).tree is None for _ in range(2 * 8))
    assert any(_choose(controller, MANY, 0).tree is not None for _ in range(8))


def test_reading_goes_on_until_all_is_read() -> None:
    """In several rounds, for steps and for looks alike, however often the choice is asked in between."""
    load = Load()
    load.serve(MANY, 300)
    while _choose(load.controller, FEW, FEW * LENGTH).tree is None:
        pass
    rounds = [_choose(load.controller, FEW, left).tree for left in range(FEW * LENGTH, -1, -50)]
    assert rounds.count(None) <= 1, "a look at plain decoding"
    look = next(program for _ in range(9**6) if (program := _choose(load.controller, MANY, 10)).tree is not None)
    assert all(_choose(load.controller, MANY, left) == look for left in (8, 5, 2, 0))
    assert _choose(load.controller, MANY, 0).tree is None


def test_a_draft_follows_nobody_who_wants_none_and_a_new_one_from_the_start() -> None:
    load = Load()
    load.serve(FEW, 50)
    assert _choose(load.controller, FEW, 0, max_depth=0).tree is None
    assert not load.controller.is_following
    load.serve(MANY, 300)
    assert not load.controller.is_following
    load.controller.expect(RATES)
    assert load.controller.is_following


def test_a_draft_is_left_out_once_following_has_cost_what_going_on_will() -> None:
    """Where one way is the better now and another in a moment, nothing is read again."""
    costs = SECONDS | FOLLOWED
    controller = Controller(costs, prior=RATES)
    estimates = [controller.start(None) for _ in range(MANY)]
    choices = [program for program in SECONDS if program.batch == MANY]
    for program in choices[1:]:
        controller.observe_seconds(program, costs[program], 9)
    num_steps = 0
    while controller.is_following:
        program = controller.choose(estimates, choices)
        if program.tree is None:  # no look
            controller.stepped(dataclasses.replace(program, is_alone=False), 4, MANY)
            num_steps += 4
    assert 0.064 <= num_steps * FOLLOWING * SECONDS[choices[0]] <= 0.064 + 8 * FOLLOWING * SECONDS[choices[0]]
    assert controller.choose(estimates, choices, MANY * LENGTH).tree is None
    assert not controller.is_following


def test_a_batch_that_cannot_speculate_yet_leaves_the_draft_out() -> None:
    """A server begins with one chain for few sequences. What many ask is then run without the draft, until few ask
    again."""
    controller = Controller({each: SECONDS[each] for each in SECONDS if each.batch == FEW}, prior=RATES)
    for batch in (MANY, FEW, MANY):
        estimates = [controller.start(None) for _ in range(batch)]
        choices = [program for program in SECONDS if program.batch == batch]
        assert controller.choose(estimates, choices).tree == (TREE if batch == FEW else None)
        assert controller.is_following is (batch == FEW)
