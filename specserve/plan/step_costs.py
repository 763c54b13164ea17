"""The seconds that steps and prefill chunks take, by batch size: from a profile that `specserve tune` has measured, or
from the figures of a device (a roofline).

A roofline counts for each device of a mesh what any implementation must do: the bytes of the matrices that it holds
(of a mixture, those of the experts that so many tokens are expected to choose), the committed keys and values of its
sequences, two operations for each number of a matrix and each row, attention's, and the bytes that layers exchange. A
step takes as long as the slower of memory and arithmetic, each at a share of its peak that is usual, and the exchange
besides.
"""

import bisect
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from specserve.devices import Device
from specserve.drafters.interface import TrainedDrafter
from specserve.drafters.speculation import describe
from specserve.errors import ConfigError
from specserve.kernels.grouped import expected_experts
from specserve.mesh import num_parts
from specserve.models.config import ModelConfig
from specserve.models.params import is_matrix, specs
from specserve.models.target import target_spec
from specserve.plan.outline import SHARE_OF_BANDWIDTH, SHARE_OF_PEAK
from specserve.plan.training import held_by_each
from specserve.serve.engine.scheduler import chunk_size
from specserve.serve.programs.placement import bytes_per_token
from specserve.serve.programs.shapes import DEVICE_CHUNKS
from specserve.serve.tuned import Profile
from specserve.speculative.tree import Tree
from specserve.train.flops import mixing_flops

EXCHANGE_SECONDS = 5e-6  # before the first byte of an exchange between devices: an assumption


@dataclass(frozen=True)
class StepCosts:
    """Seconds by batch size, the smallest first, and of prefill programs by their tokens."""

    batch_sizes: tuple[int, ...]
    plain: tuple[float, ...]  # of a plain step, by batch size
    step: tuple[float, ...]  # of a step that speculates; as `plain` where nothing does
    chunks: tuple[int, ...]  # prompt tokens of the prefill programs
    prefill: tuple[float, ...]  # of each of them
    source: str  # where the figures are from
    num_ranks: int = 1  # data ranks, a prompt of each of which a prefill program runs side by side

    def of(self, is_speculative: bool) -> tuple[float, ...]:
        """Seconds of a step by batch size."""
        return self.step if is_speculative else self.plain

    def up_to(self, num_slots: int) -> "StepCosts":
        """Return the costs of the batches that so many slots can have, at least of the smallest one."""
        count = max(1, bisect.bisect_right(self.batch_sizes, num_slots))
        sizes, plain, step = (values[:count] for values in (self.batch_sizes, self.plain, self.step))
        return dataclasses.replace(self, batch_sizes=sizes, plain=plain, step=step)

    def prefill_seconds(self, num_tokens: int) -> tuple[float, int]:
        """Return the seconds that a prompt takes, or the part of it that is not cached, and the number of its
        chunks."""
        seconds, count = 0.0, 0
        while num_tokens > 0:
            size = chunk_size(self.chunks, num_tokens, self.chunks[-1])
            seconds, count = seconds + self.prefill[self.chunks.index(size)], count + 1
            num_tokens -= size
        return seconds, count


@dataclass(frozen=True)
class RooflineCosts:
    """A device's share of a step, from figures alone."""

    target: ModelConfig
    drafter: TrainedDrafter | None
    mesh: Mesh
    device: Device
    context: int  # committed tokens of each sequence
    is_quantized: bool = False

    def costs(self, tree: Tree | None, batch_sizes: tuple[int, ...]) -> StepCosts:
        """Compute the seconds of plain steps of these sizes, and of steps over the tree. Raises ConfigError where the
        mesh does not divide the target."""
        share = f"{SHARE_OF_BANDWIDTH:.0%} of the bandwidth and {SHARE_OF_PEAK:.0%} of the peak"
        target = self._target()
        plain = tuple(target(batch, 1, self.context) for batch in batch_sizes)
        step = plain
        if tree is not None:
            nodes = 1 + tree.num_nodes
            drafts = [self._draft(batch, tree) if tree.uses_head else 0.0 for batch in batch_sizes]
            step = tuple(target(batch, nodes, self.context) + d for batch, d in zip(batch_sizes, drafts, strict=True))
        ranks = num_parts(self.mesh, "batch")
        prefill = tuple(target(ranks, chunk, self.context // 2) for chunk in DEVICE_CHUNKS)
        source = f"a roofline of {self.device.name}, {share}"
        return StepCosts(batch_sizes, plain, step, DEVICE_CHUNKS, prefill, source, ranks)

    def _target(self) -> Callable[[int, int, int], float]:
        """Return a function that counts the seconds of the target's forward over `nodes` rows of each of `batch`
        sequences that have `context` committed tokens."""
        config, mesh, spec = self.target, self.mesh, target_spec(self.target)
        dense = dense_bytes = expert = expert_bytes = 0
        for held in held_by_each(config, spec, mesh, is_quantized=self.is_quantized):
            size = held.size if is_matrix(held.spec) or held.field == "embedding" else 0
            if held.spec.axes and held.spec.axes[0] == "experts":
                expert, expert_bytes = expert + size, expert_bytes + held.num_bytes
            elif held.field != "embedding" or spec.head is None:  # else it is only looked up
                dense, dense_bytes = dense + size, dense_bytes + held.num_bytes
        entry = bytes_per_token(config, None, mesh)
        shards, groups = num_parts(mesh, "batch"), mesh.shape["data"]
        heads = num_parts(mesh, "heads")
        experts = config.experts

        def seconds(batch: int, nodes: int, context: int) -> float:
            among = -(-batch // groups) * nodes  # rows whose experts lie on the same devices
            own = -(-batch // shards)  # sequences
            rows = own * nodes  # outside the experts
            num_bytes = dense_bytes + own * context * entry
            # a mean over a row of twice the context sees what a token after the context sees
            num_flops = 2 * dense * rows + rows * mixing_flops(config, 2 * context) / heads
            if experts:
                read = expected_experts(experts.num_experts, experts.top_k, among) / experts.num_experts
                num_bytes += expert_bytes * read
                num_flops += 2 * among * expert * experts.top_k / experts.num_experts
            return self._seconds(num_bytes, num_flops) + self._exchange(rows, among)

        return seconds

    def _draft(self, batch: int, tree: Tree) -> float:
        """The seconds of a head that proposes a tree for each of `batch` sequences: a pass for each depth."""
        assert self.drafter is not None, "a tree that asks a head has one"
        places = self.drafter.place(self.mesh)
        leaves = zip(specs(self.drafter.spec()), jax.tree.leaves(places), strict=True)
        size = sum(int(np.prod(place.shard_shape(spec.shape))) for spec, place in leaves if is_matrix(spec))
        shards = num_parts(self.mesh, "batch")
        each = -(-batch // shards)
        entries = bytes_per_token(self.target, self.drafter, self.mesh) - bytes_per_token(self.target, None, self.mesh)
        num_bytes = size * np.dtype(self.drafter.dtype).itemsize + each * self.context * entries
        first = self._seconds(num_bytes, 2 * size * each)
        later = self._seconds(num_bytes, 2 * size * each * tree.top_k)
        return first + (tree.depth - 1) * later

    def _seconds(self, num_bytes: float, num_flops: float) -> float:
        device = self.device
        return max(num_bytes / (device.bandwidth * SHARE_OF_BANDWIDTH), num_flops / (device.peak * SHARE_OF_PEAK))

    def _exchange(self, rows: int, among: int) -> float:
        """The seconds in which a device exchanges states with the others, over all layers: two sums of its `rows` along
        `tensor` in each, and in each mixture a sum along `expert` of those rows `among` which its experts are chosen
        (as an all-gather and a reduce-scatter, where each device has rows of its own)."""
        config, mesh = self.target, self.mesh
        tensor, expert = mesh.shape["tensor"], mesh.shape["expert"]
        mixtures = sum(config.kind(i).has_experts for i in range(config.num_layers)) if config.experts else 0
        sums = 2 * config.num_layers * (tensor - 1) / tensor * rows + mixtures * (expert - 1) / expert * among
        count = 2 * config.num_layers * (tensor > 1) + mixtures * (expert > 1)
        num_bytes = 2 * sums * config.d_model * np.dtype(config.dtype).itemsize
        return count * EXCHANGE_SECONDS + num_bytes / (self.device.rate_among(mesh.size) * SHARE_OF_BANDWIDTH)


def measured_costs(profile: Profile, speculation: Tree | None, where: str, num_ranks: int = 1) -> StepCosts:
    """The costs that a profile holds, of a mesh with so many data ranks. Prompts are not among them: a chunk of each
    rank is taken for a step of as many rows as they have together, on the line through the smallest and the largest
    plain step. Raises ConfigError where the tree was not timed."""
    steps = profile.details.get("timed", {}).get("steps", [])
    if speculation is None:
        found = {each["batch_size"]: (each["plain_ms"], each["plain_ms"]) for each in steps}
    else:
        name = describe(speculation)
        found = {
            each["batch_size"]: (each["plain_ms"], each["step_ms"]) for each in steps if each["speculation"] == name
        }
        if not found:
            known = ", ".join(sorted({each["speculation"] for each in steps})) or "none"
            raise ConfigError(
                f"{where}: steps of {name} were not timed (timed were: {known}); give one of these with --speculation, "
                f"or run `specserve tune --trees {name}`"
            )
    sizes = tuple(sorted(found))
    plain = tuple(1e-3 * found[size][0] for size in sizes)
    step = tuple(1e-3 * found[size][1] for size in sizes)
    between = sizes[-1] - sizes[0]
    slope = (plain[-1] - plain[0]) / between if between else plain[0] / sizes[0]  # of a row
    more = [max(0, num_ranks * chunk - sizes[0]) for chunk in DEVICE_CHUNKS]  # rows than the smallest step has
    prefill = tuple(plain[0] + max(0.0, slope) * rows for rows in more)
    source = f"{where}, prompts on the line through its steps"
    return StepCosts(sizes, plain, step, DEVICE_CHUNKS, prefill, source, num_ranks)
