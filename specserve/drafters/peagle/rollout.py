"""The training of a P-EAGLE head (arXiv 2602.01469, "COD"): at every position of a row without masks, and at some with
masked slots after them, all in one pass.

An anchor is a position t of a row whose next token, t + 1, is the last known one, as the root of a step is. Its slot 0
is the entry of that token. Slot d is masked, stands d further, and predicts token t + 2 + d. All positions have slot
0. A share of r^d of them, at least r_min, has slot d too. The shares are of the row's length, so that shapes are
static. They are nested, because a slot sees those before it: positions are drawn in an order, and the first of them
have the most slots.

Masked slots see the entries of slot 0 up to their anchor and none of other anchors. So slot 0 runs over the row as in
EAGLE-3, and then the anchors run beside it, in groups of those with as many slots.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specserve.drafters.eagle3.model import Eagle3Params, draft_forward, draft_inputs, fuse_features, token_embedding
from specserve.drafters.eagle3.rollout import fusing_flops
from specserve.drafters.layers import windows_of
from specserve.drafters.learning import (
    Costs,
    DraftTargets,
    Flops,
    Rollout,
    Rows,
    attention_flops,
    kept_by_layer,
    loss_positions,
    shift,
    workspace_of_layer,
)
from specserve.drafters.peagle.config import PEagleConfig
from specserve.drafters.peagle.model import PEagleParams, inputs_with_masks
from specserve.kernels import rows as row_kernels
from specserve.kernels.anchors import Anchors, attend_anchors
from specserve.kernels.rows import Documents, attend_rows
from specserve.mesh import on_each_device
from specserve.models.mixers.attention import KV
from specserve.models.params import is_matrix, num_params, specs
from specserve.models.target import TargetParams

SHARE, LEAST_SHARE = 0.7, 0.2  # r and r_min of published heads


def num_anchors(config: PEagleConfig, seq_len: int) -> list[int]:
    """Return how many positions of a row have each slot."""
    shares = [max(SHARE**slot, LEAST_SHARE) for slot in range(config.num_slots)]
    return [max(1, round(seq_len * share)) for share in shares]


def in_order(rows: Rows) -> jax.Array:  # [batch, seq] int32
    """The positions of each row in an order drawn by its seed, those first whose masked slots have something to learn.
    Without seeds they stand as they are."""
    is_possible = loss_positions(rows, 1) > 0
    if rows.seeds is None:
        lot = jnp.broadcast_to(jnp.linspace(1.0, 0.0, is_possible.shape[1]), is_possible.shape)
    else:
        lot = jax.vmap(lambda seed: jax.random.uniform(jax.random.key(seed), is_possible.shape[1:]))(rows.seeds)
    return jnp.argsort(jnp.where(is_possible, lot + 1.0, lot), axis=1, descending=True).astype(jnp.int32)


def targets_of_slots(config: PEagleConfig, rows: Rows) -> DraftTargets:
    """Return what the slots predict. Column c is the anchor that is drawn as number c, and its slots predict the tokens
    after the one that it knows."""
    anchors, seq_len = in_order(rows), rows.token_ids.shape[1]
    weights = [
        jnp.where(jnp.arange(seq_len) < number, _take(loss_positions(rows, slot), anchors), 0.0)
        for slot, number in enumerate(num_anchors(config, seq_len))
    ]
    ahead = anchors + 1 + jnp.arange(config.num_slots, dtype=jnp.int32)[:, None, None]
    return DraftTargets(jnp.stack(weights), jnp.minimum(ahead, seq_len - 1))


def states_of_slots(
    params: PEagleParams,
    config: PEagleConfig,
    target: TargetParams,
    rows: Rows,
    aux_hidden_states: jax.Array,  # [batch, seq, taps * target_d_model]
    rollout: Rollout,
) -> list[jax.Array]:  # slot x [batch, anchors, d_model], in the order of the columns of `targets_of_slots`
    """Compute the states of every slot, as `drafter.look_ahead` has them in serving."""
    embedding = token_embedding(params.network, target.embedding)
    run_row, run_group = functools.partial(_run_row, config), functools.partial(_run_group, config)
    if rollout.remat:
        run_row, run_group = jax.checkpoint(run_row), jax.checkpoint(run_group, static_argnums=(4,))
    known, entries = run_row(params, embedding, rows, aux_hidden_states)
    order, seq_len = in_order(rows), rows.token_ids.shape[1]
    firsts = jnp.arange(seq_len, dtype=jnp.int32) + 1 - Documents(rows.document_ids).depths()
    found: list[list[jax.Array]] = [[] for _ in range(config.num_slots)]
    found[0].append(_take(known, order))
    for start, stop, num_masked in _groups(num_anchors(config, seq_len)):
        index = order[:, start:stop]
        anchors = Anchors(_take(firsts, index), index + 1, index + 1)  # the first masked slot stands after the anchor
        states = run_group(params, embedding, entries, (anchors, _take(rows.position_ids, index)), num_masked)
        for slot in range(1, num_masked + 1):
            found[slot].append(states[:, :, slot - 1])
    return [jnp.concatenate(parts, axis=1) for parts in found]


def _groups(numbers: list[int]) -> list[tuple[int, int, int]]:
    """Group the anchors, in the order in which they are drawn, by their number of masked slots: (first, end, number of
    slots) of each group."""
    bounds = [(*pair, slot) for slot, pair in enumerate(itertools.pairwise([*numbers, 0]))]
    return [(start, stop, slot) for stop, start, slot in reversed(bounds) if slot and start < stop]


def _run_row(
    config: PEagleConfig,
    params: PEagleParams,
    embedding: jax.Array,  # [vocab, d_model]
    rows: Rows,
    aux_hidden_states: jax.Array,
) -> tuple[jax.Array, tuple[KV, ...]]:
    """Run slot 0 of all positions. Returns its states [batch, seq, d_model], and its keys and values, which other
    slots see, layer by layer."""
    documents = Documents(rows.document_ids)
    features = fuse_features(params.network, config.network, aux_hidden_states)
    inputs = draft_inputs(
        params.network, config.network, embedding, shift(rows.token_ids, 1), features, rows.position_ids + 1
    )

    def see(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        window, scale = config.network.kind(i).window, config.network.attention_scale or None
        return attend_rows(q, k, v, documents, window=window, scale=scale)[0]

    return draft_forward(params.network, config.network, inputs, see)


def _run_group(
    config: PEagleConfig,
    params: PEagleParams,
    embedding: jax.Array,  # [vocab, d_model]
    entries: tuple[KV, ...],  # of the rows, layer by layer, each [batch, seq, kv_head, head_dim]
    at: tuple[Anchors, jax.Array],  # and the positions of the anchors in their documents [batch, anchor] int32
    num_masked: int,
) -> jax.Array:  # [batch, anchor, num_masked, d_model]
    anchors, position_ids = at
    batch, number = position_ids.shape
    distance = np.arange(num_masked)[:, None] - np.arange(num_masked)

    def apart(x: jax.Array) -> jax.Array:
        return x.reshape(batch, number, num_masked, *x.shape[2:])

    def see(i: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        window, scale = config.network.kind(i).window, config.network.attention_scale or None
        mask = (distance >= 0) & (distance < (window or num_masked))
        out = attend_anchors(apart(q), *entries[i], anchors, apart(k), apart(v), mask, scale=scale, window=window)
        return out.reshape(*q.shape[:3], -1)

    after = position_ids[..., None] + 2 + jnp.arange(num_masked, dtype=jnp.int32)
    none = jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch, 0, config.network.d_model), embedding.dtype)
    inputs = inputs_with_masks(params, config, embedding, *none, after.reshape(batch, -1))
    return apart(draft_forward(params.network, config.network, inputs, see)[0])


def _take(x: jax.Array, index: jax.Array) -> jax.Array:  # [batch, seq, ...], [batch, n] -> [batch, n, ...]
    return jax.vmap(lambda row, at: row[at])(x, index)


def slot_costs(config: PEagleConfig, spec: Eagle3Params, rollout: Rollout, seq_len: int, mesh: Mesh | None) -> Costs:
    """Return the costs for each position of a row, by the rules of `train.flops`. `spec` are the network's parameters
    that a device has."""
    network = config.network
    numbers = num_anchors(config, seq_len)
    slots = sum(numbers) / seq_len  # for each position
    num_kv_heads, width, _ = network.entry_dims
    heads, kv = network.num_heads * width, 2 * num_kv_heads * width
    again = rollout.num_repeats
    each = 2 * network.d_model + network.num_layers * kv  # a slot's state, its gradient, and what others see of it
    if not rollout.remat:
        each += 2 * network.d_model + network.num_layers * kept_by_layer(network.d_model, heads, network.d_ff)
    return Costs(
        _flops(config, spec, rollout, seq_len, slots, mesh),
        kept=round(slots * each),
        workspace=workspace_of_layer(network.d_model, heads, network.d_ff),
        num_heads=network.num_heads,
        num_kv_heads=num_kv_heads,
        states=slots / config.num_slots,
        shares_output=not network.has_own_head,
        kv=network.num_layers * kv,
        # of a layer both outputs, and both inputs' gradients, the first one of twice the width; and the embedding
        summed=slots * network.d_model * ((4 + again) * network.num_layers + 2 + again),
        has_one_teacher=False,
    )


def _flops(
    config: PEagleConfig, spec: Eagle3Params, rollout: Rollout, seq_len: int, slots: float, mesh: Mesh | None
) -> Flops:
    network, again = config.network, rollout.num_repeats
    once = fusing_flops(spec, again)  # for each position, and for all masked slots together
    layers = num_params([leaf for leaf in specs(spec.layers) if is_matrix(leaf)])
    num_heads = on_each_device(mesh, "heads", network.num_heads)
    width, total = num_heads * 2 * network.entry_dims[1], once + Flops(6 * layers, (6 + 2 * again) * layers) * slots
    for window in windows_of(network):
        seen, computed = row_kernels.mean_keys(seq_len, window, mesh)
        # a slot sees those of its anchor too; masked ones are compared with the whole row
        total += attention_flops(width, seen, computed, remat=rollout.remat)
        total += attention_flops(width, seen, seq_len, remat=rollout.remat) * (slots - 1)
    return total
