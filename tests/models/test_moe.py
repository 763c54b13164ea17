import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts import FORMS
from rounding import assert_same, tolerance

from specserve.models.config import Experts, ModelConfig, Names
from specserve.models.moe import Moe, moe, moe_spec, route
from specserve.models.params import init_params, specs

D_MODEL = 12
SOFTMAX = Experts(num_experts=8, top_k=2, d_ff=10)
GROUPED = Experts(16, 4, 10, num_groups=4, top_groups=2, scale=2.5)
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"experts": dataclasses.replace(SOFTMAX, renormalize=True)},
    "qwen2_moe": {
        "experts": dataclasses.replace(SOFTMAX, shared_d_ff=6, has_shared_gate=True),
        "names": Names(shared="shared_expert"),
    },
    "deepseek_v2": {"experts": dataclasses.replace(GROUPED, shared_d_ff=20)},
    "deepseek_v3": {
        "experts": dataclasses.replace(
            GROUPED, scoring="sigmoid", renormalize=True, group_score="top2", has_correction=True, shared_d_ff=10
        )
    },
    "minimax_m2": {"experts": dataclasses.replace(SOFTMAX, scoring="sigmoid", renormalize=True, has_correction=True)},
    "gpt_oss": {
        "experts": dataclasses.replace(SOFTMAX, scoring="softmax_of_top", has_router_bias=True, has_bias=True),
        "activation": "clamped_swiglu",
        "names": Names(router="router", gate_up="experts.gate_up_proj", expert_down="experts.down_proj"),
    },
    "every expert, gelu": {"experts": dataclasses.replace(SOFTMAX, top_k=8), "activation": "gelu_tanh"},
}


def config_of(name: str) -> ModelConfig:
    return ModelConfig(name, 8, D_MODEL, 1, 1, 1, D_MODEL, 14, 64, **CONFIGS[name])


def params_of(config: ModelConfig, seed: int = 0) -> Moe:
    """Random everywhere, biases too. Corrections are all below any score's negative, so that a masked expert that
    counted as 0 would be chosen; weights are wide enough for gates to be clamped."""
    spec = moe_spec(config, "model.layers.0")
    params: Moe = jax.tree.map(lambda leaf: leaf * 3.0, init_params(spec, jax.random.key(seed), "float32"))
    rng = np.random.default_rng(seed)

    def tolerance(leaf: jax.Array | None) -> jax.Array | None:
        return None if leaf is None else jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32)

    names = ("router_bias", "gate_bias", "up_bias", "down_bias")
    params = dataclasses.replace(params, **{name: tolerance(getattr(params, name)) for name in names})
    if params.correction is None:
        return params
    return dataclasses.replace(
        params, correction=-2.0 + 0.3 * jax.random.normal(jax.random.key(seed), (len(params.gate),))
    )


def tokens(count: int, seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (count, D_MODEL))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def activate(gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
    if activation == "silu":
        return gate * sigmoid(gate) * up
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return (up + 1) * gate * sigmoid(1.702 * gate)


def route_one(params: Moe, experts: Experts, x: np.ndarray) -> dict[int, float]:
    """Expert -> weight for one token, by sorting lists."""
    logits = x @ np.asarray(params.router)
    if params.router_bias is not None:
        logits = logits + np.asarray(params.router_bias)
    exp = np.exp(logits - logits.max())
    scores = sigmoid(logits) if experts.scoring == "sigmoid" else exp / exp.sum()
    choice = scores if params.correction is None else scores + np.asarray(params.correction)
    size = experts.num_experts // experts.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(experts.num_groups)]
    count = 1 if experts.group_score == "max" else 2
    groups.sort(key=lambda group: -sum(sorted(choice[list(group)])[-count:]))
    allowed = sorted(e for group in groups[: experts.top_groups] for e in group)
    chosen = sorted(allowed, key=lambda e: -choice[e])[: experts.top_k]
    if experts.scoring == "softmax_of_top":
        weights = exp[chosen] / exp[chosen].sum()
    else:
        weights = scores[chosen] / (scores[chosen].sum() if experts.renormalize else 1)
    return dict(zip(chosen, weights * experts.scale, strict=True))


def moe_one(params: Moe, config: ModelConfig, x: np.ndarray) -> np.ndarray:
    """One token, one expert after the other."""
    assert config.experts is not None
    p: Any = jax.tree.map(np.asarray, params)
    out = np.zeros_like(x)
    for e, weight in route_one(params, config.experts, x).items():
        gate, up = x @ p.gate[e], x @ p.up[e]
        if p.gate_bias is not None:
            gate, up = gate + p.gate_bias[e], up + p.up_bias[e]
        y = activate(gate, up, config.activation) @ p.down[e]
        out += weight * (y if p.down_bias is None else y + p.down_bias[e])
    if p.shared is not None:
        y = activate(x @ p.shared.gate, x @ p.shared.up, config.activation) @ p.shared.down
        out += y if p.shared_gate is None else y * sigmoid(x @ p.shared_gate)
    return out


def in_every_form(config: ModelConfig) -> Callable[[Moe, jax.Array], list[jax.Array]]:
    return jax.jit(lambda params, x: [moe(params, config, x, form) for form in FORMS])


@pytest.mark.parametrize(("name", "count"), [*((name, 70) for name in CONFIGS), ("deepseek_v3", 1), ("gpt_oss", 1)])
def test_every_form_matches_a_loop_over_tokens(name: str, count: int) -> None:
    config = config_of(name)
    params, x = params_of(config), tokens(count)
    expected = np.stack([moe_one(params, config, row) for row in np.asarray(x, np.float64)])
    run, args = in_every_form(config), (params, x.reshape(1, count, 1, D_MODEL))
    for y, own in zip(run(*args), tolerance(run, *args), strict=True):
        assert_same(y[0, :, 0], expected, own[0, :, 0])


@pytest.mark.parametrize("name", CONFIGS)
def test_routes_as_sorting_does(name: str) -> None:
    config = config_of(name)
    assert config.experts is not None
    params, x = params_of(config), tokens(50)
    run = jax.jit(lambda params, x: route(params, config, x))
    expert_ids, weights = map(np.asarray, run(params, x))
    _, off = tolerance(run, params, x)
    assert expert_ids.shape == weights.shape == (50, config.experts.top_k)
    assert (expert_ids.dtype, weights.dtype) == (np.int32, np.float32)
    for token, row in enumerate(np.asarray(x, np.float64)):
        expected = route_one(params, config.experts, row)
        assert expert_ids[token].tolist() == list(expected)
        assert_same(weights[token], list(expected.values()), off[token])


def test_of_equal_scores_the_lower_id_goes_first() -> None:
    config = config_of("deepseek_v2")
    params = params_of(config)
    router: Any = params.router
    params = dataclasses.replace(params, router=jnp.zeros_like(router))
    assert route(params, config, tokens(3))[0].tolist() == [[0, 1, 2, 3]] * 3
    equal_pairs = jnp.repeat(router[:, :8], 2, axis=1)  # within a group
    expert_ids, weights = map(np.asarray, route(dataclasses.replace(params, router=equal_pairs), config, tokens(20)))
    assert (expert_ids[:, ::2] % 2 == 0).all()
    np.testing.assert_array_equal(expert_ids[:, 1::2], expert_ids[:, ::2] + 1)
    np.testing.assert_array_equal(weights[:, 1::2], weights[:, ::2])


def test_routing_is_float32_for_bfloat16_tokens() -> None:
    """Half-precision logits would tie and misplace experts; the products stay in the tokens' dtype."""
    config = config_of("deepseek_v3")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params_of(config))
    x = tokens(200).astype(jnp.bfloat16)
    expert_ids, weights = route(params, config, x)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    route_wide, args = jax.jit(lambda params, x: route(params, config, x)), (wide, x.astype(jnp.float32))
    wide_ids, wide_weights = route_wide(*args)
    np.testing.assert_array_equal(expert_ids, wide_ids)
    assert_same(weights, wide_weights, tolerance(route_wide, *args)[1])


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss"])
def test_bfloat16_stays_bfloat16(name: str) -> None:
    config = config_of(name)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params_of(config))
    outs = jax.eval_shape(in_every_form(config), params, tokens(5).astype(jnp.bfloat16))
    assert [y.dtype for y in outs] == [jnp.bfloat16] * len(FORMS)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_gradients_of_all_forms_agree(name: str) -> None:
    config = config_of(name)
    params, x = params_of(config), tokens(9)

    @jax.jit
    def gradients(params: Moe, x: jax.Array) -> list[jax.Array]:
        return [jax.grad(lambda x, form=form: jnp.sum(moe(params, config, x, form) ** 2))(x) for form in FORMS]

    (expected, *others), (off, *_) = gradients(params, x), tolerance(gradients, params, x)
    assert np.isfinite(expected).all()
    assert expected.any()
    for got in others:
        assert_same(got, expected, off)


def test_other_routings_compile_nothing() -> None:
    config = config_of("deepseek_v3")
    params, compute = params_of(config), in_every_form(config)
    same = jnp.broadcast_to(tokens(1), (70, D_MODEL))  # all tokens to the same experts
    for x in (tokens(70), tokens(70, seed=2), same, jnp.zeros_like(same)):
        first, *others = compute(params, x)
        off, *_ = tolerance(compute, params, x)
        for y in others:
            assert_same(y, first, off)
    assert compute._cache_size() == 1  # type: ignore[attr-defined]


def test_checkpoint_names() -> None:
    def names(family: str) -> dict[str, tuple[int, ...]]:
        return {name: spec.stored_shape for spec in specs(moe_spec(config_of(family), "l")) for name in spec.names}

    qwen2 = {"l.mlp.gate.weight": (8, 12), "l.mlp.shared_expert_gate.weight": (1, 12)}
    for prefix, d_ff in [(f"l.mlp.experts.{e}", 10) for e in range(8)] + [("l.mlp.shared_expert", 6)]:
        qwen2 |= {f"{prefix}.{name}_proj.weight": (d_ff, 12) for name in ("gate", "up")}
        qwen2[f"{prefix}.down_proj.weight"] = (12, d_ff)
    assert names("qwen2_moe") == qwen2
    assert names("gpt_oss") == {
        "l.mlp.router.weight": (8, 12),
        "l.mlp.router.bias": (8,),
        "l.mlp.experts.gate_up_proj": (8, 12, 20),
        "l.mlp.experts.gate_up_proj_bias": (8, 20),
        "l.mlp.experts.down_proj": (8, 10, 12),
        "l.mlp.experts.down_proj_bias": (8, 12),
    }
    assert {"l.mlp.gate.e_score_correction_bias", "l.mlp.shared_experts.up_proj.weight"} < names("deepseek_v3").keys()
