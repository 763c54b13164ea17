"""The target's side of a step: take the target's own draw at every node, and walk down while a child carries it.

The emitted tokens are the target's draws, so they cannot depend on the draft. The walk ends at the first node of whose
children none carries the token drawn there. That token is the bonus token.
"""

import jax
import jax.numpy as jnp

from specserve.pytree import pytree
from specserve.speculative.tree import Proposal


@pytree
class Verdict:
    path: jax.Array  # [batch, depth + 1] int32, the accepted nodes from the root down; past n_accepted: the last one
    n_accepted: jax.Array  # [batch] int32, accepted draft tokens, 0..depth
    token_ids: (
        jax.Array
    )  # [batch, depth + 1] int32, emitted: n_accepted draft tokens and the bonus; the rest is padding


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
        drawn = jnp.take_along_axis(target_ids, current[:, None], axis=1)
        matches = (proposal.parents == current[:, None]) & (proposal.token_ids == drawn) & (node > 0)
        is_walking &= jnp.any(matches, axis=1) & (step < max_depth)
        current = jnp.where(is_walking, jnp.argmax(matches, axis=1).astype(current.dtype), current)
        n_accepted += is_walking.astype(n_accepted.dtype)
        path.append(current)
    nodes = jnp.stack(path, axis=1)
    return Verdict(path=nodes, n_accepted=n_accepted, token_ids=jnp.take_along_axis(target_ids, nodes, axis=1))
