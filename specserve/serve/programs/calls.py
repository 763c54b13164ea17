"""The functions that the server runs on the device, ready to be compiled. This is the only file of the server that
calls `jax.jit`.

Each method says which function with which arguments; nothing is compiled or run here.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from specserve.mesh import on_mesh
from specserve.serve.fleet.plans import Plan
from specserve.serve.programs.placement import Placement
from specserve.speculative import step
from specserve.speculative.drafter import Weights
from specserve.speculative.repeat import repeat
from specserve.speculative.step import Admission, SlotState, StepConfig, StepResult
from specserve.speculative.tree import Proposal, Tree


@dataclass(frozen=True)
class Call:
    """A jitted function with its arguments. Calls with the same `key` run the same compiled program."""

    key: Hashable
    function: Any  # jitted
    arguments: tuple[Any, ...]  # pytrees of arrays, or of their shapes
    static: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None  # how other processes make it

    def lower(self) -> jax.stages.Lowered:
        """Trace the function for arguments of these shapes. Their values are not read, so donated arrays will do."""
        return self.function.lower(*jax.tree.map(shape_of, self.arguments), **self.static)


def shape_of(x: jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and sharding of an array, for which a program is compiled."""
    place = None if isinstance(x, np.ndarray | np.generic) else x.sharding
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place if isinstance(place, NamedSharding) else None)


class Calls:
    """The calls of one runner. The state that a call takes is donated; the new state is the first of its results."""

    def __init__(self, config: StepConfig, place: Placement, state: SlotState | None) -> None:
        """`state` says where the arrays of the state live; None: on the default device."""
        whole: NamedSharding | None = place.whole
        both = (state, whole)

        def jit(function: Callable[..., Any], donated: int | None, outputs: Any, *static: str) -> Any:
            # function objects of their own: jit's cache belongs to the function, and runners must not share it
            bound = functools.partial(on_mesh(place.mesh, function), config)
            return jax.jit(bound, donate_argnums=donated, static_argnames=static, out_shardings=outputs)

        sizes = "num_slots", "num_pages", "page_size", "max_pages", "num_ranks"
        self._begin = jit(step.init_state, None, state, *sizes)
        self._admit = jit(step.admit, 0, state)
        self._extend = jit(_extend, 0, whole)
        self._remember = jit(step.remember, 0, state)
        self._catch_up = jit(step.catch_up, 1, state)
        self._prefill = jit(step.prefill, 1, both, "chunk", "width", "is_scored")
        self._decode = jit(step.decode, 1, both, "width")
        self._speculate = jit(step.speculate, 1, both, "tree", "width")
        self._steps = jit(_steps, 1, both, "tree", "width", "most")
        self._propose = jit(step.propose_tree, 1, both, "tree", "width")
        self._verify = jit(step.verify_tree, 1, both, "tree", "width")

    def begin(self, **sizes: int) -> Call:
        """Make an empty state of these sizes (`step.init_state`) in one program: the cache must not be whole on one
        device of a mesh, not for a moment."""
        return Call("begin", self._begin, (), sizes)

    def admit(self, state: SlotState, slot: jax.Array, new: Admission) -> Call:
        """Give a slot, [] int32, to a new sequence (`step.admit`)."""
        return Call("admit", self._admit, (state, slot, new))

    def extend(self, page_table: jax.Array, entries: jax.Array) -> Call:
        """Set entries of the page table: `entries`, [3, n] int32, are slots, columns and pages."""
        return Call("extend", self._extend, (page_table, entries))

    def remember(self, state: SlotState, slot: jax.Array, start: jax.Array, last: jax.Array, number: jax.Array) -> Call:
        """Let the drafter keep the answer in a slot (`step.remember`); all four are [] int32."""
        return Call("remember", self._remember, (state, slot, start, last, number))

    def catch_up(self, layout: Weights, state: SlotState, slots: jax.Array, *, number: int) -> Call:
        """Let the drafter read what plain steps have left pending in `slots`, [batch] int32 (`step.catch_up`); `number`
        tells the layouts of the weights apart."""
        return Call(("catch up", number, len(slots)), self._catch_up, (layout, state, slots))

    def prefill(
        self,
        layout: Weights,
        state: SlotState,
        slots: jax.Array,
        num_tokens: jax.Array,
        is_last: jax.Array,
        allowed: jax.Array,
        *,
        chunk: int,
        width: int,
        is_scored: bool = False,
    ) -> Call:
        arguments = layout, state, slots, num_tokens, is_last, allowed
        static = {"chunk": chunk, "width": width, "is_scored": is_scored}
        return Call(("prefill", *static.values()), self._prefill, arguments, static)

    def step(
        self,
        layout: Weights,
        state: SlotState,
        slots: jax.Array,
        allowed: jax.Array,  # read by plain steps alone
        *,
        tree: Tree | None,
        width: int,
    ) -> Call:
        """Make one step, plain or over a tree (`step.decode`, `step.speculate`)."""
        if tree is None:
            return Call(("decode", len(slots), width), self._decode, (layout, state, slots, allowed), {"width": width})
        static = {"tree": tree, "width": width}
        return Call(("speculate", len(slots), tree, width), self._speculate, (layout, state, slots), static)

    def steps(
        self,
        layout: Weights,
        state: SlotState,
        slots: jax.Array,
        num_steps: jax.Array,
        allowed: jax.Array,  # read by plain steps alone
        *,
        tree: Tree | None,
        width: int,
        most: int,
    ) -> Call:
        """Make `num_steps` such steps in a row ([] int32, 1 to `most`), see `repeat`."""
        static = {"tree": tree, "width": width, "most": most}
        key = ("steps", len(slots), *static.values())
        return Call(key, self._steps, (layout, state, slots, num_steps, allowed), static)

    def propose(self, layout: Weights, state: SlotState, slots: jax.Array, *, tree: Tree, width: int) -> Call:
        static = {"tree": tree, "width": width}
        key = ("propose", len(slots), *static.values())
        return Call(key, self._propose, (layout, state, slots), static)

    def verify(
        self,
        layout: Weights,
        state: SlotState,
        slots: jax.Array,
        proposal: Proposal,
        allowed: jax.Array,
        *,
        tree: Tree,
        width: int,
    ) -> Call:
        arguments, static = (layout, state, slots, proposal, allowed), {"tree": tree, "width": width}
        return Call(("verify", len(slots), tree, width), self._verify, arguments, static)


def _steps(
    config: StepConfig,
    layout: Weights,
    state: SlotState,
    slots: jax.Array,
    num_steps: jax.Array,
    allowed: jax.Array,
    *,
    tree: Tree | None,
    width: int,
    most: int,
) -> tuple[SlotState, StepResult]:
    """Run `num_steps` steps of one kind, or as many as there is something to do for."""

    @jax.jit  # so that both calls trace it once
    def one(state: SlotState) -> tuple[SlotState, StepResult]:
        if tree is None:
            return step.decode(config, layout, state, slots, allowed, width=width)
        return step.speculate(config, layout, state, slots, tree=tree, width=width)

    return repeat(one, state, slots, num_steps, most=most)


def _extend(_config: StepConfig, page_table: jax.Array, entries: jax.Array) -> jax.Array:
    """Write pages into the page table. `entries` [3, n]: slot, column and page; a slot out of range is padding."""
    return page_table.at[entries[0], entries[1]].set(entries[2], mode="drop")
