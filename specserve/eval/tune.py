"""The search for the best way to speculate at each batch size: acceptance is replayed for every tree, costs are
measured where a tree could still win, and a short live run says how far the prediction holds.

A tree's gain is (tokens per step) x (seconds of a plain step) / (seconds of its step). Tokens per step come from
`replay`, so no tree has to answer anything. The two times are always of one moment, since a machine may be half as fast
in the next one: their ratio is what lasts. Two facts spare most of the measurements: a tree that is no smaller than
another and brings hardly more cannot win, and a step over a larger tree or of more sequences takes no less time.
"""

import itertools
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from specserve.drafters.speculation import describe, parse_speculation, within_reach
from specserve.errors import ConfigError
from specserve.eval.bench.cells import EngineArm, steady
from specserve.eval.bench.step_times import steps_timed, time_in_turns
from specserve.eval.replay import Recording, Replayed, record, replay
from specserve.eval.settings import TuneRun
from specserve.serve.engines import measured_engine
from specserve.serve.launch import Models, make_runner, profile_facts, with_cache_dtype
from specserve.serve.requests.request import SamplingParams
from specserve.serve.settings import ServeRun
from specserve.serve.tuned import TUNED, Entry, Profile
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.tree import DynamicTree, Tree, chain, static_tree

logger = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]  # what is being done, how much of it is done, of how much
TimeTree = Callable[..., tuple[float, float]]  # (tree, batch=): seconds of a plain step, and of one over the tree

CLEARLY_MORE = 1.02  # tokens per step that a larger tree must bring; less cannot be told from noise
NEAR = 0.1  # prediction and measurement should agree within this share
LONGEST_CHAIN = 8
STATIC_WIDTHS = ((2,), (2, 1), (2, 2), (3, 1), (2, 1, 1), (2, 2, 1), (3, 2, 1), (4, 2, 1, 1))
CPU_WIDTHS, DEVICE_WIDTHS = (2, 3), (2, 3, 4, 8)  # top_k of dynamic trees
CPU_SIZES, DEVICE_SIZES = (3, 5, 7, 11, 15), (4, 7, 11, 15, 23, 31, 47, 63)  # their nodes, the root not counted
DEPTHS = (2, 3, 4, 5, 6, 7)


@dataclass(frozen=True)
class Timed:
    """The cost of a step at one batch size: medians, in seconds, of plain steps and steps over a tree in turns."""

    batch_size: int
    tree: Tree
    plain: float
    step: float


@dataclass(frozen=True)
class Found:
    """The results of a search."""

    profile: Profile
    replayed: tuple[Replayed, ...]  # every tree
    timed: tuple[Timed, ...]  # those that could win
    num_answers: int
    num_tokens: int  # of the recorded answers


def sensible_trees() -> list[Tree]:
    """The trees to choose from where nobody names any."""
    widths, sizes = (CPU_WIDTHS, CPU_SIZES) if jax.default_backend() == "cpu" else (DEVICE_WIDTHS, DEVICE_SIZES)
    grown = [DynamicTree(*shape) for shape in itertools.product(DEPTHS, widths, sizes)]
    return [
        *[chain(length) for length in range(1, LONGEST_CHAIN + 1)],
        *[static_tree(each) for each in STATIC_WIDTHS],
        *[tree for tree in grown if tree.depth <= tree.num_nodes <= tree.pool_size],
    ]


def parse_trees(texts: Sequence[str]) -> list[Tree]:
    """Read the trees to choose from; none where nobody names any. Raises ConfigError for what no head proposes
    alone."""
    trees = []
    for text in dict.fromkeys(texts):
        tree = parse_speculation(text)
        if tree is None or not tree.uses_head or tree.lookup:
            raise ConfigError(f"--trees {text}: expected chains and trees that a head proposes alone, such as chain:3")
        trees.append(tree)
    return trees


def tune(
    models: Models,
    run: TuneRun,
    prompts: Sequence[Sequence[int]],
    on_progress: OnProgress = lambda _what, _done, _total: None,
) -> Found:
    """Find the best tree of each batch size for prompts like these. Nothing is written. Raises ConfigError, or
    DataError where no prompt fits."""
    serve = _serve_run(run)
    facts, models = profile_facts(models, serve), with_cache_dtype(models, serve)
    assert models.head is not None, "without a head there are no facts"
    trees = parse_trees(run.trees) or within_reach(sensible_trees(), models.head.drafter)
    runner = make_runner(models, serve, (None, *trees))
    longest = max(tree.depth for tree in trees)
    recordings = record(
        runner,
        prompts,
        trees,
        max_tokens=run.max_tokens,
        eos_ids=models.target.eos_ids,
        temperature=run.temperature,
        seed=run.seed,
        on_answer=lambda done: on_progress("recording answers", done, len(prompts)),
    )
    replayed = [replay(recordings, tree) for tree in trees]
    worth = undominated(replayed)
    plain = make_runner(models, serve, (None,))
    middle = sorted(map(len, prompts))[len(prompts) // 2] + run.max_tokens // 2
    context = max(1, min(middle, runner.shapes.max_model_len - steps_timed(run.repeats) - longest - 3))
    time_tree = partial(time_in_turns, plain, runner, context=context, repeats=run.repeats)
    timed = time_all(time_tree, runner.shapes.batch_sizes, worth, on_progress)
    again = [time_again(time_tree, size, worth, timed, on_progress) for size in runner.shapes.batch_sizes]
    entries = [_best(worth, of_leaders) for of_leaders in again]
    timed += itertools.chain.from_iterable(again)
    details = _details(models, run, replayed, timed, recordings, context)
    profile = Profile(facts, tuple(entries), details)
    return Found(profile, tuple(replayed), tuple(timed), len(recordings), sum(each.length for each in recordings))


def _serve_run(run: TuneRun) -> ServeRun:
    return ServeRun(
        kv_cache_dtype=run.kv_cache_dtype,
        max_slots=run.max_slots,
        max_model_len=run.max_model_len,
        constrained=False,
        early_ready=False,
    )


def is_smaller(tree: Tree, other: Tree) -> bool:
    """Return whether a step over `tree` has no more to do than one over `other`."""
    return tree.num_nodes <= other.num_nodes and tree.depth <= other.depth and tree.top_k <= other.top_k


def undominated(replayed: Sequence[Replayed]) -> list[Replayed]:
    """Return the trees that bring clearly more tokens per step than every smaller tree, the smallest first."""
    found: list[Replayed] = []
    for each in sorted(replayed, key=lambda each: (each.tree.num_nodes, each.tree.depth, each.tree.top_k)):
        below = [other for other in found if is_smaller(other.tree, each.tree)]
        if all(each.tokens_per_step > CLEARLY_MORE * other.tokens_per_step for other in below):
            found.append(each)
    return found


def can_win(each: Replayed, batch_size: int, timed: Sequence[Timed], best: float) -> bool:
    """Return whether a tree could gain more than `best` at this batch size, given that its step takes at least as long
    as every timed step over a smaller tree or of fewer sequences."""
    plain = {size: statistics.median(values) for size, values in _plain_steps(timed).items()}
    least = [
        found.step * plain[found.batch_size] / found.plain  # as it were if its moment had been a common one
        for found in timed
        if found.batch_size <= batch_size and is_smaller(found.tree, each.tree)
    ]
    return batch_size not in plain or not least or each.tokens_per_step * plain[batch_size] / max(least) > best


def _plain_steps(timed: Sequence[Timed]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for each in timed:
        found.setdefault(each.batch_size, []).append(each.plain)
    return found


def time_all(
    time_tree: TimeTree, batch_sizes: Sequence[int], worth: Sequence[Replayed], on_progress: OnProgress
) -> list[Timed]:
    """Time every tree at every batch size where it could win."""
    timed: list[Timed] = []
    pairs = list(itertools.product(batch_sizes, worth))
    for done, (size, each) in enumerate(pairs):
        on_progress(f"timing {describe(each.tree)} for {size}", done, len(pairs))
        gain = max([1.0, *(gain for gain, _ in _gains(size, worth, timed))])
        if can_win(each, size, timed, gain):
            timed.append(Timed(size, each.tree, *time_tree(each.tree, batch=size)))
    return timed


def time_again(
    time_tree: TimeTree,
    batch_size: int,
    worth: Sequence[Replayed],
    timed: Sequence[Timed],
    on_progress: OnProgress = lambda _what, _done, _total: None,
) -> list[Timed]:
    """Time the leading tree of a batch size again, until the leader by all figures has been timed, and then once more:
    that is the last of the list. The best of many noisy figures is mostly the luckiest. So the gain of the leader is
    told by a figure that it was not chosen by."""
    again: list[Timed] = []
    while True:
        _, leader = _gains(batch_size, worth, [*timed, *again])[0]
        is_found = any(found.tree == leader for found in again)
        on_progress(f"timing {describe(leader)} for {batch_size} again", len(again), len(again) + 1)
        again.append(Timed(batch_size, leader, *time_tree(leader, batch=batch_size)))
        if is_found:
            return again


def _gains(batch_size: int, worth: Sequence[Replayed], timed: Sequence[Timed]) -> list[tuple[float, Tree]]:
    """Return the gain of each tree that was timed at this batch size, which is its tokens per second over those of
    plain decoding, the best first. A tree that was timed more than once has the mean of its gains."""
    tokens, gains = {each.tree: each.tokens_per_step for each in worth}, dict[Tree, list[float]]()
    for found in timed:
        if found.batch_size == batch_size:
            gains.setdefault(found.tree, []).append(tokens[found.tree] * found.plain / found.step)
    means = [(statistics.mean(values), tree) for tree, values in gains.items()]
    return sorted(means, key=lambda gain: -gain[0])


def _best(worth: Sequence[Replayed], again: Sequence[Timed]) -> Entry:
    """Make the profile's entry for a batch size: its last leader, by the times that were taken the last time."""
    leader = again[-1]
    found = next(each for each in worth if each.tree == leader.tree)
    plain_ms, gain = 1e3 * leader.plain, found.tokens_per_step * leader.plain / leader.step
    if gain <= 1.0:
        return Entry(leader.batch_size, "off", 1.0, plain_ms, plain_ms, 1.0)
    return Entry(leader.batch_size, describe(leader.tree), found.acceptance.tau, plain_ms, 1e3 * leader.step, gain)


def _details(
    models: Models,
    run: TuneRun,
    replayed: Sequence[Replayed],
    timed: Sequence[Timed],
    recordings: Sequence[Recording],
    context: int,
) -> Mapping[str, Any]:
    trees = {
        describe(each.tree): {
            "tau": each.acceptance.tau,
            "accept_rate": each.acceptance.accept_rate,
            "tokens_per_step": each.tokens_per_step,
            "nodes": each.tree.num_nodes,
        }
        for each in replayed
    }
    costs = [
        {
            "batch_size": each.batch_size,
            "speculation": describe(each.tree),
            "plain_ms": 1e3 * each.plain,
            "step_ms": 1e3 * each.step,
        }
        for each in timed
    ]
    return {
        "names": {"target": models.name, "draft": models.draft.name if models.draft else ""},
        "replayed": {
            "answers": len(recordings),
            "tokens": sum(each.length for each in recordings),
            "temperature": run.temperature,
            "trees": trees,
        },
        "timed": {"context": context, "steps": costs},
    }


def measure_live(
    models: Models,
    run: TuneRun,
    profile: Profile,
    file: str,  # where the profile has been written
    prompts: Sequence[Sequence[int]],
    on_progress: OnProgress = lambda _what, _done, _total: None,
) -> Profile:
    """Answer the prompts plainly and as `serve --speculation tuned` would, in turns, at each batch size where a tree is
    expected to win: each prompt once, as acceptance was replayed over them, but for those that fill no last batch.
    Returns the profile with what was measured."""
    models = with_cache_dtype(models, _serve_run(run))
    sizes = [entry.batch_size for entry in profile.entries if entry.speculation != "off"]
    if not sizes:
        return profile
    prompts = [prompt for prompt in prompts if len(prompt) + run.max_tokens <= run.max_model_len]
    plain, tuned = (
        measured_engine(
            models,
            speculation,
            num_slots=run.max_slots,
            max_model_len=run.max_model_len,
            tuned_profile=file if speculation == TUNED else "",
            on_warmup=lambda done, total, name: on_progress(f"compiling {name}", done, total),
        )
        for speculation in ("off", TUNED)
    )
    measured: dict[int, tuple[float, float]] = {}
    with plain, tuned:
        arms = EngineArm(plain), EngineArm(tuned)
        for arm in arms:  # first touches of memory
            arm.ask(prompts[:1], [_params(run, 0)], 1)
        for done, size in enumerate(sizes):
            on_progress(f"answering {size} at once", done, len(sizes))
            measured[size] = _measure_size(arms, run, prompts, size)
    entries = []
    for entry in profile.entries:
        gain, tau = measured.get(entry.batch_size, (None, None))
        entries.append(replace(entry, measured_gain=gain, measured_tau=tau))
    return replace(profile, entries=tuple(entries))


def _measure_size(
    arms: tuple[EngineArm, EngineArm], run: TuneRun, prompts: Sequence[Sequence[int]], size: int
) -> tuple[float, float]:
    """Return the gain of the second arm over the first with so many sequences at once, and its tau."""
    tokens, seconds, acceptance = [0, 0], [0.0, 0.0], Acceptance()
    supply = itertools.cycle(range(len(prompts)))
    for number in range(max(1, len(prompts) // size)):
        group = list(itertools.islice(supply, size))
        for i in (number % 2, 1 - number % 2):
            arms[i].forget()
            answers, _ = arms[i].ask([prompts[j] for j in group], [_params(run, j) for j in group], size)
            num_tokens, span = steady(answers)
            tokens[i] += num_tokens
            seconds[i] += span
            if i:
                acceptance = sum((answer.acceptance for answer in answers), acceptance)
    rates = [n / max(span, 1e-9) for n, span in zip(tokens, seconds, strict=True)]
    return rates[1] / max(rates[0], 1e-9), acceptance.tau


def _params(run: TuneRun, i: int) -> SamplingParams:
    return SamplingParams(max_tokens=run.max_tokens, temperature=run.temperature, seed=run.seed + i)


def is_near(entry: Entry) -> bool:
    """Return whether prediction and measurement agree."""
    return entry.measured_gain is None or abs(entry.measured_gain / entry.predicted_gain - 1) <= NEAR
