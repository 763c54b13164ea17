"""Devices: the mesh, the table from logical axes to mesh axes, and what the hardware implies (dtype, memory,
compilation cache).

Models name logical axes ("heads", "mlp", "vocab", ...); only this file knows which mesh axes they are spread over.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from specserve import host
from specserve.errors import ConfigError

MESH_AXES = ("data", "fsdp", "sequence", "tensor", "expert")
SERVING_AXES = ("data", "tensor", "expert")  # a step's few tokens of each sequence stay together
LOGICAL_TO_MESH: dict[str | None, tuple[str, ...]] = {
    None: (),
    "vocab": ("tensor",),
    "embed": ("fsdp",),  # of a matrix, which devices gather when it is multiplied by: see `gathered`
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "batch": ("data", "fsdp", "expert"),  # devices with different parameters have different rows, too
    "pages": ("data", "expert"),  # of a cache that data ranks share out: those of their own rows
    "sequence": ("sequence",),
}
COMPILER_FLAGS = "XLA_FLAGS", "LIBTPU_INIT_ARGS"  # variables that decide what XLA makes of a program
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"  # of JAX's monitoring
LONG_COMPILE = 1.0  # seconds; a shorter one takes little memory
ACTIVATIONS = ("batch", "sequence")  # axes of what runs through a model: nothing of a target's need divide

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Tree = TypeVar("Tree")


class Size(NamedTuple):
    """The size of a model's axis that a mesh must be able to cut into equal parts."""

    axis: str  # logical
    what: str
    number: int


class HasAxes(Protocol):
    """The fields of a parameter's spec that decide where the parameter lives."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def axes(self) -> tuple[str | None, ...]: ...


def parse_mesh(text: str, axes: tuple[str, ...] = MESH_AXES) -> Mesh | None:
    """The mesh for a text such as `data=2,tensor=4`, in any order; an axis that is not named is 1. None where that is
    one device. Raises ConfigError."""
    sizes = mesh_sizes(text, axes)
    if math.prod(sizes.values()) == 1:
        return None
    return make_mesh(**sizes)


def mesh_sizes(text: str, axes: tuple[str, ...] = MESH_AXES) -> dict[str, int]:
    """The number of devices along each axis that a text such as `data=2,tensor=4` names, whether this machine has so
    many or not. Raises ConfigError."""
    sizes: dict[str, int] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, size = part.partition("=")
        if name not in axes or name in sizes or not size.isdecimal() or int(size) < 1:
            expected = ", ".join(f"{axis}=N" for axis in axes)
            raise ConfigError(
                f"--mesh {text}: got {part!r}, expected {expected}, each at most once and N a number of at least 1"
            )
        sizes[name] = int(size)
    return sizes


def num_devices(text: str, axes: tuple[str, ...] = MESH_AXES) -> int:
    """The number of devices that such a text is over. Raises ConfigError."""
    return math.prod(mesh_sizes(text, axes).values())


def make_mesh(data: int = 1, fsdp: int = 1, sequence: int = 1, tensor: int = 1, expert: int = 1) -> Mesh:
    """A mesh with Auto axes over as many of the first devices as the sizes of its axes multiply to. Raises ConfigError
    when they are too few."""
    sizes = (data, fsdp, sequence, tensor, expert)
    needed = math.prod(sizes)
    if needed > jax.device_count():
        raise ConfigError(
            f"mesh {_describe(zip(MESH_AXES, sizes, strict=True))} needs {needed} devices, this machine has "
            f"{jax.device_count()}; lower one of the axes"
        )
    return jax.make_mesh(sizes, MESH_AXES, (AxisType.Auto,) * len(sizes), devices=jax.devices()[:needed])


def describe_mesh(mesh: Mesh) -> str:
    """The mesh as a user writes it after --mesh."""
    return _describe(mesh.shape.items())


def _describe(sizes: Iterable[tuple[str, int]]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes if size > 1)


def check_divides(mesh: Mesh, sizes: Sequence[Size]) -> None:
    """Check that the mesh cuts all of these sizes into equal parts, and that each of its axes cuts something. Raises
    ConfigError."""
    for name, parts in mesh.shape.items():
        own = [size for size in sizes if name in LOGICAL_TO_MESH[size.axis]]
        uneven = ", ".join(f"{size.number} {size.what}" for size in own if size.number % parts)
        if uneven:
            possible = math.gcd(*(size.number for size in own))
            raise ConfigError(
                f"--mesh {describe_mesh(mesh)}: the target has {uneven}, which {name}={parts} does not divide; "
                f"{name} may be {_divisors(possible)}"
            )
        if parts > 1 and not own and name not in {LOGICAL_TO_MESH[axis][0] for axis in ACTIVATIONS}:
            raise ConfigError(f"--mesh {describe_mesh(mesh)}: the target has nothing that {name}={parts} would spread")


def _divisors(number: int) -> str:
    *most, last = [str(i) for i in range(1, number + 1) if number % i == 0]
    if not most:
        return last
    return f"{', '.join(most)} or {last}"


def num_parts(mesh: Mesh | AbstractMesh | None, axis: str | None) -> int:
    """The number of parts into which the mesh cuts a logical axis that it divides."""
    if mesh is None:
        return 1
    return math.prod(mesh.shape[name] for name in LOGICAL_TO_MESH[axis])


def in_equal_parts(mesh: Mesh | AbstractMesh | None, axis: str | None, number: int) -> int:
    """Return the least number, of at least this, that the mesh cuts along a logical axis into equal parts."""
    parts = num_parts(mesh, axis)
    return -(-number // parts) * parts


def on_each_device(mesh: Mesh | AbstractMesh | None, axis: str | None, size: int) -> int:
    """Return how much of a logical axis of this size each device has: all of it where the mesh does not divide it."""
    if mesh is None:
        return size
    return size // math.prod(mesh.shape[name] for name in _cutting(mesh, axis, size))


def _cutting(mesh: Mesh | AbstractMesh, axis: str | None, size: int) -> tuple[str, ...]:
    """The mesh axes that cut a logical axis of this size: of its own, in their order, as many as divide it together."""
    names = LOGICAL_TO_MESH[axis]
    while size % math.prod(mesh.shape[name] for name in names):
        names = names[:-1]
    return names


def _entry(names: tuple[str, ...]) -> Any:
    """The entry of a PartitionSpec for an array's axis that these mesh axes cut."""
    if len(names) > 1:
        return names
    return next(iter(names), None)


def gathered(mesh: Mesh) -> Mesh:
    """The mesh by which parameters are cut while they are multiplied by, of which only the shape can be used: devices
    along `fsdp` share parameters out, and gather those of a layer when it is computed (Rajbhandari et al. 2020, ZeRO,
    arXiv 1910.02054, section 5.3)."""
    sizes = tuple(1 if name == "fsdp" else size for name, size in mesh.shape.items())
    return AbstractMesh(sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * len(sizes))  # type: ignore[return-value]


def gather(tree: Tree, place: Callable[[Mesh], Any]) -> Tree:
    """Have devices that share parameters out along `fsdp` gather them here, in a function that is traced: once, however
    often they are multiplied by. `place` says where each lives on a mesh."""
    mesh: Any = traced_mesh()
    if num_parts(mesh, "embed") == 1:
        return tree

    def whole_along(leaf: jax.Array, at: NamedSharding) -> jax.Array:
        kept = (None if entry in LOGICAL_TO_MESH["embed"] else entry for entry in at.spec)
        return jax.lax.with_sharding_constraint(leaf, PartitionSpec(*kept))

    return jax.tree.map(whole_along, tree, place(mesh))


def sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """The sharding of an array with these logical axes."""
    return NamedSharding(mesh, PartitionSpec(*(_entry(LOGICAL_TO_MESH[axis]) for axis in axes)))


def whole(mesh: Mesh | None) -> NamedSharding | None:
    """The sharding of an array that is whole on every device of the mesh. Without a mesh it is None, with which JAX
    takes its default device."""
    if mesh is None:
        return None
    return sharding(mesh, ())


def put(tree: Any, place: Sharding | None) -> Any:
    """Give a pytree of NumPy arrays to the devices. Each of several processes has the same arrays and gives its own
    devices their parts: nothing is sent or compared, as `jax.device_put` would at every call."""
    if place is None or place.is_fully_addressable:
        return jax.device_put(tree, place)

    def spread(leaf: Any) -> jax.Array:
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, place, lambda index: np.asarray(host[index]))

    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else spread(leaf), tree)


def fitting(
    mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...], units: Mapping[str, int] | None = None
) -> NamedSharding:
    """The sharding of an array with these logical axes and this shape (`fitting_partition`)."""
    return NamedSharding(mesh, fitting_partition(mesh, axes, shape, units))


def fitting_partition(
    mesh: Mesh | AbstractMesh,
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    units: Mapping[str, int] | None = None,
) -> PartitionSpec:
    """Return how an array with these logical axes and this shape is cut. An axis is whole on every device where its
    size does not divide, or where the number of its `units` does not. A unit is several entries long: of "heads", say,
    a head. Where several mesh axes cut an axis, as many of them do as divide it, the first of them first."""

    def entry(axis: str | None, size: int) -> Any:
        return _entry(_cutting(mesh, axis, math.gcd(size, (units or {}).get(axis or "", size))))

    return PartitionSpec(*(entry(axis, size) for axis, size in zip(axes, shape, strict=True)))


def shardings(spec_tree: Any, mesh: Mesh, units: Mapping[str, int] | None = None) -> Any:
    """The tree of NamedShardings of a spec tree, one for each parameter (`HasAxes`)."""

    def place(spec: HasAxes) -> NamedSharding:
        return fitting(mesh, spec.axes, spec.shape, units)

    return jax.tree.map(place, spec_tree)


def on_mesh(mesh: Mesh | None, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Wrap a function so that `traced_mesh`, called while it is traced, returns the mesh that it is compiled for."""
    if mesh is None:
        return function

    @functools.wraps(function)
    def traced(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args, **kwargs)

    return traced


def traced_mesh() -> AbstractMesh | None:
    """The mesh that the function being traced is compiled for, where `on_mesh` has set it."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    return mesh


@functools.cache
def traced_once(kernel: Callable[..., Any], *static: str) -> Callable[..., Any]:
    """Have calls with arrays of the same shapes share one trace of a kernel, and one copy of it in a program. Tracing
    and lowering a Pallas kernel takes longer than all else in a layer, and a model's layers are alike. A trace does not
    know `made_for`: the kernel is one platform's, and asks for none within."""
    return jax.jit(kernel, static_argnames=static)


def keep_along(x: jax.Array, *axes: str | None) -> jax.Array:
    """The array, cut along these logical axes over the mesh that is traced for, where the compiler might cut it
    otherwise."""
    mesh = traced_mesh()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, fitting_partition(mesh, axes, x.shape))


def program_platform() -> str:
    """The platform that programs are made for here: "cpu", "gpu" or "tpu". It is that of the mesh's devices in a traced
    function that `on_mesh` has set one for; else the one of `made_for`; else that of JAX's default device."""
    mesh = traced_mesh()
    if mesh is None or mesh.abstract_device is None:
        return _platform.get() or jax.default_backend()
    return mesh.abstract_device.platform


def program_kind() -> str:
    """The kind of the devices that programs are made for here, as JAX names it, such as "TPU7x"."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return described.device_kind if described is not None else jax.devices()[0].device_kind


_platform: ContextVar[str] = ContextVar("platform", default="")


@contextlib.contextmanager
def made_for(name: str) -> Iterator[None]:
    """Have programs made for a platform that need not be this machine's, within the context and on its thread."""
    token = _platform.set(name)
    try:
        yield
    finally:
        _platform.reset(token)


def is_on_one_device() -> bool:
    """Return whether the arrays of the function being traced lie on one device each: there is no mesh, or `over_parts`
    has cut all of its axes. A Pallas kernel can be called there alone, since XLA does not know how to cut its work."""
    mesh = traced_mesh()
    if mesh is None:
        return True
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return all(size == 1 or kind == AxisType.Manual for size, kind in kinds)


def partition(axes: tuple[str | None, ...], cut: Collection[str]) -> PartitionSpec:
    """The PartitionSpec by which an array with these logical axes enters `over_parts`. Axes outside `cut` are whole."""
    return PartitionSpec(*(_entry(LOGICAL_TO_MESH[axis]) if axis in cut else None for axis in axes))


def over_parts(
    function: Callable[..., Result],
    cut: Collection[str],  # logical axes
    in_partitions: Any,  # of the arguments' arrays, see `partition`
    out_partitions: Any,  # of the results'
) -> Callable[..., Result]:
    """The function as each device runs it (`jax.shard_map`), with its own parts of the arrays that are cut along these
    axes, and all of the rest. Within it `part_index` gives the index of its parts, and `sum_parts` adds up over
    devices."""
    # unchecked: some of JAX's own functions, such as `searchsorted`, do not pass the check
    return jax.shard_map(
        function, in_specs=in_partitions, out_specs=out_partitions, axis_names=_names(cut), check_vma=False
    )


def sum_parts(tree: Result, cut: Collection[str]) -> Result:
    """Add a tree of arrays up over the devices that have different parts of these logical axes. Call it within
    `over_parts`."""
    if not cut:
        return tree
    names = _names(cut)
    # in the mesh's order: a set has another one in each process, and so would the program and the order of the sum
    return jax.lax.psum(tree, tuple(name for name in MESH_AXES if name in names))


def most_of_parts(x: jax.Array, cut: Collection[str]) -> jax.Array:
    """Return the largest of the numbers that the devices with different parts of these logical axes have. Call it
    within `over_parts`, where there is an axis."""
    return jax.lax.pmax(x, tuple(_names(cut))) if cut else x


def join_parts(tree: Result, axis: str) -> Result:
    """Join the arrays of all devices that have different parts of a logical axis, one after the other along their
    first axis. Call it within `over_parts`."""
    names = LOGICAL_TO_MESH[axis]
    return jax.tree.map(lambda x: jax.lax.all_gather(x, names, tiled=True), tree)


def share_sum(x: jax.Array, axis: str) -> jax.Array:
    """Return the device's own rows of the sum over the devices that `join_parts` would join. Call it within
    `over_parts`."""
    return jax.lax.psum_scatter(x, LOGICAL_TO_MESH[axis], tiled=True)


def _names(cut: Collection[str]) -> set[str]:
    return {name for axis in cut for name in LOGICAL_TO_MESH[axis]}


def part_index(axis: str) -> jax.Array:  # [] int32
    """Return the index of the part of a logical axis that a device has. Call it within `over_parts`."""
    return jax.lax.axis_index(LOGICAL_TO_MESH[axis])


def free_memory(mesh: Mesh | None = None) -> int:
    """The bytes that are free on each device of the mesh, or on the first device without one. CPU devices share what
    the host has."""
    devices = jax.devices()[:1]
    if mesh is not None:
        devices = list(mesh.devices.flat)
    stats = [device.memory_stats() for device in devices if device.process_index == jax.process_index()]
    known = [entry["bytes_limit"] - entry["bytes_in_use"] for entry in stats if entry and "bytes_limit" in entry]
    return min(known, default=host.free_memory() // len(devices))


def default_dtype() -> str:
    """The dtype that models are computed in here."""
    return dtype_of(program_platform())


def dtype_of(platform: str) -> str:
    """Return the dtype that models are computed in on a platform: bfloat16 on accelerators, and float32 on CPU, where
    XLA emulates bfloat16 matrix products about ten times slower."""
    if platform == "cpu":
        return "float32"
    return "bfloat16"


def use_compilation_cache() -> None:
    """Turn on JAX's compilation cache in the user's cache folder, so that a second run of the same training compiles
    nothing. The server keeps its programs otherwise (`serve.programs.program_cache`). A folder that the user has given
    to JAX (in code or by JAX_COMPILATION_CACHE_DIR) stays. What compiling has taken goes back to the system."""
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(host.cache_folder() / "jax"))
        # small programs too: there are many, and reading one takes a tenth of compiling it
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    _give_back_after_compiling()


@functools.cache  # once, since JAX keeps every listener
def _give_back_after_compiling() -> None:
    def give_back(event: str, duration_secs: float, **_facts: Any) -> None:
        if event == COMPILE_EVENT and duration_secs > LONG_COMPILE:
            host.give_back_freed_memory()

    jax.monitoring.register_event_duration_secs_listener(give_back)
