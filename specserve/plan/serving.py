"""A fleet of servers on paper: how many replicas on which meshes, what their memory holds, how they behave under a
load, and from which tau on speculation pays. Nothing is loaded but a config.json."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from specserve import config
from specserve.checkpoints.configs import find_config
from specserve.devices import REFERENCE, Device, parse_devices
from specserve.drafters.interface import TrainedDrafter
from specserve.drafters.layers import windows_of
from specserve.drafters.registry import DEFAULT_KIND, WHOLE, KindName, load_kind
from specserve.drafters.speculation import describe, drafter_for, parse_speculation
from specserve.errors import ConfigError
from specserve.kernels.pages import default_page_size
from specserve.mesh import SERVING_AXES, mesh_sizes, num_parts
from specserve.models.config import ModelConfig
from specserve.models.presets import target_size
from specserve.models.sharding import spread_kv_heads
from specserve.plan.settings import PlanServeRun
from specserve.plan.steady_state import Load, SteadyState, StepCosts, break_even_tau, solve
from specserve.plan.taus import Reached, expected, tau_of
from specserve.plan.work import MemoryPart, Replica, abstract_mesh, target_held, total_bytes
from specserve.serve.engine.windows import window_sizes
from specserve.serve.launch import CACHE_DTYPES
from specserve.serve.programs.placement import bytes_per_page, pages_in, state_bytes
from specserve.serve.programs.shapes import (
    DEVICE_CHUNKS,
    DEVICE_EXTRA,
    LEAST_BATCH,
    make_batch_sizes,
    steps_at_once,
    tokens_ahead,
)
from specserve.serve.sizes import num_kept_states
from specserve.speculative.slot_state import StepConfig
from specserve.speculative.tree import Tree
from specserve.train.run.checks import plan_drafter
from specserve.train.run.recipe import fill
from specserve.train.settings import TrainRun

MEMORY_SHARE = 0.9  # of a device's memory; the rest is for activations and programs
MOST_PARTS = 64  # of a mesh's axis, where a mesh is looked for
OF_CHAIN = re.compile(r"chain(?::| of )(\d+)")  # in what a source states of its tau


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
    replica: Replica
    devices: int  # of a replica
    replicas: int
    fit: Fit
    costs: StepCosts
    states: dict[str, SteadyState]  # "plain", and "speculative" where anything speculates

    def to_json(self) -> dict[str, Any]:
        """Return everything that was found about the fleet, in the units that the names carry."""
        return {
            "mesh": self.mesh,
            "devices_per_replica": self.devices,
            "replicas": self.replicas,
            "bytes_per_device": {part.name: part.num_bytes for part in self.fit.memory},
            "slots": self.fit.num_slots,
            "pages": self.fit.num_pages,
            "most_requests_per_second": self.most_requests,
            "break_even_tau": self.break_even_tau,
            "ways": {name: self._over_all(state) for name, state in self.states.items()},
            "costs": asdict(self.costs),
        }

    def _over_all(self, state: SteadyState) -> dict[str, Any]:
        """Return the figures of all replicas in such a state."""
        return {
            "tau": state.tau,
            "carries_the_load": not state.is_full,
            "requests_per_second_at_most": self.replicas * state.most_requests,
            "tokens_per_second": self.replicas * state.tokens_per_second,
            "sequences_per_replica": state.batch,
            "step_ms": 1e3 * state.step_seconds,
            "ms_per_token": 1e3 * state.token_seconds,
            "first_token_ms": 1e3 * state.first_token_seconds,
        }

    @property
    def most_requests(self) -> float:
        """The requests per second that all replicas take, plain or speculative, whichever are more."""
        return self.replicas * max(state.most_requests for state in self.states.values())

    @property
    def best(self) -> SteadyState:
        """The state that gives a sequence its tokens sooner, of those that carry the load."""
        return min(self.states.values(), key=lambda state: (state.is_full, state.token_seconds))

    @property
    def break_even_tau(self) -> float | None:
        """The tau above which speculation is faster, at the batch that plain decoding has under the load. None where
        nothing speculates."""
        if "speculative" not in self.states:
            return None
        return break_even_tau(self.costs, self.states["plain"].batch)


@dataclass(frozen=True)
class Order:
    """The facts of a fleet before a mesh is chosen: the load, the target, its speculation and the devices."""

    run: PlanServeRun
    config_from: str
    step: StepConfig
    head: TrainedDrafter | None
    tree: Tree | None
    tau: float
    reached: Reached | None  # where the expected tau is from; None: it was given, or nothing speculates
    device: Device
    num_devices: int

    @property
    def target(self) -> ModelConfig:
        return self.step.target

    @property
    def is_quantized(self) -> bool:
        return self.run.quantization != "none"

    @property
    def shared(self) -> int:
        """Prompt tokens that are found in the cache: whole pages."""
        return self.run.shared_prompt // self.page_size * self.page_size

    @property
    def most_steps(self) -> int:
        """The steps that one call makes."""
        return steps_at_once(self.device.platform, is_v7x=self.device.id == "tpu-v7x")

    @property
    def page_size(self) -> int:
        """The tokens of a page."""
        return self.run.page_size or default_page_size(self.device.platform)


@dataclass(frozen=True)
class ServePlan:
    """The fleet that was found for an order, and other fleets that would carry the load."""

    order: Order
    fleet: PlannedFleet
    others: tuple[PlannedFleet, ...]  # on other meshes, the best first

    def to_json(self) -> dict[str, Any]:
        """Return everything that was found, in the units that the names carry."""
        order, run = self.order, self.order.run
        tau = None
        if order.tree:
            tau = {"value": order.tau, "from": order.reached and asdict(order.reached)}
        return {
            "target": run.target,
            "config": order.config_from,
            "devices": {"name": order.device.name, "number": order.num_devices},
            "load": {name: getattr(run, name) for name in ("qps", "prompt", "answer", "shared_prompt")},
            "speculation": run.speculation,
            "tau": tau,
            "fleet": self.fleet.to_json(),
            "others": [fleet.to_json() for fleet in self.others],
        }


def make_serve_plan(run: PlanServeRun) -> ServePlan:
    """Find the fleet that carries the load with the least time for a token. Raises ConfigError or CheckpointError,
    also where the target does not fit on the devices, or where they cannot carry the load."""
    order = _read(run)
    fleets = _fleets(order)
    carrying = [fleet for fleet in fleets if not fleet.best.is_full]
    if not carrying:
        raise ConfigError(_too_much(order, fleets))
    carrying.sort(key=lambda fleet: (fleet.best.token_seconds, fleet.devices))
    return ServePlan(order, carrying[0], tuple(carrying[1:]))


def _read(run: PlanServeRun) -> Order:
    """Check the settings. Raises ConfigError or CheckpointError."""
    if run.shared_prompt >= run.prompt:
        raise ConfigError(f"--shared-prompt {run.shared_prompt}: it must be shorter than --prompt {run.prompt}")
    target, config_from = find_config(run.target)
    if run.kv_cache_dtype != "auto":
        target = dataclasses.replace(target, cache_dtype=CACHE_DTYPES[run.kv_cache_dtype])
    if run.prompt + run.answer > target.max_len:
        raise ConfigError(
            f"--prompt {run.prompt} and --answer {run.answer}: the context of {run.target} is {target.max_len} "
            "tokens; lower one of them"
        )
    target = target.for_length(run.prompt + run.answer)
    device, num_devices = parse_devices(run.devices)
    tree, head = parse_speculation(run.speculation), None
    if tree is not None and tree.uses_head:
        head = planned_head(run.target, run.drafter, target, run.draft)
    elif run.draft:
        raise ConfigError(f"--draft {run.draft}: --speculation {run.speculation} asks for none; leave it out")
    step = StepConfig(target, drafter_for([tree], head), tree.depth if tree else 0)
    return Order(run, config_from, step, head, tree, *_tau(run, tree, target), device, num_devices)


def _tau(run: PlanServeRun, tree: Tree | None, target: ModelConfig) -> tuple[float, Reached | None]:
    """Return the tau to expect of the tree, and where it is published. Raises ConfigError where no such tree reaches
    it, or nothing is known."""
    if tree is None:
        return 1.0, None
    if run.tau:
        if not 1 <= run.tau <= 1 + tree.depth:
            raise ConfigError(f"--tau {run.tau:g}: a step of {describe(tree)} emits 1 to {1 + tree.depth} tokens")
        return run.tau, None
    if not tree.uses_head or run.draft:
        raise ConfigError(f"--speculation {run.speculation}: published taus are those of heads; give one with --tau")
    reached = expected(run.target, target_size(target).total)
    tau, stated = reached.tau, OF_CHAIN.search(reached.how)
    if stated:
        tau = tau_of(tau, int(stated[1]), tree.depth)
    if tau > 1 + tree.depth:
        raise ConfigError(
            f"--speculation {run.speculation}: the published tau of {reached.target} is {reached.tau} "
            f"({reached.how}), more than such a step emits; give its own with --tau"
        )
    return tau, reached


def _fleets(order: Order) -> list[PlannedFleet]:
    """A fleet for each mesh that the target fits on. Raises ConfigError where there is none."""
    run, found = order.run, []
    for text in _meshes(order):
        try:
            replica = _replica(order, text)
        except ConfigError:  # the mesh does not divide the target, or takes more devices
            if run.mesh:
                raise
            continue
        fit = fit_into(
            dataclasses.replace(order.step, target=replica.target),
            *(replica, MEMORY_SHARE * order.device.memory),
            slots=run.max_slots,
            longest=run.prompt + run.answer,
            own=run.prompt + run.answer - order.shared,
            page_size=order.page_size,
            most_steps=order.most_steps,
        )
        if fit:
            found.append(_fleet(order, text, replica, fit))
    if found:
        return found
    fix, meshes = "", "any mesh that divides it"
    some = abstract_mesh({"data": min(order.num_devices, 2)})  # over a mesh int4 takes more than on one device
    held, in_8_bits = (
        total_bytes(target_held(order.target, some, to, order.device.platform, is_served=True))
        for to in (run.quantization, "int8")
    )
    if in_8_bits < held:
        fix = ", or 8-bit weights (--quantization int8)"
    if run.mesh:
        meshes = f"--mesh {run.mesh}"
    raise ConfigError(
        f"{run.target} takes {held / 1e9:,.1f} GB, and {order.num_devices} x {order.device.name} hold "
        f"{MEMORY_SHARE:.0%} of {order.num_devices * order.device.memory / 1e9:,.1f} GB, with not even one sequence of "
        f"{run.prompt + run.answer} tokens beside it on {meshes}; give more --devices{fix}"
    )


def _replica(order: Order, text: str) -> Replica:
    """The models on such a mesh. Raises ConfigError where it does not divide them, or where there are fewer devices."""
    sizes = mesh_sizes(text, SERVING_AXES)
    if (devices := math.prod(sizes.values())) > order.num_devices:
        raise ConfigError(
            f"--mesh {text}: it takes {devices} devices, and --devices {order.run.devices} has {order.num_devices}"
        )
    mesh = abstract_mesh(sizes)
    target = spread_kv_heads(order.target, mesh)
    return Replica(target, order.head, mesh, quantization=order.run.quantization, platform=order.device.platform)


def _too_much(order: Order, fleets: list[PlannedFleet]) -> str:
    """Make the error for a load that is too large: what the devices can do, and how many would do."""
    run, best = order.run, max(fleets, key=lambda fleet: fleet.most_requests)
    needed = math.ceil(run.qps / (best.most_requests / best.replicas)) * best.devices
    return (
        f"--qps {run.qps:g}: {run.devices} carries {best.most_requests:,.2f} requests per second of "
        f"{run.prompt} and {run.answer} tokens ({best.replicas} replicas of {best.devices}); "
        f"--devices {order.device.id}-{needed // order.device.per_chip} would do, or a lower --qps"
    )


def _meshes(order: Order) -> Iterator[str]:
    """The meshes to choose from. One that cuts sequences is left out: replicas do that better."""
    if order.run.mesh:
        yield order.run.mesh
        return
    powers = expert_powers = [1 << i for i in range(MOST_PARTS.bit_length())]
    if not order.target.experts:
        expert_powers = [1]
    for tensor, expert in itertools.product(powers, expert_powers):
        if tensor * expert <= order.num_devices:
            named = {"tensor": tensor, "expert": expert}
            yield ",".join(f"{axis}={size}" for axis, size in named.items() if size > 1)


def _fleet(order: Order, text: str, replica: Replica, fit: Fit) -> PlannedFleet:
    """The fleet on such meshes."""
    run, replicas = order.run, order.num_devices // replica.mesh.size
    costs = step_costs(
        *(replica, order.device, order.tree, make_batch_sizes(fit.num_slots, fit.num_ranks, LEAST_BATCH)),
        context=run.prompt + run.answer // 2,
    )
    load = Load(run.qps / replicas, run.prompt - order.shared, run.answer)
    states = {"plain": solve(costs, load, 1.0, is_speculative=False)}
    if order.tree:
        states["speculative"] = solve(costs, load, order.tau, is_speculative=True)
    return PlannedFleet(text, replica, replica.mesh.size, replicas, fit, costs, states)


def step_costs(
    replica: Replica, device: Device, tree: Tree | None, batch_sizes: tuple[int, ...], *, context: int
) -> StepCosts:
    """Compute the seconds of plain steps of these sizes, of steps over the tree, and of prefill programs, where each
    sequence has `context` committed tokens."""
    ranks, size = num_parts(replica.mesh, "batch"), replica.mesh.size
    plain = tuple(replica.forward(batch, 1, context).seconds(device, size) for batch in batch_sizes)
    step = plain
    if tree is not None:
        step = tuple(
            replica.forward(batch, 1 + tree.num_nodes, context).seconds(device, size)
            + sum(work.seconds(device, size) for work in replica.drafts(batch, tree, context))
            for batch in batch_sizes
        )
    prefill = tuple(replica.forward(ranks, chunk, context // 2).seconds(device, size) for chunk in DEVICE_CHUNKS)
    source = (
        f"a roofline of {device.name}, {device.share_of_bandwidth:.0%} of the bandwidth and "
        f"{device.share_of_peak:.0%} of the peak"
    )
    return StepCosts(batch_sizes, plain, step, DEVICE_CHUNKS, prefill, source, DEVICE_EXTRA, ranks)


def planned_head(name: str, kind: KindName, target: ModelConfig, draft: str = "") -> TrainedDrafter:
    """The head of this kind that `specserve train` would make for the target of this name, or the language model that
    drafts in its place. Raises ConfigError or CheckpointError."""
    if draft and kind != DEFAULT_KIND:
        raise ConfigError(f"--drafter {kind} is a kind of head, and --draft {draft} a language model; give one of them")
    if draft:
        model = find_config(draft, "--draft")[0]
        return load_kind(WHOLE).new(None, model, model.vocab_size)
    flags = {"target": name, "drafter": kind, "dry_run": True}
    published = functools.partial(fill, device=REFERENCE)
    return plan_drafter(config.resolve(TrainRun, flags=flags, fill=published), target).with_dtype(target.dtype)


def fit_into(
    step: StepConfig,
    replica: Replica,
    memory: float,  # bytes of a device that may be filled
    *,
    slots: int,  # at most
    longest: int,  # tokens of a sequence
    own: int,  # of them, those that no other sequence shares
    page_size: int,
    most_steps: int = 1,  # of one call
) -> Fit | None:
    """Return what each device of a replica holds: the weights, the head, the state of so many slots as there is room
    for, and its data rank's pages in all that is left. Return None where there is not room for a sequence of each rank,
    or `slots` are fewer than ranks."""
    mesh, weights, of_head = replica.mesh, total_bytes(replica.target_held), total_bytes(replica.head_held)
    whole, part = (-(-tokens // page_size) for tokens in (longest, own))
    ranks, sizes = num_parts(mesh, "batch"), dict[str, Any](page_size=page_size, max_pages=whole)
    models = step.target, step.drafter, mesh
    per_page = bytes_per_page(*models[:2], page_size, mesh)
    ahead = tokens_ahead(most_steps, 1 + step.max_depth, step.max_pending)

    while each := slots // ranks:  # of a data rank, which has pages of its own
        kept = dataclasses.replace(step, kept_states=num_kept_states(step.target, each * ranks))
        of_slots = state_bytes(kept, mesh, each * ranks, 0, **sizes)
        left, needed = int(memory - weights - of_head - of_slots), whole + (each - 1) * part
        numbers = {"num_slots": each, "num_pages": left // max(1, per_page), "page_size": page_size}
        windows = window_sizes(windows_of(step.target), **numbers, ahead=ahead, chunks=DEVICE_CHUNKS)
        pages = pages_in(left, *models, page_size=page_size, windows=windows, most=each * whole)
        if left >= 0 and pages >= needed:
            break
        slots //= 2
    else:
        return None
    head_dtype = replica.head.dtype if replica.head else "none"
    windows = tuple((window, number) for window, number in windows if number < pages)
    of_pages = state_bytes(kept, mesh, each * ranks, pages, **sizes, windows=windows) - of_slots
    beside = "".join(f", {number:,} for the window of {window:,}" for window, number in windows)
    parts = (
        MemoryPart("target's weights", weights, replica.form),
        MemoryPart("head", of_head, head_dtype),
        MemoryPart("pages", of_pages, f"{pages:,} of {page_size} tokens{beside}"),
        MemoryPart("slots", of_slots, f"{each * ranks} of up to {longest:,} tokens"),
    )
    return Fit(parts, each * ranks, pages * ranks, ranks)
