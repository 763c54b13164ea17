"""The arrays of an updated version: kept as they are where placement allows, and in as few bits as those before."""

from pathlib import Path
from typing import Any

import jax
import pytest
import tiny

from specserve import LLM, SamplingParams
from specserve.checkpoints.load import load_target
from specserve.checkpoints.update import other_target
from specserve.mesh import SERVING_AXES, parse_mesh
from specserve.models.target import TargetParams
from specserve.serve.programs.layouts import make_layouts

PROMPTS = [[5, 9, 33, 7, 7, 60, 12], [1], [40, 41, 42, 43] * 5]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of one target."""
    found = [tmp_path_factory.mktemp("version") for _ in range(2)]
    for seed, folder in enumerate(found):
        tiny.write_target(folder, tiny.TARGET, seed)
    return found


def _llm(folder: Path, **settings: Any) -> LLM:
    """One slot, as the bits of a row must not depend on what runs beside it."""
    own = {"max_slots": 1, "max_model_len": 64, "page_size": 16, **settings}
    return LLM(folder, speculation="ngram:2", tokenizer=None, progress=False, **own)


def _answers(llm: LLM) -> list[tuple[int, ...]]:
    """Greedy and sampled ones."""
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True) for i in range(6)]
    return [request.outputs[0].token_ids for request in llm.generate(PROMPTS * 2, params)]


def _addresses(tree: Any) -> list[int]:
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return [shard.data.unsafe_buffer_pointer() for shard in shards]


def _unpacked(params: TargetParams) -> list[jax.Array]:
    """The arrays that have the same layout wherever they serve."""
    return [params.embedding, params.norm, *(layer.mlp_norm for layer in params.layers)]


def test_arrays_that_are_where_they_are_needed_are_not_copied(folders: list[Path]) -> None:
    """On a CPU those that no kernel has packed; spread over a mesh, where none is, all of them."""
    with _llm(folders[0]) as llm:
        given = load_target(folders[1], dtype="float32").params
        llm.update_weights(given)
        assert _addresses(_unpacked(llm.engine.runner.inputs.layouts.many.target)) == _addresses(_unpacked(given))
    mesh = parse_mesh("tensor=2", SERVING_AXES)
    served, other = (load_target(each, dtype="float32", mesh=mesh, is_served=True) for each in folders)
    params = other_target(served, other.params, quantization="none", mesh=mesh).params
    layouts = make_layouts(served, None, mesh).with_weights(params, None)
    assert _addresses(layouts.many.target) == _addresses(other.params) != _addresses(served.params)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_an_updated_engine_in_few_bits_answers_as_one_that_began_with_the_weights(
    folders: list[Path], quantization: str
) -> None:
    """By parameters and by a folder, to and fro, and nothing compiles."""
    with _llm(folders[1], quantization=quantization) as fresh:
        expected = _answers(fresh)
    with _llm(folders[0], quantization=quantization) as llm:
        before, compiled = _answers(llm), llm.engine.runner.compiled
        assert before != expected
        for given, answers in (
            (load_target(folders[1], dtype="float32").params, expected),
            (folders[0], before),
            (folders[1], expected),
        ):
            llm.update_weights(given)
            assert _answers(llm) == answers
            assert llm.engine.runner.compiled is compiled
        assert llm.engine.stats().num_late_compiles == 0
