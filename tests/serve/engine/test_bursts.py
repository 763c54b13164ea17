"""Steps that run at once are steps that run one by one."""

import dataclasses
import itertools
import random
from collections import Counter, deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from engines import MAX_LEN, PAGE_SIZE, VOCAB, Dice, Fixed, compile_programs, make_engine, make_runner
from hypothesis import given
from hypothesis import strategies as st

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.eval.bench.step_times import prefill
from specserve.serve.engine.options import blank_token_rows, sampler_rows
from specserve.serve.engine.step_choice import Bursts
from specserve.serve.programs.results import StepHandle
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import DEEP_AT_ONCE, STEPS_AT_ONCE
from specserve.serve.programs.slot_bounds import SlotBounds
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.controller import Estimate
from specserve.speculative.costs import BURST_SECONDS, within_burst
from specserve.speculative.program import StepProgram
from specserve.speculative.slot_state import StepResult
from specserve.speculative.tree import Tree, chain

PARAMS = (
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=0.9, seed=5, presence_penalty=0.7, logit_bias={3: 2.0, 9: -4.0}),
    SamplingParams(temperature=0.0, speculation=1, return_tree=True),
)


def _fill(runner: Runner) -> list[int]:
    """Three sequences of different lengths and options, one slot being empty."""
    runner.reset()
    each = MAX_LEN // PAGE_SIZE
    for slot, params in enumerate(PARAMS):
        prompt = [(5 * slot + 3 * i) % VOCAB for i in range(9 + 4 * slot)]
        rows = sampler_rows(params, 7 + slot, len(prompt))
        prefill(runner, slot, prompt, range(each * slot, each * (slot + 1)), rows)
    return [*range(len(PARAMS))]


def _run(runner: Runner, way: str, bursts: list[int]) -> tuple[list[StepResult], Any]:
    slots, tree = _fill(runner), parse_speculation(way)
    options = {"has_logprobs": True, "has_tree": tree is not None}
    handles = [runner.step(slots, tree, num_steps=number, **options) for number in bursts]  # none is read meanwhile
    results = list(itertools.chain.from_iterable(handle.read_each() for handle in handles))
    # however results were left pending: the head has read the same, as it would now propose the same
    results.append(runner.step(slots, parse_speculation("chain:3")).read())
    return results, runner.state


@pytest.mark.parametrize("way", ["off", "chain:3", "tree:3x3x8", "static:2x1", "head+suffix:3"])
def test_steps_at_once_are_steps_one_by_one(runner: Runner, way: str) -> None:
    """Bit for bit in what they emit, how likely it was and what was proposed, and in what they leave behind."""
    most = runner.most_steps(StepProgram(tree=parse_speculation(way)))
    assert most > 2
    expected, state = _run(runner, way, [1] * (2 * most + 1))
    kept = jax.tree.map(np.asarray, state.cache), np.asarray(state.seq_lens), np.asarray(state.history)
    found, state = _run(runner, way, [2, most, most - 1])
    assert len(found) == len(expected)
    jax.tree.map(np.testing.assert_array_equal, [vars(each) for each in found], [vars(each) for each in expected])
    jax.tree.map(np.testing.assert_array_equal, (state.cache, state.seq_lens, state.history), kept)
    if way != "off":
        assert any((each.n_accepted > 0).any() for each in expected), "nothing was accepted, so little was tested"


@pytest.mark.parametrize("way", ["off", "chain:3"])
def test_no_step_is_made_once_all_sequences_have_stopped(runner: Runner, way: str) -> None:
    """Neither in the burst in which the last one stops, nor in one that was dispatched behind it."""
    tree, slots = parse_speculation(way), [0, 1]
    most = min(runner.most_steps(StepProgram(tree=tree)), DEEP_AT_ONCE)
    prompts = [[(5 * slot + 3 * i) % VOCAB for i in range(9 + 4 * slot)] for slot in slots]
    rows = sampler_rows(SamplingParams(temperature=0.0), 0, 0)

    def emitted(stops: Sequence[int | None]) -> list[list[int]]:  # by step, of both
        runner.reset()
        for slot, prompt in zip(slots, prompts, strict=True):
            stop_ids = [] if stops[slot] is None else [stops[slot]]
            pages = range(slot * MAX_LEN // PAGE_SIZE, (slot + 1) * MAX_LEN // PAGE_SIZE)
            runner.admit(slot, prompt, pages, 0, rows, blank_token_rows(VOCAB, stop_ids))
            runner.prefill([(slot, len(prompt), True)]).read()
        handles = [runner.step(slots, tree, num_steps=most) for _ in range(2)]
        steps = itertools.chain.from_iterable(handle.read_each() for handle in handles)
        return [[result.emitted(row) for row in slots] for result in steps]

    free = emitted([None, None])
    assert len(free) == 2 * most
    first_seen = [
        {token_id: at for at, step in reversed([*enumerate(free)]) for token_id in step[row]} for row in slots
    ]
    stops = [next(token_id for token_id, at in seen.items() if at in (1, 2)) for seen in first_seen]
    last = max(seen[stop] for seen, stop in zip(first_seen, stops, strict=True))
    assert emitted(stops) == free[: last + 1]
    assert emitted([stops[0], None]) == free, "one goes on"


def _watch_steps(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Let bursts be as long as they can, and return what will be the steps of each, and the widths of the first and the
    last of them."""
    run, seen = runner.step, list[tuple[int, int, int]]()

    def step(slots: Sequence[int], tree: Tree | None, *, num_steps: int, **more: Any) -> StepHandle:
        seen.append((num_steps, runner.bounds.width_of(slots), runner.bounds.width_of(slots, num_steps - 1)))
        return run(slots, tree, num_steps=num_steps, **more)

    monkeypatch.setattr(runner, "step", step)
    monkeypatch.setattr(Bursts, "num_steps", lambda _self, _shape, most: most)
    return seen


@pytest.mark.parametrize("only", [(), (None,)])
def test_bursts_leave_room_for_what_the_draft_has_to_read(
    tiny_target: Target, tiny_head: Head, monkeypatch: pytest.MonkeyPatch, only: tuple[None, ...]
) -> None:
    """Steps of the target alone are as many as their program can make."""
    runner = make_runner(tiny_target, tiny_head, "off", "chain:3", has_constrained=False)
    compile_programs(runner)
    assert runner.shapes.has_alone
    assert runner.most_followed == runner.config.max_pending - 1 < STEPS_AT_ONCE
    seen = _watch_steps(runner, monkeypatch)
    with make_engine(runner) as engine:
        engine.rounds.choice.step_only(*only)
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=MAX_LEN - 10, temperature=0, ignore_eos=True))
    assert max(number for number, _, _ in seen) == (STEPS_AT_ONCE if only else runner.most_followed)


def test_a_burst_stays_in_the_program_of_its_first_step(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wider page table is another program, which may not be compiled yet, and takes another time."""
    runner = make_runner(tiny_target, None, "off", widths=(2, 4))
    seen = _watch_steps(runner, monkeypatch)
    params = SamplingParams(max_tokens=MAX_LEN - 10, temperature=0, ignore_eos=True)
    with make_engine(runner) as engine:
        engine.generate([[5, 6, 7], [8, 9]], params)
    assert all(first == last for _, first, last in seen)
    assert len({first for _, first, _ in seen}) == 3
    assert max(number for number, _, _ in seen) == STEPS_AT_ONCE


@given(seconds=st.lists(st.floats(0.001, 0.03), min_size=1, max_size=4), most=st.integers(1, STEPS_AT_ONCE))
def test_a_burst_is_over_soon(seconds: list[float], most: int) -> None:
    """Steps of which nothing is known, and those that take long, run alone; others as is expected, then as seen."""
    bursts, shape = Bursts(), StepProgram(1, 8)
    assert bursts.num_steps(shape, most) == 1
    assert Bursts(lambda _program: seconds[0]).num_steps(shape, most) == within_burst(seconds[0], most)
    for each in seconds:
        bursts.observe(shape, each)
    number = bursts.num_steps(shape, most)
    assert 1 <= number <= most
    assert number == 1 or number * min(seconds) <= BURST_SECONDS * (1 + 1e-9)
    assert number == most or (number + 1) * max(seconds) >= BURST_SECONDS * (1 - 1e-9)
    assert bursts.num_steps(StepProgram(2, 8), most) == 1, "steps of another shape take another time"


def test_what_is_read_late_teaches_nothing_of_what_steps_take(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is busy when a step is made comes late to read it: the step seems slow, and the next one quick."""
    late, seen, pattern = [], [], itertools.cycle([False, False, True, False, True, True, True, False])

    def is_done(_handle: StepHandle) -> bool:
        late.append(next(pattern))
        return late[-1]

    monkeypatch.setattr(StepHandle, "is_done", property(is_done))
    with make_engine(make_runner(tiny_target, None, "off")) as engine:
        observe = engine.rounds.choice.observe_seconds

        def observed(*args: Any, is_exact: bool, **how: Any) -> None:
            assert is_exact == (late[-1] == late[-2])
            seen.append(is_exact)
            observe(*args, is_exact=is_exact, **how)

        monkeypatch.setattr(engine.rounds.choice, "observe_seconds", observed)
        learn = engine.rounds.choice.controller.observe_seconds
        learned: list[StepProgram] = []
        monkeypatch.setattr(
            engine.rounds.choice.controller,
            "observe_seconds",
            lambda program, *args, **how: (learned.append(program), learn(program, *args, **how)),
        )
        monkeypatch.setattr(engine.rounds.choice.controller, "has_seen", lambda program: program in learned)
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        for number in range(12):
            engine.generate([[5, 6, number]], params)
    assert set(seen) == {False, True}
    assert seen.count(True) <= len(learned) <= seen.count(True) + len(set(learned))


@given(
    steps=st.lists(st.tuples(st.sampled_from([0, 3, 5]), st.integers(1, 7)), max_size=8),
    ahead=st.integers(0, 3),
    rng=st.randoms(use_true_random=False),
)
def test_the_host_never_takes_a_sequence_for_shorter_than_it_is(
    steps: list[tuple[int, int]], ahead: int, rng: random.Random
) -> None:
    """Nor for longer, when every step has been read."""
    shapes: Any = SimpleNamespace(num_slots=1)
    bounds, length, unread = SlotBounds(shapes, 8), 20, deque()
    bounds.begin(0, 0)
    bounds.prefilled(0, length)
    for depth, number in steps:
        accepted = rng.randint(0, depth * number)
        unread.append((bounds.stepped((0,), chain(depth) if depth else None, number), accepted))
        length += number + accepted
        assert bounds.num_entries((0,)) >= length
        while len(unread) > ahead:
            on_read, accepted = unread.popleft()
            on_read(np.array([accepted]))
            assert bounds.num_entries((0,)) >= length
    for on_read, accepted in unread:
        on_read(np.array([accepted]))
    assert bounds.num_entries((0,)) == length


def test_a_choice_knows_of_the_speculative_steps_that_are_on_their_way(
    tiny_target: Target, tiny_head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has been learned of them: they are those of the call before, which is read after the next is chosen."""
    told: list[int] = []
    before = [0]

    class Noting(Dice):
        def choose(
            self,
            estimates: Sequence[Estimate],
            choices: Sequence[StepProgram],
            num_unread: int = 0,
            num_unseen: int = 0,
        ) -> StepProgram:
            told.append(num_unseen)
            return super().choose(estimates, choices, num_unread, num_unseen)

        def stepped(self, program: StepProgram, num_steps: int, num_sequences: int, num_read: int = 0) -> None:
            before.append(num_steps if program.tree else 0)
            super().stepped(program, num_steps, num_sequences, num_read)

    runner = make_runner(tiny_target, tiny_head, "off", "chain:1", "chain:3", has_constrained=False)
    compile_programs(runner)
    _watch_steps(runner, monkeypatch)
    with make_engine(runner, controller=Noting(0, leaves_draft=False)) as engine:
        engine.generate([[5, 6, 7]], SamplingParams(max_tokens=MAX_LEN - 10, temperature=0, ignore_eos=True))
    assert told == before[: len(told)]
    assert min(told) == 0 < 1 < max(told)


def test_steps_behind_the_end_of_an_answer_teach_nothing(
    tiny_target: Target, tiny_head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made where others of the batch go on, or the device does not know of the end."""
    seen: Counter[int] = Counter()
    estimates: dict[int, Estimate] = {}  # held, so that no other one has its number

    class Noting(Fixed):
        def observe(
            self,
            of: Sequence[Estimate],
            tree: Tree,
            n_accepted: np.ndarray,
            confidence: np.ndarray | None = None,
        ) -> None:
            assert n_accepted.shape[1] == len(of)
            for estimate, numbers in zip(of, n_accepted.T, strict=True):
                estimates[id(estimate)] = estimate
                seen[id(estimate)] += int((numbers >= 0).sum())
                assert (np.diff((numbers >= 0).astype(int)) <= 0).all()
            super().observe(of, tree, n_accepted, confidence)

    runner = make_runner(tiny_target, tiny_head, "chain:3", has_constrained=False)
    prompts = [[5, 6, 7 + i] for i in range(4)]
    params = [SamplingParams(max_tokens=44, temperature=0, ignore_eos=True)] * len(prompts)
    _watch_steps(runner, monkeypatch)
    with make_engine(runner, controller=Fixed(chain(3))) as engine:
        whole = engine.generate(prompts, params)
    for i, number in enumerate((5, 12, 20)):  # the last one goes on
        params[i] = dataclasses.replace(params[i], stop_token_ids=(whole[i].token_ids[number],))
    with make_engine(runner, controller=Noting(chain(3))) as engine:
        outputs = engine.generate(prompts, params)
    assert len({len(output.token_ids) for output in outputs}) > 2
    assert sorted(seen.values()) == sorted(output.stats.num_steps for output in outputs if output.stats)
    assert len(seen) == len(prompts)
