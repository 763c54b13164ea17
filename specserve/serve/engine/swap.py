"""Other weights for an engine that serves: another head, or another version of the target and its head. Everything is
made ready beside the old ones, before anything is changed."""

import dataclasses
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from specserve.checkpoints.load import Quantization, Target
from specserve.drafters.interface import Head
from specserve.errors import ConfigError, first_line
from specserve.models.target import TargetParams
from specserve.serve.engine.changes import CHECK_SECONDS, Changes
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

# the parameters as `load_target` gives them, arrays by the checkpoint's names, a model folder, or a file
TargetWeights = TargetParams | Mapping[str, Any] | str | Path
DraftWeights = Any  # the parameters of the same head, a file of them, or the folder of one that is alike
UpdateMode = Literal["continue", "drain"]
MOST_DIGITS = 18  # of the name of a version that counts as a number
MODES: tuple[UpdateMode, ...] = ("continue", "drain")


@dataclass(frozen=True)
class HeadForm:
    """A head that is served, in so many bits. Its parameters are left out."""

    head: Head
    quantization: Quantization

    def fits(self, other: Head) -> bool:
        """Return whether another head has the same parameters, of the same meaning."""
        return self.head.drafter == other.drafter and np.array_equal(self.head.target_ids, other.target_ids)


# with what is known of the head: nothing where its parameters were given, or it stays
WeightsReader = Callable[
    [HeadForm | None, TargetWeights | None, DraftWeights | None],
    tuple[Target | None, Head | None, DraftInfo | None],
]


@dataclass(frozen=True)
class LoadedHead:
    """A head that has been read from a folder, and what is known of it."""

    head: Head
    acceptance: Sequence[float]  # by depth, from its own evaluation; unknown where empty
    info: DraftInfo
    trees: Sequence[Tree | None] = ()  # the ways to make a step with it; none: those of the head before
    on_compiled: Callable[[Runner], Finish] | None = None  # the work that is left then, as of `LateWork`
    quantization: Quantization = "none"

    @property
    def form(self) -> HeadForm:
        return HeadForm(dataclasses.replace(self.head, params=None), self.quantization)


@dataclass(frozen=True)
class ServedWeights:
    """The version and the head that an engine begins with, and the functions that read other weights."""

    version: str = "0"
    info: DraftInfo | None = None  # None: there is no head
    folder: str = ""  # of the target that the command names; empty: there is none
    load_head: Callable[[str], LoadedHead] | None = None  # from a folder; None: it stays
    form: HeadForm | None = None
    # reads weights of the same models, each where there are some; None: they stay
    read: WeightsReader | None = None


def number_after(version: str, least: int) -> int:
    """Return the number that may name the version after this one, at least `least`."""
    is_number = version.isdecimal() and len(version) <= MOST_DIGITS
    return max(least, int(version) + 1) if is_number else least


class Swaps:
    """The swaps of an engine's weights, one after another. Its methods may be called from any thread, and raise
    ConfigError or CheckpointError where something is wrong with the new weights; then the old ones stay."""

    def __init__(
        self, weights: ServedWeights, rounds: Rounds, late: LatePrograms, changes: Changes, check: Callable[[], None]
    ) -> None:
        """`check` raises once the engine is stopping."""
        self.weights, self._rounds, self._late, self._changes, self._check = weights, rounds, late, changes, check
        self._form = weights.form
        self._next_number = number_after(weights.version, 1)  # the name of a version that is given none
        self._one = threading.Lock()

    def load_head(self, folder: str, on_swapped: Callable[[DraftInfo], None]) -> DraftInfo:
        """Load the head in a folder, make it ready beside the old one, and return when it has taken its place. Then
        `on_swapped` is called, on the engine's thread."""
        if self.weights.load_head is None:
            raise ConfigError("this engine cannot replace its head; start another one with it")
        if self._rounds.runner.shapes.is_deterministic:
            raise ConfigError("a deterministic server never computes an answer's keys again, so its head stays")
        with self.alone():
            self.check_awake()
            loaded, runner = self.weights.load_head(folder), self._rounds.runner
            beside = runner.with_head(loaded.head, loaded.trees)
            self._prepare(beside, f"for the head {loaded.info.name}")
            has_others = beside.compiled is not runner.compiled
            del runner  # it holds the version before

            def swap() -> None:
                self._rounds.swap(beside, prior=loaded.acceptance)
                self._late.use(beside, loaded.on_compiled, has_others=has_others)
                on_swapped(loaded.info)

            self._changes.ask(swap)
            self._form = loaded.form
        gc.collect()  # as in `update`
        logger.info("the head is %s now", loaded.info.name)
        return loaded.info

    def update(
        self,
        target: TargetWeights | None,
        draft: DraftWeights | None,
        on_swapped: Callable[[DraftInfo | None], None],
        *,
        version: str,
        mode: UpdateMode,
    ) -> str:
        """Serve other weights of the same models from the next round on, or, to `drain`, once those sequences have
        ended that have begun. Returns the name of this version of the weights; empty: the next number. When it serves,
        `on_swapped` is called on the engine's thread, with what is known of another head that came from a folder."""
        if not isinstance(version, str):
            raise ConfigError(f"version {version!r}: expected a text")
        if mode not in MODES:
            raise ConfigError(f"mode {mode!r}: expected one of {', '.join(MODES)}")
        if target is None and draft is None:
            raise ConfigError("an update of the weights needs those of the target, those of the draft, or both")
        if self.weights.read is None:
            raise ConfigError("this engine runs in several processes, so its weights stay; start another one with them")
        if mode == "continue" and self._rounds.runner.shapes.is_deterministic:
            raise ConfigError("a deterministic server never computes an answer's keys again; update it with mode drain")
        with self.alone():
            self.check_awake()
            runner = self._rounds.runner
            try:
                other, head, info = self.weights.read(self._form if runner.shapes.uses_head else None, target, draft)
                beside = runner.with_weights(other and other.params, head)
                self._prepare(beside, "for other weights")
            except (OSError, jax.errors.JaxRuntimeError) as error:
                raise ConfigError(f"the new weights cannot be brought to the device: {first_line(error)}") from error
            has_others, name = beside.compiled is not runner.compiled, version or str(self._next_number)
            del runner  # it holds the version before

            def swap() -> None:
                self._rounds.swap(beside, version=name)
                self._next_number = number_after(name, self._next_number + 1)
                self._late.use(beside, None, has_others=has_others)
                on_swapped(info)

            self._changes.ask(swap, is_patient=mode == "drain")
        gc.collect()  # JAX's caches hold functions that are in cycles, and these the version before
        logger.info("the weights are version %s now", name)
        return name

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let no other swap be made meanwhile, from when all programs are compiled and timed."""
        with self._one:
            while not self._late.is_complete:
                self._check()
                if self._rounds.asleep and self._late.times_steps:
                    raise ConfigError(
                        "programs are still to be timed, for which nothing may be asleep; wake all up first"
                    )
                time.sleep(CHECK_SECONDS)
            if self.weights.read is None and self.weights.load_head is None:
                raise ConfigError("the weights of this engine, which may run in several processes, stay on its devices")
            yield

    def check_awake(self) -> None:
        """Raise ConfigError where the weights are off the device."""
        if "weights" in self._rounds.asleep:
            raise ConfigError("the weights are off the device; wake them up first")

    def _prepare(self, beside: Runner, why: str) -> None:
        """Compile the programs that other weights need and that are missing, beside a runner that is at work and at the
        lowest priority. Raises ConfigError where they do not fit."""
        runner = self._rounds.runner
        jax.block_until_ready(beside.inputs.layouts.distinct)
        if beside.compiled is runner.compiled:
            return
        check_swap_fits(runner, beside)
        has_masks = self._late.has_masks
        programs = [program for program in list_programs(beside) if has_masks or not program.is_for_masks]
        log = ProgressLog(len(programs), why)

        def on_compiled(program: StepProgram) -> None:
            log(beside.shapes.label(program))

        process = CompilingProcess(beside)
        try:
            compile_all(process.compile, programs, on_compiled=on_compiled, check=self._check, on_end=process.close)
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(f"a program {why} cannot be compiled: {first_line(error)}") from error
