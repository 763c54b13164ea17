"""An estimate of what a training step needs on each device besides its arguments: the arrays that must be there at
once. What XLA takes for a CPU is within 40% of it."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specserve.kernels import rows
from specserve.mesh import num_parts, on_each_device
from specserve.models.sharding import place_target
from specserve.plan.collectives import gathered_bytes, multiplied_by
from specserve.plan.work import MemoryPart
from specserve.train import chunked_loss
from specserve.train.flops import StepShape

STATES = {"layers": "taps, last state", "capture": "captured", "service": "taps, last state, sent"}


@dataclass(frozen=True)
class Activations:
    """The bytes of a step's intermediate results on each device."""

    shape: StepShape
    mesh: Mesh
    platform: str

    @property
    def positions(self) -> int:
        """The number of positions that a device computes at once."""
        rows = -(-self.shape.batch // (self.shape.accumulate * num_parts(self.mesh, "batch")))
        return rows * -(-self.shape.seq // num_parts(self.mesh, "sequence"))

    def parts(self) -> tuple[MemoryPart, ...]:
        """Return the estimate in parts whose sum it is."""
        rollout = self.shape.rollout
        again = "computed again backward" if rollout.remat else "all kept"
        return (
            MemoryPart("target's features", self.features(), STATES[self.shape.states_from]),
            MemoryPart("rollout", self.rollout(remat=rollout.remat), f"{rollout.length} steps, {again}"),
            MemoryPart("loss", self.loss(), "logits of a chunk of positions"),
            MemoryPart("workspace", max(self.target_layer(), self.draft_layer()), "of one layer"),
            *self.gathers(),
        )

    @property
    def num_bytes(self) -> int:
        """The bytes of the estimate, all parts together."""
        return sum(part.num_bytes for part in self.parts())

    def gathers(self) -> tuple[MemoryPart, ...]:
        """Return what devices that share parameters out gather of them: of the head all, of the target's layers one."""
        target, drafter = self.shape.target, self.shape.drafter
        if num_parts(self.mesh, "embed") == 1:
            return ()
        size = gathered_bytes(drafter.spec(), drafter.dtype, drafter.place, self.mesh)
        spec = multiplied_by(target)
        rest = dataclasses.replace(spec, layers=())
        size += gathered_bytes(rest, target.dtype, lambda mesh: place_target(target, rest, mesh), self.mesh)
        if self.shape.has_layers:
            others: Any = dict.fromkeys(("embedding", "norm", "head", "layer_inputs", "streams"))
            alone = [dataclasses.replace(spec, **others, layers=(i,)) for i in spec.layers]
            size += max(
                gathered_bytes(one, target.dtype, lambda mesh, one=one: place_target(target, one, mesh), self.mesh)
                for one in alone
            )
        return (MemoryPart("gathered", size, "parameters: the head's, the vocabularies, a layer of the target"),)

    def features(self) -> int:
        """The bytes of the taps in the target's dtype and in the head's, and of the last hidden state, which is there
        again for each state that has a teacher of its own."""
        target, drafter, costs = self.shape.target, self.shape.drafter, self.shape.costs()
        taps, last = len(drafter.aux_layers), 1.0
        if not costs.has_one_teacher:
            last += costs.states * self.shape.rollout.length
        each = (taps + last) * np.dtype(target.dtype).itemsize + taps * np.dtype(drafter.dtype).itemsize
        return round(self.positions * target.d_model * each)

    def rollout(self, *, remat: bool) -> int:
        """The bytes of all rollout steps that stay for the backward pass."""
        rollout = dataclasses.replace(self.shape.rollout, remat=remat)
        costs = dataclasses.replace(self.shape, rollout=rollout).costs()
        return self.positions * costs.kept * np.dtype(self.shape.drafter.dtype).itemsize

    def loss(self) -> int:
        """The bytes of the draft's logits and of their gradient, which their softmax becomes, and of the target's
        logits and distribution, for one chunk of positions, and of the output head's gradient, added up over chunks."""
        target, drafter, costs = self.shape.target, self.shape.drafter, self.shape.costs()
        logits = at_once = self.shape.rollout.length * drafter.draft_vocab_size
        distributions = self.shape.distributions
        if not costs.has_one_teacher:
            at_once += distributions * target.vocab_size
        length = chunked_loss.chunk_length(math.ceil(self.positions * costs.states), at_once, self.platform)
        teacher = 2 * target.vocab_size if self.shape.has_logits else 0
        gradient = 0 if costs.shares_output else drafter.d_model * drafter.draft_vocab_size
        return 4 * (length * (2 * logits + distributions * (teacher + drafter.draft_vocab_size)) + gradient)

    def target_layer(self) -> int:
        """The bytes of the inputs and results of the target's widest layer."""
        if not self.shape.has_layers:
            return 0
        config, experts, parts = self.shape.target, self.shape.target.experts, num_parts(self.mesh, "mlp")
        width = 3 * max(config.of(config.kind(i)).d_ff for i in range(config.num_layers)) // parts
        if experts and any(config.kind(i).has_experts for i in range(config.num_layers)):
            each = experts.top_k * (3 * experts.d_ff // parts + 2 * config.d_model)
            # devices with different experts send each other their tokens
            width = max(width, each * num_parts(self.mesh, "experts") + 3 * experts.shared_d_ff // parts)
        results = self.positions * (4 * config.d_model + width) * np.dtype(config.dtype).itemsize
        return results + self._scores(config.num_heads, config.num_kv_heads)

    def draft_layer(self) -> int:
        """The bytes of the results of a layer of the head, and of their gradients."""
        costs = self.shape.costs()
        results = self.positions * costs.workspace * np.dtype(self.shape.drafter.dtype).itemsize
        return results + self._scores(costs.num_heads, costs.num_kv_heads)

    def _scores(self, num_heads: int, num_kv_heads: int) -> int:
        """The bytes of one block of attention's scores and weights, in float32. The kernels of accelerators keep them
        on the chip (`kernels.rows`)."""
        if self.platform != "cpu" and num_parts(self.mesh, "sequence") == 1:
            return 0
        seq = self.shape.seq
        num_heads = num_heads // num_kv_heads * on_each_device(self.mesh, "kv_heads", num_kv_heads)
        a_segment = self.positions * num_heads * max(rows.MIN_SEGMENT, -(-seq // rows.NUM_SEGMENTS))
        return 2 * 4 * min(a_segment, max(rows.SCORES_AT_ONCE, num_heads * seq))
