"""How a server ends: `specserve serve` in a process of its own, with a fake engine, and signals."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import served
from fakes import wait_for

SCRIPT = """
import sys, types
from fakes import FakeEngine

models = types.SimpleNamespace(name="fake")
sys.modules["specserve.serve.launch"] = types.SimpleNamespace(
    Models=None,
    load_beside=None,
    load_models=lambda target, draft, **settings: models,
    make_engine=lambda models, run, on_warmup, leader, watcher: FakeEngine(),
    make_follower=None,
    find_names=None,
    read_tokenizer=None,
)
from specserve.cli.main import main

main()
"""


def _serving(*flags: str) -> AbstractContextManager[tuple[subprocess.Popen[str], httpx.Client]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"}
    command = [SCRIPT, "serve", "--port", "0", *flags]
    return served.started(command, environment, words="with speculation chain:3 ", seconds=20.0, timeout=20)


@contextmanager
def _stream(http: httpx.Client, prompt: str, max_tokens: int) -> Iterator[Iterator[str]]:
    """The data of each event, from the first one on."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as reply:
        yield (line.removeprefix("data: ") for line in reply.iter_lines() if line)


def _wait_for_drain(http: httpx.Client) -> None:
    wait_for(lambda: http.get("/ready").status_code == 503)


def test_after_sigterm_running_replies_end_and_new_ones_are_refused():
    with _serving("--drain-seconds", "60") as (process, http):
        with _stream(http, "paced", max_tokens=60) as events:
            next(events)
            process.send_signal(signal.SIGTERM)
            _wait_for_drain(http)
            process.send_signal(signal.SIGTERM)  # once more changes nothing
            # other connections, too
            refused = httpx.post(f"{http.base_url}/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            assert int(refused.headers["retry-after"]) >= 1
            assert httpx.get(f"{http.base_url}/health").status_code == 200
            *_, last, done = events
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"
        assert process.wait(timeout=10) == 0


def test_what_outlasts_the_drain_gets_an_error():
    with _serving("--drain-seconds", "0.2") as (process, http):
        with _stream(http, "slow", max_tokens=16) as events:
            next(events)
            process.send_signal(signal.SIGINT)
            *_, last, done = events
        assert json.loads(last)["error"] == {
            "message": "the server is stopping",
            "type": "server_error",
            "param": None,
            "code": None,
        }
        assert done == "[DONE]"
        assert process.wait(timeout=10) == 0


def test_a_second_sigint_stops_at_once():
    with _serving("--drain-seconds", "60") as (process, http), _stream(http, "slow", max_tokens=16) as events:
        next(events)
        process.send_signal(signal.SIGINT)
        _wait_for_drain(http)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
        assert time.monotonic() - start < 3


def test_sigterm_while_programs_compile(tmp_path: Path):
    """The real server, from an empty cache: it answers, is asked to stop in the middle of compiling, and just ends."""
    environment = os.environ | {
        "COLUMNS": "200",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    command = [sys.executable, "-m", "specserve.cli.main", "serve", "--port", "0", "--max-slots", "1"]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            [*command, "--max-model-len", "256"], env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            assert process.stdout is not None
            urls = (re.search(r"with speculation auto on (http://[\d.:]+)/v1", line) for line in process.stdout)
            url = next(filter(None, urls))
            with httpx.Client(base_url=url[1], timeout=60) as http:
                wait_for(lambda: served.is_up(http))
                body = {"prompt": "def add(a, b):", "max_tokens": 3, "ignore_eos": True}
                assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
                metrics = http.get("/metrics").text
                left = re.search(r"^specserve:programs_left\{.*\} ([\d.]+)$", metrics, re.MULTILINE)
                assert left is not None
                assert float(left[1]) > 0
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=30) == 0
        finally:
            process.kill()
            process.communicate()
        log.seek(0)
        said = log.read()
    assert "more programs are compiled while serving" in said
    assert not re.search("terminate|Traceback|Fatal|Error", said), said
    others = [
        line for line in said.splitlines() if not re.match(r"[\d-]+ [\d:,]+ (INFO|WARNING) specserve[.\w]*: ", line)
    ]
    assert not others, others  # no library speaks on the terminal, such as transformers without torch
