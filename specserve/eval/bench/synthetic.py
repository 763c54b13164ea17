"""Targets and heads of random weights (`bench --random-weights`): the shapes and formats of real ones, and none of
their files. What they answer means nothing; what a step of them costs is what it costs with the real weights."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from specserve.checkpoints.configs import auto_cache_dtype, find_config, find_stored_dtype
from specserve.checkpoints.load import Quantization, Target, has_own_head, in_few_bits, rounded
from specserve.checkpoints.source import BUNDLED
from specserve.drafters.interface import Head
from specserve.drafters.registry import DEFAULT_KIND
from specserve.errors import ConfigError
from specserve.eval.prompts import RANDOM
from specserve.eval.settings import BenchRun, LatencyRun, ThroughputRun
from specserve.interop.bundled import resolve_head
from specserve.interop.head import load_head
from specserve.mesh import SERVING_AXES, default_dtype, parse_mesh
from specserve.models.config import ModelConfig
from specserve.models.params import ParamSpec, init_params, is_product, is_spec
from specserve.models.sharding import check_fits, place_target
from specserve.models.stacked import looped
from specserve.models.target import TargetParams, target_spec
from specserve.plan.serving import planned_head
from specserve.serve.engine.interface import DraftInfo
from specserve.serve.engines import load
from specserve.serve.launch import Models

PUBLISHED = "bfloat16"  # the dtype of weights where a config.json names none


def bench_models(run: BenchRun | LatencyRun | ThroughputRun) -> Models:
    """Return the models that a benchmark in this process runs: target and head as they are loaded, or drawn at random.
    Raises ConfigError or CheckpointError."""
    if not run.random_weights:
        return load(run, run.draft, has_tokenizer=run.bench != RANDOM)
    if run.bench != RANDOM:
        raise ConfigError(f"--random-weights has no tokenizer, and --bench {run.bench} asks in words: --bench {RANDOM}")
    if run.quantization == "stored":
        raise ConfigError("--quantization stored keeps a checkpoint's bits, and --random-weights has none: give int8")
    name, mesh = run.target or BUNDLED, parse_mesh(run.mesh, SERVING_AXES)
    target = random_target(name, quantization=run.quantization or "none", mesh=mesh)
    if run.draft:
        folder = resolve_head(run.draft, "--draft")
        stored: Quantization = "stored" if run.draft_quantization == "stored" else "none"
        head = load_head(folder, target, dtype=default_dtype(), mesh=mesh, quantization=stored)
        draft = folder.name
    else:
        head, draft = random_head(name, target, mesh=mesh), f"{DEFAULT_KIND}, random weights"
    if run.draft_quantization not in ("", "none", "stored"):
        head = dataclasses.replace(head, params=in_few_bits(head.params, run.draft_quantization))
    label = f"{name}, random weights"
    return Models(label, target, head, None, fingerprint=f"random {name}", mesh=mesh, draft=DraftInfo(draft))


def random_target(name: str, *, quantization: Quantization = "none", mesh: Mesh | None = None) -> Target:
    """A target of this preset's shapes, or of those of a folder's config.json, whose weights are random numbers of the
    checkpoint's dtype. No file but config.json is read, and no hub is asked. Raises ConfigError."""
    return draw_target(name, find_config(name)[0], quantization=quantization, mesh=mesh)


def draw_target(
    name: str,
    config: ModelConfig,
    *,
    quantization: Quantization = "none",
    mesh: Mesh | None = None,
    is_looped: bool = False,  # layers that repeat are stacked, as `load_target` does
) -> Target:
    """The same of a config that is given, such as the first layers of what the name stands for."""
    dtype, stored = default_dtype(), find_stored_dtype(name)
    config = dataclasses.replace(config, dtype=dtype, cache_dtype=auto_cache_dtype(stored, dtype))
    spec = target_spec(config, has_own_head=has_own_head(quantization, is_one_device=mesh is None))
    places = None if mesh is None else place_target(config, spec, mesh)
    check_fits(name, spec, places, mesh, dtype, None if quantization == "none" else "int8")
    leaves, structure = jax.tree_util.tree_flatten_with_path(spec, is_leaf=is_spec)
    found = jax.tree.leaves(places) or [None] * len(leaves)
    params = list[Any]()
    for number, ((path, leaf), place) in enumerate(zip(leaves, found, strict=True)):
        drawn = _drawing(dataclasses.replace(leaf, name=""), stored or PUBLISHED, dtype, place)(jax.random.key(number))
        if quantization not in ("none", "stored") and is_product(path):
            drawn = rounded(drawn, quantization)
        params.append(drawn)
    whole: TargetParams = jax.tree.unflatten(structure, params)
    del params  # a stack takes the place of its layers
    return Target(config, looped(whole, config) if is_looped else whole, (), Path(name))


def random_head(name: str, target: Target, *, mesh: Mesh | None = None) -> Head:
    """The head that `specserve train` begins with for this target."""
    drafter = planned_head(name, DEFAULT_KIND, target.config)
    chosen = np.random.default_rng(0).permutation(target.config.vocab_size)[: drafter.draft_vocab_size]
    target_ids = np.sort(chosen).astype(np.int32)
    stored = find_stored_dtype(name) or PUBLISHED
    params = jax.tree.map(lambda x: x.astype(stored).astype(x.dtype), drafter.init_params(target, target_ids, 0))
    if mesh is not None:
        params = jax.device_put(params, drafter.place(mesh))
    return Head(drafter, params, target_ids)


@functools.cache
def _drawing(spec: ParamSpec, stored: str, dtype: str, place: Sharding | None) -> Callable[[jax.Array], jax.Array]:
    """A compiled function from a key to a parameter like this, once for all layers."""

    def draw(key: jax.Array) -> jax.Array:
        return init_params(spec, key, stored).astype(spec.dtype(dtype))

    return jax.jit(draw, out_shardings=place)
