"""The functions that the server runs on the device, ready to be compiled. This is the only file of the server that
calls `jax.jit`. Nothing is compiled or run here.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from specserve.kernels import native
from specserve.mesh import on_mesh
from specserve.pytree import pytree
from specserve.serve.programs.placement import Placement, is_paged
from specserve.speculative import slot_state, step
from specserve.speculative.drafter import Weights
from specserve.speculative.program import Kind, StepProgram
from specserve.speculative.repeat import repeat
from specserve.speculative.slot_state import SlotState, StepConfig, StepResult
from specserve.speculative.tree import Tree

_STATIC: Mapping[Kind, tuple[str, ...]] = {  # the fields of a program that its function takes as static arguments
    "reading": ("chunk", "width"),
    "prefill": ("chunk", "width", "is_scored"),
    "step": ("tree", "width"),
    "mixed": ("tree", "chunk", "width"),
    "proposal": ("tree", "width"),
    "verification": ("tree", "width"),
}
# XLA's older code generation, LLVM's first level, and one module for LLVM take half of the time, and steps are as fast
# where native kernels make their products (docs/log)
_QUICK: Mapping[str, Any] = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_backend_optimization_level": 1,
    "xla_cpu_parallel_codegen_split_count": 1,
}


@pytree
class Burst:
    """The steps that one call makes, one after another."""

    slots: jax.Array  # [batch] int32
    num_steps: jax.Array  # [] int32
    allowed: jax.Array  # [batch, 1, bytes] uint8, of plain steps, see `sampling.constrain`


@dataclass(frozen=True)
class Call:
    """A jitted function with its arguments. Calls of the same program run the same compiled code."""

    program: StepProgram
    function: Any  # jitted
    arguments: tuple[Any, ...]  # pytrees of arrays, or of their shapes
    static: dict[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # of XLA's compiler

    def lower(self) -> jax.stages.Lowered:
        """Trace the function for arguments of these shapes. Their values are not read, so donated arrays will do."""
        return self.function.lower(*jax.tree.map(shape_of, self.arguments), **self.static)

    def compile(self) -> jax.stages.Compiled:
        """Trace the function, and compile it."""
        return self.lower().compile(dict(self.options))


def shape_of(x: jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and sharding of an array, for which a program is compiled; a shape stays as it is."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    place = None if isinstance(x, np.ndarray | np.generic) else x.sharding
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place if isinstance(place, NamedSharding) else None)


class Calls:
    """The calls of one runner. The state that a call takes is donated; the new state is the first of its results."""

    def __init__(
        self,
        config: StepConfig,
        place: Placement,
        state: SlotState | None,
        *,
        sizes: Mapping[str, Any],
        most_steps: int,
    ) -> None:
        """`state` gives the places of the arrays of the state; None: the default device. `sizes` are those of an empty
        state (`slot_state.init_state`), and `most_steps` is the number of steps that one call makes, at most."""
        whole: NamedSharding | None = place.whole
        both = (state, whole)

        def jit(
            function: Callable[..., Any], donated: int | None, outputs: Any, *static: str, config: StepConfig = config
        ) -> Any:
            # function objects of their own: jit's cache belongs to the function, and runners must not share it
            bound = functools.partial(on_mesh(place.mesh, function), config)
            return jax.jit(bound, donate_argnums=donated, static_argnames=static, out_shardings=outputs)

        is_native = native.is_available() and place.mesh is None and not config.target.is_recurrent
        self._options = _quick_options() if is_native else {}
        self._always: Mapping[Kind, Mapping[str, Any]] = {"empty state": sizes, "step": {"most": most_steps}}
        self._functions: Mapping[Kind, Any] = {
            # of a mesh one program makes all: no cache may be whole on one device, not for a moment
            "empty state": jit(slot_state.init_state if place.mesh else _without_pages, None, state, *sizes),
            "admission": jit(slot_state.admit, 0, state),
            "page table": jit(slot_state.extend, 0, whole),
            "recall": jit(step.remember, 0, state and state.draft),
            "kept state": jit(slot_state.keep, 0, state),
            "catch-up": jit(step.catch_up, 1, state),
            "reading": jit(step.read, 1, state, *_STATIC["reading"]),
            "prefill": jit(step.prefill, 1, both, *_STATIC["prefill"]),
            "step": jit(_steps, 1, both, *_STATIC["step"], "most"),
            "mixed": jit(step.mixed, 1, both, *_STATIC["mixed"]),
            "proposal": jit(step.propose_tree, 1, both, *_STATIC["proposal"]),
            "verification": jit(step.verify_tree, 1, both, *_STATIC["verification"]),
        }
        # as a server without a draft has them: what the draft keeps is not even among the arguments
        alone = dataclasses.replace(config, drafter=None)
        self._alone: Mapping[Kind, Any] = {
            "prefill": jit(step.prefill, 1, None, *_STATIC["prefill"], config=alone),
            "step": jit(_steps, 1, None, *_STATIC["step"], "most", config=alone),
        }

    def make(self, program: StepProgram, arguments: tuple[Any, ...]) -> Call:
        """Return the call of a program with these arguments (`inputs.Inputs` makes them)."""
        kind = program.kind
        static = {name: getattr(program, name) for name in _STATIC.get(kind, ())}
        static.update(self._always.get(kind, {}))
        functions = self._alone if program.is_alone else self._functions
        return Call(program, functions[kind], arguments, static, self._options)


@functools.cache
def _quick_options() -> Mapping[str, Any]:
    """Return the options by which XLA compiles quickly; none where this XLA has no such options, or where JAX's own
    settings say how much to optimise."""
    if jax.config.values["jax_disable_most_optimizations"]:  # type: ignore[attr-defined]
        return {}
    try:
        jax.jit(lambda: 0).lower().compile(dict(_QUICK))
    except jax.errors.JaxRuntimeError:
        return {}
    return _QUICK


def _without_pages(config: StepConfig, **sizes: Any) -> list[Any]:
    """Return the parts of an empty state that are no pages, which `Placement.with_pages` puts together."""
    parts = jax.tree.leaves(slot_state.init_state(config, **sizes), is_leaf=is_paged)
    return [part for part in parts if not is_paged(part)]


def _steps(
    config: StepConfig,
    layout: Weights,
    state: SlotState,
    burst: Burst,
    *,
    tree: Tree | None,
    width: int,
    most: int,
) -> tuple[SlotState, StepResult]:
    """Run the steps of a burst, or as many as there is something to do for."""

    @jax.jit  # so that both calls trace it once
    def one(state: SlotState) -> tuple[SlotState, StepResult]:
        if tree is None:
            return step.decode(config, layout, state, burst.slots, burst.allowed, width=width)
        return step.speculate(config, layout, state, burst.slots, tree=tree, width=width)

    return repeat(one, state, burst.slots, burst.num_steps, most=most)
