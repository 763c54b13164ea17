"""The experts' kernels for GPUs and TPUs: interpreted on any machine, lowered for theirs, compiled where libtpu is
installed (`-m libtpu`, no device needed), and run where there is a device (`-m gpu`, `-m tpu`)."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding
from rounding import UNIT, assert_same, assert_within, tolerance

from specserve.kernels import grouped_gpu, grouped_tpu, native, nibbles
from specserve.kernels.grouped import TPU_ROWS, Matrices, cost, expected_experts
from specserve.kernels.matmul import QuantizedMatrix, experts_in_nibbles, quantize
from specserve.kernels.nibbles import NibbleMatrix, WordMatrix
from specserve.mesh import MESH_AXES, made_for, make_mesh, on_mesh, sharding
from specserve.models.config import Experts, ModelConfig
from specserve.models.moe import (
    Form,
    Moe,
    all_experts,
    best_form,
    by_blocks,
    by_kernel_gpu,
    by_kernel_tpu,
    choose_form,
    experts_computed,
    in_four_bits,
    moe,
    moe_spec,
    sorted_by_expert,
)
from specserve.models.params import abstract, init_params

TOKENS, EXPERTS, TOP_K, D_FF = 21, 5, 2, 200  # of which nothing divides the kernels' tiles
KINDS = {"biases": 32, "int8": 128, "fp8 by block": 144, "offsets": 96}  # d_model: TPUs have down turned, or the others
FITTING = {"4 bits": 192}  # d_ff that a kernel for 4 bits takes, as it does not take D_FF
D_MODEL = 128
ACTIVATIONS = {"biases": "clamped_swiglu", "int8": "silu", "fp8 by block": "gelu_tanh"}


class Mlps(NamedTuple):
    gate: Any
    up: Any
    down: Any
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None


def mlps_of(kind: str) -> Mlps:
    rng, d_model = np.random.default_rng(0), KINDS.get(kind, D_MODEL)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    d_ff = FITTING.get(kind, D_FF)
    gate, up, down = draw(EXPERTS, d_model, d_ff), draw(EXPERTS, d_model, d_ff), draw(EXPERTS, d_ff, d_model)
    if kind == "offsets":
        return Mlps(*(quantize(weight, "int4") for weight in (gate, up, down)))
    if kind == "biases" or kind in FITTING:
        return Mlps(gate, up, down, draw(EXPERTS, d_ff), draw(EXPERTS, d_ff), draw(EXPERTS, d_model))
    if kind == "int8":
        return Mlps(*(quantize(weight, "int8") for weight in (gate, up, down)))
    return Mlps(*(by_block(weight, 16) for weight in (gate, up, down)))


def by_block(weight: jax.Array, size: int) -> QuantizedMatrix:
    """Scales for so many inputs each; the last block of a matrix may be shorter."""
    blocks = [quantize(weight[:, i : i + size], "fp8") for i in range(0, weight.shape[1], size)]
    values, scales = (jnp.concatenate([getattr(b, name) for b in blocks], 1) for name in ("values", "scale"))
    return QuantizedMatrix(values, scales, size)


def poisoned(mlps: Mlps, is_chosen: np.ndarray) -> Mlps:
    """NaN in every matrix and bias of experts that are not chosen; quantised ones have it in their scales."""

    def poison(leaf: jax.Array, of: Any = jnp.nan) -> jax.Array:
        return jnp.where(is_chosen.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, of)

    def matrix(weight: Any) -> Any:
        if isinstance(weight, NibbleMatrix | WordMatrix):
            return dataclasses.replace(weight, scales=poison(weight.scales, jnp.uint32(0x7FC07FC0)))
        if isinstance(weight, QuantizedMatrix):
            offset = None if weight.offset is None else poison(weight.offset)
            return dataclasses.replace(weight, scale=poison(weight.scale), offset=offset)
        return poison(weight)

    return jax.tree.map(matrix, mlps, is_leaf=is_matrix)


def is_matrix(node: Any) -> bool:
    return isinstance(node, NibbleMatrix | QuantizedMatrix | WordMatrix)


def routing(seed: int, allowed: set[int]) -> tuple[np.ndarray, np.ndarray]:
    """Each token chooses different experts, of those that are allowed or elsewhere."""
    rng = np.random.default_rng(seed)
    choices = [*allowed, *[EXPERTS] * TOP_K]
    ids = np.array([rng.permutation(choices)[:TOP_K] for _ in range(TOKENS)], np.int32)
    return ids, rng.random((TOKENS, TOP_K)).astype(np.float32)


def loop(
    mlps: Mlps, activation: str, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, unit: float
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the sum one token and one expert at a time in float64, and the most by which rounding can move it: every
    sum of k terms by gamma_k of their magnitudes (Higham, section 3.1), activations, whose slope is below 1.13, by
    what their inputs are off and 16 roundings of their own, and hidden channels and the result once by `unit`, that
    of x's dtype."""

    def gamma(k: int) -> float:
        return (k + 3) * UNIT / (1 - (k + 3) * UNIT)  # and a scale before, a scale after, a bias

    wide: Any = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), dense(mlps))
    terms: Any = Mlps(*map(added, mlps[:3]))
    out, off = np.zeros_like(x), np.zeros_like(x)
    for t, k in itertools.product(range(len(x)), range(ids.shape[1])):
        if (e := ids[t, k]) == EXPERTS:
            continue
        zero = np.zeros(1)
        biases = [zero if b is None else b[e] for b in (wide.gate_bias, wide.up_bias, wide.down_bias)]
        gate, up = x[t] @ wide.gate[e] + biases[0], x[t] @ wide.up[e] + biases[1]
        off_gate = gamma(x.shape[1]) * (np.abs(x[t]) @ terms.gate[e] + np.abs(biases[0]))
        off_up = gamma(x.shape[1]) * (np.abs(x[t]) @ terms.up[e] + np.abs(biases[1]))
        hidden = activate(gate, up, activation)
        off_hidden = (1.13 * off_gate + 16 * UNIT * np.abs(gate)) * (np.abs(up) + 1) + np.abs(gate) * off_up
        off_hidden += unit * np.abs(hidden)
        y = hidden @ wide.down[e] + biases[2]
        size = np.abs(hidden) @ terms.down[e] + np.abs(biases[2])
        out[t] += weights[t, k] * y
        off[t] += weights[t, k] * (off_hidden @ np.abs(wide.down[e]) + gamma(len(hidden) + TOP_K) * size)
    return out, 1.01 * off + unit * np.abs(out)  # second-order terms


def dense(mlps: Mlps) -> Mlps:
    def wide(weight: Matrices) -> Any:
        if isinstance(weight, NibbleMatrix | WordMatrix):
            return nibbles.restore(weight)
        if not isinstance(weight, QuantizedMatrix):
            return weight
        plain = np.asarray(weight.values, np.float64) * of_inputs(weight, weight.scale)
        return plain if weight.offset is None else plain + of_inputs(weight, weight.offset)

    return Mlps(*map(wide, mlps[:3]), *mlps[3:])


def of_inputs(weight: QuantizedMatrix, of_blocks: jax.Array) -> np.ndarray:
    return np.repeat(np.asarray(of_blocks, np.float64), weight.block, axis=1)[:, : weight.shape[1]]


def added(weight: Matrices) -> np.ndarray:
    """The magnitudes of what a kernel adds up for each weight: those of values and offsets apart, and on a TPU codes
    that 16 is added to (`nibbles_tpu`)."""
    if isinstance(weight, WordMatrix):
        own = weight.scales[:, :, : weight.chunk // weight.block, weight.columns()]
        sizes = [np.abs(np.asarray(each, np.float64)) for each in nibbles.halves(own)]
        of_block = 47 * sizes[0] + sizes[1] * (sizes[0] if weight.numbers == "int4" else 1)
        return np.repeat(of_block, weight.block, axis=-2).reshape(weight.shape)
    if isinstance(weight, QuantizedMatrix) and weight.offset is not None:
        return np.abs(of_inputs(weight, weight.scale)) * np.abs(np.asarray(weight.values, np.float64)) + np.abs(
            of_inputs(weight, weight.offset)
        )
    return np.abs(np.asarray(dense(Mlps(weight, weight, weight)).gate, np.float64))


def activate(gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
    if activation == "clamped_swiglu":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    if activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


INTERPRETED = {
    "gpu": partial(grouped_gpu.expert_mlps, interpret=True),
    "tpu": partial(grouped_tpu.expert_mlps, interpret=pltpu.InterpretParams(detect_races=True)),
}


def check(
    run: Callable[..., jax.Array], kind: str, dtype: Any, seed: int, allowed: set[int], given: Mlps | None = None
) -> None:
    """The kernel computes what the loop does, whatever is chosen, and what nobody chose is not in the result."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((TOKENS, KINDS.get(kind, D_MODEL))), dtype)
    mlps = jax.tree.map(lambda leaf: leaf.astype(dtype) if kind == "biases" else leaf, given or mlps_of(kind))
    ids, weights = routing(seed, allowed)
    is_chosen = (ids[:, :, None] == np.arange(EXPERTS)).any((0, 1))
    activation = ACTIVATIONS.get(kind, "silu")
    got = run(x, ids, weights, poisoned(mlps, is_chosen), activation)
    assert got.dtype == x.dtype
    unit = UNIT if dtype == jnp.float32 else 2.0**-8
    expected, bound = loop(mlps, activation, np.asarray(x, np.float64), ids, weights, unit)
    assert_within(got, expected, bound, f"{kind}, {seed}, {allowed}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("platform", INTERPRETED)
def test_the_sum_is_that_of_a_loop(
    platform: str, kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Some experts chosen by all tokens, some by none, and tokens whose experts are elsewhere. Memory of the TPU's
    interpreter is NaN until it is written, and its races are reported."""
    monkeypatch.setattr(grouped_tpu, "TILE_BYTES", 0)  # tiles of `LANES` channels, of which the last overhangs
    run = jax.jit(INTERPRETED[platform], static_argnums=4)

    @settings(max_examples=4)
    @example(0, set())
    @example(1, {3})
    @given(st.integers(0, 99), st.sets(st.integers(0, EXPERTS - 1)))
    def law(seed: int, allowed: set[int]) -> None:
        check(run, kind, jnp.bfloat16 if kind == "int8" else jnp.float32, seed, allowed)

    law()
    assert "race" not in "".join(capfd.readouterr()).lower()


@pytest.mark.parametrize("platform", INTERPRETED)
def test_experts_of_4_bits_are_multiplied_as_they_are_held(platform: str) -> None:
    """All of a layer's matrices, or none of them where the kernel does not take one."""
    wide, odd = mlps_of("4 bits"), mlps_of("biases")
    with made_for(platform):
        weights = Mlps(*experts_in_nibbles([quantize(weight, "int4") for weight in wide[:3]]))
        whole = [quantize(weight, "int4") for weight in (*wide[:2], odd.down)]
        assert experts_in_nibbles(whole) is whole
    assert all(isinstance(each, NibbleMatrix if platform == "gpu" else WordMatrix) for each in weights[:3])
    layer = dataclasses.replace(PLAIN, gate=weights.gate, up=weights.up, down=weights.down)
    assert best_form(layer, MANY, TOKENS) is in_four_bits
    biased = weights._replace(**{name: wide[i + 3] for i, name in enumerate(Mlps._fields[3:])})
    for held_so in (weights, biased):
        check(jax.jit(in_four_bits_of, static_argnums=4), "4 bits", jnp.float32, 2, {0, 3, 4}, held_so)


@pytest.mark.parametrize("cut", [{"tensor": 2}, {"expert": 2}, {"data": 2, "expert": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("platform", INTERPRETED)
def test_experts_of_4_bits_are_spread_over_a_mesh(platform: str, cut: dict[str, int]) -> None:
    """Each device has the part of the codes that its experts and channels have, and multiplies by it alone."""
    experts, mesh = Experts(4, 2, 128), make_mesh(**cut)
    config = ModelConfig("test", 8, 64, 1, 1, 1, 64, 8, 64, experts=experts, dtype="float32")
    spec = dataclasses.replace(moe_spec(config, "layer"), shared=None)
    plain: Any = init_params(spec, jax.random.key(0), "float32")
    names = ("gate", "up", "down")
    with made_for(platform):
        places = [sharding(mesh, getattr(spec, name).axes) for name in names]
        spread = [
            jax.device_put(quantize(getattr(plain, name), "int4"), place)
            for name, place in zip(names, places, strict=True)
        ]
        packed = dataclasses.replace(plain, **dict(zip(names, experts_in_nibbles(spread), strict=True)))
    for name in names:
        weight = getattr(packed, name)
        assert isinstance(weight, NibbleMatrix | WordMatrix)
        parts = cut.get("tensor", 1) * cut.get("expert", 1)
        assert weight.codes.addressable_shards[0].data.size * parts == weight.codes.size
    whole = dataclasses.replace(plain, **{name: nibbles.restore(getattr(packed, name)) for name in names})
    whole = jax.device_get(whole)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4, 3, 64)), jnp.float32)
    got = jax.jit(on_mesh(mesh, lambda params, x: moe(params, config, x)))(packed, x)
    run = jax.jit(lambda params, x: moe(params, config, x))
    expected = run(whole, x)
    # larger numbers than the weights are added up on a TPU
    larger = max(
        float(np.sqrt(np.mean(added(getattr(packed, n)) ** 2) / np.mean(getattr(whole, n) ** 2))) for n in names
    )
    assert_same(got, expected, larger * tolerance(run, whole, x))


def in_four_bits_of(x: Any, ids: Any, weights: Any, mlps: Mlps, activation: Any) -> jax.Array:
    return in_four_bits(mlps, activation, x, ids, weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(grouped_gpu.expert_mlps, marks=pytest.mark.gpu),
        pytest.param(grouped_tpu.expert_mlps, marks=pytest.mark.tpu),
    ],
)
def test_compiled_it_is_the_same(kernel: Callable[..., jax.Array], kind: str) -> None:
    run = jax.jit(kernel, static_argnums=4)
    for seed, allowed in enumerate([set(), {3}, set(range(EXPERTS)), {0, 1, 4}]):
        check(run, kind, jnp.bfloat16, seed, allowed)


def device_mesh(platform: str) -> Any:
    """A mesh of one device that this machine need not have."""
    kind = {"gpu": "NVIDIA H100 80GB HBM3", "tpu": "TPU v5 lite", "cpu": "cpu"}[platform]
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    axes = (1,) * len(MESH_AXES)
    return AbstractMesh(axes, MESH_AXES, axis_types=(AxisType.Auto,) * len(axes), abstract_device=device)


MANY = Experts(64, 4, 832)
CONFIG = ModelConfig("test", 8, 512, 1, 1, 1, 512, 8, 64, experts=MANY, dtype="bfloat16")


def quantized(params: Moe, to: str, block: int = 0) -> Moe:
    """The shapes of a layer whose experts are in 8 bits."""
    dtype = jnp.int8 if to == "int8" else jnp.float8_e4m3fn

    def cut(weight: Any) -> QuantizedMatrix:
        n, d_in, d_out = weight.shape
        size = block or d_in
        scale = jax.ShapeDtypeStruct((n, -(-d_in // size), d_out), jnp.float32)
        return QuantizedMatrix(jax.ShapeDtypeStruct(weight.shape, dtype), scale, size)

    return dataclasses.replace(params, gate=cut(params.gate), up=cut(params.up), down=cut(params.down))


PLAIN: Moe = abstract(moe_spec(CONFIG, "layer"), "bfloat16")
LAYERS = [PLAIN, quantized(PLAIN, "int8"), quantized(PLAIN, "fp8", 64)]
PROGRAMS = {"gpu": ("cuda", ("experts_hidden", "experts_outputs")), "tpu": ("tpu", ("expert_mlps",))}


@pytest.mark.parametrize("platform", PROGRAMS)
def test_a_layer_calls_the_kernels_of_the_platform_that_it_is_lowered_for(platform: str) -> None:
    """On a machine that has only a CPU."""
    target, names = PROGRAMS[platform]
    targets = ("__gpu$xla.gpu.triton", "triton_kernel_call_ffi", "tpu_custom_call")
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in targets]
    mesh = device_mesh(platform)

    def run(layers: list[Moe], x: jax.Array) -> list[jax.Array]:
        return [moe(layer, CONFIG, x) for layer in layers]

    x = jax.ShapeDtypeStruct((1, 7, CONFIG.d_model), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh), native.left_out():
        assert best_form(PLAIN, MANY, 7) is all_experts
    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.export.export(jax.jit(run), platforms=[target], disabled_checks=checks)(LAYERS, x)
    text = program.mlir_module()
    for name in names:
        assert text.count(name) >= len(LAYERS), name


@pytest.mark.libtpu
@pytest.mark.parametrize("generation", ["v4:2x2x1", "v5e:2x2", "v6e:2x2", "tpu7x:2x2x1"])
def test_layers_compile_for_tpus_without_a_copy_of_their_weights(
    generation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the compiler of real devices, which need not be there."""
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # or libtpu asks the network which device it has
    place = SingleDeviceSharding(topologies.get_topology_desc(generation, "tpu").devices[0])
    for layer in LAYERS:
        shapes = layer, jax.ShapeDtypeStruct((1, TPU_ROWS, CONFIG.d_model), jnp.bfloat16)
        given = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes)
        with jax.sharding.use_abstract_mesh(device_mesh("tpu")):
            program = jax.jit(lambda layer, x: moe(layer, CONFIG, x)).lower(*given).compile()
        assert program.memory_analysis().temp_size_in_bytes < math.prod(layer.down.shape) // 2


@pytest.mark.parametrize(
    ("form", "layers"), [(by_kernel_gpu, LAYERS), (by_kernel_tpu, LAYERS), (sorted_by_expert, LAYERS[:2])]
)
def test_quantised_weights_are_not_widened_in_memory(form: Form, layers: list[Moe]) -> None:
    for layer in layers[1:]:
        x = jax.ShapeDtypeStruct((32, CONFIG.d_model), jnp.bfloat16)
        ids, weights = (jax.ShapeDtypeStruct((32, 4), dtype) for dtype in (jnp.int32, jnp.float32))
        program = jax.make_jaxpr(lambda *args: form(*args[:1], "silu", *args[1:]))(layer, x, ids, weights)
        made: list[Any] = [var.aval for eqn in program.eqns for var in eqn.outvars]
        assert max(aval.size for aval in made if aval.dtype.itemsize > 1) < math.prod(layer.down.shape)


def test_the_form_follows_the_platform_and_so_do_the_operations() -> None:
    few, many = TPU_ROWS, TPU_ROWS + 1
    experts, half = Experts(128, 8, 768), Experts(8, 4, 768)
    rule = [
        (experts, few, "cpu", True, by_blocks, 8),
        (half, few, "cpu", True, all_experts, 8),
        (experts, few, "gpu", True, by_kernel_gpu, 8),
        (experts, many, "gpu", True, by_kernel_gpu, 8),
        (experts, few, "gpu", False, all_experts, None),
        (experts, 1000, "gpu", False, by_blocks, None),
        (experts, few, "tpu", True, by_kernel_tpu, expected_experts(128, 8, few)),
        (experts, many, "tpu", True, sorted_by_expert, 8),
        (experts, few, "tpu", False, all_experts, None),
        (experts, 1000, "tpu", False, sorted_by_expert, None),
    ]
    for sizes, tokens, platform, has_kernel, form, computed in rule:
        assert choose_form(sizes, tokens, platform, has_kernel=has_kernel) is form
        assert computed is None or experts_computed(sizes, tokens, platform) == computed


def test_a_call_is_expected_to_read_the_experts_that_a_routing_chooses_on_average() -> None:
    """Over all ways in which three tokens can choose two of four experts each."""
    choices = list(itertools.combinations(range(4), 2))
    distinct = [len(set().union(*each)) for each in itertools.product(choices, repeat=3)]
    assert expected_experts(4, 2, 3) == pytest.approx(np.mean(distinct), rel=1e-12)
    d_model = KINDS["int8"]
    counts = cost(mlps_of("int8"), TOP_K, jax.ShapeDtypeStruct((3, d_model), jnp.bfloat16))
    of_expert = 3 * d_model * D_FF + 4 * (2 * D_FF + d_model)
    assert counts.num_bytes == round(expected_experts(EXPERTS, TOP_K, 3) * of_expert + 3 * d_model * (2 + 4))
    assert counts.flops == 2 * 3 * TOP_K * 3 * d_model * D_FF
