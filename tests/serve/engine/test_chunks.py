"""What prompts are cut into: the chunks that take the least time, of programs that are here."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.serve.engine.pages import PagePool
from specserve.serve.engine.scheduler import Scheduler, chunk_size
from specserve.serve.engine.sequence import Sequence
from specserve.serve.programs.compile_queue import CompiledPrograms
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.output import OutputStream
from specserve.serve.requests.request import Request, SamplingParams
from specserve.speculative.program import StepProgram


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True), st.integers(1, 200), st.integers(0, 20))
def test_a_prompt_is_cut_into_the_chunks_that_take_least(sizes: list[int], length: int, extra: int) -> None:
    """No other way to cut it takes less, but that whole chunks of the largest size come first."""
    sizes = sorted(sizes)
    least = [0]
    for number in range(1, length + 1):
        least.append(min(size + extra + least[max(0, number - size)] for size in sizes))
    rest, taken = length, 0
    while rest > 0:
        size = chunk_size(sizes, rest, extra)
        rest, taken = rest - size, taken + size + extra
    whole = max(0, length // sizes[-1] - 1)
    assert taken == whole * (sizes[-1] + extra) + least[length - whole * sizes[-1]]


def test_a_prompt_is_cut_into_chunks_of_programs_that_are_here() -> None:
    scheduler = Scheduler(1, PagePool(40, 4), chunks=(4, 16), extra_tokens=4, max_step=1)
    missing, asked = {16}, list[int]()
    scheduler.is_here = lambda size: asked.append(size) is None and size not in missing

    def chunks(token_id: int) -> list[int]:
        request = Request("r", (token_id,) * 14, SamplingParams(), 1, 0, lambda _delta: None)
        sequence = Sequence(request, OutputStream(request, None))
        scheduler.add(sequence)
        found = [chunk.num_tokens for chunk in scheduler.schedule().chunks]
        scheduler.finish(sequence)
        return found

    assert (chunks(1), asked[0]) == ([4, 4, 4, 2], 16), "the best one is asked for first, so that it is made"
    missing.clear()
    assert chunks(2) == [14]


@pytest.mark.parametrize(
    ("alone", "followed", "is_run_alone"),
    [((16,), (16,), True), ((64,), (16,), False), ((64,), (), True), ((), (16,), False)],
)
def test_the_target_runs_alone_with_no_more_padding(
    alone: tuple[int, ...], followed: tuple[int, ...], is_run_alone: bool
) -> None:
    """A chunk of 64 for ten tokens takes longer than one of 16 by which the draft follows."""

    def programs(sizes: Iterable[int], *, is_alone: bool) -> list[StepProgram]:
        return [StepProgram(1, 8, kind="prefill", chunk=size, is_alone=is_alone) for size in sizes]

    compiled = CompiledPrograms()
    compiled._compiled |= dict.fromkeys((*programs(alone, is_alone=True), *programs(followed, is_alone=False)))
    runner = SimpleNamespace(
        compiled=compiled,
        shapes=SimpleNamespace(has_alone=True),
        _prefills=lambda _parts, *, is_alone=False: iter(programs((16, 64), is_alone=is_alone)),
    )
    assert Runner.can_prefill_alone(cast(Runner, runner), [(0, 10, True)]) is is_run_alone
