"""`paged_tpu.attend_pages` equals its plain twin, and reads nothing that it may not read.

The interpreter of TPU kernels runs here with its checks on: memory begins as NaN, copies may be executed as late as
when they are waited for, reads out of bounds and races are errors. What Mosaic makes of the kernel is seen where libtpu
is installed (`-m libtpu`, no device needed), and on TPUs (`-m tpu`).
"""

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from rounding import UNIT, assert_within

from specserve.errors import ConfigError
from specserve.kernels import paged_tpu
from specserve.kernels.attention import attend
from specserve.kernels.block import NEG_INF
from specserve.kernels.paged import PagedPrefix, reads_by_page
from specserve.kernels.pages import Pages

FLOAT8 = np.dtype(jnp.float8_e4m3fn)
BFLOAT16 = np.dtype(jnp.bfloat16)
FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Case:
    """What is fixed when a kernel is compiled."""

    q_dtype: np.dtype = FLOAT32
    dtype: np.dtype = FLOAT32  # of the pages
    batch: int = 3
    kv_heads: int = 2
    rows: int = 5
    head_dim: int = 8
    v_dim: int = 8
    page_size: int = 32
    width: int = 10
    is_latent: bool = False
    is_scaled: bool = False
    first: int = 0
    window: int = 0
    softcap: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        return {"v_dim": self.v_dim, "first": self.first, "window": self.window, "softcap": self.softcap}


@dataclass
class Arrays:
    q: np.ndarray  # [batch, kv_head, row, head_dim]
    k_pages: np.ndarray  # [page, kv_head, page_size, head_dim]
    v_pages: np.ndarray | None
    page_table: np.ndarray  # [batch, pages]
    lens: np.ndarray  # [batch]
    positions: np.ndarray | None  # [batch, row]
    k_scale: np.ndarray | None  # [page, kv_head, page_size]
    v_scale: np.ndarray | None

    def visible(self, case: Case, b: int) -> np.ndarray:  # [row, entry] bool
        index = np.arange(case.width * case.page_size)
        seen = (index >= case.first) & (index < self.lens[b])
        if self.positions is None:
            return np.broadcast_to(seen, (case.rows, len(index)))
        return seen & (self.positions[b][:, None] - index < case.window)


def make(case: Case, seed: int, lens: list[int]) -> Arrays:
    """Random arrays in which all that no row sees is NaN, or a large number where the type has none, and the ids of
    pages without a visible entry are out of range."""
    rng = np.random.default_rng(seed)
    num_pages = case.batch * case.width + 1

    def stored(channels: int) -> np.ndarray:
        shape = (num_pages, case.kv_heads, case.page_size, channels)
        if case.dtype == np.int8:
            return rng.integers(-127, 128, shape).astype(np.int8)
        return rng.standard_normal(shape).astype(case.dtype)

    def scale() -> np.ndarray | None:
        size = 0.02 if case.dtype == np.int8 else 1.0
        return rng.uniform(size / 4, size, (num_pages, case.kv_heads, case.page_size)).astype(np.float32)

    length = np.array(lens, np.int32)
    positions = None
    if case.window:
        positions = (length[:, None] + rng.integers(0, 9, (case.batch, case.rows))).astype(np.int32)
        positions[:, -1] += case.window  # sees nothing
    arrays = Arrays(
        (rng.standard_normal((case.batch, case.kv_heads, case.rows, case.head_dim)) * 2).astype(case.q_dtype),
        stored(case.head_dim),
        None if case.is_latent else stored(case.v_dim),
        rng.permutation(num_pages)[: case.batch * case.width].reshape(case.batch, case.width).astype(np.int32),
        length,
        positions,
        scale() if case.is_scaled else None,
        scale() if case.is_scaled and not case.is_latent else None,
    )
    heard = np.zeros((num_pages, case.page_size), bool)
    for b in range(case.batch):
        seen = arrays.visible(case, b).any(axis=0).reshape(case.width, case.page_size)
        heard[arrays.page_table[b]] = seen
        unused = ~seen.any(axis=1)
        arrays.page_table[b, unused] = rng.choice([-5, num_pages, 2**30], unused.sum())
    garbage = 127 if case.dtype == np.int8 else np.nan
    for array in (arrays.k_pages, arrays.v_pages):
        if array is not None:
            np.moveaxis(array, 1, 2)[~heard] = garbage
    for array in (arrays.k_scale, arrays.v_scale):
        if array is not None:
            np.moveaxis(array, 1, 2)[~heard] = np.nan
    return arrays


def twin(case: Case, arrays: Arrays) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Results of float64, and how far rounding may take those of the kernel from them.

    A score is a sum of head_dim products, then at most 4 more roundings (scale, softcap). So it is off by e, and each
    weight by a factor of exp(+-e) and what exp itself and its argument round. Both sums have as many terms as there are
    keys, and are scaled anew for each block of keys. Where operands are bfloat16, weights are rounded to that too.
    """
    shape = (case.batch, case.kv_heads, case.rows)
    out, out_bound = np.zeros((*shape, case.v_dim)), np.zeros((*shape, case.v_dim))
    lse, lse_bound = np.full(shape, np.float64(np.float32(NEG_INF))), np.zeros(shape)
    narrow = 2.0**-8 if case.q_dtype == BFLOAT16 else 0.0
    for b, h, r in np.ndindex(shape):
        index = np.flatnonzero(arrays.visible(case, b)[r])
        if not len(index):
            continue
        at = (arrays.page_table[b][index // case.page_size], h, index % case.page_size)
        q, keys = arrays.q[b, h, r].astype(np.float64), arrays.k_pages[at].astype(np.float64)
        values = keys[:, : case.v_dim] if arrays.v_pages is None else arrays.v_pages[at].astype(np.float64)
        scores, magnitude = keys @ q, np.abs(keys) @ np.abs(q)
        if arrays.k_scale is not None:
            scores, magnitude = scores * arrays.k_scale[at], magnitude * arrays.k_scale[at]
        v_scale = arrays.k_scale if case.is_latent else arrays.v_scale
        if v_scale is not None:
            values = values * v_scale[at][:, None]
        if case.softcap:
            scores = case.softcap * np.tanh(scores / case.softcap)
        weights = np.exp(scores - scores.max())
        total = weights.sum()
        off = (case.head_dim + 4) * UNIT * magnitude.max() + 8 * UNIT * (1 + np.abs(scores).max())
        sums = (len(index) + 4 * case.width) * UNIT
        out[b, h, r] = weights @ values / total
        out_bound[b, h, r] = (np.expm1(2 * off) + 2 * sums + narrow) * (weights @ np.abs(values)) / total
        lse[b, h, r] = scores.max() + np.log(total)
        lse_bound[b, h, r] = off + sums + 4 * UNIT * (1 + np.abs(lse[b, h, r]))
    return (out, lse), (out_bound, lse_bound)


@functools.cache
def program(case: Case, interpret: Any) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The compiled kernel, in blocks so small that a few pages are several of them."""

    def run(arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        given = {name: arrays.get(name) for name in Arrays.__dataclass_fields__}
        with pytest.MonkeyPatch.context() as patch:
            if interpret is not False:
                patch.setattr(paged_tpu, "_MAX_KEYS", 128)
                patch.setattr(paged_tpu, "_MAX_ROWS", 8)
                patch.setattr(paged_tpu, "_MAX_HEADS", 2)
            return paged_tpu.attend_pages(**given, **case.options, interpret=interpret)

    return jax.jit(run)


def check(case: Case, arrays: Arrays, interpret: Any) -> None:
    given = {name: jnp.asarray(array) for name, array in vars(arrays).items() if array is not None}
    printed = io.StringIO()
    pltpu.reset_tpu_interpret_mode_state()  # an example that failed may have left some
    with contextlib.redirect_stdout(printed):
        got = jax.device_get(program(case, interpret)(given))
    assert "RACE" not in printed.getvalue(), printed.getvalue()
    expected, bounds = twin(case, arrays)
    for what, *each in zip(("out", "lse"), got, expected, bounds, strict=True):
        assert_within(*each, what)


INTERPRETED = {
    "eager": pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True),
    "on wait": pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=True),
}
CASES = {
    "windows and groups of heads and rows": (
        Case(rows=11, kv_heads=4, v_dim=16, window=150, softcap=3.0, batch=2),
        "eager",
    ),
    "latent pages": (Case(kv_heads=1, head_dim=24, v_dim=16, is_latent=True, first=1), "on wait"),
    "int8": (Case(BFLOAT16, np.dtype(np.int8), is_scaled=True, window=100), "on wait"),
    "float8, latent": (Case(FLOAT32, FLOAT8, is_scaled=True, is_latent=True, kv_heads=1), "eager"),
    "bfloat16": (Case(BFLOAT16, BFLOAT16, page_size=16, width=20, rows=20, kv_heads=1), "on wait"),
}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=3)
@given(
    lens=st.lists(st.one_of(st.integers(0, 320), st.sampled_from([0, 128, 256])), min_size=3, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
@example(lens=[9, 0, 300], seed=0)  # buffers that are filled in part before they ever were in full
def test_the_kernel_equals_its_twin_and_hears_nothing_else(name: str, lens: list[int], seed: int) -> None:
    case, mode = CASES[name]
    check(case, make(case, seed, lens[: case.batch]), INTERPRETED[mode])


REAL = {  # shapes that are served
    "decode": Case(BFLOAT16, BFLOAT16, rows=4, kv_heads=8, head_dim=128, v_dim=128, width=32, batch=4),
    "prefill": Case(BFLOAT16, BFLOAT16, rows=2048, kv_heads=8, head_dim=128, v_dim=128, width=32, batch=2),
    "float32": Case(rows=240, kv_heads=8, head_dim=128, v_dim=128, width=32),
    "half a register": Case(BFLOAT16, BFLOAT16, kv_heads=3, head_dim=64, v_dim=64, width=1),
    "Gemma": Case(BFLOAT16, BFLOAT16, kv_heads=4, head_dim=256, v_dim=256, width=48, window=512, softcap=50.0),
    "latent": Case(BFLOAT16, BFLOAT16, 4, 1, 128, 576, 512, width=48, is_latent=True),
    "latent, float32": Case(FLOAT32, FLOAT32, 4, 1, 1024, 576, 512, width=48, is_latent=True),
    "latent, float8": Case(BFLOAT16, FLOAT8, 4, 1, 128, 576, 512, width=48, is_latent=True, is_scaled=True),
    "int8": Case(BFLOAT16, np.dtype(np.int8), rows=16, kv_heads=12, head_dim=128, v_dim=128, width=10, is_scaled=True),
    "float8": Case(BFLOAT16, FLOAT8, rows=16, kv_heads=8, head_dim=128, v_dim=128, width=48, is_scaled=True, window=99),
}


def shapes(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    few = dataclasses.replace(case, batch=1, width=1)
    made = make(few, 0, [0])
    pages = {"k_pages", "v_pages", "k_scale", "v_scale"}
    found = {}
    for name, array in vars(made).items():
        if array is not None:
            found[name] = jax.ShapeDtypeStruct((64 if name in pages else case.batch, *array.shape[1:]), array.dtype)
    found["page_table"] = jax.ShapeDtypeStruct((case.batch, case.width), np.int32)
    return found


@pytest.mark.parametrize("name", REAL)
def test_served_shapes_are_taken_and_lower_for_tpus(name: str) -> None:
    case = REAL[name]
    given = shapes(case)
    assert paged_tpu.takes(given["k_pages"], given.get("v_pages"))
    text = jax.export.export(program(case, False), platforms=["tpu"])(given).mlir_module()
    assert text.count("tpu_custom_call") == 1
    if not case.is_scaled:
        assert "stablehlo.gather" not in text, "pages are read where they are"


def test_attention_reads_pages_by_this_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the backend is a TPU. Pages that the kernel cannot take are left to XLA, which is said."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")

    def lower(page_size: int) -> str:
        pages = Pages.zeros(4, page_size, 2, 128, "float32")
        prefix = PagedPrefix(pages, jnp.zeros((3, 2), jnp.int32), jnp.zeros(3, jnp.int32))
        q, k = jnp.zeros((3, 5, 4, 128)), jnp.zeros((3, 5, 2, 128))
        run = jax.jit(lambda *args: attend(*args, prefix))
        return jax.export.export(run, platforms=["tpu"])(q, k, k, jnp.ones((1, 5, 5), bool)).mlir_module()

    assert [lower(page_size).count("tpu_custom_call") for page_size in (16, 6)] == [1, 0]
    assert reads_by_page([Pages.zeros(4, 16, 2, 128, "float32")], None)
    assert not caplog.text
    assert not reads_by_page([Pages.zeros(4, size, 2, 128, "float32") for size in (16, 6)], None)
    assert "cannot take pages of float32 (4, 2, 6, 128), so XLA" in caplog.text
    assert "give --page-size 32" in caplog.text


@pytest.mark.libtpu
@pytest.mark.parametrize("generation", ["v4:2x2x1", "v5e:2x2", "v6e:2x2", "tpu7x:2x2x1"])
def test_served_shapes_compile_for_tpus(generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiler of real devices, which need not be there. Nothing as large as the pages is held beside them."""
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # or libtpu asks the network which device it has
    sharding = jax.sharding.SingleDeviceSharding(topologies.get_topology_desc(generation, "tpu").devices[0])
    for case in REAL.values():
        given = {
            name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for name, each in shapes(case).items()
        }
        compiled = program(case, False).lower(given).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < given["k_pages"].size, case


@pytest.mark.tpu
@pytest.mark.parametrize("name", [*CASES, *REAL])
def test_compiled_for_this_tpu_the_kernel_equals_its_twin(name: str) -> None:
    case = CASES[name][0] if name in CASES else REAL[name]
    case = dataclasses.replace(case, rows=min(case.rows, 240))  # the twin takes its time
    entries = case.width * case.page_size
    lens = [entries, entries // 2 + 1, 0, 7][: case.batch]
    check(case, make(case, 0, lens), False)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((9, 2, 24, 128), np.int8, "multiple of 32 tokens, not 24"),
        ((9, 2, 4, 128), np.float32, "multiple of 8 tokens, not 4"),
        ((9, 2, 32, 128), np.float16, "not float16"),
        ((9, 2, 4096, 1024), np.float32, "use smaller pages"),
    ],
)
def test_pages_that_the_kernel_cannot_take_are_refused(shape: tuple[int, ...], dtype: Any, message: str) -> None:
    pages = jax.ShapeDtypeStruct(shape, dtype)
    assert not paged_tpu.takes(pages, pages)
    q = jnp.zeros((1, 2, 1, shape[-1]))
    table, lens = jnp.zeros((1, 3), jnp.int32), jnp.zeros(1, jnp.int32)
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(lambda pages: paged_tpu.attend_pages(q, pages, pages, table, lens, None, v_dim=shape[-1]), pages)


def test_tables_beyond_the_scalar_memory_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(width=2, kv_heads=1, window=7)
    monkeypatch.setattr(paged_tpu, "_SMEM", 2 * 4 * (case.width + 1 + 3))  # two sequences of three
    check(case, make(case, 0, [40, 0, 64]), True)
    text = jax.export.export(program(case, False), platforms=["tpu"])(shapes(case)).mlir_module()
    assert text.count("tpu_custom_call") == 2
    monkeypatch.setattr(paged_tpu, "_SMEM", 8)
    with pytest.raises(ConfigError, match="a table of 2 pages"):
        jax.eval_shape(program(dataclasses.replace(case, rows=4), False), shapes(case))
