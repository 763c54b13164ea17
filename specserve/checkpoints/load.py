"""A model folder to parameters on devices. Every tensor of a checkpoint is used, or skipped for a stated reason."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from specserve.checkpoints.tensors import TensorFolder, read_json
from specserve.errors import CheckpointError
from specserve.models.config import ModelConfig
from specserve.models.families import model_config
from specserve.models.params import ParamSpec, is_spec, specs
from specserve.models.target import TargetParams, target_spec

logger = logging.getLogger(__name__)
Tree = TypeVar("Tree")

_ROTARY_BUFFER = re.compile(r"(.*\.)?rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Target:
    """A loaded target."""

    config: ModelConfig
    params: TargetParams
    eos_ids: tuple[int, ...]  # every id that ends a sequence
    folder: Path


def load_target(folder: Path, *, dtype: str) -> Target:
    """Load a Hugging Face folder. Raises ConfigError or CheckpointError."""
    raw = read_json(folder / "config.json")
    config = model_config(raw, dtype=dtype, where=str(folder / "config.json"))
    skipped = {"lm_head.weight": "tied to the embedding"} if config.tie_embeddings else {}
    params = load_params(target_spec(config), TensorFolder(folder), dtype, skipped=skipped)
    return Target(config, params, eos_ids(folder, raw), folder)


def eos_ids(folder: Path, raw_config: dict[str, object]) -> tuple[int, ...]:
    """Every EOS id of generation_config.json and config.json."""
    found: list[int] = []
    generation = folder / "generation_config.json"
    for raw in ([read_json(generation)] if generation.is_file() else []) + [raw_config]:
        value = raw.get("eos_token_id")
        found += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    return tuple(dict.fromkeys(found))


def load_params(
    spec_tree: Tree,
    tensors: TensorFolder,
    dtype: str,
    *,
    skipped: dict[str, str] | None = None,  # checkpoint tensor -> why it is not wanted
    rename: Callable[[str], str] = lambda name: name,  # our name -> the checkpoint's
) -> Tree:
    """Read every leaf of the spec tree, cast to `dtype`. Raises CheckpointError that lists all that does not fit."""
    wanted = {rename(spec.name): spec for spec in specs(spec_tree)}
    _check(wanted, tensors, skipped or {})
    loaded: dict[str, jax.Array] = {}
    for name, value in tensors.read(list(wanted)):
        array = value.T if wanted[name].transpose else value
        loaded[name] = jax.device_put(np.ascontiguousarray(array.astype(dtype)))
    return jax.tree.map(lambda spec: loaded[rename(spec.name)], spec_tree, is_leaf=is_spec)


def _check(wanted: dict[str, ParamSpec], tensors: TensorFolder, skipped: dict[str, str]) -> None:
    names = tensors.names()
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - names)]
    for name in sorted(names - wanted.keys()):
        if name in skipped:
            logger.debug("%s: %s is skipped (%s)", tensors.folder, name, skipped[name])
        elif not _ROTARY_BUFFER.match(name):
            problems.append(f"{name} is not part of this architecture")
    for name in sorted(wanted.keys() & names):
        got, expected = tensors.shape(name), wanted[name].stored_shape
        if got != expected:
            problems.append(f"{tensors.file(name).name}: {name} has shape {got}, config.json says {expected}")
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CheckpointError(f"{tensors.folder}: {shown}. Is config.json the config of another model?")


def to_numpy(params: Any, spec_tree: Any, dtype: str) -> dict[str, np.ndarray]:
    """Parameters under their checkpoint names, in the checkpoint's layout: the inverse of `load_params`."""
    leaves = zip(specs(spec_tree), jax.tree.leaves(params), strict=True)
    out = {}
    for spec, leaf in leaves:
        value = np.asarray(leaf).astype(dtype)
        out[spec.name] = value.T if spec.transpose else value
    return out
