"""Weights that change over HTTP, under the names that RL code calls: SGLang's and vLLM's."""

import contextlib
import dataclasses
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from described import check_reply
from engines import Fixed, Letters, hold_next, make_engine, serving, wait_until
from fakes import FakeEngine, FakeTemplate, assert_needs_a_key, assert_refused

from specserve.checkpoints.load import Target, to_numpy
from specserve.checkpoints.tensors import write_tensors
from specserve.drafters.interface import Head
from specserve.drafters.speculation import parse_speculation
from specserve.errors import ConfigError
from specserve.interop.head import save_head
from specserve.models.target import target_spec
from specserve.serve import launch
from specserve.serve.engine.engine import Engine
from specserve.serve.engine.interface import DraftInfo
from specserve.serve.engine.swap import HeadForm, ServedWeights
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.launch import Models
from specserve.serve.programs.runner import Runner
from specserve.serve.settings import ServeRun

PROMPTS = [tuple(int(i) for i in np.random.default_rng(seed).integers(3, 64, 30)) for seed in range(4)]
ROUTES = (
    "update_weights_from_disk", "abort_request", "pause_generation", "continue_generation", "release_memory_occupation",
    "resume_memory_occupation", "pause", "resume", "sleep", "wake_up", "collective_rpc", "reset_prefix_cache",
)  # fmt: skip


class ServedLetters(Letters):
    """A tokenizer of whole chats too, whose template is the text of the last message."""

    has_chat_template, template = True, FakeTemplate()  # type: ignore[assignment]

    def token_id(self, _token: str) -> None:
        return None

    def render_chat(self, messages: Any, **_options: Any) -> list[int]:
        return self.encode("".join(each for each in messages[-1]["content"] if each in self.alphabet))


VLLMS = {"/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache"}  # their options are in the query


@pytest.fixture(scope="module")
def moved(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of another version."""

    def move(leaf: jax.Array) -> jax.Array:
        return jnp.asarray(np.random.default_rng(leaf.size).permutation(np.asarray(leaf).ravel()).reshape(leaf.shape))

    folder = tmp_path_factory.mktemp("moved")
    for each in tiny_target.folder.glob("*.json"):
        (folder / each.name).write_bytes(each.read_bytes())
    arrays = to_numpy(jax.tree.map(move, tiny_target.params), target_spec(tiny_target.config), "float32")
    write_tensors(folder / "model.safetensors", arrays)
    return folder


@pytest.fixture
def engine(runner: Runner, tiny_target: Target, tiny_head: Head) -> Engine:
    """An engine whose weights may change."""
    engine = make_engine(runner, Fixed(parse_speculation("chain:3")))
    engine._tokenizer = ServedLetters()
    engine._swaps._form = HeadForm(dataclasses.replace(tiny_head, params=None), "none")
    read = launch._weights_reader(Models("tiny", tiny_target, tiny_head, None))
    engine._swaps.weights = ServedWeights(folder=str(tiny_target.folder), read=read)
    return engine


@pytest.fixture
def rl(engine: Engine) -> Iterator[httpx.Client]:
    """A client of its server."""
    server = HttpServer(create_app(engine, run=ServeRun(allow_update_weights=True)), port=0)
    with serving(engine):
        server.start()
        try:
            with httpx.Client(base_url=server.url, timeout=600) as http:
                yield http
        finally:
            server.stop()


def _answer(http: httpx.Client, prompt: tuple[int, ...]) -> tuple[list[int], str]:
    params = {"temperature": 0.0, "max_new_tokens": 30, "ignore_eos": True}
    reply = http.post("/generate", json={"input_ids": list(prompt), "sampling_params": params}).json()
    return reply["output_ids"], reply["meta_info"]["weight_version"]


def _cached(http: httpx.Client, prompt: tuple[int, ...]) -> int:
    """Answer the prompt; return how many of its tokens were found in the cache."""
    params = {"temperature": 0.0, "max_new_tokens": 1}
    reply = http.post("/generate", json={"input_ids": list(prompt), "sampling_params": params}).json()
    return reply["meta_info"]["cached_tokens"]


def _answers(http: httpx.Client) -> list[tuple[list[int], str]]:
    return [_answer(http, prompt) for prompt in PROMPTS]


def _num_open(engine: Engine) -> int:
    stats = engine.stats()
    return stats.num_running + stats.num_waiting


def _do(http: httpx.Client, path: str, body: Any = None) -> Any:
    reply = http.post(path, json=body) if body is not None else http.post(path)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_steps_of_an_rl_driver(
    rl: httpx.Client, tiny_target: Target, tiny_head: Head, moved: Path, tmp_path: Path
) -> None:
    """SGLang's: pause, free the device, bring the weights back, update them, bring the cache back, go on; then vLLM's
    to and fro, and the head alone."""
    save_head(tmp_path / "head", tiny_head, tiny_target, dtype="float32", notes={})
    old = _answers(rl)
    assert {version for _, version in old} == {"0"} == {rl.get("/weight_version").json()["weight_version"]}
    assert _do(rl, "/pause_generation", {"mode": "retract"})["success"]
    assert rl.get("/is_paused").json() == {"is_paused": True}
    _do(rl, "/release_memory_occupation", {"tags": ["weights", "kv_cache"]})
    assert_refused(rl.post("/update_weights_from_disk", json={"model_path": str(moved)}))
    assert_refused(rl.post("/continue_generation", json={}))
    assert rl.get("/is_sleeping").json() == {"is_sleeping": True}
    _do(rl, "/resume_memory_occupation", {"tags": ["weights"]})
    body = {"model_path": str(moved), "weight_version": "step-7", "flush_cache": True, "token_step": 7}
    reply = _do(rl, "/update_weights_from_disk", body)
    assert (reply["success"], reply["weight_version"]) == (True, "step-7")
    _do(rl, "/resume_memory_occupation", {})
    assert rl.get("/is_paused").json() == {"is_paused": True}
    _do(rl, "/continue_generation", {})
    new = _answers(rl)
    assert {version for _, version in new} == {"step-7"}
    assert [ids for ids, _ in new] != [ids for ids, _ in old]
    _do(rl, "/sleep?level=1&mode=keep")
    _do(rl, "/wake_up?tags=weights")
    assert rl.get("/is_sleeping").json() == {"is_sleeping": True}
    _do(rl, "/wake_up?tags=kv_cache")
    assert rl.get("/is_paused").json() == {"is_paused": False}
    assert _answers(rl) == new
    _cached(rl, PROMPTS[0])
    for is_cleared in (False, True):
        _do(rl, f"/pause?mode=wait&clear_cache={str(is_cleared).lower()}")
        _do(rl, "/resume")
        assert (_cached(rl, PROMPTS[0]) == 0) == is_cleared
    _do(rl, "/pause?mode=wait&clear_cache=true")
    _do(rl, "/update_weights_from_disk", {"draft_path": str(tmp_path / "head"), "weight_version": "head"})
    _do(rl, "/resume")
    assert _answers(rl) == [(ids, "head") for ids, _ in new]
    _do(rl, "/release_memory_occupation", {"tags": ["kv_cache"]})
    _do(rl, "/update_weights_from_disk", {"model_path": str(tiny_target.folder), "abort_all_requests": True})
    _do(rl, "/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert [ids for ids, _ in _answers(rl)] == [ids for ids, _ in old]


def test_the_steps_of_a_driver_that_calls_vllms_workers(rl: httpx.Client, engine: Engine, moved: Path) -> None:
    """Sleep, weights back, `reload_weights` by a folder, cache back; what is wrong with a call changes nothing; and a
    reset of the prefix cache is one, also of what runs."""
    old = _answers(rl)
    for body, words in (
        ({"method": "update_weights", "kwargs": {"weights_path": str(moved)}}, "'reload_weights'"),
        ({"kwargs": {"weights_path": str(moved)}}, "method is required"),
        ({"method": "reload_weights", "kwargs": {"weights_path": "/no/such"}}, "/no/such"),
        ({"method": "reload_weights", "kwargs": {"weights_path": "x", "weights_iterator": []}}, "weights_iterator"),
        ({"method": "reload_weights", "args": [str(moved)], "kwargs": {"weights_path": "x"}}, "args"),
    ):
        error = assert_refused(rl.post("/collective_rpc", json=body))
        assert words in f"{error['message']} {error['param']}", (body, error)
    assert _answers(rl) == old
    call = {"method": "reload_weights", "args": [], "kwargs": {"weights_path": str(moved)}}
    _do(rl, "/sleep?level=2&mode=keep")
    assert "off the device" in assert_refused(rl.post("/collective_rpc", json=call))["message"]
    _do(rl, "/wake_up?tags=weights")
    reply = rl.post("/collective_rpc", json=call)
    assert (reply.status_code, reply.json()) == (200, {"results": [None]})
    _do(rl, "/wake_up?tags=kv_cache")
    new = _answers(rl)
    assert {version for _, version in new} == {"1"}
    assert [ids for ids, _ in new] != [ids for ids, _ in old]
    assert _cached(rl, PROMPTS[0]) > 0
    assert _do(rl, "/reset_prefix_cache?reset_running_requests=true") == {"status": "ok"}
    assert _cached(rl, PROMPTS[0]) == 0
    assert _answers(rl) == new


def test_a_reload_without_a_folder_reads_the_last_one_again(
    rl: httpx.Client, tiny_target: Target, moved: Path, tmp_path: Path
) -> None:
    """That of the command at first; then the one that any route was given, as its files are now. What is wrong with
    them changes nothing, and leaves it the one to read."""
    old = [ids for ids, _ in _answers(rl)]
    for body in ({"method": "reload_weights"}, {"method": "reload_weights", "args": [], "kwargs": {}}):
        assert _do(rl, "/collective_rpc", body) == {"results": [None]}
    assert _answers(rl) == [(ids, "2") for ids in old]
    folder = tmp_path / "policy"
    shutil.copytree(moved, folder)
    _do(rl, "/update_weights_from_disk", {"model_path": str(folder)})
    new = [ids for ids, _ in _answers(rl)]
    assert new != old
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1])
    assert (
        "model.safetensors" in assert_refused(rl.post("/collective_rpc", json={"method": "reload_weights"}))["message"]
    )
    assert_refused(rl.post("/update_weights_from_disk", json={"model_path": "/no/such"}))
    assert _answers(rl) == [(ids, "3") for ids in new]
    back = to_numpy(tiny_target.params, target_spec(tiny_target.config), "float32")
    write_tensors(folder / "model.safetensors", back)
    _do(rl, "/collective_rpc", {"method": "reload_weights", "kwargs": None})
    assert _answers(rl) == [(ids, "4") for ids in old]


def test_a_promised_tau_is_of_the_weights_that_serve(
    rl: httpx.Client, engine: Engine, tiny_target: Target, tiny_head: Head, moved: Path, tmp_path: Path
) -> None:
    """None after an update of the target or by arrays, which nobody has measured, also after a restart; what its notes
    say of a head from a folder; and that of before where nothing was changed."""
    promised = {"acceptance": {"tau": 1.9, "accept_rate": [0.5]}}
    save_head(tmp_path / "head", tiny_head, tiny_target, dtype="float32", notes=promised)
    targets: list[dict[str, Any]] = [{"target": tiny_target.params}, {"target": str(moved)}]
    folder, arrays = {"draft": str(tmp_path / "head")}, {"draft": tiny_head.params}
    updates = [
        *((update, None) for update in (*targets, arrays, targets[0] | arrays)),
        *((update, 1.9) for update in (folder, targets[0] | folder)),
        ({"draft": {"no": "head"}}, 2.5),
    ]
    for update, tau in updates:
        engine.draft = DraftInfo("mine", 2.5)
        with contextlib.suppress(ConfigError):
            engine.update_weights(**update)
        [_, card] = rl.get("/v1/models").json()["data"]
        assert (engine.draft, card["id"], card["tau"]) == (DraftInfo("mine", tau), "mine", tau), update.keys()
    models = Models("tiny", tiny_target, tiny_head, None, draft=DraftInfo("mine", 2.5), head_acceptance=(0.9,))
    for draft in ("", str(tmp_path / "head")):
        began = launch.with_version(models, "7", str(moved), draft)
        assert (began.draft and began.draft.tau, began.head_acceptance) == (None, ())


APIS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abcdef", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abcdef"}], "max_tokens": 4},
    "/v1/responses": {"input": "abcdef", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "abcdef"}], "max_tokens": 4},
}


def _named(reply: httpx.Response) -> list[Any]:
    """The versions that a reply names, under each name of them."""
    assert reply.status_code == 200, reply.text
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    found = []
    for each in [json.loads(text) for text in events or [reply.text] if text != "[DONE]"]:
        own = each.get("response", each)
        found += [own[name] for name in ("system_fingerprint",) if name in own]
        found += [own["metadata"]["weight_version"]] if "weight_version" in own.get("metadata", {}) else []
    return found


def test_every_reply_names_the_version(rl: httpx.Client, moved: Path, http: httpx.Client) -> None:
    """That of its last token, whole and streamed; the client's own metadata stay. A server whose weights stay names
    none, as its replies have always been."""
    for version in ("0", "step-7"):
        if version != "0":
            _do(rl, "/update_weights_from_disk", {"model_path": str(moved), "weight_version": version})
        for path, body in APIS.items():
            sglangs = 1 + ("completions" in path)
            for options in ({"stream": False}, {"stream": True}):
                reply = rl.post(path, json=body | options)
                check_reply(reply)
                assert _named(reply) == [version] * sglangs, (path, options)
        both = APIS["/v1/completions"] | {"prompt": ["abcdef", "fedcba"], "n": 2}
        assert _named(rl.post("/v1/completions", json=both)) == [version] * 2
        own = rl.post("/v1/responses", json=APIS["/v1/responses"] | {"metadata": {"mine": "1"}}).json()
        assert (own["metadata"], own["system_fingerprint"]) == ({"mine": "1"}, version)
    for path, body in APIS.items():
        for options in ({"stream": False}, {"stream": True}):
            assert _named(http.post(path, json=body | options)) == []


@pytest.fixture
def held(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """`hold_next` of the engine behind the server."""
    return lambda: hold_next(engine, monkeypatch)


def test_an_answer_that_spans_an_update_names_the_last(rl: httpx.Client, moved: Path, held: Callable[[], None]) -> None:
    held()
    body = {"prompt": "abcdef", "max_tokens": 80, "temperature": 0.0, "ignore_eos": True, "stream": True}
    with rl.stream("POST", "/v1/completions", json=body) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
        first = next(lines)
        _do(rl, "/pause?mode=keep")
        assert _do(rl, "/update_weights_from_disk", {"model_path": str(moved)})["num_paused_requests"] == 1
        _do(rl, "/resume")
        *_, last = lines
    assert "system_fingerprint" not in first
    assert json.loads(last.removeprefix("data: "))["system_fingerprint"] == "1"


def test_requests_that_an_update_ends_are_counted(rl: httpx.Client, moved: Path, held: Callable[[], None]) -> None:
    held()
    body = {"prompt": "abcdef", "max_tokens": 80, "temperature": 0.0, "ignore_eos": True, "stream": True}
    with rl.stream("POST", "/v1/completions", json=body) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
        next(lines)
        _do(rl, "/pause?mode=keep")
        change = {"model_path": str(moved), "abort_all_requests": True}
        assert _do(rl, "/update_weights_from_disk", change)["num_paused_requests"] == 1
        *_, last = lines
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    assert rl.get("/is_paused").json() == {"is_paused": True}, "it was paused before"
    _do(rl, "/resume")


ABORTS: dict[str, tuple[str, Any]] = {
    "sglang's pause": ("/pause_generation", {"mode": "abort"}),
    "sglang's abort": ("/abort_request", {"abort_all": True}),
    "sglang's abort of one": ("/abort_request", {"rid": "mine"}),
    "vllm's pause": ("/pause?mode=abort", None),
    "an update": ("/update_weights_from_disk", {"abort_all_requests": True}),
}
OWN = {"temperature": 0.0, "request_id": "mine"}
LONG: dict[str, dict[str, Any]] = {
    "/generate": {
        "text": "abcdef",
        "rid": "mine",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 80, "ignore_eos": True},
    },
    "/v1/completions": {"prompt": "abcdef", "max_tokens": 80, "ignore_eos": True} | OWN,
    "/v1/chat/completions": APIS["/v1/chat/completions"] | {"max_tokens": 80, "ignore_eos": True} | OWN,
    "/v1/responses": APIS["/v1/responses"] | {"max_output_tokens": 80, "ignore_eos": True} | OWN,
    "/v1/messages": APIS["/v1/messages"] | {"max_tokens": 80, "ignore_eos": True} | OWN,
}


def _read(reply: Any) -> tuple[Any, str]:
    """The reason why a reply, or the last event of a stream, ended, and its text."""
    if "meta_info" in reply:
        return reply["meta_info"]["finish_reason"]["type"], reply["text"]
    if "choices" not in reply:
        return (reply.get("response") or reply)["error"]["message"], ""
    [choice] = reply["choices"]
    text = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
    return choice["finish_reason"], text


@pytest.mark.parametrize("path", LONG)
@pytest.mark.parametrize("way", ABORTS)
def test_a_request_that_the_operator_ends_has_what_it_had(
    rl: httpx.Client, engine: Engine, held: Callable[[], None], moved: Path, path: str, way: str
) -> None:
    """Its text is the beginning of the whole answer; one that has not begun has none; and where one is named, others go
    on. APIs that have no word for it say that it has ended."""
    (route, change), other = ABORTS[way], LONG["/generate"] | {"rid": "other"}
    if way == "an update":
        change = change | {"model_path": str(moved)}
    whole = rl.post("/generate", json=other).json()["text"]
    held()
    with (
        ThreadPoolExecutor() as pool,
        rl.stream("POST", path, json=LONG[path] | {"stream": True}) as stream,
    ):
        try:
            lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {"))
            events = [json.loads(next(lines))]
            _do(rl, "/pause?mode=keep")
            late, going = pool.submit(rl.post, path, json=LONG[path]), pool.submit(rl.post, "/generate", json=other)
            wait_until(lambda: _num_open(engine) == 3)
            _do(rl, route, change)
            events += [json.loads(line) for line in lines]
        finally:
            _do(rl, "/resume")
        ends, (other_end, other_text) = [_read(events[-1]), _read(late.result().json())], _read(going.result().json())
    is_named = path in ("/generate", "/v1/completions", "/v1/chat/completions")
    assert [end for end, _ in ends] == [
        "abort" if is_named else "the server's operator has ended it; send it again"
    ] * 2
    assert (other_end, other_text) == (("length", whole) if "one" in way else ("abort", ""))
    if not is_named:
        assert late.result().status_code == 503
        return
    text = ends[0][1] if path == "/generate" else "".join(_read(event)[1] for event in events)
    assert whole.startswith(text)
    assert (bool(text), ends[1][1]) == (True, "")


def test_requests_wait_while_the_server_rests(rl: httpx.Client, moved: Path) -> None:
    expected = _answer(rl, PROMPTS[0])[0]
    _do(rl, "/pause_generation", {"mode": "in_place"})
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(_answer(rl, PROMPTS[0])))
    asking.start()
    asking.join(0.3)
    assert not found
    assert rl.get("/health").status_code == 200
    _do(rl, "/continue_generation", {})
    asking.join(600)
    assert found[0][0] == expected


HOLDS = {"sglang": ("/pause_generation", "/continue_generation"), "vllm": ("/pause?mode=keep", "/resume")}
SLEEPS = {
    "sglang": ("/release_memory_occupation", "/resume_memory_occupation"),
    "vllm": ("/sleep?mode=keep", "/wake_up"),
    "vllm that ends answers": ("/sleep", "/wake_up"),
    "vllm that waits": ("/sleep?mode=wait", "/wake_up"),
}


def test_a_pause_and_a_sleep_end_by_their_own_routes_alone(rl: httpx.Client) -> None:
    """Under any names, and whichever began first: the server goes on when neither is left."""

    def ask(path: str) -> httpx.Response:
        return rl.post(path) if path.partition("?")[0] in VLLMS else rl.post(path, json={})

    def is_paused(path: str) -> bool:
        assert ask(path).status_code == 200
        return rl.get("/is_paused").json()["is_paused"]

    expected = _answers(rl)
    for hold, go_on in HOLDS.values():
        for sleep, wake in SLEEPS.values():
            assert [is_paused(each) for each in (hold, sleep, wake, go_on)] == [True, True, True, False]
            assert [is_paused(each) for each in (sleep, hold, wake, go_on)] == [True, True, True, False]
            assert [is_paused(each) for each in (sleep, wake)] == [True, False]
            assert [is_paused(each) for each in (hold, sleep, sleep, wake)] == [True] * 4
            assert [is_paused(each) for each in (go_on, sleep)] == [False, True]
            assert_refused(ask(go_on))
            assert is_paused(wake) is False
    assert _answers(rl) == expected


def test_what_is_wrong_is_said_and_changes_nothing(rl: httpx.Client, tmp_path: Path) -> None:
    before = _answers(rl)
    for path, body, words in (
        ("/update_weights_from_disk", {"model_path": str(tmp_path)}, "config.json"),
        ("/update_weights_from_disk", {}, "target, those of the draft, or both"),
        ("/update_weights_from_disk", {"model_path": "x", "flush_cache": False}, "flush_cache"),
        ("/update_weights_from_disk", {"model_path": "x", "load_format": "pt"}, "load_format"),
        ("/update_weights_from_disk", {"model_path": ["x"]}, "model_path"),
        ("/pause_generation", {"mode": "wait"}, "mode"),
        ("/release_memory_occupation", {"tags": ["graphs"]}, "tags"),
        ("/pause?mode=retract", None, "expected one of abort, wait, keep"),
        ("/sleep?level=3", None, "expected one of 1, 2, got '3'"),
        ("/sleep?depth=1", None, "unknown option; known are level, mode"),
        ("/wake_up?tags=all", None, "weights, kv_cache"),
        ("/reset_prefix_cache?reset_external=1", None, "expected one of false, true, got '1'"),
    ):
        error = assert_refused(rl.post(path, json=body) if body is not None else rl.post(path))
        assert words in f"{error['message']} {error['param']}", (path, error)
    assert _answers(rl) == before
    assert rl.get("/is_paused").json() == {"is_paused": False}


def test_only_those_with_a_key_may_and_no_other_server_has_the_routes(
    http: httpx.Client, fake_engine: FakeEngine
) -> None:
    for route in ROUTES:
        assert http.post(f"/{route}", json={}).status_code == 404
    words = "--allow-update-weights: whoever may change the weights needs a key"
    assert_needs_a_key(fake_engine, ServeRun(allow_update_weights=True), ROUTES, words)
