"""The costs of the layer's rollout, for each position of a row, by the rules of `train.flops`."""

from jax.sharding import Mesh

from specserve.drafters.door import Costs, Flops, Rollout
from specserve.drafters.layer_costs import attention_flops, kept_by_layer, workspace_of_layer
from specserve.drafters.mtp.config import MtpConfig
from specserve.drafters.mtp.model import draft_spec, place
from specserve.kernels import rows
from specserve.mesh import on_each_device
from specserve.models.params import is_matrix, num_params, on_device, specs


def rollout_costs(config: MtpConfig, rollout: Rollout, seq_len: int, mesh: Mesh | None = None) -> Costs:
    layer = config.layer
    q_dim, kv_dim, num_kv_heads = _attention_dims(config)
    d_ff, again = layer.d_ff, 1 if rollout.remat else 0
    has_experts = layer.kind(0).has_experts
    if layer.experts and has_experts:
        d_ff = layer.experts.top_k * layer.experts.d_ff + layer.experts.shared_d_ff
    each = 3 * layer.d_model + kv_dim  # a step's state, its gradient and its shifted copy
    if not rollout.remat:
        each += 2 * layer.d_model + kept_by_layer(layer.d_model, q_dim, d_ff)
    return Costs(
        _flops(config, rollout, seq_len, mesh),
        kept=rollout.length * each,
        workspace=workspace_of_layer(layer.d_model, q_dim, d_ff),
        num_heads=layer.num_heads,
        num_kv_heads=num_kv_heads,
        kv=kv_dim,
        # both outputs, both inputs' gradients, and the embedding
        summed=rollout.length * layer.d_model * (5 + 2 * again),
        routed=rollout.length * layer.d_model * 2 * (2 + again) if has_experts else 0,
        shares_output=not config.has_head,
    )


def _attention_dims(config: MtpConfig) -> tuple[int, int, int]:
    """Return three numbers for a position: the values of its queries, the values of its keys and values together, and
    the heads of these. Latents are expanded."""
    layer, latent = config.layer, config.layer.latent
    if latent is None or layer.kind(0).mixer != "latent":
        return layer.num_heads * layer.head_dim, 2 * layer.num_kv_heads * layer.head_dim, layer.num_kv_heads
    width = latent.nope_dim + latent.rope_dim
    return layer.num_heads * width, layer.num_heads * (width + latent.v_dim), layer.num_heads


def _flops(config: MtpConfig, rollout: Rollout, seq_len: int, mesh: Mesh | None) -> Flops:
    layer = config.layer
    spec = draft_spec(config) if mesh is None else on_device(draft_spec(config), place(config, mesh))
    q_dim = _attention_dims(config)[0] // layer.num_heads * on_each_device(mesh, "heads", layer.num_heads)
    top_k = layer.experts.top_k if layer.experts else None
    matrices = [leaf for leaf in specs((spec.fc, spec.layer)) if is_matrix(leaf)]
    each = num_params(matrices, top_k)
    again = each if rollout.remat else 0
    seen, computed = rows.mean_keys(seq_len, layer.kind(0).window, mesh)
    attention = attention_flops(2 * q_dim, seen, computed, remat=rollout.remat)
    return (Flops(6 * each, 6 * each + 2 * again) + attention) * rollout.length
