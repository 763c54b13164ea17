"""The sizes of a server: as they are set, and on an accelerator where nothing is."""

import dataclasses
import functools
import logging
from typing import Any

import pytest
from spread import head_of, mesh_of, target_of

from specserve.drafters.layers import windowed
from specserve.drafters.speculation import parse_speculation
from specserve.errors import ConfigError
from specserve.models.cache import WindowSizes
from specserve.models.presets import PRESETS
from specserve.serve import sizes
from specserve.serve.launch import Models, make_runner, with_cache_dtype
from specserve.serve.programs.placement import bytes_per_token, pages_in, state_bytes
from specserve.serve.programs.shapes import Shapes
from specserve.serve.settings import ServeRun
from specserve.serve.sizes import FEW_SLOTS, MOST_SLOTS, Served, choose_sizes, largest_programs, most_slots
from specserve.speculative.slot_state import StepConfig
from specserve.speculative.tree import Tree


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Choose sizes as an accelerator does that has so much free memory."""

    def with_memory(free: float) -> None:
        monkeypatch.setattr(sizes, "program_platform", lambda: "gpu")
        monkeypatch.setattr(sizes, "free_memory", lambda _mesh: int(free))

    return with_memory


def served(models: Models, *trees: Tree | None) -> Served:
    return Served(models.target.config, models.head.drafter if models.head else None, trees or (None,), models.mesh)


def test_cache_sizes(models: Models, headless: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are pages, rounded up; bytes are pages, rounded down; else every slot has its whole context."""
    monkeypatch.setattr(sizes, "free_memory", lambda _mesh: 10**6)
    per_token = 2 * 2 * 8 * 4  # keys and values of 2 heads of 8 float32 numbers, for each layer
    assert bytes_per_token(models.target.config, models.head.drafter if models.head else None) == 7 * per_token
    assert bytes_per_token(headless.target.config, None) == 6 * per_token

    quantized = with_cache_dtype(models, ServeRun(kv_cache_dtype="int8"))
    per_head = 8 + 4  # a byte for each number, and the scale; the draft keeps its own in float32
    assert bytes_per_token(quantized.target.config, None) == 6 * 2 * 2 * per_head

    two_widths = PRESETS["gemma-4-e2b"].config()  # of its 35 layers 20 see the keys and values of others
    assert bytes_per_token(two_widths, None) == 2 * 2 * (12 * 256 + 3 * 512)

    def pages(models: Models = models, **settings: Any) -> int:
        run = ServeRun(page_size=16, max_slots=3, max_model_len=100, **settings)
        return choose_sizes(served(models), run).num_pages

    assert pages() == 3 * 7, "a sequence of 100 tokens ends in its seventh page"
    assert pages(cache_tokens=33) == 3
    for given, each in (
        (models, 7 * per_token),
        (quantized, 6 * 2 * 2 * per_head + per_token),
        (headless, 6 * per_token),
    ):
        drafter = given.head.drafter if given.head else None
        config = StepConfig(given.target.config, drafter, max_depth=0)
        fitting = pages(given, cache_gb=0.001)
        empty, full, over = (
            state_bytes(config, None, 3, number, page_size=16, max_pages=7) for number in (0, fitting, fitting + 1)
        )
        assert full - empty <= 10**6 < over - empty, "with what the head keeps of each page"
        assert 16 * each <= over - full <= 17 * each
    assert pages(cache_fraction=0.5) == pages(cache_gb=0.0005)
    assert pages(cache_fraction=0.5, cache_gb=0.001) == pages(cache_gb=0.001), "the more definite one counts"
    assert pages(cache_tokens=33, cache_gb=0.001) == 3
    with pytest.raises(ConfigError, match=r"10,000 bytes.*16 tokens takes 14,720.*--cache-fraction"):
        pages(cache_fraction=0.01)
    spread = dataclasses.replace(models, mesh=mesh_of("data=2,tensor=2"))
    assert pages(spread) == 22, "as many for each data rank"
    assert pages(spread, cache_tokens=33) == 4
    of_rank = pages(spread, cache_gb=0.001) // 2
    config = StepConfig(models.target.config, models.head.drafter if models.head else None, max_depth=0)
    empty, full, over = (
        state_bytes(config, spread.mesh, 3, number, page_size=16, max_pages=7) for number in (0, of_rank, of_rank + 1)
    )
    assert full - empty <= 10**6 < over - empty, "each device has the pages of its data rank"


@pytest.mark.parametrize("spread", ["", "data=2,tensor=2"])
@pytest.mark.parametrize("ways", [("off",), ("chain:3", "off"), ("tree:3x2x6",)])
def test_an_accelerator_is_filled_and_never_more_than_that(
    models: Models, filled: Any, monkeypatch: pytest.MonkeyPatch, spread: str, ways: tuple[str, ...]
) -> None:
    """State and programs fit in what is free, which is used but for a few hundredths; more memory never gives fewer
    slots, nor fewer pages for as many slots; and each slot has its share of the cache."""
    if spread:
        models = dataclasses.replace(models, mesh=mesh_of(spread))
    monkeypatch.setattr(sizes, "TOKENS_EACH", 100)
    given, run, before = served(models, *map(parse_speculation, ways)), ServeRun(), (0, 0, 0)
    for free in (1e7, 2e7, 3e7, 1e8, 1.1e8, 1e9):
        filled(free)
        chosen = choose_sizes(given, run)
        shapes, each = given.shapes(run, chosen), chosen.num_slots // given.num_ranks

        def taken(pages: int, config: StepConfig, shapes: Shapes, aside: int) -> int:
            sized = {"page_size": shapes.page_size, "max_pages": shapes.max_pages}
            return state_bytes(config, models.mesh, shapes.num_slots, pages, **sized) + aside

        made = StepConfig(given.target, given.drafter if shapes.uses_head else None, shapes.max_depth)
        of_this = functools.partial(taken, config=made, shapes=shapes, aside=chosen.set_aside)
        assert of_this(shapes.pages_of_rank) <= free
        if shapes.pages_of_rank < each * shapes.max_pages:
            assert of_this(round(1.04 * shapes.pages_of_rank) + 1) > (1 - sizes.UNPLANNED) * free
        assert each == sizes.LEAST_BATCH or shapes.pages_of_rank * shapes.page_size >= 0.96 * each * 100
        now = chosen.num_slots, chosen.num_pages, chosen.max_model_len
        assert now >= before
        before = now
    most = most_slots(ServeRun(mesh=spread))
    assert most == MOST_SLOTS * given.num_ranks
    assert before == (most, most * 512 // 32, 512), "all there can be"


def test_windows_leave_room_for_more_pages(filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and window pages fill what is free, and hardly a page more would fit; there are more than where layers with
    a window have all of them."""
    monkeypatch.setattr(sizes, "TOKENS_EACH", 200)
    config = target_of("windows").config
    every = dataclasses.replace(config, layers=())
    for drafter in (None, head_of("windows").drafter):
        ways = (parse_speculation("chain:3"), None) if drafter else (None,)
        number = []
        for target in (config, every):
            given = Served(target, drafter, ways, None)
            filled(3e7)
            chosen = choose_sizes(given, ServeRun(page_size=16))
            shapes = given.shapes(ServeRun(page_size=16), chosen)
            made = StepConfig(target, drafter, shapes.max_depth)

            def taken(more: int, made: StepConfig = made, shapes: Shapes = shapes) -> int:
                sized = {"page_size": 16, "max_pages": shapes.max_pages, "windows": shapes.windows}
                return state_bytes(made, None, shapes.num_slots, shapes.num_pages + more, **sized)

            left = 3e7 - round(sizes.UNPLANNED * 3e7) - chosen.set_aside
            assert taken(0) <= left < taken(1 + shapes.num_pages // 32)
            number.append((chosen.num_slots, chosen.num_pages))
            assert [window for window, _ in shapes.windows] == ([11] if target is config else [])
        few, all_of_them = number
        assert few[0] == all_of_them[0]
        assert few[1] > 1.2 * all_of_them[1]


@pytest.mark.parametrize("windows", [(), ((11, 9),), ((5, 9), (11, 20))])
def test_pages_take_the_least_of_what_they_can(windows: WindowSizes) -> None:
    config = dataclasses.replace(target_of("windows").config, num_layers=3, layers=windowed((11, 0, 5)))
    step, sized = StepConfig(config, None, 0), {"page_size": 16, "max_pages": 1}

    def taken(pages: int) -> int:
        """Bytes of so many pages, where windows have no more than so many of their own."""
        own = tuple((window, number) for window, number in windows if number < pages)
        return state_bytes(step, None, 0, pages, **sized, windows=own) - state_bytes(step, None, 0, 0, **sized)

    for pages in (0, 1, 8, 9, 10, 20, 21, 40):
        for spare in (0, -1):
            found = pages_in(taken(pages) + spare, config, None, None, page_size=16, windows=windows, most=100)
            assert found == max(0, pages + spare)
    all_slide = dataclasses.replace(config, layers=windowed((11, 11, 5)))
    found = pages_in(2 * 10**5, all_slide, None, None, page_size=16, windows=windows, most=100)
    assert found == (100 if windows else 2 * 10**5 // 3 // 2048), "pages without entries"


def test_a_little_less_memory_takes_the_same_programs(models: Models, filled: Any) -> None:
    """The number of pages is in their shapes, and memory is never twice the same to the byte."""
    found = set()
    for i in range(100):
        filled(2e7 * (1 + i / 1e5))
        found.add(choose_sizes(served(models), ServeRun()).num_pages)
    assert len(found) <= 2


def test_what_is_set_decides_on_an_accelerator_too(models: Models, filled: Any) -> None:
    filled(1e9)
    assert choose_sizes(served(models), ServeRun(max_slots=3)).num_pages == 3 * 512 // 32
    chosen = choose_sizes(served(models), ServeRun(cache_tokens=640))
    assert (chosen.num_slots, chosen.num_pages) == (FEW_SLOTS, 20)
    assert choose_sizes(served(models), ServeRun(max_model_len=77)).max_model_len == 77
    with pytest.raises(ConfigError, match="--max-model-len 513: the target's context is 512"):
        choose_sizes(served(models), ServeRun(max_model_len=513))


def test_layers_that_are_not_there_are_not_kept(headless: Models) -> None:
    with pytest.raises(ConfigError, match=r"--hidden-states 6: .* has the layers 0 to 5"):
        make_runner(headless, ServeRun(hidden_states=(5, 6)), [None])


def test_a_cpu_keeps_room_for_others(models: Models) -> None:
    chosen = choose_sizes(served(models), ServeRun())
    assert (chosen.num_slots, chosen.max_model_len, chosen.num_pages) == (FEW_SLOTS, 512, FEW_SLOTS * 512 // 32)


def test_programs_that_take_more_than_was_set_aside_get_it(
    models: Models, filled: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The estimate is only where to begin: what the compiler says decides."""
    trees = [parse_speculation("chain:2"), None]
    filled(3e6)
    monkeypatch.setattr(sizes, "MOST_SLOTS", 8)
    monkeypatch.setattr(sizes, "estimated_temporaries", lambda *_: 0)
    with caplog.at_level(logging.INFO):
        runner = make_runner(models, ServeRun(constrained=False), trees)
    needed = max(map(runner.temporary_bytes, largest_programs(runner.shapes)))
    assert needed > 0
    assert "0.00 GB are set aside" in caplog.text
    assert runner.shapes.num_pages == choose_sizes(served(models, *trees), ServeRun(), needed).num_pages
    assert runner.shapes.num_pages < choose_sizes(served(models, *trees), ServeRun(), 0).num_pages
