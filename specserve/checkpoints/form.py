"""The form that a target's weights are held in where nobody says it."""

from pathlib import Path

import jax
from jax.sharding import Mesh

from specserve.checkpoints.configs import loaded_config
from specserve.checkpoints.lazy import LazyQuantized
from specserve.checkpoints.load import QUANTIZATIONS, Quantization, renamer, shapes_in
from specserve.checkpoints.packed import is_stored
from specserve.checkpoints.quantized import open_weight, read_storing
from specserve.checkpoints.tensors import TensorFolder, read_json
from specserve.kernels import native
from specserve.mesh import default_dtype, program_platform
from specserve.models.params import is_product, is_spec
from specserve.models.target import target_spec


def own_form(trained: str, folder: Path, mesh: Mesh | None) -> Quantization:
    """Return how a target in a Hugging Face folder is held to be served: rounded as it was when its head was `trained`.
    Else on one CPU with native kernels numbers of few bits are kept as they are stored, since these multiply by the
    very numbers that floats would be. Raises ConfigError or CheckpointError."""
    if trained != "none" and trained in QUANTIZATIONS:
        return trained
    is_exact = mesh is None and program_platform() == "cpu" and native.is_available()
    return "stored" if is_exact and has_few_bits(folder) else "none"


def has_few_bits(folder: Path) -> bool:
    """Return whether any matrix is stored in numbers of few bits that `stored` keeps. Only headers are read. Raises
    ConfigError or CheckpointError."""
    raw, where = read_json(folder / "config.json"), str(folder / "config.json")
    tensors, storing = TensorFolder(folder), read_storing(raw, where)
    names, rename = tensors.names(), renamer(tensors.names())
    shape_of = shapes_in(tensors, rename)
    spec_tree = target_spec(loaded_config(raw, dtype=default_dtype(), where=where))
    for path, spec in jax.tree_util.tree_leaves_with_path(spec_tree, is_leaf=is_spec):
        for name in map(rename, spec.stored_in(shape_of).names) if is_product(path) else ():
            if is_stored(names, name) and isinstance(open_weight(tensors, name, storing)[0], LazyQuantized):
                return True
    return False
