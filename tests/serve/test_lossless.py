"""Law 1: speculation never changes a token. Chain, static and dynamic trees, alone and in mixed batches, greedy and
sampled, with a good head and with a useless one, through the engine, on the bundled target."""

import json.decoder
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specserve.checkpoints.head import Head
from specserve.checkpoints.load import Target
from specserve.serve.completion import Completion
from specserve.serve.engine import Engine
from specserve.serve.request import SamplingParams
from specserve.serve.runner import Runner, make_weights, sampler_row
from specserve.speculative import sampling
from specserve.speculative.tree import parse_speculation
from specserve.tokenizer import Tokenizer

NUM_TOKENS = 200
TIE = 1e-4
ALONE = (0, 3)  # a greedy and a sampled request
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


def _sampled(seed: int, **options: float) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True, **options)  # type: ignore[arg-type]


PARAMS = [  # one for each prompt; greedy and sampled rows share every step
    GREEDY,
    _sampled(1),
    GREEDY,
    _sampled(2**40 + 2, top_p=0.9),
    _sampled(-3, top_k=20),
    _sampled(4, temperature=0.7, min_p=0.05),
    GREEDY,
    _sampled(5, top_p=0.8, top_k=50, min_p=0.02),
]


@pytest.fixture(scope="module")
def prompts(pydoc_tokenizer: Tokenizer) -> list[list[int]]:
    """Lengths from 1 to 257: around the ends of pages (16) and of prefill chunks (64, 256)."""
    code = pydoc_tokenizer.encode(Path(json.decoder.__file__).read_text())
    questions = ["What does `os.path.join` do?", "Write the function `json.dumps`.", "Explain `jax.vmap`."]
    chats = [pydoc_tokenizer.render_chat([{"role": "user", "content": question}]) for question in questions]
    one, page, chunk, over, two = (code[100 * i : 100 * i + n] for i, n in enumerate((1, 16, 64, 65, 257)))
    return [chats[0], chats[1], two, one, chunk, chats[2], over, page]


def _engine(target: Target, head: Head | None, speculation: str, tokenizer: Tokenizer) -> Engine:
    runner = Runner(
        target,
        head,
        parse_speculation(speculation),
        num_slots=8,
        max_model_len=512,
        page_size=16,
        num_pages=8 * 32,
    )
    # each of these costs programs; growing from one width into the next is tested on a tiny target (test_engine)
    runner.batch_sizes, runner.widths = (1, 8), runner.widths[-1:]
    return Engine(runner, tokenizer, model_name="test", eos_ids=target.eos_ids)


@pytest.fixture(scope="module")
def plain(pydoc_target: Target, pydoc_tokenizer: Tokenizer, prompts: list[list[int]]) -> list[Completion]:
    """Plain decoding of all prompts as one batch."""
    with _engine(pydoc_target, None, "off", pydoc_tokenizer) as engine:
        together = engine.generate(prompts, PARAMS)
        alone = [engine.generate([prompts[i]], [PARAMS[i]])[0] for i in ALONE]
    for i, completion in zip(ALONE, alone, strict=True):
        _check_equal(pydoc_target, prompts[i], PARAMS[i], together[i], completion, "plain alone")
    assert all(len(completion.token_ids) == NUM_TOKENS for completion in together)
    return together


@pytest.fixture(scope="module", params=["chain:3", "static:3x2x1", "tree:3x3x8"])
def speculative_engine(
    request: pytest.FixtureRequest, pydoc_target: Target, pydoc_head: Head, pydoc_tokenizer: Tokenizer
) -> Iterator[Engine]:
    with _engine(pydoc_target, pydoc_head, request.param, pydoc_tokenizer) as engine:
        yield engine


@pytest.mark.parametrize("quality", ["trained", "random"])
def test_speculative_output_equals_plain_output(
    request: pytest.FixtureRequest,
    speculative_engine: Engine,
    pydoc_target: Target,
    prompts: list[list[int]],
    plain: list[Completion],
    quality: str,
) -> None:
    head: Head = request.getfixturevalue("pydoc_head" if quality == "trained" else "random_pydoc_head")
    speculative_engine.runner.weights = make_weights(pydoc_target, head)  # weights are traced: nothing compiles
    together, alone = range(len(prompts)), ALONE
    if quality == "random":  # 200 steps with hardly a token accepted take their time
        is_chain = speculative_engine.runner.tree == parse_speculation("chain:3")
        together, alone = (together, ()) if is_chain else ((), alone)
    tau = []
    for what, requests in (("in a batch of 8", [together]), ("alone", [[i] for i in alone])):
        for group in requests:
            completions = speculative_engine.generate([prompts[i] for i in group], [PARAMS[i] for i in group])
            for i, completion in zip(group, completions, strict=True):
                _check_equal(pydoc_target, prompts[i], PARAMS[i], plain[i], completion, f"request {i} {what}")
                tau.append(completion.stats.tau)
    mean = np.mean(tau)
    assert mean > 1.3 if quality == "trained" else mean < 1.3, f"tau {mean}: was anything, or everything, accepted?"


def _check_equal(
    target: Target, prompt: Sequence[int], params: SamplingParams, plain: Completion, other: Completion, what: str
) -> None:
    """Token for token, but for a proven tie: another order of float32 sums may flip one."""
    pairs = enumerate(zip(plain.token_ids, other.token_ids, strict=True))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is None:
        assert other.text == plain.text
        return
    token_ids = [*prompt, *plain.token_ids[:at]]
    logits = jnp.asarray(tiny.target_logits(target, token_ids)[-1])[None, None]
    row = sampler_row(params, params.seed or 0)
    noise = sampling.noise(
        row, jnp.asarray([[len(token_ids)]], jnp.int32), jnp.arange(logits.shape[-1], dtype=jnp.uint32)
    )
    scores = np.asarray(sampling.truncate(row, sampling.scale(row, logits)) + noise)[0, 0]
    a, b = plain.token_ids[at], other.token_ids[at]
    gap = float(scores.max() - min(scores[a], scores[b]))
    message = (
        f"{what}: token {at} is {b}, plain decoding drew {a}; their logits are {logits[0, 0, b]} and "
        f"{logits[0, 0, a]}, their scores {scores[b]} and {scores[a]}, the best is {scores.max()}: a gap of {gap:.2e}"
    )
    print(message)
    assert gap < TIE, message
