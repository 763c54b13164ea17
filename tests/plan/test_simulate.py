"""The simulator against closed forms: sums of costs, queueing theory, conservation; and what routing may never do."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specserve.plan.simulate import NANO, SLACK, Arrival, Replica, Router, Routing, poisson, simulate
from specserve.plan.steady_state import Load, acceptance, break_even_tau, solve, tau_of
from specserve.plan.step_costs import StepCosts

COSTS = StepCosts(
    batch_sizes=(1, 2, 4, 8),
    plain=(0.010, 0.011, 0.013, 0.017),
    step=(0.015, 0.017, 0.021, 0.029),
    chunks=(16, 64, 256),
    prefill=(0.012, 0.020, 0.050),
    source="made up",
)
PLAIN = Replica(COSTS, num_slots=8, num_pages=512, page_size=16)
SPECULATIVE = dataclasses.replace(PLAIN, acceptance=(0.8, 0.7, 0.6), cache_lag=4)
ROUTINGS: tuple[Routing, ...] = ("round-robin", "least-loaded", "prefix", "random")


def _times(answers):
    return sorted((answer.arrival.time, answer.first, answer.last, answer.cached) for answer in answers)


def test_one_request_takes_the_sum_of_its_costs() -> None:
    """Chunks of 256, 256 and 64 (of which 38 are filled), then a step for each token but the first."""
    [answer] = simulate(PLAIN, 1, [Arrival(5, prompt=550, answer=40)], routing="random", seed=0).answers
    assert answer.first - 5 == round(NANO * (2 * 0.050 + 0.020))
    assert answer.last - answer.first == 39 * round(NANO * 0.010)


def test_a_request_whose_drafts_are_all_accepted_takes_that_many_steps() -> None:
    sure = dataclasses.replace(PLAIN, acceptance=(1.0, 1.0, 1.0))
    report = simulate(sure, 1, [Arrival(0, prompt=16, answer=41)], routing="random", seed=0)
    assert report.answers[0].last == round(NANO * 0.012) + 10 * round(NANO * 0.015)
    assert (report.num_steps, report.num_tokens, report.tau) == (10, 40, 4.0)


def test_a_queue_before_one_server_waits_as_long_as_theory_says() -> None:
    """M/D/1: prompts of one chunk with one token to say, one at a time. The mean wait is rho D / (2 (1 - rho))."""
    single = dataclasses.replace(PLAIN, num_slots=1)
    service, rho, waits = COSTS.prefill[0], 0.7, []
    for seed in range(16):
        arrivals = poisson(rho / service, 1500 * service / rho, prompt=16, answer=1, seed=seed)
        report = simulate(single, 1, arrivals, routing="least-loaded", seed=seed)
        waits.append(np.mean([answer.ttft - service for answer in report.answers[300:]]))  # each begins empty
    expected = rho * service / (2 * (1 - rho))
    low, high = stats.t.interval(0.999, len(waits) - 1, np.mean(waits), stats.sem(waits))
    assert low < expected < high
    assert high < 2 * expected, "an interval that says something"


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 120), st.integers(1, 60)), min_size=1, max_size=40),
    pages=st.integers(12, 60),
    is_speculative=st.booleans(),
    routing=st.sampled_from(ROUTINGS),
)
def test_every_token_that_is_asked_comes_out(sizes, pages, is_speculative, routing) -> None:
    """Also where pages are few, so that sequences give theirs up and are computed again."""
    setup = dataclasses.replace(SPECULATIVE if is_speculative else PLAIN, num_pages=pages)
    asked = [Arrival(ms * 1_000_000, prompt, answer) for ms, prompt, answer in sizes]
    report = simulate(setup, 2, asked, routing=routing, seed=1)
    assert sorted(map(repr, (answer.arrival for answer in report.answers))) == sorted(map(repr, asked))
    assert all(answer.num_tokens == answer.arrival.answer for answer in report.answers)
    assert all(answer.arrival.time < answer.first <= answer.last for answer in report.answers)
    assert max(report.most_pages) <= pages
    # nothing is computed faster than a step that accepts all it can
    most = len(setup.acceptance) + 1
    floor = min(COSTS.of(is_speculative))
    assert all(a.last - a.first >= (-(-(a.arrival.answer - 1) // most) - 1) * floor * NANO for a in report.answers)


def test_a_small_cache_preempts_and_still_answers() -> None:
    tight = dataclasses.replace(PLAIN, num_pages=14)
    asked = [Arrival(i, prompt=16, answer=100) for i in range(6)]
    report = simulate(tight, 1, asked, routing="random", seed=0)
    assert report.num_preemptions > 0
    assert [answer.num_tokens for answer in report.answers] == [100] * 6


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_seed_decides_everything(routing: Routing) -> None:
    asked = poisson(60, 5, prompt=100, answer=30, seed=3, groups=4, shared=64)
    first, again, other = (simulate(SPECULATIVE, 3, asked, routing=routing, seed=seed) for seed in (7, 7, 8))
    assert first == again
    assert _times(first.answers) != _times(other.answers)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.integers(2, 12), st.floats(2, 40))
def test_prefix_routing_finds_at_least_what_random_routing_finds(seed, replicas, groups, rate) -> None:
    asked = poisson(rate, 6, prompt=128, answer=20, seed=seed, groups=groups, shared=96)
    roomy = dataclasses.replace(PLAIN, num_pages=4096)
    near, anywhere = (simulate(roomy, replicas, asked, routing=way, seed=seed) for way in ("prefix", "random"))
    assert near.hit_rate >= anywhere.hit_rate


@dataclasses.dataclass(eq=False)
class _Loaded:
    load: int


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 30), min_size=4, max_size=4)), min_size=1))
def test_routing_keeps_to_its_bounds(turns) -> None:
    """A prefix draws a request to a replica that has had it, unless that has clearly more to do than the least loaded
    one, which then gets it."""
    replicas = [_Loaded(0) for _ in range(4)]
    near, least = (Router(replicas, way, 16, 0) for way in ("prefix", "least-loaded"))
    had: dict[int, set[_Loaded]] = {}
    for group, loads in turns:
        for replica, load in zip(replicas, loads, strict=True):
            replica.load = load
        arrival = Arrival(0, prompt=64, answer=1, group=group, shared=32)
        assert least.choose(arrival).load == min(loads)
        chosen, known = near.choose(arrival), had.setdefault(group, set())
        can_stay = any(each.load <= min(loads) + SLACK for each in known)
        assert chosen.load <= min(loads) + SLACK
        assert (chosen in known) if can_stay else chosen.load == min(loads)
        known.add(chosen)


def test_round_robin_deals_requests_out_in_turn() -> None:
    asked = [Arrival(i * NANO, prompt=16, answer=2) for i in range(7)]
    report = simulate(PLAIN, 3, asked, routing="round-robin", seed=0)
    assert [answer.replica for answer in report.answers] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("is_speculative", [False, True])
def test_a_full_fleet_carries_what_the_steady_state_says(is_speculative: bool) -> None:
    """Many requests at once: throughput is that of full batches with a prompt for each, but for beginning and end."""
    setup = SPECULATIVE if is_speculative else PLAIN
    tau = 1.0 + sum(itertools.accumulate(setup.acceptance, lambda p, q: p * q))
    asked = [Arrival(0, prompt=64, answer=65) for _ in range(600)]
    report = simulate(setup, 2, asked, routing="round-robin", seed=2)
    way = solve(COSTS, Load(1e9, 64, 65), tau, is_speculative=is_speculative)
    carried = 300 / (report.end / NANO)
    assert way.is_full
    # a sequence's last step may emit more than was asked, and a slot is free for the round that is under way
    lost = (len(setup.acceptance) / 2 + (tau if is_speculative else 1)) / 64
    assert way.most_requests * (1 - lost - 0.05) < carried < way.most_requests * 1.02


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_a_loaded_replica_is_as_fast_as_the_steady_state_says(num_ranks: int, share: float) -> None:
    """On one data rank as on many. Requests that come at random wait more than an even flow, which the steady state is;
    of that it is short by up to two thirds, whatever the number of ranks."""
    sizes = tuple(num_ranks * size for size in COSTS.batch_sizes)
    costs = dataclasses.replace(COSTS, batch_sizes=sizes, num_ranks=num_ranks)
    setup = Replica(costs, num_slots=sizes[-1], num_pages=512 * num_ranks, page_size=16)
    most = solve(costs, Load(1e9, 256, 65), 1.0, is_speculative=False).most_requests
    way = solve(costs, Load(share * most, 256, 65), 1.0, is_speculative=False)
    asked = poisson(share * most, 250 / (share * most), prompt=256, answer=65, seed=5)
    played = np.mean([answer.tpot for answer in simulate(setup, 1, asked, routing="random", seed=0).answers])
    assert not way.is_full
    assert way.token_seconds < played * 1.05
    assert played < 1.67 * way.token_seconds


def test_prompts_that_come_alone_gain_nothing_from_data_ranks() -> None:
    """Under a small load a program has one prompt, and under the largest one for each rank."""
    one, many = (dataclasses.replace(COSTS, num_ranks=ranks) for ranks in (1, 8))
    ways = [
        [solve(costs, Load(rate, 256, 65), 1.0, is_speculative=False) for costs in (one, many)] for rate in (1e-3, 1e9)
    ]
    (alone, beside), (full, side_by_side) = ways
    assert beside.token_seconds == pytest.approx(alone.token_seconds, rel=1e-5)
    prompt, steps = COSTS.prefill_seconds(256)[0], 64 * COSTS.plain[-1] / COSTS.batch_sizes[-1]
    assert 1 / full.most_requests == pytest.approx(prompt + steps)
    assert 1 / side_by_side.most_requests == pytest.approx(prompt / 8 + steps)


def test_answers_of_one_token_fill_a_replica_with_prompts() -> None:
    way = solve(COSTS, Load(1e9, 256, 1), 1.0, is_speculative=False)
    assert (way.is_full, way.token_seconds, way.batch) == (True, 0.0, 0.0)
    assert way.most_requests == pytest.approx(1 / COSTS.prefill_seconds(256)[0])


def test_speculation_breaks_even_at_its_tau() -> None:
    """At that tau the same load keeps as many sequences running, each with as many tokens per second."""
    for rate in (0.05, 0.6, 1.7, 2.4):
        load = Load(rate, 64, 100)
        plain = solve(COSTS, load, 1.0, is_speculative=False)
        even = solve(COSTS, load, break_even_tau(COSTS, plain.batch), is_speculative=True)
        assert not plain.is_full
        for way in (plain, even):  # each second goes to prompts and to steps
            prompt, _ = COSTS.prefill_seconds(load.prompt)
            steps = rate * (load.answer - 1) / (way.tau * way.batch)
            assert rate * prompt + steps * way.step_seconds == pytest.approx(1)
        assert even.batch == pytest.approx(plain.batch)
        assert even.tokens_per_second == pytest.approx(plain.tokens_per_second)
        assert even.token_seconds == pytest.approx(plain.token_seconds)


@given(st.floats(1.0, 4.0), st.integers(3, 8))
def test_a_tau_of_the_same_depth_stays_itself(tau: float, depth: int) -> None:
    assert tau_of(tau, depth, depth) == pytest.approx(tau)
    assert 0 <= acceptance(tau, depth) <= 1
    assert tau_of(tau, depth, depth + 1) >= tau
