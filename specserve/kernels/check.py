"""The self check of an installation: do the kernels of this backend compute what XLA's operations do?

Both sides are within a known distance of the exact result, whatever the order in which they add, so they may differ by
twice that. With the unit roundoff u, a sum of k products is off by at most gamma_k = k u / (1 - k u) times the sum of
their magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.kernels import native
from specserve.kernels.attention import attend
from specserve.kernels.matmul import (
    INT4_BLOCK,
    PackedMatrix,
    QuantizedMatrix,
    dequantize,
    in_nibbles,
    matmul,
    matmul_float32,
    pack,
    quantize,
)
from specserve.kernels.nibbles import NibbleMatrix, WordMatrix
from specserve.kernels.paged import PagedPrefix, kernel_for
from specserve.kernels.pages import Pages, default_layout

UNIT = 2.0**-24  # the unit roundoff of float32: half of the distance between two neighbours, as a share
ROWS = (1, 4, 33)  # plain, a chain, and more than any block of the kernels has
D_IN, D_OUT = 96, 70  # no multiple of a panel
D_IN_OF_FOUR_BITS = 192  # of an accelerator's product: three groups of a TPU's words
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, QUERIES = 4, 2, 64, 32, 5
SHARE_A_UNIT = 128  # inputs of a row that are rounded to multiples of the same number (`kMostInputs`)
EXP_ROUNDINGS = 8  # of an exponential, by the approximations of processors and of GPUs, in units of UNIT


@dataclass(frozen=True)
class Checked:
    """A kernel beside XLA: the largest difference, as a share of what rounding explains. Above 1, or no number, it is
    wrong."""

    kernel: str
    share: float

    @property
    def is_right(self) -> bool:
        return self.share <= 1


def product_bound(x: Any, weight: Any, block: int = 0) -> np.ndarray:  # [..., d_in], [d_in, d_out] -> [..., d_out]
    """The most by which two ways to compute x @ weight in float32 can differ; each may scale it once before the sum and
    once after. With a block, one of them may round each number of a block of so many inputs of x to a multiple of at
    most 2^-22 of the largest there, or of 2^-14 of the largest of 128 there, as products with weights of few bits do
    (native/digits_isa.h)."""
    x, weight = (np.abs(np.asarray(each, np.float64)) for each in (x, weight))
    bound = 2 * _gamma(weight.shape[-2] + 2) * (x @ weight)
    if not block:
        return bound
    for number, share in ((block, 2**-23), (min(block, SHARE_A_UNIT), 2**-15)):
        starts = np.arange(0, x.shape[-1], number)
        largest = np.repeat(np.maximum.reduceat(x, starts, axis=-1), number, axis=-1)[..., : x.shape[-1]]
        bound = bound + share * (largest @ weight)
    return bound


def check_kernels() -> Iterator[Checked]:
    """Run each kernel that this backend has over a few small arrays, and XLA over the same. Yields nothing where there
    are no kernels."""
    if jax.default_backend() == "cpu":
        if native.is_available():
            yield from _products()
            yield _attention("float32")
        return
    yield _four_bits()
    if kernel_for(_pages(np.zeros((1, KV_HEADS, PAGE_SIZE, HEAD_DIM)), "bfloat16")) is not None:
        yield _attention("bfloat16")


def _products() -> Iterator[Checked]:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((D_IN, D_OUT)).astype(np.float32)
    stored: dict[str, Callable[[], jax.Array | QuantizedMatrix]] = {
        "float32": lambda: jnp.asarray(weight),
        "bfloat16": lambda: jnp.asarray(weight).astype("bfloat16").astype("float32"),
        "int8": lambda: quantize(jnp.asarray(weight), "int8"),
    }
    for name, make in stored.items():
        plain = make()
        packed: PackedMatrix = pack(plain)
        shares = []
        for num_rows in ROWS:
            x = jnp.asarray(rng.standard_normal((num_rows, D_IN)), jnp.float32)
            values, scale, block = plain, 1.0, 0
            if isinstance(plain, QuantizedMatrix):
                values, scale, block = plain.values, np.asarray(plain.scale), plain.block
            bound = product_bound(x, values, block) * scale
            shares.append(_share(matmul(x, packed), matmul(x, plain), bound))
        yield Checked(f"products in {name}", float(np.max(shares)))


def _four_bits() -> Checked:
    """Check products with 4-bit weights on an accelerator. A kernel may round each weight to bfloat16, after its code
    was scaled and again with its offset, or scale sums of codes that are 16 more, less 16 times the sums of x."""
    rng = np.random.default_rng(2)
    packed = in_nibbles(quantize(jnp.asarray(rng.standard_normal((D_IN_OF_FOUR_BITS, D_OUT)), jnp.float32), "int4"))
    assert isinstance(packed, NibbleMatrix | WordMatrix)
    plain = np.asarray(dequantize(packed, jnp.dtype("float32")))
    step = np.ptp(plain.reshape(-1, INT4_BLOCK, D_OUT), axis=1).repeat(INT4_BLOCK, axis=0)  # 15 scales at most
    shares = []
    for num_rows in ROWS:
        x = jnp.asarray(rng.standard_normal((num_rows, D_IN_OF_FOUR_BITS)), jnp.bfloat16)
        wide = np.asarray(x, np.float32)
        bound = 2 * product_bound(wide, 5 * step + np.abs(plain)) + 2.0**-8 * np.abs(wide) @ (step + np.abs(plain))
        shares.append(_share(matmul_float32(x, packed), wide.astype(np.float64) @ plain, bound))
    return Checked("products in 4 bits", float(np.max(shares)))


def _attention(dtype: str) -> Checked:
    """Check attention over two sequences: one whose prefix ends within a page, and one without a prefix."""
    rng = np.random.default_rng(1)
    lens, width = np.array([2 * PAGE_SIZE + 5, 0], np.int32), 3

    def draw(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape)).astype(dtype)

    k_pages, v_pages = draw(2 * width, KV_HEADS, PAGE_SIZE, HEAD_DIM), draw(2 * width, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    table = rng.permutation(2 * width).reshape(2, width).astype(np.int32)
    prefix = PagedPrefix(_pages(k_pages, dtype, v_pages), jnp.asarray(table), jnp.asarray(lens))
    q, k, v = draw(2, QUERIES, HEADS, HEAD_DIM), *(draw(2, QUERIES, KV_HEADS, HEAD_DIM) for _ in range(2))
    mask = np.tril(np.ones((1, QUERIES, QUERIES), bool))
    arguments = q, k, v, jnp.asarray(mask), prefix
    own = native.serving(attend)(*arguments)
    with native.left_out():
        xla = attend(*arguments)
    bound = np.zeros(own.shape)
    for row, length in enumerate(lens):

        def joined(pages: Any, new: Any, row: int = row, length: int = int(length)) -> np.ndarray:  # [key, kv_head, _]
            old = np.asarray(pages, np.float64)[table[row]].swapaxes(1, 2).reshape(-1, KV_HEADS, HEAD_DIM)[:length]
            return np.concatenate([old, np.asarray(new, np.float64)[row]])

        keys, values = joined(k_pages, k), joined(v_pages, v)
        seen = np.concatenate([np.ones((QUERIES, length), bool), mask[0]], axis=1)
        for head in range(HEADS):
            own_keys, own_values = keys[:, head // (HEADS // KV_HEADS)], values[:, head // (HEADS // KV_HEADS)]
            bound[row, :, head] = _attention_bound(
                np.asarray(q, np.float64)[row, :, head], own_keys, own_values, seen, dtype
            )
    return Checked("attention", _share(own, xla, bound))


def _attention_bound(
    q: np.ndarray,  # [query, head_dim]
    k: np.ndarray,  # [key, head_dim]
    v: np.ndarray,  # [key, head_dim]
    seen: np.ndarray,  # [query, key] bool
    dtype: str,
) -> np.ndarray:  # [query, head_dim]
    """The most by which two ways to attend can differ. A score is off by gamma_k of its magnitudes, an exponential by
    what its argument is off and by its own rounding, the weights and the result by a rounding to `dtype`."""
    unit, scale = {"float32": UNIT, "bfloat16": 2.0**-8}[dtype], q.shape[-1] ** -0.5
    scores = np.where(seen, q @ k.T * scale, -np.inf)
    below = scores - scores.max(axis=-1, keepdims=True)
    weights = np.exp(below)
    weights /= weights.sum(axis=-1, keepdims=True)
    off_score = _gamma(q.shape[-1] + 2) * (np.abs(q) @ np.abs(k).T) * scale
    off_score += 4 * UNIT * np.abs(np.where(seen, below, 0)) + EXP_ROUNDINGS * UNIT
    off = 2 * np.expm1(2 * off_score.max(axis=-1, keepdims=True)) + 2 * _gamma(2 * len(k) + 8) + 2 * unit
    return 2 * (off + 2 * unit) * (weights @ np.abs(v))


def _pages(k: Any, dtype: str, v: Any = None) -> Pages:
    """Pages of keys and values [page, kv_head, page_size, head_dim] in the layout of this backend."""
    if v is None:
        v = k
    k, v, layout = jnp.asarray(k).astype(dtype), jnp.asarray(v).astype(dtype), default_layout(k.shape[-1])
    if layout == "joined":
        return Pages(jnp.concatenate([k, v], axis=-1), None, layout=layout, v_first=k.shape[-1])
    return Pages(k.swapaxes(2, 3) if layout == "columns" else k, v, layout=layout)


def _gamma(num_terms: int) -> float:
    return num_terms * UNIT / (1 - num_terms * UNIT)


def _share(own: Any, xla: Any, bound: np.ndarray) -> float:
    return float(np.max(np.abs(np.asarray(own, np.float64) - np.asarray(xla, np.float64)) / bound))
