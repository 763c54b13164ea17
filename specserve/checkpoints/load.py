"""A model folder to parameters on devices. Every tensor of a checkpoint is used, or skipped for a stated reason.

Tensors are read one by one, and of each a device's slice at a time, straight from the file: the host holds little more
than one tensor, and no device holds what is not its own.
"""

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from specserve.checkpoints.configs import loaded_config
from specserve.checkpoints.lazy import FLOAT32, Index, LazyQuantized, LazyTensor, as_floats
from specserve.checkpoints.quantized import PLAIN, UNUSED_SCALES, Storing, open_table, open_weight, read_storing
from specserve.checkpoints.rounding import place_of_scale, round_at
from specserve.checkpoints.sound import check_weights
from specserve.checkpoints.tensors import TensorFolder, listed, read_json
from specserve.errors import CheckpointError
from specserve.kernels.matmul import QuantizedMatrix, Rounded, Weight, dequantize, experts_in_nibbles, in_nibbles
from specserve.kernels.nibbles import PLATFORMS
from specserve.mesh import program_platform
from specserve.models.config import ModelConfig
from specserve.models.params import ParamSpec, TensorPart, is_product, is_spec, specs
from specserve.models.sharding import check_fits, place_target, spread_kv_heads
from specserve.models.stacked import looped
from specserve.models.target import TargetParams, target_spec, with_own_head
from specserve.tokenizer import read_end_ids

if TYPE_CHECKING:
    from specserve.checkpoints.lora import Merging  # a server without adapters imports none of it

logger = logging.getLogger(__name__)
Tree = TypeVar("Tree")

# The form of the matrices that rows are multiplied by: the dtype that is computed in, as they are stored (so in few
# bits where the checkpoint is), or rounded here.
Quantization = Literal["none", "stored", "int8", "fp8", "int4"]
QUANTIZATIONS: tuple[Quantization, ...] = ("none", "stored", "int8", "fp8", "int4")

TIED, AS_VOCABULARY = "tied to the embedding", "read as the draft vocabulary"
_COMPUTED, _ZEROS = "rotary buffers, computed here", "biases of zeros, which add nothing"
_NOT_MISSED = frozenset((TIED, AS_VOCABULARY, _COMPUTED, _ZEROS))  # reasons that a user need not know
_HASHING = r"(.*\.)?ple_embedding\.(layer_multipliers|ngram_heads_(offsets|vocab_sizes))"
_SKIPPED = {
    r"(.*\.)?rotary_emb\.inv_freq": _COMPUTED,
    _HASHING: "numbers of hashes, computed here",
    r"(.*\.)?hyper_connection_mixer\.block_inject_weight\..*": "weights of streams that nothing is added to",
    **UNUSED_SCALES,
}
# layers of multi-token prediction, by family
_FURTHER = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "nemotron_h"), r"mtp\..*"),
    "deepseek_v4": r"(model\.)?mtp\..*",
    "mimo": r"model\.mtp_layers\..*",
    "mimo_v2_flash": r"model\.mtp\..*",
}
# families whose checkpoints append such layers to the model's own, and the key that counts them
_PREDICTS_FURTHER = {
    "deepseek_v3": "num_nextn_predict_layers",
    "deepseek_v32": "num_nextn_predict_layers",
    "glm_moe_dsa": "num_nextn_predict_layers",
    "glm5_next": "num_nextn_predict_layers",
    "glm5_next_text": "num_nextn_predict_layers",
    "kimi_k2": "num_nextn_predict_layers",
    "glm4_moe": "num_nextn_predict_layers",
    "glm4_moe_lite": "num_nextn_predict_layers",
    "minimax_m2": "num_mtp_modules",
    "bailing_moe": "num_nextn_predict_layers",
    "bailing_moe_v2": "num_nextn_predict_layers",
    "bailing_moe_linear": "num_nextn_predict_layers",
    "bailing_hybrid": "num_nextn_predict_layers",
}
LEAST_SHARE = (4 + 2 * 16 / 128) / 8  # of 8 bits: 4, and a scale and an offset of 16 for 128 inputs or fewer
# compiled, so that nothing of a parameter's size is made on the way
_dequantize = jax.jit(dequantize, static_argnames="dtype")
# Qwix (github.com/google/qwix) does it for models of Flax: its entry for parameters alone takes nested dicts beside a
# Flax model's abstract parameters, and importing it imports Flax. These few lines give the bits that its arrays have in
# fp8; its int8 divides by 127.5.
_round_at = jax.jit(round_at, static_argnames=("to", "place"))
# one program for all compiles faster than one for each
_round_all = jax.jit(lambda *lists: list(map(round_at, *lists)), static_argnums=(1, 2))
_OTHER_SENSES = (
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|mm_projector|patch_merge_mlp|audio_tower|vision_embedder|embed_(vision|audio))"
    r"\..*"
)


@dataclass(frozen=True)
class Target:
    """A target's shape, its parameters, and the folder that they were read from."""

    config: ModelConfig
    params: TargetParams
    eos_ids: tuple[int, ...]  # every id that ends a sequence
    folder: Path


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
    skipped = _skipped(config, raw, rename)
    if not has_layers:
        spec, places = dataclasses.replace(spec, layers=()), places and dataclasses.replace(places, layers=())
        skipped[".*"] = "layers, whose outputs are captured"
    has_nibbles = is_served and quantization in ("int4", "stored") and program_platform() in PLATFORMS
    product_dtype = None if quantization == "none" else "int8"
    if merging:
        shape_of = shapes_in(tensors, rename)
        merging.check(each.stored_in(shape_of) for each in specs(target_spec(config)))
    check_fits(str(folder), spec, places, mesh, dtype, product_dtype, share=LEAST_SHARE if has_nibbles else 1.0)
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
        is_served=is_served,
        merging=merging,
    )
    if is_checked:
        check_weights(params, spec, str(folder))
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


def _skipped(config: ModelConfig, raw: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, str]:
    """Tensors of a target's checkpoint that its forward does not need, as patterns, and why."""
    skipped = {_OTHER_SENSES: "of a model that also sees or hears; text alone is served"}
    if config.tie_embeddings:
        skipped[re.escape(rename(config.names.head))] = TIED
    further = {pattern for family, pattern in _FURTHER.items() if family == config.family}
    count = raw.get(_PREDICTS_FURTHER.get(config.family, "num_nextn_predict_layers"))
    if count is None:
        count = int(config.family in _PREDICTS_FURTHER)
    for i in range(config.num_layers, config.num_layers + count):
        further.add(re.escape(rename(config.names.layer.format(i=i))) + r"\..*")
    skipped |= dict.fromkeys(further, "layers of multi-token prediction")
    for i, kind in enumerate(config.layers):
        if kind.kv_from is not None:
            prefix = re.escape(rename(f"{config.names.layer.format(i=i)}.{config.names.attention}"))
            skipped[rf"{prefix}\.(k|v)_(proj|norm)\..*"] = "keys and values of layers that see those of others"
    return skipped


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
    is_served: bool = False,  # and not trained: an accelerator's matrices may have its kernel's form (`in_nibbles`)
    merging: "Merging | None" = None,  # an adapter that is merged into those of them that it has pairs for
) -> Tree:
    """Read every leaf of the spec tree, cast to `dtype` or quantised. Raises CheckpointError that lists all that does
    not fit, before anything is read."""
    stored = jax.tree.map(lambda spec: spec.stored_in(shapes_in(tensors, rename)), spec_tree, is_leaf=is_spec)
    leaves, structure = jax.tree_util.tree_flatten_with_path(stored, is_leaf=is_spec)
    places: Sequence[Sharding | None] = jax.tree.leaves(shardings) or [None] * len(leaves)
    opened = _open_all([spec for _, spec in leaves], tensors, {**_SKIPPED, **(skipped or {})}, rename, storing)
    loaded, widened, has_nibbles = list[Any](), 0, is_served and program_platform() in PLATFORMS
    experts: list[int] = []  # the places of a layer's
    for (path, spec), weights, place in zip(leaves, opened, places, strict=True):
        how = quantization if is_product(path) else "none"
        matrix = _load(spec, weights, np.dtype(spec.dtype(dtype)), place, how, merging)
        loaded.append(in_nibbles(matrix) if has_nibbles else matrix)
        if has_nibbles and spec.axes[:1] == ("experts",) and is_product(path):
            experts.append(len(loaded) - 1)
            if jax.tree_util.keystr(path[-1:], simple=True) == "down":  # the last of a layer's
                for at, made in zip(experts, experts_in_nibbles([loaded[i] for i in experts]), strict=True):
                    loaded[at] = made
                experts.clear()
        if any(isinstance(weight, LazyQuantized) or weight.is_widened for weight in weights):
            widened += loaded[-1].nbytes if isinstance(loaded[-1], jax.Array) else 0
    if widened:
        logger.info(
            "%s: weights that are stored in few bits are %s here, %.2f GB of them%s",
            tensors.folder,
            dtype,
            widened / 1e9,
            "" if quantization == "stored" else f"; {option} stored keeps whole numbers of few bits where it can",
        )
    if is_served and quantization in ("int4", "stored"):
        _log_widths(loaded)
    return jax.tree.unflatten(structure, loaded)


def _log_widths(loaded: Sequence[jax.Array | Weight]) -> None:
    """Say of how many matrices an accelerator holds numbers of few bits in 8."""
    in_bytes = sum(isinstance(each, QuantizedMatrix) for each in loaded)
    if in_bytes and program_platform() != "cpu":
        logger.info(
            "%d matrices of few bits are held in 8 bits: their numbers do not fit in 4, or the kernel for 4 bits does "
            "not take their shape",
            in_bytes,
        )


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
    problems += _account_for(tensors.names() - used, tensors, skipped)
    if problems:
        raise CheckpointError(
            f"{tensors.folder}: {listed(list(dict.fromkeys(problems)))}. Is config.json the config of another model?"
        )
    return opened


def _account_for(names: frozenset[str], tensors: TensorFolder, skipped: Mapping[str, str]) -> list[str]:
    """Log which tensors are not loaded, and why. Return those without a reason as problems."""
    reasons = {name: [why for pattern, why in skipped.items() if re.fullmatch(pattern, name)] for name in names}
    for name in [name for name in names if name.endswith(".bias") and not reasons[name]]:  # as AutoGPTQ writes them
        if f"{name.removesuffix('bias')}qweight" in tensors.names() and not tensors.read(name).any():
            reasons[name] = [_ZEROS]
    counts = Counter(why[0] for why in reasons.values() if why)
    if counts:
        counted = ", ".join(f"{count} ({why})" for why, count in sorted(counts.items()))
        level = logging.INFO
        if counts.keys() <= _NOT_MISSED:
            level = logging.DEBUG
        logger.log(level, "%s: tensors that are not loaded: %s", tensors.folder, counted)
    return [f"{name} is not part of this architecture" for name in sorted(names) if not reasons[name]]


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
    """Return a matrix in few bits, where it is (`kernels.matmul.quantize`)."""
    return _round_at(matrix, to, matrix.sharding)


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
