"""The one rule by which a token is drawn, for plain decoding and for every node of a tree.

The draw at a position is a function of (seed, position, distribution): `argmax(log p + gumbel(seed, position))` over
the distribution left by the sampler options; temperature 0 is the same rule without noise. The noise is keyed by the
absolute position and the target's token id, never by a tree node, so all nodes of one depth and the draft's rows read
the same values: plain decoding, chain and tree then give the same tokens for the same seed, and a draft that ranks its
candidates with that noise is accepted far more often (drafter-invariant speculative decoding, Daliri et al. 2024,
arXiv 2408.07978).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specserve.pytree import pytree

_NEG_INF = float("-inf")


@pytree
class SamplerRows:
    """One row of sampler options per sequence; all traced, so no value a user sends compiles anything."""

    temperature: jax.Array  # [batch] float32, 0 is greedy
    top_k: jax.Array  # [batch] int32, 0 is off
    top_p: jax.Array  # [batch] float32, 1 is off
    min_p: jax.Array  # [batch] float32, 0 is off
    seed: jax.Array  # [batch, 2] uint32, low and high words

    @classmethod
    def greedy(cls, batch: int) -> "SamplerRows":
        return cls(
            temperature=jnp.zeros(batch, jnp.float32),
            top_k=jnp.zeros(batch, jnp.int32),
            top_p=jnp.ones(batch, jnp.float32),
            min_p=jnp.zeros(batch, jnp.float32),
            seed=jnp.zeros((batch, 2), jnp.uint32),
        )


def sample(
    rows: SamplerRows,
    logits: jax.Array,  # [batch, n, vocab] float32
    position_ids: jax.Array,  # [batch, n] int32, the position that each drawn token will take
) -> jax.Array:  # [batch, n] int32
    """Draw the target's token at every (sequence, node)."""

    def drawn() -> jax.Array:
        kept = truncate(rows, scale(rows, logits))
        token_ids = jnp.arange(logits.shape[-1], dtype=jnp.uint32)
        return argmax(kept + noise(rows, position_ids, token_ids))

    return jax.lax.cond(jnp.any(rows.temperature > 0), drawn, lambda: argmax(logits))


def scale(rows: SamplerRows, logits: jax.Array) -> jax.Array:  # [batch, n, vocab]
    """Logits over temperature; greedy rows keep theirs."""
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    return logits / temperature[:, None, None]


def noise(
    rows: SamplerRows,
    position_ids: jax.Array,  # [batch, n] int32
    token_ids: jax.Array,  # [vocab] uint32, target ids
) -> jax.Array:  # [batch, n, vocab] float32
    """Standard Gumbel noise, zero in greedy rows."""
    # Two keys for each position from the 64-bit seed, then one counter-based draw for each token id.
    key = _mix(rows.seed[:, :1] ^ _mix(position_ids.astype(jnp.uint32) + jnp.uint32(0x9E3779B9)))
    other = _mix(rows.seed[:, 1:] + _mix(key ^ jnp.uint32(0x85EBCA6B)))
    bits = _mix(_mix(token_ids * jnp.uint32(0x9E3779B1) + key[..., None]) ^ other[..., None])
    # uniform in (0, 1), finest near 0, where the exponential -log(1 - u) is small and its Gumbel -log(e) is large
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    gumbel = -jnp.log(-jnp.log1p(-uniform))
    return jnp.where((rows.temperature > 0)[:, None, None], gumbel, 0.0)


def truncate(rows: SamplerRows, logits: jax.Array) -> jax.Array:  # [batch, n, vocab], dropped tokens at -inf
    """Top-k, then top-p over what top-k left, then min-p: the order of Hugging Face and vLLM."""
    is_active = (rows.temperature > 0) & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))

    def truncated() -> jax.Array:
        vocab = logits.shape[-1]
        top_k = jnp.where((rows.top_k > 0) & (rows.top_k < vocab), rows.top_k, vocab)[:, None]
        kept = jnp.where(logits >= _kth_largest(logits, top_k)[..., None], logits, _NEG_INF)
        probs = jax.nn.softmax(kept, axis=-1)
        floor = _nucleus_floor(probs, rows.top_p[:, None])
        floor = jnp.maximum(floor, rows.min_p[:, None] * jnp.max(probs, axis=-1))
        is_kept = (probs >= floor[..., None]) | ~is_active[:, None, None]
        return jnp.where(is_kept, jnp.where(is_active[:, None, None], kept, logits), _NEG_INF)

    return jax.lax.cond(jnp.any(is_active), truncated, lambda: logits)


def _kth_largest(logits: jax.Array, k: jax.Array) -> jax.Array:  # [batch, n, vocab], [batch, 1] -> [batch, n]
    """The k-th largest value, exactly, without a sort: bisection over the ordered bits of float32."""
    ordered = _ordered_bits(logits)
    return _from_ordered_bits(_largest_floor(lambda floor: jnp.sum(ordered >= floor, axis=-1) >= k, logits.shape[:-1]))


def _nucleus_floor(probs: jax.Array, top_p: jax.Array) -> jax.Array:  # [batch, n, vocab], [batch, 1] -> [batch, n]
    """The largest probability f such that the tokens with p >= f hold at least `top_p` of the mass."""
    total = jnp.sum(probs, axis=-1)  # close to 1; comparing with it keeps top_p = 1 from dropping anything
    ordered = _ordered_bits(probs)

    def holds(floor: jax.Array) -> jax.Array:
        mass = jnp.sum(jnp.where(ordered >= floor, probs, 0.0), axis=-1)
        return mass >= top_p * total

    floor = _from_ordered_bits(_largest_floor(holds, probs.shape[:-1]))
    return jnp.where(top_p < 1, floor, 0.0)


def _largest_floor(holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """The largest uint32 for which `holds` is true, where it is monotone: 32 rounds, one bit a round."""

    def set_bit(i: jax.Array, floor: jax.Array) -> jax.Array:
        candidate = floor | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(candidate[..., None]), candidate, floor)

    return jax.lax.fori_loop(0, 32, set_bit, jnp.zeros(shape, jnp.uint32))


def _ordered_bits(x: jax.Array) -> jax.Array:
    """float32 to uint32, keeping the order (sign bit flipped for positives, all bits for negatives)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits & sign != 0, ~bits, bits | sign)


def _from_ordered_bits(bits: jax.Array) -> jax.Array:
    sign = jnp.uint32(0x80000000)
    return jax.lax.bitcast_convert_type(jnp.where(bits & sign != 0, bits ^ sign, ~bits), jnp.float32)


def argmax(x: jax.Array) -> jax.Array:  # [..., vocab] -> [...] int32
    """The first index of the largest value. Two plain reductions: CPUs do not vectorise `jnp.argmax`."""
    vocab = x.shape[-1]
    index = jnp.where(x == jnp.max(x, axis=-1, keepdims=True), jnp.arange(vocab, dtype=jnp.int32), vocab)
    return jnp.minimum(jnp.min(index, axis=-1), vocab - 1)  # a row of NaN stays in range


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 with good avalanche (the `lowbias32` constants of C. Wellons' hash prospector)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
