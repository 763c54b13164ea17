"""The guard of the server: which clients it answers, for how long, over which connections, and under which id."""

import json
import logging
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import STORY, USER, FakeEngine, assert_refused, assert_serves, wait_for
from fastapi.routing import APIRoute
from fastapi.sse import KEEPALIVE_COMMENT

from specserve.errors import ConfigError
from specserve.serve.http.app import create_app
from specserve.serve.http.transport import connections, guard
from specserve.serve.http.transport.guard import OPEN_PATHS
from specserve.serve.http.transport.keys import VARIABLE, read_api_keys
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.settings import ServeRun

BODY = json.dumps({"prompt": "x"}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
COMPLETION = POST % len(BODY) + BODY


@contextmanager
def _served(engine: FakeEngine, run: ServeRun | None = None, api_keys: Sequence[str] = ()) -> Iterator[httpx.Client]:
    server = HttpServer(create_app(engine, api_keys=api_keys, run=run), run, port=0)
    server.start()
    try:
        with httpx.Client(base_url=server.url, timeout=10) as http:
            yield http
    finally:
        server.stop()


@contextmanager
def _socket(http: httpx.Client, *parts: bytes) -> Iterator[socket.socket]:
    with socket.socket() as raw:
        raw.settimeout(5)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # a client that does not read is soon full
        raw.connect(("127.0.0.1", http.base_url.port))
        for part in parts:
            raw.sendall(part)
        yield raw


def _read(raw: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    return b"".join(iter(lambda: raw.recv(65536), b""))


# --- keys and access -----------------------------------------------------------------------------------------------


def test_every_route_but_the_open_ones_needs_a_key(fake_engine: FakeEngine) -> None:
    app = create_app(fake_engine, api_keys=["a"])
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    assert len(routes) == len(app.routes) > len(OPEN_PATHS)
    with _served(fake_engine, api_keys=["a", "b"]) as http:
        for route in routes:
            for method in [*route.methods, "HEAD", "OPTIONS"]:
                reply = http.request(method, route.path)
                assert (reply.status_code == 401) == (route.path not in OPEN_PATHS), (method, route.path)
        for key, status in {"a": 200, "b": 200, "c": 401, "ab": 401, "a,b": 401}.items():
            assert http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == status


def test_a_key_may_be_in_the_address(fake_engine: FakeEngine) -> None:
    """Drivers of rollouts take addresses and no keys."""
    keys = ["a", "of:colons", "schlüssel"]
    with _served(fake_engine, api_keys=keys) as http:

        def status_of(user: str, password: str) -> int:
            url = http.base_url.copy_with(username=user, password=password).join("/v1/models")
            return httpx.get(url).status_code

        for key in keys:
            assert status_of("anyone", key) == status_of("", key) == 200
        assert status_of("a", "") == 200
        for user, password in [("b", ""), ("a", "b"), ("", "ab"), ("of:colons", "x"), ("b", "a:")]:
            assert status_of(user, password) == 401, (user, password)
        for value in ["Basic", "Basic a", "Basic YTo=x", "Basic YQ", "Digest YTo=", "Bearer YTo="]:
            reply = http.get("/v1/models", headers={"Authorization": value})
            assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer"), value
        for value in ["Basic YTo=", "basic  YTo=", "BASIC YQ=="]:  # "a:", and "a" alone
            assert http.get("/v1/models", headers={"Authorization": value}).status_code == 200, value


def test_keys_come_from_the_flag_a_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n# of ours\n\ntwo \n", "utf-8-sig")
    monkeypatch.setenv(VARIABLE, "three, one,")
    assert read_api_keys(ServeRun(api_key="zero", api_key_file=str(file))) == ("zero", "three", "one", "two")
    monkeypatch.delenv(VARIABLE)
    assert read_api_keys(ServeRun()) == ()
    assert not caplog.text
    read_api_keys(ServeRun(host="0.0.0.0", api_key="a"))
    assert not caplog.text
    read_api_keys(ServeRun(host="0.0.0.0"))
    assert "NO API KEY" in caplog.text
    file.write_text("# none\n")
    for wrong in (file, tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError, match="--api-key-file"):
            read_api_keys(ServeRun(api_key_file=str(wrong)))


def test_other_hosts_are_refused_but_for_probes(fake_engine: FakeEngine) -> None:
    with _served(fake_engine, ServeRun(allowed_hosts=("here.example", "*.below.example", "[::1]"))) as http:
        allowed = ["here.example", "HERE.example:8000", "a.below.example:1", "a.b.below.example", "[::1]:80", "[::1]"]
        refused = ["example", "there.example", "below.example", "xhere.example", "here.example.evil", "", "127.0.0.1"]
        for host in allowed + refused:
            reply = http.get("/v1/models", headers={"Host": host})
            assert (reply.status_code == 200) == (host in allowed), host
            assert http.get("/health", headers={"Host": host}).status_code == 200
        assert assert_refused(http.get("/v1/models"))["code"] == "unknown_host"


def test_pages_of_listed_origins_may_ask(fake_engine: FakeEngine, http: httpx.Client) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    ours, others = {"Origin": "https://a.example"}, {"Origin": "https://b.example"}
    with _served(fake_engine, ServeRun(cors_origins=("https://a.example",)), api_keys=["k"]) as guarded:
        reply = guarded.options("/v1/completions", headers=ours | asks)
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "https://a.example")
        for path in ("/v1/completions", "/v1/messages"):
            assert guarded.options(path, headers=others | asks).status_code == 400
        refused = guarded.get("/v1/models", headers=ours)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")
        assert "access-control-allow-origin" not in guarded.get("/v1/models", headers=others).headers
    assert "access-control-allow-origin" not in http.get("/v1/models", headers=ours).headers


def test_what_changes_something_is_no_get(http: httpx.Client) -> None:
    assert http.post("/flush_cache").status_code == 200
    assert_refused(http.get("/flush_cache"), 405)


def test_head_is_get_without_its_body(http: httpx.Client) -> None:
    for path in ("/health", "/v1/models", "/metrics", "/nowhere", "/v1/completions"):
        get, head = http.get(path), http.head(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers["content-type"] == get.headers["content-type"]


# --- ids -----------------------------------------------------------------------------------------------------------


def test_every_reply_has_an_id_the_clients_own_if_it_sends_one(http: httpx.Client, fake_engine: FakeEngine) -> None:
    made = {http.get(path).headers["x-request-id"] for path in ("/health", "/nowhere", "/v1/models")}
    assert len(made) == 3
    for request_id in ("a", "!~" * 64, "Root=1-67891233-abcdef012345678912345678"):
        reply = http.post("/v1/completions", json={"prompt": "x", "n": 2}, headers={"X-Request-Id": request_id})
        assert reply.headers["x-request-id"] == request_id
        named = [request.request_id for request in fake_engine.requests[-2:]]
        assert named == [f"{request_id}-0", f"{request_id}-1"]
    for wrong in (b"", b"a b", b"a" * 129, "é".encode(), b"a\tb"):
        reply = http.get("/health", headers={"X-Request-Id": wrong})
        assert assert_refused(reply)["param"] == "X-Request-Id"
        assert reply.headers["x-request-id"].encode() != wrong
    twice = httpx.Headers([("X-Request-Id", "a"), ("X-Request-Id", "b")])
    assert_refused(http.get("/health", headers=twice))


def test_the_log_names_what_failed_by_its_id(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        http.post("/v1/completions", json={"prompt": "explode"}, headers={"X-Request-Id": "find-me"})
    assert "find-me-0" in caplog.text


# --- connections ---------------------------------------------------------------------------------------------------


def test_a_client_that_has_closed_its_half_is_answered(http: httpx.Client, fake_engine: FakeEngine) -> None:
    """It reads what it asked for, after interim replies; a client that has left altogether is noticed by these."""
    for prompt in ("x", "paced"):
        body = json.dumps({"prompt": prompt}).encode()
        with _socket(http, POST % len(body) + body) as raw:
            raw.shutdown(socket.SHUT_WR)
            *interim, reply = _read(raw).split(b"HTTP/1.1 ")[1:]
        assert reply.startswith(b"200")
        assert STORY.encode() in reply
        assert all(each.startswith(b"102 ") for each in interim)
    assert interim, "the paced one took a while"
    assert_serves(http)


def test_a_client_that_closes_its_half_of_a_stream_gets_all_of_it(http: httpx.Client, fake_engine: FakeEngine) -> None:
    """Whenever it does; and one that closes all of it is noticed, also where nothing is said."""
    body = json.dumps({"prompt": "paced", "stream": True}).encode()
    with _socket(http, POST % len(body) + body) as raw:
        head = raw.recv(65536)
        assert head.startswith(b"HTTP/1.1 200")
        raw.shutdown(socket.SHUT_WR)
        received = head + _read(raw)
    events = [line.removeprefix(b"data: ") for line in received.split(b"\n") if line.startswith(b"data: {")]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == STORY
    assert b"data: [DONE]\n" in received
    assert KEEPALIVE_COMMENT.strip() in received, "a probe, which clients skip"
    for prompt in ("slow", "slow and silent"):
        body = json.dumps({"prompt": prompt, "stream": True}).encode()
        with _socket(http, POST % len(body) + body) as raw:
            wait_for(lambda: fake_engine.num_active == 1)
            raw.shutdown(socket.SHUT_WR)
            assert raw.recv(65536)
            assert fake_engine.num_active == 1
        wait_for(lambda: fake_engine.num_active == 0)
    assert_serves(http)


def test_requests_that_are_sent_at_once_are_answered_in_turn(http: httpx.Client) -> None:
    asked = [b"x", b"unicode", b"x" * 3000, b"", b"paced"] * 3
    bodies = [b'{"prompt": "%s", "echo": true}' % prompt for prompt in asked]
    with _socket(http, b"".join(POST % len(body) + body for body in bodies), b"GET /no HTTP/1.0\r\n\r\n") as raw:
        replies = _read(raw).split(b"HTTP/1.1 ")[1:]
    assert len(replies) == len(asked) + 1
    for prompt, reply in zip(asked, replies[:-1], strict=True):
        received = json.loads(reply.partition(b"\r\n\r\n")[2])
        if prompt:
            assert received["choices"][0]["text"].startswith(prompt.decode())
        else:
            assert received["error"]["param"] == "prompt"
    assert replies[-1].startswith(b"404")
    assert_serves(http)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"X: y\r\n" * 10_000, 431),
        (b"".join(b"X-%d: y\r\n" % i for i in range(10_000)), 431),
        (b"X: " + b"y" * 100_000 + b"\r\n", 431),
        *[(b"Content-Length: %s\r\n" % wrong, 400) for wrong in (b"-1", b"+5", b"1e3", b"5, 6", b"", b"9" * 30)],
        (b"Content-Length: 5\r\nContent-Length: 6\r\n", 400),
        (b"Transfer-Encoding: gzip, chunked\r\n", 501),
    ],
)
def test_a_head_that_says_too_much_or_nothing_sound_is_refused(http: httpx.Client, head: bytes, status: int) -> None:
    start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with _socket(http) as raw:
        try:
            raw.sendall(start + head + b"\r\n" + BODY)
            received = _read(raw)
        except ConnectionError:  # closed while it was still written to
            received = b""
    assert received or status == 431, "one that is closed before all of it has been written may not hear why"
    if received:
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d" % status)
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
    for operations in http.get("/openapi.json").json()["paths"].values():
        assert all(str(status) in operation["responses"] for operation in operations.values())
    assert_serves(http)


def test_a_length_that_is_not_the_bodys_is_an_error_and_no_other_request(
    http: httpx.Client, fake_engine: FakeEngine
) -> None:
    """Too short: the body is no JSON, and what is left of it no request. Too long: it never comes."""
    num_before = len(fake_engine.requests)
    with _socket(http, POST % (len(BODY) - 1) + BODY + b"\r\n\r\n") as raw:
        replies = _read(raw).split(b"HTTP/1.1 ")[1:]
    assert [reply[:3] for reply in replies] == [b"400", b"400"]
    for reply in replies:
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    with _socket(http, POST % (len(BODY) + 1) + BODY) as raw:
        raw.shutdown(socket.SHUT_WR)
        assert _read(raw) == b""
    assert len(fake_engine.requests) == num_before
    assert_serves(http)


def test_a_connection_that_asks_nothing_more_is_closed(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEP_ALIVE_SECONDS", 1.0)
    with _socket(http, COMPLETION) as raw:
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")
        raw.sendall(COMPLETION)  # in time
        raw.settimeout(3)
        assert b"HTTP/1.1 200" in _read(raw)
    monkeypatch.setattr(connections, "KEEP_ALIVE_SECONDS", 60.0)
    with _socket(http, COMPLETION) as raw:
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")
        raw.settimeout(0.5)
        with pytest.raises(TimeoutError):
            raw.recv(65536)
    assert_serves(http)


def test_protocol_errors_have_the_shape_of_all_others(http: httpx.Client) -> None:
    huge = b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000  # and no end
    malformed = [b"nonsense\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nbad line\r\n\r\n"]
    chunked = (
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    for sent, status in [(huge, 431), *[(each, 400) for each in malformed], (chunked + b"\r\n\r\nzz\r\n", 400)]:
        with _socket(http, sent) as raw:
            head, _, body = _read(raw).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d" % status), sent[:40]
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert_serves(http)


def test_a_body_that_says_it_is_too_large_is_not_waited_for(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MAX_BODY_BYTES", 1000)
    for length in (1001, 10**9):
        with _socket(http, POST % length) as raw:
            assert raw.recv(100).startswith(b"HTTP/1.1 413")
    assert_serves(http)


def test_heads_that_do_not_come_are_not_waited_for(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    with _socket(http) as silent, _socket(http, b"GET /hea") as slow, _socket(http, COMPLETION) as kept:
        assert _read(silent) == b""
        assert _read(slow).startswith(b"HTTP/1.1 408")
        assert kept.recv(65536).startswith(b"HTTP/1.1 200")
        kept.sendall(b"GET /hea")
        assert _read(kept).startswith(b"HTTP/1.1 408")
    monkeypatch.setattr(connections, "HEAD_SECONDS", 60.0)
    assert_serves(http)


def test_who_does_not_read_is_cut_off(
    http: httpx.Client, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.2)
    body = json.dumps(
        {"messages": USER, "ignore_eos": True, "stream": True, "n": 16, "logprobs": True, "top_logprobs": 20}
    )
    head = (POST % len(body)).replace(b"/v1/completions", b"/v1/chat/completions")
    wait_for(lambda: fake_engine.num_active == 0)
    with _socket(http, head + body.encode()):
        wait_for(lambda: fake_engine.num_active > 0)
        wait_for(lambda: all(request.is_cancelled for request in fake_engine.requests[-16:]))
    assert_serves(http)


def test_a_crowd_leaves_room_for_probes(fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "RESERVE", 3)
    with _served(fake_engine, ServeRun(max_connections=2)) as http:
        port = http.base_url.port
        assert http.get("/v1/models").status_code == 200
        others = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        wait_for(lambda: http.get("/v1/models").status_code == 503)
        refused = http.get("/v1/models")
        assert refused.json()["error"]["code"] == "overloaded"
        assert refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) >= 1
        assert http.get("/health").status_code == 200
        others += [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(8)]
        assert others[-1].recv(1) == b"", "more than the reserve"
        for each in others:
            each.close()
        wait_for(lambda: http.get("/v1/models").status_code == 200)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with openssl")
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    command += " -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


def test_tls(fake_engine: FakeEngine, certificate: Path) -> None:
    files: dict[str, Any] = {"ssl_certfile": str(certificate / "cert.pem"), "ssl_keyfile": str(certificate / "key.pem")}
    server = HttpServer(create_app(fake_engine), ServeRun(**files), port=0)
    server.start()
    try:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=files["ssl_certfile"])
        with httpx.Client(base_url=server.url, verify=trusting) as http:
            assert_serves(http)
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(server.url.replace("https", "http") + "/health")
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("cert", "key", "message"),
    [
        ("missing", "", "missing"),
        ("key.pem", "", "cannot serve TLS"),
        ("cert.pem", "cert.pem", "cannot"),
        ("", "key.pem", "needs"),
    ],
)
def test_files_that_make_no_tls_are_refused(certificate: Path, cert: str, key: str, message: str) -> None:
    def path(name: str) -> str:
        return str(certificate / name) if name else ""

    with pytest.raises(ConfigError, match=message):
        HttpServer(None, ServeRun(ssl_certfile=path(cert), ssl_keyfile=path(key)), port=0)  # type: ignore[arg-type]
