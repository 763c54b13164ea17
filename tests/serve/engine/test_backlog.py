"""A target that runs alone beside a draft that is not used: the programs of a server without one, and a draft that
proposes later as if it had followed."""

import dataclasses
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from engines import Ask, Inbox, compile_programs, greedy, make_engine, make_runner, run, serving, wait_until
from hypothesis import given
from hypothesis import strategies as st

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.serve.engine.backlog import Backlog
from specserve.serve.programs.program_list import list_programs
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.controller import Controller, Estimate
from specserve.speculative.program import StepProgram
from specserve.speculative.reading import FOLLOWING

PROMPT = [54, 18, 9, 21, 28, 52, 30, 8, 23, 39, 52, 47, 63, 14, 56, 6, 37, 19, 15, 43]


class Script(Controller):
    """Plain calls, beside a draft that follows or does not, and then the chain."""

    def __init__(self, num_plain: int, *, is_following: bool) -> None:
        super().__init__({})
        self._reading.is_following = is_following
        self.num_plain, self.num_unread = num_plain, [0]

    def choose(
        self, estimates: Sequence[Estimate], choices: Sequence[StepProgram], num_unread: int = 0, num_unseen: int = 0
    ) -> StepProgram:
        self.num_plain -= 1
        self.num_unread.append(num_unread)
        return next(each for each in choices if (each.tree is None) == (self.num_plain >= 0))


@pytest.fixture(scope="module", params=["chain:3", "head+suffix:3"])
def runner(request: pytest.FixtureRequest, tiny_target: Target, tiny_head: Head) -> Runner:
    runner = make_runner(tiny_target, tiny_head, "off", request.param, has_constrained=False)
    compile_programs(runner)
    return runner


def test_the_target_alone_runs_the_programs_of_a_server_without_a_draft(runner: Runner, tiny_target: Target) -> None:
    """To the letter: so they cost what they cost there."""
    bare = make_runner(tiny_target, None, "off", has_constrained=False)
    shapes = dataclasses.replace(runner.shapes, trees=(None,))
    assert bare.shapes == shapes
    alone = [program for program in list_programs(runner) if program.is_alone]
    others = [program for program in list_programs(bare) if program.kind in ("step", "prefill")]
    assert {dataclasses.replace(program, is_alone=False) for program in alone} == {
        program for program in others if not program.is_scored
    }
    for program in alone:
        same = dataclasses.replace(program, is_alone=False)
        assert runner.call(program).lower().as_text() == bare.call(same).lower().as_text()


def _ask(runner: Runner, controllers: Sequence[Controller], prompts: Sequence[list[int]]) -> list[tuple]:
    """Each prompt's answer with the next controller, in one engine: what was drafted at each of its tokens, its tokens,
    and how many of the prompt's were cached."""
    engine, answers = make_engine(runner, most_steps=1), []
    params = SamplingParams(max_tokens=40, temperature=4.0, seed=5, ignore_eos=True, return_tree=True)
    with serving(engine):
        for controller, prompt in zip(controllers, prompts, strict=True):
            engine.rounds.choice.controller, engine.rounds.choice.is_choosing = controller, True
            inbox = Inbox()
            engine.submit(prompt, params, inbox)
            num_cached = inbox.wait().stats.num_cached_tokens
            answers.append((_drafts(inbox), inbox.token_ids, num_cached))
    return answers


def _drafts(inbox: Inbox) -> dict[int, tuple[int, ...]]:
    """What was drafted, by how many tokens there were before."""
    ends = itertools.accumulate(len(delta.token_ids) for delta in inbox.deltas)
    trees = zip(ends, (delta.tree for delta in inbox.deltas), inbox.deltas, strict=True)
    return {end - len(delta.token_ids): tree.token_ids for end, tree, delta in trees if tree}


def _check_alike(drafts: dict[int, tuple[int, ...]], others: dict[int, tuple[int, ...]]) -> None:
    """Wherever both have proposed, they have proposed the same."""
    both = drafts.keys() & others.keys()
    assert len(both) > 2, "little was proposed, so little was tested"
    assert {at: drafts[at] for at in both} == {at: others[at] for at in both}


@pytest.mark.parametrize("num_plain", [0, 1, 7, 20])
def test_a_draft_that_was_left_out_proposes_as_if_it_had_followed(runner: Runner, num_plain: int) -> None:
    """After a prompt and some plain steps; and where another request finds the pages of both in the prefix cache, as if
    the draft had read them for the first one."""
    answers = {}
    for is_following in (True, False):
        script = Script(num_plain, is_following=is_following)
        [first] = _ask(runner, [script], [PROMPT])
        last, never = Script(0, is_following=True), Script(99, is_following=is_following)
        _, hit = _ask(runner, [never, last], [PROMPT, [*PROMPT, *first[1][:30]]])
        answers[is_following] = first, hit
        assert (max(script.num_unread) > 0) == (not is_following)
        assert (max(last.num_unread) > 0) == (not is_following), "the draft had read nothing of it"
    for followed, left in zip(*answers.values(), strict=True):
        assert followed[1:] == left[1:]
        _check_alike(followed[0], left[0])
    assert hit[2] > len(PROMPT), "a part of the answer was found too"


def test_a_draft_that_follows_a_prompt_for_a_look_proposes_as_if_it_had_always_followed(runner: Runner) -> None:
    """A prompt that begins with what it never read it does not follow."""
    [followed] = _ask(runner, [Script(0, is_following=True)], [PROMPT])
    script = Script(0, is_following=False)
    script._reading.look_soon()
    [look] = _ask(runner, [script], [PROMPT])
    assert look[1:] == followed[1:]
    _check_alike(look[0], followed[0])
    assert max(script.num_unread) == 0, "nothing of the prompt is left"
    never, begun = Script(99, is_following=False), Script(0, is_following=False)
    begun._reading.look_soon()
    _, hit = _ask(runner, [never, begun], [PROMPT, [*PROMPT, *followed[1][:30]]])
    assert max(begun.num_unread) > 0
    assert hit[2] > len(PROMPT)


def test_a_draft_that_follows_again_has_read_everything(runner: Runner) -> None:
    """Left out, then read, and left out again: nothing of the second time is missing, nor of pages that come later."""

    class Turns(Script):
        def choose(
            self,
            estimates: Sequence[Estimate],
            choices: Sequence[StepProgram],
            num_unread: int = 0,
            num_unseen: int = 0,
        ) -> StepProgram:
            self.num_unread.append(num_unread)
            is_plain = len(self.num_unread) % 5 > 0
            return next(each for each in choices if (each.tree is None) == is_plain)

    followed, left = Turns(0, is_following=True), Turns(0, is_following=False)
    [(drafts, token_ids, _)] = _ask(runner, [followed], [PROMPT])
    [(others, same, _)] = _ask(runner, [left], [PROMPT])
    assert same == token_ids
    _check_alike(drafts, others)
    assert max(followed.num_unread) == 0
    assert sum(number > 0 for number in left.num_unread) > 3


@pytest.mark.parametrize("runner", ["chain:3"], indirect=True)  # a lookup's part depends on the steps before
@pytest.mark.parametrize("num_plain", [3, 14])
def test_ragged_sequences_are_read_in_rounds(
    runner: Runner, tiny_head: Head, num_plain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than one round has room for, of any lengths: each proposes as if the draft had followed. What was
    read is counted, and stays so where another draft takes its place."""
    read, num_read = runner.read, [0]

    def counted(slot: int, start: int, end: int, promise: float) -> None:
        num_read[-1] += end - start
        read(slot, start, end, promise)

    monkeypatch.setattr(runner, "read", counted)
    prompts = [PROMPT[:number] for number in (8, 3, 3, 13)]
    params = SamplingParams(max_tokens=40, temperature=4.0, seed=5, ignore_eos=True, return_tree=True)
    found = []
    for is_following in (True, False):
        engine, script = make_engine(runner, most_steps=1), Script(num_plain, is_following=is_following)
        engine.rounds.choice.controller, engine.rounds.choice.is_choosing = script, True
        inboxes = [Inbox() for _ in prompts]
        with serving(engine):
            for prompt, inbox in zip(prompts, inboxes, strict=True):
                engine.submit(prompt, params, inbox)
            for inbox in inboxes:
                inbox.wait()
        found.append([(_drafts(inbox), inbox.token_ids) for inbox in inboxes])
        assert min(script.num_unread) >= 0
        assert (num_read[-1] > 0) == (not is_following)
        engine.rounds.swap(runner.with_head(tiny_head))
        assert engine.stats().num_caught_up == num_read[-1]
        num_read.append(0)
    for (drafts, token_ids), (others, same) in zip(*found, strict=True):
        assert token_ids == same
        _check_alike(drafts, others)


class Certain(Controller):
    """Costs and acceptance stay as they are at first, by which the chain makes the half more of plain decoding."""

    def __init__(self, runner: Runner) -> None:
        costs = dict[StepProgram, float]()
        for program in list_programs(runner):
            if program.kind == "step":
                costs[program] = 0.020 if program.tree else 0.010 if program.is_alone else 0.0105
            elif program.kind == "reading":
                costs[program] = 0.003 * program.chunk
        super().__init__(costs, prior=(0.8, 0.8, 0.8))
        self._reading.is_following = False

    def observe(self, *_of: object) -> None:
        pass

    def observe_seconds(self, *_of: object, **_how: object) -> None:
        pass


@pytest.fixture(scope="module")
def masked(tiny_target: Target, tiny_head: Head) -> Runner:
    runner = make_runner(tiny_target, tiny_head, "off", "chain:3", num_slots=1)
    compile_programs(runner)
    return runner


@pytest.mark.parametrize(("is_constrained", "is_away"), [(False, False), (True, False), (False, True)])
def test_speculation_begins_when_plain_steps_have_lost_what_reading_takes(
    masked: Runner, is_constrained: bool, is_away: bool
) -> None:
    """Also of requests with token masks, and where its program comes from its file first: the reading counts once."""
    controller = Certain(masked)
    steps = [program for program in list_programs(masked) if program.kind == "step" and program.tree is not None]
    if is_away:
        for program in steps:
            masked.compiled.set_aside(program)
        assert masked.compiled.let_go(-1.0) == len(steps)
    engine = make_engine(masked, controller, most_steps=1)
    rule = controller._reading
    with engine:
        for number in range(9):
            ask = Ask((5, 9, 11, 5, 9, 11, 5, 9), greedy(60, ignore_eos=True), is_constrained=is_constrained)
            run(engine, [dataclasses.replace(ask, salt=str(number))])
            wait_until(lambda: any(program in masked.compiled for program in steps))
            if engine.stats().num_steps_by_speculation["chain:3"]:
                break
        stats = engine.stats()
        assert stats.num_steps_by_speculation["chain:3"]
        assert controller.is_following
        read = rule.reading_seconds(stats.num_caught_up)
        followed = FOLLOWING * 0.0105 * stats.num_steps_by_speculation["off"]
        assert rule._spent <= 1.001 * (read + followed)
        assert is_away or 0 < read <= rule._spent, "while its program is away, the draft may follow all that there is"


@given(st.integers(0, 5), st.integers(1, 60), st.integers(1, 40))
def test_what_is_read_is_whole_pages_or_all(page: int, number: int, room: int) -> None:
    asked: list[tuple[int, int]] = []
    shapes = SimpleNamespace(page_size=8, chunks=(16,))
    reader = SimpleNamespace(shapes=shapes, read=lambda _slot, start, end, _promise: asked.append((start, end)))
    backlog, end = Backlog(cast(Runner, reader)), 8 * page + number
    sequence = cast(Any, SimpleNamespace(slot=0, pages=list(range(99)), unread_from=8 * page))
    while sequence.unread_from is not None:
        backlog._read(sequence, end, room, 0.0)
    assert [start for start, _ in asked] == [8 * page, *[last for _, last in asked[:-1]]]
    assert asked[-1][1] == end
    assert all(start < last <= end for start, last in asked)
    assert all(last % 8 == 0 and last - start <= max(8, room) for start, last in asked[:-1])
