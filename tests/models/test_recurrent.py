"""Recurrent layers give every token what running its path one token at a time gives, however the tokens come."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_recurrent
import pytest
import tiny
from rounding import SHARE, assert_same, assert_within, tolerance

from specserve.drafters.speculation import MAX_NODES
from specserve.kernels import reference
from specserve.kernels.recurrence import BLOCK, MAX_TREE, recur
from specserve.kernels.rows import Documents
from specserve.models.config import RECURRENT, LayerKind, ModelConfig
from specserve.models.context import Context
from specserve.models.families.table import model_config
from specserve.models.mixers import recurrent
from specserve.models.mixers.delta import DeltaNet
from specserve.models.mixers.lightning import slopes
from specserve.models.mixers.mamba import Mamba
from specserve.models.mixers.recurrent import New, Recurrent, State
from specserve.models.params import ParamSpec, abstract, is_spec, specs
from specserve.models.rope import rope_tables
from specserve.models.target import TargetParams, forward, target_spec

BASE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
QWEN = BASE | {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
KIMI = BASE | {
    "model_type": "bailing_hybrid",
    "num_hidden_layers": 6,
    "layer_group_size": 3,
    "head_dim": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "short_conv_kernel_size": 3,
    "kda_lower_bound": -5.0,
    "n_group": 2,
    "topk_group": 1,
}
LIGHTNING = BASE | {
    "model_type": "bailing_moe_linear",
    "num_hidden_layers": 7,
    "layer_group_size": 3,
    "group_norm_size": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "use_qkv_bias": True,
    "use_bias": True,
    "first_k_dense_replace": 1,
}
MAMBA = BASE | {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "*MEM",
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_routed_experts": 4,
    "moe_shared_expert_intermediate_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 8,
    "conv_kernel": 3,
}
CONV = BASE | {
    "model_type": "lfm2",
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "full_attn_idxs": [0],
    "conv_L_cache": 4,
}
LOW_RANK = {key: value for key, value in KIMI.items() if key not in ("kda_lower_bound", "layer_group_size")} | {
    "model_type": "kimi_linear",
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 3,
}
FLAVOURS = {"qwen": QWEN, "kimi": KIMI, "lightning": LIGHTNING, "mamba": MAMBA, "conv": CONV}
FIRST = 5  # position of the first token
WIDTH, LONG = 8, MAX_TREE + 3  # few shapes, few programs
assert LONG % BLOCK


@dataclasses.dataclass(frozen=True)
class Layer:
    config: ModelConfig
    kind: LayerKind
    params: Recurrent

    @functools.cached_property
    def run(self) -> Any:
        """(x, depths, mask, seen) -> (out, new), compiled. A token of depth 1 stands at FIRST."""

        return functools.partial(self._mix, self.params)

    @functools.cached_property
    def _mix(self) -> Any:
        def mix(
            params: Any, x: jax.Array, depths: jax.Array, mask: jax.Array, seen: State | None
        ) -> tuple[jax.Array, New]:
            positions = FIRST - 1 + depths
            tables = rope_tables(self.config.rope, self.config.head_dim, positions)
            context = Context(position_ids=positions, mask=mask, rope=tables, local_rope=None)
            return recurrent.mix(params, self.config, self.kind, x, seen, context)

        return jax.jit(mix)

    @functools.cached_property
    def advance(self) -> Any:
        return jax.jit(recurrent.advance)

    @functools.cached_property
    def off(self) -> float:
        """What rounding does to a long prompt's outputs and to the state after it, as a share of the largest number."""
        depths, everything = np.tile(1 + np.arange(LONG, dtype=np.int32), (2, 1)), np.ones((2, LONG), bool)

        def run(params: Any, x: jax.Array) -> tuple[jax.Array, State]:
            out, new = self._mix(params, x, depths, tiny.causal(LONG), self.zero(2))
            return out, self.advance(self.zero(2), new, everything)

        args = self.params, _inputs(2, LONG)
        shares = jax.tree.map(lambda own, leaf: own.max() / np.abs(leaf).max(), tolerance(run, *args), run(*args))
        return max(jax.tree.leaves(shares))

    def zero(self, batch: int) -> State:
        return recurrent.init_state(self.config, self.kind, batch)


@pytest.fixture(params=FLAVOURS, scope="module")
def layer(request: pytest.FixtureRequest) -> Layer:
    return _layer(FLAVOURS[request.param])


def _layer(raw: dict[str, Any], seed: int = 0) -> Layer:
    config = model_config(raw, dtype="float32")
    kind = config.kind(1)
    assert kind.mixer in RECURRENT
    rng = np.random.default_rng(seed)

    def draw(spec: ParamSpec) -> np.ndarray:
        normal = rng.normal(size=spec.shape).astype(np.float32)
        return normal * spec.shape[-2] ** -0.5 if len(spec.shape) > 1 else 1.0 + 0.5 * normal

    params = jax.tree.map(draw, recurrent.spec(config, kind, "l"), is_leaf=is_spec)
    if isinstance(params, DeltaNet | Mamba):  # forgets slowly enough for blocks to matter to the next
        params = dataclasses.replace(params, decay_bias=params.decay_bias - 5)
    return Layer(config, kind, params)


def _inputs(*shape: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(*shape, BASE["hidden_size"])).astype(np.float32)


def _same(layer: Layer, got: Any, expected: Any) -> None:
    """But for rounding, which a state carries on: each leaf to a share of the largest number there is."""
    assert layer.off < SHARE
    jax.tree.map(lambda mine, other: assert_within(mine, other, layer.off * np.abs(other).max()), got, expected)


def _plain(layer: Layer, x: np.ndarray, seen: State, first: int = FIRST) -> tuple[np.ndarray, State]:
    return plain_recurrent.plain(layer.params, layer.config, layer.kind, x, seen, first)


def _row(state: State, b: int) -> State:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[b], state)


def _run_chunks(layer: Layer, x: np.ndarray, lengths: tuple[int, ...], width: int) -> tuple[np.ndarray, State]:
    """Chunk after chunk, each filled up to `width` by tokens that are not kept."""
    batch, start, state, outs = x.shape[0], 0, layer.zero(x.shape[0]), []
    for length in lengths:
        chunk = np.pad(x[:, start : start + length], ((0, 0), (0, width - length), (0, 0)), constant_values=9.0)
        depths = np.tile(start + 1 + np.arange(width, dtype=np.int32), (batch, 1))
        mask = np.repeat(tiny.causal(width), batch if width == WIDTH else 1, axis=0)
        out, new = layer.run(chunk, depths, mask, state)
        state = layer.advance(state, new, np.tile(np.arange(width) < length, (batch, 1)))
        outs.append(out[:, :length])
        start += length
    return np.concatenate(outs, axis=1), state


def _committed(layer: Layer) -> State:
    """Of two sequences of 6 tokens."""
    return _run_chunks(layer, _inputs(2, 6), (6,), WIDTH)[1]


@pytest.mark.parametrize(("lengths", "width"), [((1,) * 10, 1), ((5, 1, 8, 7), WIDTH)], ids=["one by one", "chunks"])
def test_any_chunks_equal_the_plain_loop(layer: Layer, lengths: tuple[int, ...], width: int) -> None:
    x = _inputs(2, sum(lengths))
    out, state = _run_chunks(layer, x, lengths, width)
    for b in range(2):
        expected, end = _plain(layer, x[b], _row(layer.zero(2), b))
        _same(layer, out[b], expected)
        _same(layer, _row(state, b), end)


def test_a_long_prompt_equals_the_plain_loop(layer: Layer) -> None:
    """In blocks, the last of which is not whole, and then again after a committed state."""
    lengths = (LONG, 10)
    x = _inputs(2, sum(lengths))
    out, state = _run_chunks(layer, x, lengths, LONG)
    for b in range(2):
        expected, end = _plain(layer, x[b], _row(layer.zero(2), b))
        _same(layer, out[b], expected)
        _same(layer, _row(state, b), end)


PARENTS = (-1, 0, 0, 1, 2, 2, 3, 5)  # of a tree's nodes: both deep and wide, and no path stands together


def _tree() -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """mask [2, 8, 8], depths [2, 8] after 6 tokens, and every node's path from the root to itself."""
    paths: list[list[int]] = []
    for node, parent in enumerate(PARENTS):
        paths.append([*paths[parent], node] if parent >= 0 else [node])
    mask = np.zeros((2, WIDTH, WIDTH), bool)
    for node, path in enumerate(paths):
        mask[:, node, path] = True
    return mask, 6 + mask.sum(axis=-1, dtype=np.int32), paths


def test_a_tree_is_its_paths_run_alone(layer: Layer) -> None:
    """Every node's output, and the state after any path is accepted; what is not accepted may even be NaN."""
    mask, depths, paths = _tree()
    seen = _committed(layer)
    x = _inputs(2, WIDTH, seed=3)
    out, new = layer.run(x, depths, mask, seen)
    for node, path in enumerate(paths):
        rest = [other for other in range(WIDTH) if other not in path]
        state = layer.advance(
            seen, _accepted(new, path + rest, len(path)), np.tile(np.arange(WIDTH) < len(path), (2, 1))
        )
        for b in range(2):
            expected, end = _plain(layer, x[b, path], _row(seen, b), FIRST + 6)
            _same(layer, out[b, node], expected[-1])
            _same(layer, _row(state, b), end)


def _accepted(new: New, order: list[int], count: int) -> New:
    """The first `count` tokens in this order, and then NaN."""

    def gather(leaf: jax.Array) -> np.ndarray:
        out = np.asarray(leaf)[:, order]
        out[:, count:] = np.nan
        return out

    return jax.tree.map(gather, new)


def test_nothing_accepted_changes_nothing(layer: Layer) -> None:
    mask, depths, _ = _tree()
    seen = _committed(layer)
    _, new = layer.run(_inputs(2, WIDTH, seed=3), depths, mask, seen)
    after = layer.advance(seen, _accepted(new, list(range(WIDTH)), 0), np.zeros((2, WIDTH), bool))
    jax.tree.map(np.testing.assert_array_equal, after, seen)


def test_packed_documents_equal_each_alone(layer: Layer) -> None:
    """One ends where a block does, one is a single token."""
    lengths = (130, 3 * BLOCK - 130, 1, LONG - 3 * BLOCK - 1)
    documents = np.repeat(np.arange(len(lengths)), lengths)
    n = len(documents)
    mask = np.asarray(tiny.causal(n)) & (documents[:, None] == documents)
    x = _inputs(2, n)
    depths = np.repeat(mask.sum(axis=-1, dtype=np.int32), 2, axis=0)
    out, new = layer.run(x, depths, mask, layer.zero(2))
    by_documents = layer.run(x, depths, Documents(jnp.asarray(np.tile(documents, (2, 1)), jnp.int32)), layer.zero(2))
    _same(layer, by_documents, (out, new))
    for b in range(2):
        for d in range(len(lengths)):
            chosen = documents == d
            expected, _ = _plain(layer, x[b, chosen], _row(layer.zero(2), b))
            _same(layer, np.asarray(out)[b, chosen], expected)


@pytest.mark.parametrize("raw", FLAVOURS.values(), ids=FLAVOURS)
def test_no_array_of_packed_rows_has_tokens_times_tokens(raw: dict[str, Any]) -> None:
    config, n = model_config(raw, dtype="float32"), 1024
    ids = jax.ShapeDtypeStruct((1, n), jnp.int32)

    def run(params: TargetParams, ids: jax.Array) -> jax.Array:
        return forward(params, config, ids, ids, Documents(ids)).hidden_states

    program = str(jax.make_jaxpr(run)(abstract(target_spec(config), "float32"), ids))
    largest = max(math.prod(map(int, shape.split(","))) for shape in re.findall(r"\[(\d+(?:,\d+)*)\]", program))
    assert n * config.d_model <= largest < n * n


def test_rows_of_a_batch_have_masks_and_paths_of_their_own(layer: Layer) -> None:
    tree, depths, _ = _tree()
    masks = np.concatenate([tree[:1], tiny.causal(WIDTH)])
    depths[1] = 7 + np.arange(WIDTH)
    seen = _committed(layer)
    x = _inputs(2, WIDTH, seed=3)
    out, new = layer.run(x, depths, masks, seen)
    state = layer.advance(seen, new, np.arange(WIDTH) < np.array([[1], [5]]))
    for b, path, num_kept in ((0, [0, 2, 5, 7], 1), (1, list(range(WIDTH)), 5)):
        expected, _ = _plain(layer, x[b, path], _row(seen, b), FIRST + 6)
        _same(layer, np.asarray(out)[b, path], expected)
        _, end = _plain(layer, x[b, path[:num_kept]], _row(seen, b), FIRST + 6)
        _same(layer, _row(state, b), end)


def test_a_state_is_float32_whatever_the_weights(layer: Layer) -> None:
    low = Layer(dataclasses.replace(layer.config, dtype="bfloat16"), layer.kind, _bfloat16(layer.params))
    x = _bfloat16(_inputs(1, WIDTH))
    out, new = jax.eval_shape(low.run, x, jnp.ones((1, WIDTH), jnp.int32), tiny.causal(WIDTH), None)
    assert out.dtype == jnp.bfloat16
    state = jax.eval_shape(recurrent.advance, low.zero(1), new, jnp.ones((1, WIDTH), bool))
    kinds, before = ([(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)] for tree in (state, low.zero(1)))
    assert kinds == before
    assert state.matrix is None or state.matrix.dtype == jnp.float32


def _bfloat16(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), tree)


@pytest.mark.parametrize("raw", [KIMI | {"kda_safe_gate": False}, LOW_RANK], ids=["ling", "low rank"])
def test_an_unbounded_decay_by_channel_equals_the_plain_loop(raw: dict[str, Any]) -> None:
    layer = _layer(raw)
    x = _inputs(2, WIDTH)
    out, _ = _run_chunks(layer, x, (WIDTH,), WIDTH)
    _same(layer, out[0], _plain(layer, x[0], _row(layer.zero(1), 0))[0])


@pytest.mark.parametrize("n", [MAX_TREE, LONG])
@pytest.mark.parametrize("channels", [1, 8])
def test_no_decay_overflows_or_blurs_its_neighbours(n: int, channels: int) -> None:
    """Tokens that forget everything, between tokens that forget little."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(1, n, 1, 8)).astype(np.float32) for _ in "qk")
    v = rng.normal(size=(1, n, 1, 4)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -(10.0 ** rng.uniform(-3, 1, size=(1, n, 1, channels)))
    log_decay = np.where(rng.random(log_decay.shape) < 0.1, -1e5, log_decay).astype(np.float32)
    beta = rng.random((1, n, 1)).astype(np.float32)
    matrix = rng.normal(size=(1, 1, 8, 4)).astype(np.float32)
    args = q, k, v, log_decay, beta, matrix
    run = jax.jit(lambda *args: recur(*args, tiny.causal(n))[0])
    assert_same(
        run(*args)[0], reference.recur(*(np.asarray(x[0], np.float64) for x in args))[0], tolerance(run, *args)[0]
    )


def test_the_largest_tree_is_one_block() -> None:
    assert MAX_TREE >= 1 + MAX_NODES


def test_lightning_forgets_at_the_published_rates() -> None:
    """To NumPy's default, 1e-7 of float64 numbers."""
    np.testing.assert_allclose(slopes(16), 2.0 ** (-0.5 * np.arange(1, 17)))
    np.testing.assert_allclose(slopes(6), [*(0.25 ** np.arange(1, 5)), 0.5, 0.125])
    config = model_config(LIGHTNING, dtype="float32")
    mixers = [kind.mixer for kind in config.layers]
    assert mixers == ["lightning", "lightning", "attention"] * 2 + ["attention"]
    scales = [kind.slope_scale for kind in config.layers if kind.mixer == "lightning"]
    np.testing.assert_allclose(scales, 1 - np.array([0, 1, 3, 4]) / 6 + 1e-5)


def _stored(spec: ParamSpec, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """One parameter out of a checkpoint's tensors."""
    value = tensors[spec.name]
    assert value.shape == spec.stored_shape
    value = value.swapaxes(-1, -2) if spec.transpose else value
    if spec.part:
        place = np.arange(spec.part.total) % spec.part.period
        value = value[..., (spec.part.start <= place) & (place < spec.part.stop)]
    assert value.shape == spec.shape
    return value


def _check_module(raw: dict[str, Any], module: Any, tensors: dict[str, np.ndarray]) -> None:
    """The layer with the module's weights, over more tokens than its chunks hold."""
    import torch

    layer = _layer(raw)
    tree = recurrent.spec(layer.config, layer.kind, "l")
    assert {spec.name for spec in specs(tree)} == tensors.keys()
    params = jax.tree.map(lambda spec: _stored(spec, tensors), tree, is_leaf=is_spec)
    layer = dataclasses.replace(layer, params=params)
    x = _inputs(2, 70)
    with torch.no_grad():
        expected = module(torch.tensor(x)).numpy()
    assert np.abs(expected).max() > 0.1, "zeros prove nothing"
    out, _ = layer.run(x, np.tile(1 + np.arange(70, dtype=np.int32), (2, 1)), tiny.causal(70), None)
    _same(layer, out, expected)


def _randomized(module: Any) -> dict[str, np.ndarray]:
    """Its tensors, after each was drawn again."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            fan_in = parameter.shape[-1] if parameter.ndim > 1 else 4
            parameter.copy_(torch.randn(parameter.shape) * 2 * fan_in**-0.5)
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


@pytest.mark.oracle
def test_qwen_equals_transformers() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    module = theirs.Qwen3NextGatedDeltaNet(theirs.Qwen3NextConfig(**QWEN), layer_idx=1)
    tensors = {f"l.{name}": value for name, value in _randomized(module).items()}
    _check_module(QWEN, module, tensors)


@pytest.mark.oracle
@pytest.mark.parametrize("is_bounded", [True, False])
def test_kimi_equals_transformers(is_bounded: bool) -> None:
    from transformers.models.bailing_hybrid import modeling_bailing_hybrid as theirs

    raw = KIMI | {"kda_safe_gate": is_bounded}
    module = theirs.BailingHybridDeltaAttention(theirs.BailingHybridConfig(**raw), layer_idx=1)
    tensors = _randomized(module)
    # transformers renames what the published checkpoints hold
    for name, value in zip("qkv", np.split(tensors.pop("conv1d.weight"), 3), strict=True):
        tensors[f"{name}_conv1d.weight"] = value
    renamed = {name.removeprefix("forget_gate."): value for name, value in tensors.items()}
    _check_module(raw, module, {f"l.{name}": value for name, value in renamed.items()})
