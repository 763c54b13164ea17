"""The runners of `specserve verify`, over one loaded target, with programs for one request and for a batch."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

from specserve import host
from specserve.drafters.speculation import parse_speculation
from specserve.errors import ConfigError, DataError
from specserve.eval.prompts import load_questions
from specserve.eval.verify.judge import Group, ProofSubject
from specserve.eval.verify.rule import WholeText
from specserve.mesh import num_parts
from specserve.serve.launch import Models, choose_trees
from specserve.serve.programs.compile_queue import compile_all
from specserve.serve.programs.program_list import list_programs
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import make_shapes
from specserve.serve.settings import ServeRun
from specserve.serve.sizes import num_kept_states
from specserve.serve.startup import check_numbers, check_state_fits
from specserve.speculative.program import StepProgram
from specserve.speculative.tree import Tree

NUM_SLOTS = 4  # of each data rank, which has pages of its own: several sequences, so that they can be too few
PAGE_SIZE = 16  # small, so that short prompts have full ones, which the prefix cache shares
CHUNKS = 2  # of prompts: so that some take several programs
LONGEST_PROMPT = 512
AUTO = "auto"
EXPECTED = "auto, chains, trees or lookups"


def ways_to_prove(models: Models, speculation: Sequence[str]) -> list[Tree]:
    """Return the ways to speculate that were asked for. `auto` stands for all that serve would compile for this head.
    Raises ConfigError."""
    found: list[Tree] = []
    for text in speculation:
        if text == AUTO:
            found += filter(None, choose_trees(models, ServeRun()))
            continue
        tree = parse_speculation(text)
        if tree is None:
            raise ConfigError(
                f"--speculation {text}: everything is compared with it; give auto, chains, trees, lookups"
            )
        if tree.uses_head and models.head is None:
            raise ConfigError(f"--speculation {text}: there is no head for {models.name}; give one with --draft")
        found.append(tree)
    if not found:
        raise ConfigError(f"--speculation: there is nothing to prove; give {EXPECTED}")
    return list(dict.fromkeys(found))


def load_prompts(models: Models, bench: str, limit: int) -> list[list[int]]:
    """Load the first turns of a bench as the target's chat template renders them. Raises DataError where none is short
    enough."""
    assert models.tokenizer is not None
    chats = [[{"role": "user", "content": question.turns[0]}] for question in load_questions(bench, limit)]
    longest = min(LONGEST_PROMPT, models.target.config.max_len // 4)
    prompts = [prompt for prompt in map(models.tokenizer.render_chat, chats) if len(prompt) <= longest]
    if not prompts:
        raise DataError(f"{bench}: no question has {longest} tokens or fewer; give shorter ones with --bench")
    return prompts


def make_bench(
    models: Models,
    trees: Sequence[Tree],
    *,
    max_model_len: int,
    on_warmup: Callable[[int, int, str], None] = lambda _done, _total, _name: None,
) -> ProofSubject:
    """Make a bench with one group of the ways that a head proposes, and one of those that need no head, because no
    runner has both. Nothing is compiled yet."""
    ways = [[tree for tree in trees if tree.uses_head == uses_head] for uses_head in (True, False)]
    groups = [Group(some, functools.partial(_open, models, some, max_model_len, on_warmup)) for some in ways if some]
    return ProofSubject(models.target, models.tokenizer, WholeText(models.target, models.mesh), groups)


def _open(
    models: Models, trees: Sequence[Tree], max_model_len: int, on_warmup: Callable[[int, int, str], None]
) -> Runner:
    num_slots = NUM_SLOTS * num_parts(models.mesh, "batch")
    shapes = make_shapes(
        [None, *trees],
        models.target.config,
        models.mesh,
        num_slots=num_slots,
        max_model_len=max_model_len,
        page_size=PAGE_SIZE,
        num_pages=num_slots * -(-max_model_len // PAGE_SIZE),
        kept_states=num_kept_states(models.target.config, num_slots),
    ).with_windows(models.target.config, models.head.drafter if models.head else None)
    # every way is proved alone and in a batch, also where serve would step large batches plainly
    batch_sizes = tuple(dict.fromkeys((shapes.batch_sizes[0], num_slots)))
    rows = num_slots * max(map(shapes.num_nodes, shapes.trees))
    shapes = dataclasses.replace(
        shapes, batch_sizes=batch_sizes, widths=shapes.widths[-1:], chunks=shapes.chunks[:CHUNKS], max_rows=rows
    )
    runner = Runner(
        models.target,
        models.head,
        shapes,
        has_constrained=models.tokenizer is not None,
        mesh=models.mesh,
        folder=host.cache_folder() / "programs",
        check=functools.partial(check_state_fits, mesh=models.mesh),
    )
    programs = list_programs(runner, has_scoring=False)
    done = itertools.count(1)

    def report(program: StepProgram) -> None:
        on_warmup(next(done), len(programs), shapes.label(program))

    compile_all(runner.compile, programs, on_compiled=report)
    check_numbers(runner, models.target)
    return runner
