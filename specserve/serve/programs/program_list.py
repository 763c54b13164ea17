"""The programs that a server needs, in the order of need, and whether those of a step are compiled yet."""

import itertools
from collections.abc import Iterable, Iterator

from specserve.mesh import program_platform
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import Shapes
from specserve.speculative.program import StepProgram


def list_programs(runner: Runner, *, has_scoring: bool = True) -> list[StepProgram]:
    """List every program, in the order of need, with `has_scoring` also what scores prompts. Plain decoding can serve
    everything with the largest ones, those of which `Shapes.is_plain` holds, if not in the fastest way. Programs that
    only token masks need come last."""
    shapes = runner.shapes
    found = [StepProgram(kind="empty state"), StepProgram(kind="admission"), StepProgram(kind="page table")]
    if runner.remembers:
        found.append(StepProgram(kind="recall"))
    if shapes.kept_states:
        found.append(StepProgram(kind="kept state"))
    for width in shapes.widths:
        found += [shapes.step(size, width, shapes.plain) for size in shapes.batch_sizes]
        found += shapes.prefills(width)
    if has_scoring:
        found.append(shapes.prefill(shapes.widths[-1], shapes.chunks[-1], is_scored=True))
    if _catches_up(runner):
        sizes = itertools.product(shapes.batch_sizes, range(len(runner.inputs.layouts.distinct)))
        found += [StepProgram(size, kind="catch-up", layout=number) for size, number in sizes]
    found += shapes.readings()
    for size in itertools.product(shapes.step_sizes, shapes.widths):
        steps = map(shapes.made, shapes.step_programs[size])
        found += [each for each in steps if each.tree != shapes.plain and each not in found]
    if shapes.has_alone:  # the draft follows plain steps, and prompts are run without it
        sizes = itertools.product(shapes.widths, shapes.batch_sizes)
        found += [StepProgram(size, width) for width, size in sizes]
        for width in shapes.widths:
            found += shapes.prefills(width, is_alone=True)
    found += shapes.mixed_programs()
    found.sort(key=lambda program: not shapes.is_plain(program))
    found += _constrained_programs(shapes) if runner.has_constrained else ()
    return [program for program in found if program not in runner.left_out]


def first_programs(runner: Runner, programs: Iterable[StepProgram]) -> list[StepProgram]:
    """List those of the programs that a server makes before it serves, where it begins early: plain decoding, and what
    scores prompts, for which a request could not wait. On a CPU also those of `first_speculation`."""
    chosen = first_speculation(runner)
    return [each for each in programs if runner.shapes.is_plain(each) or each.is_scored or each in chosen]


def first_speculation(runner: Runner) -> list[StepProgram]:
    """List the programs of the one speculative step that a server on a CPU begins with, and the smallest by which the
    draft reads what plain steps have left out. It is for one sequence, which it brings most: they are made in a second,
    where one client may wait a minute for all the others. Prompts of more sequences, which are stepped plainly until
    then, are run without the draft, which nothing would use."""
    shapes = runner.shapes
    size, width = min(shapes.batch_sizes), shapes.widths[-1]
    tree = shapes.only_tree(size) if program_platform() == "cpu" else None
    if tree is None:
        return []
    found = [*needed(runner, StepProgram(size, width, tree)), *[*shapes.readings()][-1:]]
    if shapes.has_alone and shapes.num_slots > size:
        found += [shapes.prefill(width, chunk, is_alone=True) for chunk in shapes.main_chunks]
    return found


def _catches_up(runner: Runner) -> bool:
    return bool(runner.config.max_pending) and len(runner.shapes.trees) > 1  # one tree alone never leaves too much


def _constrained_programs(shapes: Shapes) -> Iterator[StepProgram]:
    """Yield speculative steps with token masks, in two parts each. Plain steps take masks as they are."""
    for size in shapes.batch_sizes:
        tree = shapes.only_tree(size)
        if tree is not None:
            yield from shapes.constrained_step(size, tree)


def timed(runner: Runner) -> list[StepProgram]:
    """List the steps whose costs are measured: of every number of sequences, in every way, and where the target also
    runs alone those that the draft follows; and the readings of the draft."""
    shapes = runner.shapes
    steps = dict.fromkeys(itertools.chain(*shapes.step_programs.values()))
    if shapes.has_alone:
        steps |= {StepProgram(size, width): None for width in shapes.widths for size in shapes.step_sizes}
    return [*(step for step in steps if shapes.made(step) not in runner.left_out), *shapes.readings()]


def needed(runner: Runner, program: StepProgram) -> list[StepProgram]:
    """List the programs of a step: that by which the drafter catches up before it, and its own."""
    program = runner.shapes.made(program) if program.kind == "step" else program
    if program.tree is not None and _catches_up(runner):
        return [runner.inputs.catch_up_for(program.batch, program.tree), program]
    return [program]


def is_compiled(runner: Runner, program: StepProgram) -> bool:
    """Return whether a step runs at once, also where the drafter must catch up before it."""
    return all(each in runner.compiled for each in needed(runner, program))


def is_there(runner: Runner, program: StepProgram) -> bool:
    """Return whether a step could run now or once its programs have been read from their files."""
    return all(each in runner.compiled or runner.compiled.is_away(each) for each in needed(runner, program))


def has_prefill(runner: Runner, chunk: int, *, is_alone: bool) -> bool:
    """Return whether a program is here that prefills a chunk of this size of one prompt. One by which the target runs
    `is_alone`, or the draft follows, is required from now on where it is not, and the other kind serves."""

    def programs(is_alone: bool) -> list[StepProgram]:
        return [runner.shapes.prefill(width, chunk, is_alone=is_alone) for width in runner.shapes.widths]

    own = programs(is_alone and runner.shapes.has_alone)
    if any(each in runner.compiled for each in own):
        return True
    runner.compiled.require(own[-1:])
    return any(each in runner.compiled for each in programs(not is_alone))


def mask_programs(runner: Runner) -> tuple[StepProgram, ...]:
    """List the programs that requests with token masks need, and that are not compiled yet."""
    return tuple(each for each in list_programs(runner) if each.is_for_masks and each not in runner.compiled)
