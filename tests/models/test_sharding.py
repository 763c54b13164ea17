"""Models over a mesh: the same numbers as on one device, nothing whole that can be cut, and refusals with the sizes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec
from spread import CASES, mesh_of, spread_target, target_of

from specserve.kernels.matmul import QuantizedMatrix, quantize
from specserve.mesh import on_mesh, shardings
from specserve.models.config import Experts, ModelConfig, Names
from specserve.models.moe import FORMS, Moe, moe, moe_spec
from specserve.models.params import init_params
from specserve.models.target import TargetParams, forward, logits

QUICK = {("dense", "tensor=8"), ("experts", "data=2,tensor=2,expert=2"), ("latents", "tensor=4")}


@pytest.mark.parametrize(
    ("model", "text"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_mesh_changes_no_logit(model: str, text: str, rng: np.random.Generator) -> None:
    target, mesh = target_of(model), mesh_of(text)
    token_ids = jnp.asarray(rng.integers(0, 64, (2, 12)), jnp.int32)

    def run(params: TargetParams) -> tuple[jax.Array, jax.Array | None]:
        position_ids = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), (2, 12))
        out = forward(params, target.config, token_ids, position_ids, tiny.causal(12), aux_layers=(0, 1))
        return logits(params, target.config, out.hidden_states), out.aux_hidden_states

    expected = jax.jit(run)(target.params)
    got = jax.jit(on_mesh(mesh, run))(spread_target(model, mesh).params)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


CUT = ["tensor=4", "expert=4", "data=2,tensor=2,expert=2"]


@pytest.mark.parametrize("text", [CUT[-1], *(pytest.param(text, marks=pytest.mark.slow) for text in CUT[:-1])])
def test_experts_in_parts_add_up(text: str, rng: np.random.Generator) -> None:
    """In every form, with biases, plain and in 8 bits, with scales that the parts keep whole and not."""
    mesh = mesh_of(text)
    experts = Experts(8, 2, 24, has_bias=True, renormalize=True, shared_d_ff=8)
    names = Names(gate_up="experts.gate_up_proj", expert_down="experts.down_proj")
    config = ModelConfig("test", 8, 8, 1, 1, 1, 8, 8, 8, experts=experts, names=names)
    spec = moe_spec(config, "")
    params: Moe = init_params(spec, jax.random.key(1), "float32")
    noise = {
        name: jnp.asarray(rng.normal(size=getattr(params, name).shape), jnp.float32)
        for name in ("gate_bias", "up_bias", "down_bias")
    }
    params = dataclasses.replace(params, **noise)
    variants = [params, *(_in_8_bits(params, block) for block in (24, 6, 8))]
    x = jnp.asarray(rng.normal(size=(6, 8)), jnp.float32)

    def run(variants: list[Moe]) -> list[jax.Array]:
        return [moe(variant, config, x, form) for variant in variants for form in FORMS]

    expected = jax.jit(run)(variants)
    places = shardings(spec, mesh)
    spread = [
        jax.tree.map(_put, places, variant, is_leaf=lambda node: isinstance(node, NamedSharding))
        for variant in variants
    ]
    program = jax.jit(on_mesh(mesh, run)).lower(spread).compile()
    for a, b in zip(program(spread), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def _in_8_bits(params: Moe, block: int) -> Moe:
    """Scales of `down` for so many inputs."""

    def cut(weight: Any) -> QuantizedMatrix:
        by_block = weight.reshape(weight.shape[0], -1, block, weight.shape[-1])
        rounded = quantize(by_block, "int8")
        return QuantizedMatrix(rounded.values.reshape(weight.shape), rounded.scale[:, :, 0], block)

    return dataclasses.replace(params, gate=quantize(params.gate, "int8"), down=cut(params.down))


def _put(place: NamedSharding, weight: Any) -> Any:
    if not isinstance(weight, QuantizedMatrix):
        return jax.device_put(weight, place)
    *axes, _, last = place.spec
    scale = jax.device_put(weight.scale, NamedSharding(place.mesh, PartitionSpec(*axes, None, last)))
    return dataclasses.replace(weight, values=jax.device_put(weight.values, place), scale=scale)
