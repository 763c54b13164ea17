"""Serving over a mesh that cuts sequences: each data rank has slots and pages of its own, no page travels, and no token
changes."""

import math
import re
from pathlib import Path

import jax
import pytest
from engines import Reference, compile_programs, greedy, make_engine, make_runner
from jax.sharding import Mesh
from spread import mesh_of, spread_head, spread_target, target_of
from storms import storm

from specserve.errors import ConfigError, RequestError
from specserve.kernels.pages import is_by_page
from specserve.mesh import num_parts
from specserve.serve.programs.placement import state_bytes
from specserve.serve.programs.program_list import list_programs
from specserve.serve.programs.runner import Runner

FEW_PAGES = 14  # of a data rank, for two sequences of up to twelve
MANY_PAGES = 1024  # of a data rank: more bytes than anything else in a step
CASES = [
    ("dense", "data=2", "tree:2x2x4"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("experts", "data=2,expert=2", "tree:2x2x4"),
        ("latents", "data=2,expert=2", "chain:2"),
        ("dense", "data=2,tensor=2", "tree:2x2x4"),
        ("experts", "expert=4", "chain:2"),
    ]),
]  # fmt: skip


def _runner(
    model: str,
    mesh: Mesh,
    *ways: str,
    pages_of_rank: int,
    has_constrained: bool = False,
    folder: Path | None = None,
) -> Runner:
    """Two slots for each data rank."""
    ranks = num_parts(mesh, "batch")
    return make_runner(
        spread_target(model, mesh),
        spread_head(model, mesh),
        *ways,
        num_slots=2 * ranks,
        num_pages=pages_of_rank * ranks,
        has_constrained=has_constrained,
        mesh=mesh,
        is_mixing=True,
        folder=folder,
    )


@pytest.mark.parametrize(("model", "text", "way"), CASES)
def test_data_ranks_change_no_token(model: str, text: str, way: str, kept: Path | None) -> None:
    """Plain steps, chains and trees, greedy and sampled, with hits, preemptions, cancellations and grammars."""
    runner = _runner(model, mesh_of(text), "off", way, pages_of_rank=FEW_PAGES, has_constrained=True, folder=kept)
    compile_programs(runner)
    reference = Reference(target_of(model), kept)
    with reference.engine:
        stats, _ = storm(runner, reference, 60, 24)
    assert stats.num_preemptions, "pages were not few enough"
    assert stats.num_prefix_hits > stats.num_prefix_queries / 10


@pytest.mark.parametrize("text", ["data=2", "data=2,tensor=2", "data=2,expert=2"])
def test_each_device_has_its_data_rank_s_pages(text: str) -> None:
    """An equal part of the whole, of the drafter's as of the target's, and what they take is what was counted."""
    mesh = mesh_of(text)
    runner = _runner("experts", mesh, "chain:2", pages_of_rank=FEW_PAGES)
    shapes, ranks = runner.shapes, num_parts(mesh, "batch")
    by_page = [leaf for leaf in jax.tree.leaves(runner.state, is_leaf=is_by_page) if is_by_page(leaf)]
    assert len(by_page) == 2 + 1 + 1, "two layers of the target, the head's, and the states beside its pages"
    arrays = jax.tree.leaves(by_page)
    for array in arrays:
        assert array.shape[0] == ranks * FEW_PAGES
        assert {shard.data.shape[0] for shard in array.addressable_shards} == {FEW_PAGES}
        begins = {shard.index[0].start or 0 for shard in array.addressable_shards}
        assert begins == {rank * FEW_PAGES for rank in range(ranks)}
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(runner.state))
    sizes = {"page_size": shapes.page_size, "max_pages": shapes.max_pages}
    assert held == state_bytes(runner.config, mesh, shapes.num_slots, FEW_PAGES, **sizes)


_COLLECTIVE = re.compile(r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
_SHAPE = re.compile(r"\w+\[([\d,]+)\]")


@pytest.mark.parametrize(
    ("model", "text", "way"),
    [
        ("dense", "data=2", "tree:2x2x4"),
        pytest.param("latents", "data=2,tensor=2,expert=2", "chain:2", marks=pytest.mark.slow),
    ],
)
def test_no_page_travels_and_none_is_copied(model: str, text: str, way: str) -> None:
    """Of every program: what collectives give, and what it needs besides its arguments, is less than a device's pages
    of one layer."""
    runner = _runner(model, mesh_of(text), "off", way, pages_of_rank=MANY_PAGES)
    pages = [leaf for leaf in runner.state.cache.layers if is_by_page(leaf)]
    own = min(layer.k.addressable_shards[0].data.size for layer in pages)
    num_collectives = 0
    for program in list_programs(runner):
        if program.kind == "empty state":
            continue
        compiled = runner.call(program).lower().compile()
        found = _COLLECTIVE.findall(compiled.as_text() or "")
        num_collectives += len(found)
        for shapes in found:
            given = sum(math.prod(map(int, shape.split(","))) for shape in _SHAPE.findall(shapes))
            assert given < own / 4, f"{program}: a collective gives {shapes}"
        memory = compiled.memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 4 * own, f"{program} copies its pages"
    assert num_collectives, "the text of programs is not read as it is written"


def test_a_sequence_larger_than_the_pages_of_a_data_rank_is_refused() -> None:
    runner = _runner("dense", mesh_of("data=2"), "off", pages_of_rank=4)
    engine = make_engine(runner)
    assert engine.inputs.check((5,) * 20, greedy(13)) == 13, "32 entries"
    with pytest.raises(RequestError, match="need 5 cache pages, the server has 4 for a sequence"):
        engine.inputs.check((5,) * 20, greedy(14))


def test_slots_and_pages_that_cannot_be_shared_out_are_refused() -> None:
    mesh = mesh_of("data=2")
    for num_slots, num_pages, said in (
        (3, 0, "--max-slots 3: .* data x expert = 2 of .* give 2 or 4$"),
        (1, 0, "--max-slots 1: .* give 2$"),
        (4, 5, "number of cache pages 5: .* data x expert = 2 of .* give 4 or 6$"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_runner(spread_target("dense", mesh), None, "off", num_slots=num_slots, num_pages=num_pages, mesh=mesh)
