"""The real engine behind a real socket, on a tiny target: a client that leaves holds nothing any more, and
one that stays loses nothing, whatever the operator changes meanwhile."""

import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import tiny
from engines import Ask, Fixed, Letters, Reference, greedy, hold_next, make_engine, serving, submit, wait_until
from fakes import FakeTemplate

from specserve.checkpoints.load import Target
from specserve.drafters.speculation import parse_speculation
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.interface import DraftInfo
from specserve.serve.engine.sequence import Sequence
from specserve.serve.engine.swap import LoadedHead, ServedWeights
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.programs.results import StepHandle
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import FinishReason, Request, SamplingParams
from specserve.serve.settings import ServeRun

TREE = parse_speculation("tree:3x3x8")


class ServedLetters(Letters):
    """As much of a tokenizer as the HTTP layer asks for."""

    has_chat_template = False
    template = FakeTemplate()

    def info(self) -> Mapping[str, Any]:
        return {}

    def token_id(self, token: str) -> int | None:
        return None


@contextmanager
def _over_http(engine: Engine) -> Iterator[httpx.Client]:
    engine._tokenizer = ServedLetters()  # type: ignore[assignment]
    server = HttpServer(create_app(engine, run=ServeRun(allow_load_draft=True)), port=0)
    with serving(engine):
        server.start()
        try:
            with httpx.Client(base_url=server.url, timeout=600) as http:
                yield http
        finally:
            server.stop()


def _asks(reference: Reference) -> Iterator[Ask]:
    """Of prompts that have nothing in common, so that no page is shared."""
    for seed in itertools.count():
        prompt = tuple(np.random.default_rng(seed).integers(3, 64, 30).tolist())
        own = SamplingParams(max_tokens=40, temperature=0.8, seed=seed, ignore_eos=True)
        yield from reference.firm([Ask(prompt, own if seed % 2 else greedy(40, ignore_eos=True))])


def _body(ask: Ask) -> dict[str, Any]:
    params = ask.params
    options = {"temperature": params.temperature, "seed": params.seed, "max_tokens": params.max_tokens}
    return {"prompt": list(ask.prompt), "ignore_eos": True, "stream": True, "return_token_ids": True} | options


def _held(engine: Engine) -> int:
    return engine.stats().num_pages_held


@pytest.mark.parametrize("num_rounds", range(7))
def test_who_is_cancelled_holds_no_page_after_the_next_step(
    runner: Runner, reference: Reference, num_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is: in the queue, in a chunk of its prompt, in a step that is on its way; and with a mate that stays,
    or alone."""
    leaver, stayer = itertools.islice(_asks(reference), 2)
    dispatch, dispatched = runner.step, list[object]()

    def step(*args: Any, **options: Any) -> StepHandle:
        dispatched.append(args)
        return dispatch(*args, **options)

    monkeypatch.setattr(runner, "step", step)
    for mates in ([], [stayer]):
        engine = make_engine(runner, Fixed(TREE))  # the thread does not run: rounds are made here
        inboxes = [submit(engine, ask)[1] for ask in mates]
        request, inbox = submit(engine, leaver)
        for _ in range(num_rounds):
            engine._round()
        assert not inbox.is_done
        assert _held(engine) > 0 or not num_rounds
        dispatched.clear()
        request.cancel()
        engine._round()
        assert len(dispatched) <= len(mates)
        assert inbox.is_done
        assert inbox.wait().finish_reason == FinishReason.CANCELLED
        assert _held(engine) == sum(len(sequence.pages) for sequence in engine.rounds.running)
        assert [sequence.request.prompt_ids for sequence in engine.rounds.running] == [ask.prompt for ask in mates]
        while engine._round():
            pass
        assert _held(engine) == 0
        for ask, stayed in zip(mates, inboxes, strict=True):
            reference.check(ask, stayed)


def test_a_disconnect_frees_pages_within_a_step(
    runner: Runner, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are counted from `cancel` to the end of the sequence. The other stream gets every token."""
    leaver, stayer = itertools.islice(_asks(reference), 2)
    engine = make_engine(runner, Fixed(TREE))
    cancelled: dict[tuple[int, ...], int] = {}
    freed: dict[tuple[int, ...], int] = {}
    cancel, finish, make_round = Request.cancel, engine.rounds.scheduler.finish, engine._round

    def note_cancel(request: Request) -> None:
        cancel(request)  # before steps are counted: the engine goes on meanwhile
        cancelled.setdefault(request.prompt_ids, engine.stats().num_steps)

    def note_end(sequence: Sequence) -> None:
        finish(sequence)
        assert not sequence.pages
        assert sequence.request.is_cancelled == (sequence.request.prompt_ids == leaver.prompt)
        freed[sequence.request.prompt_ids] = engine.stats().num_steps

    def make_slow_round() -> bool:
        time.sleep(0.02)  # so that nobody has ended before the server hears of the disconnect
        return make_round()

    monkeypatch.setattr(engine, "_round", make_slow_round)
    monkeypatch.setattr(Request, "cancel", note_cancel)
    monkeypatch.setattr(engine.rounds.scheduler, "finish", note_end)
    with _over_http(engine) as http, ThreadPoolExecutor(1) as pool:
        stays = pool.submit(_stream, http, stayer)
        with http.stream("POST", "/v1/completions", json=_body(leaver)) as reply:
            next(reply.iter_lines())
        wait_until(lambda: leaver.prompt in cancelled and leaver.prompt in freed)
        assert freed[leaver.prompt] - cancelled[leaver.prompt] <= 1
        assert stays.result() == _expected(reference, stayer)


def _stream(http: httpx.Client, ask: Ask, has_begun: threading.Event | None = None) -> tuple[list[int], str, str]:
    """The tokens, the text and the finish_reason that a stream gives."""
    token_ids, text, reason, last = [], "", "", ""
    with http.stream("POST", "/v1/completions", json=_body(ask)) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            last = line or last
            if line.startswith("data: {"):
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                token_ids += choice["token_ids"]
                text += choice["text"]
                reason = choice["finish_reason"] or reason
                if has_begun is not None:
                    has_begun.set()
    assert last == "data: [DONE]"
    return token_ids, text, reason


def _expected(reference: Reference, ask: Ask) -> tuple[list[int], str, str]:
    plain = reference.answer(ask)
    return plain.token_ids, plain.text, str(plain.wait().finish_reason)


def test_streams_go_on_while_a_head_is_replaced(
    runner: Runner, reference: Reference, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, with more streams than slots: those that run are sent back to the queue, and none gets less."""
    heads = [tiny.random_head(tiny_target.config, seed=seed) for seed in (77, 78)]
    asks = list(itertools.islice(_asks(reference), 7))
    engine = make_engine(runner, Fixed(TREE))
    engine._swaps.weights = ServedWeights(
        load_head=lambda name: LoadedHead(heads[int(name)], (0.5,), DraftInfo(name, 2.0))
    )
    with _over_http(engine) as http, ThreadPoolExecutor(len(asks)) as pool:
        for name in ("0", "1"):
            begun = threading.Event()
            hold_next(engine, monkeypatch)
            streams = [pool.submit(_stream, http, ask, begun) for ask in asks]
            assert begun.wait(600)
            num_preemptions = engine.stats().num_preemptions
            reply = http.post("/v1/load_draft", json={"draft": name})
            assert reply.json() == {"status": "ok", "draft": {"id": name, "tau": 2.0}}
            assert engine.stats().num_preemptions > num_preemptions, "nothing ran"
            for ask, stream in zip(asks, streams, strict=True):
                assert stream.result() == _expected(reference, ask)
        assert engine.stats().num_rebuilds == 0
