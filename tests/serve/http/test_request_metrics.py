"""What a reply reports of its own sequence, and that the counts behind it are true."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from engines import Ask, Reference, greedy, make_engine, serving, submit
from fakes import STORY, FakeEngine

from specserve.serve.engine.interface import EngineStats
from specserve.serve.http.admin.metrics import Metrics
from specserve.serve.http.app import create_app
from specserve.serve.http.openai.replies import RequestMetrics
from specserve.serve.http.transport.server import HttpServer
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import SpeculationStats
from specserve.serve.settings import ServeRun

TIMES = {
    "queue_time_ms": 250.0,
    "time_to_first_token_ms": 500.0,
    "generation_time_ms": 2000.0,
    "mean_itl_ms": 2000.0 / (len(STORY) - 1),
    "tokens_per_second": len(STORY) / 2.5,
}
SUMMARY = {
    "mean_acceptance_length": 7 / 3,
    "draft_acceptance_rate": 4 / 9,
    "acceptance_histogram": [0, 2, 1, 0],
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 4,
    "num_draft_tokens": 9,
    "num_spec_tokens": 3,
}


@pytest.fixture(scope="module")
def telling(fake_engine: FakeEngine) -> Iterator[httpx.Client]:
    run = ServeRun(enable_per_request_metrics=True, per_request_spec_decode_metrics="detailed")
    server = HttpServer(create_app(fake_engine, run=run), port=0)
    server.start()
    with httpx.Client(base_url=server.url) as http:
        yield http
    server.stop()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_reply_reports_what_it_is_asked_for(telling: httpx.Client, http: httpx.Client, path: str) -> None:
    asked = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    body: dict[str, Any] = {**asked}
    steps = {"per_step_accepted": [1, 2, 1], "per_step_drafted": [3, 3, 3]}
    expected = TIMES | {"speculative_decoding": SUMMARY | steps}
    assert telling.post(path, json=body).json()["metrics"] == expected
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [line for line in telling.post(path, json=streamed).iter_lines() if "speculative_decoding" in line]
    assert len(chunks) == 1, "with the usage alone"
    assert httpx.Response(200, text=chunks[0].removeprefix("data: ")).json()["metrics"] == expected
    assert "metrics" not in telling.post(path, json=body | {"n": 2}).json(), "the times of which?"
    assert "metrics" not in http.post(path, json=body).json()


def test_each_flag_tells_its_own() -> None:
    stats = SpeculationStats(*(3, 9, (3, 1)), drafts=((3, 1), (3, 2), (3, 1)), max_accepted=3, decode_seconds=2.0)
    assert RequestMetrics().spell(stats, 9) is None
    assert RequestMetrics(speculation="summary").spell(stats, 9) == {"speculative_decoding": SUMMARY}
    assert set(RequestMetrics(has_times=True).spell(stats, 9) or ()) == set(TIMES)
    alone = RequestMetrics(has_times=True).spell(SpeculationStats(), 1)
    assert alone is not None
    assert (alone["mean_itl_ms"], alone["tokens_per_second"]) == (None, None)
    without = RequestMetrics(speculation="summary").spell(SpeculationStats(5), 6)
    assert without == {"speculative_decoding": None}, "this server does not speculate"


def _totals(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith(("vllm:spec", "specserve:seq"))]
    reported = [line for line in lines if "_per_pos" not in line]
    return {line.split("{")[0].partition(":")[2]: float(line.rpartition(" ")[2]) for line in reported}


def test_counts_of_speculation_are_true(runner: Runner, reference: Reference) -> None:
    """tau by the counters is that of the sequences; a step of plain decoding is no draft, wherever it runs."""
    asks = [Ask((3, 4, 5), greedy(24, ignore_eos=True)), Ask((7, 8), greedy(24, ignore_eos=True, speculation=0))]
    metrics, plain_metrics = Metrics("a", EngineStats), Metrics("b", EngineStats)
    with serving(make_engine(runner)) as engine:
        found = [_watched(metrics, submit(engine, ask)[1]) for ask in asks]
        rounds = engine.stats()
    plain = [_watched(plain_metrics, submit(reference.engine, ask)[1]) for ask in asks]
    for stats in [*found, *plain]:
        accepted = [n for _, n in stats.drafts]
        assert stats.num_draft_tokens == sum(n for n, _ in stats.drafts)
        by_depth = [sum(n > depth for n in accepted) for depth in range(len(stats.accepted_per_depth))]
        assert stats.accepted_per_depth == tuple(by_depth)
    assert found[0].num_drafts == found[0].num_steps > 0 == found[1].num_drafts < found[1].num_steps
    totals = _totals(metrics)
    assert totals["spec_decode_num_drafts_total"] == found[0].num_drafts
    num_drafts, num_cut = totals["spec_decode_num_drafts_total"], totals["sequence_cut_steps_total"]
    gained = totals["spec_decode_num_accepted_tokens_total"] - num_cut
    assert 1 + gained / num_drafts == found[0].tau == found[0].of_drafts.tau == (24 - 1) / num_drafts
    assert num_cut == found[0].num_cut
    assert totals["sequence_steps_total"] == found[0].num_steps + found[1].num_steps
    assert {**_totals(plain_metrics), "sequence_steps_total": 0} == dict.fromkeys(totals, 0)
    assert [stats.max_accepted for stats in (*found, *plain)] == [3, 3, 0, 0]
    assert rounds.num_round_tokens >= sum(len(ask.prompt) for ask in asks) + 2 * 24
    assert sum(rounds.round_sizes) > 0


def _watched(metrics: Metrics, inbox: Any) -> SpeculationStats:
    last = inbox.wait()
    sequence = metrics.start_sequence(2)
    for delta in inbox.deltas:
        sequence.observe(delta)
    assert last.stats is not None
    assert last.stats.queue_seconds >= 0 < last.stats.prefill_seconds
    assert last.stats.decode_seconds > 0
    return last.stats
