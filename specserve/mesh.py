"""Devices: the mesh, the table from logical axes to mesh axes, what the hardware implies (dtype), and where compiled
programs are kept.

Models name logical axes ("heads", "mlp", "vocab", ...); only this file knows what they are spread over.
"""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specserve import host
from specserve.errors import ConfigError

MESH_AXES = ("data", "tensor", "expert")
LOGICAL_TO_MESH: dict[str | None, str | None] = {
    None: None,
    "vocab": "tensor",
    "embed": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    "batch": "data",
}


def make_mesh(data: int = 1, tensor: int = 1, expert: int = 1) -> Mesh:
    """A mesh with Auto axes over the first data * tensor * expert devices. Raises ConfigError when they are too few."""
    needed = data * tensor * expert
    if needed > jax.device_count():
        raise ConfigError(
            f"mesh data={data},tensor={tensor},expert={expert} needs {needed} devices, this machine has "
            f"{jax.device_count()}; lower one of the axes"
        )
    devices = jax.devices()[:needed]
    return jax.make_mesh((data, tensor, expert), MESH_AXES, (AxisType.Auto,) * 3, devices=devices)


def sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """Where an array with these logical axes lives."""
    return NamedSharding(mesh, PartitionSpec(*(LOGICAL_TO_MESH[axis] for axis in axes)))


def default_dtype() -> str:
    """bfloat16 on accelerators; float32 on CPU, where XLA emulates bfloat16 matrix products about ten times slower."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def use_compilation_cache() -> None:
    """Keep compiled programs in the user's cache folder, so that a second start compiles nothing. A folder that JAX has
    been told of already (in code or by JAX_COMPILATION_CACHE_DIR) stays."""
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(host.cache_folder() / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
