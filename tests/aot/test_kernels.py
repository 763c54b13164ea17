"""Kernels alone, compiled for an H100 and for TPUs that are not here (`-m cuda_aot`, `-m libtpu`; `plan.ahead` says
what to install)."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest
from compiled import dumped_to, spilled
from jax.sharding import SingleDeviceSharding

from specserve.kernels import nibbles, nibbles_gpu, nibbles_tpu
from specserve.kernels.nibbles import NibbleMatrix, Numbers, span_of
from specserve.plan.ahead import Described, describe

D_IN, D_OUT = 4096, 1024
EXPERTS, BLOCKS = 16, 24
TPUS = ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]


@pytest.mark.cuda_aot
@pytest.mark.parametrize(
    ("numbers", "block"), [("uint4", 32), ("uint4", 128), ("int4", 64), ("int4", 128), ("fp4", 16), ("fp4", 32)]
)
def test_products_of_4_bits_stay_in_registers(numbers: Numbers, block: int, tmp_path: Path) -> None:
    """For one row and for as many as a program of the kernel has: of a block's weights, scales and sums none waits in
    memory. What the compiler puts aside once, to fit more programs beside each other, is a few registers."""
    described = describe("h100")
    place = SingleDeviceSharding(described.devices[0])

    def array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    codes, scales = array((D_OUT, D_IN // 2), "uint8"), array((D_IN // block, D_OUT), "uint32")
    weight: NibbleMatrix = NibbleMatrix(codes, scales, numbers, span_of(D_IN, block), block)  # type: ignore[arg-type]
    experts = jax.tree.map(lambda each: array((EXPERTS, *each.shape), each.dtype), weight)
    calls: list[tuple[int, Any]] = [(rows, (weight,)) for rows in (1, 16, 32, 64, nibbles_gpu.ROWS)]
    calls += [(size * BLOCKS, (experts, array((BLOCKS,), "int32"))) for size in (16, 64)]
    for i, (rows, given) in enumerate(calls):
        folder = tmp_path / str(i)
        with described.made_for():
            lowered = jax.jit(nibbles_gpu.multiply).lower(array((rows, D_IN), "bfloat16"), *given)
            lowered.compile({**described.options, **dumped_to(folder)})
        found = spilled(folder, described)
        assert list(found) == ["multiply_nibbles"]
        assert found["multiply_nibbles"] <= 8 * 4, (rows, len(given))


@pytest.mark.libtpu
@pytest.mark.parametrize("devices", TPUS)
@pytest.mark.parametrize(
    ("numbers", "block", "d_in", "rows", "dtype", "d_out"),
    [
        ("uint4", 32, 4096, 8, "bfloat16", 1024),
        ("uint4", 32, 9728, 300, "bfloat16", 1024),  # 19 chunks, in programs of 8 and 3
        ("int4", 128, 4096, 32, "bfloat16", 5120),
        ("int4", 4096, 4096, 40, "bfloat16", 1024),
        ("int4", 4096, 4096, 8, "bfloat16", 1024),  # a chunk has one scale
        ("uint4", 48, 1536, 8, "bfloat16", 300),
        ("uint4", 32, 53248, 1024, "bfloat16", 256),
        ("fp4", 16, 576, 1, "bfloat16", 1024),
        ("fp4", 16, 9664, 256, "bfloat16", 256),  # 151 chunks of 64 inputs
        ("fp4", 32, 2880, 64, "bfloat16", 1024),
        ("uint4", 32, 576, 40, "float32", 1024),
    ],
)
def test_products_of_4_bits_are_words_on_a_tpu(
    numbers: Numbers, block: int, d_in: int, rows: int, dtype: str, d_out: int, devices: str
) -> None:
    """Every generation takes the kernel, which reads the words where they are; beside it lie the rows, filled up and
    cut, and their sums."""
    described = describe(devices)
    compiled = compiled_words(described, (d_in, d_out), numbers, block, rows, dtype)
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= 4 * 4 * (rows + 256) * d_in
    assert "multiply_words" in compiled.as_text()


@pytest.mark.libtpu
@pytest.mark.parametrize("devices", TPUS)
@pytest.mark.parametrize(
    ("numbers", "block", "d_in", "size", "d_out"),
    [
        ("uint4", 32, 2048, 8, 192),  # columns that would be another axis than the last, and be copied
        ("uint4", 32, 192, 64, 2048),  # six rows of scales likewise
        ("int4", 128, 4096, 16, 1536),
        ("fp4", 32, 2880, 64, 2880),
    ],
)
def test_words_of_experts_are_not_copied(
    numbers: Numbers, block: int, d_in: int, size: int, d_out: int, devices: str
) -> None:
    """A kernel takes arrays whose last axis is last in memory, and the experts' is not made the last one."""
    described = describe(devices)
    compiled = compiled_words(described, (128, d_in, d_out), numbers, block, size * BLOCKS, "bfloat16")
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= 4 * 4 * (size * BLOCKS + 256) * max(d_in, d_out)
    copied = re.findall(r"= u32\[128,[\d,]+\]\{[^}S]*\} copy", compiled.as_text())  # S: on the chip, before its use
    assert not copied, copied


def compiled_words(
    described: Described, shape: tuple[int, ...], numbers: Numbers, block: int, rows: int, dtype: str
) -> Any:
    """The product of so many rows with a matrix, or with one for each expert of a block."""
    place = SingleDeviceSharding(described.devices[0])

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    *stack, d_in, d_out = shape
    of_blocks = jax.ShapeDtypeStruct((*stack, d_in // block, d_out), "float32")
    in_words = partial(nibbles.in_words, block=block, numbers=numbers)
    made = jax.eval_shape(in_words, jax.ShapeDtypeStruct(shape, "int8"), of_blocks, of_blocks)
    weight = jax.tree.map(lambda each: array(each.shape, each.dtype), made)
    experts = [array((BLOCKS,), "int32")] if stack else []
    with described.made_for():
        return jax.jit(nibbles_tpu.multiply).lower(array((rows, d_in), dtype), weight, *experts).compile()
