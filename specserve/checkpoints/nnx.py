"""The state of a model in Flax NNX, as Tunix trains it, as the parameters of a target.

Tunix keeps a matrix [in, out], as it is kept here, but with attention's heads as an axis of their own: [in, head,
head_dim] of queries, keys and values, [head, head_dim, out] of the output. So a parameter is an array in another shape,
which stays where it is. Qwix puts a pair of LoRA beside a matrix: `lora_a` [in, rank] and `lora_b` [rank, out], with
the matrix's own axes.
"""

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specserve.checkpoints.tensors import listed
from specserve.errors import ConfigError
from specserve.models.params import ParamSpec, is_spec
from specserve.models.target import TargetParams

_A, _B = "_lora_a", "_lora_b"


def is_pair(path: str) -> bool:
    """Return whether the array at a path is one of a pair of LoRA."""
    return path.endswith((_A, _B))


def target_params(
    state: Mapping[str, jax.Array],
    spec: TargetParams,
    path_of: Callable[[str], str],
    lora_alpha: float | None = None,
) -> TargetParams:
    """Return the arrays of a model, by their paths in it, as the parameters of the target that `spec` describes, with
    pairs of LoRA merged into their matrices in float32. `path_of` gives the path of a checkpoint's tensor. Raises
    ConfigError that names what is missing, left over or of another shape."""
    arrays, problems = _merged(state, lora_alpha)

    def read(each: ParamSpec) -> Any:
        path = path_of(each.names[0])
        array = arrays.pop(path, None)
        if array is not None and _joins(array.shape, each.shape):
            return array.reshape(each.shape)
        problems.append(f"{path} is {'missing' if array is None else array.shape}, expected {each.shape} joined")
        return None

    params = jax.tree.map(read, spec, is_leaf=is_spec)
    problems += [f"{path} is no parameter of the target" for path in arrays]
    if problems:
        raise ConfigError(f"weights of the trainer: {listed(problems)}")
    return params


def _merged(state: Mapping[str, jax.Array], alpha: float | None) -> tuple[dict[str, jax.Array], list[str]]:
    """Return a state with the sum in the place of each matrix and its pair, and the pairs that fit no matrix."""
    arrays = {path: array for path, array in state.items() if not is_pair(path)}
    problems: list[str] = []
    for base in dict.fromkeys(path[: -len(_A)] for path in state if is_pair(path)):
        if alpha is None:
            raise ConfigError("weights of the trainer: they have LoRA, whose scale is not among them; give lora_alpha")
        weight, a, b = arrays.get(base), state.get(base + _A), state.get(base + _B)
        if weight is None or a is None or b is None or not _is_pair_of(weight.shape, a.shape, b.shape):
            shapes = (each if each is None else each.shape for each in (weight, a, b))
            problems.append("{} is {}, its pair A {} and B {}".format(base, *(shape or "missing" for shape in shapes)))
            continue
        a, b = (each.astype(jnp.float32) for each in (a.reshape(-1, a.shape[-1]), b.reshape(b.shape[0], -1)))
        product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST).reshape(weight.shape)
        arrays[base] = weight.astype(jnp.float32) + alpha / a.shape[1] * product
    return arrays, problems


def _is_pair_of(weight: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    return a[-1] == b[0] and _joins(weight, (math.prod(a[:-1]), math.prod(b[1:])))


def _joins(shape: Sequence[int], joined: Sequence[int]) -> bool:
    """Return whether axes of a shape, some of them taken together with their neighbours, are the other shape."""
    ends, joined_ends = ([*itertools.accumulate(sizes, operator.mul)] for sizes in (shape, joined))
    return ends[-1:] == joined_ends[-1:] and {*joined_ends} <= {*ends}
