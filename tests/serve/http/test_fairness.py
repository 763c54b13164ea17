"""No client takes what is others': the queue is shared out, and no body holds the loop that sends every stream."""

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from engines import Ask, Inbox, check_idle, greedy, make_engine, wait_until
from fakes import CONTEXT, FakeEngine, assert_refused, assert_serves
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from specserve.errors import CapacityError, RequestError
from specserve.serve.engine import engine as engine_module
from specserve.serve.engine.admission import Queue
from specserve.serve.http import service
from specserve.serve.http.app import create_app
from specserve.serve.http.openai import fields as bodies
from specserve.serve.http.openai import replies, streaming
from specserve.serve.http.transport import json_codec, threads
from specserve.serve.http.transport.json_codec import MAX_AT_ONCE, MAX_CONTAINERS, MAX_VALUES, read_json
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import GrammarSpec
from specserve.serve.settings import ServeRun

CLIENTS = st.sampled_from("abcde")


EVENTS = st.sampled_from(["ask", "ask", "ask", "run", "end"])


@given(st.integers(1, 12), st.lists(st.tuples(CLIENTS, EVENTS), max_size=80))
def test_the_queue_is_shared_out_among_those_who_wait(max_queue: int, events: list[tuple[str, str]]) -> None:
    """A client is refused only if it has its share. So one that comes is let in by however full a queue, and one that
    waits alone may fill it."""
    queue, waiting, running = Queue(max_queue), Counter[str](), Counter[str]()
    for client, event in events:
        if event == "ask":
            num_clients = len(+waiting | {client: 1})
            share = max(1, max_queue // num_clients)
            if waiting[client] >= share:
                with pytest.raises(CapacityError, match=f"^{waiting[client]} requests are waiting"):
                    queue.take(client, running.elements())
            else:
                queue.take(client, running.elements())
                waiting[client] += 1
        elif event == "run" and waiting[client]:
            waiting[client] -= 1
            running[client] += 1
        elif event == "end" and running[client]:
            running[client] -= 1
            queue.give_back(client)
        assert queue.num_open == waiting.total() + running.total()


def test_the_engine_tells_clients_apart(runner: Runner) -> None:
    engine = make_engine(runner, max_queue=4)  # it has not begun, so that all wait
    ask, inboxes = Ask((3, 4), greedy(2)), [Inbox() for _ in range(6)]
    for inbox in inboxes[:4]:
        engine.submit(ask.prompt, ask.params, inbox, client="greedy")
    with pytest.raises(CapacityError, match="4 requests are waiting already;"):
        engine.submit(ask.prompt, ask.params, Inbox(), client="greedy")
    for inbox in inboxes[4:]:
        engine.submit(ask.prompt, ask.params, inbox, client="late")
    with pytest.raises(CapacityError, match="share"):
        engine.submit(ask.prompt, ask.params, Inbox(), client="late")
    with engine:
        for inbox in inboxes:
            inbox.wait()
        check_idle(engine)


def test_clients_are_distinguished_by_key_else_by_address(http: httpx.Client, fake_engine: FakeEngine) -> None:
    assert_serves(http)
    assert fake_engine.requests[-1].client == "127.0.0.1"
    server = HttpServer(create_app(fake_engine, api_keys=["a", "b"], run=ServeRun(allow_priority=True)), port=0)
    server.start()
    for key in ("a", "b", "a"):
        headers = {"Authorization": f"Bearer {key}"}
        body = {"prompt": "x", "priority": -3}
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
    server.stop()
    first, second, third = fake_engine.requests[-3:]
    assert first.client == third.client != second.client
    assert first.priority == -3


def test_an_engine_that_stops_compiles_no_grammar(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(runner)
    monkeypatch.setattr(engine.inputs.grammars, "compile", lambda _spec: pytest.fail("it was compiled"))
    engine.drain(0.0)
    with pytest.raises(CapacityError, match="the engine is stopping"):
        engine.submit([3, 4], greedy(2, grammar=GrammarSpec("regex", "a")), Inbox())


def test_priority_is_the_operators_to_allow(fake_engine: FakeEngine) -> None:
    server = HttpServer(create_app(fake_engine), port=0)
    server.start()
    for priority in (-1, 1, -(2**63)):
        reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "priority": priority})
        assert assert_refused(reply)["param"] == "priority"
    for priority in (0, None):
        body = {"prompt": "x", "priority": priority}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    server.stop()


def test_words_are_tokenized_once_for_all_choices(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(runner)
    seen: list[str] = []
    encode = engine.tokenizer.encode
    monkeypatch.setattr(
        type(engine.tokenizer), "encode", lambda _self, text, **kw: seen.append(text) or encode(text, **kw)
    )
    for own in greedy(2, bad_words=["ab", "c"], n=5).choices():
        engine.submit([3, 4], own, Inbox())
    assert len(seen) == 4, "each as it is, and with a space before it"
    engine.stop()


# --- the event loop ------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def _read(reader: Any, raw: bytes) -> Any:
    try:
        return repr(reader(raw))
    except (ValueError, RecursionError):
        return "refused"


def _patient(raw: bytes) -> Any:
    return read_json(raw, bodies._refuse_duplicates)


def _strict(raw: bytes) -> Any:
    json.loads(raw, object_pairs_hook=bodies._refuse_duplicates)
    return from_json(raw, allow_inf_nan=False)


@given(JSON, st.integers(0, 60), st.binary(max_size=2))
def test_both_readers_read_the_same(value: Any, at: int, noise: bytes) -> None:
    raw = json.dumps(value).encode()
    for text in (raw, raw[:at] + noise + raw[at:], raw[:at]):
        assert _read(_patient, text) == _read(_strict, text)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": 1, "a": 2}',
        b'["\\ud800"]',
        b"[NaN]",
        b"[-Infinity]",
        b"\xef\xbb\xbf[]",
        b'["\xff"]',
        b"[1] 2",
        b"[" * 5000,
        *(b'"\x00"', b"", b"[1,]", b"[01]", b"9" * 5000, b'{"a": {"b": 1, "b": 1}}'),
    ],
)
def test_what_no_strict_reader_takes(raw: bytes) -> None:
    assert _read(_patient, raw) == _read(_strict, raw) == "refused"


def _hostile() -> Iterator[Any]:
    """Each takes a while to read, to tokenize or to submit."""
    yield {"prompt": [1] * 40_000}
    yield {"prompt": [[1]] * 40_000}
    yield {"prompt": [[1] * (CONTEXT // 2)] * 20}
    yield {"prompt": "a, " * 40_000}
    yield {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(40_000)), 1)}
    yield {"prompt": "x", "n": 16, "max_tokens": 1, "stop": ["s" * 1024] * 64, "bad_words": ["w" * 1024] * 64}


def test_no_body_holds_the_event_loop(
    http: httpx.Client, server: HttpServer, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's thread neither reads bodies, nor tokenizes, nor submits, nor spells replies: it counts no such call in
    a storm. What is left to it is measured in test_event_loop."""
    callers: set[str] = set()

    def watch(owner: Any, name: str) -> None:
        call = getattr(owner, name)
        watched = lambda *args, **kw: (callers.add(threading.current_thread().name), call(*args, **kw))[1]  # noqa: E731
        monkeypatch.setattr(owner, name, watched)

    for owner, name in [
        *[(service, "parse_body"), (service, "write_json"), (replies, "write_json"), (json_codec, "write_json")],
        *[(fake_engine.tokenizer, "encode"), (fake_engine, "submit")],
    ]:
        watch(owner, name)
    raw = [json.dumps(body).encode() for body in _hostile()]
    send = {"headers": {"content-type": "application/json"}, "timeout": 100}
    with ThreadPoolExecutor(6) as pool:
        storm = [pool.submit(httpx.post, f"{server.url}/v1/completions", content=each, **send) for each in raw * 2]
        assert {each.result().status_code for each in storm} == {200, 400}
    streamed = {"prompt": "x", "stream": True, "logprobs": 1, "echo": True}
    for path, body in (("/v1/completions", streamed), ("/tokenize", {"prompt": "x"}), ("/v1/speculation", {})):
        assert httpx.post(server.url + path, json=body).status_code == (403 if "spec" in path else 200)
    assert callers
    assert all(re.fullmatch(r"specserve-http(-large)?_\d+", name) for name in callers), callers
    assert_serves(http)


def test_slow_grammars_keep_other_grammars_waiting_alone(
    http: httpx.Client, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_compiled, submit = threading.Event(), fake_engine.submit

    def compile_and_submit(prompt_ids: Any, params: Any, *args: Any, **options: Any) -> Any:
        assert params.grammar is None or is_compiled.wait(60)
        return submit(prompt_ids, params, *args, **options)

    monkeypatch.setattr(fake_engine, "submit", compile_and_submit)
    with ThreadPoolExecutor(8) as pool:
        body = {"prompt": "x", "guided_regex": "a"}
        slow = [pool.submit(http.post, "/v1/completions", json=body, timeout=60) for _ in range(8)]
        try:
            for _ in range(20):
                assert_serves(http)
            assert not any(each.done() for each in slow)
        finally:
            is_compiled.set()
        assert [each.result().status_code for each in slow] == [200] * 8


@dataclass
class _Grammars:
    """A server with one thread for grammars, which compiles one called "slow" until it `is_over`."""

    url: str
    is_over: threading.Event
    compiled: list[str]  # the others, in their order

    def ask(self, text: str, key: str = "a") -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"prompt": "x", "guided_regex": text}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60)


@pytest.fixture
def busy(fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Grammars]:
    """It is at the slow one."""
    has_begun, submit = threading.Event(), fake_engine.submit

    def compile_and_submit(prompt_ids: Any, params: Any, *args: Any, **options: Any) -> Any:
        if params.grammar and params.grammar.text == "slow":
            has_begun.set()
            assert found.is_over.wait(60)
        elif params.grammar:
            found.compiled.append(params.grammar.text)
        return submit(prompt_ids, params, *args, **options)

    monkeypatch.setattr(fake_engine, "submit", compile_and_submit)
    monkeypatch.setattr(threads, "MAX_GRAMMARS", 4)
    monkeypatch.setattr(threads, "_grammars", threads._GrammarQueue(1))
    server = HttpServer(create_app(fake_engine, api_keys=["a", "b"]), port=0)
    server.start()
    found = _Grammars(server.url, threading.Event(), [])
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(found.ask, "slow")
        try:
            assert has_begun.wait(60)
            yield found
        finally:
            found.is_over.set()
            assert slow.result().status_code == 200
            server.stop()


def _wait_in_line(pool: ThreadPoolExecutor, busy: _Grammars, *asked: tuple[str, str]) -> list[Future[httpx.Response]]:
    """Ask for these grammars, one after another, each once the one before waits."""
    waiting = []
    for text, key in asked:
        num_before = threads._grammars._places.num_open
        waiting.append(pool.submit(busy.ask, text, key))
        wait_until(lambda num_before=num_before: threads._grammars._places.num_open > num_before)
    return waiting


def _assert_full(reply: httpx.Response, message: str) -> None:
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert message in reply.json()["error"]["message"]


def test_a_known_grammar_waits_for_no_other(busy: _Grammars, fake_engine: FakeEngine) -> None:
    fake_engine.known_grammars = {GrammarSpec("regex", "known")}
    assert busy.ask("known").status_code == 200
    assert not busy.is_over.is_set()


def test_clients_take_turns_with_their_grammars(busy: _Grammars) -> None:
    """One that has its share of the line is refused, others are not; and the last to come does not wait for all."""
    with ThreadPoolExecutor(4) as pool:
        waiting = _wait_in_line(pool, busy, ("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"))
        refused = busy.ask("a4")
        busy.is_over.set()
        _assert_full(refused, "4 requests are waiting already")
        assert [each.result().status_code for each in waiting] == [200] * 4
    assert busy.compiled == ["a1", "b1", "a2", "a3"]


def test_a_grammar_whose_turn_comes_too_late_is_not_compiled(busy: _Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "GRAMMAR_SECONDS", 0.0)
    with ThreadPoolExecutor(1) as pool:
        [waiting] = _wait_in_line(pool, busy, ("late", "a"))
        busy.is_over.set()
        _assert_full(waiting.result(), "this one not yet; try again later")
    assert busy.compiled == []


def test_grammars_of_clients_that_have_left_are_not_compiled(
    busy: _Grammars, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything submitted for one that leaves in the middle of its submission."""
    num_gone, cancel, num_before = Counter[str](), streaming.Generation.cancel, len(fake_engine.requests)
    monkeypatch.setattr(streaming.Generation, "cancel", lambda self: (cancel(self), num_gone.update(["x"]))[0])
    with ThreadPoolExecutor(2) as pool, httpx.Client() as leaving:
        for i in range(2):
            with pytest.raises(httpx.ReadTimeout):
                leaving.post(
                    f"{busy.url}/v1/completions",
                    json={"prompt": "x", "guided_regex": f"gone {i}", "n": 3},
                    headers={"Authorization": "Bearer a"},
                    timeout=0.2,
                )
        wait_until(lambda: num_gone.total() == 2)
        waiting = _wait_in_line(pool, busy, ("stays", "b"))
        busy.is_over.set()
        assert waiting[0].result().status_code == 200
    assert busy.compiled == ["stays"]
    assert len(fake_engine.requests) == num_before + 2


def test_bodies_of_many_values_are_read_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader in C sees no more than it may, as it lets nobody else run."""
    sizes: list[int] = []
    monkeypatch.setattr(bodies, "from_json", lambda raw, **kw: sizes.append(raw.count(b",")) or from_json(raw, **kw))
    for num_values in (3, MAX_AT_ONCE, MAX_AT_ONCE + 2, 3 * MAX_AT_ONCE):
        found = bodies._parse_object(b'{"a": [' + b"1," * num_values + b"1]}")
        assert len(found["a"]) == num_values + 1
    assert sizes == [3, MAX_AT_ONCE]
    too_many = {"values": b"[" + b"1," * (MAX_VALUES + 1), "lists and objects": b"[" + b"[]" * MAX_CONTAINERS}
    for what, raw in too_many.items():
        with pytest.raises(RequestError, match=f"it has more than .* {what}"):
            bodies._parse_object(raw)


@pytest.mark.parametrize("seconds", [1000.0, 0.001])
def test_an_engine_gives_memory_back(runner: Runner, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A while after its last work, and now and then while it rests; while it works once in so many seconds."""
    monkeypatch.setattr(engine_module, "TRIM_SECONDS", seconds)
    open_at: list[int] = []
    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.001)
    with make_engine(runner) as engine:
        wait_until(lambda: not engine.stats().num_running)

        def trim() -> None:
            if threading.current_thread() is engine._thread:  # engines of other tests rest at the same time
                open_at.append(engine.stats().num_running)

        monkeypatch.setattr(engine_module.host, "give_back_freed_memory", trim)
        wait_until(lambda: len(open_at) > 2)
        engine.generate([[3, 4]] * 9, greedy(20))
        after = len(open_at)
        wait_until(lambda: len(open_at) > after)
    assert (set(open_at) == {0}) == (seconds > 1)
