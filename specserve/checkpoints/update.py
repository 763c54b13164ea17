"""Another version of the weights of models that are served: the same parameters with other values."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import (
    Quantization,
    Target,
    has_own_head,
    in_few_bits,
    load_target,
    to_numpy,
)
from specserve.checkpoints.lora import LoraPair, Merging, is_adapter, read_adapter
from specserve.checkpoints.sound import check_weights
from specserve.checkpoints.source import find_folder
from specserve.checkpoints.tensors import TensorFolder, is_file, listed
from specserve.errors import ConfigError
from specserve.models import served as forms
from specserve.models.config import ModelConfig
from specserve.models.params import is_spec, specs
from specserve.models.sharding import place_target
from specserve.models.stacked import each_layer
from specserve.models.target import TargetParams, target_spec, with_own_head

Tree = TypeVar("Tree")
MOST_NAMED = 5  # parameters that an error names


def other_target(
    served: Target,  # of which nothing but the parameters may differ
    given: TargetParams | Mapping[str, Any] | str | Path,
    *,
    quantization: Quantization,
    mesh: Mesh | None,
) -> Target:
    """Return the target with other weights, in the form that `load_target` gives to what is served: from its
    parameters, stacked or not, from arrays by the checkpoint's names, from a file of them, perhaps beside a head's, or
    from a model folder; or
    those of its own folder with LoRA's pairs by the names of matrices, or PEFT's folder of them, merged into it. Arrays
    may be JAX's or NumPy's, of any float dtype; they are rounded to the target's. Those that are where they are needed
    are not copied, so they must not be donated afterwards. Raises ConfigError or CheckpointError, which name what is
    missing, has another shape or is not a number."""
    config = served.config
    how: dict[str, Any] = {"quantization": quantization, "mesh": mesh, "is_checked": True}
    how |= {"is_served": True, "is_arranged": True}
    folder = (find_folder(str(given), "weights") or Path(given)) if isinstance(given, str | Path) else None
    if folder is not None and is_adapter(folder):
        given, folder = read_adapter(folder), None
    if folder is not None:
        where = served.folder if (is_one_file := is_file(folder)) else folder
        tensors = TensorFolder.of_version(Path(folder))[0] if is_one_file else None
        found = load_target(where, dtype=config.dtype, tensors=tensors, **how)
        if dataclasses.replace(found.config, cache_dtype=config.cache_dtype) != config:
            raise ConfigError(
                f"{folder}: another model than the one that is served; an update changes its weights alone"
            )
        return dataclasses.replace(served, params=found.params)
    if quantization == "stored":
        raise ConfigError(
            "the target is served as its files store it (--quantization stored), so give the folder of the new "
            "version; with --quantization none it takes arrays"
        )
    if isinstance(given, TargetParams):
        given = dataclasses.replace(given, layers=tuple(each_layer(given.layers)))
        if _is_as_stored(given, config):
            given = to_numpy(given, target_spec(config.stored), config.dtype)
    if isinstance(given, Mapping):
        if given and all(isinstance(each, LoraPair) for each in given.values()):
            how["merging"] = Merging(given)
        else:
            how["tensors"] = TensorFolder.of_arrays(served.folder, given)
        found = load_target(served.folder, dtype=config.dtype, **how)
        return dataclasses.replace(served, params=found.params)
    if not isinstance(given, TargetParams):
        raise ConfigError(f"target: expected TargetParams, arrays by name or a folder, got {type(given).__name__}")
    spec = target_spec(config)
    params = given
    if params.head is not None and spec.head is None:
        raise ConfigError("target: it has an output head, and the one that is served is tied to the embedding")
    place = None if mesh is None else place_target(config, spec, mesh)
    params = checked(params, spec, "target", config.dtype, place)
    if quantization != "none":
        if has_own_head(quantization, is_one_device=mesh is None):
            params = with_own_head(params)
        params = in_few_bits(params, quantization)
    return dataclasses.replace(served, params=forms.served(params, mesh))


def _is_as_stored(params: TargetParams, config: ModelConfig) -> bool:
    """Return whether these have the KV heads of the checkpoint, where a mesh has each of them several times."""
    size = sum(np.size(leaf) for leaf in jax.tree.leaves(params))
    return config.kv_repeats > 1 and size == sum(math.prod(spec.shape) for spec in specs(target_spec(config.stored)))


def checked(given: Tree, spec: Tree, what: str, dtype: str, place: Any | None) -> Tree:
    """Return parameters as arrays in the dtypes that their specs have in a model of this one, on the default device or
    where they are to be placed. Raises ConfigError or CheckpointError, which name what is missing, has another shape or
    is not a number."""
    expected, structure = jax.tree_util.tree_flatten_with_path(spec, is_leaf=is_spec)
    found = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(given)}
    leaves = [found.pop(jax.tree_util.keystr(path), None) for path, _ in expected]
    wrong = [
        f"{each.name} is {_described(leaf)}, expected {each.shape}"
        for (_, each), leaf in zip(expected, leaves, strict=True)
        if not _fits(leaf, each.shape)
    ]
    wrong += [f"{path} is no parameter of this model" for path in found]
    if wrong:
        more = f" and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise ConfigError(f"{what}: {listed(wrong[:MOST_NAMED])}{more}")
    arrays = [jnp.asarray(leaf).astype(each.dtype(dtype)) for (_, each), leaf in zip(expected, leaves, strict=True)]
    params = jax.device_put(jax.tree.unflatten(structure, arrays), place or jax.devices()[0])
    check_weights(params, spec, what)
    return params


def _fits(leaf: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) and leaf.shape == shape and jnp.issubdtype(leaf.dtype, jnp.floating)


def _described(leaf: Any) -> str:
    if leaf is None:
        return "missing"
    return f"{leaf.dtype} {leaf.shape}" if isinstance(leaf, jax.Array | np.ndarray) else type(leaf).__name__
