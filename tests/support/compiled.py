"""Programs of a server as XLA's compilers make them for devices that need not be here, and what is found in them.

The targets are a preset's first layers, the heads that draft are whole.
"""

import dataclasses
import functools
import json
import math
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from typer.testing import CliRunner

from specserve.cli.main import app
from specserve.devices import parse_devices
from specserve.drafters.registry import DraftSettings, load_kind
from specserve.drafters.speculation import parse_speculation
from specserve.kernels import nibbles
from specserve.kernels.matmul import QuantizedMatrix, quantize
from specserve.kernels.nibbles import NibbleMatrix, WordMatrix
from specserve.kernels.pages import Pages, default_page_size
from specserve.mesh import MESH_AXES
from specserve.models.params import is_product
from specserve.models.presets import PRESETS
from specserve.models.sharding import spread_kv_heads
from specserve.plan.ahead import Counted, Described, describe
from specserve.plan.hlo import Instruction, Program
from specserve.plan.serving import MEMORY_SHARE
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import make_shapes
from specserve.serve.sizes import estimated_temporaries
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import Tree

SLOTS, CONTEXT, CHUNK = 8, 4096, 1024
DRAFT_VOCAB = 32_000
WAYS = ("off", "chain:3", "tree:5x4x16")
COPIES = {"copy", "copy-start", "copy-done", "transpose", "slice-start", "dynamic-slice-start", "scatter"}
COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute"}


@dataclass(frozen=True)
class Case:
    """A program of a server on devices of one kind."""

    devices: str  # as `describe` knows them
    way: str  # the speculation of a step, "prefill": a prompt's CHUNK tokens, or "mixed" and a speculation: both in one
    preset: str = "qwen3-8b"
    tensor: int = 1  # devices that share each layer
    layers: int = 2
    bits: int = 16  # of the target's matrices: 4 and 8 as `quantize` rounds them

    def __str__(self) -> str:
        over = f" tensor={self.tensor}" if self.tensor > 1 else ""
        depth = f" of {self.layers} layers" if self.layers != 2 else ""
        width = f" in {self.bits} bits" if self.bits != 16 else ""
        return f"{self.devices.partition(':')[0]}{over} {self.preset.partition('-')[0]} {self.way}{depth}{width}"

    @property
    def tree(self) -> Tree | None:
        return None if self.way == "prefill" else parse_speculation(self.way.removeprefix("mixed "))

    @property
    def described(self) -> Described:
        return _described(self.devices, self.tensor)

    @property
    def runner(self) -> Runner:
        return _runner(self.devices, self.preset, self.tensor, self.layers, self.bits)

    @property
    def program(self) -> StepProgram:
        shapes = self.runner.shapes
        prefill, step = shapes.prefill(shapes.max_pages, CHUNK), StepProgram(SLOTS, shapes.max_pages, self.tree)
        mixed = shapes.mixed(SLOTS, self.tree, prefill)
        return {"prefill": prefill, "mixed": mixed}.get(self.way.partition(" ")[0], step)

    @property
    def rows(self) -> int:
        """The rows of the program's products."""
        of_step = 0 if self.way == "prefill" else SLOTS * self.runner.shapes.num_nodes(self.tree)
        return of_step + self.program.chunk

    @property
    def layer_bytes(self) -> int:
        """The bytes that each device holds of the weights of the target's layers."""
        return _bytes_on_each(self.runner.inputs.layouts.many.target.layers)

    def compiled(self) -> Counted:
        return _compiled(self)

    @property
    def state_bytes(self) -> int:
        """The bytes that each device holds of what sequences have left behind."""
        return _bytes_on_each(self.runner.state)

    @property
    def set_aside(self) -> int:
        """The bytes that a server of such programs alone keeps free for what they need beside their arguments."""
        runner = self.runner
        alone = dataclasses.replace(runner.shapes, trees=(self.tree,))
        with self.described.made_for():
            return estimated_temporaries(runner.config.target, alone, runner.place.mesh)

    def copies_of_pages(self) -> set[str]:
        """The operations that make an array of the size of a layer's pages anew, of those that move memory. On a TPU
        a scatter is one of them, whose compiler lays its result out otherwise than kernels do."""
        layers = self.runner.state.cache.layers
        arrays = [
            leaf for layer in layers if isinstance(layer, Pages) for leaf in (layer.k, layer.v) if leaf is not None
        ]
        own = {",".join(map(str, shape)) for shape in {_on_each(array) for array in arrays}}
        text = self.compiled().text
        made = {kind for shape in own for kind in re.findall(rf"= \(?\w+\[{shape}\]\S* (?:\S+ )*?([\w-]+)\(", text)}
        return made & (COPIES if self.described.platform == "tpu" else COPIES - {"scatter"})

    def sorted_sizes(self) -> set[int]:
        """The lengths of the rows that the program sorts, in any branch."""
        return {int(size) for size in re.findall(r"= \(?\w+\[(?:\d+,)*(\d+)\]\S* .*?\bsort\(", self.compiled().text)}

    def widened_matrices(self) -> set[str]:
        """The arrays as large as a matrix of 4 bits, or those of all experts, that the program makes, in memory or
        within a kernel. A row of bytes is none: a TPU's program allocates some."""
        leaves = jax.tree.leaves(self.runner.inputs.layouts.many, is_leaf=_is_four)
        most = max(len(leaf.shape) for leaf in leaves if _is_four(leaf))
        # where there are experts, the blocks of their rows may be as large as a layer's other matrices
        codes = [leaf.codes for leaf in leaves if _is_four(leaf) and len(leaf.shape) == most]
        own = {2 * each.dtype.itemsize * math.prod(_on_each(each)) for each in codes}
        made = re.findall(r"= \(?(\w+\[(\d+,[\d,]+)\])\S* (?!parameter|get-tuple-element)", self.compiled().text)
        return {text for text, sizes in made if math.prod(map(int, sizes.split(","))) in own}

    def copies_of_matrices(self) -> set[str]:
        """The matrices of weights that the program writes anew to the large memory of a TPU, in another order."""
        leaves = [leaf for leaf in jax.tree.leaves(self.runner.inputs.layouts.many) if leaf.ndim == 2]
        own = {tuple(sorted(_on_each(leaf))) for leaf in leaves}

        def copied(instruction: Instruction) -> int:
            made = instruction.results[:1] if instruction.kind in ("copy", "copy-start", "transpose") else []
            return sum(each.num_bytes for each in made if not each.is_on_chip)

        found = filter(copied, Program(self.compiled().text).executed(copied))
        return {each.results[0].text for each in found if tuple(sorted(each.results[0].sizes)) in own}


def _is_four(leaf: Any) -> bool:
    return isinstance(leaf, NibbleMatrix | WordMatrix)


def collectives(text: str) -> dict[str, int]:
    """The arrays that devices send one another in one run of an optimised program, and the bytes of each."""

    def sent(instruction: Instruction) -> int:
        is_one = instruction.kind.removesuffix("-start") in COLLECTIVES
        return sum(each.num_bytes for each in instruction.results) if is_one else 0

    found = filter(sent, Program(text).executed(sent))
    return {each.text: each.num_bytes for instruction in found for each in instruction.results}


def dumped_to(folder: Path) -> dict[str, Any]:
    """The options by which XLA leaves the kernels of a program for GPUs in a folder, as `spilled` reads them."""
    return {"xla_dump_to": str(folder), "xla_dump_emitter_re": ".*ptx.*"}


def spilled(folder: Path, described: Described) -> dict[str, int]:
    """The bytes of registers that each of this package's kernels in a program spills, which is compiled again for it.
    XLA's own are left out: of some of its sorts it knows none but a poor form for a GPU that is not here."""
    found, ptxas = {}, Path(described.options["xla_gpu_cuda_data_dir"], "bin", "ptxas")
    for path in folder.glob("*.ptx"):
        for kernel in re.findall(r"\.entry ((?:attend|merge|multiply)_\w+)\(", path.read_text()):
            command = [ptxas, "-v", "-arch=sm_90a", path, "-o", folder / "out"]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            found[kernel] = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return found


def _on_each(array: jax.Array) -> tuple[int, ...]:
    """The shape of an array's part on one device."""
    return array.sharding.shard_shape(array.shape)


def _bytes_on_each(tree: Any) -> int:
    return sum(math.prod(_on_each(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@functools.cache
def _described(devices: str, tensor: int) -> Described:
    return describe(devices, tensor)


@functools.cache
def _runner(devices: str, preset: str, tensor: int, layers: int, bits: int) -> Runner:
    full, described, mesh = PRESETS[preset].config(), _described(devices, tensor), None
    target = dataclasses.replace(full, num_layers=layers, layers=full.layers[:layers], dtype="bfloat16")
    head = load_kind("eagle3").new(DraftSettings(), full, DRAFT_VOCAB).with_dtype("bfloat16")
    drafter = type(head)(dataclasses.replace(head.config, aux_layers=(0, 1, 1)))
    if tensor > 1:
        shape = [tensor if axis == "tensor" else 1 for axis in MESH_AXES]
        mesh = Mesh(np.array(described.devices).reshape(shape), MESH_AXES, (AxisType.Auto,) * len(shape))
        target = spread_kv_heads(target, mesh)
    page = default_page_size(described.platform)
    with described.made_for():
        sizes = {"num_slots": SLOTS, "max_model_len": CONTEXT, "page_size": page, "num_pages": SLOTS * CONTEXT // page}
        shapes = make_shapes([parse_speculation(way) for way in WAYS], target, mesh, **sizes)
    runner = described.runner(target, drafter, shapes, mesh)
    if bits != 16:
        weights = runner.inputs.layouts.many
        narrow = functools.partial(_in_few_bits, bits, described.platform)
        params = jax.tree_util.tree_map_with_path(narrow, weights.target)
        weights = dataclasses.replace(weights, target=params)
        runner.inputs.layouts = dataclasses.replace(runner.inputs.layouts, one=weights, few=weights, many=weights)
    return runner


def _in_few_bits(bits: int, platform: str, path: tuple[Any, ...], leaf: Any) -> Any:
    """A matrix of a step as an accelerator holds it in so many bits, of its shape alone."""
    if not is_product(path):
        return leaf

    def narrow(matrix: jax.Array) -> QuantizedMatrix | NibbleMatrix | WordMatrix:
        if bits == 8:
            return quantize(matrix, "int8")
        four = quantize(matrix, "int4")
        arrays = four.values, four.scale, four.offset
        return nibbles.lay_out(platform, leaf.sharding, *arrays, block=four.block, numbers="uint4")

    made = jax.eval_shape(narrow, leaf)
    places: list[Any] = [leaf.sharding, leaf.sharding]
    if isinstance(leaf.sharding, NamedSharding):
        stack = *leaf.sharding.spec, *[None] * (leaf.ndim - len(leaf.sharding.spec))
        axes = [stack, (*stack[:-2], None, stack[-1])] if bits == 8 else made.axes(stack[:-2], *stack[-2:])
        places = [NamedSharding(leaf.sharding.mesh, PartitionSpec(*each)) for each in axes]
    leaves, structure = jax.tree.flatten(made)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at) for x, at in zip(leaves, places, strict=True)]
    return jax.tree.unflatten(structure, shapes)


@functools.cache
def _compiled(case: Case) -> Counted:
    return case.described.compile(case.runner, case.program)


def planned(devices: str, *arguments: str) -> list[dict[str, Any]]:
    """The steps of `specserve plan serve --compile` for Qwen3-8B, whose memory is what the plan counts: the arguments
    of each are its parts, and token masks, the head's token ids and the slots, which it leaves out; what a step takes
    beside them has room in what the plan leaves free. On TPUs small arrays fill tiles, which at most doubles these."""
    line = ["plan", "serve", "--target", "qwen3-8b", "--devices", devices, *arguments, "--compile", "--json"]
    shown = CliRunner().invoke(app, line, catch_exceptions=False).stdout
    found, (device, _), target = json.loads(shown), parse_devices(devices), PRESETS["qwen3-8b"].config()
    parts, steps = found["fleet"]["bytes_per_device"], found["compiled"]
    for step in steps:
        head, ids, masks = parts["head"], 4 * DRAFT_VOCAB, 0
        if step["way"] == "off":
            head, ids, masks = 0, 0, step["batch"] * (target.vocab_size // 8)
        uncounted = step["bytes_of_arguments"] - (sum(parts.values()) - parts["head"] + head)
        tiles = 2 if devices.startswith("tpu") else 1
        assert ids + masks <= uncounted <= tiles * (ids + masks) + 4096, step
        assert step["bytes_beside"] <= (1 - MEMORY_SHARE) * device.memory, step
    return steps
