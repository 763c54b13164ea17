"""The costs of training a DFlash head, for each position of a row, by the rules of `train.flops`."""

from jax.sharding import Mesh

from specserve.drafters.dflash.config import DFlashConfig
from specserve.drafters.dflash.learn import block_mask, num_anchors
from specserve.drafters.dflash.model import head_spec, place
from specserve.drafters.door import Costs, Flops, Rollout
from specserve.drafters.layer_costs import kept_by_layer, workspace_of_layer
from specserve.kernels import rows
from specserve.mesh import on_each_device
from specserve.models.attention import Attention
from specserve.models.params import is_matrix, num_params, on_device, specs


def block_costs(config: DFlashConfig, rollout: Rollout, seq_len: int, mesh: Mesh | None = None) -> Costs:
    backbone = config.backbone
    again = 1 if rollout.remat else 0
    anchors = num_anchors(config, rollout, seq_len) / seq_len
    slots = anchors * config.block_size  # computed for each position of the row
    heads, kv = backbone.num_heads * backbone.head_dim, 2 * backbone.num_kv_heads * backbone.head_dim
    context = 2 * backbone.d_model + 2 * backbone.num_layers * kv  # what is fused; keys and values, their gradients
    of_slot = backbone.num_layers * (kept_by_layer(backbone.d_model, heads, backbone.d_ff) + kv)
    states = 3 * anchors * config.num_slots * backbone.d_model  # of all slots together, their gradients, those stacked
    return Costs(
        _flops(config, rollout, seq_len, slots, mesh),
        kept=round(context + states + (0 if rollout.remat else slots * of_slot)),
        workspace=round(slots * (workspace_of_layer(backbone.d_model, heads, backbone.d_ff) + kv)),
        num_heads=backbone.num_heads,
        num_kv_heads=backbone.num_kv_heads,
        states=anchors,
        kv=backbone.num_layers * kv,
        # of a layer both outputs, both inputs' gradients, and that of the context; and the embedding
        summed=backbone.d_model * (slots * ((4 + again) * backbone.num_layers + 1) + backbone.num_layers),
        shares_output=not config.has_head,
        has_one_teacher=False,
    )


def _flops(config: DFlashConfig, rollout: Rollout, seq_len: int, slots: float, mesh: Mesh | None) -> Flops:
    backbone, again = config.backbone, 1 if rollout.remat else 0
    spec = head_spec(config) if mesh is None else on_device(head_spec(config), place(config, mesh))
    total = Flops(1, 1) * (4.0 * num_params(spec.fc))  # the features themselves are frozen
    if spec.markov is not None:  # a product for each state, beside that of the output head
        total += Flops(6, 6) * (num_params(spec.markov.bias) * slots * config.num_slots / config.block_size)
    width = 2 * on_each_device(mesh, "heads", backbone.num_heads) * backbone.head_dim
    for i, layer in enumerate(spec.layers):
        assert isinstance(layer.attention, Attention), "a head's layers attend"
        total += Flops(1, 1) * (6.0 * num_params([layer.attention.k, layer.attention.v]))  # of the context
        matrices = num_params([leaf for leaf in specs(layer) if is_matrix(leaf)])
        total += Flops(6, 6 + 2 * again) * (matrices * slots)
        # an anchor sees what is before it, by its window; of a chunk of anchors all of the row is computed. A chunk is
        # computed again from queries and keys, and its backward pass has four products
        of_block = block_mask(config, i).mean() * config.block_size
        seen = rows.mean_keys(seq_len, backbone.kind(i).window)[0] - 1 + of_block
        total += Flops(3 * seen, (4 + again) * (seq_len + config.block_size)) * (2 * width * slots)
    return total
