"""LoRA adapters as PEFT keeps them, read as a pair of small matrices for each matrix of the model, and merged into it.

PEFT's module `X` computes `W x + scale * B (A x)`: `X.lora_A.weight` is A [rank, in], `X.lora_B.weight` is B [out,
rank], and scale is `lora_alpha / rank`, or `lora_alpha / sqrt(rank)` with `use_rslora`. The patterns of rank and alpha
are regular expressions of the ends of module names, and the first that fits is taken (PEFT's `get_pattern_key`).
"""

import functools
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from specserve.checkpoints.tensors import TensorFolder, listed, read_json
from specserve.errors import CheckpointError
from specserve.mesh import put
from specserve.models.params import ParamSpec

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
_PAIR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight")  # perhaps with the adapter's name
# PEFT's settings of how an adapter was trained, and of other kinds of adapters' details: no number follows from them
_TRAINED = frozenset(
    (
        "auto_mapping", "base_model_name_or_path", "revision", "peft_type", "task_type", "inference_mode",
        "peft_version", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout",
        "megatron_config", "megatron_core", "eva_config", "qalora_group_size", "ensure_weight_tying",
    )
)  # fmt: skip
_READ = frozenset(("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"))
# how pairs began; others ("pissa", "olora", "loftq") begin by changing the model's own matrices
_BEGUN = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraPair:
    """A pair that adds scale * B A to a matrix W [out, in]."""

    a: Any  # [rank, in], an array of JAX or NumPy of any float dtype
    b: Any  # [out, rank]
    scale: float


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter of PEFT and no whole model."""
    is_model = any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
    return not is_model and (folder / ADAPTER_CONFIG).is_file()


def read_adapter(folder: Path) -> dict[str, LoraPair]:
    """Read PEFT's folder of an adapter. Raises CheckpointError, as `lora_pairs` does and where a file is missing or
    damaged; a pickle is never read."""
    if not (folder / ADAPTER_FILE).is_file():
        raise CheckpointError(f"{folder}: no {ADAPTER_FILE}; save the adapter as safetensors, a pickle is never read")
    tensors = TensorFolder.of_file(folder / ADAPTER_FILE)
    arrays = {name: tensors.read(name) for name in sorted(tensors.names())}
    return lora_pairs(arrays, read_json(folder / ADAPTER_CONFIG), str(folder))


def adapter_fingerprint(folder: Path) -> str:
    """16 hex digits that distinguish an adapter from others, by all of its two files. Raises CheckpointError."""
    try:
        files = [(folder / name).read_bytes() for name in (ADAPTER_CONFIG, ADAPTER_FILE)]
    except OSError as error:
        raise CheckpointError(f"{folder}: the adapter cannot be read ({error})") from error
    return hashlib.sha256(b"\0".join(hashlib.sha256(each).digest() for each in files)).hexdigest()[:16]


def lora_pairs(arrays: Mapping[str, Any], config: Mapping[str, Any], where: str = "LoRA") -> dict[str, LoraPair]:
    """Return the pairs of an adapter from arrays by PEFT's names and its settings, of which `r` and `lora_alpha` must
    be there: by the names of their matrices in a text model (`model.layers.0.mlp.up_proj.weight`). Raises
    CheckpointError that names what is no pair, does not fit together, or is computed otherwise (DoRA, trained biases,
    modules that are saved whole)."""
    _check_settings(config, where)
    found: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for key, array in arrays.items():
        match = _PAIR.fullmatch(key)
        if match is None:
            problems.append(f"{key} is no lora_A or lora_B of a matrix")
        elif match[2] in (sides := found.setdefault(match[1], {})):
            problems.append(f"lora_{match[2]} of {match[1]} is there twice")
        else:
            sides[match[2]] = array
    for module, sides in found.items():
        a, b = (getattr(sides.get(side), "shape", None) for side in "AB")
        rank = _stated(config, "rank_pattern", module, "r")
        if a is None or b is None or (len(a), len(b)) != (2, 2) or not a[0] == b[1] == rank:
            problems.append(f"{module}: lora_A is {a or 'missing'} and lora_B {b or 'missing'}, expected rank {rank}")
    if problems or not found:
        raise CheckpointError(f"{where}: {listed(problems) or 'there are no LoRA pairs'}")
    return {_matrix_name(module): LoraPair(s["A"], s["B"], _scale(config, module, s)) for module, s in found.items()}


def _check_settings(config: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointError where a setting of PEFT means another sum than this one, or is not known."""
    for name in ("r", "lora_alpha"):
        if not _is_above_zero(value := config.get(name)):
            raise CheckpointError(f"{where}: {name} is {value!r}, expected a number above 0")
    kind, begun = config.get("peft_type", "LORA"), config.get("init_lora_weights")
    if kind != "LORA":
        raise CheckpointError(f"{where}: peft_type is {kind!r}, expected 'LORA'")
    if begun not in _BEGUN:
        raise CheckpointError(
            f"{where}: init_lora_weights is {begun!r}, which changes the model's own matrices; save the adapter with "
            "path_initial_model_for_weight_conversion"
        )
    known = _TRAINED | _READ | {"init_lora_weights"}
    inactive = {"bias": "none", "runtime_config": {"ephemeral_gpu_offload": False}}
    for name, value in config.items():
        if name not in known and value and value != inactive.get(name):
            raise CheckpointError(
                f"{where}: {name} is {value!r:.100}; only pairs of LoRA for whole matrices are read. Train without it, "
                "or merge the adapter with PEFT and give the whole model"
            )
    for name in ("rank_pattern", "alpha_pattern"):
        stated = config.get(name) or {}
        try:
            is_sound = all(re.compile(key) and _is_above_zero(n) for key, n in stated.items())
        except (AttributeError, TypeError, re.error):
            is_sound = False
        if not is_sound:
            raise CheckpointError(f"{where}: {name} is {stated!r:.100}, expected module patterns with numbers above 0")


def _is_above_zero(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _stated(config: Mapping[str, Any], patterns: str, module: str, default: str) -> float:
    """Return the number of the first pattern that a module's name ends with, or the one of all modules."""
    found = (n for key, n in (config.get(patterns) or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, config[default])


def _scale(config: Mapping[str, Any], module: str, sides: Mapping[str, Any]) -> float:
    rank, alpha = sides["A"].shape[0], _stated(config, "alpha_pattern", module, "lora_alpha")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _matrix_name(module: str) -> str:
    """Return the name of a module's matrix in a text model, which may be held within one that also sees."""
    return re.sub(r"(^|\.)language_model\.", r"\1", module) + ".weight"


@dataclass(frozen=True)
class Merging:
    """An adapter that is merged into a model as that is loaded, matrix by matrix, each where it lies."""

    pairs: Mapping[str, LoraPair]  # by the names of matrices

    def check(self, specs: Iterable[ParamSpec]) -> None:
        """Check that each pair is of a matrix that one of these parameters is read from, and has its shape. Raises
        CheckpointError that names each one that is not."""
        shapes = {name: spec.stored_shape for spec in specs for name in spec.names}
        problems: list[str] = []
        for name, pair in self.pairs.items():
            a, b = np.shape(pair.a), np.shape(pair.b)
            if name not in shapes:
                problems.append(f"{name} is not used by this model")
            elif (len(a), len(b)) != (2, 2) or a[0] != b[1] or (b[0], a[1]) != shapes[name]:
                problems.append(f"{name} is {shapes[name]}, and its pair is B {b} A {a}")
        if problems:
            raise CheckpointError(f"LoRA: {listed(problems)}")

    def changes(self, spec: ParamSpec) -> bool:
        """Return whether a parameter has a pair, or one of its experts."""
        return any(name in self.pairs for name in spec.names)

    def add(self, matrix: jax.Array, spec: ParamSpec, dtype: np.dtype) -> jax.Array:
        """Return a parameter of floats with its pairs, computed in float32 where it lies, and rounded once."""
        place = matrix.sharding
        whole = NamedSharding(place.mesh, PartitionSpec()) if isinstance(place, NamedSharding) else place

        def brought(side: Any) -> Any:  # from wherever a trainer has it, before anything is computed from it
            return jax.device_put(side, whole) if isinstance(side, jax.Array) else side

        pairs = {
            name: LoraPair(brought(pair.a), brought(pair.b), pair.scale)
            for name in spec.names
            if (pair := self.pairs.get(name))
        }
        addend = put(_addend(spec, pairs), whole)
        return _add(matrix, *addend, is_transposed=spec.transpose, dtype=dtype, place=place)


def _addend(spec: ParamSpec, pairs: Mapping[str, LoraPair]) -> tuple[Any, Any, np.ndarray]:
    """Return A [..., rank, in], B [..., out, rank] and the scales [...] of what pairs add to a parameter: of JAX where
    a pair is, else of NumPy. An expert without a pair, or of a smaller rank than others, has zeros in the place of what
    it lacks."""
    num_out, num_in = spec.stored_shape
    none = LoraPair(np.zeros((0, num_in), np.float32), np.zeros((num_out, 0), np.float32), 0.0)
    own = [pairs.get(name, none) for name in spec.names]
    kind: Any = jnp if any(isinstance(side, jax.Array) for pair in own for side in (pair.a, pair.b)) else np
    sides = [(kind.asarray(pair.a, np.float32), kind.asarray(pair.b, np.float32)) for pair in own]
    scale = np.array([pair.scale for pair in own], np.float32)
    if spec.is_per_expert:
        rank = max(len(a) for a, _ in sides)
        a = kind.stack([kind.pad(a, ((0, rank - len(a)), (0, 0))) for a, _ in sides])
        b = kind.stack([kind.pad(b, ((0, 0), (0, rank - b.shape[1]))) for _, b in sides])
    else:
        ((a, b),), scale = sides, scale[0]
    if spec.part:
        places = spec.part.places(np.arange(spec.shape[-1]))
        a, b = (a, b[..., places, :]) if spec.transpose else (a[..., places], b)
    return a, b, scale


@functools.partial(jax.jit, static_argnames=("is_transposed", "dtype", "place"))
def _add(
    matrix: jax.Array,  # [..., out, in], or transposed
    a: jax.Array,
    b: jax.Array,
    scale: jax.Array,
    *,
    is_transposed: bool,
    dtype: np.dtype,
    place: Sharding,
) -> jax.Array:
    out = "...io" if is_transposed else "...oi"
    product = jnp.einsum(f"...or,...ri->{out}", b, a, precision=jax.lax.Precision.HIGHEST)
    whole = matrix.astype(jnp.float32) + scale[..., None, None] * product
    return jax.lax.with_sharding_constraint(whole.astype(dtype), place)
