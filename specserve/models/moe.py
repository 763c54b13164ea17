"""A mixture of experts in place of the MLP. `route` chooses each token's experts, and `moe` computes the products.

All shapes are static: how many tokens an expert gets decides values, never shapes, so no routing compiles anything.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specserve.kernels.matmul import (
    PackedMatrix,
    QuantizedMatrix,
    Weight,
    dequantize,
    matmul,
    matmul_by_expert,
    matmul_float32,
)
from specserve.kernels.rowwise import Activation, gated
from specserve.models.config import Experts, ModelConfig
from specserve.models.expert_parts import in_parts
from specserve.models.layers import Mlp, linear, mlp, mlp_spec
from specserve.models.params import ParamSpec, Part, matrix, vector
from specserve.pytree import pytree

ALL_EXPERTS_TOKENS = 128  # on accelerators: up to so many tokens every expert computes all of them

Matrices = jax.Array | PackedMatrix | QuantizedMatrix  # one for each expert


@pytree
class Moe:
    router: Weight  # [d_model, expert]
    router_bias: jax.Array | None  # [expert]
    correction: jax.Array | None  # [expert]
    gate: Matrices  # [expert, d_model, d_ff]
    up: Matrices  # [expert, d_model, d_ff]
    down: Matrices  # [expert, d_ff, d_model]
    gate_bias: jax.Array | None  # [expert, d_ff]
    up_bias: jax.Array | None  # [expert, d_ff]
    down_bias: jax.Array | None  # [expert, d_model]
    shared: Mlp | None
    shared_gate: Weight | None  # [d_model, 1]


def moe_spec(config: ModelConfig, prefix_of_layer: str) -> Moe:
    experts, names = config.experts, config.names
    assert experts is not None, "a layer with experts needs a config with experts"
    prefix, n, d_model, d_ff = f"{prefix_of_layer}.{names.experts}", experts.num_experts, config.d_model, experts.d_ff
    is_stacked = "{e}" not in names.expert_down  # as GPT-OSS: [expert, in, out], gate and up in alternate columns
    gate, up, down = names.expert_gate, names.expert_up, names.expert_down
    parts = (None, None)
    if is_stacked:
        gate = up = names.gate_up
        parts = (Part(0, 1, 2, 2 * d_ff), Part(1, 2, 2, 2 * d_ff))

    def weight(name: str, d_in: int, d_out: int, axes: tuple[str, str], part: Part | None = None) -> Any:
        name = f"{prefix}.{name}" if is_stacked else f"{prefix}.{name}.weight"
        return ParamSpec((n, d_in, d_out), ("experts", *axes), name, transpose=not is_stacked, part=part)

    def bias(name: str, size: int, axis: str | None, part: Part | None = None) -> Any:
        name = f"{prefix}.{name}_bias" if is_stacked else f"{prefix}.{name}.bias"
        return ParamSpec((n, size), ("experts", axis), name, init="zeros", part=part) if experts.has_bias else None

    def per_expert(name: str, *, is_float32: bool = False) -> Any:
        return vector(f"{prefix}.{name}", n, init="zeros", is_float32=is_float32)

    shared = f"{prefix}.{names.shared}"
    return Moe(
        router=matrix(f"{prefix}.{names.router}.weight", d_model, n, ("embed", None)),
        router_bias=per_expert(f"{names.router}.bias") if experts.has_router_bias else None,
        correction=per_expert(names.correction, is_float32=True) if experts.has_correction else None,
        gate=weight(gate, d_model, d_ff, ("embed", "mlp"), parts[0]),
        up=weight(up, d_model, d_ff, ("embed", "mlp"), parts[1]),
        down=weight(down, d_ff, d_model, ("mlp", "embed")),
        gate_bias=bias(gate, d_ff, "mlp", parts[0]),
        up_bias=bias(up, d_ff, "mlp", parts[1]),
        down_bias=bias(down, d_model, None),
        shared=mlp_spec(config, shared, d_ff=experts.shared_d_ff) if experts.shared_d_ff else None,
        shared_gate=matrix(f"{shared}_gate.weight", d_model, 1, ("embed", None)) if experts.has_shared_gate else None,
    )


def moe(
    params: Moe,
    config: ModelConfig,
    x: jax.Array,  # [..., d_model]
    form: "Form | None" = None,
) -> jax.Array:  # [..., d_model]
    """Add up the chosen experts' outputs, weighted, and the shared expert's output of every token. All forms compute
    the same. Unless `form` is given, it is the cheapest for this number of tokens."""
    assert config.experts is not None
    rows = x.reshape(-1, x.shape[-1])
    expert_ids, weights = route(params, config, rows)
    if form is None:
        form = by_rows if isinstance(params.down, PackedMatrix) else choose_form(config.experts, len(rows))

    def compute(experts: Moe, rows: jax.Array, expert_ids: jax.Array, weights: jax.Array) -> jax.Array:
        return form(experts, config.activation, rows, expert_ids, weights)

    y = in_parts(compute, _experts_alone(moe_spec(config, "")), _experts_alone(params), rows, expert_ids, weights)
    if params.shared is not None:
        shared = mlp(params.shared, rows, config.activation)
        y = y + (shared if params.shared_gate is None else shared * jax.nn.sigmoid(linear(rows, params.shared_gate)))
    return y.reshape(x.shape)


def _experts_alone(params: Moe) -> Moe:
    return dataclasses.replace(params, router=None, router_bias=None, correction=None, shared=None, shared_gate=None)


def route(
    params: Moe,
    config: ModelConfig,
    x: jax.Array,  # [token, d_model]
) -> tuple[jax.Array, jax.Array]:  # expert_ids [token, top_k] int32, best first; weights [token, top_k] float32
    """Choose the experts of each token and computes their weights, in float32. Of equal scores the lower id goes
    first.

    Scores are the softmax (Shazeer et al. 2017, arXiv 1701.06538, section 2.1) or the sigmoid (DeepSeek-V3, arXiv
    2412.19437, equations 12 to 15) of the router's logits. A correction decides which experts are chosen and does not
    change their weights (equation 16). `renormalize` divides by the chosen scores' sum (equation 13).
    """
    experts = config.experts
    assert experts is not None
    logits = matmul_float32(x, params.router)
    if params.router_bias is not None:
        logits = logits + params.router_bias.astype(jnp.float32)
    scores = jax.nn.sigmoid(logits) if experts.scoring == "sigmoid" else jax.nn.softmax(logits)
    choice = scores if params.correction is None else scores + params.correction.astype(jnp.float32)
    if experts.num_groups > 1:
        choice = _within_best_groups(choice, experts)
    expert_ids = jax.lax.top_k(choice, experts.top_k)[1]
    weights = jnp.take_along_axis(scores, expert_ids, axis=-1)
    # the softmax of the chosen logits (Mixtral, arXiv 2401.04088, section 2.1) is the softmax of all, renormalised
    if experts.renormalize or experts.scoring == "softmax_of_top":
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return expert_ids, weights * experts.scale


def _within_best_groups(choice: jax.Array, experts: Experts) -> jax.Array:  # [token, expert] -> [token, expert]
    """Set the scores of experts outside each token's best groups to -inf, and not to 0, because corrected scores may
    be negative. A group's score is that of its best expert (DeepSeek-V2, arXiv 2405.04434, section 2.2.2) or the sum of
    its two best (DeepSeek-V3, section 2.1.2)."""
    grouped = choice.reshape(choice.shape[0], experts.num_groups, -1)
    best = jax.lax.top_k(grouped, 1 if experts.group_score == "max" else 2)[0].sum(-1)  # [token, group]
    group_ids = jax.lax.top_k(best, experts.top_groups)[1]
    is_best = (group_ids[:, :, None] == jnp.arange(experts.num_groups)).any(axis=1)  # [token, group]
    return jnp.where(is_best[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


# A product of rows with their experts' matrices (and biases): (rows, weight, bias) -> rows.
Product = Callable[[jax.Array, Matrices, jax.Array | None], jax.Array]


def _expert_mlp(params: Moe, activation: Activation, x: jax.Array, product: Product) -> jax.Array:
    gate, up = product(x, params.gate, params.gate_bias), product(x, params.up, params.up_bias)
    return product(gated(gate, up, activation), params.down, params.down_bias)


def all_experts(
    params: Moe,
    activation: Activation,
    x: jax.Array,  # [token, d_model]
    expert_ids: jax.Array,  # [token, top_k]; the number of experts in `params` stands for one that is elsewhere
    weights: jax.Array,  # [token, top_k] float32
) -> jax.Array:  # [token, d_model]
    """Every expert computes every token. Each weight is read once, and expert / top_k times the needed work is done."""
    num_experts = params.down.shape[0]

    def product(x: jax.Array, weight: Matrices, bias: jax.Array | None) -> jax.Array:  # x: [expert, token, d_in]
        y = matmul(x, weight)
        return y if bias is None else y + bias[:, None]

    # repeated so that experts are a batch dimension on both sides; else XLA's CPU backend transposes the weights
    y = _expert_mlp(params, activation, jnp.broadcast_to(x, (num_experts, *x.shape)), product)
    is_chosen = expert_ids[:, :, None] == jnp.arange(num_experts)
    by_expert = jnp.where(is_chosen, weights[:, :, None], 0.0).sum(1)  # [token, expert]
    return jnp.einsum("te,etd->td", by_expert, y.astype(jnp.float32)).astype(x.dtype)


def sorted_by_expert(
    params: Moe, activation: Activation, x: jax.Array, expert_ids: jax.Array, weights: jax.Array
) -> jax.Array:
    """Compute one ragged product over the tokens sorted by expert. It does only the needed work, where the backend has
    a kernel."""
    num_experts, flat = params.down.shape[0], expert_ids.reshape(-1)
    order = jnp.argsort(flat)
    sorted_ids, counts = flat[order], jnp.bincount(flat, length=num_experts)

    def product(x: jax.Array, weight: Matrices, bias: jax.Array | None) -> jax.Array:  # x: [token * top_k, d_in]
        assert not isinstance(weight, PackedMatrix), "packed experts multiply row by row"
        y = jax.lax.ragged_dot(x, dequantize(weight, x.dtype), counts)
        return y if bias is None else y + bias[sorted_ids]

    y = _expert_mlp(params, activation, x[order // expert_ids.shape[1]], product)
    y = jnp.where((sorted_ids < num_experts)[:, None], y, 0)  # a kernel may leave rows past the last group unset
    return _weighed_sum(y[jnp.argsort(order)], weights).astype(x.dtype)


def by_blocks(
    params: Moe, activation: Activation, x: jax.Array, expert_ids: jax.Array, weights: jax.Array
) -> jax.Array:
    """Loop over blocks of tokens, each of one expert. It does only the needed work, on a backend without a ragged
    kernel."""
    (num_tokens, top_k), num_experts, flat = expert_ids.shape, params.down.shape[0], expert_ids.reshape(-1)
    size = _block_size(len(flat), num_experts)
    num_blocks = (len(flat) + (size - 1) * min(num_experts, len(flat))) // size  # enough for every routing
    order = jnp.argsort(flat)
    sorted_ids, counts = flat[order], jnp.bincount(flat, length=num_experts)
    n_blocks = -(-counts // size)  # [expert]
    ends = jnp.cumsum(n_blocks)
    first_slots, first_pairs = (ends - n_blocks) * size, jnp.cumsum(counts) - counts
    # pairs whose expert is elsewhere follow the last expert's: they fill up its block or are dropped
    slots = first_slots[sorted_ids] + jnp.arange(len(flat)) - first_pairs[sorted_ids]
    token_of_slot = jnp.full(num_blocks * size, num_tokens).at[slots].set(order // top_k, mode="drop")
    rows = x.at[token_of_slot].get(mode="fill", fill_value=0).reshape(num_blocks, size, -1)
    expert_of_block = jnp.searchsorted(ends, jnp.arange(num_blocks), side="right")  # num_experts: an unused block

    def compute(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, e = block

        def product(x: jax.Array, weight: Matrices, bias: jax.Array | None) -> jax.Array:
            return linear(x, jax.tree.map(lambda leaf: leaf[e], weight), None if bias is None else bias[e])

        def run(rows: jax.Array) -> jax.Array:
            return _expert_mlp(params, activation, rows, product)

        return jax.lax.cond(e < num_experts, run, jnp.zeros_like, rows)

    y = jax.lax.map(compute, (rows, expert_of_block)).reshape(num_blocks * size, -1)
    y = y.at[slots[jnp.argsort(order)]].get(mode="fill", fill_value=0)
    return _weighed_sum(y, weights).astype(x.dtype)


def by_rows(params: Moe, activation: Activation, x: jax.Array, expert_ids: jax.Array, weights: jax.Array) -> jax.Array:
    """Multiply packed experts, whose kernel sorts the rows by itself. It does only the needed work, and reads each
    chosen matrix once."""
    flat = expert_ids.reshape(-1).astype(jnp.int32)

    def product(x: jax.Array, weight: Matrices, bias: jax.Array | None) -> jax.Array:  # x: [token * top_k, d_in]
        assert isinstance(weight, PackedMatrix)
        y = matmul_by_expert(x, weight, flat)
        return y if bias is None else y + bias.at[flat].get(mode="fill", fill_value=0)

    y = _expert_mlp(params, activation, jnp.repeat(x, expert_ids.shape[1], axis=0), product)
    return _weighed_sum(y, weights).astype(x.dtype)


def _block_size(num_pairs: int, num_experts: int) -> int:
    """The number of tokens in a block: an expert's average share, rounded up to a power of two. Measured, fewer than 4
    rows gain nothing and more than 64 little."""
    return min(max(4, 1 << max(num_pairs // num_experts - 1, 0).bit_length()), 64)


def _weighed_sum(y: jax.Array, weights: jax.Array) -> jax.Array:  # [token * top_k, d_model] -> [token, d_model] float32
    return jnp.einsum("tk,tkd->td", weights, y.astype(jnp.float32).reshape(*weights.shape, -1))


Form = Callable[[Moe, Activation, jax.Array, jax.Array, jax.Array], jax.Array]
FORMS: tuple[Form, ...] = (all_experts, sorted_by_expert, by_blocks)


def choose_form(experts: Experts, num_tokens: int) -> Form:
    """The cheapest form for so many tokens.

    On CPU this was measured: `by_blocks` needs a half to a quarter of the time of `all_experts` at 1 to 512 tokens,
    unless half of the experts are chosen. Ragged products are dense there, ten times slower. Elsewhere it was not
    measured: up to some hundred tokens the cost of an expert's matrix is reading it, and all of them are read either
    way.
    """
    if jax.default_backend() == "cpu":
        return all_experts if 2 * experts.top_k >= experts.num_experts else by_blocks
    return all_experts if num_tokens <= ALL_EXPERTS_TOKENS else sorted_by_expert
