"""A mixture of experts in place of the MLP. `route` chooses each token's experts, and `moe` computes the products.

All shapes are static: how many tokens an expert gets decides values, never shapes, so no routing compiles anything.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specserve.kernels import native, nibbles
from specserve.kernels.grouped import TPU_ROWS, ExpertBlocks, Matrices, expected_experts, into_blocks, rows_per_block
from specserve.kernels.matmul import (
    PackedMatrix,
    QuantizedMatrix,
    Weight,
    dequantize,
    matmul,
    matmul_by_block,
    matmul_by_expert,
    matmul_float32,
)
from specserve.kernels.nibbles import NibbleMatrix, WordMatrix
from specserve.kernels.rowwise import UNGATED, Activation, gated, rms_norm
from specserve.mesh import is_on_one_device, program_platform, traced_once
from specserve.models.config import Experts, ModelConfig
from specserve.models.expert_parts import in_parts
from specserve.models.layers import Mlp, linear, mlp, mlp_spec, norm_spec
from specserve.models.params import ParamSpec, TensorPart, matrix, optional, vector
from specserve.pytree import pytree

ALL_EXPERTS_TOKENS = 128  # on accelerators without a kernel: up to so many tokens every expert computes all of them


@pytree
class MoeNorms:
    """The norms of a mixture that takes the residual stream itself (Gemma 4)."""

    router: jax.Array  # [d_model], of the router's input, which is divided by sqrt(d_model) besides
    taken: jax.Array  # [d_model], of the experts' input
    given: jax.Array  # [d_model], of the sum of the experts
    shared_taken: jax.Array  # [d_model]
    shared_given: jax.Array  # [d_model]


@pytree
class Moe:
    router: Weight  # [d_model, expert]
    router_bias: jax.Array | None  # [expert]
    correction: jax.Array | None  # [expert]
    gate: Matrices  # [expert, d_model, d_ff]
    up: Any  # Matrices, [expert, d_model, d_ff]; None: of an activation that is not gated
    down: Matrices  # [expert, d_ff, d_model]
    gate_bias: jax.Array | None  # [expert, d_ff]
    up_bias: jax.Array | None  # [expert, d_ff]
    down_bias: jax.Array | None  # [expert, d_model]
    shared: Mlp | None
    shared_gate: Weight | None  # [d_model, 1]
    expert_scale: jax.Array | None = None  # [expert], of the weights of those that were chosen
    norms: MoeNorms | None = None
    table: jax.Array | None = None  # [vocab, top_k] float32, of whole numbers: the experts of each token
    latent_in: Weight | None = None  # [d_model, latent_dim], before the routed experts, whose width is the latter
    latent_out: Weight | None = None  # [latent_dim, d_model], after them


def moe_spec(config: ModelConfig, prefix_of_layer: str) -> Moe:
    experts, names = config.experts, config.names
    assert experts is not None, "a layer with experts needs a config with experts"
    n, d_model, d_ff = experts.num_experts, config.d_model, experts.d_ff
    prefix = f"{prefix_of_layer}.{names.experts}".removesuffix(".")
    is_stacked = "{e}" not in names.expert_down  # as GPT-OSS: [expert, in, out], gate and up in alternate columns
    gate, up, down = names.expert_gate, names.expert_up, names.expert_down
    d_in, is_gated = experts.latent_dim or d_model, config.activation not in UNGATED
    gate = gate if is_gated else up
    parts = (None, None)
    if is_stacked:
        gate = up = names.gate_up
        parts = (TensorPart(0, 1, 2, 2 * d_ff), TensorPart(1, 2, 2, 2 * d_ff))

    halves = [TensorPart(start, start + d_ff, 2 * d_ff, 2 * d_ff) for start in (0, d_ff)]

    def weight(name: str, d_in: int, d_out: int, axes: tuple[str, str], part: TensorPart | None, stacked: Any) -> Any:
        name = f"{prefix}.{name}" if is_stacked else f"{prefix}.{name}.weight"
        own = ParamSpec((n, d_in, d_out), ("experts", *axes), name, transpose=not is_stacked, part=part)
        if not names.stacked_experts:
            return own
        name, part = stacked
        # both orders are written, and where the sizes are equal the publisher's counts
        orders = (names.stacked_experts == "outputs first", names.stacked_experts != "outputs first")
        others = (dataclasses.replace(own, name=f"{prefix}.{name}", transpose=each, part=part) for each in orders)
        return dataclasses.replace(own, instead=tuple(others))

    def bias(name: str, size: int, axis: str | None, part: TensorPart | None = None) -> Any:
        name = f"{prefix}.{name}_bias" if is_stacked else f"{prefix}.{name}.bias"
        return optional(experts.has_bias, ParamSpec((n, size), ("experts", axis), name, init="zeros", part=part))

    def per_expert(name: str, *, is_float32: bool = False) -> Any:
        return vector(f"{prefix}.{name}", n, init="zeros", is_float32=is_float32)

    shared, latent = f"{prefix}.{names.shared}", f"{prefix}.fc{{}}_latent_proj.weight"
    router, is_float32 = f"{prefix}.{names.router}.weight", experts.has_float32_router
    return Moe(
        router=matrix(router, d_model, n, ("embed", None), is_float32=is_float32),
        router_bias=optional(experts.has_router_bias, per_expert(f"{names.router}.bias")),
        correction=optional(experts.has_correction, per_expert(names.correction, is_float32=True)),
        gate=weight(gate, d_in, d_ff, ("embed", "mlp"), parts[0], ("experts.gate_up_proj", halves[0])),
        up=optional(is_gated, weight(up, d_in, d_ff, ("embed", "mlp"), parts[1], ("experts.gate_up_proj", halves[1]))),
        down=weight(down, d_ff, d_in, ("mlp", "embed"), None, ("experts.down_proj", None)),
        gate_bias=bias(gate, d_ff, "mlp", parts[0]),
        up_bias=bias(up, d_ff, "mlp", parts[1]),
        down_bias=bias(down, d_model, None),
        shared=optional(experts.shared_d_ff, mlp_spec(config, shared, d_ff=experts.shared_d_ff)),
        shared_gate=optional(experts.has_shared_gate, matrix(f"{shared}_gate.weight", d_model, 1, ("embed", None))),
        expert_scale=optional(experts.has_norms, vector(f"{prefix}.router.per_expert_scale", n)),
        norms=optional(experts.has_norms, _norms_spec(config, prefix)),
        table=optional(experts.is_hashed, _table_spec(config, f"{prefix}.{names.router}", experts.top_k)),
        latent_in=optional(experts.latent_dim, matrix(latent.format("1"), d_model, d_in, (None, None))),
        latent_out=optional(experts.latent_dim, matrix(latent.format("2"), d_in, d_model, (None, None))),
    )


def _table_spec(config: ModelConfig, prefix: str, top_k: int) -> Any:
    shape = config.vocab_size, top_k
    return ParamSpec(shape, (None, None), f"{prefix}.tid2eid", init="zeros", is_float32=True)


def _norms_spec(config: ModelConfig, prefix: str) -> MoeNorms:
    names = config.names.mlp_norm, config.names.mlp_out_norm
    shared_taken, given, taken, shared_given = (
        norm_spec(f"{prefix}.{name}", config.d_model)
        for name in (names[0], f"{names[1]}_2", f"{names[0]}_2", f"{names[1]}_1")
    )
    return MoeNorms(vector(f"{prefix}.router.scale", config.d_model), taken, given, shared_taken, shared_given)


def moe(
    params: Moe,
    config: ModelConfig,
    x: jax.Array,  # [..., d_model]
    form: "Form | None" = None,
    token_ids: jax.Array | None = None,  # [batch, n] int32, which choose where there is a table
) -> jax.Array:  # [..., d_model]
    """Add up the chosen experts' outputs, weighted, and the shared expert's output of every token. All forms compute
    the same. Unless `form` is given, it is the cheapest for this number of tokens."""
    experts = config.experts
    assert experts is not None

    def normed(x: jax.Array, weight: jax.Array | None) -> jax.Array:
        return x if weight is None else rms_norm(x, weight, config.norm_eps)

    def choose(params: Moe, rows: jax.Array, *token_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        if params.norms:
            rows = normed(rows, params.norms.router) * config.d_model**-0.5
        return route(params, config, rows, *token_ids)

    def compute(params: Moe, rows: jax.Array, expert_ids: jax.Array, weights: jax.Array) -> jax.Array:
        rows = normed(rows, params.norms and params.norms.taken)
        if experts.scales_input:  # a weight of 0, for another device's expert, stays so
            rows, weights = rows * weights.astype(rows.dtype), (weights > 0).astype(weights.dtype)
        if params.latent_in is not None:
            rows = linear(rows, params.latent_in)
        chosen = form or best_form(params, experts, len(rows))
        out = chosen(params, config.activation, rows, expert_ids, weights)
        return out if params.latent_out is None else linear(out, params.latent_out)

    tokens = x.reshape(len(x), -1, x.shape[-1])
    parts, more = (_without_shared(moe_spec(config, "")), _without_shared(params), tokens), ()
    if params.table is not None:
        assert token_ids is not None, "a table of experts needs the tokens"
        more = (token_ids,)
    y = in_parts(choose, compute, *parts, *more)
    norms = params.norms
    y = normed(y.reshape(x.shape), norms and norms.given)
    if params.shared is not None:
        shared = mlp(params.shared, normed(x, norms and norms.shared_taken), config.activation)
        shared = normed(shared, norms and norms.shared_given)
        y = y + (shared if params.shared_gate is None else shared * jax.nn.sigmoid(linear(x, params.shared_gate)))
    return y


def _without_shared(params: Moe) -> Moe:
    return dataclasses.replace(params, shared=None, shared_gate=None)


SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sigmoid": jax.nn.sigmoid,
    "sqrt_softplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}


def route(
    params: Moe,
    config: ModelConfig,
    x: jax.Array,  # [token, d_model]
    token_ids: jax.Array | None = None,  # [token] int32
) -> tuple[jax.Array, jax.Array]:  # expert_ids [token, top_k] int32, best first; weights [token, top_k] float32
    """Choose the experts of each token and computes their weights, in float32. Of equal scores the lower id goes
    first.

    Scores are the softmax (Shazeer et al. 2017, arXiv 1701.06538, section 2.1) or the sigmoid (DeepSeek-V3, arXiv
    2412.19437, equations 12 to 15) of the router's logits. A correction decides which experts are chosen and does not
    change their weights (equation 16). `renormalize` divides by the chosen scores' sum (equation 13).
    """
    experts = config.experts
    assert experts is not None
    logits = matmul_float32(x.astype(jnp.float32) if experts.has_float32_router else x, params.router)
    if params.router_bias is not None:
        logits = logits + params.router_bias.astype(jnp.float32)
    scores = SCORES.get(experts.scoring, jax.nn.softmax)(logits)
    choice = scores if params.correction is None else scores + params.correction.astype(jnp.float32)
    if experts.num_groups > 1:
        choice = _within_best_groups(choice, experts)
    expert_ids = jax.lax.top_k(choice, experts.top_k)[1]
    if params.table is not None:
        assert token_ids is not None
        expert_ids = jnp.rint(params.table[token_ids]).astype(jnp.int32)
    weights = jnp.take_along_axis(scores, expert_ids, axis=-1)
    # the softmax of the chosen logits (Mixtral, arXiv 2401.04088, section 2.1) is the softmax of all, renormalised
    if experts.renormalize or experts.scoring == "softmax_of_top":
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    if params.expert_scale is not None:
        weights = weights * params.expert_scale.astype(jnp.float32)[expert_ids]
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
    gate = product(x, params.gate, params.gate_bias)
    up = None if params.up is None else product(x, params.up, params.up_bias)
    return product(gated(gate, up, activation), params.down, params.down_bias)


def all_experts(
    params: Moe,
    activation: Activation,
    x: jax.Array,  # [token, d_model]
    expert_ids: jax.Array,  # [token, top_k]; the number of experts in `params` stands for one that is elsewhere
    weights: jax.Array,  # [token, top_k] float32
) -> jax.Array:  # [token, d_model]
    """Compute every token in every expert, and weight the sums by what the router chose. Each weight is read once, and
    expert / top_k times the needed work is done."""
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
    """Compute one ragged product over the tokens sorted by expert. It does only the needed work where the backend has
    a kernel, as TPUs have.

    Eight-bit values with a scale for each output are multiplied as they are, and the product is scaled. XLA's kernel
    for TPUs reads int8 without a copy from v5e on. Of float8 XLA makes a copy in x's dtype, and where scales are by
    block it is made here; it lives for one product.
    """
    num_experts, flat = params.down.shape[0], expert_ids.reshape(-1)
    order = jnp.argsort(flat)
    sorted_ids, counts = flat[order], jnp.bincount(flat, length=num_experts)

    def product(x: jax.Array, weight: Matrices, bias: jax.Array | None) -> jax.Array:  # x: [token * top_k, d_in]
        assert not isinstance(weight, PackedMatrix), "packed experts multiply row by row"
        if isinstance(weight, QuantizedMatrix) and weight.scale.shape[-2] == 1 and weight.offset is None:
            y = jax.lax.ragged_dot(x, weight.values, counts, preferred_element_type=jnp.float32)
            y = (y * weight.scale[sorted_ids, 0]).astype(x.dtype)
        else:
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
    num_experts = params.down.shape[0]
    blocks, rows = _rows_in_blocks(x, expert_ids, num_experts, least=4)  # measured: fewer rows gain nothing

    def compute(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, e = block

        def product(x: jax.Array, weight: Matrices, bias: jax.Array | None) -> jax.Array:
            return linear(x, jax.tree.map(lambda leaf: leaf[e], weight), None if bias is None else bias[e])

        def run(rows: jax.Array) -> jax.Array:
            return _expert_mlp(params, activation, rows, product)

        return jax.lax.cond(e < num_experts, run, jnp.zeros_like, rows)

    y = jax.lax.map(compute, (rows, blocks.expert_of_block)).reshape(-1, x.shape[-1])
    y = y.at[blocks.slots].get(mode="fill", fill_value=0)
    return _weighed_sum(y, weights).astype(x.dtype)


def _rows_in_blocks(
    x: jax.Array, expert_ids: jax.Array, num_experts: int, *, least: int
) -> tuple[ExpertBlocks, jax.Array]:
    """Sort the pairs of a token and its expert into blocks of at least so many places, and return the tokens' rows in
    them [block, place, d_model]."""
    blocks = into_blocks(expert_ids, num_experts, rows_per_block(expert_ids.size, num_experts, least))
    tokens = blocks.pair_of_slot // expert_ids.shape[1]  # of an empty place: the number of tokens
    rows = x.at[tokens].get(mode="fill", fill_value=0)
    return blocks, rows.reshape(len(blocks.expert_of_block), -1, x.shape[-1])


def in_four_bits(
    params: Moe, activation: Activation, x: jax.Array, expert_ids: jax.Array, weights: jax.Array
) -> jax.Array:
    """Multiply blocks of rows by their experts' matrices, which have the form of a GPU's or a TPU's kernel for 4 bits
    (`kernels.nibbles`). It does only the needed work, reads each chosen matrix once for a block, and has no gradient.
    Hidden channels are rounded to x's dtype before the second product, and nothing else is."""
    least = nibbles.LEAST if isinstance(params.down, NibbleMatrix) else nibbles.SUBLANES
    blocks, rows = _rows_in_blocks(x, expert_ids, params.down.shape[0], least=least)
    of_block = blocks.expert_of_block

    def product(rows: jax.Array, weight: Any, bias: jax.Array | None) -> jax.Array:  # [block, place, d_out] float32
        y = matmul_by_block(rows.reshape(-1, rows.shape[-1]).astype(x.dtype), weight, of_block)
        y = y.reshape(*rows.shape[:2], -1)
        return y if bias is None else y + bias.astype(jnp.float32).at[of_block, None].get(mode="fill", fill_value=0)

    y = _expert_mlp(params, activation, rows, product).reshape(-1, x.shape[-1])
    y = y.at[blocks.slots].get(mode="fill", fill_value=0)
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


def _weighed_sum(y: jax.Array, weights: jax.Array) -> jax.Array:  # [token * top_k, d_model] -> [token, d_model] float32
    return jnp.einsum("tk,tkd->td", weights, y.astype(jnp.float32).reshape(*weights.shape, -1))


def by_kernel_gpu(
    params: Moe, activation: Activation, x: jax.Array, expert_ids: jax.Array, weights: jax.Array
) -> jax.Array:
    """Call the kernels for GPUs, for any number of tokens. They do only the needed work, and have no gradient."""
    from specserve.kernels import grouped_gpu  # its import takes a quarter of a second, in vain on a CPU

    return traced_once(grouped_gpu.expert_mlps, "activation")(x, expert_ids, weights, params, activation)


def by_kernel_tpu(
    params: Moe, activation: Activation, x: jax.Array, expert_ids: jax.Array, weights: jax.Array
) -> jax.Array:
    """Call the kernel for TPUs, for at most `TPU_ROWS` tokens. It reads the chosen experts alone, each of which
    computes every token, and has no gradient."""
    from specserve.kernels import grouped_tpu

    return traced_once(grouped_tpu.expert_mlps, "activation")(x, expert_ids, weights, params, activation)


Form = Callable[[Moe, Activation, jax.Array, jax.Array, jax.Array], jax.Array]


def choose_form(experts: Experts, num_tokens: int, platform: str, *, has_kernel: bool = True) -> Form:
    """The cheapest form for so many tokens on a platform ("cpu", "gpu" or "tpu"), with or without its Pallas kernel.

    On CPU this was measured: `by_blocks` needs a half to a quarter of the time of `all_experts` at 1 to 512 tokens,
    unless half of the experts are chosen. Ragged products are dense there, ten times slower.

    Elsewhere it follows from counts, and was not measured. The weights of few tokens' experts take longer to be read
    than to be multiplied. The kernels read the chosen experts alone (`kernels.grouped` has the formulae), and every
    other form for few tokens reads all. For many tokens the products count. XLA has a ragged kernel on TPUs; on GPUs
    it makes the ragged product dense, with a copy of the rows for each expert, and our kernels take its place.
    """
    if platform == "cpu":
        if 2 * experts.top_k >= experts.num_experts:
            return all_experts
        return by_blocks
    if platform == "tpu":
        if has_kernel and num_tokens <= TPU_ROWS:
            return by_kernel_tpu
        if not has_kernel and num_tokens <= ALL_EXPERTS_TOKENS:
            return all_experts
        return sorted_by_expert
    if has_kernel:
        return by_kernel_gpu
    if num_tokens <= ALL_EXPERTS_TOKENS:
        return all_experts
    return by_blocks


def experts_computed(experts: Experts, num_tokens: int, platform: str) -> float:
    """Return the number of experts' matrices that each of `num_tokens` tokens is multiplied by, in the form that
    `choose_form` takes: all of them, those that any of the tokens is expected to choose, or the token's own."""
    form = choose_form(experts, num_tokens, platform)
    if form is by_kernel_tpu:
        return expected_experts(experts.num_experts, experts.top_k, num_tokens)
    if form is all_experts:
        return experts.num_experts
    return experts.top_k


def best_form(params: Moe, experts: Experts, num_tokens: int) -> Form:
    """`choose_form` for what is being traced: these matrices, on the platform that it is compiled for. Kernels cannot
    be called where XLA cuts the work over a mesh, and are not where they are left out (`native.left_out`)."""
    if isinstance(params.down, PackedMatrix):
        return by_rows
    if isinstance(params.down, NibbleMatrix | WordMatrix):
        return in_four_bits
    has_kernel = is_on_one_device() and not native.are_left_out() and params.up is not None
    platform = program_platform()
    if platform == "gpu" and has_kernel:
        from specserve.kernels import grouped_gpu

        has_kernel = grouped_gpu.serves(params)
    return choose_form(experts, num_tokens, platform, has_kernel=has_kernel)
