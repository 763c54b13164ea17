"""The swap of an engine's head while it serves: everything is made ready beside the old head, before anything is
changed."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import jax

from specserve.drafters.interface import Head
from specserve.errors import ConfigError, first_line
from specserve.serve.engine.interface import DraftInfo
from specserve.serve.programs.compile_queue import ProgressLog, compile_all
from specserve.serve.programs.program_list import list_programs
from specserve.serve.programs.runner import Runner
from specserve.serve.startup import check_swap_fits
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import Tree

Finish = Iterator[object]  # a generator; what it returns is the controller to go on with, if it is another


@dataclass(frozen=True)
class LoadedHead:
    """A head that has been read from a folder, and what is known of it."""

    head: Head
    acceptance: Sequence[float]  # by depth, from its own evaluation; unknown where empty
    info: DraftInfo
    trees: Sequence[Tree | None] = ()  # the ways to make a step with it; none: those of the head before
    on_compiled: Callable[[Runner], Finish] | None = None  # the work that is left then, as for `Engine`


@dataclass(frozen=True)
class Swap:
    """A head whose programs are there, to be put in its place between two rounds. `done` is called with the
    outcome."""

    runner: Runner
    loaded: LoadedHead
    done: Future[None]


def prepare(runner: Runner, loaded: LoadedHead, *, has_masks: bool, check: Callable[[], None]) -> Swap:
    """Compile the programs that another head needs and that are missing, beside a runner that is at work and at the
    lowest priority; with `has_masks` also those of token masks. `check` is called now and then, and ends it by
    raising. Raises ConfigError where the head does not fit, and what the compiler raises."""
    beside = runner.with_head(loaded.head, loaded.trees)
    jax.block_until_ready([weights.draft for weights in beside.inputs.layouts.distinct])
    if beside.compiled is not runner.compiled:
        check_swap_fits(runner, beside)
        programs = [program for program in list_programs(beside) if has_masks or not program.is_for_masks]
        log = ProgressLog(len(programs), f"for the head {loaded.info.name}")

        def on_compiled(program: StepProgram) -> None:
            log(beside.shapes.label(program))

        try:
            compile_all(beside.compile, programs, on_compiled=on_compiled, check=check, is_background=True)
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(f"a program for this head cannot be compiled: {first_line(error)}") from error
    return Swap(beside, loaded, Future())
