"""The native kernels compute what XLA's operations do, within what rounding explains, and a row of a result does not
depend, to the bit, on the rows beside it. So a token gets the same numbers from a plain step, a tree and a prompt."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import rounding
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import as_stored, in_floats, make_prefix

from specserve.kernels import native
from specserve.kernels.attention import attend
from specserve.kernels.check import SHARE_A_UNIT
from specserve.kernels.gather import put_each
from specserve.kernels.matmul import (
    MOST_BYTES,
    PackedMatrix,
    QuantizedMatrix,
    dequantize,
    matmul,
    matmul_by_expert,
    pack,
)
from specserve.kernels.native import build
from specserve.kernels.paged import PagedPrefix
from specserve.kernels.pages import Pages, write_pages
from specserve.kernels.panels import FP4_DOUBLES, by_panel
from specserve.kernels.rowwise import (
    ACTIVATIONS,
    Activation,
    apply_rope,
    argmax,
    as_heads,
    cos_sin,
    gated,
    rms_norm,
    split_as_heads,
)

pytestmark = pytest.mark.skipif(not native.is_available(), reason=native.describe())


SETS = ["amx", "vnni", "avx512", "avxvnni", "avx2"] if build.machine() == "x86_64" else ["dotprod", "neon"]


@pytest.fixture(scope="module", autouse=True, params=SETS)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    """All that this processor can run, not only the one that it would choose. Matrices must be packed anew for each."""
    found = native._native()
    if found.library is None or not found.library.specserve_kernels_use(request.param.encode()):
        pytest.skip(f"{request.param}: not an instruction set of this processor that was built")
    yield
    found.library.specserve_kernels_use(found.text.encode())
    jax.clear_caches()  # shapes of packed matrices differ, and those of programs that were traced do not


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _served(function: Callable[..., Any], *args: Any) -> np.ndarray:
    return np.asarray(jax.jit(native.serving(function))(*args))


def _plain(function: Callable[..., Any], *args: Any) -> np.ndarray:
    return np.asarray(jax.jit(function)(*args))


def _weight(rng: np.random.Generator, kind: str, d_in: int, d_out: int) -> jax.Array | QuantizedMatrix:
    values = _normal(rng, d_in, d_out)
    if kind == "float32":
        return jnp.asarray(values)
    if kind == "bfloat16":
        return jnp.asarray(values.astype(ml_dtypes.bfloat16).astype(np.float32))
    block = BLOCKS.get(kind, d_in)
    scale = rng.uniform(0.001, 0.01, (-(-d_in // block), d_out)).astype(np.float32)
    if "two levels" in kind:
        scale = _two_levels(rng, scale.shape)
    offset = _normal(rng, *scale.shape) * np.float32(0.05) if "offset" in kind else None
    if offset is not None:
        offset = jnp.asarray(_two_levels(rng, scale.shape) if "two levels" in kind else offset)
    if "4" in kind:
        codes = rng.integers(0, 16, (d_in, d_out))
        middle = 0 if kind.startswith("uint4") else 8
        zeros = rng.integers(1, 17, scale.shape) if "zeros" in kind else np.full(scale.shape, middle)
        zeros = np.repeat(zeros, block, axis=0)[:d_in]
        whole = (FP4_DOUBLES[codes] if kind == "fp4" else codes - zeros).astype(np.int8)
        return QuantizedMatrix(jnp.asarray(whole), jnp.asarray(scale), block, offset)
    dtype = np.int8 if "int8" in kind else ml_dtypes.float8_e4m3fn
    whole = (values * 40).clip(-127, 127).astype(dtype)
    whole[:2] = np.array([[-100], [100]]).astype(dtype)[: len(whole)]  # no 4 bits hold both
    return QuantizedMatrix(jnp.asarray(whole), jnp.asarray(scale), block, offset)


def _two_levels(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Scales as of Q4_K and Q6_K: of eight blocks a float16 number times whole ones of 7 bits, or of 8 with a sign,
    whose largest is then -128. Some are all zero, of some the largest common factor is more than float16 holds."""
    factors = rng.uniform(1e-5, 1e-4, (-(-shape[0] // 8), shape[1])).astype(np.float16)
    whole = rng.integers(-64, 64, shape)
    whole[::8, 2::5] = -128
    whole[:8, ::5] = 0
    whole[:, 1::5] = rng.integers(-3, 4, whole[:, 1::5].shape) * 21
    return np.repeat(factors.astype(np.float32), 8, axis=0)[: shape[0]] * whole.astype(np.float32)


BLOCKS = {
    "int8 in blocks": 7,
    "int8, offset": 16,
    "int4 in blocks": 32,
    "int4, zeros": 16,
    "int4, offset": 40,
    "uint4, offset": 32,
    "fp4": 16,
    "int4 in blocks of 128": 128,
    "uint4, offset, blocks of 64": 64,
    "uint4, offset, two levels": 32,
    "int8, two levels": 16,
}
KINDS = ["float32", "bfloat16", "int8", *BLOCKS, "int4"]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from([*KINDS, "fp8"]),
    rows=st.integers(1, 130),
    d_in=st.sampled_from([1, 5, 33, 512, 2100]),
    d_out=st.sampled_from([1, 63, 64, 65, 200]),
)
def test_a_packed_product_is_x_times_w(seed: int, kind: str, rows: int, d_in: int, d_out: int) -> None:
    rng = np.random.default_rng(seed)
    weight, x = _weight(rng, kind, d_in, d_out), _normal(rng, rows, d_in)
    packed = pack(weight)
    assert packed.shape == (d_in, d_out)
    if d_in > 32:  # of fewer numbers some fit in fewer bits
        assert packed.format == {"fp8": "bfloat16"}.get(kind, kind.split(",")[0].split(" ")[0])
    residual, chosen = _normal(rng, rows, d_out), {0, rows // 2, rows - 1}

    @jax.jit
    def run(x: jax.Array, packed: Any, weight: Any) -> Any:
        alone = {row: matmul(x[row : row + 1], packed)[0] for row in chosen}
        added = native.serving(matmul)(x, packed, residual)
        return matmul(x, packed), alone, added, dequantize(weight, jnp.dtype("float32"))

    got, alone, added, plain = jax.device_get(run(x, packed, weight))
    block = 0 if packed.format in ("float32", "bfloat16") else packed.block
    parts = rounding.magnitudes(weight) if packed.format in ("int4", "uint4") or "offset" in kind else plain
    rounding.assert_within(got, x.astype(np.float64) @ plain.astype(np.float64), rounding.of_product(x, parts, block))
    assert all((alone[row] == got[row]).all() for row in chosen), "a row depends on its neighbours"
    assert (added == residual + got).all(), "a sum is more than the product and a sum"


@pytest.mark.parametrize("kind", ["uint4, offset, two levels", "int8, two levels"])
def test_scales_of_two_levels_are_those_of_one(rng: np.random.Generator, kind: str) -> None:
    """To the bit what float32 scales give, in 10 bits of each block. 18 blocks are no whole super-blocks."""
    weight = _weight(rng, kind, 18 * BLOCKS[kind], 70)
    packed = pack(weight)
    width = native.panel_width(packed.format, packed.block)
    assert packed.scale.shape[-4:] == (-(-70 // width), 3, 10, width)
    scale, offset = (
        None if each is None else jnp.asarray(by_panel(np.asarray(each), width))
        for each in (weight.scale, weight.offset)
    )
    plain = dataclasses.replace(packed, scale=scale, offset=offset)
    for rows in (1, 3, 60):
        x = jnp.asarray(_normal(rng, rows, packed.d_in))
        assert (np.asarray(matmul(x, packed)) == np.asarray(matmul(x, plain))).all(), f"{rows} rows"


@pytest.mark.parametrize("at", [(0, 2), (17, 69)])
def test_one_scale_that_is_no_product_keeps_float32(rng: np.random.Generator, at: tuple[int, int]) -> None:
    weight = _weight(rng, "uint4, offset, two levels", 18 * 32, 70)
    scale = np.array(weight.scale)
    scale[at] *= 1 + 2**-20
    assert pack(dataclasses.replace(weight, scale=jnp.asarray(scale))).scale.dtype == jnp.float32


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4 in blocks", "uint4, offset"])
def test_outputs_do_not_depend_on_how_threads_share_them(rng: np.random.Generator, kind: str) -> None:
    """A product so wide that all threads take part, again and again of other rows: its last outputs are those of a
    product of them alone."""
    weight = _weight(rng, kind, 256, 20_000)
    last = weight[:, -64:]
    wide, narrow = pack(weight), pack(last)
    for rows in (1, 4, 1, 3, 60):
        x = jnp.asarray(_normal(rng, rows, 256))
        assert (np.asarray(matmul(x, wide))[:, -64:] == np.asarray(matmul(x, narrow))).all(), f"{rows} rows"


@pytest.mark.parametrize("largest", [1e34, 1.99, 1e-30, 0.0])
def test_a_product_of_any_magnitude(rng: np.random.Generator, largest: float) -> None:
    """Where integers stand for activations, the largest of a row decides what they are multiples of."""
    weight = QuantizedMatrix(jnp.asarray(rng.integers(-127, 128, (70, 9)), jnp.int8), jnp.full((1, 9), 1e-4), 70)
    x = _normal(rng, 7, 70)
    x *= np.float32(largest) / np.abs(x).max(axis=1, keepdims=True)
    plain = np.asarray(dequantize(weight, jnp.dtype("float32")))
    bound = rounding.of_product(x, plain, 70)
    rounding.assert_within(matmul(jnp.asarray(x), pack(weight)), x.astype(np.float64) @ plain.astype(np.float64), bound)


def test_a_large_number_costs_precision_only_near_it(rng: np.random.Generator) -> None:
    """Activations have outliers. What others of the row are rounded to is as if these were not there, or as fine."""
    d_in, x = 1024, _normal(rng, 3, 1024)
    weight = QuantizedMatrix(jnp.asarray(rng.integers(-127, 128, (d_in, 9)), jnp.int8), jnp.full((1, 9), 1e-4), d_in)
    weight = dataclasses.replace(weight, values=weight.values.at[:SHARE_A_UNIT].set(0))
    plain = np.asarray(dequantize(weight, jnp.dtype("float32")))
    bound = rounding.of_product(x, plain, d_in)
    x[:, 5] = 2**7 * np.abs(x).max()
    rounding.assert_within(matmul(jnp.asarray(x), pack(weight)), x.astype(np.float64) @ plain, bound)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_row_that_is_not_finite_is_seen_and_harms_no_other(rng: np.random.Generator, kind: str, value: float) -> None:
    packed, x = pack(_weight(rng, kind, 40, 70)), _normal(rng, 6, 40)
    expected = np.asarray(matmul(jnp.asarray(x), packed))
    x[2, 11] = value
    got = np.asarray(matmul(jnp.asarray(x), packed))
    assert not np.isfinite(got[2]).any()
    assert (np.delete(got, 2, 0) == np.delete(expected, 2, 0)).all()


@pytest.mark.parametrize("kind", ["bfloat16", *BLOCKS])
def test_each_row_meets_its_own_experts_matrix(rng: np.random.Generator, kind: str) -> None:
    experts = [_weight(rng, kind, 40, 70) for _ in range(5)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *experts)
    packed = pack(stacked)
    x = _normal(rng, 90, 40)
    expert_ids = rng.integers(0, 6, 90).astype(np.int32)  # 5 is none of them
    expert_ids[expert_ids == 3] = 2  # nobody asks for 3
    got = np.asarray(jax.jit(matmul_by_expert)(x, packed, expert_ids))
    for row, expert in enumerate(expert_ids):
        expected = 0 * got[row] if expert == 5 else np.asarray(matmul(x[row : row + 1], pack(experts[expert])))[0]
        assert (got[row] == expected).all(), f"row {row} of expert {expert}"
    each = np.asarray(matmul(jnp.asarray(x.reshape(5, 18, 40)), packed))  # a stack multiplies a stack
    assert (each[4] == np.asarray(matmul(x[72:], pack(experts[4])))).all()


def test_packing_rounds_nothing() -> None:
    """One value that is no bfloat16 number keeps the whole matrix in float32."""
    weight = np.ones((8, 8), np.float32)
    assert pack(jnp.asarray(weight)).panels.dtype == jnp.bfloat16
    weight[3, 3] = 1 + 2**-20
    packed = pack(jnp.asarray(weight))
    assert packed.panels.dtype == jnp.float32
    assert isinstance(packed, PackedMatrix)
    assert (np.asarray(matmul(jnp.eye(8), packed)) == weight).all()


@pytest.mark.parametrize("d_in", [MOST_BYTES, 2 * MOST_BYTES + 1])
def test_sums_of_bytes_have_room(d_in: int) -> None:
    """Of the largest numbers of one sign; beyond, the same values are multiplied as wider numbers."""
    values = np.full((d_in, 1), -128, np.int8)
    values[0] = 127  # no 4 bits hold both
    packed = pack(QuantizedMatrix(jnp.asarray(values), jnp.ones((1, 1)), d_in))
    x, plain = np.full((1, d_in), 255 / 256, np.float32), values.astype(np.float64)
    assert packed.panels.dtype == (jnp.int8 if d_in <= MOST_BYTES else jnp.bfloat16)
    rounding.assert_within(
        matmul(jnp.asarray(x), packed), x.astype(np.float64) @ plain, rounding.of_product(x, plain, d_in)
    )


def _case(rng: np.random.Generator, *, v_dim: int, group: int, page_size: int, head_dim: int = 24) -> dict[str, Any]:
    batch, n, kv_heads, width = 3, 5, 2, 4
    pages = batch * width + 1
    mask = np.tril(np.ones((batch, n, n), bool))
    mask[0, 4, 1:3] = mask[1, 3, 0] = False  # trees rather than chains
    lens = np.array([0, page_size * 2 + 1, page_size * width], np.int32)
    return {
        "q": _normal(rng, batch, n, kv_heads * group, head_dim),
        "k": _normal(rng, batch, n, kv_heads, head_dim),
        "v": _normal(rng, batch, n, kv_heads, v_dim),
        "mask": mask,
        "k_pages": _normal(rng, pages, kv_heads, page_size, head_dim),
        "v_pages": _normal(rng, pages, kv_heads, page_size, v_dim),
        "table": rng.permutation(pages)[: batch * width].reshape(batch, width).astype(np.int32),
        "lens": lens,
        "positions": lens[:, None] + np.arange(n, dtype=np.int32),
        "sinks": _normal(rng, kv_heads * group),
    }


def _prefix(k: np.ndarray, v: np.ndarray | None, table: Any, lens: Any, stored: str, first: int = 0) -> PagedPrefix:
    k_kept, k_scale, _ = as_stored(k, stored)
    v_kept, v_scale = (None, None) if v is None else as_stored(v, stored)[:2]
    return make_prefix(k_kept, v_kept, table, lens, first, k_scale=k_scale, v_scale=v_scale)


@pytest.mark.parametrize("place", [(1, 1, 0), (4, 1, 2), (32, 0, 0)])
@pytest.mark.parametrize("stored", native.STORED)
@pytest.mark.parametrize(
    "options", [(False, 0, 0.0, False), (True, 6, 0.0, False), (False, 3, 20.0, False), (False, 0, 0.0, True)]
)
def test_attention_is_that_of_xla(
    rng: np.random.Generator, place: tuple[int, int, int], options: tuple[bool, int, float, bool], stored: str
) -> None:
    """Windows, sinks, soft caps, latent pages, a first index, every dtype of pages; one sequence is empty, one fills
    its last page. Some new keys are of tokens that have run before."""
    (page_size, first, earlier), (has_sinks, window, softcap, is_latent) = place, options
    case = _case(rng, v_dim=16 if is_latent else 40, group=3, page_size=page_size)
    v_pages = None if is_latent else case["v_pages"]
    prefix = _prefix(case["k_pages"], v_pages, case["table"], case["lens"], stored, first)
    # new keys that lie on the grid: between its steps a rounding would be a step
    case["k"], case["v"] = (as_stored(case[name], stored)[2] for name in ("k", "v"))

    mask = jnp.asarray(case["mask"][:, earlier:])
    given = {"softcap": softcap, "window": window, "position_ids": jnp.asarray(case["positions"])}

    def run(q: Any, k: Any, v: Any, sinks: Any, prefix: Any) -> jax.Array:
        v = k[..., : v.shape[-1]] if is_latent else v
        return attend(q, k, v, mask, prefix, sinks=sinks if has_sinks else None, **given)

    case["q"] = case["q"][:, earlier:]
    arrays = [jnp.asarray(case[name]) for name in ("q", "k", "v", "sinks")]
    expected = jax.jit(run)
    explained = rounding.tolerance(expected, *arrays, in_floats(prefix))
    rounding.assert_same(_served(run, *arrays, prefix), expected(*arrays, prefix), explained)


@pytest.mark.parametrize("stored", native.STORED)
@pytest.mark.parametrize("is_latent", [False, True])
def test_a_token_attends_alike_whatever_is_new(rng: np.random.Generator, stored: str, is_latent: bool) -> None:
    """To the bit: as the first of its step or the last, alone or beside others, as a node of a tree or in a chain. New
    keys are seen as pages will keep them."""
    n, length, page_size, kv_heads, group, head_dim = 4, 40, 4, 2, 2, 24
    q, k, v = (_normal(rng, length, heads, head_dim) for heads in (kv_heads * group, kv_heads, kv_heads))
    width = length // page_size
    found: dict[int, set[bytes]] = {}
    for starts in ([0, 3, 17], [33, 1, 5], [8], [30, 31, 32, 33, 34, 35, 36]):
        batch = len(starts)
        k_pages = _normal(rng, batch * width, kv_heads, page_size, head_dim) * 9  # must not be seen
        v_pages = _normal(rng, batch * width, kv_heads, page_size, head_dim) * 9
        table = rng.permutation(batch * width).reshape(batch, width).astype(np.int32)
        for row, start in enumerate(starts):
            for i in range(start):
                k_pages[table[row, i // page_size], :, i % page_size] = k[i]
                v_pages[table[row, i // page_size], :, i % page_size] = v[i]
        # nodes 0, 2, 4, 6 are the path; between them stand siblings that no node of the path sees
        index = np.array(starts)[:, None] + np.array([0, 1, 1, 2, 2, 3, 3])
        new_k, new_v = k[index], v[index]
        new_k[:, 1::2], new_v[:, 1::2] = 50, 50
        mask = np.tril(np.ones((7, 7), bool)) & (np.arange(7) % 2 == 0)[None]
        if is_latent:
            v_pages, new_v = None, new_k[..., :8]
        prefix = _prefix(k_pages, v_pages, table, starts, stored)
        out = _served(attend, *map(jnp.asarray, (q[index], new_k, new_v, mask[None])), prefix)
        for row, start in enumerate(starts):
            for i in range(n):
                found.setdefault(start + i, set()).add(out[row, 2 * i].tobytes())
    assert {len(each) for each in found.values()} == {1}
    assert len(found) > 20


@pytest.mark.parametrize("size", [1, 15, 64, 517])
@pytest.mark.parametrize("offset", [False, True])
def test_a_norm_is_that_of_xla(rng: np.random.Generator, size: int, offset: bool) -> None:
    x, weight = jnp.asarray(_normal(rng, 3, 70, size)), jnp.asarray(_normal(rng, size))

    def run(x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, weight, 1e-5, offset=offset)

    got, expected = _served(run, x, weight), _plain(run, x, weight)
    # the sum of squares has `size` terms of one sign, and some six operations follow
    bound = np.abs(expected) * (size + 6) * 2 * rounding.UNIT
    rounding.assert_within(got, expected, bound)
    assert (_served(run, x[1, 5], weight) == got[1, 5]).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_gate_is_that_of_xla(rng: np.random.Generator, activation: Activation, is_fused: bool) -> None:
    gate, up = _normal(rng, 2, 9, 37) * 6, _normal(rng, 2, 9, 37) * 6
    gate[0, 0, :4] = [-200, 200, 0, -0.0]

    def run(gate: jax.Array, up: jax.Array) -> jax.Array:
        if is_fused:
            return gated(jnp.concatenate([gate, up], axis=-1), None, activation)
        return gated(gate, up, activation)

    expected = _plain(run, jnp.asarray(gate), jnp.asarray(up))
    got = _served(run, jnp.asarray(gate), jnp.asarray(up))
    # an error of u in an exponent of magnitude z is one of z u in the exponential; 16 covers the other operations
    exponent = np.abs(gate) if activation != "gelu_tanh" else 1.6 * (np.abs(gate) + 0.045 * np.abs(gate) ** 3)
    bound = (np.abs(gate) * (np.abs(up) + 1)) * np.minimum(exponent * 4 + 16, 400) * rounding.UNIT
    rounding.assert_within(got, expected, bound)
    assert (_served(run, jnp.asarray(gate[1:, 4:5]), jnp.asarray(up[1:, 4:5]))[0, 0] == got[1, 4]).all()


def test_a_gate_is_bounded_as_in_glm_5_3(rng: np.random.Generator) -> None:
    gate, up = _normal(rng, 64) * 20, _normal(rng, 64) * 20
    assert min(gate.max(), up.max(), -gate.min(), -up.min()) > 10
    low, within = np.minimum(gate, 10), np.clip(up, -10, 10)
    expected = low / (1 + np.exp(-low.astype(np.float64))) * within
    got = gated(jnp.asarray(gate), jnp.asarray(up), "bounded_swiglu")
    np.testing.assert_allclose(got, expected, rtol=64 * rounding.UNIT, atol=1e-12)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("half", [4, 12])
def test_a_rotation_is_that_of_xla(rng: np.random.Generator, is_interleaved: bool, half: int) -> None:
    x, positions = jnp.asarray(_normal(rng, 2, 6, 3, 24)), np.array([[0, 1, 2, 3, 4, 4000], [9, 9, 8, 7, 100, 5]])
    frequencies = (10000.0 ** -(np.arange(half) / half)).astype(np.float32)

    def run(x: jax.Array, positions: jax.Array) -> jax.Array:
        return apply_rope(x, cos_sin(positions, frequencies, 1.5), is_interleaved=is_interleaved)

    expected = _plain(run, x, jnp.asarray(positions))
    got = _served(run, x, jnp.asarray(positions))
    # cosines of the same float32 angle, good to two units; two products and a sum
    rounding.assert_within(got, expected, 1.5 * 2 * np.abs(x).max() * 6 * rounding.UNIT)
    assert (_served(run, x[1:, 2:3], jnp.asarray(positions[1:, 2:3]))[0, 0] == got[1, 2]).all()


@pytest.mark.parametrize("norm", ["none", "of each head", "of all heads"])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_heads_are_norms_and_rotations(rng: np.random.Generator, norm: str, is_interleaved: bool) -> None:
    """One call, to the bit what the calls for norms and rotations give."""
    heads, kv_heads, head_dim, half = 6, 2, 24, 8
    qkv = jnp.asarray(_normal(rng, 2, 5, (heads + 2 * kv_heads) * head_dim))
    sizes = {"none": (), "of each head": (head_dim, head_dim), "of all heads": (heads * head_dim, kv_heads * head_dim)}
    norms = tuple(jnp.asarray(_normal(rng, size)) for size in sizes[norm]) or (None, None)
    positions = jnp.asarray(rng.integers(0, 4000, (2, 5)), jnp.int32)
    frequencies = (10000.0 ** -(np.arange(half) / half)).astype(np.float32)

    def together(qkv: jax.Array) -> Any:
        tables = cos_sin(positions, frequencies, 1.0)
        return split_as_heads(
            qkv, (heads, kv_heads, head_dim), norms, tables, eps=1e-5, offset=True, is_interleaved=is_interleaved
        )

    def apart(qkv: jax.Array) -> Any:
        tables = cos_sin(positions, frequencies, 1.0)
        q, k, v = jnp.split(qkv, (heads * head_dim, (heads + kv_heads) * head_dim), axis=-1)
        parts = zip((q, k), (heads, kv_heads), norms, strict=True)
        made = [as_heads(*part, tables, eps=1e-5, offset=True, is_interleaved=is_interleaved) for part in parts]
        return (*made, v.reshape(2, 5, kv_heads, head_dim))

    got, expected = (jax.jit(native.serving(function))(qkv) for function in (together, apart))
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        assert (np.asarray(one) == np.asarray(other)).all()


@pytest.mark.parametrize("has_path", [False, True])
@pytest.mark.parametrize("is_latent", [False, True])
@pytest.mark.parametrize("stored", native.STORED)
def test_pages_are_written_as_xla_writes_them(
    rng: np.random.Generator, has_path: bool, is_latent: bool, stored: str
) -> None:
    """All layers in one call, entries of every magnitude and one of zeros. Those whose page is out of range are
    nowhere, also a page before the first."""
    batch, n, kv_heads, head_dim, v_dim, num_pages, page_size = 3, 7, 2, 24, 16, 11, 4
    count = 4 if has_path else n
    pages, new = [], []
    for _ in range(3):
        kept = [as_stored(_normal(rng, num_pages, kv_heads, page_size, dim), stored) for dim in (head_dim, v_dim)]
        (k, k_scale, _), (v, v_scale, _) = kept
        v, v_scale = (None, None) if is_latent else (v, v_scale)
        pages.append(Pages(k.swapaxes(2, 3), v, k_scale, v_scale))
        size = 10.0 ** rng.integers(-20, 20, (batch, n, kv_heads, 1))
        k, v = (jnp.float32(_normal(rng, batch, n, kv_heads, dim) * size) for dim in (head_dim, v_dim))
        new.append((k.at[1, 2].set(0), None if is_latent else v))
    places = 2 * count + rng.permutation(num_pages * page_size - 2 * count)[: batch * count].reshape(batch, count)
    places[1] = 1 + np.arange(count)  # one behind the other, over the end of a page
    page, offset = (places // page_size).astype(np.int32), (places % page_size).astype(np.int32)
    page[0, 1], page[2, 3] = num_pages, num_pages + 7
    path = rng.integers(0, n, (batch, count)).astype(np.int32) if has_path else None
    got, expected = (jax.jit(run)(pages, new, page, offset, path) for run in (native.serving(write_pages), write_pages))
    for one, other, before in zip(*map(jax.tree.leaves, (got, expected, pages)), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        assert (np.asarray(one) != before).any()


@pytest.mark.parametrize("has_places", [False, True])
def test_vectors_are_put_where_xla_puts_them(rng: np.random.Generator, has_places: bool) -> None:
    """Each at its place of its row, or in place of a row; those that are out of range are dropped."""
    rows, room, batch, n, size = 9, 5, 3, 2, 19
    x = _normal(rng, rows, room, size) if has_places else _normal(rng, rows, size)
    new = _normal(rng, batch, n, size)
    row = rng.permutation(rows)[: batch * n].reshape(batch, n).astype(np.int32)
    row[1, 0], row[2, 1] = rows, rows + 3
    place = rng.integers(0, room + 1, (batch, n)).astype(np.int32) if has_places else None
    got, expected = (jax.jit(put)(x, row, place, new) for put in (native.serving(put_each), put_each))
    assert (np.asarray(got) == np.asarray(expected)).all()
    assert (np.asarray(got) != x).any()


@pytest.mark.parametrize("size", [1, 15, 64, 517])
def test_the_largest_value_is_the_first_of_equals(rng: np.random.Generator, size: int) -> None:
    x = rng.integers(-3, 3, (4, 9, size)).astype(np.float32)
    x[0, 0], x[1, 1, size // 2] = -np.inf, np.inf
    x[2, 2] = np.nan
    got = _served(argmax, jnp.asarray(x))
    assert 0 <= got[2, 2] < size
    has_largest = ~np.isnan(x).any(axis=-1)
    assert (got == np.argmax(x, axis=-1))[has_largest].all()
