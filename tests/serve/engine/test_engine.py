"""The engine over a real runner on a tiny target: what is served, what is refused, what the device is asked to do.
Faults are in test_faults, options in test_options, the prefix cache and everything at once in test_storm."""

import contextlib
import dataclasses
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from engines import Ask, Inbox, Reference, check_idle, compile_programs, greedy, run, submit

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.errors import CapacityError, RequestError
from specserve.kernels import native
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.options import EngineOptions
from specserve.serve.engine.step_choice import Bursts
from specserve.serve.programs.program_list import list_programs
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import make_shapes
from specserve.serve.requests.request import FinishReason, SamplingParams
from specserve.speculative.program import StepProgram
from specserve.speculative.slot_state import StepResult
from specserve.speculative.tree import Tree
from specserve.tokenizer import Tokenizer

PAGE_SIZE, MAX_LEN, NUM_PAGES = 8, 64, 14
PROMPT = [5, 9, 33, 7, 7, 60, 12]
TREE = parse_speculation("tree:2x4x8")


@pytest.fixture(scope="module")
def runner(tiny_target: Target, tiny_head: Head, kept: Path | None) -> Runner:
    """Two slots, warmed up; every test puts an engine of its own on it."""
    sizes = {"num_slots": 2, "max_model_len": MAX_LEN, "page_size": PAGE_SIZE, "num_pages": NUM_PAGES}
    shapes = dataclasses.replace(make_shapes([TREE], tiny_target.config, **sizes), chunks=(16, 64))
    runner = Runner(tiny_target, tiny_head, shapes, folder=kept)
    compile_programs(runner)
    assert len(runner.compiled) == len(list_programs(runner))
    return runner


def _engine(runner: Runner, tokenizer: Tokenizer, *, eos_ids: Sequence[int] = (2,), **options: object) -> Engine:
    runner.reset()
    return Engine(
        runner,
        tokenizer,
        model_name="tiny",
        eos_ids=eos_ids,
        options=EngineOptions(**options),  # type: ignore[arg-type]
    )


@pytest.fixture
def engine(runner: Runner, pydoc_tokenizer: Tokenizer) -> Iterator[Engine]:
    with _engine(runner, pydoc_tokenizer, max_queue=64) as engine:
        yield engine
        check_idle(engine)


def _ask(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Inbox:
    return submit(engine, Ask(tuple(prompt), params))[1]


@pytest.fixture(scope="module")
def answer(reference: Reference) -> list[int]:
    """What the target says to PROMPT, 40 tokens, plainly decoded."""
    ask = Ask(tuple(PROMPT), greedy(40, ignore_eos=True))
    assert reference.is_firm(ask)
    return reference.answer(ask).token_ids


def test_more_requests_than_slots_are_served_in_turn(engine: Engine, answer: list[int]) -> None:
    done: list[int] = []
    completions = engine.generate([PROMPT] * 5, greedy(40, ignore_eos=True), lambda i, _completion: done.append(i))
    assert [list(completion.token_ids) for completion in completions] == [answer] * 5
    assert sorted(done) == list(range(5))
    assert {completion.finish_reason for completion in completions} == {FinishReason.LENGTH}
    stats = completions[0].stats
    assert stats.num_draft_tokens == 8 * stats.num_steps
    assert 1 + stats.num_emitted == 40, "the first token comes from prefill"


def test_nothing_compiles_after_warm_up(engine: Engine) -> None:
    before = len(engine.runner.compiled)
    assert before == len(list_programs(engine.runner))
    rng = random.Random(1)
    prompts = [[rng.randrange(64) for _ in range(rng.randrange(1, 40))] for _ in range(8)]
    params = [
        SamplingParams(max_tokens=rng.randrange(1, 24), temperature=i % 3 / 2, top_p=1 - i / 20, top_k=i, seed=i)
        for i in range(8)
    ]
    engine.generate(prompts, params)
    run(engine, [Ask(tuple(prompts[0]), greedy(9, logprobs=3), is_constrained=True)])
    engine.runner.reset()
    engine.generate(prompts[:2], params[:2])
    assert len(engine.runner.compiled) == before
    assert engine.stats().num_late_compiles == 0


@pytest.mark.parametrize("is_mixing", [False, True])
def test_prompts_that_run_side_by_side_are_answered_as_alone(
    tiny_target: Target,
    tiny_head: Head,
    pydoc_tokenizer: Tokenizer,
    reference: Reference,
    kept: Path | None,
    monkeypatch: pytest.MonkeyPatch,
    is_mixing: bool,
) -> None:
    """As on an accelerator, where one program takes several: short ones, parts of long ones, and two that begin alike,
    of which the second finds in the cache what the first has computed; alone, and beside sequences that go on."""
    sizes = {"num_slots": 4, "max_model_len": MAX_LEN, "page_size": PAGE_SIZE, "num_pages": 4 * MAX_LEN // PAGE_SIZE}
    shapes = make_shapes([TREE], tiny_target.config, **sizes)
    shapes = dataclasses.replace(shapes, chunks=(16, 64), prompt_tokens=64, is_mixing=is_mixing)
    runner = Runner(tiny_target, tiny_head, shapes, folder=kept)
    assert [program.batch for program in runner.shapes.prefills(runner.shapes.max_pages)] == [1, 4, 1]
    compile_programs(runner)
    rng, sides, beside, prefill, mixed = random.Random(2), list[int](), list[int](), runner.prefill, runner.mixed
    prompts = [[rng.randrange(64) for _ in range(length)] for length in (3, 12, 20, 1, 9, 15, 20, 7, 30, 5)]
    prompts += [[*prompts[2][:17], 1, 2], [*prompts[2][:17], 3]]
    asks = [Ask(tuple(prompt), greedy(8, ignore_eos=True)) for prompt in prompts]
    asks = [ask for ask in asks if reference.is_firm(ask)]
    assert len(asks) > 8
    monkeypatch.setattr(runner, "prefill", lambda parts, **given: sides.append(len(parts)) or prefill(parts, **given))
    monkeypatch.setattr(runner, "mixed", lambda *given, **asked: beside.append(len(given[2])) or mixed(*given, **asked))
    with _engine(runner, pydoc_tokenizer, max_queue=64) as engine:
        found = engine.generate([list(ask.prompt) for ask in asks], greedy(8, ignore_eos=True))
        check_idle(engine)
        assert engine.stats().num_late_compiles == 0
    assert [list(each.token_ids) for each in found] == [reference.answer(ask).token_ids for ask in asks]
    assert max(sides) > 1
    assert (max(beside, default=0) > 1) == is_mixing


def test_growing_into_wider_page_tables_changes_nothing(
    tiny_target: Target, pydoc_tokenizer: Tokenizer, answer: list[int], kept: Path | None
) -> None:
    """XLA's operations read the narrowest table that holds their sequences: here 16 entries, then 56. The native kernel
    reads no more of a table than a sequence has, so there is one."""
    tree = parse_speculation("ngram:2")
    with native.left_out():
        sizes = {"num_slots": 1, "max_model_len": 56, "page_size": 2, "num_pages": 28}
        runner = Runner(tiny_target, None, make_shapes([tree], tiny_target.config, **sizes), folder=kept)
        assert runner.shapes.widths == (8, 28)
        with Engine(runner, pydoc_tokenizer, model_name="tiny", eos_ids=()) as engine:
            [completion] = engine.generate([PROMPT], greedy(40))
    assert list(completion.token_ids) == answer


class _Steps:
    """In place of a handle of steps, by what each of them emits."""

    is_done = True

    def __init__(self, steps: Sequence[Sequence[int]]) -> None:
        self.steps = steps

    def read_each(self) -> list[StepResult]:
        return [StepResult(np.array([[len(step) - 1, 0, *step]]), None) for step in self.steps]


@pytest.mark.parametrize("at_once", [1, 3])
def test_an_eos_inside_an_accepted_path_ends_the_sequence_there(
    runner: Runner, pydoc_tokenizer: Tokenizer, answer: list[int], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """A device that always accepts two: whichever token is the EOS, at either place of a path, and in whichever of the
    steps that run at once, nothing follows it."""
    reasons, seen = [], set()
    monkeypatch.setattr(Bursts, "num_steps", lambda _self, _shape, most: min(most, at_once))
    for eos in sorted(set(answer)):
        steps = [[*answer, *[eos] * 30][at : at + 3] for at in range(1, len(answer) + 27, 3)]  # it runs ahead

        def accept_two(
            slots: list[int],
            tree: Tree | None,
            *,
            num_steps: int,
            is_following: bool,
            steps: list = steps,
            **flags: bool,
        ) -> _Steps:
            assert len(slots) == 1
            assert (tree, is_following, any(flags.values())) == (TREE, True, False)
            seen.add(num_steps)
            return _Steps([steps.pop(0) for _ in range(num_steps)])

        monkeypatch.setattr(runner, "step", accept_two)
        with _engine(runner, pydoc_tokenizer, eos_ids=(eos,)) as engine:
            inbox = _ask(engine, PROMPT, greedy(40))
            last = inbox.wait()
        assert inbox.token_ids == answer[: answer.index(eos) + 1]
        assert last.finish_reason == FinishReason.STOP
        reasons.append((len(inbox.token_ids) - 2) % 3)
    assert max(seen) == at_once
    assert {0, 1} <= set(reasons), "no EOS fell inside a path: the test tests nothing"


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], greedy(1), "prompt"),
        ([64], greedy(1), "prompt"),
        ([-1, 3], greedy(1), "prompt"),
        ([1] * MAX_LEN, greedy(1), "prompt"),
        ([1] * 30, greedy(MAX_LEN - 29), "max_tokens"),
        ([1], greedy(1, stop_token_ids=[64]), "stop_token_ids"),
        ([1], greedy(1, logit_bias={64: 1.0}), "logit_bias"),
        ([1], greedy(1, allowed_token_ids=[3, 64]), "allowed_token_ids"),
        ([1], greedy(1, bad_words=["a word of far too many tokens " * 9]), "bad_words"),
        ([1], greedy(1, n=2), "n"),
    ],
)
def test_what_can_never_be_served_is_refused(
    engine: Engine, prompt: list[int], params: SamplingParams, param: str
) -> None:
    with pytest.raises(RequestError) as error:
        engine.submit(prompt, params, Inbox())
    assert error.value.param == param


@pytest.mark.parametrize("params", [greedy(1, stop="a"), greedy(1, bad_words=["a"])])
def test_without_a_tokenizer_there_are_no_words(runner: Runner, params: SamplingParams) -> None:
    with pytest.raises(RequestError, match="need a tokenizer, and this engine has none"):
        Engine(runner, None, model_name="tiny", eos_ids=()).submit(PROMPT, params, Inbox())


def test_a_request_larger_than_the_cache_is_refused(runner: Runner, pydoc_tokenizer: Tokenizer) -> None:
    engine = _engine(runner, pydoc_tokenizer, num_pages=3)
    with pytest.raises(RequestError, match="need 4 cache pages, the server has 3"):
        engine.submit([1] * 20, greedy(6), Inbox())


def test_the_context_can_be_filled_to_the_last_token(engine: Engine) -> None:
    inboxes = [_ask(engine, [3] * n, greedy(MAX_LEN - n, ignore_eos=True)) for n in (1, 40, MAX_LEN - 1)]
    for inbox, n in zip(inboxes, (1, 40, MAX_LEN - 1), strict=True):
        assert inbox.wait().finish_reason == FinishReason.LENGTH
        assert len(inbox.token_ids) == MAX_LEN - n
    unbounded = _ask(engine, [3] * 50, SamplingParams(temperature=0.0, ignore_eos=True))
    unbounded.wait()
    assert len(unbounded.token_ids) == MAX_LEN - 50


def test_one_token_is_one_delta_and_no_step(engine: Engine, answer: list[int]) -> None:
    for _ in range(2):
        inbox = _ask(engine, PROMPT, greedy(1, ignore_eos=True))
        last = inbox.wait()
        assert (inbox.deltas, last.token_ids, last.finish_reason) == ([last], (answer[0],), FinishReason.LENGTH)
        assert last.stats is not None
        assert last.stats.num_steps == 0


def test_a_full_queue_refuses_and_recovers(runner: Runner, pydoc_tokenizer: Tokenizer) -> None:
    engine = _engine(runner, pydoc_tokenizer, max_queue=3)
    inboxes = [_ask(engine, PROMPT, greedy(4)) for _ in range(3)]  # the engine has not begun
    with pytest.raises(CapacityError, match="3 requests are waiting"):
        engine.submit(PROMPT, greedy(4), Inbox())
    with engine:
        for inbox in inboxes:
            inbox.wait()
        _ask(engine, PROMPT, greedy(4)).wait()
    with pytest.raises(CapacityError, match="stopping"):
        engine.submit(PROMPT, greedy(4), Inbox())


def test_cancelled_requests_end_wherever_they_are(engine: Engine, answer: list[int]) -> None:
    inboxes = [Inbox() for _ in range(4)]
    requests = [engine.submit(PROMPT, greedy(40, ignore_eos=True), inbox) for inbox in inboxes]
    requests[3].cancel()  # waits for a slot
    inboxes[0].wait_for_first()
    requests[0].cancel()
    requests[0].cancel()
    assert inboxes[3].wait().finish_reason == FinishReason.CANCELLED
    assert inboxes[0].wait().finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    assert inboxes[0].token_ids == answer[: len(inboxes[0].token_ids)]
    for inbox in inboxes[1:3]:
        assert inbox.wait().finish_reason == FinishReason.LENGTH
        assert inbox.token_ids == answer


def test_stopping_ends_everything_as_cancelled(runner: Runner, pydoc_tokenizer: Tokenizer) -> None:
    """Twice, and from three threads."""
    engine = _engine(runner, pydoc_tokenizer)
    inboxes = [_ask(engine, PROMPT, greedy(57, ignore_eos=True)) for _ in range(4)]
    engine.start()
    inboxes[0].wait_for_first()
    threads = [threading.Thread(target=engine.stop) for _ in range(2)]
    for thread in threads:
        thread.start()
    engine.stop()
    for inbox in inboxes:
        assert inbox.is_done, "`stop` waits for the last delta"
        assert inbox.wait().finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    engine.stop()
    check_idle(engine)


def test_priorities_decide_who_is_admitted(runner: Runner, pydoc_tokenizer: Tokenizer) -> None:
    """Lower first, then first come first served."""
    engine = _engine(runner, pydoc_tokenizer)
    heard: list[int] = []
    for i, priority in enumerate((3, 0, -1, 3, 0, 7)):
        params = greedy(6, ignore_eos=True)
        engine.submit(PROMPT, params, lambda _delta, i=i: heard.append(i), priority=priority)
    with engine:
        engine.drain(60)
    assert list(dict.fromkeys(heard)) == [2, 1, 4, 0, 3, 5]


def test_a_seed_decides_the_tokens_and_no_seed_differs(engine: Engine) -> None:
    def run(seed: int | None) -> tuple[int, ...]:
        params = SamplingParams(max_tokens=30, seed=seed, ignore_eos=True)
        return engine.generate([PROMPT], params)[0].token_ids

    assert run(1) == run(1) != run(2)
    assert run(None) != run(None)
    assert run(-1) != run(2**63 - 1)


def test_rounds_send_nothing_implicitly_and_steps_nothing_at_all(
    runner: Runner, pydoc_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steady state a step finds all that it needs on the device, and one read brings its result back. What begins
    and ends sequences, or gives them pages, is called with arrays of the host (`Placement.once`)."""
    engine = _engine(runner, pydoc_tokenizer)
    asks = [
        Ask(tuple(PROMPT), greedy(20, ignore_eos=True)),
        Ask(tuple(PROMPT), SamplingParams(max_tokens=20, seed=1, presence_penalty=0.5, logprobs=2, ignore_eos=True)),
    ]
    run_step, run_program, num_steps = runner.step, runner.run, 0

    def called(program: StepProgram, *values):  # type: ignore[no-untyped-def]
        once = program.kind in ("admission", "page table", "recall")
        with jax.transfer_guard_host_to_device("allow") if once else contextlib.nullcontext():
            return run_program(program, *values)

    def guarded(*args, **options):  # type: ignore[no-untyped-def]
        nonlocal num_steps
        num_steps += 1
        with jax.transfer_guard("disallow_explicit" if num_steps > 2 else "disallow"):  # slots are sent once, and kept
            return run_step(*args, **options)

    for number in range(1, runner.shapes.most_steps + 1):  # of steps at once: so many are sent once too
        runner.place.scalar(number)
    monkeypatch.setattr(runner, "step", guarded)
    monkeypatch.setattr(runner, "run", called)
    inboxes = [submit(engine, ask)[1] for ask in asks]
    with jax.transfer_guard_host_to_device("disallow"), jax.transfer_guard_device_to_device("disallow"):
        while engine._round():  # the engine's thread does not run: guards belong to a thread
            pass
    assert [inbox.wait().finish_reason for inbox in inboxes] == [FinishReason.LENGTH] * 2
    assert num_steps > 5


def test_host_results_emit_the_accepted_and_the_bonus() -> None:
    result = StepResult(np.array([[0, 0, 1, 2, 3], [2, 0, 4, 5, 6]]), None)
    assert [result.emitted(0), result.emitted(1)] == [[1], [4, 5, 6]]
