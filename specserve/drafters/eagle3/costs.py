"""The costs of an EAGLE-3 head's rollout, for each position of a row, by the rules of `train.flops`."""

from jax.sharding import Mesh

from specserve.drafters.door import Costs, Flops, Rollout
from specserve.drafters.eagle.config import Eagle3Config
from specserve.drafters.eagle.model import draft_spec, place
from specserve.drafters.layer_costs import attention_flops, kept_by_layer, workspace_of_layer
from specserve.kernels import rows
from specserve.mesh import on_each_device
from specserve.models.params import is_matrix, num_params, on_device, specs


def rollout_costs(config: Eagle3Config, rollout: Rollout, seq_len: int, mesh: Mesh | None = None) -> Costs:
    heads, kv = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    again = 1 if rollout.remat else 0
    each = 3 * config.d_model + config.num_layers * kv  # a step's state, its gradient and its shifted copy
    if not rollout.remat:
        each += 2 * config.d_model + config.num_layers * kept_by_layer(config.d_model, heads, config.d_ff)
    return Costs(
        _flops(config, rollout, seq_len, mesh),
        kept=rollout.length * each,
        workspace=workspace_of_layer(config.d_model, heads, config.d_ff),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        kv=config.num_layers * kv,
        # of a layer both outputs, and both inputs' gradients, the first one of twice the width; and the embedding
        summed=rollout.length * config.d_model * ((4 + again) * config.num_layers + 2 + again),
    )


def _flops(config: Eagle3Config, rollout: Rollout, seq_len: int, mesh: Mesh | None) -> Flops:
    spec = draft_spec(config) if mesh is None else on_device(draft_spec(config), place(config, mesh))
    fc = num_params(spec.fc)
    needs_input_gradient = bool(spec.fc_norms) or spec.fc_input_norm is not None
    once = (6.0 if needs_input_gradient else 4.0) * fc  # the features themselves are frozen
    layers = num_params([leaf for leaf in specs(spec.layers) if is_matrix(leaf)])
    # what only makes the step's own output is not computed again, unless a norm follows it
    again = 0.0 if not rollout.remat else layers - (0 if config.norm_output else num_params(spec.layers[-1].mlp.down))
    num_heads = on_each_device(mesh, "heads", config.num_heads)
    width = config.num_layers * num_heads * 2 * config.head_dim
    seen, computed = rows.mean_keys(seq_len, 0, mesh)
    attention = attention_flops(width, seen, computed, remat=rollout.remat)
    return Flops(once, once) + (Flops(6 * layers, 6 * layers + 2 * again) + attention) * rollout.length
