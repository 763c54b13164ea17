"""Speculation changes no token on an accelerator either (`JAX_PLATFORMS=cuda pytest -n 0 -m gpu`, or `-m tpu`): answers
of the tiny target in float32 that no order of sums may change. On CPUs the other files here hold more."""

from collections.abc import Iterator

import jax
import numpy as np
import pytest
from engines import MAX_LEN, PAGE_SIZE, Fixed, Reference, compile_programs, make_engine, make_runner, run, serving

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation

pytestmark = [pytest.mark.gpu, pytest.mark.tpu]
SLOTS = 4


@pytest.fixture(scope="module", autouse=True)
def _whole_products() -> Iterator[None]:
    """Products of float32 numbers have fewer bits there by default. For every thread: programs are made in others."""
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.fixture(scope="module")
def reference(tiny_target: Target) -> Iterator[Reference]:
    made = Reference(tiny_target)
    compile_programs(made.runner)
    with serving(made.engine):
        yield made


@pytest.mark.parametrize("way", ["off", "chain:3", "tree:3x3x8", "ngram:3"])
@pytest.mark.parametrize("has_room", [True, False])
def test_more_requests_than_slots_answer_as_plain_decoding_does_alone(
    tiny_target: Target, tiny_head: Head, reference: Reference, way: str, has_room: bool
) -> None:
    """Ragged prompts, greedy and sampled, asked twice: the second time from the prefix cache. Without room for all
    pages sequences are preempted."""
    rng = np.random.default_rng(7)
    asks = [reference.any_ask(rng, int(rng.integers(2, MAX_LEN // 2 - 4)), bool(i % 2)) for i in range(3 * SLOTS)]
    pages = 0 if has_room else SLOTS * MAX_LEN // PAGE_SIZE * 5 // 8
    runner = make_runner(tiny_target, tiny_head, way, num_slots=SLOTS, num_pages=pages, has_constrained=False)
    compile_programs(runner)
    with serving(make_engine(runner, Fixed(parse_speculation(way)))) as engine:
        for _ in range(2):
            for ask, inbox in zip(asks, run(engine, asks), strict=True):
                reference.check(ask, inbox)
        assert (engine.stats().num_preemptions > 0) == (not has_room)
