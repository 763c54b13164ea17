"""`specserve top` shows what /metrics says, between two readings, of our servers and of vLLM's."""

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import httpx
import numpy as np
import pytest
from fakes import MODEL, FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Series
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from specserve.cli import top
from specserve.cli.main import app
from specserve.cli.scrape import Histogram, Readings, ServerReading, parse
from specserve.cli.top import picture
from specserve.errors import ConfigError
from specserve.eval.client import Client, UnreachableError
from specserve.serve.engine.interface import EngineStats
from specserve.serve.http.transport.server import HttpServer
from specserve.speculative.acceptance import Acceptance

VLLM = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:gpu_cache_usage_perc{engine="1",model_name="m"} 0.25
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 6.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 4.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 6.0
"""


def shown(url: str, watch: Readings, gone: float | None = None) -> str:
    console = Console(file=io.StringIO(), record=True, width=100)
    console.print(picture(url, watch, gone))
    return console.export_text()


def test_a_server_says_what_it_did(server: HttpServer, http: httpx.Client, fake_engine: FakeEngine) -> None:
    """Its own metrics, over HTTP: of three steps for each answer all accept a token at depth 1 and one does at 2."""
    client = Client(server.url)
    before = parse(client.text("/metrics"), 0.0)
    for _ in range(4):
        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 9})
    fake_engine.state = EngineStats(num_pages=40, num_pages_held=10, num_steps_by_speculation={"chain:3": 3, "off": 1})
    try:
        after = parse(client.text("/metrics"), 2.0)
        once = CliRunner().invoke(app, ["top", server.url, "--once", "--interval", "0.1"], env={"COLUMNS": "100"})
    finally:
        fake_engine.state = EngineStats()
        client.close()
    assert (after.model, after.usage, after.pages) == (MODEL, 0.25, 40)
    watch = Readings()
    watch.push(before)
    watch.push(after)
    span = watch.span()
    assert span.acceptance == Acceptance(12, 36, (12, 4))
    assert span.tokens_per_second == pytest.approx(4 * 9 / 2)
    assert span.num_ended == 4
    assert span.steps == {"chain:3": 3, "off": 1}
    assert once.exit_code == 0, once.output
    for said in (MODEL, "chain:3 75%, off 25%", "10 of 40 held", "accepted at depth", "first token"):
        assert said in once.stdout


def test_vllm_is_read_too() -> None:
    """Engines are summed, depths come in any order, and steps are those with drafts."""
    found = parse(VLLM, 0.0)
    assert (found.running, found.usage, found.pages) == (3, 0.375, None)
    assert found.acceptance == Acceptance(10, 0, (6, 3))
    watch = Readings()
    watch.push(replace(found, num_ended=1))
    assert "of steps with draft tokens" in shown("url", watch)
    for text in ("# nothing", "<html>", "a 1\nb{"):
        with pytest.raises(ConfigError, match="/metrics"):
            parse(text, 0.0)


@given(st.lists(st.floats(0, 20), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_lies_in_its_bucket(values: Sequence[float], share: float) -> None:
    bounds, registry = (0.1, 1.0, 5.0, 10.0), CollectorRegistry()
    series = Series("seconds", "of something", buckets=bounds, registry=registry)
    for value in values:
        series.observe(value)
    counts = {
        float(s.labels["le"]): s.value for m in registry.collect() for s in m.samples if s.name.endswith("bucket")
    }
    found = Histogram(counts).quantile(share)
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    low, high = next((low, high) for low, high in itertools.pairwise((0.0, *bounds, math.inf)) if exact <= high)
    assert low <= found <= high
    assert math.isnan(Histogram(counts).since(Histogram(counts)).quantile(share))


def test_a_watch_looks_back_a_minute_and_forgets_a_server_that_began_anew() -> None:
    watch = Readings()
    for second in range(0, 200, 10):
        watch.push(
            ServerReading(time=second, num_tokens=5 * second, num_ended=second, acceptance=Acceptance(second, 0, (1,)))
        )
    span = watch.span()
    assert span.tokens_per_second == 5
    assert span.acceptance.num_steps == 60
    watch.push(ServerReading(time=200, num_tokens=3))
    assert (watch.span().name, watch.span().tokens_per_second) == ("since its start", 0)


def test_a_server_that_goes_away_is_said_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the start, too; what is known of it stays. Ctrl-C ends with status 0, and `--once` does not wait."""
    answers: Iterator[str | BaseException]
    gone, seen = UnreachableError("gone"), []

    def read(_self: Client, _path: str) -> str:
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def note(url: str, watch: Readings, seconds: float | None = None) -> RenderableType:
        seen.append(shown(url, watch, seconds))
        return seen[-1]

    monkeypatch.setattr(Client, "text", read)
    monkeypatch.setattr(top, "picture", note)
    answers = iter([gone, VLLM, gone, VLLM, KeyboardInterrupt()])
    top.top("http://nobody", interval=0.0, once=False, api_key="")
    assert ["waiting for it" in text for text in seen] == [True, False, True, False]
    assert [" 3 running" in text for text in seen] == [False, True, True, True]
    answers = iter([gone])
    with pytest.raises(UnreachableError):
        top.top("http://nobody", interval=0.0, once=True, api_key="")
