"""The engine over a real runner on a tiny target: who is served, who is refused, what one request's fault costs."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.checkpoints.head import Head
from specserve.checkpoints.load import Target
from specserve.errors import CapacityError, RequestError
from specserve.serve.engine import Engine
from specserve.serve.output import OutputStream
from specserve.serve.pages import PageAllocator
from specserve.serve.request import Delta, FinishReason, Request, SamplingParams
from specserve.serve.runner import HostResult, Runner
from specserve.speculative.tree import parse_speculation
from specserve.tokenizer import Tokenizer
from specserve.train.acceptance import AcceptanceMeter

PAGE_SIZE, MAX_LEN, NUM_PAGES = 8, 64, 14
PROMPT = [5, 9, 33, 7, 7, 60, 12]
TREE = parse_speculation("tree:2x4x8")


class Inbox:
    """A listener that keeps what it hears and lets the test wait for the end."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self._is_done = threading.Event()
        self._has_begun = threading.Event()

    def __call__(self, delta: Delta) -> None:
        assert not self._is_done.is_set(), "nothing comes after the last delta"
        self.deltas.append(delta)
        self._has_begun.set()
        if delta.finish_reason is not None:
            self._is_done.set()

    def wait_for_first(self) -> None:
        assert self._has_begun.wait(60)

    def wait(self) -> Delta:
        """The last delta."""
        assert self._is_done.wait(60), "the request never ended"
        return self.deltas[-1]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


def _greedy(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)  # type: ignore[arg-type]


def _runner(target: Target, head: Head | None) -> Runner:
    return Runner(
        target,
        head,
        TREE if head else None,
        num_slots=2,
        max_model_len=MAX_LEN,
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
    )


@pytest.fixture(scope="module")
def runner(tiny_target: Target, tiny_head: Head) -> Runner:
    """Two slots, warmed up; every test puts an engine of its own on it."""
    runner = _runner(tiny_target, tiny_head)
    assert len(list(runner.warmup())) == runner.num_programs
    return runner


@pytest.fixture(scope="module")
def plain_runner(tiny_target: Target) -> Runner:
    return _runner(tiny_target, None)


def _engine(runner: Runner, tokenizer: Tokenizer, *, eos_ids: Sequence[int] = (2,), max_queue: int = 64) -> Engine:
    runner.reset()
    return Engine(runner, tokenizer, model_name="tiny", eos_ids=eos_ids, max_queue=max_queue)


@pytest.fixture
def engine(runner: Runner, pydoc_tokenizer: Tokenizer) -> Iterator[Engine]:
    with _engine(runner, pydoc_tokenizer) as engine:
        yield engine
        _wait_until(lambda: not engine._scheduler.running and not engine._scheduler.waiting)
        assert engine.is_healthy
        assert engine._scheduler._allocator.num_free == NUM_PAGES, "pages leaked"
        assert sorted(engine._scheduler._free_slots) == [0, 1], "slots leaked"
        assert engine._num_queued == 0


def _wait_until(holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _ask(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Inbox:
    inbox = Inbox()
    engine.submit(prompt, params, inbox)
    return inbox


@pytest.fixture(scope="module")
def answer(plain_runner: Runner, pydoc_tokenizer: Tokenizer) -> list[int]:
    """What the target says to PROMPT, 40 tokens, plainly decoded."""
    with _engine(plain_runner, pydoc_tokenizer) as engine:
        [completion] = engine.generate([PROMPT], _greedy(40, ignore_eos=True))
    return list(completion.token_ids)


def test_more_requests_than_slots_are_served_in_turn(engine: Engine, answer: list[int]) -> None:
    done: list[int] = []
    completions = engine.generate([PROMPT] * 5, _greedy(40, ignore_eos=True), lambda i, _completion: done.append(i))
    assert [list(completion.token_ids) for completion in completions] == [answer] * 5
    assert sorted(done) == list(range(5))
    assert {completion.finish_reason for completion in completions} == {FinishReason.LENGTH}
    stats = completions[0].stats
    assert stats.num_draft_tokens == 8 * stats.num_steps
    # the first token comes from prefill; a last step may have made more than was wanted
    assert 0 <= 1 + stats.num_steps + stats.num_accepted - 40 <= 2


def test_nothing_compiles_after_warm_up(engine: Engine) -> None:
    before = engine.runner.num_compiled
    assert before == engine.runner.num_programs
    rng = random.Random(1)
    prompts = [[rng.randrange(64) for _ in range(rng.randrange(1, 40))] for _ in range(8)]
    params = [
        SamplingParams(max_tokens=rng.randrange(1, 24), temperature=i % 3 / 2, top_p=1 - i / 20, top_k=i, seed=i)
        for i in range(8)
    ]
    engine.generate(prompts, params)
    engine.runner.reset()
    engine.generate(prompts[:2], params[:2])
    assert engine.runner.num_compiled == before


def test_growing_into_wider_page_tables_changes_nothing(
    tiny_target: Target, tiny_head: Head, pydoc_tokenizer: Tokenizer, answer: list[int]
) -> None:
    """Steps read the narrowest table that holds their sequences: here 16 entries, then 56."""
    tree = parse_speculation("chain:2")
    runner = Runner(tiny_target, tiny_head, tree, num_slots=1, max_model_len=56, page_size=2, num_pages=28)
    assert runner.widths == (8, 28)
    with Engine(runner, pydoc_tokenizer, model_name="tiny", eos_ids=()) as engine:
        [completion] = engine.generate([PROMPT], _greedy(40))
    assert list(completion.token_ids) == answer


def test_an_eos_inside_an_accepted_path_ends_the_sequence_there(
    runner: Runner, pydoc_tokenizer: Tokenizer, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that always accepts two: whichever token is the EOS, at either place of a path, nothing follows it."""
    reasons = []
    for eos in sorted(set(answer)):
        told = iter(range(1, len(answer), 3))

        def accept_two(slots: list[int], told: Iterator[int] = told) -> HostResult:
            at = next(told)
            return HostResult(np.array([answer[at : at + 3]]), np.array([2]))

        monkeypatch.setattr(runner, "step", accept_two)
        with _engine(runner, pydoc_tokenizer, eos_ids=(eos,)) as engine:
            inbox = _ask(engine, PROMPT, _greedy(40))
            last = inbox.wait()
        assert inbox.token_ids == answer[: answer.index(eos) + 1]
        assert last.finish_reason == FinishReason.STOP
        reasons.append((len(inbox.token_ids) - 2) % 3)
    assert {0, 1} <= set(reasons), "no EOS fell inside a path: the test tests nothing"


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], _greedy(1), "prompt"),
        ([64], _greedy(1), "prompt"),
        ([-1, 3], _greedy(1), "prompt"),
        ([1] * MAX_LEN, _greedy(1), "prompt"),
        ([1] * 30, _greedy(MAX_LEN - 29), "max_tokens"),
        ([1], _greedy(1, stop_token_ids=[64]), "stop_token_ids"),
    ],
)
def test_what_can_never_be_served_is_refused(
    engine: Engine, prompt: list[int], params: SamplingParams, param: str
) -> None:
    with pytest.raises(RequestError) as error:
        engine.submit(prompt, params, Inbox())
    assert error.value.param == param


def test_a_request_larger_than_the_cache_is_refused(runner: Runner, pydoc_tokenizer: Tokenizer) -> None:
    engine = _engine(runner, pydoc_tokenizer)
    engine.runner.num_pages, before = 3, engine.runner.num_pages
    try:
        with pytest.raises(RequestError, match="need 4 cache pages, the server has 3"):
            engine.submit([1] * 20, _greedy(6), Inbox())
    finally:
        engine.runner.num_pages = before


def test_the_context_can_be_filled_to_the_last_token(engine: Engine) -> None:
    inboxes = [_ask(engine, [3] * n, _greedy(MAX_LEN - n, ignore_eos=True)) for n in (1, 40, MAX_LEN - 1)]
    for inbox, n in zip(inboxes, (1, 40, MAX_LEN - 1), strict=True):
        assert inbox.wait().finish_reason == FinishReason.LENGTH
        assert len(inbox.token_ids) == MAX_LEN - n
    unbounded = _ask(engine, [3] * 50, SamplingParams(temperature=0.0, ignore_eos=True))
    unbounded.wait()
    assert len(unbounded.token_ids) == MAX_LEN - 50


def test_a_full_queue_refuses_and_recovers(runner: Runner, pydoc_tokenizer: Tokenizer) -> None:
    engine = _engine(runner, pydoc_tokenizer, max_queue=3)
    inboxes = [_ask(engine, PROMPT, _greedy(4)) for _ in range(3)]  # the engine has not begun
    with pytest.raises(CapacityError, match="3 requests are waiting"):
        engine.submit(PROMPT, _greedy(4), Inbox())
    with engine:
        for inbox in inboxes:
            inbox.wait()
        _ask(engine, PROMPT, _greedy(4)).wait()
    with pytest.raises(CapacityError, match="stopping"):
        engine.submit(PROMPT, _greedy(4), Inbox())


def test_cancelled_requests_end_wherever_they_are(engine: Engine, answer: list[int]) -> None:
    inboxes = [Inbox() for _ in range(4)]
    requests = [engine.submit(PROMPT, _greedy(40, ignore_eos=True), inbox) for inbox in inboxes]
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
    engine = _engine(runner, pydoc_tokenizer)
    inboxes = [Inbox() for _ in range(4)]
    for inbox in inboxes:
        engine.submit(PROMPT, _greedy(57, ignore_eos=True), inbox)
    with engine:
        inboxes[0].wait_for_first()
    for inbox in inboxes:
        assert inbox.wait().finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)


def test_pages_and_slots_balance_after_a_storm(engine: Engine) -> None:
    """60 requests of all sizes, a third of them cancelled at any moment (the fixture counts the pages)."""
    rng = random.Random(0)
    inboxes: list[tuple[Inbox, int]] = []
    for i in range(60):
        prompt = [rng.randrange(64) for _ in range(rng.randrange(1, 40))]
        wanted = rng.randrange(1, 20)
        params = SamplingParams(max_tokens=wanted, temperature=rng.choice([0.0, 1.0]), seed=i)
        inbox = Inbox()
        request = engine.submit(prompt, params, inbox)
        inboxes.append((inbox, wanted))
        if rng.random() < 0.33:
            threading.Timer(rng.random() * 0.3, request.cancel).start()
        if rng.random() < 0.5:
            time.sleep(rng.random() * 0.01)
    for inbox, wanted in inboxes:
        last = inbox.wait()
        assert last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED)
        assert last.finish_reason != FinishReason.LENGTH or len(inbox.token_ids) == wanted


def test_a_failing_listener_harms_its_request_alone(engine: Engine, answer: list[int]) -> None:
    heard: list[Delta] = []

    def fail(delta: Delta) -> None:
        heard.append(delta)
        raise ValueError("a listener's own fault")

    engine.submit(PROMPT, _greedy(40, ignore_eos=True), fail)
    neighbour = _ask(engine, PROMPT, _greedy(40, ignore_eos=True))
    neighbour.wait()
    assert neighbour.token_ids == answer
    assert len(heard) == 1, "it is not called again"


def test_a_device_error_ends_the_running_and_spares_the_waiting(
    engine: Engine, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = engine.runner.step, []

    def fail_third(slots: list[int]) -> HostResult:
        calls.append(len(slots))
        if len(calls) == 3:
            engine.runner.state = None  # type: ignore[assignment]  # donated, then lost
            raise RuntimeError("out of memory on the device")
        return step(slots)

    monkeypatch.setattr(engine.runner, "step", fail_third)
    inboxes = [_ask(engine, PROMPT, _greedy(40, ignore_eos=True)) for _ in range(4)]
    last = [inbox.wait() for inbox in inboxes]
    failed = [delta for delta in last if delta.finish_reason == FinishReason.ERROR]
    assert 1 <= len(failed) <= 2, "those that ran, and only those"
    assert all("out of memory" in str(delta.error) for delta in failed)
    for inbox, delta in zip(inboxes, last, strict=True):
        if delta.finish_reason != FinishReason.ERROR:
            assert inbox.token_ids == answer, "the rebuilt cache serves as before"


def test_a_seed_decides_the_tokens_and_no_seed_differs(engine: Engine) -> None:
    def run(seed: int | None) -> tuple[int, ...]:
        params = SamplingParams(max_tokens=30, seed=seed, ignore_eos=True)
        return engine.generate([PROMPT], params)[0].token_ids

    assert run(1) == run(1) != run(2)
    assert run(None) != run(None)
    assert run(-1) != run(2**63 - 1)


def test_served_tau_equals_replayed_tau(engine: Engine, tiny_target: Target, tiny_head: Head) -> None:
    """Law 5, to the last accepted token, EOS and length limits included."""
    rng = random.Random(3)
    prompts = [[rng.randrange(64) for _ in range(rng.randrange(1, 30))] for _ in range(12)]
    assert TREE is not None
    meter = AcceptanceMeter(tiny_target, tiny_head.config, TREE, prompts, max_new_tokens=30)
    replayed = meter.measure(tiny_head.params, tiny_head.target_ids)
    stats = [completion.stats for completion in engine.generate(prompts, _greedy(30))]
    accepted = [sum(stat.accepted_per_depth[d] for stat in stats if stat.num_steps) for d in range(TREE.depth)]
    assert sum(accepted) > 10
    assert replayed.num_steps == sum(stat.num_steps for stat in stats)
    assert replayed.accepted_per_depth == tuple(accepted)
    assert replayed.tau == 1 + sum(accepted) / replayed.num_steps
    assert replayed.accept_rate[1] == accepted[1] / accepted[0]


def _request(params: SamplingParams, max_new_tokens: int) -> Request:
    return Request("r", (1,), params, max_new_tokens, 0, lambda _delta: None)


TEXT = "def f(x):\n    # größer 日本語 🎉\n    return x  END of it; END"


@given(
    cuts=st.lists(st.integers(0, 60), max_size=12),
    stops=st.lists(st.sampled_from(["END", " return", "x  E", "本", "\n\n", "ENDs", "zzz", "🎉\n"]), max_size=3),
    limit=st.integers(1, 60),
)
def test_stop_strings_hold_however_the_tokens_arrive(
    pydoc_tokenizer: Tokenizer, cuts: list[int], stops: list[str], limit: int
) -> None:
    """In any pieces: the text is cut before the first stop string, and nothing of it is ever given out."""
    token_ids = pydoc_tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(token_ids) <= 60
    params = SamplingParams(stop=stops)
    stream = OutputStream(_request(params, limit), pydoc_tokenizer, frozenset({2}))
    text, taken, reason = "", [], None
    bounds = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    for start, stop in itertools.pairwise(bounds):
        delta = stream.push(token_ids[start:stop])
        text, reason = text + delta.text, delta.finish_reason
        taken += delta.token_ids
        if reason is not None:
            break
    whole = pydoc_tokenizer.decode(token_ids[:limit])
    found = [at for string in stops if (at := whole.find(string)) >= 0]
    if found:
        assert reason == FinishReason.STOP
        assert text == whole[: min(found)]
        shorter = pydoc_tokenizer.decode(taken[:-1])
        assert not any(string in shorter for string in stops), "it stops at the first token that completes one"
    else:
        assert reason == (FinishReason.LENGTH if limit <= len(token_ids) else None)
        held = max((len(stop) - 1 for stop in stops), default=0)
        assert whole.startswith(text)
        assert len(whole) - len(text) <= (0 if reason else held)
    assert taken == token_ids[: len(taken)]


def test_stop_ids_end_a_sequence_and_are_not_text(pydoc_tokenizer: Tokenizer) -> None:
    [a], [b] = (pydoc_tokenizer.encode(text, add_special_tokens=False) for text in ("a", "b"))
    stream = OutputStream(_request(SamplingParams(stop_token_ids=[b]), 9), pydoc_tokenizer, frozenset({2}))
    assert stream.push([a, a]) == Delta((a, a), "aa")
    assert stream.push([a, b, a]) == Delta((a, b), "a", FinishReason.STOP)
    ignoring = OutputStream(_request(SamplingParams(ignore_eos=True), 3), pydoc_tokenizer, frozenset({b}))
    assert ignoring.push([a, b, b, b]) == Delta((a, b, b), "abb", FinishReason.LENGTH)


@given(st.lists(st.integers(0, 6), max_size=30), st.randoms())
def test_every_page_has_one_owner(sizes: list[int], rng: random.Random) -> None:
    allocator, held = PageAllocator(12), []
    for size in sizes:
        if size <= allocator.num_free:
            held.append(allocator.allocate(size))
        else:
            with pytest.raises(CapacityError):
                allocator.allocate(size)
            allocator.release(held.pop(rng.randrange(len(held))))
        owned = [page for pages in held for page in pages]
        assert len(set(owned)) == len(owned) == 12 - allocator.num_free
    if held and held[0]:
        allocator.release(held[0])
        with pytest.raises(AssertionError):
            allocator.release(held[0])


def test_host_results_emit_the_accepted_and_the_bonus() -> None:
    result = HostResult(np.array([[1, 2, 3], [4, 5, 6]]), np.array([0, 2]))
    assert [result.emitted(0), result.emitted(1)] == [[1], [4, 5, 6]]
