"""The target's side of a step: take the target's own draw at every node, and walk down while a child carries it.

The emitted tokens are the target's draws, so they cannot depend on the draft. The walk ends at the first node of whose
children none carries the token drawn there. That token is the bonus token.
"""

import jax
import jax.numpy as jnp

from specserve.kernels.gather import take_each
from specserve.pytree import pytree
from specserve.speculative.tree import Proposal


@pytree
class Verdict:
    # [batch, depth + 1] int32, the accepted nodes from the root down, past n_accepted the last one; None: of a chain
    # node i is the i-th
    path: jax.Array | None
    n_accepted: jax.Array  # [batch] int32, accepted draft tokens, 0..depth
    # [batch, depth + 1] int32, emitted: n_accepted draft tokens and the bonus; the rest is padding
    token_ids: jax.Array


def verify(
    proposal: Proposal,
    target_ids: jax.Array,  # [batch, node] int32, the target's draw after each node
    depth: int,
    max_depth: jax.Array,  # [batch] int32, draft tokens that each sequence may accept
) -> Verdict:
    node = jnp.arange(proposal.parents.shape[1])
    current = jnp.zeros_like(proposal.parents[:, 0])
    n_accepted = jnp.zeros_like(current)
    is_walking = jnp.ones_like(current, bool)
    path = [current]
    for step in range(depth):
        drawn = take_each(target_ids, current[:, None])
        matches = (proposal.parents == current[:, None]) & (proposal.token_ids == drawn) & (node > 0)
        is_walking &= jnp.any(matches, axis=1) & (step < max_depth)
        current = jnp.where(is_walking, jnp.argmax(matches, axis=1).astype(current.dtype), current)
        n_accepted += is_walking.astype(n_accepted.dtype)
        path.append(current)
    nodes = jnp.stack(path, axis=1)
    return Verdict(path=nodes, n_accepted=n_accepted, token_ids=take_each(target_ids, nodes))


def verify_chain(
    proposal: Proposal,
    target_ids: jax.Array,  # [batch, depth + 1] int32, the target's draw after each node
    max_depth: jax.Array,  # [batch] int32, draft tokens that each sequence may accept
) -> Verdict:
    """`verify` of a chain, where nothing needs to be looked for: the walk ends before the first draft token that is not
    the target's."""
    depth = target_ids.shape[1] - 1
    step = jnp.arange(depth, dtype=jnp.int32)
    is_accepted = (proposal.token_ids[:, 1:] == target_ids[:, :-1]) & (step < max_depth[:, None])
    return Verdict(
        path=None,
        n_accepted=jnp.min(jnp.where(is_accepted, depth, step), axis=1, initial=depth),
        token_ids=target_ids,
    )
