"""Kernels alone, compiled for an H100 that is not here (`-m cuda_aot`; `plan.ahead` says what to install)."""

from pathlib import Path

import jax
import pytest
from compiled import dumped_to, spilled
from jax.sharding import SingleDeviceSharding

from specserve.kernels import nibbles_gpu
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
