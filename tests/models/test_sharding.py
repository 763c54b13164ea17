"""Models over a mesh: the same numbers as on one device, nothing whole that can be cut, and refusals with the sizes."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import bailing
import carried
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from experts import FORMS
from jax.sharding import NamedSharding, PartitionSpec
from parity import RAWS, mechanisms
from rounding import assert_same, tolerance
from spread import CASES, DENSE, MODELS, OF_ONE_CASE, head_of, mesh_of, spread_target, target_of

from specserve import mesh as meshes
from specserve.checkpoints import load
from specserve.checkpoints.load import load_target
from specserve.drafters.eagle3.drafter import Eagle3
from specserve.drafters.language_model.drafter import LanguageModel
from specserve.errors import ConfigError
from specserve.kernels.matmul import QuantizedMatrix, quantize
from specserve.kernels.rowwise import Activation
from specserve.mesh import is_on_one_device, made_for, on_mesh, shardings, whole
from specserve.models import sharding
from specserve.models.config import Experts, ModelConfig, Names
from specserve.models.families.table import model_config
from specserve.models.moe import Moe, by_blocks, moe, moe_spec
from specserve.models.params import init_params, num_params, specs
from specserve.models.sharding import place_target, spread_kv_heads
from specserve.models.target import TargetParams, forward, logits, target_spec
from specserve.serve.programs.placement import bytes_per_token

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

    got, alone = jax.jit(on_mesh(mesh, run))(spread_target(model, mesh).params), jax.jit(run)
    assert_same(got, alone(target.params), tolerance(alone, target.params))


def test_every_mechanism_is_spread_and_started_again() -> None:
    """By one of these models, which the laws of kept programs take too."""
    assert mechanisms((RAWS | bailing.CASES).values()) <= mechanisms((MODELS | OF_ONE_CASE).values())


CUT = ["tensor=4", "expert=4", "data=2,tensor=2,expert=2"]


@pytest.mark.parametrize("text", [CUT[-1], *(pytest.param(text, marks=pytest.mark.slow) for text in CUT[:-1])])
def test_experts_in_parts_add_up(text: str, rng: np.random.Generator) -> None:
    """In every form, with biases, plain and in 8 bits, with scales that the parts keep whole and not: each of these in
    one of the forms, since it is where the scales lie that cuts them."""
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
    pairs = [*((0, form) for form in FORMS), *enumerate(FORMS, start=1)]
    x = jnp.asarray(rng.normal(size=(6, 8)), jnp.float32)

    def run(variants: list[Moe]) -> list[jax.Array]:
        return [moe(variants[i], config, x, form) for i, form in pairs]

    alone = jax.jit(run)
    places = shardings(spec, mesh)
    spread = [
        jax.tree.map(_put, places, variant, is_leaf=lambda node: isinstance(node, NamedSharding))
        for variant in variants
    ]
    program = jax.jit(on_mesh(mesh, run)).lower(spread).compile()
    assert_same(program(spread), alone(variants), tolerance(alone, variants))


def test_each_device_has_its_own_tokens_and_those_that_chose_its_experts(rng: np.random.Generator) -> None:
    """Devices with different experts exchange theirs. A kernel can be called there, unless blocks of scales are torn.
    Tokens that data x expert does not divide are cut along data alone, or are whole everywhere."""
    mesh, seen = mesh_of("data=2,tensor=2,expert=2"), []
    config = ModelConfig("test", 8, 8, 1, 1, 1, 8, 8, 8, experts=Experts(8, 2, 24))
    params: Moe = init_params(moe_spec(config, ""), jax.random.key(1), "float32")
    x = jnp.asarray(rng.normal(size=(4, 3, 8)), jnp.float32)

    def form(params: Moe, activation: Activation, rows: jax.Array, *routing: jax.Array) -> jax.Array:
        seen.append((len(rows), is_on_one_device()))
        return by_blocks(params, activation, rows, *routing)

    def run(params: Moe) -> list[jax.Array]:
        return [moe(params, config, x[:batch], form) for batch in (4, 2, 1)]

    got, alone = jax.jit(on_mesh(mesh, run))(jax.device_put(params, whole(mesh))), jax.jit(run)
    jax.eval_shape(on_mesh(mesh, run), _in_8_bits(params, 8))
    assert seen == [(6, True), (3, True), (3, True), (6, False), (3, False), (3, False)]
    assert_same(got, alone(params), tolerance(alone, params))


@pytest.mark.parametrize("text", ["expert=4", pytest.param("data=2,tensor=2,expert=2", marks=pytest.mark.slow)])
def test_no_token_is_dropped_however_many_choose_one_expert(text: str, rng: np.random.Generator) -> None:
    """A router of zeros sends all of them to the first two experts, which one device has."""
    mesh = mesh_of(text)
    config = ModelConfig("test", 8, 8, 1, 1, 1, 8, 8, 8, experts=Experts(8, 2, 24))
    params: Moe = init_params(moe_spec(config, ""), jax.random.key(1), "float32")
    params = dataclasses.replace(params, router=jnp.zeros_like(params.router))
    x = jnp.asarray(rng.normal(size=(4, 3, 8)), jnp.float32)

    def run(params: Moe, x: jax.Array) -> list[jax.Array]:
        return [moe(params, config, x, form) for form in FORMS]

    got = jax.jit(on_mesh(mesh, run))(jax.device_put(params, whole(mesh)), jax.device_put(x, whole(mesh)))
    alone = jax.jit(run)
    assert_same(got, alone(params, x), tolerance(alone, params, x))


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


def test_nothing_that_is_cut_is_ever_whole_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mesh_of("tensor=4,expert=2")
    tiny.write_target(tmp_path, MODELS["experts"], seed=0)
    sent: list[int] = []
    send = jax.device_put

    def count(value: Any, device: Any = None, **options: Any) -> Any:
        sent.append(value.nbytes)
        return send(value, device, **options)

    monkeypatch.setattr(jax, "device_put", count)
    target = load_target(tmp_path, dtype="float32", mesh=mesh)
    all_specs, arrays = specs(target_spec(target.config)), jax.tree.leaves(target.params)
    parts = [{shard.data.nbytes for shard in array.addressable_shards} for array in arrays]
    assert sorted(sent) == sorted(size for sizes in parts for size in sizes for _ in range(8)), "parts alone are sent"
    whole = {spec.name for spec, array in zip(all_specs, arrays, strict=True) if array.sharding.is_fully_replicated}
    whole = {name.removesuffix(".weight").rsplit(".", 1)[-1] for name in whole}
    norms = {"norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"}
    assert whole == {*norms, "gate", "k_proj", "v_proj"}, "of four devices, two would have no KV head"
    for spec, array, sizes in zip(all_specs, arrays, parts, strict=True):
        num_parts = 8 if "experts" in spec.axes else 4
        assert sizes == {array.nbytes if array.sharding.is_fully_replicated else array.nbytes // num_parts}


@pytest.mark.parametrize(
    ("model", "text", "message"),
    [
        ("dense", "tensor=3", "the target has 8 attention heads, which tensor=3 does not divide; .* 1, 2, 4 or 8$"),
        ("dense", "fsdp=5", "the target has 32 channels, which fsdp=5 does not divide; fsdp may be .* 16 or 32$"),
        ("dense", "expert=2", "the target has nothing that expert=2 would spread"),
        ("experts", "expert=3", "has 8 experts, which expert=3 does not divide; expert may be 1, 2, 4 or 8$"),
        ("delta nets", "tensor=8", "has 4 key heads of delta layers, which tensor=8 does not divide; .* 1, 2 or 4$"),
    ],
)
def test_a_mesh_that_does_not_divide_a_target_is_refused(model: str, text: str, message: str) -> None:
    config = target_of(model).config
    with pytest.raises(ConfigError, match=message):
        place_target(config, target_spec(config), mesh_of(text))


def test_weights_larger_than_the_memory_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_target(tmp_path, MODELS["dense"], seed=0)
    spec = target_spec(target_of("dense").config)
    size = num_params(spec) * 4
    monkeypatch.setattr(load, "load_params", lambda *_arguments, **_options: pytest.fail("something was read"))
    monkeypatch.setattr(sharding, "free_memory", lambda _mesh: size - 1)
    message = rf"{size // 4:,} parameters take 0\.0 GB, all of that on one device.*--mesh tensor=N"
    with pytest.raises(ConfigError, match=message):
        load_target(tmp_path, dtype="float32")
    with pytest.raises(pytest.fail.Exception, match="was read"):
        load_target(tmp_path, dtype="bfloat16")
    mesh = mesh_of("tensor=4")
    with pytest.raises(pytest.fail.Exception, match="was read"):
        load_target(tmp_path, dtype="float32", mesh=mesh)
    monkeypatch.setattr(sharding, "free_memory", lambda _mesh: size // 4)  # less than a part: some are whole
    with pytest.raises(ConfigError, match=r"0\.0 GB of that on each device of --mesh tensor=4, where"):
        load_target(tmp_path, dtype="float32", mesh=mesh)
    with pytest.raises(pytest.fail.Exception, match="was read"):
        load_target(tmp_path, dtype="float32", mesh=mesh, quantization="int8")
    held = sharding.held_by_each(spec, "float32", None, "int8")
    in_bytes = sum(each.num_bytes for each in held if each.is_product)
    room = sharding.total_bytes(held) - in_bytes + 0.6 * in_bytes
    monkeypatch.setattr(sharding, "free_memory", lambda _mesh: room)
    for platform in ("gpu", "tpu"):  # where what is served has a kernel for 4 bits
        with made_for(platform):
            for quantization in ("int4", "stored"):
                with pytest.raises(pytest.fail.Exception, match="was read"):
                    load_target(tmp_path, dtype="float32", quantization=quantization, is_served=True)
            for how in ({"quantization": "int8", "is_served": True}, {"quantization": "int4"}):
                with pytest.raises(ConfigError, match=r"\(--mesh tensor=N\)$"):
                    load_target(tmp_path, dtype="float32", **how)  # type: ignore[arg-type]


def test_what_a_head_or_a_vocabulary_does_not_divide_is_whole() -> None:
    mesh = mesh_of("tensor=4")
    head = tiny.random_head(target_of("dense").config, seed=1, num_heads=6, d_ff=40, draft_vocab_size=42)
    places = head.drafter.place(mesh)
    assert places.layers[0].attention.q.is_fully_replicated
    assert places.head.is_fully_replicated
    assert places.layers[0].mlp.up == meshes.sharding(mesh, ("embed", "mlp"))
    config = dataclasses.replace(target_of("dense").config, vocab_size=66)
    assert place_target(config, target_spec(config), mesh).embedding.is_fully_replicated


BY_LAYER = DENSE | carried.MIMO_V2 | {"num_attention_heads": 8, "num_key_value_heads": 2}  # or four


def test_a_language_model_that_drafts_is_cut_by_heads_in_every_layer() -> None:
    """As a target is, though its layers have unlike numbers of them; and it is whole where a mesh divides none."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_global_key_value_heads": 2, "head_dim": 8}
    raw = MODELS["keys shared"] | heads | {"attention_k_eq_v": True}
    config = model_config(raw, dtype="float32")
    assert {config.of(config.kind(i)).num_kv_heads for i in range(4)} == {2, 4}
    for text in ("tensor=2", "tensor=4", "tensor=8"):
        mesh = mesh_of(text)
        places = LanguageModel(config).place(mesh)
        assert jax.tree.leaves(places) == jax.tree.leaves(place_target(config, target_spec(config), mesh))
        keys = {layer.attention.k.is_fully_replicated for layer in places.layers if layer.attention.k is not None}
        assert keys == {text != "tensor=2"}
        assert not places.layers[0].attention.q.is_fully_replicated
    odd = head_of("dense", "language-model").drafter  # of three heads
    attention = odd.place(mesh_of("tensor=2")).layers[0].attention
    assert attention.q.is_fully_replicated
    assert attention.o.is_fully_replicated


@pytest.mark.parametrize(
    ("raw", "share"),
    [(DENSE, 1 / 2), (DENSE | {"model_type": "qwen2"}, 1 / 2), (bailing.CASES["ling-1"], 1 / 2), (BY_LAYER, 2 / 3)],
    ids=str,
)
def test_each_device_has_a_kv_head_of_its_own(
    tmp_path: Path, raw: dict[str, Any], share: float, rng: np.random.Generator
) -> None:
    """Where they are fewer than devices: read from tensors of their own or of one for all, with biases and norms. The
    numbers are those of one device, and a token takes half of the memory that it takes where both heads are whole, in
    the layers that have two."""
    mesh = mesh_of("tensor=4")
    tiny.write_target(tmp_path, raw, seed=3)
    target = load_target(tmp_path, dtype="float32")
    served = load_target(tmp_path, dtype="float32", mesh=mesh, is_served=True)
    assert (target.config.num_kv_heads, served.config.num_kv_heads, served.config.kv_repeats) == (2, 4, 2)
    assert served.config.stored == target.config
    assert not any(layer.attention.k.is_fully_replicated for layer in served.params.layers)
    assert bytes_per_token(served.config, None, mesh) == bytes_per_token(target.config, None, mesh) * share
    token_ids = jnp.asarray(rng.integers(0, 64, (2, 12)), jnp.int32)

    def run(config: ModelConfig, params: TargetParams) -> jax.Array:
        position_ids = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), (2, 12))
        return logits(params, config, forward(params, config, token_ids, position_ids, tiny.causal(12)).hidden_states)

    got = jax.jit(on_mesh(mesh, functools.partial(run, served.config)))(served.params)
    alone = jax.jit(functools.partial(run, target.config))
    assert_same(got, alone(target.params), tolerance(alone, target.params))


def test_kv_heads_stay_where_repeating_them_would_not_help() -> None:
    dense = target_of("dense").config  # eight heads, two KV heads
    for config, text in (
        (dense, "tensor=2"),
        (dense, "data=8"),
        (dataclasses.replace(dense, num_kv_heads=3), "tensor=4"),
        (dataclasses.replace(dense, num_heads=6), "tensor=4"),
        (dataclasses.replace(dense, qk_norm="all"), "tensor=4"),
        (target_of("latents").config, "tensor=4"),
    ):
        assert spread_kv_heads(config, mesh_of(text)) == config


def test_pages_are_cut_by_kv_heads() -> None:
    per_token = 2 * 2 * 8 * 4  # keys and values of two heads of eight float32 numbers, for each layer
    dense, latents = target_of("dense").config, target_of("latents").config
    draft = Eagle3(tiny.draft_config(dense))
    assert bytes_per_token(dense, draft) == 3 * per_token
    assert bytes_per_token(dense, draft, mesh_of("tensor=2,data=4")) == 3 * per_token / 2
    assert bytes_per_token(dense, None, mesh_of("tensor=4")) == 2 * per_token, "two heads on four devices"
    assert bytes_per_token(latents, None, mesh_of("tensor=4")) == 2 * (16 + 4) * 4
