"""The counts behind tau: a step more, two counts together, and what follows from them."""

from specserve.serve.requests.request import SpeculationStats
from specserve.speculative.acceptance import Acceptance


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
