"""The costs of training a P-EAGLE head, for each position of a row, by the rules of `train.flops`."""

from jax.sharding import Mesh

from specserve.drafters.door import Costs, Flops, Rollout
from specserve.drafters.eagle.model import draft_spec
from specserve.drafters.layer_costs import attention_flops, kept_by_layer, workspace_of_layer
from specserve.drafters.peagle.config import PEagleConfig
from specserve.drafters.peagle.learn import num_anchors
from specserve.drafters.peagle.model import place
from specserve.kernels import rows
from specserve.mesh import on_each_device
from specserve.models.params import is_matrix, num_params, on_device, specs


def slot_costs(config: PEagleConfig, rollout: Rollout, seq_len: int, mesh: Mesh | None = None) -> Costs:
    network = config.network
    numbers = num_anchors(config, seq_len)
    slots = sum(numbers) / seq_len  # for each position
    heads, kv = network.num_heads * network.head_dim, 2 * network.num_kv_heads * network.head_dim
    again = 1 if rollout.remat else 0
    each = 2 * network.d_model + network.num_layers * kv  # a slot's state, its gradient, and what others see of it
    if not rollout.remat:
        each += 2 * network.d_model + network.num_layers * kept_by_layer(network.d_model, heads, network.d_ff)
    return Costs(
        _flops(config, rollout, seq_len, slots, mesh),
        kept=round(slots * each),
        workspace=workspace_of_layer(network.d_model, heads, network.d_ff),
        num_heads=network.num_heads,
        num_kv_heads=network.num_kv_heads,
        states=slots / config.num_slots,
        kv=network.num_layers * kv,
        # of a layer both outputs, and both inputs' gradients, the first one of twice the width; and the embedding
        summed=slots * network.d_model * ((4 + again) * network.num_layers + 2 + again),
        has_one_teacher=False,
    )


def _flops(config: PEagleConfig, rollout: Rollout, seq_len: int, slots: float, mesh: Mesh | None) -> Flops:
    network = config.network
    spec = draft_spec(network) if mesh is None else on_device(draft_spec(network), place(config, mesh).network)
    again = 1 if rollout.remat else 0
    # the features are frozen; what makes them is computed once for each position, and once for all masked slots
    needs_input_gradient = bool(spec.fc_norms) or spec.fc_input_norm is not None
    fc = num_params(spec.fc)
    times = 6 if needs_input_gradient else 4
    once = Flops(times * fc, (times + 2 * again) * fc)
    layers = num_params([leaf for leaf in specs(spec.layers) if is_matrix(leaf)])
    num_heads = on_each_device(mesh, "heads", network.num_heads)
    width = network.num_layers * num_heads * 2 * network.head_dim
    seen, computed = rows.mean_keys(seq_len, 0, mesh)
    # a slot sees those of its anchor too; masked ones are compared with the whole row
    per_row = attention_flops(width, seen, computed, remat=rollout.remat)
    masked = attention_flops(width, seen, seq_len, remat=rollout.remat) * (slots - 1)
    return once + Flops(6 * layers, (6 + 2 * again) * layers) * slots + per_row + masked
