"""How fast attention over pages and a step's products are on this device, by our kernel and by XLA's operations, which
take turns, and the share of what the machine can do.

Run from the checkout: `python benchmarks/kernels.py --batch 1,8 --queries 1,16 --kv-cache-dtype int8`. The bound is the
longer of two times: of the bytes that must be read and written, at the bandwidth of reductions over a large buffer, and
of the operations, at the speed of a large matrix product. Of an empty list nothing is timed: `--rows ""` is without
products. Mixtures of experts are timed by `experts.py`.
"""

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.checkpoints.configs import find_config
from specserve.eval.bench.step_times import QUEUED, read_bandwidth
from specserve.kernels import native
from specserve.kernels.attention import attend
from specserve.kernels.matmul import INT4_BLOCK, in_nibbles, matmul, pack, quantize
from specserve.kernels.paged import PagedPrefix, kernel_for
from specserve.kernels.pages import LARGEST, Pages
from specserve.mesh import default_dtype
from specserve.models.params import init_params, is_product
from specserve.models.target import fuse_for_cpu, target_spec
from specserve.serve.launch import CACHE_DTYPES
from specserve.train.speed import matmul_peak

FORMATS: dict[str, tuple[Callable[[jax.Array], Any], float]] = {  # of bfloat16 numbers, and the bytes of an element
    "float32": (lambda matrix: matrix * (1 + 2**-20), 4),  # numbers that need all of float32
    "bfloat16": (lambda matrix: matrix, 2),
    "int8": (lambda matrix: quantize(matrix, "int8"), 1),
    "int4": (
        lambda matrix: quantize(matrix, "int4"),
        0.5 + 4 / INT4_BLOCK,
    ),  # with a float16 scale and offset for each block
}


@dataclass(frozen=True)
class KernelWork:
    """A function of one shape, with the arguments of our kernel and of XLA's operations."""

    shape: str
    function: Callable[..., Any]
    own: tuple[Any, ...] | None  # None: there is no kernel of ours here
    xla: tuple[Any, ...]
    num_bytes: int  # read and written at least, each once
    num_flops: int


@dataclass(frozen=True)
class AttentionShape:
    """The heads and pages of the attention that is timed."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 32
    kv_cache_dtype: str = "auto"


def attention(shape: AttentionShape, batch: int, entries: int, n: int) -> KernelWork:
    """Attention of n queries of each sequence over its committed entries and over the queries themselves."""
    stored, rng = CACHE_DTYPES.get(shape.kv_cache_dtype, default_dtype()), np.random.default_rng(0)
    width = -(-entries // shape.page_size)
    pages = Pages.zeros(batch * width, shape.page_size, shape.kv_heads, shape.head_dim, stored)
    largest = LARGEST.get(jnp.dtype(stored), 4.0)

    def fill(array: jax.Array) -> jax.Array:  # values do not change the time, so all pages share those of one
        return jnp.broadcast_to(jnp.asarray(largest * rng.uniform(-1, 1, array.shape[1:]), array.dtype), array.shape)

    pages = jax.tree.map(fill, pages)
    table = rng.permutation(batch * width).reshape(batch, width).astype(np.int32)
    prefix = PagedPrefix(pages, jnp.asarray(table), jnp.full(batch, entries, jnp.int32))
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    new = [jnp.asarray(rng.standard_normal((batch, n, each, shape.head_dim)), default_dtype()) for each in heads]
    arguments = (*new, jnp.tri(n, dtype=bool)[None], prefix)
    is_native = native.is_available() and np.dtype(stored) == np.float32
    has_kernel = is_native if jax.default_backend() == "cpu" else kernel_for(pages) is not None
    rows, entry = batch * n * shape.heads * shape.head_dim, sum(leaf.nbytes for leaf in jax.tree.leaves(pages))
    return KernelWork(
        shape=f"attention: {batch} sequences, {n} queries, {entries} entries",
        function=attend,
        own=arguments if has_kernel else None,
        xla=arguments,
        num_bytes=entry * entries // (width * shape.page_size) + 2 * rows * np.dtype(default_dtype()).itemsize,
        num_flops=4 * rows * (entries + n),
    )


def products(target: str, rows: Sequence[int], layers: int, names: Sequence[str]) -> Iterator[KernelWork]:
    """All products of one step of a target with random weights, one after another, in these formats; of so many layers
    alone, or of all (0)."""
    if not rows:
        return
    config, on_cpu = find_config(target)[0], jax.default_backend() == "cpu"
    layers = layers or config.num_layers
    config = dataclasses.replace(config, num_layers=layers, layers=config.layers[:layers])
    params = init_params(target_spec(config), jax.random.key(0), "bfloat16")
    params = jax.tree.map(lambda leaf: leaf.astype(default_dtype()), params)
    params = fuse_for_cpu(params) if on_cpu else params
    drawn = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params) if is_product(path) and leaf.ndim == 2]
    elements, ends = sum(leaf.size for leaf in drawn), sum(sum(leaf.shape) for leaf in drawn)
    for name in names:
        convert, num_bytes = FORMATS[name]
        plain, packed = [convert(matrix) for matrix in drawn], None
        if on_cpu and native.is_available():
            packed = [pack(matrix) for matrix in plain]
        elif name == "int4" and jax.default_backend() == "gpu":
            packed = list(map(in_nibbles, plain))
        for num_rows in rows:
            x = jnp.ones((num_rows, config.d_model), default_dtype())
            yield KernelWork(
                shape=f"products, {name} weights: {num_rows} rows, {len(drawn)} matrices",
                function=_in_a_row,
                own=None if packed is None else (x, packed),
                xla=(x, plain),
                num_bytes=int(num_bytes * elements) + num_rows * ends * x.dtype.itemsize,
                num_flops=2 * num_rows * elements,
            )


def _in_a_row(x: jax.Array, weights: list[Any]) -> jax.Array:
    """One product after another, as in a step: each waits for the one before."""
    for weight in weights:
        x = x + matmul(jnp.resize(x, (x.shape[0], weight.shape[0])), weight)[:, :1] * 1e-3
    return x


def milliseconds(work: KernelWork, seconds: float) -> dict[str, float]:
    """Return the median times of both, which take turns for so many seconds each. An accelerator gets several calls at
    once, so that it does not wait for the host in between."""
    at_once = 1 if jax.default_backend() == "cpu" else QUEUED
    with native.left_out():
        programs = {"xla": (_compile(work.function, work.xla), work.xla)}
    if work.own is not None:
        programs["own"] = _compile(work.function, work.own), work.own
    found: dict[str, list[float]] = {name: [] for name in programs}
    begin = time.perf_counter()
    while not found["xla"] or time.perf_counter() - begin < seconds * len(programs):
        for name, (program, arguments) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready([program(*arguments) for _ in range(at_once)])
            found[name].append(1e3 * (time.perf_counter() - start) / at_once)
    return {name: statistics.median(times) for name, times in found.items()}


def _compile(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    # a function object of its own: JAX must not find what it traced with other kernels
    program = jax.jit(native.serving(lambda *own: function(*own))).lower(*arguments).compile()
    jax.block_until_ready(program(*arguments))
    return program


def main() -> None:
    """Print the table, row by row as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    lists = {"--batch": [1, 8, 32], "--queries": [1, 4, 16, 64], "--entries": [256, 2048], "--rows": [1, 4, 16, 256]}
    for flag, usual in lists.items():
        parser.add_argument(flag, default=usual, type=lambda text: [int(each) for each in text.split(",") if each])
    for flag in ("--heads", "--kv-heads", "--head-dim", "--page-size", "--kv-cache-dtype"):
        usual = getattr(AttentionShape, flag[2:].replace("-", "_"))
        parser.add_argument(flag, default=usual, type=type(usual))
    parser.add_argument("--target", default="pydoc", help="whose products are timed; weights are random")
    parser.add_argument("--layers", default=0, type=int, help="of the target; 0: all")
    on_gpu = jax.default_backend() == "gpu"
    usual = (
        list(FORMATS) if jax.default_backend() == "cpu" else ["bfloat16", "int8", "int4"] if on_gpu else ["bfloat16"]
    )
    parser.add_argument("--formats", default=usual, type=lambda text: text.split(","), help="of weights")
    parser.add_argument("--seconds", default=0.3, type=float, help="of each kernel and shape")
    given = parser.parse_args()
    shape = AttentionShape(**{name: getattr(given, name) for name in vars(AttentionShape())})
    bandwidth, peak = read_bandwidth(), matmul_peak(default_dtype())
    print(f"{jax.devices()[0].device_kind}: {bandwidth / 1e9:,.0f} GB/s, {peak / 1e12:,.2f} TFLOP/s\n")
    print("| shape | own, ms | XLA, ms | bound, ms |\n|---|---|---|---|")
    of_weights = products(given.target, given.rows, given.layers, given.formats)
    sizes = itertools.product(given.batch, given.entries, given.queries)
    for work in itertools.chain((attention(shape, *size) for size in sizes), of_weights):
        found, bound = milliseconds(work, given.seconds), 1e3 * max(work.num_bytes / bandwidth, work.num_flops / peak)
        own = f"{found['own']:.3f}" if "own" in found else ""
        print(f"| {work.shape} | {own} | {found['xla']:.3f} | {bound:.3f} |", flush=True)


if __name__ == "__main__":
    main()
