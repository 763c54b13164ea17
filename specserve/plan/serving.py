"""A fleet of servers on paper: how many replicas on which meshes, what their memory holds, how they behave under a
load, and from which tau on speculation pays. Nothing is loaded but a config.json."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specserve import config, host
from specserve.checkpoints.configs import find_config
from specserve.devices import Device, parse_devices
from specserve.drafters.interface import TrainedDrafter
from specserve.drafters.registry import KindName
from specserve.drafters.speculation import describe, drafter_for, parse_speculation
from specserve.errors import ConfigError
from specserve.mesh import SERVING_AXES, default_dtype, free_memory, mesh_sizes, num_parts
from specserve.models.config import ModelConfig
from specserve.models.params import specs
from specserve.models.presets import target_size
from specserve.models.target import target_spec
from specserve.plan.outline import Reached, expected
from specserve.plan.settings import PlanServeRun
from specserve.plan.simulate import Replica, SimulationReport, poisson, simulate
from specserve.plan.steady_state import Load, Way, acceptance, break_even_tau, solve, tau_of
from specserve.plan.step_costs import RooflineCosts, StepCosts, measured_costs
from specserve.plan.training import MemoryPart, abstract_mesh, held_by_each
from specserve.serve.launch import CACHE_DTYPES
from specserve.serve.programs.placement import state_bytes
from specserve.serve.programs.shapes import make_batch_sizes
from specserve.serve.tuned import Profile, machine_facts, read_profile
from specserve.speculative.step import StepConfig
from specserve.speculative.tree import Tree
from specserve.train.run.checks import plan_drafter
from specserve.train.run.recipe import fill
from specserve.train.settings import TrainRun

HERE = re.compile(r"here-([1-9]\d*)")  # so many machines like this one
MEMORY_SHARE = 0.9  # of a device's memory; the rest is for activations and programs
MOST_PARTS = 64  # of a mesh's axis, where a mesh is looked for
OF_CHAIN = re.compile(r"chain(?::| of )(\d+)")  # in what a source says of its tau


@dataclass(frozen=True)
class Fit:
    """The memory of each device of a replica by its uses, and the slots and pages that it has room for."""

    memory: tuple[MemoryPart, ...]
    num_slots: int
    num_pages: int
    num_ranks: int = 1  # data ranks, each of which has an equal part of both


@dataclass(frozen=True)
class PlannedFleet:
    """Replicas on one kind of mesh, which share a load evenly."""

    mesh: str  # of a replica, as `serve --mesh` takes it; empty: one device
    devices: int  # of a replica
    replicas: int
    fit: Fit
    costs: StepCosts
    plain: Way
    speculative: Way | None  # None: nothing speculates

    @property
    def ways(self) -> tuple[Way, ...]:
        return (self.plain,) if self.speculative is None else (self.plain, self.speculative)

    def to_json(self) -> dict[str, Any]:
        """Return everything that was found about the fleet, in units as the names say."""
        ways = {"plain": self.plain} | ({"speculative": self.speculative} if self.speculative else {})
        return {
            "mesh": self.mesh,
            "devices_per_replica": self.devices,
            "replicas": self.replicas,
            "bytes_per_device": {part.name: part.num_bytes for part in self.fit.memory},
            "slots": self.fit.num_slots,
            "pages": self.fit.num_pages,
            "most_requests_per_second": self.most_requests,
            "break_even_tau": self.break_even_tau if self.speculative else None,
            "ways": {name: self._way(way) for name, way in ways.items()},
            "costs": asdict(self.costs),
        }

    def _way(self, way: Way) -> dict[str, Any]:
        """Return the figures of a way to decode, over all replicas."""
        return {
            "tau": way.tau,
            "carries_the_load": not way.is_full,
            "requests_per_second_at_most": self.replicas * way.most_requests,
            "tokens_per_second": self.replicas * way.tokens_per_second,
            "sequences_per_replica": way.batch,
            "step_ms": 1e3 * way.step_seconds,
            "ms_per_token": 1e3 * way.token_seconds,
            "first_token_ms": 1e3 * way.first_token_seconds,
        }

    @property
    def most_requests(self) -> float:
        """The requests per second that all replicas take, in the better way."""
        return self.replicas * max(way.most_requests for way in self.ways)

    @property
    def best(self) -> Way:
        """The way that gives a sequence its tokens sooner, of those that carry the load."""
        return min(self.ways, key=lambda way: (way.is_full, way.token_seconds))

    @property
    def break_even_tau(self) -> float:
        """The tau above which speculation is faster, at the batch that plain decoding has under the load."""
        return break_even_tau(self.costs, self.plain.batch)


@dataclass(frozen=True)
class ServePlan:
    """The plan: what was asked, the fleet that was found, and other fleets that would carry the load."""

    run: PlanServeRun
    target: ModelConfig
    config_from: str
    step: StepConfig
    tree: Tree | None
    tau: float
    reached: Reached | None  # where the expected tau is from; None: it was given, or nothing speculates
    device: str  # what the devices are called
    num_devices: int
    fleet: PlannedFleet
    others: tuple[PlannedFleet, ...]  # on other meshes, the best first

    def to_json(self) -> dict[str, Any]:
        """Return everything that was found, in units as the names say."""
        asked = asdict(self.run)
        load = {name: asked[name] for name in ("qps", "prompt", "answer", "shared_prompt", "system_prompts")}
        tau = {"value": self.tau, "from": None if self.reached is None else asdict(self.reached)}
        return {
            "target": self.run.target,
            "config": self.config_from,
            "devices": {"name": self.device, "number": self.num_devices},
            "load": load,
            "speculation": self.run.speculation,
            "tau": tau if self.tree else None,
            "fleet": self.fleet.to_json(),
            "others": [fleet.to_json() for fleet in self.others],
        }

    def simulate(self, *, is_speculative: bool) -> SimulationReport:
        """Play the load through the fleet, all replicas of which decode one way."""
        fleet, run = self.fleet, self.run
        depth = self.tree.depth if self.tree and is_speculative else 0
        replica = Replica(
            fleet.costs,
            min(fleet.fit.num_slots, fleet.costs.batch_sizes[-1]),
            fleet.fit.num_pages,
            run.page_size,
            (acceptance(self.tau, depth),) * depth,
            self.step.max_pending,
        )
        arrivals = poisson(
            *(run.qps, run.seconds),
            prompt=run.prompt,
            answer=run.answer,
            seed=run.seed,
            groups=run.system_prompts,
            shared=run.shared_prompt,
        )
        return simulate(replica, fleet.replicas, arrivals, routing=run.routing, seed=run.seed)


def make_serve_plan(run: PlanServeRun) -> ServePlan:
    """Find the fleet that carries the load with the least time for a token. Raises ConfigError or CheckpointError,
    also where the target does not fit on the devices, or where they cannot carry the load."""
    planner = _Planner(run)
    fleets = planner.fleets()
    carrying = [fleet for fleet in fleets if not fleet.best.is_full]
    if not carrying:
        raise ConfigError(planner.too_much(fleets))
    carrying.sort(key=lambda fleet: (fleet.best.token_seconds, fleet.devices))
    return ServePlan(
        *(run, planner.target, planner.config_from, planner.step, planner.tree, planner.tau, planner.reached),
        *(planner.device_name, planner.num_devices, carrying[0], tuple(carrying[1:])),
    )


class _Planner:
    """The parts of a plan that are known before a mesh is chosen. The constructor raises ConfigError or
    CheckpointError."""

    def __init__(self, run: PlanServeRun) -> None:
        if run.shared_prompt >= run.prompt:
            raise ConfigError(f"--shared-prompt {run.shared_prompt}: it must be shorter than --prompt {run.prompt}")
        self.run = run
        here = HERE.fullmatch(run.devices.strip())
        target, self.config_from = find_config(run.target)
        if here:
            target = dataclasses.replace(target, dtype=default_dtype())
        if run.kv_cache_dtype != "auto":
            target = dataclasses.replace(target, cache_dtype=CACHE_DTYPES[run.kv_cache_dtype])
        if run.prompt + run.answer > target.max_len:
            raise ConfigError(
                f"--prompt {run.prompt} and --answer {run.answer}: the context of {run.target} is {target.max_len} "
                "tokens; lower one of them"
            )
        self.target = target
        self.device: Device | None
        if here:
            self.device, self.num_devices = None, int(here[1])
        else:
            self.device, self.num_devices = parse_devices(run.devices)
        self.profile, self.profile_name = self._profile()
        self.tree = parse_speculation(run.speculation)
        has_head = self.tree is not None and self.tree.uses_head
        self.head = planned_head(run.target, run.drafter, target) if has_head else None
        depth = self.tree.depth if self.tree else 0
        self.step = StepConfig(target, drafter_for([self.tree], self.head), depth)
        self.tau, self.reached = self._tau()

    @property
    def device_name(self) -> str:
        return self.device.name if self.device else jax.devices()[0].device_kind

    def fleets(self) -> list[PlannedFleet]:
        """A fleet for each mesh that the target fits on. Raises ConfigError where there is none."""
        found, reason = [], ""
        for text in self._meshes():
            try:
                fit = self._fit(text)
            except ConfigError as error:  # the mesh does not divide the target
                fit, reason = None, str(error)
            found += [self._fleet(text, fit)] if fit else []
        if found:
            return found
        if self.run.mesh and reason:
            raise ConfigError(reason)
        is_quantized = self.run.quantization != "none"
        held = sum(
            each.num_bytes
            for each in held_by_each(self.target, target_spec(self.target), None, is_quantized=is_quantized)
        )
        raise ConfigError(
            f"{self.run.target} takes {held / 1e9:,.1f} GB, and {self.num_devices} x "
            f"{self.device_name} hold {MEMORY_SHARE:.0%} of {self.num_devices * self._memory / 1e9:,.1f} GB, with not "
            f"even one sequence of {self.run.prompt + self.run.answer} tokens beside it on "
            f"{f'--mesh {self.run.mesh}' if self.run.mesh else 'any mesh that divides it'}; give more --devices"
            f"{'' if is_quantized else ', or 8-bit weights (--quantization int8)'}"
        )

    def too_much(self, fleets: list[PlannedFleet]) -> str:
        """Make the error for a load that is too large: what the devices can do, and how many would do."""
        best = max(fleets, key=lambda fleet: fleet.most_requests)
        each = best.most_requests / best.replicas
        needed = math.ceil(self.run.qps / each) * best.devices
        count = needed // self.device.per_chip if self.device else needed
        name = self.device.id if self.device else "here"
        return (
            f"--qps {self.run.qps:g}: {self.run.devices} carries {best.most_requests:,.2f} requests per second of "
            f"{self.run.prompt} and {self.run.answer} tokens ({best.replicas} replicas of {best.devices}); "
            f"--devices {name}-{count} would do, or a lower --qps"
        )

    @property
    def _memory(self) -> float:
        return self.device.memory if self.device else free_memory()

    def _meshes(self) -> Iterator[str]:
        """The meshes to choose from. One that cuts sequences is left out: replicas do that better."""
        if self.profile is not None:
            measured = str(self.profile.details.get("settings", {}).get("mesh", ""))
            if self.run.mesh not in ("", measured):
                raise ConfigError(
                    f"--mesh {self.run.mesh}: {self.profile_name} was measured on {measured or 'one device'}"
                )
            yield measured
        elif self.run.mesh:
            yield self.run.mesh
        else:
            powers = [1 << i for i in range(MOST_PARTS.bit_length())]
            experts = powers if self.target.experts else [1]
            for tensor, expert in itertools.product(powers, experts):
                if tensor * expert <= self.num_devices:
                    named = {"tensor": tensor, "expert": expert}
                    yield ",".join(f"{axis}={size}" for axis, size in named.items() if size > 1)

    def _fit(self, text: str) -> Fit | None:
        """Return what the devices of such a mesh hold, or None where the target does not fit. Raises ConfigError where
        the mesh does not divide it, or where there are fewer devices."""
        run, sizes = self.run, mesh_sizes(text, SERVING_AXES)
        if (devices := math.prod(sizes.values())) > self.num_devices:
            raise ConfigError(
                f"--mesh {text}: it takes {devices} devices, and --devices {run.devices} has {self.num_devices}"
            )
        return fit_into(
            *(self.step, self.head, abstract_mesh(sizes), MEMORY_SHARE * self._memory),
            slots=run.max_slots,
            longest=run.prompt + run.answer,
            own=run.prompt + run.answer - self._shared,
            page_size=run.page_size,
            is_quantized=run.quantization != "none",
        )

    @property
    def _shared(self) -> int:
        """Prompt tokens that are found in the cache: whole pages."""
        return self.run.shared_prompt // self.run.page_size * self.run.page_size

    def _fleet(self, text: str, fit: Fit) -> PlannedFleet:
        """The fleet on such meshes."""
        run, sizes = self.run, mesh_sizes(text, SERVING_AXES)
        devices = math.prod(sizes.values())
        replicas = self.num_devices // devices
        if self.profile is not None:
            costs = measured_costs(self.profile, self.tree, self.profile_name, fit.num_ranks).up_to(fit.num_slots)
        else:
            assert self.device is not None, "without a profile there are figures"
            context = run.prompt + run.answer // 2
            is_quantized = run.quantization != "none"
            roofline = RooflineCosts(self.target, self.head, abstract_mesh(sizes), self.device, context, is_quantized)
            costs = roofline.costs(self.tree, make_batch_sizes(fit.num_slots, fit.num_ranks))
        load = Load(run.qps / replicas, run.prompt - self._shared, run.answer)
        plain = solve(costs, load, 1.0, is_speculative=False)
        speculative = solve(costs, load, self.tau, is_speculative=True) if self.tree else None
        return PlannedFleet(text, devices, replicas, fit, costs, plain, speculative)

    def _profile(self) -> tuple[Profile | None, str]:
        """The profile that holds for the devices: the one given, or one that was kept on this machine for this target
        where the devices are of its kind. Raises ConfigError where this machine's is asked for and there is none."""
        if self.run.profile:
            return read_profile(Path(self.run.profile).expanduser()), self.run.profile
        folder = host.cache_folder() / "profiles"
        for file in sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True):
            profile = read_profile(file)
            is_here = machine_facts().items() <= profile.facts.items()
            is_asked = self.device is None or re.search(self.device.kind, jax.devices()[0].device_kind)
            if is_here and is_asked and profile.details.get("names", {}).get("target") == self.run.target:
                return profile, str(file)
        if self.device is None:
            raise ConfigError(
                f"--devices {self.run.devices}: nothing was measured for {self.run.target} on this machine; run "
                f"`specserve tune --target {self.run.target}` first, or give a profile of it with --profile"
            )
        return None, ""

    def _tau(self) -> tuple[float, Reached | None]:
        """The tau to expect of the tree. Raises ConfigError where no such tree reaches it, or nothing is known."""
        tree, run = self.tree, self.run
        if tree is None:
            return 1.0, None
        if run.tau:
            if not 1 <= run.tau <= 1 + tree.depth:
                raise ConfigError(f"--tau {run.tau:g}: a step of {describe(tree)} emits 1 to {1 + tree.depth} tokens")
            return run.tau, None
        if not tree.uses_head:
            raise ConfigError(
                f"--speculation {run.speculation}: published taus are those of heads; give one with --tau"
            )
        reached = expected(run.target, target_size(self.target).total)
        stated = OF_CHAIN.search(reached.how)
        tau = tau_of(reached.tau, int(stated[1]), tree.depth) if stated else reached.tau
        if tau > 1 + tree.depth:
            raise ConfigError(
                f"--speculation {run.speculation}: the published tau of {reached.target} is {reached.tau} "
                f"({reached.how}), more than such a step emits; give its own with --tau"
            )
        return tau, reached


def planned_head(name: str, kind: KindName, target: ModelConfig) -> TrainedDrafter:
    """The head of this kind that `specserve train` would make for the target of this name. Raises ConfigError or
    CheckpointError."""
    flags = {"target": name, "drafter": kind, "dry_run": True}
    return plan_drafter(config.resolve(TrainRun, flags=flags, fill=fill), target).with_dtype(target.dtype)


def fit_into(
    step: StepConfig,
    head: TrainedDrafter | None,
    mesh: Mesh | None,
    memory: float,  # bytes of a device that may be filled
    *,
    slots: int,  # at most
    longest: int,  # tokens of a sequence
    own: int,  # of them, those that no other sequence shares
    page_size: int,
    is_quantized: bool = False,
) -> Fit | None:
    """Return what each device of a mesh holds, or one alone: the weights, the head, the state of so many slots as there
    is room for, and its data rank's pages in all that is left. Return None where there is not room for a sequence of
    each rank, or `slots` are fewer than ranks. Raises ConfigError where the mesh does not divide the target."""
    held = held_by_each(step.target, target_spec(step.target), mesh, is_quantized=is_quantized)
    weights, of_head = sum(each.num_bytes for each in held), _head_bytes(head, mesh) if head else 0
    whole, part = (-(-tokens // page_size) for tokens in (longest, own))
    per_page = state_bytes(step, mesh, 0, 1, page_size=page_size, max_pages=whole)
    ranks = num_parts(mesh, "batch")

    while each := slots // ranks:  # of a data rank, which has pages of its own
        of_slots = state_bytes(step, mesh, each * ranks, 0, page_size=page_size, max_pages=whole)
        left, needed = memory - weights - of_head - of_slots, whole + (each - 1) * part
        pages = int(left // per_page) if per_page else needed  # recurrent layers alone have none
        if left >= 0 and pages >= needed:
            break
        slots //= 2
    else:
        return None
    parts = (
        MemoryPart("target's weights", weights, "8-bit matrices" if is_quantized else step.target.dtype),
        MemoryPart("head", of_head, head.dtype if head else "none"),
        MemoryPart("pages", pages * per_page, f"{pages:,} of {page_size} tokens"),
        MemoryPart("slots", of_slots, f"{each * ranks} of up to {longest:,} tokens"),
    )
    return Fit(parts, each * ranks, pages * ranks, ranks)


def _head_bytes(head: TrainedDrafter, mesh: Mesh | None) -> int:
    """The bytes of a head's parameters on each device."""
    found = specs(head.spec())
    shapes = [spec.shape for spec in found]
    if mesh is not None:
        shapes = [place.shard_shape(s) for place, s in zip(jax.tree.leaves(head.place(mesh)), shapes, strict=True)]
    sizes = [np.dtype(spec.dtype(head.dtype)).itemsize for spec in found]
    return sum(size * math.prod(shape) for size, shape in zip(sizes, shapes, strict=True))
