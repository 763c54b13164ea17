"""The one rule by which a token is drawn, for plain decoding and for every node of a tree.

The draw at a position is a function of (seed, position, distribution): `argmax(log p + gumbel(seed, position))` over
the distribution left by the sampler options. Temperature 0 is the same rule without noise. The noise is keyed by the
absolute position and the target's token id, never by a tree node, so all nodes of one depth and the draft's rows read
the same values. Plain decoding, chain and tree then give the same tokens for the same seed, and a draft that ranks its
candidates with that noise is accepted far more often (drafter-invariant speculative decoding, Daliri et al. 2024, arXiv
2408.07978).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specserve.kernels.rowwise import argmax, largest
from specserve.mesh import program_platform
from specserve.pytree import pytree

_NEG_INF = float("-inf")
MAX_LOGPROBS = 20  # most likely tokens that a step reports
MAX_BAD_SEQUENCES, MAX_BAD_TOKENS = 128, 16  # of one request; a bad word is one or two token sequences
IN_PROMPT, IS_STOP, EMITTED = 1, 2, 4  # the parts of an entry of `TokenRows.seen`
UNBOUNDED = 2**31 - 1
BITS_PER_ROUND = 4  # of a floor that is looked for on an accelerator
NOTHING = -1  # drawn in place of a token id where every token is banned


@dataclass(frozen=True)
class DrawOptions:
    """The options of one sequence that shape what is drawn and are numbers, under vLLM's names. The default draws
    greedily."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0


@pytree
class SamplerRows:
    """The sampler options, one row per sequence. All are traced, so no value that a user sends compiles anything."""

    temperature: jax.Array  # [batch] float32, 0 is greedy
    top_k: jax.Array  # [batch] int32, 0 is off
    top_p: jax.Array  # [batch] float32, 1 is off
    min_p: jax.Array  # [batch] float32, 0 is off
    seed: jax.Array  # [batch, 2] uint32, low and high words
    presence_penalty: jax.Array  # [batch] float32, 0 is off
    frequency_penalty: jax.Array  # [batch] float32, 0 is off
    repetition_penalty: jax.Array  # [batch] float32, 1 is off
    has_bias: jax.Array  # [batch] bool, whether `TokenRows.bias` counts
    has_bad_words: jax.Array  # [batch] bool, whether `TokenRows.bad_words` counts
    output_start: jax.Array  # [batch] int32, position of the first token of the answer
    stop_start: jax.Array  # [batch] int32, position from which on stop ids may be drawn (min_tokens)
    has_logprobs: jax.Array  # [batch] bool
    max_depth: jax.Array  # [batch] int32, draft tokens that a step may accept

    @classmethod
    def greedy(cls, batch: int) -> "SamplerRows":
        def full(value: float, dtype: jnp.dtype) -> jax.Array:  # an array of its own: the state's are donated
            return jnp.full(batch, value, dtype)

        real, whole = jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)
        return cls(
            temperature=full(0, real),
            top_k=full(0, whole),
            top_p=full(1, real),
            min_p=full(0, real),
            seed=jnp.zeros((batch, 2), jnp.uint32),
            presence_penalty=full(0, real),
            frequency_penalty=full(0, real),
            repetition_penalty=full(1, real),
            has_bias=full(False, jnp.dtype(bool)),
            has_bad_words=full(False, jnp.dtype(bool)),
            output_start=full(0, whole),
            stop_start=full(0, whole),
            has_logprobs=full(False, jnp.dtype(bool)),
            max_depth=full(UNBOUNDED, whole),
        )


@pytree
class TokenRows:
    """The options of each sequence that concern single tokens, and a record of the tokens that it holds already."""

    bias: jax.Array  # [batch, vocab] float32, added to the logits; -inf bans
    seen: jax.Array  # [batch, vocab] int32: IN_PROMPT | IS_STOP | times emitted * EMITTED
    bad_words: jax.Array  # [batch, MAX_BAD_SEQUENCES, MAX_BAD_TOKENS] int32, each ends at the right; -1 pads

    @classmethod
    def zeros(cls, batch: int, vocab: int) -> "TokenRows":
        return cls(
            bias=jnp.zeros((batch, vocab), jnp.float32),
            seen=jnp.zeros((batch, vocab), jnp.int32),
            bad_words=jnp.full((batch, MAX_BAD_SEQUENCES, MAX_BAD_TOKENS), -1, jnp.int32),
        )


@pytree
class Nodes:
    """The nodes after which tokens are drawn: those of a tree, or one per sequence."""

    token_ids: jax.Array  # [batch, node] int32; node 0 is emitted, and in `TokenRows.seen`, already
    parents: jax.Array  # [batch, node] int32
    depths: jax.Array  # [batch, node] int32
    ancestors: jax.Array  # [batch or 1, node, node] bool, each node its own ancestor
    recent: jax.Array  # [batch, MAX_BAD_TOKENS - 1] int32, emitted tokens from node 0's backwards; -1: not the answer's


def draw(
    rows: SamplerRows,
    tokens: TokenRows,
    nodes: Nodes,
    logits: jax.Array,  # [batch, node, vocab] float32, the target's own
    position_ids: jax.Array,  # [batch, node] int32, the position that each drawn token will take
    allowed: jax.Array | None = None,  # [batch, node, ceil(vocab / 8)] uint8, see `constrain`
) -> jax.Array:  # [batch, node] int32
    """`constrain` and `sample`. Where no row has an option the logits are read once, for the likeliest token, and
    nothing of their size is written."""
    has_option = (rows.temperature > 0) | rows.has_bias | rows.has_bad_words | _has_penalty(rows)
    is_used = jnp.any(has_option) | jnp.any(position_ids < rows.stop_start[:, None])
    if allowed is not None:
        is_used |= jnp.any(allowed != 255)

    def by_options() -> jax.Array:
        return sample(rows, constrain(rows, tokens, nodes, logits, position_ids, allowed), position_ids)

    return jax.lax.cond(is_used, by_options, lambda: _or_nothing(logits, argmax(logits)))


def constrain(
    rows: SamplerRows,
    tokens: TokenRows,
    nodes: Nodes,
    logits: jax.Array,  # [batch, node, vocab] float32, the target's own
    position_ids: jax.Array,  # [batch, node] int32, the position that each drawn token will take
    allowed: jax.Array | None = None,  # [batch, node, ceil(vocab / 8)] uint8, bits of allowed tokens, first is lowest
) -> jax.Array:  # [batch, node, vocab]
    """Apply bias, bans and penalties to the logits, in vLLM's order. A node counts its accepted ancestors as emitted,
    so its logits are those that plain decoding would have met there."""
    logits = _when(rows.has_bias, logits, lambda x: x + tokens.bias[:, None])
    is_early = position_ids < rows.stop_start[:, None]
    is_stop = tokens.seen & IS_STOP != 0
    logits = _when(is_early, logits, lambda x: jnp.where(is_early[..., None] & is_stop[:, None], _NEG_INF, x))
    logits = _when(rows.has_bad_words, logits, lambda x: _ban_words(rows, tokens, nodes, x))
    if allowed is not None:
        logits = _when(allowed != 255, logits, lambda x: _ban_others(allowed, x))
    return _when(_has_penalty(rows), logits, lambda x: _penalise(rows, tokens, nodes, x))


def _has_penalty(rows: SamplerRows) -> jax.Array:  # [batch] bool
    return (rows.presence_penalty != 0) | (rows.frequency_penalty != 0) | (rows.repetition_penalty != 1)


def _when(is_used: jax.Array, logits: jax.Array, change: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Change the logits only in steps where some row asks for it; `change` must leave the other rows as they are."""
    return jax.lax.cond(jnp.any(is_used), change, lambda x: x, logits)


def _ban_others(allowed: jax.Array, logits: jax.Array) -> jax.Array:
    bits = jnp.unpackbits(allowed, axis=-1, count=logits.shape[-1], bitorder="little")
    return jnp.where(bits.astype(bool), logits, _NEG_INF)


def _penalise(rows: SamplerRows, tokens: TokenRows, nodes: Nodes, logits: jax.Array) -> jax.Array:
    """Apply repetition (Keskar et al. 2019, arXiv 1909.05858), frequency and presence penalties (OpenAI's)."""
    batch, n = nodes.token_ids.shape
    seen = jnp.broadcast_to(tokens.seen[:, None], logits.shape)
    below_root = jnp.arange(n) > 0  # node 0 is in `seen`
    emitted = jnp.where(nodes.ancestors & below_root, EMITTED, 0)  # [batch, node, ancestor]
    index = jnp.arange(batch)[:, None, None], jnp.arange(n)[:, None], nodes.token_ids[:, None]
    seen = seen.at[index].add(jnp.broadcast_to(emitted, (batch, n, n)))
    count = seen // EMITTED
    repetition = jnp.where((count > 0) | (seen & IN_PROMPT != 0), rows.repetition_penalty[:, None, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits -= rows.frequency_penalty[:, None, None] * count.astype(jnp.float32)
    return logits - rows.presence_penalty[:, None, None] * (count > 0).astype(jnp.float32)


def _ban_words(rows: SamplerRows, tokens: TokenRows, nodes: Nodes, logits: jax.Array) -> jax.Array:
    """Ban every token that would complete a bad word."""
    batch, n = nodes.token_ids.shape
    back = jnp.arange(MAX_BAD_TOKENS - 2, -1, -1)  # oldest first: how far before the drawn token
    depth = nodes.depths[..., None] - back  # [batch, node, length - 1]; not below the root: the tree does not hold it
    is_there = nodes.ancestors[:, :, None] & (nodes.depths[:, None, None] == depth[..., None])
    in_tree = jnp.sum(jnp.where(is_there, nodes.token_ids[:, None, None], 0), axis=-1)
    older = jnp.take_along_axis(nodes.recent[:, None], jnp.clip(-depth, 0), axis=2)
    before = jnp.where(depth > 0, in_tree, older)[:, :, None]  # [batch, node, 1, length - 1]
    words = tokens.bad_words[:, None]  # [batch, 1, word, length]
    is_next = jnp.all((words[..., :-1] < 0) | (words[..., :-1] == before), axis=-1) & (words[..., -1] >= 0)
    is_next &= rows.has_bad_words[:, None, None]
    index = jnp.arange(batch)[:, None, None], jnp.arange(n)[:, None], jnp.clip(words[..., -1], 0)
    return logits.at[index].min(jnp.where(is_next, _NEG_INF, jnp.inf))


@pytree
class Logprobs:
    """Log-probabilities of drawn tokens and of the most likely ones, under the target's own distribution."""

    chosen: jax.Array  # [batch, n] float32
    top: jax.Array  # [batch, n, MAX_LOGPROBS] float32
    top_ids: jax.Array  # [batch, n, MAX_LOGPROBS] int32


def logprobs(
    rows: SamplerRows,
    logits: jax.Array,  # [batch, n, vocab] float32, before any option
    token_ids: jax.Array,  # [batch, n] int32
) -> Logprobs:
    """The log-probabilities of drawn tokens. All are zeros unless some row asks for them."""
    batch, n, vocab = logits.shape
    k = min(MAX_LOGPROBS, vocab)

    def none() -> Logprobs:
        return Logprobs(
            jnp.zeros((batch, n), jnp.float32),
            jnp.zeros((batch, n, k), jnp.float32),
            jnp.zeros((batch, n, k), jnp.int32),
        )

    return jax.lax.cond(jnp.any(rows.has_logprobs), lambda: _measured(logits, token_ids), none)


@pytree
class Scores:
    """The probabilities and ranks that the target's own distribution gives to tokens that were given, not drawn."""

    logprobs: Logprobs  # [batch, n]
    ranks: jax.Array  # [batch, n] int32, 1 for the most likely token


def score(logits: jax.Array, token_ids: jax.Array) -> Scores:  # [batch, n, vocab], [batch, n] int32
    """The log-probabilities and the ranks of given tokens."""
    chosen = jnp.take_along_axis(logits, token_ids[..., None], axis=-1)
    ranks = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    return Scores(_measured(logits, token_ids), ranks)


def _measured(logits: jax.Array, token_ids: jax.Array) -> Logprobs:
    all_logprobs = jax.nn.log_softmax(logits, axis=-1)
    top, top_ids = largest(all_logprobs, min(MAX_LOGPROBS, logits.shape[-1]))
    return Logprobs(jnp.take_along_axis(all_logprobs, token_ids[..., None], axis=-1)[..., 0], top, top_ids)


def sample(
    rows: SamplerRows,
    logits: jax.Array,  # [batch, n, vocab] float32, constrained
    position_ids: jax.Array,  # [batch, n] int32, the position that each drawn token will take
) -> jax.Array:  # [batch, n] int32
    """Draw the target's token at every (sequence, node), or NOTHING where every token is banned."""

    def drawn() -> jax.Array:
        kept = truncate(rows, scale(rows, logits))
        token_ids = jnp.arange(logits.shape[-1], dtype=jnp.uint32)
        return argmax(kept + noise(rows, position_ids, token_ids))

    return _or_nothing(logits, jax.lax.cond(jnp.any(rows.temperature > 0), drawn, lambda: argmax(logits)))


def _or_nothing(logits: jax.Array, token_ids: jax.Array) -> jax.Array:  # [batch, n, vocab], [batch, n] -> [batch, n]
    """The tokens, or NOTHING for those that are banned."""
    best = jnp.take_along_axis(logits, token_ids[..., None], axis=-1)[..., 0]
    return jnp.where(best == _NEG_INF, jnp.int32(NOTHING), token_ids)


def scale(rows: SamplerRows, logits: jax.Array) -> jax.Array:  # [batch, n, vocab]
    """Divide logits by the temperature. Greedy rows stay as they are."""
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    return logits / temperature[:, None, None]


def noise(
    rows: SamplerRows,
    position_ids: jax.Array,  # [batch, n] int32
    token_ids: jax.Array,  # [vocab] uint32, target ids
) -> jax.Array:  # [batch, n, vocab] float32
    """Standard Gumbel noise; it is zero in greedy rows."""
    # Two keys for each position from the 64-bit seed, then one counter-based draw for each token id.
    key = _mix(rows.seed[:, :1] ^ _mix(position_ids.astype(jnp.uint32) + jnp.uint32(0x9E3779B9)))
    other = _mix(rows.seed[:, 1:] + _mix(key ^ jnp.uint32(0x85EBCA6B)))
    bits = _mix(_mix(token_ids * jnp.uint32(0x9E3779B1) + key[..., None]) ^ other[..., None])
    # uniform in (0, 1), finest near 0, where the exponential -log(1 - u) is small and its Gumbel -log(e) is large
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    gumbel = -jnp.log(-jnp.log1p(-uniform))
    return jnp.where((rows.temperature > 0)[:, None, None], gumbel, 0.0)


def truncate(rows: SamplerRows, logits: jax.Array) -> jax.Array:  # [batch, n, vocab], dropped tokens at -inf
    """Apply top-k, then top-p to the tokens that top-k left, then min-p: the order of Hugging Face and vLLM."""
    is_active = (rows.temperature > 0) & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))

    def truncated() -> jax.Array:
        vocab = logits.shape[-1]
        top_k = jnp.where((rows.top_k > 0) & (rows.top_k < vocab), rows.top_k, vocab)[:, None]
        kept = jnp.where(logits >= _kth_largest(logits, top_k)[..., None], logits, _NEG_INF)
        probs = jax.nn.softmax(kept, axis=-1)
        floor = _nucleus_floor(probs, rows.top_p[:, None])
        most = jnp.max(probs, axis=-1)
        floor = jnp.maximum(floor, rows.min_p[:, None] * most)
        floor = jnp.where(floor <= most, floor, most)  # the likeliest stays, also where top_p is next to nothing
        is_kept = (probs >= floor[..., None]) | ~is_active[:, None, None]
        return jnp.where(is_kept, jnp.where(is_active[:, None, None], kept, logits), _NEG_INF)

    return jax.lax.cond(jnp.any(is_active), truncated, lambda: logits)


def _kth_largest(logits: jax.Array, k: jax.Array) -> jax.Array:  # [batch, n, vocab], [batch, 1] -> [batch, n]
    """The k-th largest value, found exactly and without a sort by bisection over the ordered bits of float32."""
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
    """The largest uint32 for which the monotone `holds` is true, found in rounds of some of its bits each. A CPU
    compares with one number a round, in a loop; elsewhere a round reads everything once for 15 of them, and there is no
    loop, which a GPU's host would have to drive."""
    if program_platform() != "cpu":
        floor = jnp.zeros(shape, jnp.uint32)
        for shift in range(32 - BITS_PER_ROUND, -1, -BITS_PER_ROUND):
            candidates = [floor | jnp.uint32(digit << shift) for digit in range(1, 1 << BITS_PER_ROUND)]
            digit = sum(holds(candidate[..., None]).astype(jnp.uint32) for candidate in candidates)
            floor |= digit << jnp.uint32(shift)
        return floor

    def set_bit(i: jax.Array, floor: jax.Array) -> jax.Array:
        candidate = floor | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(candidate[..., None]), candidate, floor)

    return jax.lax.fori_loop(0, 32, set_bit, jnp.zeros(shape, jnp.uint32))


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Map float32 to uint32, keeping the order: the sign bit is flipped for positives, all bits for negatives."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits & sign != 0, ~bits, bits | sign)


def _from_ordered_bits(bits: jax.Array) -> jax.Array:
    sign = jnp.uint32(0x80000000)
    return jax.lax.bitcast_convert_type(jnp.where(bits & sign != 0, bits ^ sign, ~bits), jnp.float32)


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 with good avalanche (the `lowbias32` constants of C. Wellons' hash prospector)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
