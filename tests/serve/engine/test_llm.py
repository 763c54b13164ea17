"""Offline batches: the same answers as ever, in order, and nothing runs before everything asked is sound."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import tiny

from specserve import LLM, SamplingParams, config
from specserve.checkpoints.load import Target
from specserve.errors import CapacityError, ConfigError, RequestError
from specserve.serve.settings import ENGINE, PROGRAM, EngineSettings, ServeRun

PROMPTS = [[5, 9, 33, 7, 7, 60, 12], [1], [40, 41, 42, 43] * 5]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The target of `tiny_target`, from a folder without a tokenizer."""
    folder = tmp_path_factory.mktemp("untold")
    tiny.write_target(folder, tiny.TARGET, seed=0)
    settings = {"max_slots": 2, "max_model_len": 128, "page_size": 16}
    with LLM(folder, speculation="ngram:2", tokenizer=None, progress=False, **settings) as llm:  # type: ignore[arg-type]
        yield llm
    llm.close()
    with pytest.raises(CapacityError, match="closed"):
        llm.generate([1])


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def test_answers_are_those_of_the_target_in_order(llm: LLM, tiny_target: Target) -> None:
    found = llm.generate([*PROMPTS, {"prompt_token_ids": PROMPTS[0]}], [_greedy(n) for n in (8, 20, 1, 8)])
    for prompt, length, request in zip([*PROMPTS, PROMPTS[0]], (8, 20, 1, 8), found, strict=True):
        (answer,) = request.outputs
        whole = [*prompt, *answer.token_ids]
        assert answer.token_ids == tuple(tiny.target_logits(tiny_target, whole).argmax(-1)[len(prompt) - 1 : -1])
        assert (len(answer.token_ids), answer.finish_reason, answer.text) == (length, "length", "")
        assert (request.prompt, request.prompt_token_ids) == (None, tuple(prompt))
        assert 0 < answer.stats.seconds_to_first_token <= answer.stats.seconds
    assert llm.generate(PROMPTS[0], _greedy(8))[0].outputs[0].token_ids == found[0].outputs[0].token_ids
    assert llm.generate(np.array(PROMPTS[0]), _greedy(8))[0].outputs[0].token_ids == found[0].outputs[0].token_ids  # type: ignore[arg-type]
    assert llm.generate([]) == []


def test_choices_are_drawn_with_seeds_in_a_row(llm: LLM) -> None:
    many = llm.generate(
        PROMPTS[:2], SamplingParams(n=3, seed=7, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    )
    assert [[answer.index for answer in request.outputs] for request in many] == [[0, 1, 2]] * 2
    for prompt, request in zip(PROMPTS[:2], many, strict=True):
        assert [token.token_id for token in request.prompt_logprobs or ()] == list(prompt)
        for i, answer in enumerate(request.outputs):
            (alone,) = llm.generate(prompt, SamplingParams(seed=7 + i, max_tokens=6, ignore_eos=True))
            assert answer.token_ids == alone.outputs[0].token_ids
            assert answer.logprobs is not None
            assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
            assert alone.outputs[0].logprobs is None
            assert alone.prompt_logprobs is None


def test_it_rests_and_forgets_as_its_engine_does(llm: LLM) -> None:
    """Under vLLM's names and the engine's; answers are the same afterwards."""
    expected = [request.outputs[0].token_ids for request in llm.generate(PROMPTS, _greedy(8))]
    rests: list[tuple[Callable[[], None], Callable[[], None], bool]] = [
        (llm.pause, llm.resume, False),
        (lambda: llm.pause("keep"), llm.resume, False),
        (llm.sleep, llm.wake, True),
        (lambda: llm.sleep(2), llm.wake_up, True),
        (lambda: llm.sleep(level=1, mode="abort"), lambda: llm.wake_up(tags=["weights", "kv_cache"]), True),
        (lambda: llm.sleep(parts=["kv_cache"]), lambda: llm.wake(["kv_cache"]), True),
    ]
    for rest, go_on, is_asleep in rests:
        rest()
        assert (llm.engine.is_paused, llm.engine.is_sleeping) == (True, is_asleep)
        go_on()
        assert (llm.engine.is_paused, llm.engine.is_sleeping) == (False, False)
        assert [request.outputs[0].token_ids for request in llm.generate(PROMPTS, _greedy(8))] == expected
    for num_cached in (16, 0):
        if not num_cached:
            llm.reset_prefix_cache()
        (again,) = llm.generate(PROMPTS[2], _greedy(8))
        assert (again.outputs[0].stats.num_cached_tokens, again.outputs[0].token_ids) == (num_cached, expected[2])
    for wrong, message in ((lambda: llm.sleep(0), "level 0: expected 1 or 2"), (lambda: llm.wake_up([]), "some of")):
        with pytest.raises(ConfigError, match=message):
            wrong()


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[1, 2], "text"], None, "prompt 1 of 2: this engine has no tokenizer: send token ids"),
        ([[1, 2], [64]], None, "prompt 1 of 2: the prompt holds token id 64"),
        ([[1, 2], []], None, "prompt 1 of 2: the prompt is empty"),
        ([[1, 2], [3, "4"]], None, "prompt 1 of 2: a prompt is a text or a list of token ids"),
        ([[1, 2], [True]], None, "a list of token ids"),
        ([[1, 2], {"ids": [3]}], None, "expected .*prompt_token_ids.* got .*ids"),
        ([[1, 2], [3]], [SamplingParams()], "1 sampling params for 2 prompts"),
        ([[1, 2]], SamplingParams(stop="x"), "stop strings need a tokenizer"),
        ([[1, 2]], SamplingParams(max_tokens=500), "Lower max_tokens to 126"),
        (3, None, "expected a prompt or a list of prompts, got int"),
    ],
)
def test_nothing_runs_before_everything_is_sound(llm: LLM, prompts: object, params: object, message: str) -> None:
    num_steps = llm.engine.stats().num_prefix_queries
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)  # type: ignore[arg-type]
    assert llm.engine.stats().num_prefix_queries == num_steps


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
def test_an_interrupt_cancels_and_the_next_call_works(llm: LLM) -> None:
    # in the background of a shell, processes are born deaf to it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    expected = llm.generate(PROMPTS[0], _greedy(8))

    def interrupt() -> None:
        while llm.engine.stats().num_waiting < 100:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    gc.disable()  # an interrupt is lost in what libraries have called at each collection
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPTS[0]] * 200, _greedy(100))
    finally:
        gc.enable()
    thread.join()
    again = llm.generate(PROMPTS[0], _greedy(8))
    assert again[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert llm.engine.stats().num_running + llm.engine.stats().num_waiting == 0


def test_an_interrupt_cancels_also_while_the_requests_are_submitted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It falls where the thread that submits them has just begun, and nobody knows that thread yet."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        monkeypatch.undo()
        start(thread)
        raise KeyboardInterrupt

    before = llm.engine.stats().num_prefix_queries
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPTS[2]] * 200, _greedy(100))
    llm.generate(PROMPTS[0], _greedy(8))
    assert llm.engine.stats().num_running + llm.engine.stats().num_waiting == 0
    assert llm.engine.stats().num_prefix_queries - before < 100 * len(PROMPTS[2]), "most of them never ran"


@pytest.mark.slow
def test_the_bundled_pair_chats_and_speculation_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    chats = [[{"role": "user", "content": f"What does `{name}` do?"}] for name in ("json.dumps", "os.path.join")]
    with LLM(speculation="chain:3", max_slots=2, max_model_len=256) as llm:
        fast = llm.chat(chats, SamplingParams(max_tokens=32, seed=3))
        plain = llm.chat(chats, SamplingParams(max_tokens=32, seed=3, speculation=0))
        (cut,) = llm.generate("def add(a, b):", SamplingParams(temperature=0, max_tokens=24, stop=["\n\n", "b"]))
        assert llm.chat(chats[0], SamplingParams(temperature=0, max_tokens=2))[0].prompt == fast[0].prompt
    for one, other in zip(fast, plain, strict=True):
        assert one.outputs[0].text == other.outputs[0].text != ""
        assert other.outputs[0].stats.tau == 1 < one.outputs[0].stats.tau
        assert len(one.outputs[0].stats.accept_rate) == 3
        assert other.outputs[0].stats.num_cached_tokens <= len(one.prompt_token_ids)
    assert "json.dumps" in (fast[0].prompt or "")
    assert "b" not in cut.outputs[0].text
    assert cut.prompt == "def add(a, b):"
    assert llm.engine.stats().num_late_compiles == 0
    assert capsys.readouterr().out == ""  # bars go to stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_slot": 2}, "there is no setting max_slot; did you mean max_slots"),
        ({"max_slots": -1}, "argument: max_slots must be an integer >= 0, got -1"),
        ({"page_size": "32k"}, "page_size must be an integer"),
        ({"port": 80}, "port: a setting of the HTTP server"),
        ({"speculation": "chain:0"}, "chain:0"),
        ({"target": "nowhere"}, "no folder here"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(progress=False, **settings)  # type: ignore[arg-type]


def test_a_type_checker_knows_the_settings() -> None:
    """By the schema's own types."""
    own = {leaf.name: leaf.field.annotation for leaf in config.leaves(ServeRun) if leaf.scope in (PROGRAM, ENGINE)}
    assert get_type_hints(EngineSettings) | {"speculation": str} == own


def test_importing_the_package_is_light(tmp_path: Path) -> None:
    code = "import sys, specserve; dir(specserve); print([m for m in ('jax', 'numpy', 'rich') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert out.stdout.strip() == "[]"
