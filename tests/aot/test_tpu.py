"""Whole programs of a server, compiled for TPUs that are not here (`-m libtpu`; `plan.ahead` says what to install).

The targets are first layers of Qwen3-8B, whose heads fill a register, and of SmolLM2-135M, whose heads fill half of
one; the heads that draft are whole.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from compiled import copies_of_pages
from jax.sharding import AxisType, Mesh

from specserve.drafters.registry import DraftSettings, load_kind
from specserve.drafters.speculation import parse_speculation
from specserve.kernels.pages import default_page_size
from specserve.mesh import MESH_AXES
from specserve.models.presets import PRESETS
from specserve.plan.ahead import Counted, Described, describe
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import make_shapes
from specserve.serve.sizes import estimated_temporaries
from specserve.speculative.program import StepProgram

pytestmark = pytest.mark.libtpu
LAYERS, SLOTS, CONTEXT, CHUNK = 2, 8, 4096, 1024
WAYS = ("off", "chain:3", "tree:5x4x16")
DEVICES = {"v5e": ("v5e:2x2", 1), "v6e": ("v6e:2x2", 1), "v6e, four": ("v6e:2x2", 4), "v7x": ("tpu7x:2x2x1", 1)}
TARGETS = ("qwen3-8b", "smollm2-135m")


@functools.cache
def devices(name: str) -> Described:
    return describe(*DEVICES[name])


@functools.cache
def runner(name: str, preset: str) -> Runner:
    full = PRESETS[preset].config()
    target = dataclasses.replace(full, num_layers=LAYERS, layers=full.layers[:LAYERS], dtype="bfloat16")
    head = load_kind("eagle3").new(DraftSettings(), full, 32_000).with_dtype("bfloat16")
    drafter = type(head)(dataclasses.replace(head.config, aux_layers=(0, 1, 1)))
    described, mesh, page = devices(name), None, default_page_size("tpu")
    if len(described.devices) > 1:
        sizes = {"tensor": len(described.devices)}
        shape = [sizes.get(axis, 1) for axis in MESH_AXES]
        mesh = Mesh(np.array(described.devices).reshape(shape), MESH_AXES, (AxisType.Auto,) * len(shape))
    with described.made_for():
        sizes = {"num_slots": SLOTS, "max_model_len": CONTEXT, "page_size": page, "num_pages": SLOTS * CONTEXT // page}
        shapes = make_shapes([parse_speculation(way) for way in WAYS], target, mesh, **sizes)
    return described.runner(target, drafter, shapes, mesh)


@functools.cache
def compiled(name: str, preset: str, way: str) -> Counted:
    own = runner(name, preset)
    width = own.shapes.max_pages
    if way == "prefill":
        return devices(name).compile(own, own.shapes.prefill(width, CHUNK))
    return devices(name).compile(own, StepProgram(SLOTS, width, parse_speculation(way)))


CASES = [
    *[("v6e", preset, way) for preset in TARGETS for way in (*WAYS, "prefill")],
    *[("v5e", preset, "off") for preset in TARGETS],
    ("v7x", "qwen3-8b", "chain:3"),
    ("v6e, four", "qwen3-8b", "off"),
    ("v6e, four", "qwen3-8b", "chain:3"),
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_no_array_of_pages_is_copied_or_fetched_as_a_whole(case: tuple[str, str, str]) -> None:
    """Neither by the kernels that write and read pages, nor around the loop over a burst's steps."""
    name, preset, _ = case
    assert not copies_of_pages(compiled(*case).text, runner(name, preset))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_the_state_is_written_in_place_and_memory_is_what_a_server_sets_aside(case: tuple[str, str, str]) -> None:
    name, preset, way = case
    own, found = runner(name, preset), compiled(*case)
    leaves = jax.tree.leaves(own.state)
    assert found.aliased_bytes >= sum(
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    )
    alone = dataclasses.replace(own.shapes, trees=(parse_speculation("off" if way == "prefill" else way),))
    assert found.temporary_bytes <= estimated_temporaries(own.config.target, alone, None)
