"""Spans of OpenTelemetry, one for each sequence, sent to a collector by OTLP over HTTP. Needs the extra `otlp`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specserve.errors import ConfigError
from specserve.serve.requests.request import Delta, FinishReason, Request

if TYPE_CHECKING:
    from opentelemetry.context import Context

_TRACES_PATH = "/v1/traces"
_NANOSECONDS = 1e9


class Tracing:
    """Sends a span to a collector for every sequence that ends. It is a context manager that sends what is left at its
    end."""

    def __init__(self, endpoint: str) -> None:
        """Connect with the collector at `endpoint`, such as http://localhost:4318. Raises ConfigError where that is no
        address, or where OpenTelemetry is not installed."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--otlp-endpoint {endpoint!r}: expected an address such as http://localhost:4318")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(f"--otlp-endpoint needs OpenTelemetry ({error}): pip install 'specserve[otlp]'") from None
        url = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + _TRACES_PATH
        self._provider = TracerProvider(resource=Resource({SERVICE_NAME: "specserve"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("specserve")

    def __enter__(self) -> Tracing:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._provider.shutdown()

    def parent(self, headers: Mapping[str, str]) -> Context:
        """The span that a request belongs to, by its headers `traceparent` and `tracestate`."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        return TraceContextTextMapPropagator().extract(headers)

    def end(
        self, parent: Context, request_id: str, request: Request, delta: Delta, num_tokens: int, model: str
    ) -> None:
        """Report a sequence whose last delta has come: of so many new tokens, for the client's request of that id."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        seconds = time.monotonic() - request.submit_time
        end = time.time_ns()
        span = self._tracer.start_span(
            "llm_request", parent, SpanKind.SERVER, start_time=end - int(_NANOSECONDS * seconds)
        )
        span.set_attributes(_attributes(request, delta, num_tokens) | {"gen_ai.request.id": request_id})
        span.set_attribute("gen_ai.response.model", model)
        span.set_attribute("gen_ai.latency.e2e", seconds)
        if delta.finish_reason is FinishReason.ERROR:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)


def _attributes(request: Request, delta: Delta, num_tokens: int) -> dict[str, Any]:
    """Return the attributes of a span under vLLM's names, with the acceptance of the draft tokens."""
    params, stats = request.params, delta.stats
    found: dict[str, Any] = {
        "gen_ai.response.finish_reasons": (str(delta.finish_reason),),
        "gen_ai.usage.prompt_tokens": len(request.prompt_ids),
        "gen_ai.usage.completion_tokens": num_tokens,
        "gen_ai.request.max_tokens": request.max_new_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
    }
    if stats is not None:
        found |= {
            "gen_ai.latency.time_in_queue": stats.queue_seconds,
            "gen_ai.latency.time_to_first_token": stats.queue_seconds + stats.prefill_seconds,
            "gen_ai.latency.time_in_model_prefill": stats.prefill_seconds,
            "gen_ai.latency.time_in_model_decode": stats.decode_seconds,
            "specserve.num_cached_tokens": stats.num_cached_tokens,
            "specserve.num_drafts": stats.num_drafts,
            "specserve.num_draft_tokens": stats.num_draft_tokens,
            "specserve.num_accepted_draft_tokens": stats.num_accepted,
        }
    return found
