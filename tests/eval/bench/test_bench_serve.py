"""`bench serve` and `bench startup`: vLLM's keys, and figures that follow from what the client saw."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from specserve.cli.bench_load import startup_result
from specserve.errors import ConfigError, SpecServeError
from specserve.eval.bench.serve import (
    address_of,
    facts_of,
    load_prompts,
    parse_rate,
    read_counters,
    request_times,
    result_of,
    run_load,
    warm_up,
)
from specserve.eval.bench.server_process import Moment, ServerProcess, serve_flags
from specserve.eval.bench.streams import Streams, stream_body
from specserve.eval.client import Client
from specserve.eval.settings import ServeBenchRun
from specserve.serve.settings import ServeRun
from specserve.speculative.acceptance import Acceptance

# of vllm/benchmarks/serve.py: what its result has for a server that generates and speculates
VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls", "latencies"),
    *("start_times", "queue_times", "generated_texts", "errors", "max_output_tokens_per_s"),
    *("max_concurrent_requests", "rtfx"),
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
    *(f"spec_decode_{name}" for name in ("acceptance_rate", "acceptance_length", "num_drafts", "draft_tokens")),
    *("spec_decode_accepted_tokens", "spec_decode_per_position_acceptance_rates"),
}
PIECES = ("one", " two", " three")


class _Server(BaseHTTPRequestHandler):
    """Streams three pieces of four tokens; refuses every prompt that begins with 666, and is slow with 777."""

    protocol_version = "HTTP/1.1"
    lock, num_open, most_open, num_asked = threading.Lock(), 0, 0, 0
    is_over = threading.Event()

    def log_message(self, *_args: Any) -> None: ...

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "tiny"}]})
        if self.path == "/metrics":
            counts = {"num_drafts": 2, "num_draft_tokens": 6, "num_accepted_tokens": 3}
            lines = [f"vllm:spec_decode_{name}_total {n * self.num_asked}" for name, n in counts.items()]
            for depth, n in enumerate((2, 1)):
                name = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{depth}"}}'
                lines.append(f"{name} {n * self.num_asked}")
            types = [f"# TYPE {line.split(' ')[0].split('{')[0]} counter" for line in lines]
            body = "\n".join(line for pair in zip(types, lines, strict=True) for line in pair) + "\n"
        self._send(200, body)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != "Bearer key":
            return self._send(401, "no key")
        if asked.get("prompt", [0])[0] == 666:
            return self._send(400, "a bad prompt")
        with self.lock:
            _Server.num_open += 1
            _Server.num_asked += 1
            _Server.most_open = max(self.num_open, self.most_open)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        is_chat = self.path.endswith("chat/completions")
        if is_chat:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        if asked.get("prompt", [0])[0] == 777:
            self.is_over.wait(60)
            return None
        for piece in PIECES:
            time.sleep(0.01)
            self._event({"choices": [{"delta": {"content": piece}} if is_chat else {"text": piece}]})
        self._event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}})
        with self.lock:
            _Server.num_open -= 1
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")
        return None

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _send(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


@pytest.fixture
def client() -> Iterator[Client]:
    _Server.num_open = _Server.most_open = _Server.num_asked = 0
    _Server.is_over.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    with Client(f"http://127.0.0.1:{server.server_port}/v1", "key") as client:
        yield client
    server.shutdown()
    server.server_close()
    thread.join()


def test_results_have_vllm_s_keys_and_follow_from_what_was_seen(client: Client) -> None:
    run = ServeBenchRun(dataset_name="random", input_len=3, num_prompts=8, max_concurrency=3, request_rate="400")
    prompts = load_prompts(run)
    assert all(len(prompt) == 3 for prompt in prompts)
    prompts[5] = [666]
    before = read_counters(client)
    seen: list[str] = []
    sent, seconds = run_load(Streams(client), client.first_model(), prompts, run, lambda reply: seen.append(reply.text))
    after = read_counters(client)
    assert before is not None
    assert after is not None
    accepted = after - before
    result = {**facts_of(run, "tiny", client), **result_of(sent, seconds, (99.0,), accepted)}
    assert result.keys() - {"base_url"} == VLLM_KEYS
    json.dumps(result)
    assert (result["completed"], result["failed"], len(seen)) == (7, 1, 8)
    assert "400" in result["errors"][5]
    assert result["generated_texts"] == ["".join(PIECES) if i != 5 else "" for i in range(8)]
    assert result["output_lens"] == [4 if i != 5 else 0 for i in range(8)]
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (7 * 5, 7 * 4)
    for name, total in (("request", 7), ("output", 28), ("total_token", 63)):
        assert result[f"{name}_throughput"] * result["duration"] == pytest.approx(total)
    assert 1 <= result["max_concurrent_requests"] <= 3 >= _Server.most_open
    assert 4 <= result["max_output_tokens_per_s"] <= 28
    good = [i for i in range(8) if i != 5]
    for i in good:
        assert len(result["itls"][i]) == len(PIECES) - 1
        assert result["ttfts"][i] + sum(result["itls"][i]) == pytest.approx(result["latencies"][i])
        assert result["queue_times"][i] >= 0
    latencies = [1e3 * result["latencies"][i] for i in good]
    assert result["p99_e2el_ms"] == pytest.approx(np.percentile(latencies, 99))
    assert result["mean_e2el_ms"] == pytest.approx(np.mean(latencies))
    gaps = [1e3 * gap for i in good for gap in result["itls"][i]]
    assert (result["median_itl_ms"], result["std_itl_ms"]) == pytest.approx((np.median(gaps), np.std(gaps)))
    tpot = [1e3 * (result["latencies"][i] - result["ttfts"][i]) / 3 for i in good]
    assert result["mean_tpot_ms"] == pytest.approx(np.mean(tpot))
    assert accepted == Acceptance(14, 42, (14, 7))
    assert result["spec_decode_acceptance_length"] == accepted.tau == 2.5
    assert result["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5]
    assert result["spec_decode_acceptance_rate"] == 50.0


def test_a_chat_s_first_token_is_its_first_text(client: Client) -> None:
    """Not the piece that tells the role alone."""
    path, body = stream_body("tiny", [{"role": "user", "content": "hi"}], max_tokens=4)
    reply = Streams(client).ask(path, body)
    assert (reply.text, len(reply.arrivals), reply.error) == ("".join(PIECES), 3, "")
    assert reply.ttft > 0.005


def test_requests_come_as_a_poisson_process_of_the_rate() -> None:
    assert request_times(5, parse_rate("inf"), 1.0, 0).tolist() == [0.0] * 5
    times = request_times(4000, 50.0, 1.0, 3)
    gaps = np.diff(times)
    assert (gaps >= 0).all()
    assert times[-1] == pytest.approx(4000 / 50)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.1), "an exponential's"
    assert np.diff(request_times(4000, 50.0, 100.0, 3)).std() < 0.2 * gaps.std(), "evenly"
    assert (request_times(9, 50.0, 1.0, 3) == request_times(9, 50.0, 1.0, 3)).all()
    for text in ("0", "-1", "nan", "fast"):
        with pytest.raises(ConfigError, match=f"--request-rate {text}: expected"):
            parse_rate(text)


def test_a_server_that_does_not_answer_is_said(client: Client) -> None:
    run = replace(ServeBenchRun(), dataset_name="random", num_prompts=2)
    with Client(client.url) as nobody:
        stranger = Streams(nobody)
    with pytest.raises(SpecServeError, match="does not answer: status 401: no key"):
        warm_up(stranger, "tiny", [[1]], run)
    sent, seconds = run_load(stranger, "tiny", [[1], [2]], run)
    with pytest.raises(SpecServeError, match="none of 2 requests was answered, the first with: status 401"):
        result_of(sent, seconds)
    with (
        pytest.raises(ConfigError, match=r"GET http://127.0.0.1:1/v1/models failed .*refused"),
        Client("127.0.0.1:1") as client,
    ):
        client.first_model()
    with pytest.raises(ConfigError, match="is no address of a server"):
        Client("ftp://example.com")


def test_an_interrupt_hangs_up_at_once(client: Client) -> None:
    """Ctrl-C while answers are under way, some of which would take a minute, and others wait for their place."""
    run = ServeBenchRun(num_prompts=6, max_concurrency=2)
    prompts = [[777, i] for i in range(6)]
    begin = time.monotonic()

    def interrupt() -> None:
        while _Server.num_open < 2:
            time.sleep(0.005)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # as a terminal would

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process of the background ignores it
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run_load(Streams(client), "tiny", prompts, run)
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    _Server.is_over.set()
    assert time.monotonic() - begin < 30
    assert _Server.num_asked == 2, "nobody was asked after it"


@pytest.mark.slow
def test_a_server_that_cannot_start_shows_its_last_lines() -> None:
    with (
        ServerProcess(["--draft", "/nowhere"]) as server,
        pytest.raises(SpecServeError, match=r"ended with status 2:[^$]*--draft /nowhere: no such folder"),
    ):
        server.wait_until_ready()


def test_what_would_be_ignored_is_refused() -> None:
    """A server that runs already speculates as it was started."""
    assert address_of(ServeBenchRun()) == ""
    assert address_of(ServeBenchRun(port=9000)) == "http://127.0.0.1:9000"
    assert address_of(ServeBenchRun(host="gpu1", dataset_name="random", input_len=9)) == "http://gpu1:8000"
    assert address_of(ServeBenchRun(draft="ckpt", speculation="chain:3", max_slots=2)) == ""
    for wrong, said in (
        ({"base_url": "http://gpu1:8000", "port": 9000}, "--base-url says it all"),
        ({"port": 9000, "draft": "ckpt"}, "--draft is for a server of its own, and http://127.0.0.1:9000 is one"),
        ({"base_url": "http://gpu1:8000", "max_slots": 16}, "--max-slots is for a server of its own"),
        ({"port": 9000, "max_slots": ServeRun().max_slots}, "--max-slots is for"),  # what it would be by itself
        ({"port": 9000, "speculation": ServeRun().speculation}, "--speculation is for"),
    ):
        with pytest.raises(ConfigError, match=said):
            address_of(ServeBenchRun(**wrong))  # type: ignore[arg-type]
    assert serve_flags("", "", "", 0, 0) == [], "what nobody gave is the server's affair"
    assert serve_flags("x", "", "auto", 8, 0) == ["--target", "x", "--speculation", "auto", "--max-slots", "8"]


def test_starts_are_told_under_vllm_s_keys() -> None:
    def moments(*seconds: float) -> list[Moment]:
        return [Moment(str(i), at, 10) for i, at in enumerate(seconds)]

    result = startup_result({"cold": [moments(10, 11, 60), moments(12, 13, 80)], "warm": [moments(2, 3, 4)]})
    names = [f"{kind}_{what}" for kind in ("cold", "warm") for what in ("startup", "compilation")]
    expected = {key for name in names for key in (f"avg_{name}_time", f"{name}_times", f"{name}_percentiles")}
    assert result.keys() == expected | {"cold_moments", "warm_moments"}
    assert (result["avg_cold_startup_time"], result["cold_compilation_times"]) == (11, [60, 80])
    assert result["cold_startup_percentiles"]["50"] == 11
