"""Native kernels of attention, norms and pages compute what XLA's operations do, within what rounding explains, and a
row of a result does not depend, to the bit, on the rows beside it. So a token gets the same numbers from a plain step,
a tree and a prompt."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounding
from paging import as_stored, in_floats, make_prefix

from specserve.kernels import native
from specserve.kernels.attention import attend
from specserve.kernels.gather import put_each
from specserve.kernels.paged import PagedPrefix
from specserve.kernels.pages import Pages, write_pages
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

pytestmark = [
    pytest.mark.skipif(not native.is_available(), reason=native.describe()),
    pytest.mark.usefixtures("each_instruction_set"),
]


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _served(function: Callable[..., Any], *args: Any) -> np.ndarray:
    return np.asarray(jax.jit(native.serving(function))(*args))


def _plain(function: Callable[..., Any], *args: Any) -> np.ndarray:
    return np.asarray(jax.jit(function)(*args))


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
