"""The choice of what runs next, against a device that exists only as numbers."""

import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from window_memory import WindowMemory, follows

from specserve.models.cache import WindowSizes
from specserve.serve.engine.options import EngineOptions
from specserve.serve.engine.pages import PagePool, data_rank
from specserve.serve.engine.scheduler import Scheduler
from specserve.serve.engine.sequence import Chunk, Round, Sequence
from specserve.serve.engine.state_places import StatePlaces
from specserve.serve.engine.windows import Windows, window_sizes
from specserve.serve.programs.shapes import tokens_ahead, tokens_at_once
from specserve.serve.requests.output import OutputStream
from specserve.serve.requests.request import Request, SamplingParams

PAGE_SIZE, MAX_STEP, CHUNKS = 4, 3, (4, 16)
BORDER = 8  # of recurrent states


def _request(prompt_ids: list[int], max_new_tokens: int, priority: int = 0, salt: str = "") -> Request:
    return Request(
        "r", tuple(prompt_ids), SamplingParams(), max_new_tokens, 0, lambda _delta: None, priority, cache_salt=salt
    )


def _add(scheduler: Scheduler, request: Request) -> None:
    scheduler.add(Sequence(request, OutputStream(request, None)))


def _scheduler(
    num_slots: int = 2,
    num_pages: int = 12,
    num_ranks: int = 1,
    *,
    cache_lag: int = 0,
    is_deterministic: bool = False,
    prompt_tokens: int = 0,
    num_kept: int = 0,
    windows: WindowSizes = (),
    **options: object,
) -> Scheduler:
    """Slots and pages are each data rank's; the rest are `EngineOptions`. With `prompt_tokens` a program runs as many
    prompts of a rank as have so many tokens, and with `num_kept` prefixes need one of so many states."""
    kept = StatePlaces(num_kept, BORDER) if num_kept else None
    held = Windows(windows, PAGE_SIZE, num_ranks)
    return Scheduler(
        num_slots * num_ranks,
        PagePool(num_pages * num_ranks, PAGE_SIZE, num_ranks=num_ranks, kept=kept, windows=held),
        EngineOptions(**options),  # type: ignore[arg-type]
        chunks=CHUNKS,
        extra_tokens=4,
        most_prompts=lambda chunk: max(1, prompt_tokens // chunk),
        max_step=MAX_STEP,
        cache_lag=cache_lag,
        is_deterministic=is_deterministic,
    )


@dataclass
class Device:
    """Runs rounds of one or more steps, and reads each one round later. The token at a position follows from what
    stands before it, so an answer does not depend on what else runs."""

    scheduler: Scheduler
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    most_steps: int = 1
    # with epoch, tokens at least and at most, and those that it brings
    in_flight: deque[list[tuple[Sequence, int, int, int, int]]] = field(default_factory=deque)
    done: list[Sequence] = field(default_factory=list)
    first: list[int] = field(default_factory=list)  # order of first admissions
    num_prefilled: int = 0
    states: dict[int, list[int]] = field(default_factory=dict)  # by place: the tokens that a kept state is of
    windows: WindowMemory = field(default_factory=WindowMemory)

    def round(self) -> Round:
        scheduler, before = self.scheduler, list(self.scheduler.running)
        waiting, ranks = list(scheduler.waiting), {each: self._rank(each) for each in before}
        plan = scheduler.schedule(self.most_steps)
        self._check(plan, before, waiting, ranks)
        # of a way, in tokens: some emit fewer than others
        size = self.rng.randint(1, MAX_STEP) if self.most_steps > 1 else MAX_STEP
        steps, rows = self.rng.randint(1, plan.num_steps(size)), []
        groups = scheduler.pool.windows.groups
        self.windows.extend(groups, plan.new_pages)
        for sequence in plan.decode:
            numbers = [self.rng.randint(1, size) for _ in range(steps)]
            rows.append((sequence, sequence.epoch, steps, steps * size, sum(numbers)))
            for number in numbers:
                self.windows.commit(groups, sequence, number)
        for side in plan.prefills:
            self.windows.extend(groups, [row for chunk in side for row in chunk.new_pages])
            for chunk in side:
                self.windows.commit(groups, chunk.sequence, chunk.num_tokens, chunk.num_cached)
        for chunk in plan.chunks:
            self.num_prefilled += chunk.num_tokens
            self._keep(chunk)
            if chunk.is_first and not chunk.sequence.output_ids and chunk.sequence.epoch == 0:
                self.first.append(chunk.sequence.order)
            if chunk.is_last:
                rows.append((chunk.sequence, chunk.sequence.epoch, 1, 1, 1))
        for sequence, _, least, most, _ in rows:
            sequence.dispatched(least, most)
        self.in_flight.append(rows)
        while len(self.in_flight) > (0 if plan.is_empty else 1):
            self._land()
        return plan

    def _keep(self, chunk: Chunk) -> None:
        """Do with recurrent states what the device does before and behind a chunk."""
        sequence, kept = chunk.sequence, self.scheduler.pool.kept
        if kept is None:
            assert (sequence.kept, chunk.keep) == (-1, None)
            return
        end = chunk.num_cached + chunk.num_tokens
        if chunk.is_first:
            known = self.states[sequence.kept] if sequence.kept >= 0 else []
            assert known == sequence.token_ids[: chunk.num_cached], "the state is of the tokens that are cached"
            if sequence.kept >= 0:
                kept.was_read(sequence.kept)
        assert chunk.num_cached // BORDER == (end - 1) // BORDER, "none crosses a border"
        if chunk.keep is not None:
            self.states[chunk.keep] = sequence.token_ids[:end]

    def _land(self) -> None:
        for sequence, epoch, least, most, number in self.in_flight.popleft():
            if not sequence.is_of(epoch):
                continue
            sequence.landed(least, most)
            for _ in range(number):
                sequence.output_ids.append(follows(sequence.token_ids))
                if len(sequence.output_ids) == sequence.request.max_new_tokens:
                    self.scheduler.finish(sequence)
                    self.done.append(sequence)
                    break

    def _rank(self, sequence: Sequence) -> int:
        num_ranks = self.scheduler.pool.num_ranks
        return data_rank(sequence.slot, self.scheduler._slots_of_rank * num_ranks, num_ranks)

    def _check(self, plan: Round, before: list[Sequence], waiting: list[Sequence], ranks: dict[Sequence, int]) -> None:
        scheduler = self.scheduler
        scheduler.pool.check()
        held = [each.held for each in scheduler.running if each.held]
        scheduler.pool.windows.check(scheduler.pool._nodes, held)
        ahead = tokens_ahead(self.most_steps, MAX_STEP, scheduler._cache_lag)
        for own, group in ((own, group) for each in held for own, group in zip(each.own, each._groups, strict=True)):
            assert len(own) <= -(-(group.window + ahead) // PAGE_SIZE) + 2, "no more than is planned for a slot"
        for line in (scheduler.running, scheduler.waiting):
            assert [s.rank for s in line] == sorted(s.rank for s in line)
        slots = [sequence.slot for sequence in scheduler.running]
        free = list(itertools.chain(*scheduler._free_slots))
        assert len({*slots, *free}) == len(slots) + len(free)
        pages = set()
        for sequence in scheduler.running:
            request = sequence.request
            committed = len(sequence.token_ids) + sequence.most_in_flight - 1
            if sequence in plan.decode:
                committed += max(plan.most_tokens, MAX_STEP)
                assert sequence not in plan.preempted
            most = len(request.prompt_ids) + request.max_new_tokens - 1
            assert len(sequence.pages) * PAGE_SIZE >= min(committed, most), "a step would write beside its pages"
            assert len(set(sequence.pages)) == len(sequence.pages)
            pages |= set(sequence.pages)
            own = {data_rank(page, scheduler.pool.num_pages, scheduler.pool.num_ranks) for page in sequence.pages}
            assert own == {self._rank(sequence)}, "a sequence has pages of its data rank alone"
        assert scheduler.pool.num_available == scheduler.pool.num_pages - len(pages)
        assert 1 <= plan.most_steps <= self.most_steps
        if plan.most_steps > 1 and plan.decode:
            assert not plan.preempted, "pages for more than one step are nobody else's"
            assert not plan.prefills, "a prompt does not wait for more than one step"
            left = min(tokens_at_once(self.most_steps, MAX_STEP), *(each.num_left for each in plan.decode))
            if plan.most_tokens < left:
                assert not scheduler._has_pages(plan.decode, 2 * plan.most_tokens + 1), "as many as have pages"
                left = plan.most_tokens
            for size in range(1, MAX_STEP + 1):  # tokens of a step, of each way
                most = min(self.most_steps, left // size)
                assert plan.num_steps(size) == max(1, most), "as many as may count, by what its way can emit"
        for victim in plan.preempted:  # the youngest go first
            beside = [other for other in plan.decode if ranks[other] == ranks[victim]]
            assert all(victim.rank > other.rank for other in beside)
        for rank in {*ranks.values()}:
            oldest = next(each for each in before if ranks[each] == rank)
            assert oldest not in plan.preempted, "the oldest of a data rank goes on"
        for slot, column, page, *_ in plan.new_pages:
            [owner] = [sequence for sequence in plan.decode if sequence.slot == slot]
            assert owner.pages[column] == page
        admitted = [chunk.sequence for chunk in plan.chunks if chunk.is_first]
        assert admitted == waiting[: len(admitted)], "nobody overtakes"
        assert not (admitted and plan.preempted)
        assert sum(max(each.num_tokens for each in side) for side in plan.prefills) <= scheduler._prefill_tokens
        for side in plan.prefills:
            most = scheduler._most_prompts(next(size for size in CHUNKS if size >= max(c.num_tokens for c in side)))
            of_rank = Counter(self._rank(chunk.sequence) for chunk in side)
            assert max(of_rank.values()) <= most
            assert len({chunk.sequence for chunk in side}) == len(side)
            for chunk, other in itertools.permutations(side, 2):
                read = chunk.sequence.pages[: chunk.num_cached // PAGE_SIZE]
                assert not {*read} & {*other.sequence.pages[other.num_cached // PAGE_SIZE :]}, "it is not there yet"

    def run(self) -> None:
        for _ in range(10_000):
            if self.round().is_empty and not self.scheduler.waiting and not self.scheduler.running:
                return
        raise AssertionError("they never end")


@st.composite
def _requests(draw: st.DrawFn) -> list[Request]:
    """Prompts of few different tokens share prefixes; each fits the cache alone."""
    requests = []
    for _ in range(draw(st.integers(1, 12))):
        prompt = [0] * draw(st.integers(0, 14)) + draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
        room = 12 * PAGE_SIZE + 1 - len(prompt)
        requests.append(
            _request(prompt, draw(st.integers(1, room)), draw(st.integers(0, 1)), draw(st.sampled_from(["", "", "s"])))
        )
    return requests


@given(
    requests=_requests(),
    num_slots=st.integers(1, 4),
    num_ranks=st.sampled_from([1, 1, 2, 3]),
    prefill_tokens=st.sampled_from([0, 4, 7, 40]),
    cache_lag=st.sampled_from([0, 3]),
    is_caching=st.booleans(),
    is_deterministic=st.booleans(),
    prompt_tokens=st.sampled_from([0, 16]),
    num_kept=st.sampled_from([0, 0, 1, 2, 5]),
    windows=st.sampled_from([(), (1,), (5,), (4, 13)]),
    num_cached=st.sampled_from([0, 1, None]),
    most_steps=st.sampled_from([1, 2, 8, 32]),
    rng=st.randoms(use_true_random=False),
)
def test_everybody_is_served_and_nothing_is_left(
    requests: list[Request],
    num_slots: int,
    num_ranks: int,
    prefill_tokens: int,
    cache_lag: int,
    is_caching: bool,
    is_deterministic: bool,
    prompt_tokens: int,
    num_kept: int,
    windows: tuple[int, ...],
    num_cached: int | None,
    most_steps: int,
    rng: random.Random,
) -> None:
    """No query sees an entry that is not its own sequence's, where pages behind windows are given to others; and each
    window has no more pages than are planned."""
    number = {"num_slots": num_slots, "num_pages": 10_000, "page_size": PAGE_SIZE, "num_cached": num_cached}
    scheduler = _scheduler(
        num_slots,
        num_ranks=num_ranks,
        prefill_tokens=prefill_tokens,
        cache_lag=cache_lag,
        is_caching=is_caching,
        is_deterministic=is_deterministic,
        prompt_tokens=prompt_tokens,
        num_kept=num_kept,
        windows=window_sizes(windows, **number, ahead=tokens_ahead(most_steps, MAX_STEP, cache_lag), chunks=CHUNKS),
    )
    device = Device(scheduler, rng, most_steps)
    for request in requests:
        _add(scheduler, request)
        if rng.random() < 0.5:
            device.round()
    device.run()
    assert len(device.done) == len(requests)
    for sequence in device.done:
        assert len(sequence.output_ids) == sequence.request.max_new_tokens
        token_ids = list(sequence.request.prompt_ids)
        for token_id in sequence.output_ids:
            assert token_id == follows(token_ids), "a token was lost or repeated"
            token_ids.append(token_id)
    assert scheduler.pool.num_available == scheduler.pool.num_pages
    assert sorted(itertools.chain(*scheduler._free_slots)) == list(range(num_slots * num_ranks))
    assert not is_deterministic or scheduler.num_preemptions == 0
    assert is_caching or scheduler.num_hits == scheduler.pool.num_cached == 0
    if all(request.priority == 0 for request in requests):
        assert device.first == sorted(device.first)


def _admitted(device: Device, prompt: list[int], answer: int) -> Sequence:
    """A sequence that waits for nothing, with its prompt read."""
    _add(device.scheduler, _request(prompt, answer))
    [sequence] = device.scheduler.waiting
    device.round()
    assert sequence.is_running
    return sequence


def test_prefixes_with_a_recurrent_state_are_hit() -> None:
    """A conversation goes on behind its last prompt's state. A beginning that two prompts share has one from the second
    on, which is computed in its pages' other holder's name. With one place the newest state is there alone."""
    for num_kept in (1, 4):
        device = Device(_scheduler(1, num_pages=60, num_kept=num_kept))
        pool = device.scheduler.pool

        def cached(prompt: list[int], device: Device = device) -> int | None:
            sequence = _admitted(device, prompt, 1)
            device.run()
            return sequence.num_cached

        start, turn = [1] * 17, [2] * 9
        assert [cached(start + turn) for _ in range(2)] == [0, 24]
        assert cached([*start, *turn, 3, 3, 3, 3, 3, 3, 3]) == 24, "the next turn"
        assert cached(start + [4] * 9) == 0, "no state is kept where this one leaves the others"
        assert cached(start + [5] * 9) == 16, "but now it is"
        assert cached(start + turn) == (24 if num_kept > 1 else 16)
        device.scheduler.pool.check()
        assert pool.kept is not None
        pool.flush()
        assert cached(start + turn) == 0


def test_a_sequence_goes_to_the_data_rank_that_has_its_prefix_or_else_to_the_emptiest() -> None:
    device = Device(_scheduler(6, num_pages=40, num_ranks=3))
    first, *others = (_admitted(device, [i] * 9, 20) for i in range(3))
    assert {device._rank(each) for each in (first, *others)} == {0, 1, 2}, "the one with the most free pages"
    for _ in range(4):
        hit = _admitted(device, [0] * 9, 20)
        assert device._rank(hit) == device._rank(first)
        assert hit.num_cached == 8
        assert hit.pages[:2] == first.pages[:2]
    miss = _admitted(device, [0] * 9, 20)
    assert device._rank(miss) != device._rank(first), "steps would wait for the fullest rank"
    assert miss.num_cached == 0
    device.run()
    pool = device.scheduler.pool
    assert [pool.match([1] * 9, rank=rank) for rank in range(3)].count(0) == 2, "a hit is one of its rank"


def test_data_ranks_prefill_side_by_side() -> None:
    """One prompt each; the second of a rank finds what the first has left."""
    device = Device(_scheduler(4, num_pages=40, num_ranks=2))
    for token_id, length in ((1, 20), (2, 20), (1, 20), (3, 3)):
        _add(device.scheduler, _request([token_id] * length, 1))
    found = [
        [[(chunk.sequence.order, chunk.num_tokens) for chunk in side] for side in device.round().prefills]
        for _ in range(3)
    ]
    assert found == [[[(0, 16), (1, 16)]], [[(0, 4), (1, 4)], [(2, 4), (3, 3)]], []]


def _prefills(device: Device) -> list[list[tuple[int, int]]]:
    """The programs of the next round: which sequences, and so many tokens of each."""
    return [[(chunk.sequence.order, chunk.num_tokens) for chunk in side] for side in device.round().prefills]


def test_short_prompts_run_side_by_side_where_a_program_takes_several() -> None:
    """Four of at most four tokens, among them the beginning of a longer one; the rest of that goes alone."""
    device = Device(_scheduler(8, num_pages=60, prompt_tokens=16))
    for order, length in enumerate((3, 2, 18, 4, 1, 3, 4)):
        _add(device.scheduler, _request([order] * length, 1))
    found = [_prefills(device) for _ in range(3)]
    assert found == [[[(0, 3), (1, 2), (2, 4), (3, 4)]], [[(2, 14)]], [[(4, 1), (5, 3), (6, 4)]]]


def test_a_prompt_that_begins_as_another_does_waits_for_the_next_program() -> None:
    """It finds there what the other one has computed. With a salt of its own it has nothing to wait for."""
    device = Device(_scheduler(8, num_pages=60, prompt_tokens=16, prefill_tokens=32))
    for token_id, salt in ((1, ""), (2, ""), (1, "salt"), (1, ""), (3, "")):
        _add(device.scheduler, _request([0] * PAGE_SIZE + [token_id], 1, salt=salt))
    assert _prefills(device) == [[(0, 4)], [(0, 1), (1, 1), (2, 4), (3, 1)], [(2, 1)], [(4, 1)]]


def _sharing(shared: int, own: int, token_id: int) -> list[int]:
    """A prompt that begins as all of these do."""
    return [0] * shared + [token_id] * own


def test_a_small_hit_keeps_no_data_rank_waiting() -> None:
    """A page of a prompt of ten, on a rank that still prefills: the others take their prompts beside it."""
    device = Device(_scheduler(4, num_pages=40, num_ranks=4))
    _add(device.scheduler, _request(_sharing(PAGE_SIZE, 36, 1), 1))
    device.round()
    for token_id in (2, 3, 4):
        _add(device.scheduler, _request(_sharing(PAGE_SIZE, 36, token_id), 1))
    found = [[chunk.sequence.order for chunk in side] for side in device.round().prefills]
    assert found == [[0, 1, 2, 3]]


@pytest.mark.parametrize(("shared", "num_waiting", "is_drawn"), [(16, 1, True), (16, 3, False), (32, 3, True)])
def test_a_hit_is_waited_for_where_that_saves_more_than_idle_ranks_could_do(
    shared: int, num_waiting: int, is_drawn: bool
) -> None:
    """The rank has 8 tokens left to prefill, which three others would wait for, if there are prompts for them. (One
    sequence of so many slots hardly counts.)"""
    device = Device(_scheduler(30, num_pages=60, num_ranks=4))
    _add(device.scheduler, _request(_sharing(shared, 40 - shared, 1), 20))
    for _ in range(2):
        device.round()
    [first] = device.scheduler.running
    assert first.num_start - first.num_prefilled == 8
    for token_id in range(num_waiting):
        _add(device.scheduler, _request(_sharing(shared, 40 - shared, 2 + token_id), 20))
    second, *_ = device.scheduler.waiting
    device.round()
    assert (device._rank(second) == device._rank(first)) == is_drawn
    assert second.num_cached == (shared if is_drawn else 0)
    device.run()


def test_a_fuller_data_rank_draws_larger_hits_alone() -> None:
    """Two sequences more than another rank, of a bound of three, are worth two thirds of a prompt."""
    device = Device(_scheduler(4, num_pages=40, num_ranks=2))
    first, second, third, fourth = (_admitted(device, _sharing(4, 5, token_id), 20) for token_id in (1, 2, 3, 2))
    assert device._rank(second) == device._rank(first), "half of the prompt, and one sequence more"
    assert device._rank(third) != device._rank(first), "half of the prompt, and two sequences more"
    assert (device._rank(fourth), fourth.num_cached) == (device._rank(first), 8), "all of it, and one more"
    device.run()


def test_pages_are_taken_as_a_sequence_grows() -> None:
    scheduler = _scheduler(1)
    device = Device(scheduler)
    _add(scheduler, _request([1] * 9, 20))
    held = []
    while not device.done:
        device.round()
        held.append(scheduler.pool.num_pages - scheduler.pool.num_available)
    assert held[0] == 3, "the prompt's"
    assert held[:-1] == sorted(held[:-1])
    assert max(held) == 7, "9 + 20 - 1 entries"


def test_deterministic_sequences_reserve_their_whole_answer() -> None:
    scheduler = _scheduler(2, num_pages=10, is_deterministic=True)
    for _ in range(2):
        _add(scheduler, _request([1] * 9, 20))
    scheduler.schedule()
    assert [len(sequence.pages) for sequence in scheduler.running] == [7]
    assert len(scheduler.waiting) == 1, "7 more pages are not to be had"


def test_a_preempted_sequence_finds_its_own_words_in_the_cache() -> None:
    scheduler = _scheduler(2, num_pages=9)
    device = Device(scheduler)
    _add(scheduler, _request([1] * 9, 24))
    _add(scheduler, _request([2] * 9, 24))
    preempted: list[Sequence] = []
    while not preempted:
        preempted += device.round().preempted
    [victim] = preempted
    assert (victim.order, victim.is_running, victim.output_ids != []) == (1, False, True)
    num_said, before = len(victim.output_ids), device.num_prefilled
    device.run()
    assert scheduler.num_preemptions >= 1
    assert device.num_prefilled - before < 9 + num_said, "some of it was cached"
    assert (victim.num_cached, scheduler.num_queried) == (0, 18), "hits of its own words are nobody's hits"


@pytest.mark.parametrize("prefers_cached", [False, True])
def test_the_longest_cached_prefix_goes_first_among_equals(prefers_cached: bool) -> None:
    scheduler = _scheduler(1, prefers_cached=prefers_cached)
    device = Device(scheduler)
    cached = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    _add(scheduler, _request(cached, 2))
    device.run()
    for prompt, priority in (([9] * 9, 0), (cached[:5] + [0] * 4, 0), (cached, 0), (cached, 1), ([8] * 5, -1)):
        _add(scheduler, _request(prompt, 2, priority))
    device.first.clear()
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule()
        device.first += [chunk.sequence.order for chunk in plan.chunks if chunk.is_first]
        for sequence in list(scheduler.running):
            scheduler.finish(sequence)
    assert device.first == ([5, 3, 2, 1, 4] if prefers_cached else [5, 1, 2, 3, 4])


def test_a_prompt_shares_its_round_with_what_is_left_of_it() -> None:
    """Chunks of one round hold no more than the largest, or than was asked for; one prompt at a time."""
    scheduler = _scheduler(4, num_pages=40)
    for length in (20, 3, 3, 30):
        _add(scheduler, _request([length] * length, 1))
    device = Device(scheduler)
    chunks = [[(chunk.sequence.order, chunk.num_tokens) for chunk in device.round().chunks] for _ in range(5)]
    assert chunks == [[(0, 16)], [(0, 4), (1, 3), (2, 3), (3, 4)], [(3, 16)], [(3, 10)], []]


def test_the_last_token_of_a_prompt_is_always_run() -> None:
    """Its logits are wanted, even if all its pages are cached."""
    scheduler = _scheduler(1)
    for _ in range(2):
        _add(scheduler, _request([1] * 8, 1))
    device = Device(scheduler)
    device.run()
    assert device.num_prefilled == 8 + 4
    assert scheduler.num_hits == 4
