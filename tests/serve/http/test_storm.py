"""When everything has happened at once nothing is held, nothing was compiled, and every answer was right."""

import pytest
from engines import Reference
from storms import storm

from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import FinishReason

FEW_PAGES = 14  # for four sequences of up to twelve


@pytest.mark.parametrize(
    ("num_requests", "num_distinct"),
    [(120, 40), pytest.param(2000, 400, marks=pytest.mark.slow)],
)
def test_after_a_storm_nothing_is_held_and_every_answer_was_right(
    runner: Runner, reference: Reference, num_requests: int, num_distinct: int
) -> None:
    stats, reasons = storm(runner, reference, num_requests, num_distinct, FEW_PAGES)
    assert stats.num_preemptions > num_requests // 20, "pages were not few enough"
    assert stats.num_prefix_hits > stats.num_prefix_queries / 5
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED}
