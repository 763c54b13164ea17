"""Law 1: speculation never changes a token. Chain, static and dynamic trees, alone and in mixed batches, greedy and
sampled, with a good head and with a useless one, through the engine, on the bundled target."""

import dataclasses
import json.decoder
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny
from engines import Ask, Fixed, check_equal, find_tie

from specserve.checkpoints.load import Target
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.options import EngineOptions
from specserve.serve.programs.layouts import make_layouts
from specserve.serve.programs.runner import Runner
from specserve.serve.programs.shapes import make_shapes
from specserve.serve.requests.completion import CompletionOutput
from specserve.serve.requests.request import SamplingParams
from specserve.tokenizer import Tokenizer

NUM_TOKENS = 60  # from any prompt three pages on, and few enough that every text fits one forward of 128 tokens
ALONE = (0, 3)  # a greedy and a sampled request
TREES = {text: parse_speculation(text) for text in ("chain:3", "static:3x2x1", "tree:3x3x8")}
LONELY = "tree:3x3x8"  # serves requests one by one, the others all of them as a batch
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, seed=0, ignore_eos=True)


def _sampled(seed: int, **options: float) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True, **options)  # type: ignore[arg-type]


PARAMS = [  # one for each prompt; greedy and sampled rows share every step
    GREEDY,
    _sampled(1),
    GREEDY,
    _sampled(2**40 + 2, top_p=0.9),
    _sampled(-6, top_k=20),
    _sampled(6, temperature=0.7, min_p=0.05),
    GREEDY,
    _sampled(7, top_p=0.8, top_k=50, min_p=0.02),
]


@pytest.fixture(scope="module")
def prompts(pydoc_tokenizer: Tokenizer) -> list[list[int]]:
    """Lengths from 1 to 65: around the ends of pages (16) and of the prefill chunk (64)."""
    code = pydoc_tokenizer.encode(Path(json.decoder.__file__).read_text())
    questions = ["What does `os.path.join` do?", "Write the function `json.dumps`.", "Explain `jax.vmap`."]
    chats = [pydoc_tokenizer.render_chat([{"role": "user", "content": question}]) for question in questions]
    cuts = ((0, 1), (100, 16), (200, 17), (300, 64), (470, 65))
    one, page, over, chunk, longest = (code[start : start + n] for start, n in cuts)
    return [chats[0], chats[1], longest, one, chunk, chats[2], over, page]


@pytest.fixture(scope="module")
def runner(pydoc_target: Target, pydoc_head: Head, kept: Path | None) -> Runner:
    """Every way to step over one state: a program is compiled when a test asks for it."""
    sizes = {"num_slots": 8, "max_model_len": 128, "page_size": 16, "num_pages": 8 * 8}
    shapes = make_shapes([None, *TREES.values()], pydoc_target.config, **sizes)
    # more chunks cost programs; growing from one width into the next is tested on a tiny target (test_engine)
    few = dataclasses.replace(shapes, batch_sizes=(1, 8), widths=shapes.widths[-1:], chunks=(64,), max_rows=1024)
    return Runner(pydoc_target, pydoc_head, few, has_constrained=False, folder=kept)


def _engine(runner: Runner, target: Target, speculation: str, tokenizer: Tokenizer) -> Engine:
    runner.reset()
    options = EngineOptions(is_caching=speculation != "off")  # against plain decoding without a prefix cache
    tree = TREES.get(speculation)
    return Engine(runner, tokenizer, model_name="test", eos_ids=target.eos_ids, controller=Fixed(tree), options=options)


@pytest.fixture(scope="module")
def plain(
    runner: Runner, pydoc_target: Target, pydoc_tokenizer: Tokenizer, prompts: list[list[int]]
) -> list[CompletionOutput]:
    """Plain decoding of all prompts as one batch: what the target itself says, in a forward over each whole text."""
    with _engine(runner, pydoc_target, "off", pydoc_tokenizer) as engine:
        completions = engine.generate(prompts, PARAMS)
    assert all(len(completion.token_ids) == NUM_TOKENS for completion in completions)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    off = float(tiny.tolerance(pydoc_target, [*prompts[longest], *completions[longest].token_ids]).max())
    for prompt, params, completion in zip(prompts, PARAMS, completions, strict=True):
        ask = Ask(tuple(prompt), params)
        assert not (tie := find_tie(pydoc_target, pydoc_tokenizer, ask, completion.token_ids, off)), f"{ask}: {tie}"
    return completions


@pytest.fixture(scope="module", params=["chain:3", pytest.param("static:3x2x1", marks=pytest.mark.slow), "tree:3x3x8"])
def speculative_engine(
    request: pytest.FixtureRequest,
    runner: Runner,
    pydoc_target: Target,
    pydoc_tokenizer: Tokenizer,
    plain: list[CompletionOutput],  # their engine has left the runner
) -> Iterator[Engine]:
    with _engine(runner, pydoc_target, request.param, pydoc_tokenizer) as engine:
        yield engine


# a head that knows nothing speculates in test_options, too
@pytest.mark.parametrize("quality", ["trained", pytest.param("random", marks=pytest.mark.slow)])
def test_speculative_output_equals_plain_output(
    request: pytest.FixtureRequest,
    speculative_engine: Engine,
    pydoc_target: Target,
    pydoc_tokenizer: Tokenizer,
    prompts: list[list[int]],
    plain: list[CompletionOutput],
    quality: str,
) -> None:
    head: Head = request.getfixturevalue("pydoc_head" if quality == "trained" else "random_pydoc_head")
    speculative_engine.runner.inputs.layouts = make_layouts(pydoc_target, head)  # weights are traced: nothing compiles
    speculative_engine.flush_cache()  # of draft entries by another head
    together = list(range(len(prompts)))
    groups = [[i] for i in ALONE] if speculative_engine.rounds.choice.controller.tree == TREES[LONELY] else [together]
    tau = []
    for group in groups:
        completions = speculative_engine.generate([prompts[i] for i in group], [PARAMS[i] for i in group])
        for i, completion in zip(group, completions, strict=True):
            what = f"request {i} of {len(group)}"
            _check_equal(pydoc_target, pydoc_tokenizer, prompts[i], PARAMS[i], plain[i], completion, what)
            tau.append(completion.stats.tau)
    mean = np.mean(tau)
    assert mean > 1.3 if quality == "trained" else mean < 1.3, f"tau {mean}: was anything, or everything, accepted?"


def _check_equal(
    target: Target,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    params: SamplingParams,
    plain: CompletionOutput,
    other: CompletionOutput,
    what: str,
) -> None:
    check_equal(target, tokenizer, Ask(tuple(prompt), params), other.token_ids, plain.token_ids, what)
    assert other.text == plain.text
