"""The swap of an engine's head while it serves: everything is made ready beside the old head, before anything is
changed."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import jax

from specserve.drafters.interface import Head
from specserve.errors import ConfigError, first_line
from specserve.serve.engine.interface import DraftInfo
from specserve.serve.engine.late import Finish, LatePrograms
from specserve.serve.engine.rounds import Rounds
from specserve.serve.programs.compile_queue import ProgressLog, compile_all
from specserve.serve.programs.compiling_process import CompilingProcess
from specserve.serve.programs.program_list import list_programs
from specserve.serve.programs.runner import Runner
from specserve.serve.startup import check_swap_fits
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import Tree

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.2  # how often a swap that waits asks whether the engine is stopping


@dataclass(frozen=True)
class LoadedHead:
    """A head that has been read from a folder, and what is known of it."""

    head: Head
    acceptance: Sequence[float]  # by depth, from its own evaluation; unknown where empty
    info: DraftInfo
    trees: Sequence[Tree | None] = ()  # the ways to make a step with it; none: those of the head before
    on_compiled: Callable[[Runner], Finish] | None = None  # the work that is left then, as of `LateWork`


@dataclass(frozen=True)
class Swap:
    """A head whose programs are there, to be put in its place between two rounds. `done` is called with the
    outcome."""

    runner: Runner
    loaded: LoadedHead
    done: Future[None]


@dataclass(frozen=True)
class ServedHead:
    """The head that an engine begins with, and the function that reads another one from a folder."""

    info: DraftInfo | None = None  # None: there is none
    load: Callable[[str], LoadedHead] | None = None  # None: it stays


class Swaps:
    """The swaps of an engine's head, one after another."""

    def __init__(self, load_head: Callable[[str], LoadedHead] | None) -> None:
        """`load_head` is that of `ServedHead`."""
        self.load_head = load_head
        self._ready: queue.SimpleQueue[Swap] = queue.SimpleQueue()
        self._one = threading.Lock()

    def swap(
        self, folder: str, rounds: Rounds, late: LatePrograms, *, wake: Callable[[], None], check: Callable[[], None]
    ) -> DraftInfo:
        """Load the head in a folder, make it ready beside the old one, and wait until `put_in_place` has been called.
        May be called from any thread. `wake` lets the engine's thread look, and `check` ends the wait by raising.
        Raises what `Engine.load_draft` raises."""
        if self.load_head is None:
            raise ConfigError("this engine cannot replace its head; start another one with it")
        if rounds.runner.shapes.is_deterministic:
            raise ConfigError("a deterministic server never computes an answer's keys again, so its head stays")
        with self._one:
            while not late.is_complete:  # programs of the head before are still compiled or timed
                check()
                time.sleep(CHECK_SECONDS)
            loaded = self.load_head(folder)
            swap = prepare(rounds.runner, loaded, has_masks=late.has_masks, check=check)
            self._ready.put(swap)
            wake()
            while not wait([swap.done], CHECK_SECONDS).done:
                check()
            swap.done.result()
        logger.info("the head is %s now", loaded.info.name)
        return loaded.info

    def put_in_place(self, rounds: Rounds, late: LatePrograms) -> Iterator[LoadedHead]:
        """Put the heads that are ready in their place, on the engine's thread, and yield each. The old one goes on
        where the device cannot run the new one. Raises what `rebuild` is for."""
        while not self._ready.empty():
            swap, before = self._ready.get_nowait(), rounds.runner
            try:
                rounds.swap_head(swap.runner, swap.loaded.acceptance)
            except Exception as error:
                swap.done.set_exception(error)
                if isinstance(error, ConfigError):
                    continue
                raise
            has_others = swap.runner.compiled is not before.compiled
            late.use_head(swap.runner, swap.loaded.on_compiled, has_others=has_others)
            yield swap.loaded
            swap.done.set_result(None)


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

        process = CompilingProcess(beside)
        try:
            compile_all(process.compile, programs, on_compiled=on_compiled, check=check, on_end=process.close)
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(f"a program for this head cannot be compiled: {first_line(error)}") from error
    return Swap(beside, loaded, Future())
