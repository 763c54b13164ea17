"""The door to linear recurrences: layers that keep a matrix for each head instead of every token's key and value.

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

import jax
import jax.numpy as jnp
import numpy as np

from specserve.pytree import pytree

MAX_TREE = 257  # tokens of a call that may be any tree: a root and the most nodes that are speculated
BLOCK = 64  # tokens of longer calls that are computed together


@pytree
class State:
    """What a sequence has left in a layer. All zeros: nothing."""

    matrix: jax.Array  # [batch, head, k_dim, v_dim] float32
    conv: tuple[jax.Array, ...]  # each [batch, width - 1, channel]: a convolution's last inputs, the oldest first


@pytree
class New:
    """What tokens would do to a state, with the layer's weights no longer needed."""

    k: jax.Array  # [batch, n, k_head, k_dim] float32
    u: jax.Array  # [batch, n, head, v_dim] float32
    log_decay: jax.Array  # [batch, n, head, 1 or k_dim] float32
    conv: tuple[jax.Array, ...]  # each [batch, n, channel]: the convolutions' inputs


def recur(
    q: jax.Array,  # [batch, n, k_head, k_dim] float32, scaled
    k: jax.Array,  # [batch, n, k_head, k_dim] float32
    v: jax.Array,  # [batch, n, head, v_dim] float32
    log_decay: jax.Array,  # [batch, n, head, 1 or k_dim] float32, at most 0
    beta: jax.Array | None,  # [batch, n, head] float32; None: u = v
    matrix: jax.Array,  # [batch, head, k_dim, v_dim] float32, committed; every token sees it
    mask: jax.Array,  # [batch or 1, n, n] bool: a token's ancestors and itself; a parent stands before its children
) -> tuple[jax.Array, jax.Array]:  # o and u: [batch, n, head, v_dim] float32
    """The recurrence of the module docstring along every path. Head h reads k_head h // (head / k_head).

    Up to MAX_TREE tokens may form any tree. Longer rows are computed in blocks, the state handed on from block to
    block, and must be documents one after another. Within a block the delta rule is a triangular system (the WY form,
    section 3.3); decays are exponentials of differences, never ratios of exponentials, so that none overflows.
    """
    batch, n, num_heads, _ = v.shape
    size = n if n <= MAX_TREE else BLOCK
    count = -(-n // size)
    ids, pad = np.arange(count), count * size - n

    def blocks(x: jax.Array) -> jax.Array:  # [batch, n, head, dim] -> [count, batch, head, size, dim]
        x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(batch, count, size, x.shape[2], -1)
        return x.transpose(1, 0, 3, 2, 4)

    q, k = (_for_each_head(x, num_heads, axis=2) for x in (q, k))
    q, k, v, log_decay = blocks(q), blocks(k), blocks(v), blocks(log_decay)
    pairs = jnp.pad(mask, ((0, 0), (0, pad), (0, pad))).reshape(-1, count, size, count, size)
    sees = pairs[:, ids, :, ids]  # [count, batch or 1, size, size], within each block
    carries = pairs[:, ids, :, ids - 1, -1] | (ids == 0)[:, None, None]  # [count, batch or 1, size]: sees what came in

    decay = _matmul(sees[:, :, None].astype(jnp.float32), log_decay)  # along the path, from the block's beginning on
    entering = jnp.where(carries[:, :, None, :, None], jnp.exp(decay), 0.0)  # how much of the incoming state is left
    reads = _products(q, k, decay, sees)
    from_state = jnp.zeros_like(k)
    if beta is not None:
        weight = blocks(beta[..., None])
        overlaps = _products(k, k, decay, sees & ~np.eye(size, dtype=bool))
        system = jnp.eye(size) + weight * overlaps
        known = jnp.concatenate([weight * v, weight * k * entering], axis=-1)
        solved = jax.lax.linalg.triangular_solve(system, known, left_side=True, lower=True, unit_diagonal=True)
        v, from_state = jnp.split(solved, (v.shape[-1],), axis=-1)  # u = v - from_state S

    def read(matrix: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, _, v, from_state, _, reads, entering, _, _ = block
        u = v - _matmul(from_state, matrix) if beta is not None else v
        return _matmul(q * entering, matrix) + _matmul(reads, u), u

    def step(matrix: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        _, k, _, _, log_decay, _, _, sees, carries = block
        out, u = read(matrix, block)
        kept = jnp.where(carries[:, -1, None, None, None], matrix, 0.0)
        return _absorb(kept, k, u, log_decay, sees[:, -1]), (out, u)

    together = (q, k, v, from_state, log_decay, reads, entering, sees, carries)
    if count == 1:
        out, u = read(matrix, tuple(x[0] for x in together))
        out, u = out[None], u[None]
    else:
        _, (out, u) = jax.lax.scan(step, matrix, together)
    out, u = (x.transpose(1, 0, 3, 2, 4).reshape(batch, count * size, num_heads, -1)[:, :n] for x in (out, u))
    return out, u


def convolve(
    x: jax.Array,  # [batch, n, channel]
    weight: jax.Array,  # [channel, 1, width]; the last column weighs the token itself
    seen: jax.Array,  # [batch, width - 1, channel], committed
    mask: jax.Array,  # as in `recur`
) -> jax.Array:  # [batch, n, channel] float32
    """A causal convolution of each channel over the last `width` tokens of every path."""
    width = weight.shape[-1]
    inputs = jnp.concatenate([seen, x], axis=1)
    depth = jnp.sum(mask, axis=-1, dtype=jnp.int32)  # [batch or 1, n], the token itself included
    distance = depth[:, :, None] - depth[:, None]
    out = x.astype(jnp.float32) * weight[:, 0, -1].astype(jnp.float32)
    for back in range(1, width):
        ancestor = jnp.argmax(mask & (distance == back), axis=-1)
        index = jnp.where(depth > back, width - 1 + ancestor, width - 2 - back + depth)
        term = jnp.take_along_axis(inputs, index[..., None], axis=1)
        out = out + term.astype(jnp.float32) * weight[:, 0, -1 - back].astype(jnp.float32)
    return out


def advance(
    state: State,
    new: New,  # leaves [batch, m, ...]
    is_kept: jax.Array,  # [batch, m] bool; the kept tokens come first, each the child of the one before
) -> State:
    """The state after the kept tokens, as if they had been run one by one. The others leave no trace."""
    k = _for_each_head(new.k, new.u.shape[2], axis=2)
    k, u, log_decay = (x.transpose(0, 2, 1, 3) for x in (k, new.u, new.log_decay))
    num_kept = jnp.sum(is_kept, axis=1, dtype=jnp.int32)

    def latest(seen: jax.Array, x: jax.Array) -> jax.Array:
        index = num_kept[:, None] + jnp.arange(seen.shape[1], dtype=jnp.int32)
        return jnp.take_along_axis(jnp.concatenate([seen, x], axis=1), index[..., None], axis=1)

    conv = tuple(latest(seen, x) for seen, x in zip(state.conv, new.conv, strict=True))
    return State(_absorb(state.matrix, k, u, log_decay, is_kept), conv)


def _absorb(
    matrix: jax.Array,  # [batch, head, k_dim, v_dim]
    k: jax.Array,  # [batch, head, m, k_dim]
    u: jax.Array,  # [batch, head, m, v_dim]
    log_decay: jax.Array,  # [batch, head, m, 1 or k_dim]
    is_kept: jax.Array,  # [batch or 1, m] bool
) -> jax.Array:
    """The matrix after the kept tokens, which are a path in the order given."""
    k, u, log_decay = (jnp.where(is_kept[:, None, :, None], x, 0.0) for x in (k, u, log_decay))
    to_end = jax.lax.cumsum(log_decay, axis=2, reverse=True)
    after = jnp.pad(to_end[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0)))  # what decays a token's own write
    written = _matmul((k * jnp.exp(after)).swapaxes(-1, -2), u)
    return jnp.exp(to_end[:, :, 0])[..., None] * matrix + written


def _products(
    x: jax.Array,  # [count, batch, head, size, k_dim]
    k: jax.Array,  # [count, batch, head, size, k_dim]
    decay: jax.Array,  # [count, batch, head, size, 1 or k_dim], along the path
    sees: jax.Array,  # [count, batch or 1, size, size]
) -> jax.Array:  # [count, batch, head, size, size]
    """x_i k_j, decayed on the way from j to i, where i sees j, and 0 elsewhere."""
    if decay.shape[-1] == 1:
        from_to = jnp.where(sees[:, :, None], decay - decay.swapaxes(-1, -2), -jnp.inf)
        return _matmul(x, k.swapaxes(-1, -2)) * jnp.exp(from_to)
    # one fused loop: nothing of the size of size * size * k_dim is ever stored
    from_to = jnp.where(sees[:, :, None, :, :, None], decay[..., :, None, :] - decay[..., None, :, :], -jnp.inf)
    return jnp.sum(x[..., :, None, :] * k[..., None, :, :] * jnp.exp(from_to), axis=-1)


def _for_each_head(x: jax.Array, num_heads: int, *, axis: int) -> jax.Array:
    return jnp.repeat(x, num_heads // x.shape[axis], axis=axis)


def _matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    """In full float32, which accelerators do not do unasked: errors stay in the state for good."""
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)
