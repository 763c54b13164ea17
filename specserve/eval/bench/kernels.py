"""The benchmark of this backend's kernels. Each runs beside XLA's own operations for the same function, shape by
shape, with the share that it reaches of what this machine can do.

`CATALOGUE` is all there is to measure. A kernel is added as a function that makes its `KernelWork`.
"""

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.checkpoints.configs import find_config
from specserve.errors import ConfigError
from specserve.eval.bench.step_times import read_bandwidth
from specserve.eval.settings import KernelsRun
from specserve.kernels import native
from specserve.kernels.attention import attend
from specserve.kernels.grouped import cost
from specserve.kernels.matmul import Weight, matmul, pack, quantize
from specserve.kernels.paged import PagedPrefix, kernel_for
from specserve.kernels.pages import LARGEST, Pages
from specserve.mesh import default_dtype, free_memory
from specserve.models.config import Experts, ModelConfig
from specserve.models.moe import Form, best_form, moe, moe_spec
from specserve.models.params import init_params, is_product, num_params
from specserve.models.target import fuse_for_cpu, target_spec
from specserve.serve.launch import CACHE_DTYPES
from specserve.train.speed import matmul_peak

COMPILERS = {"gpu": "Triton", "tpu": "Mosaic"}  # of the kernels of accelerators


@dataclass(frozen=True)
class KernelWork:
    """A function for one shape, once by the backend's kernel and once by XLA's operations."""

    kernel: str  # its name in the catalogue
    shape: dict[str, int]
    path: str  # what runs on this backend: the kernel's name; empty: there is none, XLA runs alone
    function: Callable[..., Any]
    xla: Callable[..., Any]  # the same of the same arguments, by XLA's operations alone
    make: Callable[[], tuple[Any, ...]]  # the arguments, so that no two shapes are in memory together
    num_bytes: int  # that must be read and written, each once
    num_flops: int


@dataclass(frozen=True)
class Bounds:
    """The speeds that this machine was measured to reach."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, work: KernelWork) -> float:
        """Return the least seconds that the work can take."""
        return max(work.num_bytes / self.bytes_per_second, work.num_flops / self.flops_per_second)

    def raised_by(self, rows: Sequence["KernelTimes"]) -> "Bounds":
        """Return the speeds with those that kernels have reached among them, so that no kernel is faster than its
        bound."""
        return Bounds(
            max([self.bytes_per_second, *(row.work.num_bytes / row.least_seconds for row in rows)]),
            max([self.flops_per_second, *(row.work.num_flops / row.least_seconds for row in rows)]),
        )


@dataclass(frozen=True)
class KernelTimes:
    """The median times of a kernel and of XLA's operations, in milliseconds."""

    work: KernelWork
    own_ms: float | None  # of the backend's kernel; None: there is none
    xla_ms: float
    bound_ms: float

    @property
    def least_seconds(self) -> float:
        """Seconds by the faster of the two."""
        return 1e-3 * (self.xla_ms if self.own_ms is None else min(self.own_ms, self.xla_ms))

    def within(self, bounds: Bounds) -> "KernelTimes":
        """Return the same times beside other bounds."""
        return replace(self, bound_ms=1e3 * bounds.seconds(self.work))

    def to_json(self) -> dict[str, Any]:
        found = {"kernel": self.work.kernel, **self.work.shape, "path": self.work.path or "xla"}
        found |= {"bytes": self.work.num_bytes, "flops": self.work.num_flops}
        return found | {"own_ms": self.own_ms, "xla_ms": self.xla_ms, "bound_ms": self.bound_ms}


def measure_bounds() -> Bounds:
    """Measure the machine's speeds: the best of a few large reductions and products."""
    return Bounds(read_bandwidth(), matmul_peak(default_dtype()))


def measure_kernels(run: KernelsRun, bounds: Bounds) -> Iterator[KernelTimes]:
    """Time every kernel and shape that is asked for. The kernel and XLA's operations take turns. Raises ConfigError."""
    unknown = sorted(set(run.kernels) - set(CATALOGUE))
    if unknown:
        raise ConfigError(f"--kernels {','.join(unknown)}: there are {', '.join(CATALOGUE)}")
    for name in run.kernels or CATALOGUE:
        for work in CATALOGUE[name](run):
            yield _time(work, bounds, run.seconds)


def _time(work: KernelWork, bounds: Bounds, seconds: float) -> KernelTimes:
    arguments = work.make()
    with native.left_out():
        programs = {"xla": _compile(work.xla, arguments)}
    if work.path:
        programs["own"] = _compile(work.function, arguments)
    found: dict[str, list[float]] = {name: [] for name in programs}
    begin = time.perf_counter()
    while not found["xla"] or time.perf_counter() - begin < seconds * len(programs):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            found[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: statistics.median(times) for name, times in found.items()}
    return KernelTimes(work, medians.get("own"), medians["xla"], 1e3 * bounds.seconds(work))


def _compile(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    # a function object of its own: what JAX traced with other kernels must not be found again
    program = jax.jit(native.serving(lambda *own: function(*own))).lower(*arguments).compile()
    jax.block_until_ready(program(*arguments))
    return program


def _attention(run: KernelsRun) -> Iterator[KernelWork]:
    """Yield the shapes of attention over pages: queries of a tree or a chunk, over committed entries and
    themselves."""
    if run.heads % run.kv_heads:
        raise ConfigError(f"--kv-heads {run.kv_heads} does not divide --heads {run.heads}")
    dtype = default_dtype()
    stored = CACHE_DTYPES.get(run.kv_cache_dtype, dtype)
    token = 2 * run.kv_heads * run.head_dim * np.dtype(stored).itemsize
    token += 2 * run.kv_heads * 4 if run.kv_cache_dtype != "auto" else 0
    for batch, entries, n in itertools.product(run.batch, run.entries, run.queries):
        needed, free = 4 * batch * entries * token, free_memory()  # made on the host, gathered and widened by XLA
        if needed > free:
            raise ConfigError(
                f"--batch {batch} --entries {entries}: needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are "
                "free; leave the largest out"
            )
        rows = batch * n * run.heads * run.head_dim
        yield KernelWork(
            kernel="attention",
            shape={"batch": batch, "queries": n, "entries": entries},
            path=_attention_path(run, stored),
            function=attend,
            xla=attend,  # where kernels are left out
            make=lambda batch=batch, entries=entries, n=n: _attention_arguments(run, stored, batch, entries, n),
            num_bytes=batch * entries * token + 2 * rows * np.dtype(dtype).itemsize,
            num_flops=4 * rows * (entries + n),
        )


def _attention_path(run: KernelsRun, stored: str) -> str:
    if jax.default_backend() == "cpu":
        return "native" if native.is_available() and np.dtype(stored) == np.float32 else ""
    pages = jax.eval_shape(lambda: Pages.zeros(1, run.page_size, run.kv_heads, run.head_dim, stored))
    return COMPILERS[jax.default_backend()] if kernel_for(pages) else ""


def _attention_arguments(run: KernelsRun, stored: str, batch: int, entries: int, n: int) -> tuple[Any, ...]:
    """Make pages in a muddled order. Their values do not change the time, so all share the values of one page."""
    rng = np.random.default_rng(0)
    width = -(-entries // run.page_size)
    pages = Pages.zeros(batch * width, run.page_size, run.kv_heads, run.head_dim, stored)
    largest = LARGEST.get(jnp.dtype(stored), 4.0)

    def fill(array: jax.Array, scale: float) -> jax.Array:
        return jnp.broadcast_to(
            jnp.asarray(scale * rng.uniform(-1, 1, array.shape[1:])).astype(array.dtype), array.shape
        )

    pages = Pages(
        fill(pages.k, largest),
        fill(pages.v, largest) if pages.v is not None else None,
        None if pages.k_scale is None else jnp.ones_like(pages.k_scale) * (4 / largest),
        None if pages.v_scale is None else jnp.ones_like(pages.v_scale) * (4 / largest),
        pages.layout,
    )
    table = rng.permutation(batch * width).reshape(batch, width).astype(np.int32)
    prefix = PagedPrefix(pages, jnp.asarray(table), jnp.full(batch, entries, jnp.int32))

    def new(heads: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((batch, n, heads, run.head_dim)), default_dtype())

    mask = jnp.asarray(np.tril(np.ones((1, n, n), bool)))
    return new(run.heads), new(run.kv_heads), new(run.kv_heads), mask, prefix


def _experts(run: KernelsRun) -> Iterator[KernelWork]:
    """A mixture of experts, routing included, over all query tokens of the batch. On CPU a server packs its experts for
    the native kernel of `products`; here they are plain, and XLA multiplies them."""
    if run.top_k > run.num_experts:
        raise ConfigError(f"--top-k {run.top_k}: there are --num-experts {run.num_experts}")
    experts, dtype, d_model = Experts(run.num_experts, run.top_k, run.expert_d_ff), default_dtype(), run.d_model
    config = ModelConfig("bench", 1, d_model, 1, 1, 1, d_model, run.expert_d_ff, 1, experts=experts, dtype=dtype)
    spec = moe_spec(config, "layer")
    shapes = jax.eval_shape(lambda: init_params(spec, jax.random.key(0), dtype))
    needed = 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))  # XLA may copy them
    if needed > free_memory():
        raise ConfigError(f"the experts need about {needed / 1e9:.1f} GB, {free_memory() / 1e9:.1f} GB are free")

    def make(num_rows: int) -> tuple[Any, ...]:
        rows = jax.random.normal(jax.random.key(1), (num_rows, run.d_model), dtype)
        return init_params(spec, jax.random.key(0), dtype), rows

    def function(params: Any, x: jax.Array) -> jax.Array:
        return moe(params, config, x)

    for num_rows in sorted({batch * n for batch, n in itertools.product(run.batch, run.queries)}):
        form, xla = (_form(shapes, experts, num_rows, left_out) for left_out in (False, True))
        counted = cost(shapes, run.top_k, jax.ShapeDtypeStruct((num_rows, run.d_model), dtype))
        yield KernelWork(
            kernel="experts",
            shape={"rows": num_rows, "experts": run.num_experts},
            path="" if form is xla else COMPILERS[jax.default_backend()],
            function=function,
            xla=function,
            make=functools.partial(make, num_rows),
            num_bytes=counted.num_bytes,
            num_flops=counted.flops,
        )


def _form(params: Any, experts: Experts, num_rows: int, is_left_out: bool) -> Form:
    with native.left_out() if is_left_out else contextlib.nullcontext():
        return best_form(params, experts, num_rows)


@dataclass(frozen=True)
class _Format:
    """A format in which matrices are kept that are drawn in bfloat16."""

    plain: Callable[[jax.Array], Any]  # for XLA
    num_bytes: int  # of an element


FORMATS = {
    "float32": _Format(lambda matrix: matrix * (1 + 2**-20), 4),  # numbers that need all of float32
    "bfloat16": _Format(lambda matrix: matrix, 2),
    "int8": _Format(lambda matrix: quantize(matrix, "int8"), 1),
}


def _products(run: KernelsRun) -> Iterator[KernelWork]:
    """All products of one step of the target, one after another, by rows: of one sequence's plain step to a prompt's
    chunk. XLA multiplies plain float32 matrices where weights are bfloat16 numbers, since it widens others first."""
    config = find_config(run.target)[0]
    if (needed := 3 * 4 * num_params(target_spec(config))) > free_memory():  # what is drawn, and both layouts
        raise ConfigError(
            f"--target {run.target}: its products need about {needed / 1e9:.1f} GB, {free_memory() / 1e9:.1f} GB are "
            "free; give a smaller one"
        )
    on_cpu = jax.default_backend() == "cpu"
    has_kernel = on_cpu and native.is_available()
    for name in FORMATS if on_cpu else ("bfloat16",):
        shapes = [matrix.shape for matrix in _matrices(run.target, name, has_kernel)[0]]
        elements, ends = sum(d_in * d_out for d_in, d_out in shapes), sum(d_in + d_out for d_in, d_out in shapes)
        for num_rows in run.rows:
            yield KernelWork(
                kernel=f"products, {name} weights",
                shape={"rows": num_rows, "matrices": len(shapes)},
                path="native" if has_kernel else "",
                function=lambda x, _plain, packed: _in_a_row(x, packed),
                xla=lambda x, plain, _packed: _in_a_row(x, plain),
                make=functools.partial(_product_arguments, run.target, name, has_kernel, num_rows),
                num_bytes=FORMATS[name].num_bytes * elements + num_rows * ends * np.dtype(default_dtype()).itemsize,
                num_flops=2 * num_rows * elements,
            )
    _matrices.cache_clear()


@functools.lru_cache(maxsize=1)  # for all rows of a format, and not longer
def _matrices(target: str, name: str, has_kernel: bool) -> tuple[list[Any], list[Any]]:
    """A target's matrices in a format, of random numbers: for XLA, and for the kernel, where there is one."""
    params = init_params(target_spec(find_config(target)[0]), jax.random.key(0), "bfloat16")
    params = jax.tree.map(lambda leaf: leaf.astype(default_dtype()), params)
    if jax.default_backend() == "cpu":
        params = fuse_for_cpu(params)
    drawn = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params) if is_product(path)]
    plain = [FORMATS[name].plain(matrix) for matrix in drawn if matrix.ndim == 2]
    return plain, [pack(matrix) for matrix in plain] if has_kernel else plain


def _product_arguments(target: str, name: str, has_kernel: bool, num_rows: int) -> tuple[Any, ...]:
    return jnp.ones((num_rows, find_config(target)[0].d_model), default_dtype()), *_matrices(target, name, has_kernel)


def _in_a_row(x: jax.Array, weights: list[Weight]) -> jax.Array:
    """One product after another, as a step does: each waits for the one before."""
    for weight in weights:
        inputs = jnp.resize(x, (x.shape[0], weight.shape[0]))
        x = x + matmul(inputs, weight)[:, :1] * 1e-3
    return x


CATALOGUE: dict[str, Callable[[KernelsRun], Iterator[KernelWork]]] = {
    "attention": _attention,
    "experts": _experts,
    "products": _products,
}
