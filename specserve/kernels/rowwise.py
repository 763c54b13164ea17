"""The operations of a layer between its products, row by row: norms, gates and rotary embeddings.

While a served step is traced (`native.serving`) they run as native kernels, where there are any. XLA computes one row
by other sums and other formulas than many rows, so a token's result would differ in its last bits between a plain step,
a tree and a prompt. The kernels compute a row in one way. They have no gradient, which serving does not need.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from specserve.kernels import native
from specserve.mesh import program_platform

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "gelu_erf", "relu2", "bounded_swiglu"]
# in the order of `native/kernels.h`, which has no others
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "clamped_swiglu")
UNGATED: tuple[Activation, ...] = ("relu2",)  # of MLPs that have no `up`
_MOST_OF_GPU = 16  # values that XLA's own top-k for GPUs finds


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, offset: bool = False) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in float32 and returned in x's dtype. With `offset` the weight
    is a difference from 1, as Gemma keeps it. `weight` [size] may have leading axes that broadcast."""
    if weight.ndim == 1 and native.serves(x, weight):
        return native.call("specserve_norm", x.shape, x, weight, eps=np.float32(eps), offset=offset)
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    if offset:
        return (x32 * scale * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    if weight.dtype == jnp.float32:
        return (x32 * scale * weight).astype(x.dtype)
    return (x32 * scale).astype(x.dtype) * weight.astype(x.dtype)


def gated(gate: jax.Array, up: jax.Array | None, activation: Activation = "silu") -> jax.Array:
    """Compute act(gate) * up; both are [..., d_ff]. Without `up`, gate [..., 2 * d_ff] holds both side by side. The
    clamped form is GPT-OSS's: gate * sigmoid(1.702 gate) * (up + 1), where gate is at most 7 and up within -7 and 7.
    The bounded form is GLM-5.3-Flash's: silu(gate) * up, where gate is at most 10 and up within -10 and 10. The form
    that is not gated, relu(gate) ** 2 (So et al. 2021, arXiv 2109.08668), has no `up`."""
    if activation in UNGATED:
        return jnp.square(jax.nn.relu(gate))
    if activation in ACTIVATIONS and native.serves(gate) and (up is None or native.serves(up)):
        shape = gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)
        code = np.int64(ACTIVATIONS.index(activation))
        return native.call("specserve_gate", shape, gate, native.operand(up), activation=code)
    if up is None:
        gate, up = jnp.split(gate, 2, axis=-1)
    if activation == "clamped_swiglu":
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1.0)
    if activation == "bounded_swiglu":
        gate, up, activation = jnp.minimum(gate, 10.0), jnp.clip(up, -10.0, 10.0), "silu"
    if activation == "silu":
        return jax.nn.silu(gate) * up
    return jax.nn.gelu(gate, approximate=activation == "gelu_tanh") * up


def cos_sin(
    position_ids: jax.Array,  # [batch, seq] int32
    frequencies: np.ndarray,  # [half] float32
    magnitude: float,
) -> tuple[jax.Array, jax.Array]:  # [batch, seq, 1, half] float32
    """The cosines and sines of position * frequency, times `magnitude`."""
    if native.is_serving():
        shape = jax.ShapeDtypeStruct((*position_ids.shape, 1, len(frequencies)), jnp.float32)
        call = jax.ffi.ffi_call("specserve_angles", (shape, shape))
        cos, sin = call(position_ids.astype(jnp.int32), jnp.asarray(frequencies), magnitude=np.float32(magnitude))
        return cos, sin
    angles = position_ids.astype(jnp.float32)[..., None, None] * frequencies
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude


def apply_rope(
    x: jax.Array,  # [batch, seq, head, head_dim]
    tables: tuple[jax.Array, jax.Array],  # from `cos_sin`
    *,
    is_interleaved: bool = False,
) -> jax.Array:
    """Rotate the first channels of each head, as many as the tables have angles for, in float32. Channel i of their
    first half is rotated against channel i of the second (the Hugging Face convention), or with `is_interleaved` each
    even channel against the next."""
    cos, sin = tables
    if native.serves(x, cos, sin) and cos.shape[:2] == x.shape[:2]:
        return native.call("specserve_rotate", x.shape, x, cos, sin, is_interleaved=is_interleaved)
    rotary_dim = 2 * cos.shape[-1]
    turned, rest = x[..., :rotary_dim].astype(jnp.float32), x[..., rotary_dim:]
    if is_interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    turned = jnp.stack(parts, axis=-1).reshape(turned.shape) if is_interleaved else jnp.concatenate(parts, axis=-1)
    turned = turned.astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def argmax(x: jax.Array) -> jax.Array:  # [..., size] -> [...] int32
    """Find the first index of the largest value; of a row with NaN, any index of that row. A GPU reduces pairs of value
    and index; elsewhere, without the native kernel, there are two plain reductions, because XLA does not vectorise one
    of pairs on CPUs."""
    size = x.shape[-1]
    if native.serves(x):
        return jax.ffi.ffi_call("specserve_argmax", jax.ShapeDtypeStruct(x.shape[:-1], jnp.int32))(x)
    if program_platform() == "gpu":
        return jax.lax.argmax(x, x.ndim - 1, jnp.int32)
    index = jnp.where(x == jnp.max(x, axis=-1, keepdims=True), jnp.arange(size, dtype=jnp.int32), size)
    return jnp.minimum(jnp.min(index, axis=-1), size - 1)


def largest(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:  # [..., size] -> two of [..., k]
    """Find the k largest values and their indices, the largest first and equal ones in order, as `jax.lax.top_k`. A TPU
    sorts whole rows for that, and so does a GPU for more than 16 values, by a library that no CUDA graph can hold: the
    host would have to start the rest of the step. There they are k maxima in turn."""
    platform = program_platform()
    if platform == "cpu" or (platform == "gpu" and k <= _MOST_OF_GPU):
        return jax.lax.top_k(x, k)
    size = x.shape[-1]
    index = jnp.arange(size, dtype=jnp.int32)
    is_left, values, found = jnp.ones(x.shape, bool), [], []
    for _ in range(k):
        value = jnp.max(jnp.where(is_left, x, -jnp.inf), axis=-1, keepdims=True)
        first = jnp.min(jnp.where(is_left & (x == value), index, size), axis=-1, keepdims=True)
        is_left &= index != first
        values.append(value)
        found.append(jnp.minimum(first, size - 1))
    return jnp.concatenate(values, axis=-1), jnp.concatenate(found, axis=-1)


def by_head(x: jax.Array, num_heads: int) -> jax.Array:  # [batch, seq, head * dim] -> [batch, seq, head, dim]
    """Split the results of a product into heads."""
    if program_platform() == "tpu" and x.shape[0] * x.shape[1] < x.shape[2]:
        # or XLA makes the product itself by heads, and copies the matrix, which is larger, into another order
        x = jax.lax.optimization_barrier(x)
    return x.reshape(*x.shape[:2], num_heads, -1)


def as_heads(
    x: jax.Array,  # [batch, seq, size]: queries or keys of all heads side by side
    num_heads: int,
    norm: jax.Array | None,  # [head_dim], or as long as all heads
    tables: tuple[jax.Array, jax.Array],  # from `cos_sin`
    *,
    eps: float,
    offset: bool = False,
    is_interleaved: bool = False,
) -> jax.Array:  # [batch, seq, head, head_dim]
    """Split queries or keys into heads, with `rms_norm` (of each head, or of all together) and `apply_rope`."""
    over_all = norm is not None and norm.shape[0] == x.shape[-1]  # with one head it is the same
    if norm is not None and over_all:
        x = rms_norm(x, norm, eps, offset=offset)
    x = by_head(x, num_heads)
    if norm is not None and not over_all:
        x = rms_norm(x, norm, eps, offset=offset)
    return apply_rope(x, tables, is_interleaved=is_interleaved)


def split_as_heads(
    qkv: jax.Array,  # [batch, seq, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys and values side by side
    sizes: tuple[int, int, int],  # num_heads, num_kv_heads, head_dim
    norms: tuple[jax.Array | None, jax.Array | None],  # of queries and keys, as in `as_heads`
    tables: tuple[jax.Array, jax.Array],  # from `cos_sin`
    *,
    eps: float,
    offset: bool = False,
    is_interleaved: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # q [batch, seq, head, head_dim], k and v [batch, seq, kv_head, head_dim]
    """Split the three apart and make `as_heads` of queries and keys. While serving it is one native call, which gives
    the bits that the separate calls give."""
    num_heads, num_kv_heads, head_dim = sizes
    if native.serves(qkv, *tables) and tables[0].shape[:2] == qkv.shape[:2]:
        counts = num_heads, num_kv_heads, num_kv_heads
        shapes = [jax.ShapeDtypeStruct((*qkv.shape[:2], count, head_dim), jnp.float32) for count in counts]
        weights = [native.operand(norm) for norm in norms]
        call = jax.ffi.ffi_call("specserve_heads", shapes)
        q, k, v = call(qkv, *weights, *tables, eps=np.float32(eps), offset=offset, is_interleaved=is_interleaved)
        return q, k, v
    q, k, v = jnp.split(qkv, (num_heads * head_dim, (num_heads + num_kv_heads) * head_dim), axis=-1)
    finish = functools.partial(as_heads, tables=tables, eps=eps, offset=offset, is_interleaved=is_interleaved)
    q, k = finish(q, num_heads, norms[0]), finish(k, num_kv_heads, norms[1])
    return q, k, v.reshape(*v.shape[:2], num_kv_heads, head_dim)
