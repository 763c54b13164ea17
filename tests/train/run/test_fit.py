"""Laws of what fits: more time or a faster device never gives smaller sizes, what is chosen keeps its bounds, what the
user gives is part of what it costs, and a run that makes no sense is known."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import LAPTOP

from specserve.checkpoints.configs import find_config
from specserve.devices import DEVICES, REFERENCE, Device
from specserve.models.presets import PRESETS
from specserve.train.run.fit import ENOUGH_STEPS, LADDER, LEAST_STEPS, STEP_SECONDS, fit, largest_target

SMALL, LARGE = (find_config(name)[0] for name in ("qwen3-0.6b", "qwen3-8b"))


def rung(device: Device, seconds: float, **given: Any) -> int:
    return LADDER.index(fit(device, SMALL, given, seconds=seconds).sizes)


@settings(max_examples=20)
@given(st.floats(1.0, 1e7), st.floats(1e9, 1e16), st.floats(1, 1000), st.booleans())
def test_more_of_anything_is_never_smaller(seconds: float, peak: float, more: float, is_measured: bool) -> None:
    device = dataclasses.replace(LAPTOP, peak=peak, is_measured=is_measured)
    faster = dataclasses.replace(device, peak=peak * more)
    here = rung(device, seconds)
    assert rung(device, seconds * more) <= here
    assert rung(faster, seconds) <= here


@settings(max_examples=20)
@given(st.floats(1.0, 1e7), st.floats(1e9, 1e16))
def test_what_is_chosen_is_the_highest_that_keeps_its_bounds(seconds: float, peak: float) -> None:
    device = dataclasses.replace(LAPTOP, peak=peak)
    found = fit(device, SMALL, {}, seconds=seconds)
    i = LADDER.index(found.sizes)
    assert i == len(LADDER) - 1 or (found.step_seconds <= STEP_SECONDS and found.num_steps >= ENOUGH_STEPS)
    assert found.num_steps == pytest.approx(seconds / found.step_seconds)
    if i:
        step = fit(device, SMALL, LADDER[i - 1].settings(SMALL), seconds=seconds).step_seconds
        assert step > STEP_SECONDS or seconds / step < ENOUGH_STEPS


def test_the_ladder_falls() -> None:
    for above, below in itertools.pairwise(LADDER):
        assert above.positions == 2 * below.positions
        assert above.rollout >= below.rollout
        assert above.vocab_size >= below.vocab_size
        assert above.seq_len >= below.seq_len


def test_an_accelerator_trains_as_published_heads_were_until_time_is_short() -> None:
    for device in DEVICES:
        assert fit(device, LARGE, {}).sizes == LADDER[0], "however long a step takes"
        assert fit(device, LARGE, {}, seconds=3600 * 10).sizes == LADDER[0]
    assert fit(REFERENCE, LARGE, {}, seconds=60.0).sizes != LADDER[0]


def test_what_is_given_is_part_of_the_cost() -> None:
    steps = [fit(LAPTOP, SMALL, {"train.rollout": rollout}).step_seconds for rollout in (1, 8)]
    positions = [fit(LAPTOP, SMALL, {"train.rollout": rollout}).sizes.positions for rollout in (1, 8)]
    assert steps[0] / positions[0] < steps[1] / positions[1]
    long = fit(LAPTOP, SMALL, {"train.seq_len": 2048, "train.batch_size": 8})
    assert long.step_seconds > STEP_SECONDS
    assert fit(LAPTOP, SMALL, {"drafter": "dflash", "train.anchors": 600}).sizes.seq_len > 600
    impossible = fit(LAPTOP, SMALL, {"draft.vocab_size": 10**9})  # the checks of the run report it
    assert impossible.sizes == LADDER[0]


def test_what_makes_no_sense_is_known() -> None:
    """A target that has no room, and one for which there is no time; with as much time as is said, or a target as
    small, there is."""
    assert not fit(LAPTOP, LARGE, {}, seconds=math.inf).makes_sense
    assert not fit(LAPTOP, LARGE, {}, seconds=math.inf).is_possible
    short = fit(LAPTOP, SMALL, {}, seconds=60.0)
    assert not short.makes_sense
    assert short.is_possible
    assert short.num_steps < LEAST_STEPS
    enough = fit(LAPTOP, SMALL, {}, seconds=60.0 * ENOUGH_STEPS / short.num_steps)
    assert enough.num_steps == pytest.approx(ENOUGH_STEPS)
    assert largest_target(SMALL, short, LAPTOP) < PRESETS["qwen3-0.6b"].config().d_model * 1e6
