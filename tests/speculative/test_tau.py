"""The counts behind tau: a step more, two counts together, and what follows from them."""

import pytest

from specserve.serve.requests.request import SpeculationStats
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.intervals import Interval, tau_interval


def test_steps_add_up() -> None:
    """A chain of 3 that accepts 2 and none, a longer one that accepts 4, and a step of plain decoding."""
    found = Acceptance()
    for n_accepted, depth in ((2, 3), (0, 3), (4, 5)):
        found = found.after_step(n_accepted, depth=depth, num_draft_tokens=depth)
    found = found.after_step()
    assert found == Acceptance(num_steps=4, num_draft_tokens=11, accepted_per_depth=(2, 2, 1, 1, 0))
    assert found.num_accepted == 6
    assert found.tau == 1 + 6 / 4, "each step emits a token of the target's own as well"
    assert found.accept_rate == (2 / 4, 2 / 2, 1 / 2, 1 / 1, 0.0)


@pytest.mark.parametrize(("num_emitted", "accepted", "num_cut"), [(4, 3, 0), (3, 3, 1), (2, 2, 1), (1, 1, 1)])
def test_what_lies_behind_the_end_of_an_answer_is_not_counted(num_emitted: int, accepted: int, num_cut: int) -> None:
    """An answer of a first token, a whole step that accepts 1, and a last one that accepts 3 tokens."""
    last = {"depth": 3, "num_draft_tokens": 3, "num_emitted": num_emitted}
    found = Acceptance().after_step(1, depth=3, num_draft_tokens=3).after_step(3, **last)
    assert (found.num_accepted, found.num_cut, found.num_emitted) == (1 + accepted, num_cut, 2 + num_emitted)
    assert found.tau == (2 + num_emitted) / 2
    assert found + found - found == found
    assert tau_interval([found, found]) == Interval(found.tau, found.tau)


def test_counts_of_sequences_add_up_whatever_their_depths() -> None:
    """The sum holds what can be summed up: how much of each prompt was cached is not in it."""
    stats = [
        SpeculationStats(10, 30, (6, 3, 1), num_cached_tokens=8),
        SpeculationStats(),
        SpeculationStats(2, 2, (1,), num_cached_tokens=3),
    ]
    assert sum(stats, Acceptance()) == Acceptance(12, 32, (7, 3, 1))
    assert Acceptance(12, 32, (7, 3, 1)) - Acceptance(2, 2, (1,)) == Acceptance(10, 30, (6, 3, 1))


def test_nothing_was_speculated() -> None:
    assert (Acceptance().tau, Acceptance().accept_rate) == (1.0, ())
    assert (Acceptance(0, 0, (0, 0)).tau, Acceptance(0, 0, (0, 0)).accept_rate) == (1.0, (0.0, 0.0))
    assert Acceptance(num_steps=5).tau == 1.0
