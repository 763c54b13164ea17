"""Every family's forward against another implementation's, however it is called: over a whole prompt, in chunks, token
by token over pages, and over a tree of eight nodes. The other is transformers' torch model, from goldens without torch
(tools/make_goldens.py) or live where torch is, or plain NumPy for families that transformers lacks (bailing.py).
tests/models/test_families.py bounds the differences by what rounding does, tools/parity_table.py shows them.
"""

import ast
import dataclasses
import functools
import importlib.util
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import bailing
import jax
import jax.numpy as jnp
import numpy as np
import rounding
import seeded
import tiny

from specserve.checkpoints.load import Quantization, Target, load_target
from specserve.kernels import matmul, native
from specserve.kernels.check import SHARE_A_UNIT
from specserve.kernels.matmul import INT4_BLOCK, QuantizedMatrix, Rounded, dequantize
from specserve.models.cache import Cache, Prefix
from specserve.models.config import ModelConfig
from specserve.models.families.table import model_config
from specserve.models.params import specs
from specserve.models.served import fuse_for_cpu
from specserve.models.target import TargetParams, TokenGroup, forward, forward_groups, logits, target_spec
from specserve.serve.programs.layouts import make_layouts
from specserve.speculative.tree import ancestor_mask

TESTS = Path(__file__).parents[1]
RAWS = {path.parent.name: json.loads(path.read_text()) for path in sorted(TESTS.glob("goldens/*/config.json"))}
ONE_OF_EACH = tuple({raw["model_type"]: case for case, raw in RAWS.items()}.values())  # family
# These fields of a config are the same to a cache and to fused parameters: they act on each token alone, or are names.
OF_A_TOKEN = {"family", "rope", "local_rope", "experts", "activation", "mlp_bias", "out_norms", "norm_offset"}
OF_A_TOKEN |= {"embedding_scale", "logit_softcap", "names", "layers", "dtype", "layer_input_vocab", "has_layer_scale"}
LENGTH, CHUNK, PAGE_SIZE = 64, 8, 8
PARENTS = (0, 0, 0, 1, 1, 2, 3, 6)  # of a tree's nodes, the root included
PATH = (0, 1, 3, 6, 7)  # that is accepted
TREE_AT = 56
TABLE = np.asarray([[5, 2, 8, 0, 7, 3, 1, 6, 4]], np.int32)  # pages lie in no order
QUICKLY = {"xla_backend_optimization_level": 0}  # compiling is nearly all of the time here


def _choices(config: ModelConfig) -> set[Any]:
    """The features of a target that a cache or fused parameters can get wrong."""
    kinds: set[Any] = set()
    for kind in map(config.kind, range(config.num_layers)):
        sizes = kind.head_dim > 0, kind.num_kv_heads > 0, kind.values_are_keys, kind.kv_from is not None
        kinds.add(("chooses", kind.has_indexer))
        kinds |= {
            (kind.mixer, kind.window > 0, kind.is_local, kind.has_rope, kind.has_growth, kind.has_experts, *sizes)
        }
    return kinds | {("fused", bool(config.names.qkv), bool(config.names.gate_up))} | _flags(config, "")


def mechanisms(raws: Iterable[dict[str, Any]]) -> set[Any]:
    """Whatever models of these configs have that a cache, fused parameters or a mesh can get wrong."""
    configs = [model_config(raw, dtype="float32") for raw in raws]
    parts = [(config, "") for config in configs]
    parts += [(config.kind(i), "kind.") for config in configs for i in range(config.num_layers)]
    found = set[Any]().union(*(_flags(*part) for part in parts))
    return {fact for fact in found if fact[1] and fact[0] != "kind.hashed" and not fact[0].startswith("carried")}


def _flags(config: Any, prefix: str) -> set[Any]:
    found: set[Any] = set()
    for name in {field.name for field in dataclasses.fields(config)} - OF_A_TOKEN:
        value = getattr(config, name)
        is_part = dataclasses.is_dataclass(value)
        found.add((prefix + name, value if isinstance(value, str) else bool(value)))
        found |= _flags(value, f"{prefix}{name}.") if is_part else set()
    return found


def _covering(raws: Mapping[str, dict[str, Any]]) -> tuple[str, ...]:
    """A few cases in which every choice occurs."""
    choices = {case: _choices(model_config(raw, dtype="float32")) for case, raw in raws.items()}
    left, chosen = set[Any]().union(*choices.values()), []
    while left:
        chosen.append(max(choices, key=lambda case: len(choices[case] & left)))
        left -= choices[chosen[-1]]
    return tuple(chosen)


CACHED = _covering(RAWS | bailing.CASES)  # the cases that run over pages and states

Run = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # token_ids [n] -> logits [n, vocab], layers [layer, n, d]
Rounding = tuple[np.ndarray, np.ndarray]  # of logits and of taps, each [LENGTH, 1] or for each number


@dataclass(frozen=True)
class Case:
    target: Target
    fused: TargetParams  # the same parameters as serving has them on CPU
    token_ids: np.ndarray  # [LENGTH]
    kept: np.ndarray  # the positions of which the other's results are known
    logits: np.ndarray  # [kept, vocab]
    layers: np.ndarray  # [layer, kept, d_model], the outputs of all layers but the last
    paths: np.ndarray | None  # [node, vocab]: the tree's nodes, each after its own path alone; None: not known
    rounded: Rounding | None = None  # what serves rounds more than float32 does

    @property
    def config(self) -> ModelConfig:
        return self.target.config.for_length(LENGTH)

    @functools.cached_property
    def tolerance(self) -> Rounding:
        """What rounding explains, in a forward over the prompt."""
        token_ids = jnp.asarray(self.token_ids)
        found = rounding.tolerance(lambda params: whole(params, self.config, token_ids), self.target.params)
        return found if self.rounded is None else jax.tree.map(np.hypot, found, self.rounded)

    def cache(self) -> Cache:
        return Cache.zeros(self.config, num_slots=1, num_pages=TABLE.size, page_size=PAGE_SIZE)


@dataclass(frozen=True)
class Difference:
    """The largest there is."""

    logits: float
    share: float  # of logits and layers, of what rounding explains
    layers: float = 0.0  # of the tapped layers' outputs


def golden_case(case: str, folder: Path) -> Case:
    expected = np.load(TESTS / "goldens" / case / "expected.npz")
    lines = (str(line).split(" ", 1) for line in expected["tensors"])
    shapes = {name: tuple(ast.literal_eval(shape)) for name, shape in lines}
    target = _load(folder, RAWS[case], shapes, seed=0)
    token_ids = seeded.tokens(target.config.vocab_size, seed=0)
    fused = fuse_for_cpu(target.params)
    return Case(target, fused, token_ids, expected["kept"], expected["logits"], expected["layers"], None)


def plain_case(case: str, folder: Path) -> Case:
    """Of plain NumPy: every position and every node."""
    raw, shapes = bailing.CASES[case], bailing.shapes(bailing.CASES[case])
    weights = {name: seeded.draw(name, shape, 0) for name, shape in shapes.items()}
    return _computed(_load(folder, raw, shapes, seed=0), functools.partial(bailing.forward, raw, weights), seed=0)


def live_case(case: str, folder: Path) -> Case:
    """Other weights and tokens than the golden's, every position and every node."""
    target, run, _ = build(case, folder)
    return _computed(target, run, seed=3)


def rounded_case(case: str, to: Rounded, folder: Path) -> Case:
    """Of weights that are rounded at load, as serving has them, against the numbers that they then are, in floats."""
    raw = (RAWS | bailing.CASES)[case]
    all_specs = specs(target_spec(model_config(raw, dtype="float32")))
    shapes = {name: spec.stored_shape for spec in all_specs for name in spec.names}
    has_16_bits = to != "fp8" and native.is_available()
    for seed in itertools.count():  # a choice that hangs on rounding proves nothing
        stored = _load(folder, raw, shapes, seed, to)
        token_ids = seeded.tokens(stored.config.vocab_size, seed)
        config = stored.config.for_length(LENGTH)
        target = dataclasses.replace(stored, params=_in_floats(stored.params))
        alone = whole(target.params, config, token_ids)
        layers = np.asarray(alone[1]).reshape(LENGTH, -1, target.config.d_model).transpose(1, 0, 2)
        rounded = None
        if has_16_bits:
            unit_of = INT4_BLOCK if to == "int4" else SHARE_A_UNIT
            runs = (_in_16_bits(stored.params, config, token_ids, shift, unit_of) for shift in rounding.SHIFTS)
            rounded = rounding.of_one_side(alone, runs)
        served = make_layouts(stored, None).many.target
        found = Case(target, served, token_ids, np.arange(LENGTH), np.asarray(alone[0]), layers, None, rounded)
        if found.tolerance[0].max() < (rounding.SHARE if rounded is None else rounding.SHARE_OF_16_BITS):
            return found
    raise AssertionError


@functools.partial(jax.jit, static_argnums=(1, 4), compiler_options=QUICKLY)
def _in_16_bits(
    params: TargetParams, config: ModelConfig, token_ids: jax.Array, shift: jax.Array, unit_of: int
) -> tuple[jax.Array, jax.Array]:  # as of `whole`
    """The forward whose products with weights in few bits round their inputs to 16, so many of a row by one unit
    (native/digits_isa.h). The numbers are moved by a share of the unit and back, so that each share is another draw."""

    def multiply(x: jax.Array, weight: QuantizedMatrix) -> jax.Array:
        number = min(unit_of, weight.block)
        blocks = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % number)])
        blocks = blocks.reshape(*x.shape[:-1], -1, number)
        unit = 2.0**-14 * jnp.abs(blocks).max(axis=-1, keepdims=True)
        near = (jnp.round(blocks / jnp.where(unit > 0, unit, 1) + shift) - shift) * unit
        rows = near.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
        return matmul.matmul_float32(rows, dequantize(weight, jnp.dtype(jnp.float32)))

    with mock.patch.object(matmul, "_quantized", multiply):
        return forward_whole(params, config, token_ids)


def _in_floats(params: TargetParams) -> TargetParams:
    def widen(leaf: Any) -> Any:
        return dequantize(leaf, jnp.dtype(jnp.float32)) if isinstance(leaf, QuantizedMatrix) else leaf

    return jax.tree.map(widen, params, is_leaf=lambda node: isinstance(node, QuantizedMatrix))


def build(case: str, folder: Path) -> tuple[Target, Run, Any]:
    """Our target and how to run transformers' model of the same weights, which comes last. Needs torch."""
    spec = importlib.util.spec_from_file_location("make_goldens", TESTS.parent / "tools" / "make_goldens.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    model, shapes = tool.build(TESTS / "goldens" / case, seed=3)

    def run(token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        all_logits, layers = tool.compute(model, token_ids[None])
        return all_logits[0], layers[:, 0]

    return _load(folder, RAWS[case], shapes, seed=3), run, model


def _load(
    folder: Path, raw: dict[str, Any], shapes: dict[str, tuple[int, ...]], seed: int, to: Quantization = "none"
) -> Target:
    (folder / "config.json").write_text(json.dumps(raw))
    seeded.write_weights(folder, shapes, seed)
    return load_target(folder, dtype="float32", quantization=to)


def _computed(target: Target, run: Run, seed: int) -> Case:
    token_ids = seeded.tokens(target.config.vocab_size, seed)
    expected, layers = run(token_ids)
    paths = np.stack([run(sequence)[0][-1] for sequence in _sequences(token_ids)])
    return Case(target, fuse_for_cpu(target.params), token_ids, np.arange(LENGTH), expected, layers, paths)


def _sequences(token_ids: np.ndarray) -> list[np.ndarray]:
    """What stands before and at each node of the tree, whose own tokens are the last ones."""
    out = []
    for node in range(len(PARENTS)):
        path = [node]
        while path[0]:
            path.insert(0, PARENTS[path[0]])
        out.append(np.concatenate([token_ids[:TREE_AT], token_ids[TREE_AT:][path]]))
    return out


def forward_whole(
    params: TargetParams,
    config: ModelConfig,
    token_ids: jax.Array,  # [LENGTH]
) -> tuple[jax.Array, jax.Array]:  # logits [LENGTH, vocab], taps [LENGTH, taps * d_model]
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    taps = tuple(range(config.num_layers - 1))
    out = forward(params, config, token_ids[None], positions, tiny.causal(LENGTH), aux_layers=taps)
    assert out.aux_hidden_states is not None
    return logits(params, config, out.hidden_states)[0], out.aux_hidden_states[0]


whole = jax.jit(forward_whole, static_argnums=1, compiler_options=QUICKLY)


@functools.partial(jax.jit, static_argnums=1, compiler_options=QUICKLY)
def _step(
    params: TargetParams,
    config: ModelConfig,
    cache: Cache,
    start: jax.Array,  # [] int32, tokens committed
    token_ids: jax.Array,  # [n]
    depths: jax.Array,  # [n]
    mask: jax.Array,  # [n, n]
    path: jax.Array,  # [n], which of the n to commit, in order
    num_kept: jax.Array,  # [] int32: as many of `path`
) -> tuple[jax.Array, jax.Array, Cache]:  # logits [n, vocab], taps [n, taps * d_model]
    table, slots = jnp.asarray(TABLE), jnp.zeros(1, jnp.int32)
    prefix = Prefix(table, start[None], slots=slots)
    taps = tuple(range(config.num_layers - 1))
    out = forward(
        params, config, token_ids[None], start + depths[None], mask[None], cache=cache, prefix=prefix, aux_layers=taps
    )
    assert out.aux_hidden_states is not None
    rank = jnp.arange(len(token_ids), dtype=jnp.int32)[None]
    new = jax.tree.map(lambda x: x[:, path], out.new)
    cache = cache.write(new, table, start + rank, rank < num_kept, slots)
    return logits(params, config, out.hidden_states)[0], out.aux_hidden_states[0], cache


def prompt(case: Case) -> Difference:
    return _difference(case, *whole(case.target.params, case.config, jnp.asarray(case.token_ids)), LENGTH)


def decode(case: Case, width: int = CHUNK) -> Difference:
    """Every token of the prompt alone, over the pages and states of those before it; the rest of the `width` that the
    program computes is neither seen nor kept."""
    run = functools.partial(_step, case.fused, case.config)
    chain, alone = jnp.arange(width, dtype=jnp.int32), jnp.eye(width, dtype=bool)
    padded = jnp.asarray(np.pad(case.token_ids, (0, width)))
    cache, rows = case.cache(), []
    for i in range(LENGTH):
        got, taps, cache = run(cache, jnp.int32(i), padded[i : i + width], chain, alone, chain, jnp.int32(1))
        rows.append((got[0], taps[0]))
    return _difference(case, np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows]), LENGTH)


def tree(case: Case) -> tuple[Difference, Difference]:
    """Most of the prompt in chunks; then a tree after it, a path of it committed, and what comes after that path."""
    run = functools.partial(_step, case.fused, case.config)
    chain = jnp.arange(CHUNK, dtype=jnp.int32)
    cache, rows = case.cache(), []
    for start in range(0, TREE_AT, CHUNK):
        chunk = jnp.asarray(case.token_ids[start : start + CHUNK])
        got, taps, cache = run(cache, jnp.int32(start), chunk, chain, tiny.causal(CHUNK)[0], chain, jnp.int32(CHUNK))
        rows.append((got, taps))
    chunks = _difference(
        case, np.concatenate([row[0] for row in rows]), np.concatenate([row[1] for row in rows]), TREE_AT
    )

    mask = ancestor_mask(jnp.asarray([PARENTS], jnp.int32), CHUNK)[0]
    depths = jnp.sum(mask, axis=1, dtype=jnp.int32) - 1
    tokens, kept = case.token_ids[TREE_AT:], len(PATH)
    path = jnp.asarray(PATH + (0,) * (CHUNK - kept), jnp.int32)
    got, _, cache = run(cache, jnp.int32(TREE_AT), jnp.asarray(tokens), depths, mask, path, jnp.int32(kept))
    expected = case.paths
    if expected is None:
        expected = np.stack([_alone(case, sequence) for sequence in _sequences(case.token_ids)])
    after = np.concatenate([case.token_ids[:TREE_AT], tokens[list(PATH)], tokens[:1]])
    then, _, _ = run(
        cache, jnp.int32(TREE_AT + kept), jnp.asarray(tokens), chain, tiny.causal(CHUNK)[0], chain, jnp.int32(1)
    )
    off = max(_largest(got, expected), _largest(then[0], _alone(case, after)))
    return chunks, Difference(off, off / float(case.tolerance[0].max()))


def side_by_side(case: Case) -> Difference:
    """Two sequences' next token and another's tree, each over pages, in one run through the layers."""
    run = functools.partial(_step, case.fused, case.config)
    chain = jnp.arange(CHUNK, dtype=jnp.int32)
    cache = case.cache()
    for start in range(0, TREE_AT, CHUNK):
        chunk = jnp.asarray(case.token_ids[start : start + CHUNK])
        cache = run(cache, jnp.int32(start), chunk, chain, tiny.causal(CHUNK)[0], chain, jnp.int32(CHUNK))[2]
    at = jnp.asarray([9, 40], jnp.int32)
    mask = ancestor_mask(jnp.asarray([PARENTS], jnp.int32), CHUNK)
    depths = jnp.sum(mask, axis=2, dtype=jnp.int32) - 1
    token_ids, table = jnp.asarray(case.token_ids), jnp.asarray(TABLE)
    groups = [
        TokenGroup(token_ids[at][:, None], at[:, None], jnp.ones((1, 1, 1), bool), Prefix(jnp.tile(table, (2, 1)), at)),
        TokenGroup(token_ids[None, TREE_AT:], TREE_AT + depths, mask, Prefix(table, jnp.asarray([TREE_AT], jnp.int32))),
    ]

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def together(params: TargetParams, cache: Cache) -> list[jax.Array]:
        outs = forward_groups(params, case.config, groups, cache=cache)
        return [logits(params, case.config, out.hidden_states) for out in outs]

    steps, nodes = together(case.fused, cache)
    expected = whole(case.target.params, case.config, token_ids)[0][at]
    of_tree = case.paths
    if of_tree is None:
        of_tree = np.stack([_alone(case, sequence) for sequence in _sequences(case.token_ids)])
    off = max(_largest(steps[:, 0], expected), _largest(nodes[0], of_tree))
    return Difference(off, off / float(case.tolerance[0].max()))


def _alone(case: Case, token_ids: np.ndarray) -> np.ndarray:  # [vocab]
    """The logits after a sequence, by one forward over all of it."""
    padded = np.zeros(LENGTH, np.int32)  # the padding changes nothing before it
    padded[: len(token_ids)] = token_ids
    return np.asarray(whole(case.target.params, case.config, jnp.asarray(padded))[0])[len(token_ids) - 1]


def _difference(case: Case, got: Any, taps: Any, length: int) -> Difference:
    """Of logits [length, vocab] and taps [length, taps * d_model], where the other's are known."""
    known = case.kept < length
    at = case.kept[known]
    expected = case.layers[:, known].transpose(1, 0, 2).reshape(len(at), -1)
    pairs = (np.asarray(got)[at], case.logits[known]), (np.asarray(taps)[at], expected)
    share = max(_largest(*pair, own[at]) for pair, own in zip(pairs, case.tolerance, strict=True))
    return Difference(_largest(*pairs[0]), share, _largest(*pairs[1]))


def _largest(got: Any, expected: Any, unit: Any = 1.0) -> float:
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, f"{got.shape} instead of {expected.shape}"
    return float((np.abs(got - expected) / unit).max())
