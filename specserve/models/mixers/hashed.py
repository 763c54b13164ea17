"""Embeddings of the last few tokens together, which some layers of Qwen3.8-Flash-Next add to the residual streams.

The last two tokens, and the last three, are hashed by several heads, each to a row of a table of its own: a product of
64 bits for each token, their exclusive or, and its remainder by a prime. Tokens at and before an end of text count as
ends of text. The rows side by side give a value, which each stream takes behind a gate, and a convolution over every
`n`-th token before it. So a layer's state is the convolution's last inputs and the sequence's last tokens.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.kernels.matmul import Weight
from specserve.kernels.recurrence import ancestors
from specserve.kernels.rows import Documents
from specserve.models.config import HashedTokens, ModelConfig
from specserve.models.layers import linear, norm_spec
from specserve.models.mixers.channel_streams import norm_each
from specserve.models.params import ParamSpec, matrix
from specserve.pytree import pytree

LIMB, MASK64 = 16, (1 << 64) - 1


@pytree
class HashedLayer:
    table: jax.Array  # [part, row, dim of a head]; of all heads, one after another
    key: Weight  # [dim, streams * d_model]
    value: Weight  # [dim, d_model]
    key_norm: jax.Array  # [streams * d_model]
    query_norm: jax.Array  # [streams * d_model]
    conv_norm: jax.Array  # [streams * d_model]
    conv: jax.Array  # [streams * d_model, 1, width]


@dataclass(frozen=True)
class Hashes:
    """The numbers by which one layer hashes, which follow from its place among those that do."""

    multipliers: tuple[int, ...]  # of a token, of the one before it, and so on; their products have 63 bits
    primes: tuple[int, ...]  # by head
    rows: int  # of the table, those that fill its last part included


@functools.cache
def hashes(sizes: HashedTokens, vocab_size: int, place: int) -> Hashes:
    """The numbers of the `place`-th layer that hashes, as transformers computes them: multipliers by splitmix64, and
    the primes from `base` on, each head's the next."""
    half = max(1, ((1 << 63) - 1) // max(vocab_size, 1) // 2)

    def drawn(i: int) -> int:
        x = (sizes.seed + 10007 * place + 2 * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15 * i) & MASK64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
        return 2 * ((x ^ (x >> 31)) % half) + 1

    def is_prime(x: int) -> bool:
        return x > 1 and all(x % d for d in range(2, math.isqrt(x) + 1))

    first, after = place * sizes.num_heads, (place + 1) * sizes.num_heads
    primes = tuple(itertools.islice(filter(is_prime, itertools.count(sizes.base)), first, after))
    rows = -(-sum(primes) // sizes.multiple) * sizes.multiple
    return Hashes(tuple(map(drawn, range(sizes.size))), primes, rows)


def hashed_layer_spec(config: ModelConfig, place: int, prefix: str) -> HashedLayer:
    """The parameters as `ParamSpec`s. A checkpoint keeps the table in parts."""
    assert config.hashed is not None
    sizes, width = config.hashed, config.num_streams * config.d_model
    rows = hashes(sizes, config.vocab_size, place).rows // sizes.parts
    table: Any = ParamSpec(
        (sizes.parts, rows, sizes.dim // sizes.num_heads),
        ("vocab", None, None),  # by parts, whose rows need not divide
        f"{prefix}.ple_embedding.ngram_embedding.shard_{{e}}.weight",
        init="embedding",
    )
    conv: Any = ParamSpec((width, 1, sizes.conv_width), (None, None, None), f"{prefix}.conv1d.weight")
    return HashedLayer(
        table=table,
        key=matrix(f"{prefix}.key_proj.weight", sizes.dim, width, (None, None)),
        value=matrix(f"{prefix}.value_proj.weight", sizes.dim, config.d_model, (None, None)),
        key_norm=norm_spec(f"{prefix}.norm_key", width, offset=config.norm_offset),
        query_norm=norm_spec(f"{prefix}.norm_query", width, offset=config.norm_offset),
        conv_norm=norm_spec(f"{prefix}.norm_conv", width, offset=config.norm_offset),
        conv=conv,
    )


def init_state(config: ModelConfig, batch: int) -> tuple[jax.Array, jax.Array]:
    """Make the state of sequences that have no token yet: inputs of the convolution, and numbers of tokens, counted
    from 1."""
    assert config.hashed is not None
    sizes, width = config.hashed, config.num_streams * config.d_model
    inputs = jnp.zeros((batch, (sizes.conv_width - 1) * sizes.size, width), config.dtype)
    return inputs, jnp.zeros((batch, sizes.size - 1, 1), jnp.int32)


def add_hashed(
    params: HashedLayer,
    config: ModelConfig,
    place: int,
    x: jax.Array,  # [batch, n, streams * d_model]
    token_ids: jax.Array,  # [batch, n] int32
    seen: tuple[jax.Array, jax.Array],  # as `init_state`
    mask: jax.Array | Documents,  # [batch or 1, n, n] bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Add the embeddings of the last tokens together to the streams, and return what the tokens leave in the state."""
    assert config.hashed is not None
    sizes, numbers = config.hashed, token_ids[..., None] + 1
    rows = hashed_rows(config, place, numbers, seen[1], mask)
    part_rows = params.table.shape[1]
    embedded = params.table[rows // part_rows, rows % part_rows].reshape(*token_ids.shape, -1)
    key = norm_each(config, linear(embedded, params.key), params.key_norm)
    query = norm_each(config, x, params.query_norm)
    of_stream = (key * query).astype(jnp.float32).reshape(*x.shape[:-1], config.num_streams, -1)
    score = of_stream.sum(-1, keepdims=True) * config.d_model**-0.5
    score = jnp.sqrt(jnp.maximum(jnp.abs(score), 1e-6)) * jnp.sign(score)
    gate, value = jax.nn.sigmoid(score).astype(x.dtype), linear(embedded, params.value)
    gated = (gate * value[..., None, :]).reshape(x.shape)
    new = norm_each(config, gated, params.conv_norm)
    weight = params.conv[:, 0].astype(jnp.float32)
    out = new.astype(jnp.float32) * weight[:, -1]
    for back in range(1, sizes.conv_width):
        term = ancestors(new, seen[0], mask, back * sizes.size)
        out = out + term.astype(jnp.float32) * weight[:, -1 - back]
    return x + gated + jax.nn.silu(out).astype(x.dtype), (new, numbers)


def hashed_rows(
    config: ModelConfig,
    place: int,
    numbers: jax.Array,  # [batch, n, 1] int32, of tokens, counted from 1
    seen: jax.Array,  # [batch, size - 1, 1]; 0: there is none
    mask: jax.Array | Documents,
) -> jax.Array:  # [batch, n, head] int32, of the table
    """The rows of each head for the tokens that end at each place."""
    assert config.hashed is not None
    sizes, own = config.hashed, hashes(config.hashed, config.vocab_size, place)
    token, mixed, found = numbers[..., 0] - 1, [jnp.zeros(numbers.shape[:2], jnp.uint32)] * 4, list[jax.Array]()
    by_order = np.asarray(own.primes, np.uint32).reshape(sizes.size - 1, -1)
    for back, multiplier in enumerate(own.multipliers):
        if back:
            before = ancestors(numbers, seen, mask, back)[..., 0] - 1
            is_end = (before < 0) if back == 1 else (before < 0) | (token == sizes.eos)
            token = jnp.where(is_end, sizes.eos, before)
        mixed = [one ^ other for one, other in zip(mixed, _product(token, multiplier), strict=True)]
        if back:
            found.append(_remainder(mixed, by_order[back - 1]))
    offsets = np.cumsum((0, *own.primes[:-1])).astype(np.int32)
    return jnp.concatenate(found, axis=-1).astype(jnp.int32) + offsets


def _product(x: jax.Array, by: int) -> list[jax.Array]:  # [...] int32 >= 0 -> [...] uint32, four limbs
    """Multiply by a number such that the product has less than 64 bits, in limbs of 16, the lowest first."""
    low = (1 << LIMB) - 1
    columns = [jnp.zeros(x.shape, jnp.uint32)] * 5
    for i, limb in enumerate((x.astype(jnp.uint32) & low, x.astype(jnp.uint32) >> LIMB)):
        for j in range(4 - i):
            part = limb * np.uint32((by >> (LIMB * j)) & low)
            columns[i + j] = columns[i + j] + (part & low)
            columns[i + j + 1] = columns[i + j + 1] + (part >> LIMB)
    limbs, carry = list[jax.Array](), jnp.zeros(x.shape, jnp.uint32)
    for column in columns[:4]:
        total = column + carry
        limbs.append(total & low)
        carry = total >> LIMB
    return limbs


def _remainder(limbs: list[jax.Array], primes: np.ndarray) -> jax.Array:  # [...] each, [head] -> [..., head] uint32
    assert primes.max() < 1 << 28, "four bits at a time, in 32"
    rest = jnp.zeros((*limbs[0].shape, len(primes)), jnp.uint32)
    for limb in reversed(limbs):
        for shift in (12, 8, 4, 0):
            rest = ((rest << 4) | ((limb >> shift) & 15)[..., None]) % primes
    return rest
