"""`Context` holds what every layer of one forward gets besides its input.

Groups of tokens of different shapes, such as the trees of some sequences and the chunks of other ones' prompts, may run
through the layers side by side. Products and norms know nothing of that: to them all tokens are rows of one array
(`side_by_side`). Attention is computed group by group (`by_group`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.kernels import native
from specserve.kernels.gather import only
from specserve.kernels.rows import Documents, Unrolled
from specserve.mesh import num_parts, traced_mesh
from specserve.models.config import ModelConfig
from specserve.pytree import pytree

Tables = tuple[jax.Array, jax.Array]  # cos, sin: see `models.rope.rope_tables`
# [batch or 1, n, m] bool: which of the m new tokens each of the last n sees, which run now. Each sees itself. Packed
# rows give documents instead.
Mask = jax.Array | Documents | Unrolled


@pytree
class Context:
    position_ids: jax.Array  # [batch, m] int32, of the new tokens
    mask: Mask
    rope: Tables
    local_rope: Tables | None
    earlier: Any = None  # the entries that the first m - n left when they ran, [batch, m - n, ...]; None: all run now
    choice: jax.Array | None = None  # [batch, n, length] bool: what the last indexer before this layer chose, if it did
    token_ids: jax.Array | None = None  # [batch, n] int32, of those that run now, where layers need them
    groups: tuple["Context", ...] = ()  # those side by side; none: the tokens are one group


def only_live(
    config: ModelConfig, token_ids: jax.Array, mask: jax.Array | Documents, is_live: jax.Array
) -> tuple[jax.Array, Mask]:  # [batch, n] int32, [batch or 1, n, n], [batch, n] bool
    """Return tokens and mask such that native kernels leave out the tokens that are not live, of which nothing comes:
    those that only fill a batch, a chunk or a tree. Their states are zeros, and they see nothing, not even
    themselves."""
    if not (native.is_serving() and config.keeps_zeros):
        return token_ids, mask
    mask = mask.dense() if isinstance(mask, Documents) else mask
    return only(is_live, token_ids), mask & is_live[:, :, None]


def joined(groups: Sequence[Context]) -> Context:
    """Return the context of these groups side by side. One group stays as it is."""
    if len(groups) == 1:
        return groups[0]
    first = groups[0]
    parts = [(group.rope, group.local_rope, group.token_ids) for group in groups]
    *tables, token_ids = jax.tree.map(lambda *each: side_by_side(each), *parts)
    positions = side_by_side([group.position_ids for group in groups])
    return Context(positions, first.mask, *tables, token_ids=token_ids, groups=tuple(groups))


def with_choice(context: Context, choice: Any) -> Context:
    """Return the context behind a layer whose indexer chose this, group by group; None: it has none."""
    if choice is None:
        return context
    if not context.groups:
        return dataclasses.replace(context, choice=choice)
    groups = zip(context.groups, choice, strict=True)
    return dataclasses.replace(context, groups=tuple(with_choice(*each) for each in groups))


def side_by_side(groups: Sequence[jax.Array]) -> jax.Array:  # [batch, n, ...] each -> [data rank, row, ...]
    """Lay the rows of all groups side by side, those of each data rank on their own; one group stays as it is."""
    if len(groups) == 1:
        return groups[0]
    ranks = num_parts(traced_mesh(), "batch")
    return jnp.concatenate([x.reshape(ranks, -1, *x.shape[2:]) for x in groups], axis=1)


def apart(x: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:  # [batch, n, ...] each
    """Return the groups of these shapes (batch, n) that lie `side_by_side` in an array."""
    if len(shapes) == 1:
        return [x]
    ends = np.cumsum([batch * n // len(x) for batch, n in shapes])
    parts = jnp.split(x, ends[:-1].tolist(), axis=1)
    return [part.reshape(*shape, *x.shape[2:]) for part, shape in zip(parts, shapes, strict=True)]


def by_group(
    function: Callable[..., tuple[jax.Array, Any]],  # context, what it sees, arrays -> [batch, n, ...], what it leaves
    context: Context,
    seen: Any,  # of each group, in a list, where there are several; None: nothing
    *arrays: jax.Array,  # [batch, n, ...] or of groups side by side
) -> tuple[jax.Array, Any]:
    """Apply a function that looks across the tokens of a sequence, to each group by itself. Returns its outputs side by
    side, and a tuple of what the groups leave."""
    if not context.groups:
        return function(context, seen, *arrays)
    shapes = [group.position_ids.shape for group in context.groups]
    parts, seen = zip(*(apart(x, shapes) for x in arrays), strict=True), seen or [None] * len(shapes)
    found = [function(group, own, *part) for group, own, part in zip(context.groups, seen, parts, strict=True)]
    return side_by_side([out for out, _ in found]), tuple(left for _, left in found)


def together(context: Context, left: Any) -> Any:
    """Return what the groups left by `by_group`, side by side again."""
    if not context.groups:
        return left
    return jax.tree.map(lambda *parts: side_by_side(parts), *left)


def join(earlier: Any, own: Any) -> Any:
    """Return what all new tokens leave, [batch, m, ...], where those that run now leave `own`, [batch, n, ...]."""
    if earlier is None:
        return own
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), earlier, own)
