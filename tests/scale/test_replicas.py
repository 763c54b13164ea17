"""Replicas on Ray Serve, as a user starts them: their answers are those of one server, a prompt goes where its
beginning is, heads are swapped one replica after the other, and one that is killed takes nobody along."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tiny
from tiny_folder import write_folder

from specserve.checkpoints.load import load_target
from specserve.interop.head import save_head

pytestmark = pytest.mark.scale

PATIENCE = 300  # seconds: what takes longer hangs, however busy the machine is
FLAGS = ["--max-model-len", "256", "--max-slots", "2", "--page-size", "8", "--speculation", "chain:2"]
FLAGS += ["--no-constrained", "--no-early-ready", "--allow-load-draft"]
REPLICA = "ray::ServeReplica:specserve:Engine"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, two heads for it, and a head for another target."""
    folder = tmp_path_factory.mktemp("models")
    found = {"target": write_folder(folder / "target")}
    target = load_target(found["target"], dtype="float32")
    for seed, name in enumerate(("one", "two")):
        found[name] = folder / name
        notes = {"target": str(found["target"])}
        save_head(found[name], tiny.random_head(target.config, seed), target, dtype="float32", notes=notes)
    return found


def _environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"XDG_CACHE_HOME": str(folder), "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    own["RAY_raylet_start_wait_time_s"] = str(PATIENCE)
    return {**os.environ, **own, "XLA_FLAGS": "--xla_backend_optimization_level=0"}  # compiles in half of the time


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def _running(
    words: Sequence[str], port: int, environment: Mapping[str, str], *, is_ours: bool = True
) -> Iterator[tuple[str, psutil.Process]]:
    """A command that serves on this port, from when it is ready to when a signal has ended it, with all its
    processes. Ours end with status 0."""
    command = subprocess.Popen(words, env=environment)
    tree = psutil.Process(command.pid)
    there: list[psutil.Process] = []
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: command.poll() is not None or _status(f"{url}/ready") == 200)
        assert command.poll() is None, "it has ended"
        yield url, tree
        with contextlib.suppress(psutil.NoSuchProcess):  # where a test has ended it
            there = tree.children(recursive=True)
        command.send_signal(signal.SIGTERM)
        assert command.wait(PATIENCE) == 0 or not is_ours
    finally:
        there = there or (tree.children(recursive=True) if tree.is_running() else [])
        if command.poll() is None:
            command.kill()
            command.wait()
        left = psutil.wait_procs(there, timeout=10)[1]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    assert not left, "processes are left behind"


def wait_until(is_so: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.1)


def _status(url: str) -> int:
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.HTTPError:
        return 0


def _words(models: Mapping[str, Path], port: int, *flags: str, command: Sequence[str] = ("serve",)) -> list[str]:
    serve = [sys.executable, "-m", "specserve.cli.main", *command, "--port", str(port)]
    return [*serve, "--target", str(models["target"]), "--draft", str(models["one"]), *FLAGS, *flags]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def bare(models: Mapping[str, Path], cache: Path) -> Iterator[str]:
    port = _free_port()
    with _running(_words(models, port), port, _environment(cache)) as (url, _):
        yield url


@pytest.fixture(scope="module")
def pair(models: Mapping[str, Path], cache: Path, bare: str) -> Iterator[tuple[str, psutil.Process]]:
    """Two replicas, after the bare server has compiled their programs."""
    port = _free_port()
    words = _words(models, port, "--ray", "--replicas", "2", "--replica-resources", "cpu=0.5")
    with _running(words, port, _environment(cache)) as served:
        wait_until(lambda: len(_replicas(served[1])) == 2)
        yield served


def _replicas(tree: psutil.Process) -> dict[int, psutil.Process]:
    found = {}
    for process in tree.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(REPLICA):
                found[process.pid] = process
    return found


def _body(number: int, **changes: Any) -> dict[str, Any]:
    own = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0.0}
    options = {"max_tokens": 24 + number, "ignore_eos": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    return {"prompt": [5 + number, 7, 11, 13 + number] * (number + 1), **own, **options, **changes}


def _tokens(url: str, body: dict[str, Any], on_event: Callable[[], object] = lambda: None) -> list[str]:
    """The tokens of an answer, by their ids, streamed or not."""
    if not body.get("stream"):
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["logprobs"]["tokens"]
    tokens: list[str] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                on_event()
                event = json.loads(line.removeprefix("data: "))
                tokens += [token for choice in event["choices"] for token in choice["logprobs"]["tokens"]]
    return tokens


def _at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return results


def test_answers_are_those_of_one_server(bare: str, pair: tuple[str, psutil.Process]) -> None:
    """Streamed or whole, greedy or drawn, ten at once over two replicas. What one server refuses, replicas refuse in
    the same words."""
    url, _ = pair
    bodies = [_body(number, stream=number % 3 == 0) for number in range(10)]
    expected = [_tokens(bare, body | {"stream": False}) for body in bodies]
    assert all(len(tokens) == body["max_tokens"] for tokens, body in zip(expected, bodies, strict=True))
    assert _at_once([lambda body=body: _tokens(url, body) for body in bodies]) == expected
    for wrong in (_body(1, max_tokens=4000), _body(1, prompt=[10**6]), _body(1, model="another"), {"prompt": 5}):
        ours, theirs = (httpx.post(f"{each}/v1/completions", json=wrong) for each in (url, bare))
        assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json())


def test_a_stream_comes_token_by_token_and_ends_with_its_client(pair: tuple[str, psutil.Process]) -> None:
    url, _ = pair
    body = _body(2, max_tokens=200, stream=True)
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: {")
        assert httpx.get(f"{url}/v1/models").status_code == 200
    wait_until(lambda: _open(url) == 0)


def _open(url: str) -> int:
    return httpx.get(f"{url}/load").json()["server_load"]


def test_a_prompt_goes_where_its_beginning_is(pair: tuple[str, psutil.Process]) -> None:
    """Of eight beginnings each is computed once, whichever replica was asked first."""
    url, _ = pair
    for number in range(8):
        beginning = [20 + number, 3, 9, 27 - number] * 8
        for i in range(4):
            body = {"prompt": [*beginning, 30 + i], "max_tokens": 2, "ignore_eos": True}
            usage = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == (32 if i else 0)


def test_a_head_is_swapped_on_every_replica_or_on_none(
    models: Mapping[str, Path], bare: str, pair: tuple[str, psutil.Process], tmp_path: Path
) -> None:
    url, _ = pair
    body = _body(3)
    expected = _tokens(bare, body)

    def load(folder: Path) -> httpx.Response:
        return httpx.post(f"{url}/v1/load_draft", json={"draft": str(folder)}, timeout=PATIENCE)

    def heads() -> list[str]:
        return [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]][1:]

    assert heads() == ["one"]
    answers = _at_once([lambda: load(models["two"]), *[lambda: _tokens(url, body)] * 6])
    assert answers[0].json()["draft"]["id"] == "two"
    assert answers[1:] == [expected] * 6
    assert heads() == ["two"]
    refused = load(tmp_path / "nowhere")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "draft")
    assert "no such folder" in refused.json()["error"]["message"]
    assert heads() == ["two"]
    assert _tokens(url, body) == expected


def test_a_killed_replica_is_replaced_and_nobody_else_notices(bare: str, pair: tuple[str, psutil.Process]) -> None:
    """Replies that it was in the midst of end with an error; all others come, and the new replica gets the head that
    the others have been given."""
    url, tree = pair
    body = _body(4)
    expected = _tokens(bare, body)
    head = httpx.get(f"{url}/v1/models").json()["data"][1]["id"]
    before = _replicas(tree)
    next(iter(before.values())).kill()
    for _ in range(6):
        assert _tokens(url, body) == expected
    wait_until(lambda: len(_replicas(tree)) == 2 and not set(before) >= set(_replicas(tree)))
    assert httpx.get(f"{url}/v1/models").json()["data"][1]["id"] == head
    assert _tokens(url, body) == expected


def test_a_stop_lets_running_replies_end(bare: str, pair: tuple[str, psutil.Process]) -> None:
    """The last one of these two replicas. Nothing of them is left."""
    url, tree = pair
    there = [tree, *tree.children(recursive=True)]
    bodies = [_body(number, max_tokens=200, stream=True) for number in range(4)]
    expected = [_tokens(bare, body | {"stream": False}) for body in bodies]
    begun = [threading.Event() for _ in bodies]
    calls = [lambda i=i: _tokens(url, bodies[i], begun[i].set) for i in range(4)]
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.extend(_at_once(calls)))
    asking.start()
    assert all(event.wait(PATIENCE) for event in begun)
    tree.send_signal(signal.SIGTERM)
    asking.join(PATIENCE)
    assert answers == expected
    assert not psutil.wait_procs(there, timeout=PATIENCE)[1]


@pytest.mark.slow
def test_the_printed_yaml_deploys_the_same(models: Mapping[str, Path], cache: Path, bare: str, tmp_path: Path) -> None:
    """By Ray's own command, with replicas by load."""
    port, file = _free_port(), tmp_path / "serve.yaml"
    flags = ["--min-replicas", "1", "--max-replicas", "2", "--replica-resources", "cpu=0.5"]
    words = _words(models, port, *flags, command=("serve", "config"))
    file.write_text(subprocess.run(words, env=_environment(cache), check=True, capture_output=True, text=True).stdout)
    run = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", "local", str(file)]
    with _running(run, port, _environment(cache), is_ours=False) as (url, tree):
        assert _tokens(url, _body(5)) == _tokens(bare, _body(5))
        assert len(_replicas(tree)) == 1


def test_more_replicas_than_fit_are_refused(models: Mapping[str, Path], cache: Path) -> None:
    words = _words(models, _free_port(), "--ray", "--replicas", "2", "--replica-resources", "cpu=1000")
    ended = subprocess.run(words, env=_environment(cache), capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2
    assert "2 replicas of 1000 CPU need 2000" in ended.stderr
    assert "Traceback" not in ended.stderr
