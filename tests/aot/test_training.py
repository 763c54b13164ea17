"""Whole training steps, compiled for devices that are not here (`-m cuda_aot`, `-m libtpu`; `plan.ahead` says what to
install). The target is Qwen3-8B's first layers, the head a whole one."""

import dataclasses
import functools
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from specserve.drafters.interface import TrainedDrafter
from specserve.drafters.registry import DraftSettings, load_kind
from specserve.kernels.rows import Documents, attend_rows
from specserve.mesh import MESH_AXES
from specserve.models.config import ModelConfig
from specserve.models.params import num_params
from specserve.models.presets import PRESETS
from specserve.models.target import target_spec
from specserve.plan.activations import Activations
from specserve.plan.ahead import Counted, Described, describe
from specserve.plan.work import abstract_mesh
from specserve.train.flops import StepShape
from specserve.train.settings import TrainSettings

SETTINGS = TrainSettings(batch_size=8, seq_len=2048, rollout=3, remat=True)
DEVICES = {"h100": "h100", "v6e": "v6e:2x2", "v5e, eight": "v5e:2x4"}
GPU, TPU = pytest.mark.cuda_aot, pytest.mark.libtpu
EACH = [pytest.param("h100", marks=GPU), pytest.param("v6e", marks=TPU)]


@functools.cache
def devices(name: str, number: int = 1) -> Described:
    return describe(DEVICES[name], number)


def models(layers: int) -> tuple[ModelConfig, TrainedDrafter]:
    full = PRESETS["qwen3-8b"].config()
    head = load_kind("eagle3").new(DraftSettings(), full, 32_000)
    drafter = type(head)(dataclasses.replace(head.config, aux_layers=(0, 1, layers - 1)))
    return dataclasses.replace(full, num_layers=layers, layers=full.layers[:layers]), drafter


@functools.cache
def compiled(name: str, layers: int, fsdp: int = 1) -> Counted:
    described, mesh = devices(name, fsdp), None
    if fsdp > 1:
        shape = [fsdp if axis == "fsdp" else 1 for axis in MESH_AXES]
        mesh = Mesh(np.array(described.devices).reshape(shape), MESH_AXES, (AxisType.Auto,) * len(shape))
    with jax.numpy_dtype_promotion("standard"):  # optax promotes a count
        return described.compile_training(SETTINGS, *models(layers), mesh)


def layer_params() -> int:
    return num_params(target_spec(models(2)[0]).layers[0])


@pytest.mark.parametrize("name", EACH)
def test_a_deeper_target_is_more_arguments_and_no_more_program(name: str) -> None:
    shallow, deep = compiled(name, 4), compiled(name, 8)
    assert deep.argument_bytes - shallow.argument_bytes == 4 * 2 * layer_params()
    assert deep.temporary_bytes <= 1.01 * shallow.temporary_bytes
    assert deep.text.count("\n") <= 1.01 * shallow.text.count("\n")


@pytest.mark.parametrize("name", EACH)
def test_the_state_is_written_in_place_and_memory_is_no_more_than_a_plan_counts(name: str) -> None:
    """Nor is it less than half of that."""
    found, (target, drafter) = compiled(name, 4), models(4)
    assert found.aliased_bytes >= 3 * 4 * num_params(drafter.spec())  # parameters and two moments
    shape = StepShape.of(SETTINGS, target, drafter.with_dtype(target.dtype), "layers")
    gradient = 4 * num_params(drafter.spec())
    planned = Activations(shape, abstract_mesh({}), devices(name).platform).num_bytes + gradient
    assert planned / 2 < found.temporary_bytes <= planned


@pytest.mark.parametrize("name", EACH)
def test_scores_stay_on_the_chip(name: str) -> None:
    """The target's loop calls a kernel, and each step of the rollout one, which is computed again in the backward pass,
    and two for that: for queries and for keys."""
    found = re.findall(r'custom_call_target="(?:__gpu\$xla\.gpu\.triton|tpu_custom_call)"', compiled(name, 4).text)
    assert len(found) == 1 + 4 * SETTINGS.rollout


@pytest.mark.parametrize("name", [pytest.param("h100", marks=GPU), pytest.param("v5e, eight", marks=TPU)])
def test_along_fsdp_each_device_has_its_share_and_gathers_a_layer_at_a_time(name: str) -> None:
    """No collective has more than one matrix of the vocabulary, or than what is added up of one; a layer's are gathered
    within the loop."""
    found, (target, drafter) = compiled(name, 8, fsdp=8), models(8)
    whole = 2 * num_params(target_spec(target)) + 12 * num_params(drafter.spec())
    assert found.argument_bytes < 1.02 * whole / 8
    lines = re.findall(r"= (.*?) (?:all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\((.*)", found.text)
    assert len(lines) > 8
    for result, rest in lines:
        sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"\w+\[([\d,]+)\]", result)]
        assert max(sizes, default=0) <= target.vocab_size * target.d_model, (result, rest)
    width = f"{target.d_model},{target.d_ff}"
    assert not re.search(rf"\[8,{width}\]", found.text), "the stack is whole on a device"


@pytest.mark.cuda_aot
@pytest.mark.parametrize(("head_dim", "v_dim"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_no_kernel_spills_registers(tmp_path: Path, head_dim: int, v_dim: int) -> None:
    described = devices("h100")
    place = SingleDeviceSharding(described.devices[0])

    def array(*shape: int, dtype: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def run(q: Any, k: Any, v: Any, ids: Any, sinks: Any) -> Any:
        def both(q: Any, k: Any, v: Any) -> jax.Array:
            out, lse = attend_rows(q, k, v, Documents(ids), softcap=30.0, sinks=sinks, window=512)
            return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

        return jax.grad(both, (0, 1, 2))(q, k, v)

    heads = array(2, 1024, 8, head_dim), array(2, 1024, 2, head_dim), array(2, 1024, 2, v_dim)
    with described.made_for():
        lowered = jax.jit(run).lower(*heads, array(2, 1024, dtype="int32"), array(8, dtype="float32"))
        lowered.compile({**described.options, "xla_dump_to": str(tmp_path)})
    found, ptxas = {}, Path(described.options["xla_gpu_cuda_data_dir"], "bin", "ptxas")
    for path in tmp_path.glob("*.ptx"):
        for kernel in re.findall(r"\.entry (attend_rows\w*)\(", path.read_text()):
            command = [ptxas, "-v", "-arch=sm_90a", path, "-o", tmp_path / "out"]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            found[kernel] = re.findall(r"(\d+) bytes spill", said)
    assert found == {kernel: ["0", "0"] for kernel in ("attend_rows", "attend_rows_dq", "attend_rows_dkv")}
