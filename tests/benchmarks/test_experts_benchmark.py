"""What the forms of the experts cost is measured for each, and for the one that is chosen."""

import jax
from experts import FORMS, measure_moe

from specserve.models.config import Experts
from specserve.models.moe import choose_form


def test_every_form_is_timed() -> None:
    experts = Experts(num_experts=4, top_k=2, d_ff=8)
    rows = list(measure_moe([(8, experts)], (1, 3), repeats=2))
    assert [row.num_tokens for row in rows] == [1, 3]
    for row in rows:
        assert row.ms.keys() == {form.__name__ for form in FORMS}
        assert min(row.ms.values()) > 0
        assert row.chosen == choose_form(experts, row.num_tokens, jax.default_backend()).__name__
