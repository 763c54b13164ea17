"""A model folder to parameters on devices. Every tensor of a checkpoint is used, or skipped for a stated reason.

Tensors are read one by one, and of each a device's slice at a time, straight from the file: the host holds little more
than one tensor, and no device holds what is not its own.
"""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from specserve import host
from specserve.checkpoints.configs import loaded_config
from specserve.checkpoints.lazy import FLOAT32, Index, LazyQuantized, LazyTensor, as_floats
from specserve.checkpoints.quantized import PLAIN, Storing, open_table, open_weight, read_storing
from specserve.checkpoints.rounding import place_of_scale, round_at
from specserve.checkpoints.sound import check_weights, not_finite, refuse_not_finite
from specserve.checkpoints.tensors import TensorFolder, listed, read_json
from specserve.checkpoints.unused import UNUSED, account_for, unused_tensors
from specserve.errors import CheckpointError
from specserve.kernels import native
from specserve.kernels.matmul import QuantizedMatrix, Rounded, dequantize
from specserve.kernels.nibbles import PLATFORMS
from specserve.mesh import program_platform
from specserve.models.config import ModelConfig
from specserve.models.layers import side_by_side
from specserve.models.params import ParamSpec, TensorPart, is_product, is_spec, specs
from specserve.models.served import is_on_one_cpu, served
from specserve.models.sharding import check_fits, place_target, spread_kv_heads
from specserve.models.stacked import looped
from specserve.models.target import Layer, TargetParams, target_spec, with_own_head
from specserve.tokenizer import read_end_ids

if TYPE_CHECKING:
    from specserve.checkpoints.lora import Merging  # a server without adapters imports none of it

logger = logging.getLogger(__name__)
Tree = TypeVar("Tree")

# The form of the matrices that rows are multiplied by: the dtype that is computed in, as they are stored (so in few
# bits where the checkpoint is), or rounded here.
Quantization = Literal["none", "stored", "int8", "fp8", "int4"]
QUANTIZATIONS: tuple[Quantization, ...] = ("none", "stored", "int8", "fp8", "int4")

MOST_ROUNDED = 2**25  # numbers of a matrix that are rounded together
LEAST_SHARE = (4 + 2 * 16 / 128) / 8  # of 8 bits: 4, and a scale and an offset of 16 for 128 inputs or fewer
# compiled, so that nothing of a parameter's size is made on the way
_dequantize = jax.jit(dequantize, static_argnames="dtype")
# Qwix (github.com/google/qwix) does it for models of Flax: its entry for parameters alone takes nested dicts beside a
# Flax model's abstract parameters, and importing it imports Flax. These few lines give the bits that its arrays have in
# fp8; its int8 divides by 127.5.
_round_at = jax.jit(round_at, static_argnames=("to", "place"))
# one program for all compiles faster than one for each
_round_all = jax.jit(lambda *lists: list(map(round_at, *lists)), static_argnums=(1, 2))


@dataclass(frozen=True)
class Target:
    """A target's shape, its parameters, and the folder that they were read from."""

    config: ModelConfig
    params: TargetParams
    eos_ids: tuple[int, ...]  # every id that ends a sequence
    folder: Path
    reread: Callable[[], object] | None = None  # as they are stored, with each value looked at; raises CheckpointError

    def check(self) -> None:
        """Raise CheckpointError that names every tensor with a value that is not a number, or is infinite. Parameters
        that were arranged as they were read are read once more."""
        if self.reread is not None:
            self.reread()
        else:
            check_weights(self.params, target_spec(self.config), str(self.folder))


def load_target(
    folder: Path,
    *,
    dtype: str,
    quantization: Quantization = "none",
    mesh: Mesh | None = None,  # the devices that hold the parameters; None: the default one
    is_checked: bool = False,  # every value must be a number
    is_served: bool = False,  # each device has its own KV head (`spread_kv_heads`), accelerators numbers of 4 bits in 4
    has_layers: bool = True,  # without them: embedding, final norm and output head alone
    is_looped: bool = False,  # layers that repeat are stacked where that pays, for programs that run over rows
    is_arranged: bool = False,  # as steps take them (`models.served`), so that no matrix is there twice
    place: Callable[[ModelConfig, TargetParams, Mesh], TargetParams] = place_target,
    option: str = "--quantization",  # the option that chooses `quantization`, for the log
    tensors: TensorFolder | None = None,  # in place of the folder's own
    merging: "Merging | None" = None,  # an adapter of it that is merged into it
) -> Target:
    """Load a Hugging Face folder. Raises ConfigError or CheckpointError, before anything is read where the target
    cannot be spread like that or is larger than the memory."""
    raw = read_json(folder / "config.json")
    where = str(folder / "config.json")
    config = loaded_config(raw, dtype=dtype, where=where)
    if is_served:
        config = spread_kv_heads(config, mesh)
    tensors = tensors or TensorFolder(folder)
    rename = renamer(tensors.names())
    spec = target_spec(config, has_own_head=has_own_head(quantization, is_one_device=mesh is None))
    places = place(config, spec, mesh) if mesh is not None else None
    skipped = unused_tensors(config, raw, rename)
    if not has_layers:
        spec, places = dataclasses.replace(spec, layers=()), places and dataclasses.replace(places, layers=())
        skipped[".*"] = "layers, whose outputs are captured"
    has_nibbles = is_served and quantization in ("int4", "stored") and program_platform() in PLATFORMS
    is_packed = is_arranged and is_on_one_cpu(mesh) and native.is_available()
    product_dtype = None if quantization == "none" else "int8"
    if is_packed and product_dtype is None and _is_stored_in_bfloat16(spec, tensors, rename):
        product_dtype = "bfloat16"
    if merging:
        shape_of = shapes_in(tensors, rename)
        merging.check(each.stored_in(shape_of) for each in specs(target_spec(config)))
    is_least = has_nibbles or (is_packed and quantization in ("int4", "stored"))
    check_fits(str(folder), spec, places, mesh, dtype, product_dtype, share=LEAST_SHARE if is_least else 1.0)
    params = load_params(
        spec,
        tensors,
        dtype,
        shardings=places,
        skipped=skipped,
        rename=rename,
        quantization=quantization,
        option=option,
        storing=read_storing(raw, where),
        is_checked=is_checked,
        keeps_bfloat16=is_packed,
        arrange=functools.partial(served, mesh=mesh) if is_packed or has_nibbles else None,
        merging=merging,
    )
    if is_looped:
        params = looped(params, config)
    return Target(config, params, end_ids(config, folder), folder)


def has_own_head(quantization: str, platform: str = "", *, is_one_device: bool) -> bool:
    """Return whether a tied output head is a matrix of its own, in few bits as an untied one is: on one CPU, where
    steps multiply by it, and training and captures too. Without a platform it is that of this process's programs."""
    return quantization != "none" and is_one_device and (platform or program_platform()) == "cpu"


def end_ids(config: ModelConfig, folder: Path) -> tuple[int, ...]:
    """Return the ids that end a sequence, of those that the model can emit. Raises CheckpointError."""
    return tuple(i for i in read_end_ids(folder) if i < config.vocab_size)


def renamer(names: frozenset[str]) -> Callable[[str], str]:
    """A function from the names of a text model to the checkpoint's, which may hold it within a multimodal one, or be
    DeepSeek-V4 as it is published."""
    if "embed.weight" in names:
        return _as_published
    if any(name.startswith("language_model.model.") for name in names):
        return lambda name: f"language_model.{name}"
    if any(name.startswith("model.language_model.") for name in names):
        return lambda name: re.sub(r"^model\.", "model.language_model.", name)
    return lambda name: name


def _as_published(name: str) -> str:
    bare = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return bare.replace(".attn.norm.", ".attn.kv_norm.")


def is_whole(names: frozenset[str], target: ModelConfig) -> bool:
    """Return whether the tensors are those of a whole target."""
    return renamer(names)(target.names.norm) in names


def load_params(
    spec_tree: Tree,
    tensors: TensorFolder,
    dtype: str,
    *,
    shardings: Tree | None = None,  # a jax.sharding.Sharding for each leaf; None: all on the default device
    skipped: Mapping[str, str] | None = None,  # pattern of checkpoint tensors -> why they are left out
    rename: Callable[[str], str] = lambda name: name,  # our name -> the checkpoint's
    quantization: Quantization = "none",
    storing: Storing = PLAIN,
    option: str = "--quantization",  # the option that chooses `quantization`, for the log
    is_checked: bool = False,  # every value must be a number
    keeps_bfloat16: bool = False,  # of matrices and embeddings that are stored so, whichever `dtype` others have
    arrange: Callable[[Any], Any] | None = None,  # called with each layer once it is read, and with all in the end
    merging: "Merging | None" = None,  # an adapter that is merged into those of them that it has pairs for
) -> Tree:
    """Read every leaf of the spec tree, cast to `dtype` or quantised. Raises CheckpointError that lists all that does
    not fit, before anything is read."""
    stored = jax.tree.map(lambda spec: spec.stored_in(shapes_in(tensors, rename)), spec_tree, is_leaf=is_spec)
    leaves = jax.tree_util.tree_leaves_with_path(stored, is_leaf=is_spec)
    places: Sequence[Sharding | None] = jax.tree.leaves(shardings) or [None] * len(leaves)
    opened = _open_all([spec for _, spec in leaves], tensors, {**UNUSED, **(skipped or {})}, rename, storing)
    widened, wrong, reading = 0, list[str](), zip(leaves, opened, places, strict=True)

    def read() -> jax.Array | QuantizedMatrix:
        nonlocal widened
        (path, spec), weights, place = next(reading)
        how = quantization if is_product(path) else "none"
        keeps = keeps_bfloat16 and (is_product(path) or spec.init == "embedding") and _are_bfloat16(weights)
        made = _load(spec, weights, np.dtype(spec.dtype("bfloat16" if keeps else dtype)), place, how, merging)
        if is_checked:
            wrong.extend(not_finite(spec, made))
        if any(isinstance(weight, LazyQuantized) or weight.is_widened for weight in weights):
            widened += made.nbytes if isinstance(made, jax.Array) else 0
        return made

    def read_part(part: Any) -> Any:  # a layer, or a parameter beside them
        made = jax.tree.map(lambda _spec: read(), part, is_leaf=is_spec)
        if arrange is None or not isinstance(part, Layer):
            return made
        arranged = arrange(made)
        host.give_back_freed_memory()  # else what layers are read into takes what all of them take
        return arranged

    params = jax.tree.map(read_part, stored, is_leaf=lambda node: is_spec(node) or isinstance(node, Layer))
    refuse_not_finite(wrong, str(tensors.folder))
    if widened:
        logger.info(
            "%s: weights that are stored in few bits are %s here, %.2f GB of them%s",
            tensors.folder,
            dtype,
            widened / 1e9,
            "" if quantization == "stored" else f"; {option} stored keeps whole numbers of few bits where it can",
        )
    params = arrange(params) if arrange else params
    if arrange and quantization in ("int4", "stored"):
        _log_widths(params)
    return params


def _are_bfloat16(weights: Sequence[LazyTensor | LazyQuantized]) -> bool:
    return all(isinstance(weight, LazyTensor) and weight.dtype == ml_dtypes.bfloat16 for weight in weights)


def _log_widths(params: Any) -> None:
    """Say of how many matrices an accelerator holds numbers of few bits in 8."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, QuantizedMatrix))
    in_bytes = sum(isinstance(each, QuantizedMatrix) for each in leaves)
    if in_bytes and program_platform() != "cpu":
        logger.info(
            "%d matrices of few bits are held in 8 bits: their numbers do not fit in 4, or the kernel for 4 bits does "
            "not take their shape",
            in_bytes,
        )


def _is_stored_in_bfloat16(spec: TargetParams, tensors: TensorFolder, rename: Callable[[str], str]) -> bool:
    """Return whether every matrix that rows are multiplied by is stored in bfloat16, in which it is packed."""
    leaves = jax.tree_util.tree_leaves_with_path(spec, is_leaf=is_spec)
    names = {rename(name) for path, each in leaves if is_product(path) for name in each.names} & tensors.names()
    return all(tensors.dtype(name).name == "bfloat16" for name in names)


def shapes_in(tensors: TensorFolder, rename: Callable[[str], str]) -> Callable[[str], tuple[int, ...] | None]:
    """Return a function from our names of tensors to their shapes in a folder, or to None where they are not there."""
    names = tensors.names()
    return lambda name: tensors.shape(rename(name)) if rename(name) in names else None


def _open_all(
    expected: Sequence[ParamSpec],
    tensors: TensorFolder,
    skipped: Mapping[str, str],
    rename: Callable[[str], str],
    storing: Storing,
) -> list[list[LazyTensor | LazyQuantized]]:
    """The stored tensors of every parameter. Raises CheckpointError unless all is there, and nothing else is."""
    problems: list[str] = []
    used: set[str] = set()
    opened: list[list[LazyTensor | LazyQuantized]] = []
    for spec in expected:
        opened.append([])
        open_one = open_table if spec.init == "embedding" else open_weight
        for name in map(rename, spec.names):
            used.add(name)
            try:
                weight, made_of = open_one(tensors, name, storing)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            used |= set(made_of)
            opened[-1].append(weight)
            if isinstance(weight, LazyQuantized):
                got, shape = weight.values.shape, _outputs_first(spec).stored_shape
            else:
                got, shape = weight.shape, spec.stored_shape
            if got != shape:
                where = tensors.file(made_of[0]).name
                problems.append(f"{where}: {name} has shape {got}, config.json says {shape}")
        if len({weight.layout for weight in opened[-1]}) > 1:
            # such as experts of GPTQ, some of whose inputs are in the order of their groups by chance
            if all(isinstance(weight, LazyQuantized) or weight.is_widened for weight in opened[-1]):
                opened[-1] = [as_floats(weight) for weight in opened[-1]]
                continue
            problems.append(f"{spec.name} is not stored alike for every expert")
    problems += account_for(tensors.names() - used, tensors, skipped)
    if problems:
        raise CheckpointError(
            f"{tensors.folder}: {listed(list(dict.fromkeys(problems)))}. Is config.json the config of another model?"
        )
    return opened


def _load(
    spec: ParamSpec,
    weights: Sequence[LazyTensor | LazyQuantized],  # all of them plain, or all quantised
    dtype: np.dtype,
    place: Sharding | None,
    how: Quantization,
    merging: "Merging | None",
) -> jax.Array | QuantizedMatrix:
    """Load one parameter from the stored tensors that it is made of, perhaps with an adapter's pairs."""
    merging = merging if merging and merging.changes(spec) else None
    if quantized := [weight for weight in weights if isinstance(weight, LazyQuantized)]:
        matrix = _put_quantized(_outputs_first(spec), quantized, place)
        if how == "stored" and not merging:
            return matrix
        array = _dequantize(matrix, FLOAT32 if merging else dtype)
    else:
        stored = in_memory(spec, [weight for weight in weights if isinstance(weight, LazyTensor)])
        unrounded = stored.dtype if stored.dtype.itemsize == 2 else FLOAT32
        array = _put(_cast(stored, unrounded if merging else dtype), place)
    array = merging.add(array, spec, dtype) if merging else array
    return array if how in ("none", "stored") else rounded(array, how)


def rounded(matrix: jax.Array, to: Rounded) -> QuantizedMatrix:
    """Return a matrix in few bits, where it is (`kernels.matmul.quantize`). On one CPU a large one, as an output head
    is, is rounded some outputs at a time, each of which has scales of its own: float32 copies of all of it would be the
    most that a start takes."""
    num_together = MOST_ROUNDED // matrix.shape[-2]
    is_small = matrix.ndim > 2 or matrix.shape[-1] <= num_together
    if is_small or program_platform() != "cpu" or isinstance(matrix.sharding, NamedSharding):
        return _round_at(matrix, to, matrix.sharding)
    values, parts = np.asarray(matrix), list[QuantizedMatrix]()
    for i in range(0, values.shape[1], num_together):
        parts.append(jax.block_until_ready(_round_at(values[:, i : i + num_together], to, matrix.sharding)))
    return side_by_side(*parts)


def in_few_bits(params: Tree, to: Rounded) -> Tree:
    """Parameters with each matrix that rows are multiplied by rounded (`kernels.matmul.quantize`), unless it has few
    bits already. Those of a language model that drafts are a target's (`has_own_head`)."""
    if isinstance(params, TargetParams):
        is_one_device = len(params.embedding.sharding.device_set) == 1
        params = with_own_head(params) if has_own_head(to, is_one_device=is_one_device) else params
    leaves, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, QuantizedMatrix))
    chosen = [i for i, (path, leaf) in enumerate(leaves) if is_product(path) and isinstance(leaf, jax.Array)]
    found = [leaf for _, leaf in leaves]
    places = tuple(found[i].sharding for i in chosen)
    rounding = _round_all([found[i] for i in chosen], (to,) * len(chosen), places)
    for i, matrix in zip(chosen, rounding, strict=True):
        found[i] = matrix
    return jax.tree.unflatten(structure, found)


def _put_quantized(spec: ParamSpec, weights: Sequence[LazyQuantized], place: Sharding | None) -> QuantizedMatrix:
    values = in_memory(spec, [weight.values for weight in weights])
    num_blocks = weights[0].scale.shape[-1]
    of_blocks = dataclasses.replace(spec, shape=(*spec.shape[:-2], num_blocks, spec.shape[-1]))

    def put(parts: Sequence[LazyTensor]) -> jax.Array:
        whole = in_memory(of_blocks, parts)
        return _put(whole, place_of_scale(place, len(whole.shape)))

    offsets = [weight.offset for weight in weights if weight.offset is not None]
    return QuantizedMatrix(
        _put(values, place),
        put([weight.scale for weight in weights]),
        weights[0].block,
        put(offsets) if offsets else None,
    )


def _outputs_first(spec: ParamSpec) -> ParamSpec:
    """Return the spec as quantised weights are stored: with the outputs first, also where other weights are
    [in, out]."""
    return dataclasses.replace(spec, transpose=True)


def in_memory(spec: ParamSpec, stored: Sequence[LazyTensor]) -> LazyTensor:
    """Return a parameter as the model takes it, from the stored tensors that its spec names: experts stacked, its own
    outputs picked, inputs first."""

    def read(index: Index) -> np.ndarray:
        rest = index[int(spec.is_per_expert) :]
        if spec.part:
            rest = (*rest[:-1], _places(spec.part, rest[-1]))
        if spec.transpose:
            rest = (*rest[:-2], rest[-1], rest[-2])
        if spec.is_per_expert:
            value = np.stack([expert.read(rest) for expert in stored[index[0]]])
        else:
            value = stored[0].read(rest)
        if spec.transpose:
            value = value.swapaxes(-1, -2)
        return value

    return LazyTensor(spec.shape, stored[0].dtype, read)


def _places(part: TensorPart, outputs: slice) -> slice | np.ndarray:
    """Return the places of some of a parameter's outputs among those of the stored tensor."""
    places = part.places(np.arange(outputs.start, outputs.stop))
    if (np.diff(places) == 1).all():  # they follow each other
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def _cast(tensor: LazyTensor, dtype: np.dtype) -> LazyTensor:
    return LazyTensor(tensor.shape, dtype, lambda index: tensor.read(index).astype(dtype, copy=False))


def _put(tensor: LazyTensor, place: Sharding | None) -> jax.Array:
    """Read slices to the devices, each slice once, whichever devices hold it. Returns when the array is there, because
    otherwise tensors that wait for their transfer would pile up on the host."""
    if place is None:
        return jax.device_put(tensor.read(tuple(slice(0, size) for size in tensor.shape))).block_until_ready()
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in place.addressable_devices_indices_map(tensor.shape).items():
        assert index is not None
        bounds = tuple(axis.indices(size)[:2] for axis, size in zip(index, tensor.shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    shards = []
    for bounds, holders in devices.items():
        value = tensor.read(tuple(slice(*bound) for bound in bounds))
        shards += [jax.device_put(value, device) for device in holders]
    return jax.make_array_from_single_device_arrays(tensor.shape, place, shards).block_until_ready()


def to_numpy(params: Any, spec_tree: Any, dtype: str) -> dict[str, np.ndarray]:
    """Return the parameters under their checkpoint names, in the checkpoint's layout: the inverse of `load_params`."""
    out: dict[str, np.ndarray] = {}
    for spec, leaf in zip(specs(spec_tree), jax.tree.leaves(params), strict=True):
        value = np.asarray(leaf).astype(spec.dtype(dtype))
        if spec.transpose:
            value = value.swapaxes(-1, -2)
        if not spec.is_per_expert:
            value = value[None]
        for name, tensor in zip(spec.names, value, strict=True):
            if spec.part is None:
                out[name] = tensor
                continue
            whole = out.setdefault(name, np.zeros(spec.stored_shape, spec.dtype(dtype)))
            places = _places(spec.part, slice(0, spec.shape[-1]))
            whole[(..., places, slice(None)) if spec.transpose else (..., places)] = tensor
    return out
