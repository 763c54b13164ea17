"""Another head for an engine that goes on serving: what is made ready beside it, before anything is changed."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import jax

from specserve.drafters.door import Head
from specserve.errors import ConfigError, first_line
from specserve.serve.interface import DraftInfo
from specserve.serve.programs import Announcer, Program, compile_all
from specserve.serve.runner import Runner
from specserve.serve.startup import check_swap_fits
from specserve.speculative.tree import Tree

Finish = Iterator[object]  # a generator; what it returns is the controller to go on with, if it is another


@dataclass(frozen=True)
class LoadedHead:
    """A head that has been read from a folder, and what is known of it."""

    head: Head
    acceptance: Sequence[float]  # by depth, from its own evaluation; unknown where empty
    info: DraftInfo
    trees: Sequence[Tree | None] = ()  # the ways to make a step with it; none: those of the head before
    on_compiled: Callable[[Runner], Finish] | None = None  # what is left to do then, as for `Engine`


@dataclass(frozen=True)
class Swap:
    """A head whose programs are there, to be put in its place between two rounds. `done` is told how that went."""

    runner: Runner
    loaded: LoadedHead
    done: Future[None]


def prepare(runner: Runner, loaded: LoadedHead, *, has_masks: bool, check: Callable[[], None]) -> Swap:
    """Compile beside a runner that is at work what another head needs and is not there, at the lowest priority; with
    what token masks need, if `has_masks`. `check` is called now and then, and ends it by raising. Raises ConfigError
    where the head does not fit, and what the compiler raises."""
    beside = runner.with_head(loaded.head, loaded.trees)
    jax.block_until_ready([weights.draft for weights in beside.layouts.distinct])
    if beside.compiled is not runner.compiled:
        check_swap_fits(runner, beside)
        programs = [program for program in beside.programs() if has_masks or not program.is_for_masks]
        say = Announcer(len(programs), f"for the head {loaded.info.name}")
        try:
            compile_all(
                *(beside.compiled, programs),
                is_wanted=beside.has_room_for,
                on_compiled=say,
                check=check,
                is_background=True,
            )
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(f"a program for this head cannot be compiled: {first_line(error)}") from error
    return Swap(beside, loaded, Future())


def mask_programs(runner: Runner) -> tuple[Program, ...]:
    """What requests with token masks need, and is not compiled yet."""
    return tuple(each for each in runner.programs() if each.is_for_masks and each.call().key not in runner.compiled)
