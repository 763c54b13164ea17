"""How fast attention over pages and a step's products are on this device, by our kernel and by XLA's operations, which
take turns, and the share of what the machine can do.

Run from the checkout: `python benchmarks/kernels.py --batch 1,8 --queries 1,16 --kv-cache-dtype int8`. The bound is the
longer of two times: of the bytes that must be read and written, at the bandwidth of reductions over a large buffer, and
of the operations, at the peak: on CPUs of multiply-adds of registers, by all cores at once, elsewhere of a large matrix
product. Of an empty list nothing is timed: `--rows ""` is without products, `--batch ""` without attention.
Mixtures of experts are timed by `experts.py`.
"""

import argparse
import ctypes
import dataclasses
import itertools
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from served_flags import device

from specserve import host
from specserve.checkpoints.configs import find_config
from specserve.eval.bench.step_times import QUEUED, read_bandwidth
from specserve.kernels import native
from specserve.kernels.attention import attend
from specserve.kernels.matmul import INT4_BLOCK, in_nibbles, matmul, pack, quantize
from specserve.kernels.paged import PagedPrefix, kernel_for
from specserve.kernels.pages import LARGEST, Pages
from specserve.mesh import default_dtype
from specserve.models.params import init_params, is_product
from specserve.models.served import fuse_for_cpu
from specserve.models.target import target_spec
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

# as many chains of sums as registers hold, in the widest vectors, so that none waits for the sum before it
MULTIPLY_ADDS = """
#if defined(__AVX512F__)
enum { kBytes = 64, kChains = 24 };
#elif defined(__AVX__)
enum { kBytes = 32, kChains = 12 };
#else
enum { kBytes = 16, kChains = 24 };
#endif
typedef float Vector __attribute__((vector_size(kBytes)));
extern "C" double multiply_adds(long turns, float by) {
  Vector sums[kChains], factor = by - Vector{}, all = {};
  for (int i = 0; i < kChains; ++i) sums[i] = by * i - Vector{};  // equal chains would be computed once
  for (long turn = 0; turn < turns; ++turn) {
    #pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) sums[i] = sums[i] * factor + factor;
  }
  #pragma GCC unroll 24
  for (int i = 0; i < kChains; ++i) all += sums[i];
  return all[0] ? 2.0 * turns * kChains * kBytes / 4 : 0.0;  // what was computed counts
}
"""


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
    kv_cache_dtype: str = field(default_factory=default_dtype)


def attention(shape: AttentionShape, batch: int, entries: int, n: int) -> KernelWork:
    """Attention of n queries of each sequence over its committed entries and over the queries themselves."""
    stored, rng = CACHE_DTYPES[shape.kv_cache_dtype], np.random.default_rng(0)
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
    has_kernel = native.is_available() if jax.default_backend() == "cpu" else kernel_for(pages) is not None
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
        elif name == "int4" and not on_cpu:
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
    """One product after another, as in a step: each waits for the one before. It adds to the first rows alone: sums of
    all results so far XLA would make anew for each product."""
    last: Any = 0.0
    for weight in weights:
        last = matmul(jnp.resize(x + last, (x.shape[0], weight.shape[0])), weight)[:, :1] * 1e-3
    return x + last


def multiply_add_peak() -> float:
    """Return the floating point operations per second of multiply-adds of registers by all cores at once: the best of
    several short times, in which nothing is read from memory."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "peak.cc", Path(folder) / "peak.so"
        source.write_text(MULTIPLY_ADDS)
        how = ["-O3", "-march=native", "-ffp-contract=fast", "-Wno-psabi", "-fPIC", "-shared"]
        subprocess.run([*native.build.find_compiler(), *how, str(source), "-o", str(library)], check=True)
        function = ctypes.CDLL(str(library)).multiply_adds
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_long, ctypes.c_float]
    best, cores = 0.0, host.num_cores()
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(20):
            start = time.perf_counter()
            operations = sum(pool.map(lambda _: function(2_000_000, 0.5), range(cores)))
            best = max(best, operations / (time.perf_counter() - start))
    return best


def milliseconds(work: KernelWork, seconds: float, *, has_xla: bool) -> dict[str, list[float]]:
    """Return the times of both, or of ours alone, which take turns for so many seconds each. An accelerator gets
    several calls at once, so that it does not wait for the host in between."""
    at_once, programs = 1 if jax.default_backend() == "cpu" else QUEUED, {}
    if has_xla or work.own is None:
        with native.left_out():
            programs["xla"] = _compile(work.function, work.xla), work.xla
    if work.own is not None:
        programs["own"] = _compile(work.function, work.own), work.own
    found: dict[str, list[float]] = {name: [] for name in programs}
    begin = time.perf_counter()
    while not all(found.values()) or time.perf_counter() - begin < seconds * len(programs):
        for name, (program, arguments) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready([program(*arguments) for _ in range(at_once)])
            found[name].append(1e3 * (time.perf_counter() - start) / at_once)
    return found


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
    for flag in ("--heads", "--kv-heads", "--head-dim", "--page-size"):
        parser.add_argument(flag, default=getattr(AttentionShape, flag[2:].replace("-", "_")), type=int)
    parser.add_argument("--kv-cache-dtype", default=default_dtype(), choices=CACHE_DTYPES, help="of the pages")
    parser.add_argument("--target", default="pydoc", help="whose products are timed; weights are random")
    parser.add_argument("--layers", default=0, type=int, help="of the target; 0: all")
    on_gpu = jax.default_backend() == "gpu"
    usual = (
        list(FORMATS) if jax.default_backend() == "cpu" else ["bfloat16", "int8", "int4"] if on_gpu else ["bfloat16"]
    )
    parser.add_argument("--formats", default=usual, type=lambda text: text.split(","), help="of weights")
    parser.add_argument("--seconds", default=0.3, type=float, help="of each kernel and shape")
    parser.add_argument("--without-xla", action="store_true", help="where there is a kernel of ours")
    given = parser.parse_args()
    shape = AttentionShape(**{name: getattr(given, name) for name in vars(AttentionShape())})
    on_cpu = jax.default_backend() == "cpu"
    bandwidth, peak = read_bandwidth(), multiply_add_peak() if on_cpu else matmul_peak(default_dtype())
    print(f"{device()}: {bandwidth / 1e9:,.0f} GB/s, {peak / 1e12:,.2f} TFLOP/s\n")
    print("| shape | own, ms | XLA, ms | bound, ms | own at best, GFLOP/s | of the peak |\n|---|---|---|---|---|---|")
    of_weights = products(given.target, given.rows, given.layers, given.formats)
    sizes = itertools.product(given.batch, given.entries, given.queries)
    for work in itertools.chain((attention(shape, *size) for size in sizes), of_weights):
        found = milliseconds(work, given.seconds, has_xla=not given.without_xla)
        bound = 1e3 * max(work.num_bytes / bandwidth, work.num_flops / peak)
        own, xla = (f"{statistics.median(found[name]):.3f}" if name in found else "" for name in ("own", "xla"))
        rate = work.num_flops / min(found["own"]) * 1e3 if "own" in found else 0.0
        speed = f"{rate / 1e9:,.0f} | {rate / peak:.0%}" if rate else " | "
        print(f"| {work.shape} | {own} | {xla} | {bound:.3f} | {speed} |", flush=True)


if __name__ == "__main__":
    main()
