"""The programs that a server needs: a list with names, made ahead, and whether a step's are compiled yet."""

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from specserve.drafters.speculation import describe
from specserve.serve.engine.options import sampler_rows
from specserve.serve.programs.calls import Call
from specserve.serve.programs.programs import Program
from specserve.serve.programs.runner import PAGES_AT_ONCE, Runner
from specserve.serve.requests.request import SamplingParams
from specserve.speculative.tree import Proposal, Tree

SCORING = "scoring of prompts"  # the name of a program


def programs(runner: Runner) -> list[Program]:
    """List every program, in the order of need. Plain decoding can serve everything with the largest ones, those
    that are `is_plain`, if not in the fastest way. Programs that only token masks need come last."""
    found, shapes = [*_host_programs(runner)], runner.shapes
    for width in shapes.widths:
        found += [_step_program(runner, size, width, shapes.plain) for size in shapes.batch_sizes]
        for chunk in shapes.chunks:
            call = functools.partial(runner.prefill_call, *shapes.no_prompts(chunk), chunk, width)
            is_plain = width == shapes.widths[-1] and chunk == shapes.chunks[-1]
            found.append(Program(f"prefill of {chunk}, contexts up to {width * shapes.page_size}", is_plain, call))
    largest = *shapes.no_prompts(shapes.chunks[-1]), shapes.chunks[-1], shapes.widths[-1]
    found.append(Program(SCORING, True, functools.partial(runner.prefill_call, *largest, is_scored=True)))
    if runner.config.max_pending and len(shapes.trees) > 1:  # one tree alone never leaves more than it can take
        for size, number in itertools.product(shapes.batch_sizes, range(len(runner.layouts.distinct))):
            call = functools.partial(runner.catch_up_call, (shapes.num_slots,) * size, number)
            found.append(Program(f"catching up for {size}", False, call))
    for width, size in itertools.product(shapes.widths, shapes.batch_sizes):
        trees = [tree for tree in shapes.trees_for(size) if tree != shapes.plain]
        found += [_step_program(runner, size, width, tree) for tree in trees]
    found.sort(key=lambda program: not program.is_plain)
    left_out = runner.has_room_for.left_out
    return [program for program in (*found, *_constrained_programs(runner)) if program.name not in left_out]


def _step_program(runner: Runner, size: int, width: int, tree: Tree | None) -> Program:
    call = functools.partial(runner.step_call, (runner.shapes.num_slots,) * size, tree, width)
    return Program(
        f"{describe(tree)} for {size}, contexts up to {width * runner.shapes.page_size}",
        tree == runner.shapes.plain and width == runner.shapes.widths[-1] and size == runner.shapes.num_slots,
        call,
        lambda: runner.run_call(call()),
        step=(size, width, tree),
        is_optional=tree not in (runner.shapes.trees[0], runner.shapes.plain),
    )


def _host_programs(runner: Runner) -> Iterator[Program]:
    """Yield the programs that the host runs between steps."""
    rows = sampler_rows(SamplingParams(), 0)
    yield Program("empty state", True, lambda: runner.beginning)
    yield Program("admission", True, lambda: runner.admission_call(0, (), (), 0, rows, None))
    yield Program("page table", True, lambda: runner.extension_call(np.zeros((3, PAGES_AT_ONCE), np.int32)))
    if runner.remembers:
        yield Program("recall", True, lambda: runner.recall_call(0, 0, 0, 0))


def _constrained_programs(runner: Runner) -> Iterator[Program]:
    """Speculative steps with token masks, in two parts each. Plain steps take masks as they are."""
    for size in runner.shapes.batch_sizes if runner.has_constrained else ():
        tree = runner.shapes.constrained_tree(size)
        for part, call in _constrained_calls(runner, size, tree) if tree else ():
            yield Program(f"constrained {describe(tree)} for {size}: {part}", False, call, is_for_masks=True)


def _constrained_calls(runner: Runner, size: int, tree: Tree) -> tuple[tuple[str, Callable[[], Call]], ...]:
    """The two parts of a step of so many sequences, over nothing but padding."""
    padded, nodes = (runner.shapes.num_slots,) * size, runner.shapes.num_nodes(tree)
    bits = runner.place.shape(size, nodes, -(-runner.config.target.vocab_size // 8), dtype=np.uint8)
    of_nodes = runner.place.shape(size, 1 + tree.num_nodes)
    proposal = Proposal(of_nodes, of_nodes, of_nodes, runner.place.shape(size))
    return (
        ("proposal", functools.partial(runner.proposal_call, padded, tree)),
        ("verification", functools.partial(runner.verification_call, padded, tree, proposal, bits)),
    )


def is_compiled(runner: Runner, batch_size: int, width: int, tree: Tree | None) -> bool:
    """Return whether such a step runs at once, also where the drafter must catch up before it."""
    padded = (runner.shapes.num_slots,) * batch_size
    calls = [runner.step_call(padded, tree, width)]
    if runner.config.max_pending and tree is not None and len(runner.shapes.trees) > 1:
        calls.append(runner.catch_up_call(padded, runner.layouts.number(runner.layout_for(batch_size, tree))))
    return all(call.key in runner.compiled for call in calls)


def is_constrained_compiled(runner: Runner, batch_size: int, tree: Tree) -> bool:
    """Return whether a step of so many sequences, some with token masks, may speculate by this tree at once."""
    return all(call().key in runner.compiled for _, call in _constrained_calls(runner, batch_size, tree))
