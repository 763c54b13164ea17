"""What the matrix products of one step take on this CPU, by rows: XLA's own in every cut, and the native kernel's.

Run from the checkout: `python benchmarks/products.py`. The table has milliseconds.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specserve.checkpoints.load import load_target
from specserve.checkpoints.source import BUNDLED_FOLDER
from specserve.kernels import native
from specserve.kernels.matmul import PackedMatrix, Weight, block, matmul, pack, quantize
from specserve.models.params import is_product
from specserve.models.target import fuse_for_cpu

ROWS = (1, 2, 4, 8, 16, 64, 256)
ROUNDS = 15


@dataclass(frozen=True)
class ProductsRow:
    """What all products of the bundled target take for so many rows."""

    num_rows: int
    ms: dict[str, float]  # by arm, the median over the rounds


def _float32(matrix: jax.Array) -> PackedMatrix:
    """Pack a matrix without the step to bfloat16, as one that needs all of float32 is packed."""
    return pack(matrix * (1 + 2**-20))


def measure_products() -> Iterator[ProductsRow]:
    """Time all products for each number of rows. The arms take turns in every round, so that a noisy moment does not
    fall on one of them."""
    params = fuse_for_cpu(load_target(BUNDLED_FOLDER, dtype="float32").params)
    matrices = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params) if is_product(path)]
    ways: dict[str, Callable[[jax.Array], Weight]] = {
        "XLA, plain": lambda matrix: matrix,
        "XLA, halves": lambda matrix: block(matrix, matrix.shape[1] // 2),
        "XLA, 64 columns": lambda matrix: block(matrix, 64),
    }
    if native.is_available():
        ways |= {
            "native, float32": _float32,
            "native, bfloat16": pack,
            "native, int8": lambda matrix: pack(quantize(matrix, "int8")),
        }
    arms = {name: [way(matrix) for matrix in matrices] for name, way in ways.items()}

    @jax.jit
    def run(x: jax.Array, weights: list[Weight]) -> jax.Array:
        """Compute one product after another, as a step does: each waits for the sum of the one before."""
        for weight in weights:
            inputs = jnp.resize(x, (x.shape[0], weight.shape[0]))
            x = x + matmul(inputs, weight)[:, :1] * 1e-3
        return x

    for num_rows in ROWS:
        x = jnp.ones((num_rows, params.embedding.shape[1]), jnp.float32)
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(1 + ROUNDS):  # the first compiles
            for name, weights in arms.items():
                begin = time.perf_counter()
                run(x, weights).block_until_ready()
                if turn:
                    seconds[name].append(time.perf_counter() - begin)
        yield ProductsRow(num_rows, {name: 1e3 * statistics.median(each) for name, each in seconds.items()})


def main() -> None:
    """Print the table, row by row as it is measured."""
    for i, row in enumerate(measure_products()):
        if not i:
            print(f"| rows | {' | '.join(row.ms)} |\n|{'---|' * (1 + len(row.ms))}")
        print(f"| {row.num_rows} | {' | '.join(f'{ms:.2f}' for ms in row.ms.values())} |", flush=True)


if __name__ == "__main__":
    main()
