"""Spans of OpenTelemetry, as a collector gets them."""

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from fakes import MODEL, STORY, FakeEngine

from specserve.errors import ConfigError
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.http.transport.tracing import Tracing

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    got: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    server.server_close()


def test_a_collector_hears_of_every_sequence(
    fake_engine: FakeEngine, collector: tuple[str, list[tuple[str, bytes]]]
) -> None:
    trace = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    url, got = collector
    with Tracing(url) as tracing:
        server = HttpServer(create_app(fake_engine, tracing=tracing), port=0)
        server.start()
        headers = {"X-Request-Id": "find-me", "traceparent": f"00-{TRACE}-{SPAN}-01"}
        for body in ({"prompt": "hello", "n": 2}, {"prompt": "explode"}):
            httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
        server.stop()
    assert {path for path, _ in got} == {"/v1/traces"}
    requests = [trace.ExportTraceServiceRequest.FromString(raw) for _, raw in got]
    scopes = [scope for each in requests for spans in each.resource_spans for scope in spans.scope_spans]
    spans = [span for scope in scopes for span in scope.spans]
    assert [(span.name, span.trace_id.hex(), span.parent_span_id.hex()) for span in spans] == [
        ("llm_request", TRACE, SPAN)
    ] * 3
    said = [{item.key: _value(item.value) for item in span.attributes} for span in spans]
    for attributes in said[:2]:
        assert attributes["gen_ai.request.id"] == "find-me"
        assert attributes["gen_ai.response.model"] == MODEL
        assert attributes["gen_ai.usage.prompt_tokens"] == 5
        assert attributes["gen_ai.usage.completion_tokens"] == len(STORY)
        assert attributes["gen_ai.latency.time_in_queue"] == 0.25
        assert attributes["specserve.num_accepted_draft_tokens"] == 4
    assert [span.status.code for span in spans] == [0, 0, 2]
    assert all(span.end_time_unix_nano > span.start_time_unix_nano for span in spans)


def _value(value: object) -> object:
    return getattr(value, value.WhichOneof("value"))  # type: ignore[attr-defined]


def test_what_cannot_be_traced_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("localhost:4318", "grpc://localhost:4317", "http://", "x"):
        with pytest.raises(ConfigError, match="expected an address such as"):
            Tracing(wrong)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'specserve\[otlp\]'"):
        Tracing("http://localhost:4318")
