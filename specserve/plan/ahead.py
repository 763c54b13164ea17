"""Whole programs of a server and of training, compiled for devices that need not be here.

XLA's compilers for NVIDIA GPUs and for TPUs are libraries, which run on any machine that has them. What they make of a
program says how much memory it takes, what it copies and how many kernels it launches; time alone is not seen so.
"""

import contextlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, Sharding, SingleDeviceSharding

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.drafters.learning import Rows
from specserve.errors import ConfigError
from specserve.host import GPU_SHARE
from specserve.mesh import made_for, shardings, whole
from specserve.models.config import ModelConfig
from specserve.models.params import abstract
from specserve.models.presets import PRESETS_FILE
from specserve.models.stacked import stack_layers
from specserve.models.target import target_spec
from specserve.plan.hlo import Program
from specserve.serve.programs.placement import Placement
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import Shapes
from specserve.speculative.drafter import DraftWeights
from specserve.speculative.program import StepProgram
from specserve.speculative.slot_state import SlotState
from specserve.speculative.vocab import DraftVocab
from specserve.train.optimizer import make_optimizer
from specserve.train.settings import TrainSettings
from specserve.train.step import TrainState, loss_config, make_step, place_rows, place_state

# by platform: the module that has the compiler, and what to install
COMPILERS = {
    "gpu": ("jax_plugins.xla_cuda13", "jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt"),
    "tpu": ("libtpu", "libtpu"),
}
H100_FILE = PRESETS_FILE.with_name("h100.txtpb")  # the GPU as XLA knows one that is there
SHARE_OF_ABSENT = 0.8  # of a described GPU's memory, which XLA plans programs for; of one that is there, what JAX has
THUNKS = "*thunk_sequence_after_thunk_passes.txt"  # in what XLA dumps for a GPU


@dataclass(frozen=True)
class DescribedPlacement(Placement):
    """On devices that are described alone: what would be sent to them are shapes."""

    device: Any = None  # without a mesh

    @property
    def whole(self) -> Any:
        return SingleDeviceSharding(self.device) if self.mesh is None else super().whole

    @property
    def devices(self) -> list[Any]:
        return [self.device] if self.mesh is None else super().devices

    def put(self, host: Any) -> Any:
        return jax.tree.map(lambda x: self.shape(*np.shape(x), dtype=np.asarray(x).dtype), host)

    def scalar(self, value: int) -> Any:
        return self.put(np.int32(value))

    def flags(self, values: tuple[bool, ...]) -> Any:
        return self.put(np.asarray(values, np.bool_))

    def slots(self, slots: tuple[int, ...]) -> Any:
        place = self.whole if self.mesh is None else self.rows(len(slots))
        return jax.ShapeDtypeStruct((len(slots),), np.int32, sharding=place)

    def state(self, make: Callable[[], SlotState]) -> SlotState | None:
        if self.mesh is None:
            return jax.tree.map(lambda _leaf: self.whole, jax.eval_shape(make))
        return super().state(make)


class _DescribedHead(Head):
    def weights(self, place: Sharding | None = None) -> DraftWeights:
        del place
        ids: Any = self.target_ids
        return DraftWeights(self.params, DraftVocab(ids))


@dataclass(frozen=True)
class Counted:
    """The figures of a compiled program, for each device."""

    argument_bytes: int
    aliased_bytes: int  # of the arguments, those in whose place results are written
    temporary_bytes: int
    moved_bytes: int  # TPU: read and written in the large memory by all but kernels (`hlo`); GPU: 0
    text: str  # the optimised HLO
    launches: int = 0  # GPU: kernels and copies of a step in which no request has an option
    parts: int = 0  # GPU: what the host starts one after another; 1 where all of it is one CUDA graph


@dataclass(frozen=True)
class Described:
    """Devices of one kind, which need not be here."""

    platform: str  # "gpu" or "tpu"
    devices: tuple[Any, ...]
    options: dict[str, Any]  # of XLA, for each program

    @contextlib.contextmanager
    def made_for(self) -> Iterator[None]:
        """Have shapes chosen, and functions traced and compiled, for these devices within the context."""
        first = self.devices[0]
        cores = getattr(first, "num_cores" if self.platform == "tpu" else "core_count", None)
        kind = AbstractDevice(device_kind=first.device_kind, num_cores=cores, platform=self.platform)
        # from JAX 0.12 on, kernels are lowered for the device that the mesh names, also where that mesh has no axis
        mesh = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind))
        with made_for(self.platform), mesh, _without_cache():
            yield

    def runner(
        self, target: ModelConfig, drafter: TrainedDrafter | None, shapes: Shapes, mesh: Mesh | None = None
    ) -> Runner:
        """Make a runner whose weights and state are shapes: its programs can be compiled, and none be run."""
        place, head = DescribedPlacement(mesh, device=self.devices[0]), None
        with self.made_for():
            if drafter is not None:
                ids: Any = place.shape(drafter.draft_vocab_size)
                head = _DescribedHead(drafter, self._placed(drafter.spec(), target.dtype, mesh), ids)
            described = Target(target, self._placed(target_spec(target), target.dtype, mesh), (0,), Path())
            return Runner(described, head, shapes, mesh=mesh, place=place)

    def compile(self, runner: Runner, program: StepProgram) -> Counted:
        """Compile a program of a runner of these devices."""
        return self._count(lambda: runner.call(program).lower())

    def compile_training(
        self, settings: TrainSettings, target: ModelConfig, drafter: TrainedDrafter, mesh: Mesh | None = None
    ) -> Counted:
        """Compile a training step whose target runs in it."""
        place: Any = whole(mesh) or SingleDeviceSharding(self.devices[0])

        def shape(*sizes: int, dtype: Any = np.int32, at: Any = place) -> Any:
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=at)

        def lower() -> Any:
            optimizer, config = make_optimizer(settings), loss_config(settings, target, drafter)
            params = self._placed(drafter.spec(), "float32", mesh)
            moments = jax.eval_shape(optimizer.init, params)
            places = place_state(config.drafter, optimizer, mesh)
            of_moments = places.optimizer if places else jax.tree.map(lambda _leaf: place, moments)
            moments = jax.tree.map(lambda leaf, at: shape(*leaf.shape, dtype=leaf.dtype, at=at), moments, of_moments)
            own = stack_layers(self._placed(target_spec(target), target.dtype, mesh), target)
            sizes = settings.batch_size, settings.seq_len
            ids = shape(*sizes, at=place_rows(mesh, sizes) or place)
            rows = Rows(ids, shape(*sizes, dtype=np.bool_, at=ids.sharding), ids, ids)
            vocab = DraftVocab(shape(drafter.draft_vocab_size))
            step: Any = make_step(config, optimizer, mesh)
            return step.lower(TrainState(params, moments, shape()), own, vocab, rows, shape(dtype=np.float32))

        return self._count(lower)

    def _placed(self, spec: Any, dtype: str, mesh: Mesh | None) -> Any:
        """Describe the parameters of a spec where they live on these devices."""
        shapes: Any = abstract(spec, dtype)
        one = SingleDeviceSharding(self.devices[0])
        places = shardings(spec, mesh) if mesh else jax.tree.map(lambda _shape: one, shapes)
        return jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), shapes, places)

    def _count(self, lower: Callable[[], Any]) -> Counted:
        with self.made_for(), tempfile.TemporaryDirectory() as folder:
            own = {"xla_dump_to": folder} if self.platform == "gpu" else {}
            compiled = lower().compile({**self.options, **own})
            memory: Any = compiled.memory_analysis()
            text, moved, launches, parts = compiled.as_text() or "", 0, 0, 0
            if self.platform == "gpu":
                thunks = read_thunks(next(Path(folder).glob(THUNKS)).read_text())
                launches, parts = sum(thunk.launches for thunk in thunks), len(thunks)
            elif self.platform == "tpu":
                moved = Program(text).moved_bytes()
        sizes = memory.argument_size_in_bytes, memory.alias_size_in_bytes, memory.temp_size_in_bytes
        return Counted(*sizes, moved, text, launches, parts)


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Let JAX's own compilation cache be: what is compiled without a device can be written there, but not be read."""
    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()


def here() -> Described:
    """The devices of this process, by which what is compiled without them can be checked."""
    return Described(jax.default_backend(), tuple(jax.devices()), {})


def describe(name: str, number: int = 1) -> Described:
    """Describe so many devices: `h100`, or a slice of TPUs as libtpu names it, such as `v5e:2x2`. Raises ConfigError
    where their compiler is not installed."""
    platform = "gpu" if name == "h100" else "tpu"
    module, packages = COMPILERS[platform]
    if not _is_there(module):
        raise ConfigError(f"{name}: XLA's compiler for it is not installed; pip install {packages}")
    if platform == "tpu":
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # or libtpu asks the network which device it has
        # describing takes no device: neither a server on this host's TPU nor another such process is in its way
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        return Described("tpu", tuple(topologies.get_topology_desc(name, "tpu").devices[:number]), {})
    facts = re.sub(r"(device_memory_size: )(\d+)", _as_if_there, H100_FILE.read_text())
    slice_ = topologies.get_topology_desc(name, "cuda", target_config=facts, topology=f"1x1x{number}")
    toolkit = importlib.util.find_spec("nvidia.cu13")
    folder = next(iter(toolkit.submodule_search_locations or ()), "") if toolkit else ""
    return Described(
        "gpu", tuple(slice_.devices[:number]), {"xla_gpu_cuda_data_dir": folder, "xla_gpu_autotune_level": 0}
    )


def _as_if_there(size: re.Match[str]) -> str:
    """State so much memory that XLA plans for what a server's JAX has of it: where the arguments seem to fill the
    device, XLA computes again what it could keep, in a fifth more kernels."""
    return f"{size[1]}{round(int(size[2]) * float(GPU_SHARE) / SHARE_OF_ABSENT)}"


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


_LINE = re.compile(r"( *)(?:\d+: k(\w+)|(\w+):$)")


@dataclass
class Thunk:
    """A line of XLA's dump of a GPU program: something that is launched, or a label; with what is indented below it."""

    indent: int
    kind: str = ""
    label: str = ""
    inside: list["Thunk"] = field(default_factory=list)

    @property
    def launches(self) -> int:
        """The launches of a step without options: of a conditional's branches, the one with the fewest."""
        each = [thunk.launches for thunk in self.inside]
        if self.kind == "Conditional":
            return min(each, default=0)
        return sum(each) if self.inside or self.label else 1


def read_thunks(text: str) -> list[Thunk]:
    """The thunks that the host starts, one after another."""
    root = Thunk(-1)
    above = [root]
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        indent, kind, label = len(match[1]), match[2] or "", match[3] or ""
        if label == "condition":  # of a loop: its label alone is not indented
            indent = above[-1].indent + 2
        while above[-1].indent >= indent:
            above.pop()
        above[-1].inside.append(thunk := Thunk(indent, kind, label))
        above.append(thunk)
    return root.inside
