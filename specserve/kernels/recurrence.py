"""Linear recurrences: layers that keep a matrix for each head instead of every token's key and value.

A token decays the matrix S of the token before it and writes a value under its key, and its query reads the result:

    S_i = exp(g_i) S_parent + k_i u_i^T        o_i = q_i S_i

with u_i = v_i (linear attention with decay), or with the gated delta rule

    u_i = beta_i (v_i - k_i exp(g_i) S_parent)

which puts v_i in the place of what the matrix holds under k_i already (Yang et al. 2024, arXiv 2412.06464, section 3).
The decay g_i <= 0 is one number for a head, or one for each channel of its keys (arXiv 2510.26692). Short causal
convolutions, which such layers put before their queries, keys and values, follow the same parents.

All tokens of a call are computed together, whatever the mask: what a token gets depends on the committed state and on
its ancestors alone. So a prompt, one token, a tree of nodes and rows of packed documents are one algorithm, and the u
that a node got in a tree is the u that it would get on its path: to commit a path (`advance`), nothing is computed
again.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.kernels.rows import Documents
from specserve.pytree import pytree

MAX_TREE = 257  # tokens of a call that may be any tree: a root and the most nodes that are speculated
BLOCK = 64  # tokens of longer calls that are computed together
ROWS = 16  # of these whose decays by channel are held at once

Decay = tuple[jax.Array, jax.Array]  # coarse and fine part: [count, batch, head, size, 1 or k_dim]


@pytree
class State:
    """The recurrent state of each sequence in one layer. A sequence without tokens has zeros."""

    matrix: Any  # jax.Array, [batch, head, k_dim, v_dim] float32; None: of a layer that only convolves
    conv: tuple[jax.Array, ...]  # each [batch, width - 1, channel]: a convolution's last inputs, the oldest first


@pytree
class New:
    """The changes that the tokens of a call would make in a state. Applying it (`advance`) needs none of the layer's
    weights."""

    k: jax.Array | None  # [batch, n, k_head, k_dim] float32; None, as the next two, where there is no matrix
    u: jax.Array | None  # [batch, n, head, v_dim] float32
    log_decay: jax.Array | None  # [batch, n, head, 1 or k_dim] float32
    conv: tuple[jax.Array, ...]  # each [batch, n, channel]: the convolutions' inputs


def recur(
    q: jax.Array,  # [batch, n, k_head, k_dim] float32, scaled
    k: jax.Array,  # [batch, n, k_head, k_dim] float32
    v: jax.Array,  # [batch, n, head, v_dim] float32
    log_decay: jax.Array,  # [batch, n, head, 1 or k_dim] float32, at most 0
    beta: jax.Array | None,  # [batch, n, head] float32; None: u = v
    matrix: jax.Array,  # [batch, head, k_dim, v_dim] float32, committed; every token sees it
    # [batch or 1, n, n] bool: a token's ancestors and itself; a parent stands before its children
    mask: jax.Array | Documents,
) -> tuple[jax.Array, jax.Array]:  # o and u: [batch, n, head, v_dim] float32
    """Compute the recurrence of the module's docstring along every path. Head h reads k_head h // (head / k_head).

    Up to MAX_TREE tokens may form any tree. Longer rows are computed in blocks, the state handed on from block to
    block, and must be documents one after another. Where the mask is given as `Documents`, no array is n x n. Within a
    block the delta rule is a triangular system (the WY form, arXiv 2412.06464, section 3.3). Decays are exponentials of
    differences, never ratios of exponentials, so that none overflows.
    """
    batch, n, num_heads, _ = v.shape
    size = n if n <= MAX_TREE else BLOCK
    count = -(-n // size)
    pad = count * size - n

    def blocks(x: jax.Array) -> jax.Array:  # [batch, n, head, dim] -> [count, batch, head, size, dim]
        x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(batch, count, size, x.shape[2], -1)
        return x.transpose(1, 0, 3, 2, 4)

    q, k = (_for_each_head(x, num_heads) for x in (q, k))
    q, k, v, log_decay = blocks(q), blocks(k), blocks(v), blocks(log_decay)
    sees, enters = _by_block(mask, count, size)

    decay = _along_paths(log_decay, sees)
    left = jnp.where(enters[:, :, None, :, None], jnp.exp(sum(decay)), 0.0)  # of the state at the block's start
    reads, overlaps = _products(q, k, decay, sees)
    erases = None
    if beta is not None:
        weight = blocks(beta[..., None])
        known = jnp.concatenate([weight * v, weight * k * left], axis=-1)
        # of this system the solver reads what is below the diagonal
        solved = jax.lax.linalg.triangular_solve(
            weight * overlaps, known, left_side=True, lower=True, unit_diagonal=True
        )
        v, erases = jnp.split(solved, (v.shape[-1],), axis=-1)
    block = _Block(q * left, k, v, erases, log_decay, reads, sees[:, :, -1], enters[:, :, -1])
    _, (out, u) = jax.lax.scan(_step, matrix, block, unroll=count == 1)
    out, u = (x.transpose(1, 0, 3, 2, 4).reshape(batch, count * size, num_heads, -1)[:, :n] for x in (out, u))
    return out, u


@pytree
class _Block:
    """The parts of a block's computation that do not depend on the state at its start."""

    q: jax.Array  # [batch, head, size, k_dim], decayed from the block's start on; 0 where the start is not seen
    k: jax.Array  # [batch, head, size, k_dim]
    v: jax.Array  # [batch, head, size, v_dim]
    erases: jax.Array | None  # [batch, head, size, k_dim]: u = v - erases S
    log_decay: jax.Array  # [batch, head, size, 1 or k_dim]
    reads: jax.Array  # [batch, head, size, size]
    path: jax.Array  # [batch or 1, size]: what the last token sees
    is_open: jax.Array  # [batch or 1]: whether the last token sees the block's start


def _step(matrix: jax.Array, block: _Block) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Compute the state after a block's last token, and every token's o and u."""
    if block.erases is None:
        u, read = block.v, _matmul(block.q, matrix)
    else:  # in one product, because two would read the state twice
        both = _matmul(jnp.concatenate([block.erases, block.q], axis=-2), matrix)
        erased, read = jnp.split(both, 2, axis=-2)
        u = block.v - erased
    out = read + _matmul(block.reads, u)
    matrix = jnp.where(block.is_open[:, None, None, None], matrix, 0.0)
    return _absorb(matrix, block.k, u, block.log_decay, block.path), (out, u)


def _by_block(
    mask: jax.Array | Documents, count: int, size: int
) -> tuple[jax.Array, jax.Array]:  # [count, batch or 1, size, size] and [count, batch or 1, size]
    """Return which tokens a token sees within its block, and whether it sees the state at the block's start."""
    blocks = np.arange(count)
    is_first = (blocks == 0)[:, None, None]
    if isinstance(mask, Documents):
        ids = jnp.pad(mask.ids, ((0, 0), (0, count * size - mask.ids.shape[1])), constant_values=-1)
        ids = ids.reshape(-1, count, size).swapaxes(0, 1)
        sees = Documents(ids.reshape(-1, size)).dense().reshape(*ids.shape, size)
        return sees, (ids == ids[blocks - 1, :, -1:]) | is_first
    pad = count * size - mask.shape[1]
    pairs = jnp.pad(mask, ((0, 0), (0, pad), (0, pad))).reshape(-1, count, size, count, size)
    return pairs[:, blocks, :, blocks], pairs[:, blocks, :, blocks - 1, -1] | is_first


def convolve(
    x: jax.Array,  # [batch, n, channel]
    weight: jax.Array,  # [channel, 1, width]; the last column weighs the token itself
    seen: jax.Array,  # [batch, width - 1, channel], committed
    mask: jax.Array | Documents,  # as in `recur`
) -> jax.Array:  # [batch, n, channel] float32
    """Apply a causal convolution to each channel, over the last `width` tokens of every path."""
    out = x.astype(jnp.float32) * weight[:, 0, -1].astype(jnp.float32)
    for back in range(1, weight.shape[-1]):
        term = ancestors(x, seen, mask, back)
        out = out + term.astype(jnp.float32) * weight[:, 0, -1 - back].astype(jnp.float32)
    return out


def ancestors(
    x: jax.Array,  # [batch, n, channel]
    seen: jax.Array,  # [batch, m, channel], committed, the oldest first
    mask: jax.Array | Documents,  # as in `recur`
    back: int,  # at most m
) -> jax.Array:  # [batch, n, channel]
    """Return what each token's ancestor has that stands `back` tokens before it on its path, committed or new."""
    m, (depth, ancestor) = seen.shape[1], _lineage(mask)
    index = jnp.where(depth > back, m + ancestor(back), m - 1 - back + depth)
    return jnp.take_along_axis(jnp.concatenate([seen, x], axis=1), index[..., None], axis=1)


def _lineage(mask: jax.Array | Documents) -> tuple[jax.Array, Callable[[int], jax.Array]]:
    """Return each token's depth, the number of tokens on its path with itself included ([batch or 1, n]), and a
    function that gives the index of its ancestor `back` tokens before it, where it has one."""
    if isinstance(mask, Documents):
        return mask.depths(), lambda back: jnp.arange(mask.ids.shape[1]) - back
    depth = jnp.sum(mask, axis=-1, dtype=jnp.int32)
    distance = depth[:, :, None] - depth[:, None]
    return depth, lambda back: jnp.argmax(mask & (distance == back), axis=-1)


def advance(
    state: State,
    new: New,  # leaves [batch, m, ...]
    is_kept: jax.Array,  # [batch, m] bool; the kept tokens come first, each the child of the one before
) -> State:
    """Compute the state after the kept tokens, as if they had been run one by one. The other tokens leave no trace."""
    num_kept = jnp.sum(is_kept, axis=1, dtype=jnp.int32)

    def latest(seen: jax.Array, x: jax.Array) -> jax.Array:
        index = num_kept[:, None] + jnp.arange(seen.shape[1], dtype=jnp.int32)
        return jnp.take_along_axis(jnp.concatenate([seen, x], axis=1), index[..., None], axis=1)

    conv = tuple(latest(seen, x) for seen, x in zip(state.conv, new.conv, strict=True))
    if state.matrix is None:
        return State(None, conv)
    assert new.k is not None
    assert new.u is not None
    assert new.log_decay is not None
    k = _for_each_head(new.k, new.u.shape[2])
    k, u, log_decay = (x.transpose(0, 2, 1, 3) for x in (k, new.u, new.log_decay))
    return State(_absorb(state.matrix, k, u, log_decay, is_kept), conv)


def _absorb(
    matrix: jax.Array,  # [batch, head, k_dim, v_dim]
    k: jax.Array,  # [batch, head, m, k_dim]
    u: jax.Array,  # [batch, head, m, v_dim]
    log_decay: jax.Array,  # [batch, head, m, 1 or k_dim]
    is_kept: jax.Array,  # [batch or 1, m] bool
) -> jax.Array:
    """Compute the matrix after the kept tokens, which are a path in the order given."""
    k, u, log_decay = (jnp.where(is_kept[:, None, :, None], x, 0.0) for x in (k, u, log_decay))
    to_end = jax.lax.cumsum(log_decay, axis=2, reverse=True)
    after = jnp.pad(to_end[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0)))  # the decay of a token's own write
    written = _matmul((k * jnp.exp(after)).swapaxes(-1, -2), u)
    return jnp.exp(to_end[:, :, 0])[..., None] * matrix + written


def _along_paths(
    log_decay: jax.Array,  # [count, batch, head, size, 1 or k_dim]
    sees: jax.Array,  # [count, batch or 1, size, size]
) -> Decay:
    """Return each token's log decay since the block's start. Only differences between tokens are used, and they may be
    small against the sums. So the sums are kept in two parts, of which the coarse one is exact in float32."""
    log_decay = jnp.maximum(log_decay, -88.0)  # nothing is left after that anyway, and MAX_TREE of them sum exactly
    coarse = jnp.round(log_decay * 512.0) / 512.0
    path = sees[:, :, None].astype(jnp.float32)
    return _matmul(path, coarse), _matmul(path, log_decay - coarse)


def _products(
    q: jax.Array,  # [count, batch, head, size, k_dim]
    k: jax.Array,  # [count, batch, head, size, k_dim]
    decay: Decay,
    sees: jax.Array,  # [count, batch or 1, size, size]
) -> tuple[jax.Array, jax.Array]:  # each [count, batch, head, size, size]
    """Compute q_i k_j and k_i k_j, decayed on the way from j to i, where i sees j; they are 0 elsewhere."""
    if decay[0].shape[-1] == 1:
        from_to = sum(part - part.swapaxes(-1, -2) for part in decay)
        rate = jnp.exp(jnp.where(sees[:, :, None], from_to, -jnp.inf))
        return _matmul(q, k.swapaxes(-1, -2)) * rate, _matmul(k, k.swapaxes(-1, -2)) * rate

    def row(i: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:  # the same without the axis of i
        q_i, k_i, coarse_i, fine_i, sees_i = i
        from_to = sum(own[..., None, :] - part for own, part in zip((coarse_i, fine_i), decay, strict=True))
        arrived = k * jnp.exp(jnp.where(sees_i[:, :, None, :, None], from_to, -jnp.inf))
        return jnp.sum(q_i[..., None, :] * arrived, axis=-1), jnp.sum(k_i[..., None, :] * arrived, axis=-1)

    # size * size * k_dim numbers are too many to hold at once
    rows = tuple(jnp.moveaxis(x, -2, 0) for x in (q, k, *decay, sees))
    reads, overlaps = jax.lax.map(row, rows, batch_size=ROWS)
    return jnp.moveaxis(reads, 0, -2), jnp.moveaxis(overlaps, 0, -2)


def _for_each_head(k: jax.Array, num_heads: int) -> jax.Array:  # [batch, n, k_head, k_dim] -> [batch, n, head, k_dim]
    return jnp.repeat(k, num_heads // k.shape[2], axis=2)


def _matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply in full float32, which accelerators do not do by default. Errors would stay in the state for good."""
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)
