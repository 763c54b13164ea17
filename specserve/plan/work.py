"""The bytes that each device of a mesh holds of target and head, and its work in a served step: FLOPs, bytes read and
bytes sent, from shapes alone.

Counted is what any implementation must do: the bytes of the matrices that a device holds (of a mixture, those of the
experts that so many tokens are expected to choose), the committed keys and values of its sequences, two operations for
each number of a matrix and each row, attention's, and the bytes that layers send between devices. A pass takes as
long as the slower of memory and arithmetic, each at a share of its peak that is usual, and what is sent besides (a
roofline).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from specserve.checkpoints.load import has_own_head
from specserve.devices import Device
from specserve.drafters.interface import TrainedDrafter
from specserve.kernels import native
from specserve.kernels.grouped import expected_experts
from specserve.kernels.matmul import INT4_BLOCK
from specserve.kernels.nibbles import chunk_of, span_of, word_bytes
from specserve.mesh import MESH_AXES, num_parts
from specserve.models.config import ModelConfig
from specserve.models.params import is_matrix
from specserve.models.sharding import Held, held_by_each, place_target, total_bytes
from specserve.models.target import target_spec
from specserve.serve.programs.placement import bytes_seen
from specserve.speculative.tree import Tree
from specserve.train.flops import mixing_flops

SENDING_SECONDS = 5e-6  # before the first byte of a collective: an assumption


@dataclass(frozen=True)
class MemoryPart:
    """A part of the memory that a run takes on each device."""

    name: str
    num_bytes: int
    what: str


def target_held(
    config: ModelConfig,
    mesh: Mesh | None,
    quantization: str = "none",
    platform: str = "gpu",
    *,
    is_served: bool = False,
) -> tuple[Held, ...]:
    """Count what each device of the mesh holds of a target, or one device alone. The matrices of a quantized one have
    8 bits, and a float32 scale for each output; those of `int4` differ (`_int4_bytes`). Raises ConfigError where the
    mesh does not divide the target."""
    is_one_device = mesh is None or mesh.size == 1
    spec = target_spec(config, has_own_head=has_own_head(quantization, platform, is_one_device=is_one_device))
    places = None
    if mesh is not None:
        places = place_target(config, spec, mesh)

    if quantization == "none":
        return held_by_each(spec, config.dtype, places)
    held = held_by_each(spec, config.dtype, places, product_dtype="int8")
    sizes = [each.num_bytes + each.scale_bytes for each in held]
    if quantization == "int4":
        is_native = platform == "cpu" and is_one_device and native.is_available()
        experts_fit = all(_fits(each, platform) for each in held if each.is_expert and each.is_product)

        def bytes_of(each: Held) -> int:
            fits = experts_fit if each.is_expert else _fits(each, platform)  # a layer's experts do, or none of them
            return _int4_bytes(each, platform, is_packed=is_served and (is_native or fits))

        sizes = [bytes_of(each) if each.is_product else size for each, size in zip(held, sizes, strict=True)]
    return tuple(replace(each, num_bytes=size) for each, size in zip(held, sizes, strict=True))


def _int4_bytes(matrix: Held, platform: str, *, is_packed: bool) -> int:
    """Count the bytes that each device holds of a matrix that was rounded to int4. A block of inputs has a scale and an
    offset for each output. They are float32 beside numbers of 8 bits, and of 16 bits beside numbers of 4, which one
    CPU, GPUs and TPUs serve by kernels of their own."""
    d_in = matrix.shape[-2]
    of_blocks = matrix.size // d_in * -(-_inputs_of_blocks(matrix) // INT4_BLOCK)
    if is_packed and platform == "tpu":
        return math.prod(matrix.shape[:-2]) * word_bytes(d_in, matrix.shape[-1], min(d_in, INT4_BLOCK))
    return matrix.size // 2 + 4 * of_blocks if is_packed else matrix.size + 8 * of_blocks


def _fits(matrix: Held, platform: str) -> bool:
    """Return whether a kernel for 4 bits takes each device's part of a matrix that was rounded to int4."""
    d_in, is_taken = matrix.shape[-2], {"gpu": span_of, "tpu": chunk_of}.get(platform)
    has_whole_blocks = _inputs_of_blocks(matrix) == d_in
    return is_taken is not None and has_whole_blocks and is_taken(d_in, min(d_in, INT4_BLOCK)) > 0


def _inputs_of_blocks(matrix: Held) -> int:
    """Return the inputs whose scales a device holds: all of them where its own are not made of whole blocks."""
    d_in = matrix.shape[-2]
    return d_in if d_in % INT4_BLOCK == 0 else matrix.spec.shape[-2]


def abstract_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Make a mesh of devices that this machine need not have: only its shape is used."""
    axes = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    return AbstractMesh(axes, MESH_AXES, axis_types=(AxisType.Auto,) * len(axes))  # type: ignore[return-value]


@dataclass(frozen=True)
class DeviceWork:
    """The work of a pass, or of a whole step, on each device."""

    flops: float
    weights: float  # bytes read
    cache: float  # bytes of keys and values read
    sums: int = 0  # collectives
    sent: float = 0.0  # bytes, by all of them together

    @property
    def read(self) -> float:
        """The bytes read."""
        return self.weights + self.cache

    def seconds(self, device: Device, num_devices: int) -> float:
        """Return the time of the pass on so many of these devices."""
        computing = self.flops / (device.peak * device.share_of_peak)
        reading = self.read / (device.bandwidth * device.share_of_bandwidth)
        sending = self.sent / (device.rate_among(num_devices) * device.share_of_bandwidth)
        return max(reading, computing) + (self.sums * SENDING_SECONDS + sending)


class Replica:
    """A target, and perhaps a head, on the devices of a mesh, as they serve. The constructor raises ConfigError where
    the mesh does not divide the target."""

    def __init__(
        self,
        target: ModelConfig,
        head: TrainedDrafter | None,
        mesh: Mesh,
        *,
        quantization: str = "none",
        platform: str = "gpu",
    ) -> None:
        self.target, self.head, self.mesh, self.quantization = target, head, mesh, quantization
        self.target_held = target_held(target, mesh, quantization, platform, is_served=True)
        self.head_held: tuple[Held, ...] = ()
        if head is not None:
            self.head_held = held_by_each(head.spec(), head.dtype, head.place(mesh))
        self._dense = tuple(each for each in _without_lookups(self.target_held) if not each.is_expert)
        self._experts = tuple(each for each in self.target_held if each.is_expert)

    @property
    def form(self) -> str:
        """The form of the target's weights, for a table."""
        if self.quantization == "none":
            return self.target.dtype
        products = [each for each in self.target_held if each.is_product]
        bits = 8 * total_bytes(products) / sum(each.size for each in products)
        return f"{self.quantization} matrices, {bits:.1f} bits a number"

    @property
    def matrix_bytes(self) -> int:
        """The bytes of the target that a step reads if its rows choose every expert."""
        return total_bytes(self._dense) + total_bytes(self._experts)

    def forward(self, batch: int, nodes: int, context: int) -> DeviceWork:
        """Count the work of the target's forward pass over `nodes` rows of each of `batch` sequences that have
        `context` committed tokens."""
        config, mesh = self.target, self.mesh
        among = -(-batch // mesh.shape["data"]) * nodes  # rows whose experts lie on the same devices
        own = -(-batch // num_parts(mesh, "batch"))  # sequences
        rows = own * nodes  # outside the experts
        # a mean over a row of twice the context sees what a token after the context sees
        mixing = rows * mixing_flops(config, 2 * context) / num_parts(mesh, "heads")
        flops, weights = 2 * _multiplied(self._dense) * rows + mixing, float(total_bytes(self._dense))
        if experts := config.experts:
            read = expected_experts(experts.num_experts, experts.top_k, among) / experts.num_experts
            weights += total_bytes(self._experts) * read
            flops += 2 * among * _multiplied(self._experts) * experts.top_k / experts.num_experts
        cache = own * bytes_seen(config, None, context, mesh)
        return DeviceWork(flops, weights, cache, *self._sent(rows, among))

    def _sent(self, rows: int, among: int) -> tuple[int, float]:
        """Count the collectives of a forward pass and the bytes that a device sends in them: a sum of its `rows`
        along `tensor` for each mixer and MLP, and in each mixture a sum along `expert` of those rows `among` which its
        experts are chosen (as an all-gather and a reduce-scatter, where each device has rows of its own)."""
        config, tensor, expert = self.target, self.mesh.shape["tensor"], self.mesh.shape["expert"]
        mixtures = sum(config.kind(i).has_experts for i in range(config.num_layers))
        sums = config.num_blocks * (tensor - 1) / tensor * rows + mixtures * (expert - 1) / expert * among
        count = config.num_blocks * (tensor > 1) + mixtures * (expert > 1)
        return count, 2 * sums * config.d_model * np.dtype(config.dtype).itemsize

    def drafts(self, batch: int, tree: Tree, context: int) -> tuple[DeviceWork, ...]:
        """Count the work of the passes in which the head proposes a tree for each of `batch` sequences, one for each
        depth. There are none for a tree that needs no head."""
        if not tree.uses_head:
            return ()
        assert self.head is not None, "a tree that a head proposes has one"
        own = -(-batch // num_parts(self.mesh, "batch"))
        size = _multiplied(_without_lookups(self.head_held))
        both, target = (bytes_seen(self.target, head, context, self.mesh) for head in (self.head, None))
        weights, cache = size * np.dtype(self.head.dtype).itemsize, own * (both - target)
        later = DeviceWork(2 * size * own * tree.top_k, weights, cache)
        return (DeviceWork(2 * size * own, weights, cache), *(tree.depth - 1) * (later,))


def _without_lookups(held: tuple[Held, ...]) -> tuple[Held, ...]:
    """Leave out embeddings, which are looked up, but for one that is the output head too."""
    head = "head" if any(each.field == "head" for each in held) else "embedding"
    return tuple(each for each in held if each.spec.init != "embedding" or each.field == head)


def _multiplied(held: tuple[Held, ...]) -> int:
    """Count the numbers of matrices. An embedding among them is the output head too."""
    return sum(each.size for each in held if is_matrix(each.spec) or each.field == "embedding")
