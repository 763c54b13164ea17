"""Kernels alone, compiled for an H100 and for TPUs that are not here (`-m cuda_aot`, `-m libtpu`; `plan.ahead` says
what to install)."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest
from compiled import dumped_to, spilled
from jax.sharding import SingleDeviceSharding

from specserve.kernels import nibbles, nibbles_gpu, nibbles_tpu
from specserve.kernels.nibbles import NibbleMatrix, Numbers, span_of
from specserve.plan.ahead import describe

D_IN, D_OUT = 4096, 1024


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
    for rows in (1, 16, 32, 64, nibbles_gpu.ROWS):
        folder = tmp_path / str(rows)
        with described.made_for():
            lowered = jax.jit(nibbles_gpu.multiply).lower(array((rows, D_IN), "bfloat16"), weight)
            lowered.compile({**described.options, **dumped_to(folder)})
        found = spilled(folder, described)
        assert list(found) == ["multiply_nibbles"]
        assert found["multiply_nibbles"] <= 8 * 4, rows


@pytest.mark.libtpu
@pytest.mark.parametrize("devices", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
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
    place = SingleDeviceSharding(described.devices[0])

    def array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    of_blocks = jax.ShapeDtypeStruct((d_in // block, d_out), "float32")
    in_words = partial(nibbles.in_words, block=block, numbers=numbers)
    made = jax.eval_shape(in_words, jax.ShapeDtypeStruct((d_in, d_out), "int8"), of_blocks, of_blocks)
    weight = jax.tree.map(lambda each: array(each.shape, each.dtype), made)
    with described.made_for():
        compiled = jax.jit(nibbles_tpu.multiply).lower(array((rows, d_in), dtype), weight).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= 4 * 4 * (rows + 256) * d_in
    assert "multiply_words" in compiled.as_text()
